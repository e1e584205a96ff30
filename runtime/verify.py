"""Whether drafts change the text, measured: plain and speculative decoding side by side, and the noise between them.

A text parts from the plain one where passes of other widths round differently and two tokens are nearly as likely.
Let n be the largest change of the gap between two likely tokens when the same text is read in other passes. A parting
is put down to rounding if the gap was at most 2n; twice, because the passes that made the text are not the ones
measured. A larger gap means a fault. Under the exact floor there must be no parting at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .bundle import Bundle
from .decoder import SpeculativeDecoder, check_prompt
from .drafters.base import Drafter
from .drafters.ngram import NgramDrafter
from .errors import BundleError, ProviderError, UsageError
from .rounding import Deviation, Progress, measure_rounding
from .sampling import SamplingParams
from .session import RuntimeOptions
from .target import PREFILL_CHUNK, Target
from .trials import GREEDY, RandomDrafter, fixed, play_together, weigh

FLOOR = 2
SLOTS = 4  # of the batch
CHUNKS = (1, 7, 33, 64, 129)  # prefill chunks, one per prompt in turn
_TEMPERATURE, _TOP_P = 0.8, 0.95


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How much to decode: `tokens` per text; every prompt with every k of `ks`, or with one of them in turn."""

    tokens: int = 64
    ks: tuple[int, ...] = (1, 3, 8)
    every_k: bool = False

    def ks_of(self, index: int) -> tuple[int, ...]:
        """The draft lengths for the prompt of this index."""
        return self.ks if self.every_k else (self.ks[index % len(self.ks)],)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a text left the plain one.

    plain, other: the two tokens. gap: plain decoding's logit of the one less that of the other. noise: the largest
    change of such a gap between two ways to compute this row, or any row measured.
    """

    prompt: int
    drafter: str
    k: int
    position: int
    plain: int
    other: int
    gap: float
    noise: float

    @property
    def explained(self) -> bool:
        """Whether noise can have closed the gap."""
        return abs(self.gap) <= 2 * self.noise


@dataclass(frozen=True, slots=True)
class Check:
    """One promise put to the test on so many texts. `bitwise`: no text may part, however small the gap."""

    name: str
    bitwise: bool
    texts: int
    partings: tuple[Parting, ...]

    @property
    def broken(self) -> tuple[Parting, ...]:
        """The partings that the promise does not allow."""
        return self.partings if self.bitwise else tuple(each for each in self.partings if not each.explained)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured. noise: passes as they are; floored: under the exact floor, where every difference must be 0.

    prompts: how many; drafters: their names. skipped: what could not be tested, and why.
    """

    provider: str
    precision: str
    prompts: int
    drafters: tuple[str, ...]
    plan: VerifyPlan
    noise: tuple[Deviation, ...]
    floored: tuple[Deviation, ...]
    checks: tuple[Check, ...]
    skipped: tuple[str, ...] = ()

    @property
    def floor_holds(self) -> bool:
        """Whether the logits under the exact floor do not depend on the passes."""
        return not any(each.differing for each in self.floored)

    @property
    def passed(self) -> bool:
        """Whether every promise held."""
        return self.floor_holds and not any(check.broken for check in self.checks)

    def verdict(self) -> list[str]:
        """One line for each mode."""
        exact = [check for check in self.checks if check.bitwise]
        broken = sum(len(check.broken) for check in exact)
        texts = sum(check.texts for check in exact)
        how = "bitwise equal" if not broken and self.floor_holds else "NOT bitwise equal"
        lines = [f"exact mode: {how}, {broken} of {texts} texts parted" if exact else "exact mode: not to be had here"]
        for check in (check for check in self.checks if not check.bitwise):
            gap = max((abs(each.gap) for each in check.partings), default=0.0)
            line = f"default mode: {len(check.partings)} of {check.texts} texts parted"
            where = f" at near ties, largest gap {gap:.2g}" if check.partings else ""
            beyond = f"; {len(check.broken)} GAPS EXCEED TWICE THE NOISE" if check.broken else ""
            lines.append(f"{line}{where}, noise {noise_of(self.noise):.2g}{beyond}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        checks = [{**asdict(check), "broken": len(check.broken)} for check in self.checks]
        return {
            **asdict(self),
            "checks": checks,
            "largest_margin": noise_of(self.noise),
            "floor_holds": self.floor_holds,
            "passed": self.passed,
            "verdict": self.verdict(),
        }


def noise_of(deviations: Sequence[Deviation]) -> float:
    """The largest change of a gap between two likely tokens."""
    return max((each.margin for each in deviations), default=0.0)


def verify(
    bundle: Bundle,
    options: RuntimeOptions,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[Drafter],
    plan: VerifyPlan,
    progress: Progress,
) -> Report:
    """Measure rounding, then decode every prompt plainly and with every drafter, in default and exact mode.

    prompts: token ids. drafters: the ones to try, beside a hostile one. Raises UsageError for a prompt that does not
    fit the context.
    """
    for prompt in prompts:
        check_prompt(prompt, bundle.manifest.model.max_positions - (FLOOR - 1))
    drafters = (*drafters, RandomDrafter(bundle.manifest.model.token_count))
    bench = _Bench(bundle, options, prompts, drafters, plan, progress)
    default = _Desk(bench, Target(bundle, options))
    checks = [_check_drafts(default, "default greedy", bitwise=False)]
    noise, provider = default.noise, default.target.provider
    del default  # its sessions hold the weights once more
    exact, skipped = _try_target(bench, "exact mode", slots=1)
    floored: tuple[Deviation, ...] = ()
    if exact is not None:
        desk = _Desk(bench, exact)
        floored = desk.noise
        checks += [_check_drafts(desk, "exact greedy", bitwise=True), _check_sampled(desk), _check_chunks(desk)]
        batch, missing = _try_target(bench, "batch", SLOTS)
        checks += [_check_batch(desk, batch)] if batch is not None else []
        skipped += missing
    names = tuple(drafter.name for drafter in drafters)
    facts = (provider, bundle.manifest.precision, len(prompts), names, plan)
    return Report(*facts, noise, floored, tuple(checks), skipped)


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all desks share."""

    bundle: Bundle
    options: RuntimeOptions
    prompts: Sequence[Sequence[int]]
    drafters: Sequence[Drafter]
    plan: VerifyPlan
    progress: Progress

    def trials(self) -> Iterator[tuple[int, Drafter, int]]:
        """Every prompt with every drafter and the draft lengths that are its."""
        for index in range(len(self.prompts)):
            for drafter in self.drafters:
                for k in self.plan.ks_of(index):
                    yield index, drafter, k

    def length(self, index: int) -> int:
        """Tokens to decode for a prompt; as many under every floor."""
        room = self.bundle.manifest.model.max_positions - (FLOOR - 1) - len(self.prompts[index])
        return min(self.plan.tokens, room)


@dataclass(slots=True)
class _Desk:
    """One target, its noise and its plain texts; decodes and compares."""

    bench: _Bench
    target: Target
    noise: tuple[Deviation, ...] = ()
    _plain: dict[tuple[int, SamplingParams], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sample = [token for prompt in self.bench.prompts for token in prompt]
        self.noise = measure_rounding(self.target, sample, self.bench.progress)

    def decode(
        self, index: int, drafter: Drafter | None, k: int, params: SamplingParams = GREEDY, chunk: int = PREFILL_CHUNK
    ) -> list[int]:
        """One text from an empty cache; the end token does not end it."""
        decoder = SpeculativeDecoder(self.target, drafter, fixed(k if drafter else 0, self.bench.length(index)))
        self.target.cache.rewind_to(0, 0)
        stream = decoder.stream(self.bench.prompts[index], params, chunk=chunk)
        return [token for emission in stream for token in emission.tokens]

    def compare(
        self, index: int, drafter: Drafter | None, k: int, text: list[int], params: SamplingParams = GREEDY
    ) -> list[Parting]:
        """Where `text` parts from the plain text; empty if it does not."""
        plain = self._plain.get((index, params))
        if plain is None:
            plain = self._plain[index, params] = self.decode(index, None, 0, params)
        at = next((i for i, (a, b) in enumerate(zip(plain, text, strict=True)) if a != b), None)
        if at is None:
            return []
        gap, noise = weigh(self.target, self.bench.prompts[index], plain[:at], plain[at], text[at])
        noise = max(noise, noise_of(self.noise))
        return [Parting(index, drafter.name if drafter else "none", k, at, plain[at], text[at], gap, noise)]


def _try_target(bench: _Bench, what: str, slots: int) -> tuple[Target | None, tuple[str, ...]]:
    """A target with the exact floor, or why there is none."""
    try:
        return Target(bench.bundle, bench.options, slots, FLOOR), ()
    except (UsageError, BundleError, ProviderError) as error:
        return None, (f"{what}: {error}",)


def _check_drafts(desk: _Desk, name: str, bitwise: bool) -> Check:
    """Greedy, every drafter."""
    partings: list[Parting] = []
    trials = list(desk.bench.trials())
    for number, (index, drafter, k) in enumerate(trials, 1):
        desk.bench.progress(f"{name}: {number} of {len(trials)}")
        partings += desk.compare(index, drafter, k, desk.decode(index, drafter, k))
    return Check(name, bitwise, len(trials), tuple(partings))


def _check_sampled(desk: _Desk) -> Check:
    """Seeded sampling under the match rule, every drafter."""
    name, partings = "exact sampled", []
    trials = list(desk.bench.trials())
    for number, (index, drafter, k) in enumerate(trials, 1):
        desk.bench.progress(f"{name}: {number} of {len(trials)}")
        params = SamplingParams(_TEMPERATURE, top_p=_TOP_P, seed=index)
        partings += desk.compare(index, drafter, k, desk.decode(index, drafter, k, params), params)
    return Check(name, True, len(trials), tuple(partings))


def _check_chunks(desk: _Desk) -> Check:
    """Greedy, without a draft, the prompt read in other chunks."""
    name, partings, count = "exact, other chunks", [], len(desk.bench.prompts)
    for index in range(count):
        desk.bench.progress(f"{name}: {index + 1} of {count}")
        text = desk.decode(index, None, 0, chunk=CHUNKS[index % len(CHUNKS)])
        partings += desk.compare(index, None, 0, text)
    return Check(name, True, count, tuple(partings))


def _check_batch(desk: _Desk, batch: Target) -> Check:
    """Greedy, several texts in the same passes: some drafted by lookup, some at random, some not at all."""
    name, partings, count = f"exact, batch of {SLOTS}", [], len(desk.bench.prompts)
    k = desk.bench.plan.ks[-1]
    for start in range(0, count, SLOTS):
        desk.bench.progress(f"{name}: {start + 1} of {count}")
        chosen = range(start, min(start + SLOTS, count))
        drafters = [(NgramDrafter(), RandomDrafter(batch.token_count), None)[index % 3] for index in chosen]
        prompts = [desk.bench.prompts[index] for index in chosen]
        texts = play_together(batch, prompts, drafters, k, [desk.bench.length(index) for index in chosen])
        for index, drafter, text in zip(chosen, drafters, texts, strict=True):
            partings += desk.compare(index, drafter, k, text)
    return Check(name, True, count, tuple(partings))
