"""What passes of the target and drafts of each k cost here: measured once, remembered outside the bundle.

Target and draft models are timed by `Target.forward` alone, on rows that are taken back at once, behind whatever slot 0
holds; drafts that read the target's rows by whole proposals. The widths take turns, so that a drift of the machine
meets all of them, and the lower quartile of each width's times counts: a busy machine only ever adds to a time, so the
high ones are noise, while a minimum would favour the widths that were timed more often.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from .calibration_store import Measurement, measurement_key, recall, remember
from .costs import CostCurve
from .drafters.base import Drafter
from .drafters.draft_model import DraftModel
from .machine import describe_machine, scheduled_ns
from .memory import undisturbed
from .meters import Clock, Effort, Meter, PassMeter, ProposalMeter
from .session import RuntimeOptions
from .target import Target

FIRST_RUN_S = 0.35  # budget of the silent calibration
_ROUNDS = 20  # more make no better quartile
_FEWEST_ROUNDS = 2  # that should fit, even if the budget must grow
_LONGEST_S = 1.2  # that these rounds may take
_GOOD_ROUNDS = 3  # that a further width must leave time for


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
    target: Target, drafters: Sequence[Drafter], budget_s: float = FIRST_RUN_S, clock: Clock = perf_counter
) -> Calibration:
    """Measure for about `budget_s` seconds, or longer as `measure` explains. Remembers nothing.

    Slot 0 of each model needs room for one row and is left as it was. Drafters must not have seen a text, and have seen
    none afterwards; free ones are left out. Counters of passes and of time in ONNX Runtime go on counting, as for any
    other pass; whoever reports them takes differences.
    """
    costly = _costly(drafters)
    meters = _meters(target, costly, clock)
    effort = measure(meters, budget_s, clock)
    return _combine([meter.result(effort, budget_s) for meter in meters], costly)


def load_or_calibrate(
    target: Target,
    drafters: Sequence[Drafter],
    options: RuntimeOptions,
    cache: Path | None,
    budget_s: float = FIRST_RUN_S,
    refresh: bool = False,
) -> Calibration:
    """What the folder `cache` remembers of target and drafters under these options; what it lacks is measured and kept.

    A part is measured again when `refresh` is set, or when less time than `budget_s` was allowed then. Without a
    folder, or with one that cannot be written, the result is only returned; so is that of a drafter from elsewhere than
    a bundle. See `calibrate` for what is asked of the drafters.
    """
    costly = _costly(drafters)
    keys = _keys(target, costly, options)
    known = {} if refresh else {index: part for index, key in enumerate(keys) if (part := recall(cache, key, budget_s))}
    meters = _meters(target, costly, perf_counter)
    missing = [index for index in range(len(meters)) if index not in known]
    if missing:
        effort = measure([meters[index] for index in missing], budget_s)
        for index in missing:
            known[index] = meters[index].result(effort, budget_s)
            remember(cache, keys[index], known[index])
    return _combine([known[index] for index in range(len(meters))], costly)


def _costly(drafters: Sequence[Drafter]) -> list[Drafter]:
    return [drafter for drafter in drafters if not drafter.free]


def _meters(target: Target, drafters: Sequence[Drafter], clock: Clock) -> list[Meter]:
    """That of the target, then those of the drafters."""
    return [
        PassMeter(target, True, clock),
        *(
            PassMeter(each.model, False, clock) if isinstance(each, DraftModel) else ProposalMeter(target, each, clock)
            for each in drafters
        ),
    ]


def _keys(target: Target, drafters: Sequence[Drafter], options: RuntimeOptions) -> list[dict[str, str] | None]:
    """Under which the parts are kept; None for a drafter that no manifest knows."""
    machine, inside = describe_machine(), {entry.name: entry for entry in target.bundle.manifest.drafts}

    def key(drafter: Drafter) -> dict[str, str] | None:
        if isinstance(drafter, DraftModel):
            return measurement_key(drafter.model, "draft", options, machine)
        entry = inside.get(drafter.name)
        return measurement_key(target, "proposal", options, machine, entry) if entry is not None else None

    return [measurement_key(target, "target", options, machine), *map(key, drafters)]


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


def _combine(parts: Sequence[Measurement], drafters: Sequence[Drafter]) -> Calibration:
    """The target's part and those of the drafters, as one."""
    target, *rest = parts
    drafts = {
        drafter.name: draft_curve(part.curve()) if isinstance(drafter, DraftModel) else part.curve()
        for drafter, part in zip(drafters, rest, strict=True)
    }
    moment, seconds = min(part.measured_at for part in parts), max(part.seconds for part in parts)
    return Calibration(target.curve(), drafts, moment, seconds, target.context, max(part.waited for part in parts))


def draft_curve(passes: CostCurve) -> CostCurve:
    """Milliseconds of drafting k tokens with a model whose passes cost this much: T(2) + (k - 1) T(1).

    One pass a token; the first also reads the token by which the draft has fallen behind when all of its last
    proposal was kept.
    """
    return CostCurve(((1, passes.at(2)), (2, passes.at(2) + passes.at(1))))
