"""What passes and drafts cost on this machine, as measured: a curve from a count to milliseconds."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


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
