"""The target's embed and head sessions as drafts use them: no copy of either table is made for a draft."""

from collections.abc import Sequence

import numpy as np

from .session import Arena, Binding, Device, GraphSession, Tensor

_CPU = Device("cpu")
_MAX_BINDINGS = 64
_KEPT_ROWS = 33


class Ends:
    """Embeds tokens and scores hidden states, with buffers of its own beside the target's."""

    def __init__(self, embed: GraphSession, head: GraphSession, token_count: int) -> None:
        self._embed, self._head, self._token_count = embed, head, token_count
        (rows,) = embed.contract.outputs
        self._width, self._dtype = int(rows.shape[-1]), rows.dtype
        self._vocabulary = int(head.contract.outputs[0].shape[-1])
        self._logits = Arena((self._vocabulary,), "float32", _CPU)
        self._embeds: dict[int, tuple[Binding, Tensor, Tensor]] = {}
        self._heads: dict[tuple[int, tuple[int, ...], int], tuple[Binding, Tensor]] = {}

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        """Rows [1,n,H] of the embedding table, valid until the next call with as many ids."""
        count = len(ids)
        found = self._embeds.get(count) or self._bind_embed(count)
        if count <= _KEPT_ROWS:  # long ones are prompts, each of its own length
            self._embeds[count] = found
        binding, tokens, rows = found
        tokens.write([list(ids)])
        self._embed.run(binding)
        return rows

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        """Logits float32 [count, token_count] of rows `first` and up of hidden [1,S,H] or [S,H]; till the next call."""
        if self._logits.reserve(count) or len(self._heads) >= _MAX_BINDINGS:
            self._heads.clear()
        key = (hidden.pointer, hidden.shape, count)
        if key not in self._heads:
            self._heads[key] = self._bind_head(hidden, count)
        binding, rows = self._heads[key]
        rows.write(range(first, first + count))
        self._head.run(binding)
        return self._logits.tensor.read()[:count, : self._token_count]

    def _bind_embed(self, count: int) -> tuple[Binding, Tensor, Tensor]:
        tokens = Tensor((1, count), "int64", _CPU)
        rows = Tensor((1, count, self._width), self._dtype, self._embed.device)
        binding = self._embed.binding()
        binding.bind_input("input_ids", tokens, tokens.shape)
        binding.bind_output("inputs_embeds", rows, rows.shape)
        return binding, tokens, rows

    def _bind_head(self, hidden: Tensor, count: int) -> tuple[Binding, Tensor]:
        rows = Tensor((count,), "int64", _CPU)
        binding = self._head.binding()
        binding.bind_input("hidden", hidden, hidden.shape[-2:])
        binding.bind_input("rows", rows, (count,))
        binding.bind_output("logits", self._logits.tensor, (count, self._vocabulary))
        return binding, rows
