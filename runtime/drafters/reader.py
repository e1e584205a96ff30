"""What drafters that read the target's rows share: which rows were read, which wait, which are void.

Such a draft keeps keys and values of the target's rows and guesses from them what follows the anchor. It reads every
committed row once; what its cache holds of drafted tokens is dropped after each round.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..rows import FEW, PassRows
from .base import DraftContext, Proposal
from .heads import Embedding, Head
from .passes import DraftPasses, Span
from .pending import PendingRows

CHUNK = 512  # rows that wait before they are read without a proposal

Pick = Callable[[PassRows], Sequence[np.ndarray]]  # the parts [n,*] that side by side are the rows the draft reads


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What a drafter of this kind is made of. max_positions: rows from there on are neither read nor made."""

    name: str
    passes: DraftPasses
    pending: PendingRows
    pick: Pick
    embedding: Embedding
    head: Head
    max_positions: int


class RowReader(ABC):
    """A drafter that copies the target's rows as they come and reads those that are kept."""

    free = False
    watches = True
    most = None
    _ahead = 0  # tokens behind a row's own that reading it needs

    def __init__(self, parts: DraftParts) -> None:
        self.name = parts.name
        self._parts, self._passes, self._pending = parts, parts.passes, parts.pending
        self._tokens: list[int] = []  # observed
        self.known = 0

    @property
    def passes(self) -> int:
        """Passes of the draft graph so far."""
        return self._passes.passes

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in the draft's own sessions so far; the target's embed and head count with the target."""
        return self._passes.ort_ns

    @abstractmethod
    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Propose at most k tokens to follow `committed`."""

    @abstractmethod
    def _read(self, rows: int) -> None:
        """Run the next pending rows through the draft, for its cache alone."""

    def watch(self, start: int, rows: PassRows) -> None:
        """Copy the rows of a pass of the target; those behind the first committed one that is missing are of no use."""
        if start > self.known:
            return
        self._void_from(start)
        parts = self._parts.pick(rows)
        count = len(parts[0])
        self.known = start + count
        fitting = min(count, self._parts.max_positions - start)
        if fitting > 0:
            self._pending.append(start, parts if fitting == count else [part[:fitting] for part in parts])
        self._catch_up()

    def observe(self, committed: Sequence[int]) -> None:
        """Keep the rows of committed tokens; the last of them, the anchor, has none yet."""
        if len(committed) == len(self._tokens):
            return
        self._tokens.extend(committed[len(self._tokens) :])
        self._void_from(len(self._tokens) - 1)
        self._catch_up()

    def rewind(self, length: int) -> None:
        """Forget what follows the first `length` tokens, and rows that were read beside what followed."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot rewind to {length}: {len(self._tokens)} tokens were observed")
        del self._tokens[length:]
        self._void_from(max(length - self._ahead, 0))

    def reset(self) -> None:
        """Forget everything."""
        self.rewind(0)
        self._passes.cache.wipe(0)

    def _void_from(self, position: int) -> None:
        """Rows at this position and behind it are no longer the text's."""
        if position >= self.known and position >= self._passes.length:
            return
        self._pending.drop_from(position)
        self._passes.rewind_to(position)
        self.known = min(self.known, position)

    def _catch_up(self) -> None:
        """Read what is committed for certain before too much of it waits."""
        while self._pending.before(len(self._tokens) - 1) >= CHUNK:
            self._take(CHUNK)

    def _take(self, rows: int) -> None:
        self._read(rows)
        self._keep(rows)

    def _keep(self, rows: int) -> None:
        """The next pending rows were read, and stay in the cache."""
        self._passes.advance(rows)
        self._pending.advance(rows)

    def _ready(self, committed: Sequence[int]) -> int:
        """How many rows are left for the pass that proposes, at least one; 0 where the last row is not to be had."""
        self.observe(committed)
        if len(committed) < 2 or self.known != len(committed) - 1:
            return 0
        if len(self._pending) == 0:  # proposing once more, or all was read as it came
            if not self._pending.step_back():
                return 0
            self._passes.rewind_to(self.known - 1)
        backlog = len(self._pending) - 1 if len(self._pending) > FEW else 0
        for start in range(0, backlog, CHUNK):
            self._take(min(CHUNK, backlog - start))
        return len(self._pending)

    def _features(self, rows: int) -> Span:
        """The next pending rows [1,rows,F]."""
        pending = self._pending
        return Span(pending.tensor, (1, rows, pending.tensor.shape[1]), pending.offset)
