"""From the rows of a finished block to a proposal: each row for itself, as DFlash does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..session import Tensor
from .base import DraftContext, Proposal
from .heads import Head


@dataclass(frozen=True, slots=True)
class Block:
    """What a draft graph returned for a block. `first` is its first row that predicts, `k` how many are wanted."""

    outputs: dict[str, Tensor]
    first: int
    k: int


class BlockReader(Protocol):
    """Chooses the tokens of a block."""

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in sessions of its own so far."""
        ...

    def propose(self, block: Block, committed: Sequence[int], context: DraftContext) -> Proposal:
        """At most `block.k` tokens to follow `committed`."""
        ...


class RowByRow:
    """Every row is drawn from its own law, whatever was drawn before it."""

    ort_ns = 0

    def __init__(self, head: Head) -> None:
        self._head = head

    def propose(self, block: Block, committed: Sequence[int], context: DraftContext) -> Proposal:
        """Exactly `block.k` tokens."""
        tokens, laws = [], []
        for logits in self._head.logits(block.outputs, block.first, block.k):
            laws.append(self._head.law(logits, tokens, context))
            tokens.append(context.draw(laws[-1], len(committed) + len(tokens)))
        return Proposal(tuple(tokens), tuple(laws))
