"""What takes the times of a calibration: one meter for each thing that costs something, by count.

A meter leaves what it times as it was. It counts no first times, which pay for bindings and buffers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter

import numpy as np

from .calibration_store import Measurement
from .costs import CostCurve
from .drafters.base import DraftContext, Drafter
from .noise import NoiseKey
from .sampling import SamplingParams
from .target import Rows, Target

_CONTEXT = 200  # rows in the cache behind a timed pass
_TARGET_WIDTHS = (1, 2, 4, 8)
_FURTHER_WIDTHS = (16, 3, 6, 12, 24, 32)  # by importance
_DRAFT_WIDTHS = (1, 2)
_PROPOSED = (1, 8)  # tokens of a proposal; far apart, because a block costs nearly the same for any
_FURTHER_PROPOSED = (4, 2)
_KEPT = 2  # rows that a round leaves to be read: the anchor's and one draft token's

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds it took to measure, and the share of waiting, see `Calibration`."""

    seconds: float
    waited: float


class Meter(ABC):
    """Times one thing, and remembers the times by width: the rows of a pass, or the tokens of a proposal.

    further: widths worth adding to `widths` where there is time. context: rows in the cache behind what is timed.
    """

    context = 0
    _overhead = 0.0  # milliseconds that a timing takes beside what is timed

    def __init__(self, widths: Sequence[int], further: Sequence[int], clock: Clock) -> None:
        self.widths, self.further, self._clock = list(widths), list(further), clock
        self._first: dict[int, float] = {}
        self._times: dict[int, list[float]] = {}

    def start(self) -> None:
        """Once for what the first of a process pays for. It counts nowhere."""
        self._time(min(self.widths))

    def warm_up(self, width: int) -> None:
        """The first of a width pays for its bindings; it counts only where time was left for no other."""
        self._first[width] = self._time(width)

    def run(self, width: int) -> None:
        """Once, and it counts."""
        self._times.setdefault(width, []).append(self._time(width))

    def expected(self, width: int) -> float:
        """Milliseconds the next `run` will take: as many as the last, or a guess from other widths."""
        if width in self._times:
            return self._overhead + self._times[width][-1]
        return self._overhead + (self._first[width] if width in self._first else self._curve().at(width))

    def result(self, effort: Effort, budget_s: float) -> Measurement:
        """What was measured, with this effort of the `budget_s` seconds allowed."""
        rows, ms = zip(*self._curve().points, strict=True)
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        return Measurement(rows, ms, moment, effort.seconds, budget_s, self.context, effort.waited)

    def _curve(self) -> CostCurve:
        quartiles = {width: float(np.quantile(times, 0.25)) for width, times in self._times.items()}
        return CostCurve.rising(self._first | quartiles)

    @abstractmethod
    def _time(self, width: int) -> float:
        """Milliseconds that this width takes, once."""


class PassMeter(Meter):
    """Times passes of a model, behind whatever its slot 0 holds."""

    def __init__(self, model: Target, is_target: bool, clock: Clock = perf_counter) -> None:
        self._model, self._start = model, model.cache.lengths[0]
        room = model.context - self._start
        base, further = (_TARGET_WIDTHS, _FURTHER_WIDTHS) if is_target else (_DRAFT_WIDTHS, ())
        super().__init__([w for w in base if w <= room], [w for w in further if w <= room], clock)
        free = min(model.context, model.cache.capacity) - self._start
        self.context = max(0, min(_CONTEXT, free - max([*self.widths, *self.further])))

    def _time(self, width: int) -> float:
        """Milliseconds of one pass of `width` rows, all scored and then taken back.

        The rows before it are only declared to be there: what a cache holds makes no difference to its cost, and a
        prefill would take longer than all that is measured.
        """
        model = self._model
        tokens = _some_tokens(width, model)
        model.cache.advance(0, self.context)
        try:
            begin = self._clock()
            model.forward([Rows(0, tokens, width)])
            return 1e3 * (self._clock() - begin)
        finally:
            model.cache.rewind_to(0, self._start)


class ProposalMeter(Meter):
    """Times proposals of a drafter that reads the target's rows, in rounds as the loop plays them.

    Before each the target runs a pass, whose rows are shown. Its time does not count, but it drives the draft out of
    the processor's caches, as in every round. The rows stand at the beginning of a text: draft graphs attend to the
    whole capacity of their cache, so that what it holds makes no difference.
    """

    def __init__(self, target: Target, drafter: Drafter, clock: Clock = perf_counter) -> None:
        super().__init__((1,), (), clock)
        self._target, self._drafter, self._start = target, drafter, target.cache.lengths[0]
        rows = min(_KEPT, target.context - self._start)
        self._committed = _some_tokens(rows + 1, target)
        self._context = DraftContext(SamplingParams(), NoiseKey(0))
        self._given = 0  # tokens of the last proposal

    def start(self) -> None:
        """Once, to see how many tokens it has at most."""
        self._time(max(_PROPOSED + _FURTHER_PROPOSED))
        most = max(1, self._given)
        self.widths = sorted({min(k, most) for k in _PROPOSED})
        self.further = [k for k in dict.fromkeys(min(k, most) for k in _FURTHER_PROPOSED) if k not in self.widths]

    def _time(self, width: int) -> float:
        """Milliseconds of proposing `width` tokens greedily, all taken back."""
        begin = self._clock()
        try:
            self._show_rows()
            ready = self._clock()
            self._given = len(self._drafter.propose(self._committed, width, self._context).tokens)
            end = self._clock()
        finally:
            self._drafter.reset()
        self._overhead = 1e3 * (ready - begin)
        return 1e3 * (end - ready)

    def _show_rows(self) -> None:
        """The round before: a pass over all but the last committed token."""
        rows, target = len(self._committed) - 1, self._target
        try:
            target.forward([Rows(0, self._committed[:rows], rows)])
        finally:
            target.cache.rewind_to(0, self._start)
        if self._drafter.watches:
            self._drafter.watch(0, target.rows(0))
        self._drafter.observe(self._committed)


def _some_tokens(count: int, model: Target) -> list[int]:
    return [(7 * index) % model.token_count for index in range(count)]
