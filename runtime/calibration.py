"""What passes of the target and drafts of each k cost here: measured once, remembered outside the bundle.

Every model is timed by `Target.forward` alone, on rows that are taken back at once, behind whatever its slot 0 holds.
The widths take turns, so that a drift of the machine meets all of them, and the lower quartile of each width's times
counts: a busy machine only ever adds to a time, so the high ones are noise, while a minimum would favour the widths
that were timed more often.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from .calibration_store import Measurement, measurement_key, recall, remember
from .costs import CostCurve
from .machine import describe_machine, scheduled_ns
from .memory import undisturbed
from .session import RuntimeOptions
from .target import Rows, Target

FIRST_RUN_S = 0.35  # budget of the silent calibration
_ROUNDS = 20  # more make no better quartile
_FEWEST_ROUNDS = 2  # that should fit, even if the budget must grow
_LONGEST_S = 1.2  # that these rounds may take
_GOOD_ROUNDS = 3  # that a further width must leave time for
_CONTEXT = 200  # rows in the cache behind a timed pass
_TARGET_WIDTHS = (1, 2, 4, 8)
_FURTHER_WIDTHS = (16, 3, 6, 12, 24, 32)  # by importance
_DRAFT_WIDTHS = (1, 2)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs of a target and its drafts on this machine.

    target: milliseconds of a pass by its rows, all of them scored.
    drafts: by name, milliseconds of proposing k tokens.
    measured_at: UTC, ISO 8601; of the oldest part. seconds: spent measuring, then or now.
    context: rows that were in the cache. waited: the share of their time in which threads that could have run waited
        for a core; over `BUSY` the machine had other work.
    """

    target: CostCurve
    drafts: dict[str, CostCurve]
    measured_at: str
    seconds: float
    context: int
    waited: float


def calibrate(
    target: Target, drafts: Mapping[str, Target], budget_s: float = FIRST_RUN_S, clock: Clock = perf_counter
) -> Calibration:
    """Measure for about `budget_s` seconds, or longer as `measure` explains. Remembers nothing.

    Slot 0 of each model needs room for one row and is left as it was. Counters of passes and of time in ONNX Runtime
    go on counting, as for any other pass; whoever reports them takes differences.
    """
    meters = [Meter(target, True, clock), *(Meter(draft, False, clock) for draft in drafts.values())]
    effort = measure(meters, budget_s, clock)
    return _combine([meter.result(effort, budget_s) for meter in meters], drafts)


def load_or_calibrate(
    target: Target,
    drafts: Mapping[str, Target],
    options: RuntimeOptions,
    cache: Path | None,
    budget_s: float = FIRST_RUN_S,
    refresh: bool = False,
) -> Calibration:
    """What the folder `cache` remembers of these models under these options; what it lacks is measured and kept.

    A model is measured again when `refresh` is set, or when less time than `budget_s` was allowed then. Without a
    folder, or with one that cannot be written, the result is only returned.
    """
    machine, models = describe_machine(), [target, *drafts.values()]
    keys = [measurement_key(model, index == 0, options, machine) for index, model in enumerate(models)]
    known = {} if refresh else {index: part for index, key in enumerate(keys) if (part := recall(cache, key, budget_s))}
    meters = {index: Meter(model, index == 0) for index, model in enumerate(models) if index not in known}
    if meters:
        effort = measure(list(meters.values()), budget_s)
        for index, meter in meters.items():
            known[index] = meter.result(effort, budget_s)
            remember(cache, keys[index], known[index])
    return _combine([known[index] for index in range(len(models))], drafts)


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds it took to measure, and the share of waiting, see `Calibration`."""

    seconds: float
    waited: float


class Meter:
    """Times passes of one model, and remembers them by width."""

    def __init__(self, model: Target, is_target: bool, clock: Clock = perf_counter) -> None:
        self._model, self._clock = model, clock
        self._start = model.cache.lengths[0]
        room = model.context - self._start
        base, further = (_TARGET_WIDTHS, _FURTHER_WIDTHS) if is_target else (_DRAFT_WIDTHS, ())
        self.widths = [width for width in base if width <= room]
        self.further = [width for width in further if width <= room]
        free = min(model.context, model.cache.capacity) - self._start
        self.context = max(0, min(_CONTEXT, free - max([*self.widths, *self.further])))
        self._first: dict[int, float] = {}
        self._times: dict[int, list[float]] = {}

    def start(self) -> None:
        """One pass for what the first of a process pays for. It counts nowhere."""
        self._time(min(self.widths))

    def warm_up(self, width: int) -> None:
        """The first pass of a width pays for its bindings; it counts only where time was left for no other."""
        self._first[width] = self._time(width)

    def run(self, width: int) -> None:
        """A pass that counts."""
        self._times.setdefault(width, []).append(self._time(width))

    def expected(self, width: int) -> float:
        """Milliseconds the next pass of `width` rows will take: as many as the last, or a guess from other widths."""
        if width in self._times:
            return self._times[width][-1]
        return self._first[width] if width in self._first else self._curve().at(width)

    def result(self, effort: Effort, budget_s: float) -> Measurement:
        """What was measured, with this effort of the `budget_s` seconds allowed."""
        rows, ms = zip(*self._curve().points, strict=True)
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        return Measurement(rows, ms, moment, effort.seconds, budget_s, self.context, effort.waited)

    def _curve(self) -> CostCurve:
        quartiles = {width: float(np.quantile(times, 0.25)) for width, times in self._times.items()}
        return CostCurve.rising(self._first | quartiles)

    def _time(self, width: int) -> float:
        """Milliseconds of one pass of `width` rows, all scored and then taken back.

        The rows before it are only declared to be there: what a cache holds makes no difference to its cost, and a
        prefill would take longer than all that is measured.
        """
        model = self._model
        tokens = [(7 * index) % model.token_count for index in range(width)]
        model.cache.advance(0, self.context)
        try:
            begin = self._clock()
            model.forward([Rows(0, tokens, width)])
            return 1e3 * (self._clock() - begin)
        finally:
            model.cache.rewind_to(0, self._start)


def measure(meters: Sequence[Meter], budget_s: float, clock: Clock = perf_counter) -> Effort:
    """Run the meters for about `budget_s` seconds.

    Not counted is the first pass of all, see `Meter.start`. Where a model is too slow for `_FEWEST_ROUNDS` rounds over
    the base widths, the budget grows by what they lack, up to `_LONGEST_S`; time to spare goes to further widths, and
    then to more rounds.
    """
    begin, (ran, waited) = clock(), scheduled_ns()
    with undisturbed():
        _measure(meters, budget_s, clock)
    ran, waited = (after - before for after, before in zip(scheduled_ns(), (ran, waited), strict=True))
    return Effort(round(clock() - begin, 3), round(max(0, waited) / max(1, ran + waited), 3))


def _measure(meters: Sequence[Meter], budget_s: float, clock: Clock) -> None:
    for meter in meters:
        meter.start()
    end = clock() + budget_s
    for meter in meters:
        for width in reversed(meter.widths):  # so that buffers grow once
            meter.warm_up(width)
    end = max(end, clock() + min(_FEWEST_ROUNDS * _round_s(meters), _LONGEST_S))
    for meter in meters:
        _widen(meter, meters, end, clock)
    for meter, width in _turns(meters):
        if clock() + meter.expected(width) / 1e3 > end:
            return
        meter.run(width)


def _turns(meters: Sequence[Meter]) -> Iterator[tuple[Meter, int]]:
    for _ in range(_ROUNDS):
        for meter in meters:
            for width in meter.widths:
                yield meter, width


def _round_s(meters: Sequence[Meter]) -> float:
    """Seconds that a pass of each width takes."""
    return sum(meter.expected(width) for meter in meters for width in meter.widths) / 1e3


def _widen(meter: Meter, meters: Sequence[Meter], end: float, clock: Clock) -> None:
    """Add further widths while `_GOOD_ROUNDS` rounds with them fit before `end`."""
    for width in meter.further:
        added = meter.expected(width) / 1e3
        if clock() + added + _GOOD_ROUNDS * (_round_s(meters) + added) > end:
            return
        meter.warm_up(width)
        meter.widths.append(width)


def _combine(parts: Sequence[Measurement], names: Iterable[str]) -> Calibration:
    """The target's part and those of the drafts `names`, as one."""
    target, *rest = parts
    drafts = {name: draft_curve(part.curve()) for name, part in zip(names, rest, strict=True)}
    moment, seconds = min(part.measured_at for part in parts), max(part.seconds for part in parts)
    return Calibration(target.curve(), drafts, moment, seconds, target.context, max(part.waited for part in parts))


def draft_curve(passes: CostCurve) -> CostCurve:
    """Milliseconds of drafting k tokens with a model whose passes cost this much: T(2) + (k - 1) T(1).

    One pass a token; the first also reads the token by which the draft has fallen behind when all of its last
    proposal was kept.
    """
    return CostCurve(((1, passes.at(2)), (2, passes.at(2) + passes.at(1))))
