"""What --exact costs where drafts do not help, and, with --matrix, whether it holds on many texts.

Plain decoding with the floor of two rows against plain decoding without it, and the same with lookup, whose guess
rides in the spare row. A run is one whole `generate` call for a fixed number of greedy tokens, the prompt already in
the KV cache; the end token is ignored. The sides take turns; ratios are taken within a repeat. With --matrix nothing is
timed: every built-in prompt of `oxidize verify` is decoded with every drafter, in default and exact mode, sampled, in
other chunks and in batches, and the report is written.
"""

import argparse
from collections.abc import Callable

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
    show_progress,
    table,
)
from ours import OurRun, decode, encode, open_engine, runtime_options

from oxidize.cli import verify as command
from oxidize.cli.generation import DEFAULT_DRAFT_TOKENS
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.drafts import open_drafters
from oxidize.runtime.engine import Engine
from oxidize.runtime.verify import Report, VerifyPlan, verify

PLAIN = "plain"
_WARM_UP_TOKENS = 8


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    add_runtime_options(parser)
    parser.add_argument("--workloads", nargs="+", default=["chat", "code"], help="files in prompts/, without .jsonl")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each workload (default 4)")
    parser.add_argument("--tokens", type=int, help="tokens per text (default 128; 256 with --matrix)")
    parser.add_argument("--matrix", action="store_true", help="compare texts instead of timing them")
    parser.add_argument("--prompts", type=int, default=20, help="of --matrix (default 20)")
    parser.add_argument("--draft-model", action="append", help="of --matrix; may be repeated (default ngram)")
    parser.add_argument("--full", action="store_true", help="of --matrix: every k with every prompt, not one in turn")
    return parser.parse_args()


def make_sides(arguments: argparse.Namespace) -> dict[str, tuple[Engine, SpeculativeConfig]]:
    """Plain and with lookup, each with the floor of exact mode and without."""
    tokens = arguments.tokens or 128
    plain, drafted = SpeculativeConfig(0, tokens), SpeculativeConfig(DEFAULT_DRAFT_TOKENS, tokens, 0.0)
    return {
        PLAIN: (open_engine(arguments), plain),
        "exact": (open_engine(arguments, exact=True), plain),
        "lookup": (open_engine(arguments, "ngram"), drafted),
        "exact lookup": (open_engine(arguments, "ngram", exact=True), drafted),
    }


def measure_prompt(
    sides: dict[str, tuple[Engine, SpeculativeConfig]], request: Prompt, repeats: int
) -> dict[str, list[OurRun]]:
    """Run one prompt on every side, `repeats` times."""

    def runner(engine: Engine, tokens: list[int], config: SpeculativeConfig) -> Callable[[], OurRun]:
        return lambda: decode(engine.decoder, tokens, config)

    prompt = encode(sides[PLAIN][0], request.prompt, request.answer)
    for engine, config in sides.values():
        decode(engine.decoder, prompt, SpeculativeConfig(config.draft_tokens_per_step, _WARM_UP_TOKENS))
    return interleave(
        {name: runner(engine, prompt, config) for name, (engine, config) in sides.items()}, repeats, request.name
    )


def report_costs(workload: str, runs: dict[str, dict[str, list[OurRun]]]) -> Json:
    """Print one table; return what goes into the result line. runs: by prompt and side."""
    names = [name for name in next(iter(runs.values())) if name != PLAIN]
    rows: list[tuple[str, ...]] = [("prompt", *(f"plain/{name} time" for name in names), "exact texts equal")]
    results: dict[str, list[Spread]] = {name: [] for name in names}
    same = []
    for prompt, sides in runs.items():
        plain = [run.total_s for run in sides[PLAIN]]
        for name in names:
            results[name].append(Spread.of(ratios(plain, [run.total_s for run in sides[name]])))
        same.append(len({run.timing.token_ids for name in ("exact", "exact lookup") for run in sides[name]}) == 1)
        rows.append((prompt, *(results[name][-1].text() for name in names), "yes" if same[-1] else "NO"))
    means = {name: geometric_mean([spread.median for spread in spreads]) for name, spreads in results.items()}
    print(f"\n{workload}: geometric means " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    print(table(rows))
    return {"prompts": list(runs), "plain_over_side": results, "geometric_mean": means, "exact_texts_equal": same}


def time_sides(arguments: argparse.Namespace) -> Json:
    """The cost of the floor, by workload."""
    sides, results = make_sides(arguments), {}
    for workload in arguments.workloads:
        prompts = load_prompts(PROMPTS / f"{workload}.jsonl")[: arguments.limit]
        runs = {prompt.name: measure_prompt(sides, prompt, arguments.repeats) for prompt in prompts}
        results[workload] = report_costs(workload, runs)
    return {"tokens": arguments.tokens or 128, "workloads": results}


def run_matrix(arguments: argparse.Namespace) -> Report:
    """`oxidize verify` at length."""
    bundle, options = open_bundle(arguments.bundle), runtime_options(arguments)
    drafters = open_drafters(bundle, arguments.draft_model or ["ngram"], options, None)
    engine = open_engine(arguments)
    prompts = [encode(engine, prompt) for prompt in command.PROMPTS[: arguments.prompts]]
    del engine  # its sessions hold the weights once more
    plan = VerifyPlan(arguments.tokens or 256, every_k=arguments.full)
    report = verify(bundle, options, prompts, drafters, plan, show_progress)
    show_progress("")
    print("\n".join(command.table(report)))
    return report


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    results = {"matrix": run_matrix(arguments).as_dict()} if arguments.matrix else time_sides(arguments)
    print(f"\nwritten to {record.write('exact', results)}")


if __name__ == "__main__":
    main()
