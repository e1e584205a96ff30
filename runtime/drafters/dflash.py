"""DFlash: one pass turns the rows of committed tokens into context and fills in a whole block of masks.

After Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BundleError
from ..manifest import NeuralDraft
from ..session import Tensor
from .base import DraftContext, Proposal
from .blocks import Block, BlockReader
from .passes import BoundPass, PassShape, Span
from .reader import DraftParts, RowReader


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A block is the anchor and masks, `size` tokens in all; its row `first` is the first that predicts."""

    size: int
    mask_token: int
    first: int = 1

    @property
    def most(self) -> int:
        """Tokens that a block proposes."""
        return self.size - self.first


def block_plan(name: str, neural: NeuralDraft) -> BlockPlan:
    """The plan of this draft; BundleError where it has no mask token, or a block without a row that predicts."""
    first = 0 if neural.sample_from_anchor else 1
    if neural.mask_token_id is None or neural.block_size <= first:
        raise BundleError(
            f"draft {name!r} needs a mask token and a block of at least {first + 1} tokens, found mask_token_id "
            f"{neural.mask_token_id} and block_size {neural.block_size}; export the bundle again"
        )
    return BlockPlan(neural.block_size, neural.mask_token_id, first)


class DFlash(RowReader):
    """Proposes up to a block of tokens in one pass. The block is always whole, as it was in training."""

    def __init__(self, parts: DraftParts, plan: BlockPlan, reader: BlockReader, hidden_size: int) -> None:
        super().__init__(parts)
        self.plan, self._reader = plan, reader
        self._nothing = Tensor((1, 1, hidden_size), self._passes.dtype, self._passes.device)

    @property
    def most(self) -> int:
        """Tokens that a block proposes."""
        return self.plan.most

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in the draft's own sessions so far; the target's embed and head count with the target."""
        return super().ort_ns + self._reader.ort_ns

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Up to `plan.most` tokens; none where the block does not fit the draft's positions."""
        k = min(k, self.plan.most)
        if k <= 0 or len(committed) - 1 + self.plan.size > self._parts.max_positions:
            return Proposal()
        rows = self._ready(committed)
        if rows == 0:
            return Proposal()
        block = self._fill_in(rows, committed[-1])
        return self._reader.propose(Block(block.outputs, self.plan.first, k), committed, context)

    def _fill_in(self, rows: int, anchor: int) -> BoundPass:
        """Read the pending rows and run the block behind them; only the rows stay in the cache."""
        ids = [anchor] + [self.plan.mask_token] * (self.plan.size - 1)
        embeds = self._parts.embedding.embed_tokens(ids)
        block = self._run(rows, Span(embeds, embeds.shape), wanted=True)
        self._keep(rows)
        return block

    def _read(self, rows: int) -> None:
        """The graph wants a block: one row of zeros costs least, and nobody looks at its output."""
        self._run(rows, Span(self._nothing, self._nothing.shape), wanted=False)

    def _run(self, rows: int, block: Span, wanted: bool) -> BoundPass:
        spans = {"features": self._features(rows), "inputs_embeds": block}
        return self._passes.run(PassShape(rows, block.shape[1]), spans, wanted)
