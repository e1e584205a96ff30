"""What passes and drafts cost on this machine, as measured, and which k pays at which acceptance.

The model behind the advice is that of Leviathan et al. 2023, section 3: every draft token is kept with the same chance
a once all before it were, so a round of k draft tokens yields 1 + a + ... + a^k tokens.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

_HALVINGS = 40  # of the interval in which a break-even lies


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds by count (rows of a pass, tokens of a draft), measured at some counts and linear in between.

    points: (count, milliseconds), ascending in count, at least one. Below the first point its value holds; past the
        last the last slope goes on, and never falls.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points or any(a[0] >= b[0] for a, b in pairwise(self.points)):
            raise ValueError(f"a cost curve needs points with ascending counts, not {self.points}")
        if any(count < 1 or not 0 <= value < float("inf") for count, value in self.points):
            raise ValueError(f"a cost curve needs counts from 1 and finite milliseconds, not {self.points}")

    @classmethod
    def rising(cls, measured: Mapping[int, float]) -> "CostCurve":
        """The curve through `measured` in which more never costs less.

        Noise only adds to a time, so where a higher count was faster, it is the lower one that was disturbed: every
        count gets the least of its own time and those of all higher ones.
        """
        counts = sorted(measured, reverse=True)
        least = accumulate((measured[count] for count in counts), min)
        return cls(tuple(zip(counts, least, strict=True))[::-1])

    def at(self, count: int) -> float:
        """Milliseconds for `count`."""
        counts = [point[0] for point in self.points]
        index = bisect_left(counts, count)
        if index == 0 or len(counts) == 1:
            return self.points[0][1]
        high = min(index, len(counts) - 1)
        (x0, y0), (x1, y1) = self.points[high - 1], self.points[high]
        slope = (y1 - y0) / (x1 - x0)
        if index == len(counts):
            slope = max(slope, 0.0)
            return y1 + slope * (count - x1)
        return y0 + slope * (count - x0)


FREE = CostCurve(((1, 0.0),))  # of a drafter without a model


def round_ms(target: CostCurve, draft: CostCurve, k: int) -> float:
    """Milliseconds of a round: draft k tokens, verify them with the anchor; a plain step for k = 0."""
    return target.at(1) if k == 0 else target.at(k + 1) + draft.at(k)


def expected_tokens(k: int, acceptance: float) -> float:
    """Tokens a round of k draft tokens yields when each is kept with chance `acceptance` after those before it."""
    return sum(acceptance**power for power in range(k + 1))


def speedup(target: CostCurve, draft: CostCurve, k: int, acceptance: float) -> float:
    """Tokens per millisecond of rounds of k draft tokens, relative to plain decoding."""
    return expected_tokens(k, acceptance) * target.at(1) / round_ms(target, draft, k)


def best_k(target: CostCurve, draft: CostCurve, acceptance: float, most: int) -> int:
    """The k of 0 to `most` that is fastest at this acceptance; the smallest of equals."""
    return max(range(most + 1), key=lambda k: speedup(target, draft, k, acceptance))


def break_even(target: CostCurve, draft: CostCurve, k: int) -> float | None:
    """The acceptance at which rounds of k draft tokens are as fast as plain decoding; None where even 1 is too low."""
    if k < 1:
        raise ValueError(f"a break-even needs k of at least 1, not {k}")
    if speedup(target, draft, k, 1.0) < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(target, draft, k, middle) < 1.0 else (low, middle)
    return high
