"""What the policy believes: the cost of a pass, the cost of a draft, and the chance that a draft token is kept."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from .costs import CostCurve


class PassCost:
    """Milliseconds of a target pass by its number of rows M, followed while decoding: scale * shape(M).

    The shape begins as the prior and learns slowly; the scale follows every pass fast. So a busy spell of the machine
    slows all widths alike and decides nothing, and a width that once looked slow is forgotten little by little and
    tried again.

    prior: a CostCurve holds milliseconds, as calibrated on this machine; a function holds the shape alone, relative to
        one row, and the milliseconds are known from the first counted pass on.
    """

    _FAST, _SLOW, _FORGET = 0.4, 0.06, 0.003

    def __init__(self, prior: Callable[[int], float] | CostCurve) -> None:
        self._prior: Callable[[int], float] = prior.at if isinstance(prior, CostCurve) else prior
        self._calibrated = isinstance(prior, CostCurve)
        self._slow = self._SLOW / 3 if self._calibrated else self._SLOW  # what was measured is known better
        self._scale = 1.0
        self._base: list[float] = []  # [M - 1], the prior's
        self._shape: list[float] = []  # [M - 1], learned
        self._seen: set[int] = set()
        self._warm: set[int] = set()
        self.known = self._calibrated

    def observe(self, width: int, milliseconds: float) -> None:
        """Record one pass; the first of each width is discarded, since it pays for bindings and buffers."""
        if width in self._warm and milliseconds > 0:
            self._learn(width, milliseconds)
        self._warm.add(width)

    def estimate(self, width: int) -> float:
        """Expected milliseconds of a pass of `width` rows (relative to one row until `known`)."""
        return self.table(width)[-1]

    def table(self, widths: int) -> list[float]:
        """Expected milliseconds of passes of 1 to `widths` rows."""
        while len(self._shape) < widths:
            self._base.append(self._prior(len(self._base) + 1))
            self._shape.append(self._base[-1])
        scale = self._scale
        return [scale * shape for shape in self._shape[:widths]]

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of a one-row pass, when one has been seen or calibrated."""
        return self.estimate(1) if 1 in self._seen or self._calibrated else None

    def _learn(self, width: int, milliseconds: float) -> None:
        self.table(width)
        shape = self._shape[width - 1]
        if not self.known:
            self._scale, self.known = milliseconds / shape, True
        milliseconds = min(milliseconds, 2 * self._scale * shape)  # an outlier says more about the machine
        self._scale += self._FAST * (milliseconds / shape - self._scale)
        for other in self._seen:
            self._shape[other - 1] += self._FORGET * (self._base[other - 1] - self._shape[other - 1])
        self._shape[width - 1] = shape + self._slow * (milliseconds / self._scale - shape)
        self._seen.add(width)


def prior_cost(precision: str) -> PassCost:
    """The cost shape to begin with: int4 verification is bound by compute, float by memory."""
    first, slope = (0.25, 0.30) if precision == "int4" else (0.10, 0.07)
    return PassCost(lambda width: 1.0 if width <= 1 else 1.0 + first + slope * (width - 2))


class DraftCost(PassCost):
    """Milliseconds of proposing k tokens, from a calibrated curve, or else a fifth of a pass a token to begin with."""

    _SLOW = 0.15
    _GUESS = 0.2

    def __init__(self, curve: CostCurve | None) -> None:
        super().__init__(curve if curve is not None else float)

    def observe(self, width: int, milliseconds: float) -> None:
        """Record the time `width` tokens took."""
        if milliseconds > 0:
            self._learn(width, milliseconds)

    def table_or_guess(self, most: int, target: PassCost) -> list[float]:
        """Expected cost of proposing 1 to `most` tokens, in the unit of the target's table."""
        if self.known and target.known:
            return self.table(most)
        return [self._GUESS * target.estimate(1) * k for k in range(1, most + 1)]


class _Chances:
    """Chances that a draft token is kept, one for each of several cells, each at several memories at once.

    A cell holds decayed counts of outcomes for each memory; the memories are weighted by how well each foretold the
    outcomes lately (a mixture of experts with a share for all, Herbster and Warmuth 1998). On steady text the long
    memory rules, whose estimate is precise; when the text changes the short one takes over within a few outcomes.
    """

    _MEMORIES = (10.0, 50.0, 250.0)  # rounds
    _SHARE = 0.01
    _TRUST = (0.1, 0.3, 0.6)
    _START = 4.0  # outcomes that what is believed at first counts for; forgotten like any others
    _PRIOR_WEIGHT = 1.0

    def __init__(self, beliefs: Sequence[float], cells: int) -> None:
        weights = [self._START] * len(beliefs) + [0.0] * (cells - len(beliefs))
        hits = [self._START * belief for belief in beliefs] + [0.0] * (cells - len(beliefs))
        self._kept = [list(hits) for _ in self._MEMORIES]
        self._seen = [list(weights) for _ in self._MEMORIES]
        self._weights = list(self._TRUST)
        self.touched = 1  # cells up to here have evidence

    def chance(self, cell: int, prior: float) -> float:
        """Of a token in `cell`; `prior` is what is expected without evidence."""
        weight, total = self._PRIOR_WEIGHT, 0.0
        for share, kept, seen in zip(self._weights, self._kept, self._seen, strict=True):
            total += share * (kept[cell] + weight * prior) / (seen[cell] + weight)
        return total

    def observe(self, cell: int, prior: float, kept: bool) -> None:
        """Record one outcome."""
        self.touched = max(self.touched, cell + 1)
        weight, total = self._PRIOR_WEIGHT, 0.0
        for index, (hits, seen) in enumerate(zip(self._kept, self._seen, strict=True)):
            chance = (hits[cell] + weight * prior) / (seen[cell] + weight)
            self._weights[index] *= chance if kept else 1 - chance
            total += self._weights[index]
            hits[cell] += kept
            seen[cell] += 1
        keep = (1 - self._SHARE) / total
        self._weights = [
            keep * weight + self._SHARE * trust for weight, trust in zip(self._weights, self._TRUST, strict=True)
        ]

    def age(self, first: int, last: int) -> None:
        """Let the evidence in the cells from `first` to before `last` grow older by one round."""
        for memory, hits, seen in zip(self._MEMORIES, self._kept, self._seen, strict=True):
            decay = 1 - 1 / memory
            hits[first:last] = [value * decay for value in hits[first:last]]
            seen[first:last] = [value * decay for value in seen[first:last]]


class ByPosition:
    """Chance that the i-th draft token is kept once those before it were: for drafters that compute.

    Without evidence a position is thought to be like the one before it, so a longer draft is tried when the last token
    of the shorter one does well.
    """

    def __init__(self, prior: float, most: int) -> None:
        self._prior, self._cells = 0.5, _Chances([prior], most)
        self._cached: list[float] = []
        self._most = most

    def chances(self, count: int, match_length: int = 0) -> list[float]:
        """Of the first `count` tokens, each given those before."""
        if not self._cached:
            last = self._prior
            for cell in range(self._cells.touched):
                last = self._cells.chance(cell, last)
                self._cached.append(last)
            self._cached += [last] * (self._most - len(self._cached))
        return self._cached[:count]

    def record(self, proposed: int, accepted: int, match_length: int = 0) -> None:
        """A verified proposal."""
        prior = self._prior
        self._cells.age(0, self._cells.touched)
        for cell in range(min(accepted + 1, proposed, self._most)):
            self._cells.observe(cell, prior, cell < accepted)
            prior = self._cells.chance(cell, prior)
        self._cached = []


class ByContext:
    """Chance that one more draft token is kept, by how much context vouches for it: for lookups.

    The context of the i-th draft token is the match length plus i: a kept token lengthens the match.
    """

    _EDGES = (1, 2, 3, 5, 7, 11, 15, 31)
    # Share of first tokens kept by match length, over twenty greedy and sampled SmolLM2 texts and source files.
    _PRIORS = (0.18, 0.41, 0.48, 0.60, 0.75, 0.83, 0.89, 0.90, 0.98)

    def __init__(self) -> None:
        self._cells = _Chances(self._PRIORS, len(self._PRIORS))
        self._cached = list(self._PRIORS)
        self._cell_of = [
            0,
            *(cell for cell, (low, high) in enumerate(pairwise((0, *self._EDGES))) for _ in range(low, high)),
        ]

    def chances(self, count: int, match_length: int) -> list[float]:
        """Of the first `count` tokens, each given those before."""
        cached, last = self._cached, len(self._EDGES)
        cells = self._cell_of[match_length : match_length + count]
        return [cached[cell] for cell in cells] + [cached[last]] * (count - len(cells))

    def record(self, proposed: int, accepted: int, match_length: int) -> None:
        """A verified proposal."""
        for index in range(min(accepted + 1, proposed)):
            context = match_length + index
            cell = self._cell_of[context] if context < len(self._cell_of) else len(self._EDGES)
            self._cells.age(cell, cell + 1)
            self._cells.observe(cell, 0.5, index < accepted)
        self._cached = [self._cells.chance(cell, 0.5) for cell in range(len(self._PRIORS))]


def expected_kept(chances: Sequence[float]) -> float:
    """Expected number of draft tokens kept, by the chance of each given those before."""
    total, product = 0.0, 1.0
    for chance in chances:
        product *= chance
        total += product
    return total
