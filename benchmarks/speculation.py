"""What speculation gains: the same engine with its drafter and without, on five kinds of work.

For every prompt the sides take turns. A run is one whole `generate` call for a fixed number of greedy tokens, the
prompt already in the KV cache; the end token is ignored unless --stop-at-eos is given. The ratio is plain time over
speculative time per token. Texts are compared: where they part, the gap between the logits of the two tokens in the
plain text is shown. Passes of one row and wider ones round differently, so a small gap may close (never with
--exact); in int4 with 8-bit activations those roundings grow to some tenths of a logit.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from common import (
    PROMPTS,
    Json,
    Prompt,
    Record,
    Spread,
    add_runtime_options,
    benchmark_parser,
    geometric_mean,
    interleave,
    load_prompts,
    ratios,
    table,
)
from ours import OurRun, decode, encode, open_engine

from oxidize.cli.generation import DEFAULT_DRAFT_TOKENS
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.engine import Engine
from oxidize.runtime.target import Rows

WORKLOADS = ("edit", "quote", "chat", "code", "json")
PLAIN, AUTO = "plain", "auto"
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Side:
    """One way to decode: which decoder, how configured."""

    decoder: SpeculativeDecoder
    config: SpeculativeConfig


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one speculative side did with one prompt, relative to plain decoding."""

    prompt: str
    ratio: Spread
    plain_speed: float
    acceptance: float
    tokens_per_pass: float
    first_eos: int | None  # tokens of the plain text up to its first end token
    differing: int  # runs whose text was not the plain one
    differs_at: int | None
    gap: float | None  # logit of the plain token less that of the other there


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    add_runtime_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of <workload>.jsonl")
    parser.add_argument("--limit", type=int, help="at most so many prompts of each workload")
    parser.add_argument("--tokens", type=int, default=160, help="tokens per run (default 160)")
    parser.add_argument("--draft-model", default="ngram", help="ngram (default), a draft's name, or a bundle")
    parser.add_argument("--fixed-k", type=int, nargs="*", default=[], help="also draft exactly so many tokens")
    parser.add_argument("--stop-at-eos", action="store_true", help="end a text where the model ends it")
    parser.add_argument("--exact", action="store_true", help="passes of two rows or more only")
    return parser.parse_args()


def make_sides(engine: Engine, arguments: argparse.Namespace) -> dict[str, Side]:
    """Plain, auto and each fixed k, all on one target."""
    tokens = arguments.tokens
    sides = {
        PLAIN: Side(SpeculativeDecoder(engine.target), SpeculativeConfig(0, tokens)),
        AUTO: Side(_drafting(engine), SpeculativeConfig(DEFAULT_DRAFT_TOKENS, tokens, 0.0)),
    }
    for k in arguments.fixed_k:
        config = SpeculativeConfig(k, tokens, min_acceptance_rate=0.0, adaptive=False)
        sides[f"k={k}"] = Side(_drafting(engine), config)
    return sides


def _drafting(engine: Engine) -> SpeculativeDecoder:
    """A decoder that knows nothing of what passes cost yet; a draft model has one cache and so one decoder."""
    if all(isinstance(drafter, NgramDrafter) for drafter in engine.decoder.drafters):
        return SpeculativeDecoder(engine.target, NgramDrafter())
    return engine.decoder


def measure_prompt(
    engine: Engine, sides: dict[str, Side], request: Prompt, arguments: argparse.Namespace
) -> dict[str, Outcome]:
    """Run one prompt on every side, `repeats` times; an Outcome per speculative side."""
    prompt = encode(engine, request.prompt, request.answer)
    eos = engine.bundle.manifest.generation.eos_token_ids
    stop = eos if arguments.stop_at_eos else ()
    engine.target.cache.rewind_to(0, 0)
    for side in sides.values():
        short = SpeculativeConfig(side.config.draft_tokens_per_step, _WARM_UP_TOKENS)
        decode(side.decoder, prompt, short)

    def runner(side: Side) -> Callable[[], OurRun]:
        return lambda: decode(side.decoder, prompt, side.config, eos=stop)

    runs = interleave({key: runner(side) for key, side in sides.items()}, arguments.repeats, request.name)
    plain = runs.pop(PLAIN)
    return {key: _compare(engine, request.name, prompt, eos, plain, found) for key, found in runs.items()}


def _compare(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    eos: Sequence[int],
    plain: Sequence[OurRun],
    runs: Sequence[OurRun],
) -> Outcome:
    text = plain[0].timing.token_ids
    others = [run.timing.token_ids for run in runs if run.timing.token_ids != text]
    at = _first_difference(text, others[0]) if others else None
    stats = [run.stats for run in runs]
    return Outcome(
        name,
        Spread.of(ratios([_per_token(run) for run in plain], [_per_token(run) for run in runs])),
        1 / median(_per_token(run) for run in plain),
        median(entry.acceptance_rate for entry in stats),
        median(entry.tokens_per_target_pass for entry in stats),
        next((index for index, token in enumerate(text) if token in eos), None),
        len(others),
        at,
        None if at is None else _gap(engine, prompt, text, others[0], at),
    )


def _per_token(run: OurRun) -> float:
    return run.total_s / len(run.timing.token_ids)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _gap(engine: Engine, prompt: Sequence[int], text: Sequence[int], other: Sequence[int], at: int) -> float | None:
    """How clearly plain decoding preferred its token: the text is decoded once more, row by row, up to there."""
    if at >= min(len(text), len(other)):
        return None
    target = engine.target
    target.cache.rewind_to(0, 0)
    target.prefill(0, prompt[:-1])
    for token in (prompt[-1], *text[:at]):
        (logits,) = target.forward([Rows(0, [token], 1)])
    return float(logits[0, text[at]] - logits[0, other[at]])


def report(workload: str, side: str, outcomes: Sequence[Outcome]) -> Json:
    """Print one table; return what goes into the result line."""
    rows = [("prompt", "plain/spec time", "plain tok/s", "accept", "tok/pass", "eos at", "same text")]
    rows += [_row(outcome) for outcome in outcomes]
    medians = [outcome.ratio.median for outcome in outcomes]
    mean, middle = geometric_mean(medians), median(medians)
    print(f"\n{workload}, {side}: geometric mean {mean:.2f}x, median {middle:.2f}x\n{table(rows)}")
    fields = {name: [getattr(outcome, name) for outcome in outcomes] for name in Outcome.__slots__}
    return {"geometric_mean": mean, "median": middle, **fields}


def _row(outcome: Outcome) -> tuple[str, ...]:
    same = "yes" if not outcome.differing else f"{outcome.differing} runs differ from {outcome.differs_at}"
    if outcome.gap is not None:
        same += f", gap {outcome.gap:.4f}"
    return (
        outcome.prompt,
        outcome.ratio.text(),
        f"{outcome.plain_speed:.1f}",
        f"{outcome.acceptance:.2f}",
        f"{outcome.tokens_per_pass:.2f}",
        "-" if outcome.first_eos is None else str(outcome.first_eos),
        same,
    )


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    engine = open_engine(arguments, arguments.draft_model, arguments.exact)
    sides, results = make_sides(engine, arguments), {}
    for workload in arguments.workloads:
        prompts = load_prompts(arguments.prompts / f"{workload}.jsonl")
        outcomes = [measure_prompt(engine, sides, prompt, arguments) for prompt in prompts[: arguments.limit]]
        results[workload] = {
            side: report(workload, side, [outcome[side] for outcome in outcomes]) for side in outcomes[0]
        }
    options = {name: getattr(arguments, name) for name in ("tokens", "draft_model", "stop_at_eos", "exact", "fixed_k")}
    options["draft_model"] = Path(arguments.draft_model).name
    print(f"\nwritten to {record.write('speculation', {**options, 'workloads': results})}")


if __name__ == "__main__":
    main()
