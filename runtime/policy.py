"""Decides how many tokens to draft each round, and when to stop drafting. Knows costs and outcomes, not models."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_WINDOW_ROUNDS = 32
_WINDOW_TOKENS = 24  # evidence needed before the window may end speculation
_LONG_CONTEXT = 8  # a free proposal with this much behind it is tried even in Fallback
_PROBE_TOKENS = 2
_FIRST_PROBE = 16
_LAST_PROBE = 256


class State(StrEnum):
    """Where a sequence stands."""

    PREFILL = "prefill"
    SPECULATING = "speculating"
    FALLBACK = "fallback"
    DONE = "done"


class PassCost:
    """Milliseconds of a target pass by its number of rows M, learned while decoding: scale * shape(M).

    The shape begins as 1 + first + slope * (M - 2), and 1 for one row, and learns slowly; the scale follows every pass
    fast. So a busy spell of the machine slows all widths alike and decides nothing, and a width that once looked slow
    is forgotten little by little and tried again.
    """

    _FAST, _SLOW, _FORGET = 0.4, 0.06, 0.003

    def __init__(self, first: float, slope: float) -> None:
        self._first, self._slope = first, slope
        self._shape: dict[int, float] = {}
        self._scale: float | None = None
        self._warm: set[int] = set()

    def observe(self, width: int, milliseconds: float) -> None:
        """Record one pass; the first of each width is discarded, since it pays for bindings and buffers."""
        if width not in self._warm:
            self._warm.add(width)
            return
        shape = self._shape.setdefault(width, self._prior(width))
        scale = self._scale = milliseconds / shape if self._scale is None else self._scale
        milliseconds = min(milliseconds, 2 * scale * shape)  # an outlier says more about the machine than the pass
        scale = self._scale = scale + self._FAST * (milliseconds / shape - scale)
        self._shape[width] = shape + self._SLOW * (milliseconds / scale - shape)
        for other in self._shape:
            if other != width:
                self._shape[other] += self._FORGET * (self._prior(other) - self._shape[other])

    def estimate(self, width: int) -> float:
        """Expected milliseconds of a pass of `width` rows (relative to one row before anything was seen)."""
        return (self._scale or 1.0) * self._shape.get(width, self._prior(width))

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of a one-row pass, when one has been seen."""
        return self.estimate(1) if 1 in self._shape else None

    def _prior(self, width: int) -> float:
        return 1.0 if width <= 1 else 1.0 + self._first + self._slope * (width - 2)


def prior_cost(precision: str) -> PassCost:
    """The cost shape to begin with: int4 verification is bound by compute, float by memory."""
    return PassCost(0.25, 0.30) if precision == "int4" else PassCost(0.10, 0.07)


class AcceptanceEstimate:
    """Probability that one more draft token is kept, by how much context vouches for it.

    The context of the i-th draft token is the drafter's match length plus i: a kept token lengthens the match. Each
    bucket is a Beta estimate whose evidence decays, so it follows the text.
    """

    _EDGES = (1, 2, 3, 5, 7, 11, 15, 31)
    _PRIOR_WEIGHT = 2.0
    _DECAY = 0.97

    def __init__(self, prior: Callable[[int], float]) -> None:
        size = len(self._EDGES) + 1
        self._prior = [prior(edge) for edge in (*self._EDGES, self._EDGES[-1] + 1)]
        self._kept = [0.0] * size
        self._seen = [0.0] * size

    def probability(self, context: int) -> float:
        """Chance that a token with this much context behind it is kept."""
        bucket = self._bucket(context)
        weight = self._PRIOR_WEIGHT
        return (self._kept[bucket] + weight * self._prior[bucket]) / (self._seen[bucket] + weight)

    def observe(self, context: int, kept: bool) -> None:
        """Record one outcome."""
        bucket = self._bucket(context)
        self._kept[bucket] = self._kept[bucket] * self._DECAY + kept
        self._seen[bucket] = self._seen[bucket] * self._DECAY + 1

    def _bucket(self, context: int) -> int:
        for index, edge in enumerate(self._EDGES):
            if context <= edge:
                return index
        return len(self._EDGES)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Bounds of the policy. `adaptive` false drafts `max_k` tokens every round while speculating."""

    max_k: int
    min_acceptance_rate: float
    adaptive: bool = True


class Policy:
    """Chooses k for one sequence and moves it between Speculating and Fallback.

    k maximises expected tokens per millisecond, E(k) / (T(1 + k) + D(k)), with E(k) = 1 + sum of the products of the
    acceptance probabilities; 0 is one of the choices. Proposals that cost nothing (`free`) are also judged in rounds
    that do not use them, so a sequence returns from Fallback as soon as the text becomes predictable; others are
    probed at growing intervals.
    """

    def __init__(self, config: PolicyConfig, cost: PassCost, free: bool) -> None:
        self.config, self.cost, self.free = config, cost, free
        self.state = State.PREFILL
        self.reason = ""
        self._estimate = AcceptanceEstimate(_lookup_prior if free else lambda _: 0.7)
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW_ROUNDS)
        self._draft_ms = 0.0  # per draft token
        self._probe_gap = _FIRST_PROBE
        self._until_probe = _FIRST_PROBE

    def wanted(self, room: int) -> int:
        """How many tokens the drafter should propose this round, at most `room`; 0 saves the draft's cost."""
        most = min(self.config.max_k, room)
        if self.free:
            return most
        if self.state is State.SPECULATING and self.config.adaptive:
            best = self._best(most, 0)
            if best == 0 and most > 0:
                self._enter(State.FALLBACK, "drafts cost more than they save")
            return best
        return self._probe(most) if self.state is State.FALLBACK else most

    def _probe(self, most: int) -> int:
        """A short draft once in a while, to see whether drafting pays again."""
        self._until_probe -= 1
        return min(most, _PROBE_TOKENS) if self._until_probe <= 0 else 0

    def choose(self, available: int, context: int) -> int:
        """How many of the `available` proposed tokens to verify."""
        if not self.free:
            return available  # already paid for
        if self.state is State.FALLBACK and context < _LONG_CONTEXT:
            return 0
        return self._best(available, context) if self.config.adaptive else available

    def record(self, proposed: int, accepted: int, context: int) -> None:
        """Outcome of a round that verified `proposed` tokens."""
        for index in range(min(accepted + 1, proposed)):
            self._estimate.observe(context + index, index < accepted)
        if self.state is State.FALLBACK and accepted and context >= _LONG_CONTEXT:
            self._enter(State.SPECULATING, f"a draft backed by {context} matching tokens was accepted")
        self._recent.append((proposed, accepted))
        self._move()

    def record_unused(self, agreed: bool, context: int) -> None:
        """Whether the first token of an unused proposal was what the target then said."""
        self._estimate.observe(context, agreed)
        self._recent.append((1, int(agreed)))
        self._move()

    def record_draft_cost(self, tokens: int, milliseconds: float) -> None:
        """Time the drafter took to propose."""
        if tokens:
            self._draft_ms += 0.5 * (milliseconds / tokens - self._draft_ms)

    def _best(self, most: int, context: int) -> int:
        best, best_rate, expected, product = 0, 1.0 / self.cost.estimate(1), 1.0, 1.0
        for k in range(1, most + 1):
            product *= self._estimate.probability(context + k - 1)
            expected += product
            rate = expected / (self.cost.estimate(1 + k) + k * self._draft_ms)
            if rate > best_rate:
                best, best_rate = k, rate
        return best

    def _move(self) -> None:
        proposed = sum(entry[0] for entry in self._recent)
        probing = self.state is State.FALLBACK and not self.free
        if proposed < (_PROBE_TOKENS if probing else _WINDOW_TOKENS):
            return
        rate = sum(entry[1] for entry in self._recent) / proposed
        low = self.config.min_acceptance_rate
        if self.state is State.SPECULATING and rate < low:
            self._enter(State.FALLBACK, f"acceptance {rate:.2f} of the last {proposed} draft tokens is under {low:.2f}")
        elif self.state is State.FALLBACK and rate >= low and (self.free or self._pays()):
            self._probe_gap = _FIRST_PROBE
            self._enter(State.SPECULATING, f"acceptance is back at {rate:.2f}")
        elif probing:
            self._probe_gap = min(2 * self._probe_gap, _LAST_PROBE)
            self._until_probe = self._probe_gap
            self._recent.clear()

    def _pays(self) -> bool:
        return not self.config.adaptive or self._best(self.config.max_k, 0) > 0

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._recent.clear()
        self._until_probe = self._probe_gap

    def start(self) -> None:
        """The prompt is in the cache: begin to speculate, or to decode plainly when drafting is off."""
        drafting = self.config.max_k > 0
        self._enter(State.SPECULATING if drafting else State.FALLBACK, "prompt is read" if drafting else "no drafter")

    def finish(self, reason: str) -> None:
        """The sequence is complete."""
        self._enter(State.DONE, reason)


def _lookup_prior(context: int) -> float:
    """Share of first tokens kept by match length, over twenty greedy and sampled SmolLM2 texts and source files."""
    return {1: 0.18, 2: 0.41, 3: 0.48, 5: 0.60, 7: 0.75, 11: 0.83, 15: 0.89, 31: 0.90}.get(context, 0.98)
