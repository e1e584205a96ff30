"""The embed and head sessions as drafts use them: the target's, of which no copy is made, or a draft's own."""

from collections.abc import Sequence

import numpy as np

from .rows import FEW
from .session import Arena, Binding, Device, GraphSession, Tensor

_CPU = Device("cpu")
_MAX_BINDINGS = 64


class Embedder:
    """Embeds tokens, with buffers of its own beside those of the passes."""

    def __init__(self, session: GraphSession) -> None:
        self._session = session
        (spec,) = session.contract.outputs
        self._width, self._dtype = int(spec.shape[-1]), spec.dtype
        self._bound: dict[int, tuple[Binding, Tensor, Tensor]] = {}

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        """Rows [1,n,H] of the embedding table, valid until the next call with as many ids."""
        binding, tokens, rows = self._bound.get(len(ids)) or self._bind(len(ids))
        tokens.write([list(ids)])
        self._session.run(binding)
        return rows

    def _bind(self, count: int) -> tuple[Binding, Tensor, Tensor]:
        tokens = Tensor((1, count), "int64", _CPU)
        rows = Tensor((1, count, self._width), self._dtype, self._session.device)
        binding = self._session.binding()
        binding.bind_input("input_ids", tokens, tokens.shape)
        binding.bind_output("inputs_embeds", rows, rows.shape)
        if count <= FEW:
            self._bound[count] = (binding, tokens, rows)
        return binding, tokens, rows


class Scorer:
    """Scores hidden states, with buffers of its own beside those of the passes."""

    def __init__(self, session: GraphSession, columns: int) -> None:
        """columns: how many of the logits count; those behind are padding."""
        self._session, self._columns = session, columns
        self._width = int(session.contract.outputs[0].shape[-1])
        self._logits = Arena((self._width,), "float32", _CPU)
        self._bound: dict[tuple[int, tuple[int, ...], int], tuple[Binding, Tensor]] = {}

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        """Logits float32 [count, columns] of rows `first` and up of hidden [1,S,H] or [S,H]; till the next call."""
        if self._logits.reserve(count) or len(self._bound) >= _MAX_BINDINGS:
            self._bound.clear()
        key = (hidden.pointer, hidden.shape, count)
        if key not in self._bound:
            self._bound[key] = self._bind(hidden, count)
        binding, rows = self._bound[key]
        if rows.read()[0] != first:
            rows.write(range(first, first + count))
        self._session.run(binding)
        return self._logits.tensor.read()[:count, : self._columns]

    def _bind(self, hidden: Tensor, count: int) -> tuple[Binding, Tensor]:
        rows = Tensor((count,), "int64", _CPU)
        rows.write(range(count))
        binding = self._session.binding()
        binding.bind_input("hidden", hidden, hidden.shape[-2:])
        binding.bind_input("rows", rows, (count,))
        binding.bind_output("logits", self._logits.tensor, (count, self._width))
        return binding, rows
