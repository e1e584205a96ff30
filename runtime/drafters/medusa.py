"""Medusa: heads beside the target's own, each of which guesses a token further behind the anchor, all in one pass.

After Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Only the heads:
what they propose is verified by the loop's exact rules, not by the paper's typical acceptance, which changes the law.
"""

from collections.abc import Sequence

import numpy as np

from ..rows import PassRows
from ..session import Device, GraphSession, Tensor
from .base import DraftContext, Proposal
from .blocks import Block, BlockReader

_CPU = Device("cpu")


class Scored:
    """The scorer of rows that the draft graph itself turned into logits."""

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        """Logits [count,*] of rows first, first + 1, ... of [1,S,*], valid until the next pass."""
        return hidden.read()[0, first : first + count]


class Medusa:
    """Proposes up to one token a head from one row of the target: the one whose scores gave the anchor.

    It keeps nothing else of the text, so it can begin anywhere, and `known` counts all tokens before that one: nobody
    needs their rows again. Where the row is not at hand `known` leaves its token out, and nothing is proposed before
    the next pass.
    """

    free = False
    watches = True

    def __init__(self, name: str, session: GraphSession, reader: BlockReader) -> None:
        self.name = name
        self._session, self._reader = session, reader
        (features,), (rows,) = session.contract.inputs, session.contract.outputs
        self.most = int(rows.shape[1])  # tokens, one a head
        self._features = Tensor((1, 1, int(features.shape[-1])), features.dtype, _CPU)
        device = _CPU if rows.name == "logits" else session.device
        self._output = Tensor((1, self.most, int(rows.shape[-1])), rows.dtype, device)
        self._binding = session.binding()
        self._binding.bind_input(features.name, self._features, self._features.shape)
        self._binding.bind_output(rows.name, self._output, self._output.shape)
        self._length = 0  # tokens observed
        self._start, self._rows = 0, np.empty((0, int(features.shape[-1])), np.float32)  # the rows at hand [n,H]
        self.known = 0

    @property
    def passes(self) -> int:
        """Passes of the draft graph so far."""
        return self._session.runs

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in the draft's own session so far; the target's head counts with the target."""
        return self._session.elapsed_ns + self._reader.ort_ns

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Up to `most` tokens, each from the law of its head."""
        self.observe(committed)
        k = min(k, self.most)
        row = self._row_before_anchor()
        if k <= 0 or row is None:
            return Proposal()
        self._features.write(row)
        self._session.run(self._binding)
        return self._reader.propose(Block({"hidden": self._output}, 0, k), committed, context)

    def watch(self, start: int, rows: PassRows) -> None:
        """Copy the rows that may stand before an anchor once it is known which tokens are kept."""
        first = max(self._length - 2 - start, 0)
        self._start, self._rows = start + first, rows.hidden[first:].copy()
        self._settle()

    def observe(self, committed: Sequence[int]) -> None:
        """Keep the rows of committed tokens; the last of them, the anchor, has none yet."""
        if len(committed) != self._length:
            self._length = len(committed)
            self._void_from(self._length - 1)

    def rewind(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot rewind to {length}: {self._length} tokens were observed")
        self._length = length
        self._void_from(length)

    def reset(self) -> None:
        """Forget everything."""
        self.rewind(0)

    def _void_from(self, position: int) -> None:
        """Rows at this position and behind it are no longer the text's."""
        self._rows = self._rows[: max(position - self._start, 0)]
        self._settle()

    def _settle(self) -> None:
        missing = 1 if self._row_before_anchor() is None else 0
        self.known = max(self._length - 1 - missing, 0)

    def _row_before_anchor(self) -> np.ndarray | None:
        """[H], if it is at hand."""
        place = self._length - 2 - self._start
        return self._rows[place] if 0 <= place < len(self._rows) else None
