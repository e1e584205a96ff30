"""Pure stand-ins for the units the loop is made of: a target whose logits depend on every token it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.sampling import Law
from oxidize.runtime.target import Rows

Rule = Callable[[Sequence[int], int], np.ndarray]  # (context, vocabulary) -> logits [V]


def hashed_logits(context: Sequence[int], vocabulary: int) -> np.ndarray:
    """Logits that depend on the whole context: any token wrongly kept or lost changes them."""
    state = 1469598103
    for token in context:
        state = ((state ^ (token + 1)) * 1099511628211) % (1 << 61)
    return np.random.default_rng(state).normal(0, 1.5, vocabulary).astype(np.float32)


def cyclic_logits(context: Sequence[int], vocabulary: int) -> np.ndarray:
    """Logits of a text that repeats itself, so that lookups pay."""
    logits = np.zeros(vocabulary, np.float32)
    logits[(len(context) * 7) % min(vocabulary, 5)] = 8.0
    return logits


@dataclass
class FakeCache:
    """Token rows per slot; rewinding leaves stale rows behind, as the real cache does."""

    slots: int
    rows: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.slots)]
        self.lengths = [0] * self.slots

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        length = self.lengths[slot]
        self.rows[slot][length : length + len(tokens)] = tokens
        self.lengths[slot] += len(tokens)

    def wipe(self, slot: int) -> None:
        self.rows[slot].clear()
        self.lengths[slot] = 0

    def rewind_to(self, slot: int, length: int) -> None:
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"rewind_to({slot}, {length})")
        self.lengths[slot] = length


class FakeTarget:
    """A language model given by a rule over the tokens really in its cache."""

    def __init__(
        self, vocabulary: int = 13, rule: Rule = hashed_logits, slots: int = 1, context: int = 4096, floor: int = 1
    ) -> None:
        self.vocabulary, self.rule, self.context, self.floor = vocabulary, rule, context, floor
        self.token_count = vocabulary
        self.cache = FakeCache(slots)
        self.passes = 0
        self.widths: list[int] = []

    def ort_ns(self) -> dict[str, int]:
        return {}

    def held(self, slot: int) -> list[int]:
        return self.cache.rows[slot][: self.cache.lengths[slot]]

    def forward(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        self.passes += 1
        result = []
        for request in requests:
            self.widths.append(len(request.tokens))
            before = self.cache.lengths[request.slot]
            assert before + len(request.tokens) <= self.context, "the loop ran past the context"
            self.cache.write(request.slot, request.tokens)
            held = self.cache.rows[request.slot]
            ends = range(before + len(request.tokens) - request.wanted, before + len(request.tokens))
            rows = [self.rule(held[: end + 1], self.vocabulary) for end in ends]
            result.append(np.array(rows, np.float32).reshape(request.wanted, self.vocabulary))
        return result


class FakeDraft:
    """A drafter that draws from a law of its own: the target's, blended with noise to taste."""

    name = "fake"
    free = False
    watches = False
    known = 0
    most = None
    passes = 0
    ort_ns = 0

    def __init__(self, law_of_context: Callable[[Sequence[int]], Law], certain: bool = False) -> None:
        self._law, self._certain = law_of_context, certain
        self.observed: list[int] = []

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        tokens: list[int] = []
        laws: list[Law] = []
        for index in range(k):
            law = self._law([*committed, *tokens])
            tokens.append(context.draw(law, len(committed) + index))
            laws.append(law)
        return Proposal(tuple(tokens), None if self._certain else tuple(laws), match_length=9)

    def observe(self, committed: Sequence[int]) -> None:
        assert list(committed[: len(self.observed)]) == self.observed, "committed tokens were changed"
        self.observed = list(committed)

    def rewind(self, length: int) -> None:
        del self.observed[length:]

    def reset(self) -> None:
        self.rewind(0)


class OracleDrafter(FakeDraft):
    """Proposes the target's own greedy continuation, wrong from a chosen index on."""

    def __init__(self, target: FakeTarget, wrong_from: int) -> None:
        self._target, self._wrong_from = target, wrong_from
        super().__init__(self._greedy, certain=True)

    def _greedy(self, context: Sequence[int]) -> Law:
        return Law.one_hot(int(self._target.rule(context, self._target.vocabulary).argmax()))

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        tokens: list[int] = []
        for index in range(k):
            right = int(self._target.rule([*committed, *tokens], self._target.vocabulary).argmax())
            wrong = (right + 1) % self._target.vocabulary
            tokens.append(right if index < self._wrong_from else wrong)
        return Proposal(tuple(tokens), match_length=9)
