"""What `oxidize doctor` says: tables and advice, computed from measured costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

from oxidize.runtime.calibration import Calibration
from oxidize.runtime.calibration_store import BUSY
from oxidize.runtime.costs import FREE, CostCurve, best_k, break_even, round_ms, speedup
from oxidize.runtime.machine import Machine

LOOKUP = "lookup"
_SHOWN_K = (1, 2, 3, 4, 5, 7, 11, 15)
_MOST_K = 15  # of `run` by default
_ACCEPTANCES = (0.3, 0.5, 0.7, 0.9)
_HALF, _REPEATING = 0.5, 0.9  # acceptances the advice speaks of: half of the drafts, and text that repeats itself
_HOPELESS = 0.95  # an acceptance that no drafter keeps up
_MARGIN, _WIDTH = 11, 100  # of the text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was measured of one bundle, and under which options. `most`: tokens of a draft that has a limit, by name."""

    bundle: str
    precision: str
    provider: str
    threads: int
    spin: str
    exact: bool
    calibration: Calibration
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def target(self) -> CostCurve:
        """Milliseconds of a pass by its rows."""
        return self.calibration.target

    @property
    def drafts(self) -> dict[str, CostCurve]:
        """Milliseconds of drafting k tokens, by drafter; lookup first."""
        return {LOOKUP: FREE, **self.calibration.drafts}

    @property
    def tokens_per_second(self) -> float:
        """Of plain decoding, sampling left out."""
        return 1e3 / self.target.at(1)

    def most_k(self, name: str) -> int:
        """The largest k worth speaking of with this drafter."""
        return min(_MOST_K, self.most.get(name, _MOST_K))

    def break_even(self, name: str, k: int) -> float | None:
        """The acceptance from which drafts of k tokens pay; None where they never do, or k is too large for it."""
        return break_even(self.target, self.drafts[name], k) if k <= self.most_k(name) else None

    def break_evens(self, name: str) -> dict[int, float]:
        """By k, the acceptance from which drafts of this drafter pay; a k that never pays is left out."""
        found = {k: self.break_even(name, k) for k in range(1, _MOST_K + 1)}
        return {k: value for k, value in found.items() if value is not None}

    def choice(self, acceptance: float, name: str = LOOKUP) -> tuple[int, float]:
        """The best k at this acceptance, and how many times faster than plain decoding it is."""
        draft = self.drafts[name]
        k = best_k(self.target, draft, acceptance, self.most_k(name))
        return k, speedup(self.target, draft, k, acceptance)


def report(machine: Machine, providers: Mapping[str, str], found: Sequence[Diagnosis]) -> list[str]:
    """All lines for a person."""
    lines = _machine_lines(machine, providers)
    for diagnosis in found:
        lines += ["", *_header(diagnosis), "", *_costs_tables(diagnosis), "", *_choices_table(diagnosis), ""]
        lines += _titled("advice", advise(diagnosis))
    if len(found) > 1:
        lines += ["", *_titled("together", compare(found))]
    return [_printable(line) for line in lines]


def _titled(title: str, sentences: Sequence[str]) -> list[str]:
    """The sentences in a column of their own, the title in front of the first."""
    lines = [line for sentence in sentences for line in wrap(sentence, _WIDTH)]
    return [f"{title if index == 0 else '':<{_MARGIN}}{line}" for index, line in enumerate(lines)]


def as_dict(machine: Machine, providers: Mapping[str, str], found: Sequence[Diagnosis]) -> dict[str, Any]:
    """The same for a program."""
    return {
        "machine": asdict(machine),
        "providers": {name: not reason for name, reason in providers.items()},
        "bundles": [_bundle_dict(diagnosis) for diagnosis in found],
        "advice": compare(found) if len(found) > 1 else [],
    }


def advise(diagnosis: Diagnosis) -> list[str]:
    """One sentence per drafter, or that none pays."""
    lowest = [min(diagnosis.break_evens(name).values(), default=1.0) for name in diagnosis.drafts]
    if min(lowest) > _HOPELESS:
        return ["plain decoding is the best here: no draft pays, use --no-spec"]
    return [_sentence(diagnosis, name) for name in diagnosis.drafts]


def compare(found: Sequence[Diagnosis]) -> list[str]:
    """The fastest of several bundles, for plain text and for drafts that fare well, and the best k of each."""
    plain = max(found, key=lambda each: each.tokens_per_second)
    drafted = max(found, key=_repeating_speed)
    each = "; ".join(f"{one.bundle} {_in_short(one.choice(_HALF))}" for one in found)
    return [
        f"fastest without drafts: {plain.bundle} ({plain.tokens_per_second:.0f} tokens/s); in text that repeats: "
        f"{drafted.bundle} ({_repeating_speed(drafted):.0f} tokens/s)",
        f"best k when half of the draft tokens are kept: {each}",
    ]


def _repeating_speed(diagnosis: Diagnosis) -> float:
    return diagnosis.tokens_per_second * diagnosis.choice(_REPEATING)[1]


def _sentence(diagnosis: Diagnosis, name: str) -> str:
    pays = diagnosis.break_evens(name)
    k = min(pays, key=lambda each: pays[each], default=0)
    kind = name if name == LOOKUP else f"draft {name} ({diagnosis.drafts[name].at(1):.1f} ms for its first token)"
    if k == 0 or pays[k] > _HOPELESS:
        return f"{kind} never pays here: its tokens cost as much as the steps they save"
    easy = [each for each, value in pays.items() if value < _HALF]
    until = f", k up to {max(easy)} while half of the draft tokens are kept" if easy else ""
    best = _in_short(diagnosis.choice(_REPEATING, name))
    return f"{kind} pays from acceptance {pays[k]:.2f} on (k = {k}){until}; best at {_REPEATING}: {best}"


def _in_short(choice: tuple[int, float]) -> str:
    k, gain = choice
    return f"k = {k} ({gain:.2f}x)" if k else "plain"


def _machine_lines(machine: Machine, providers: Mapping[str, str]) -> list[str]:
    memory = f", {machine.memory / 2**30:.0f} GB" if machine.memory else ""
    lines = [
        f"machine    {machine.cpu}, {machine.cores} cores{memory}",
        f"gpu        {', '.join(machine.gpus) or 'none'}",
        f"runtime    ONNX Runtime {machine.onnxruntime}",
    ]
    return lines + [f"{name:<11}{reason or 'usable'}" for name, reason in providers.items()]


def _header(diagnosis: Diagnosis) -> list[str]:
    known = diagnosis.calibration
    exact = ", exact" if diagnosis.exact else ""
    lines = [
        f"bundle     {diagnosis.bundle} ({diagnosis.precision})",
        f"options    {diagnosis.provider}, {diagnosis.threads} threads, spin {diagnosis.spin}{exact}",
        f"one step   {diagnosis.target.at(1):.1f} ms, {diagnosis.tokens_per_second:.0f} tokens/s plain",
        f"measured   {known.measured_at} in {known.seconds:.1f} s behind {known.context} tokens; "
        "--refresh measures again",
    ]
    if known.waited > BUSY:
        lines.append(
            f"caution    the machine was busy: threads waited {known.waited:.0%} of the time; measure again later"
        )
    return lines


def _costs_tables(diagnosis: Diagnosis) -> list[str]:
    """One line per k: what verifying costs, and per drafter the acceptance (break-even) at which that is worth it.

    Drafters that do not fit beside the others have another table below, an empty line between.
    """
    target = diagnosis.target
    costs = [
        ["k", *map(str, _SHOWN_K)],
        ["verify ms", *(f"{target.at(k + 1):.1f}" for k in _SHOWN_K)],
        ["plain steps", *(f"{target.at(k + 1) / target.at(1):.2f}" for k in _SHOWN_K)],
    ]
    tables = [costs]
    for name in diagnosis.drafts:
        column = [f"{name} pays from", *(_pays_from(diagnosis, name, k) for k in _SHOWN_K)]
        wider = [*tables[-1], column]
        if len(_aligned(_rows(wider))[0]) > _WIDTH:
            tables.append([*costs, column])
        else:
            tables[-1] = wider
    first, *others = [_aligned(_rows(table)) for table in tables]
    return first + [line for lines in others for line in ("", *lines)]


def _rows(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(row) for row in zip(*columns, strict=True)]


def _pays_from(diagnosis: Diagnosis, name: str, k: int) -> str:
    if k > diagnosis.most_k(name):
        return "-"
    value = diagnosis.break_even(name, k)
    return "never" if value is None else f"{value:.2f}"


def _choices_table(diagnosis: Diagnosis) -> list[str]:
    """Per drafter the best k at several acceptances."""
    rows = [["acceptance", *(f"{acceptance:.1f}" for acceptance in _ACCEPTANCES)]]
    for name in diagnosis.drafts:
        rows.append([f"best k with {name}", *(_in_short(diagnosis.choice(each, name)) for each in _ACCEPTANCES)])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _bundle_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    known, target = diagnosis.calibration, diagnosis.target
    drafters = {name: _drafter_dict(diagnosis, name) for name in diagnosis.drafts}
    return {
        "bundle": diagnosis.bundle,
        "precision": diagnosis.precision,
        "provider": diagnosis.provider,
        "threads": diagnosis.threads,
        "spin": diagnosis.spin,
        "exact": diagnosis.exact,
        "step_ms": round(target.at(1), 3),
        "tokens_per_second": round(diagnosis.tokens_per_second, 2),
        "pass_ms": {str(rows): round(ms, 3) for rows, ms in target.points},
        "drafters": drafters,
        "measured_at": known.measured_at,
        "seconds": known.seconds,
        "context": known.context,
        "waited": known.waited,
        "advice": advise(diagnosis),
    }


def _drafter_dict(diagnosis: Diagnosis, name: str) -> dict[str, Any]:
    draft, target = diagnosis.drafts[name], diagnosis.target
    even = diagnosis.break_evens(name)
    return {
        "most_k": diagnosis.most_k(name),
        "draft_ms": {str(k): round(ms, 3) for k, ms in draft.points},
        "round_ms": {str(k): round(round_ms(target, draft, k), 3) for k in _SHOWN_K if k <= diagnosis.most_k(name)},
        "break_even": {str(k): round(even[k], 4) if k in even else None for k in _SHOWN_K},
        "best_k": {str(each): diagnosis.choice(each, name)[0] for each in _ACCEPTANCES},
    }


def _printable(line: str) -> str:
    """Names in a manifest may come from a stranger; none of them shall steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
