"""Drafts that go token by token on their own hidden states: EAGLE-3 and MTP.

Row i reads what the target computed for token i beside the embedding of token i + 1, and predicts token i + 2. Beyond
the committed text it reads its own output for the row before ("recycled") in the target's place.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", and
DeepSeek-AI, "DeepSeek-V3 Technical Report" (multi-token prediction).
"""

from collections.abc import Sequence

from ..rows import FEW
from ..sampling import Law
from ..session import Binding, GraphSession, Tensor
from .base import DraftContext, Proposal
from .passes import BoundPass, PassShape, Span
from .reader import DraftParts, RowReader


class Fuse:
    """EAGLE-3: the taps of a row become one row of the draft's width."""

    def __init__(self, session: GraphSession) -> None:
        self._session = session
        (spec,) = session.contract.outputs
        self._width, self._dtype = int(spec.shape[-1]), spec.dtype
        self._bound: dict[int, tuple[Binding, Tensor]] = {}

    def __call__(self, features: Span) -> Span:
        """features [1,T,F] -> fused [1,T,H], valid until the next call of as many rows."""
        rows = features.shape[1]
        binding, fused = self._bound.get(rows) or self._bind(rows)
        binding.bind_input("features", features.tensor, features.shape, features.offset)
        self._session.run(binding)
        return Span(fused, fused.shape)

    def _bind(self, rows: int) -> tuple[Binding, Tensor]:
        """Long stretches are read once in a while; bindings are kept for short ones only."""
        fused = Tensor((1, rows, self._width), self._dtype, self._session.device)
        binding = self._session.binding()
        binding.bind_output("fused", fused, fused.shape)
        if rows <= FEW:
            self._bound[rows] = (binding, fused)
        return binding, fused


class Chain(RowReader):
    """Proposes one token a pass. Rows of drafted tokens leave the cache again: true ones follow from the target."""

    _ahead = 1

    def __init__(self, parts: DraftParts, fuse: Fuse | None) -> None:
        """`fuse` None: the target's rows are read as they are."""
        super().__init__(parts)
        self._fuse = fuse

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Up to k tokens, each drawn after the one before; fewer where the draft's positions end."""
        k = min(k, self._parts.max_positions + 2 - len(committed))  # rows up to len(committed) + k - 3 are run
        rows = self._ready(committed) if k > 0 else 0
        if rows == 0:
            return Proposal()
        found, last = self._run(rows, wanted=True), rows - 1
        self._keep(rows)
        kept, tokens, laws = self._passes.length, [], []
        while True:
            law = self._law(found, last, tokens, context)
            tokens.append(context.draw(law, len(committed) + len(tokens)))
            laws.append(law)
            if len(tokens) == k:
                break
            found, last = self._step(found, last, tokens), 0
        self._passes.rewind_to(kept)
        return Proposal(tuple(tokens), tuple(laws))

    def _law(self, found: BoundPass, row: int, drafted: Sequence[int], context: DraftContext) -> Law:
        (logits,) = self._parts.head.logits(found.outputs, row, 1)
        return self._parts.head.law(logits, drafted, context)

    def _step(self, before: BoundPass, last: int, drafted: Sequence[int]) -> BoundPass:
        """Run the draft on its own row `last` and the token drafted from it; passes take turns with their buffers."""
        recycled = before.outputs["recycled"]  # [S,H]
        width = recycled.shape[-1]
        embeds = self._parts.embedding.embed_tokens(drafted[-1:])
        spans = {
            "fused": Span(recycled, (1, 1, width), last * width),
            "inputs_embeds": Span(embeds, embeds.shape),
        }
        found = self._passes.run(PassShape(0, 1, turn=1 + len(drafted) % 2), spans)
        self._passes.advance(1)
        return found

    def _read(self, rows: int) -> None:
        self._run(rows, wanted=False)

    def _run(self, rows: int, wanted: bool) -> BoundPass:
        """Run pending rows, each beside the committed token that follows."""
        features = self._features(rows)
        following = self._pending.position + 1
        embeds = self._parts.embedding.embed_tokens(self._tokens[following : following + rows])
        spans = {
            "fused": self._fuse(features) if self._fuse is not None else features,
            "inputs_embeds": Span(embeds, embeds.shape),
        }
        return self._passes.run(PassShape(0, rows), spans, wanted)
