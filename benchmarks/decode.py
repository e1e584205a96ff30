"""Plain decoding, one token at a time: ours, a bare loop over one fused graph, and onnxruntime-genai.

All sides decode the same number of tokens after the same prompt, in turn, and only the steps after the first token
are timed. The end token is ignored so that the counts are equal. The genai sides need the Python of an environment
with onnxruntime-genai, and a folder its model builder wrote from the same weights.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from common import (
    PROMPTS,
    Json,
    Record,
    Spread,
    Timing,
    add_runtime_options,
    benchmark_parser,
    interleave,
    physical_cores,
    ratios,
    table,
)
from fused import FusedLoop
from ours import OurRun, decode, encode, open_engine
from peer import GenaiPeer

from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.sampling import SamplingParams

OURS, SAMPLED, BARE = "ours", "ours sampled", "bare loop"
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.95)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    add_runtime_options(parser)
    parser.add_argument("--tokens", type=int, default=128, help="timed tokens per run (default 128)")
    parser.add_argument("--prompt", type=Path, default=PROMPTS / "decode.txt", help="text file")
    parser.add_argument("--genai-python", type=Path, help="Python of an environment with onnxruntime-genai")
    parser.add_argument("--genai-model", type=Path, help="folder written by onnxruntime_genai.models.builder")
    return parser.parse_args()


@contextmanager
def genai_peers(arguments: argparse.Namespace, prompt: list[int]) -> Iterator[dict[str, GenaiPeer]]:
    """The peers by name: one as genai configures itself, one with as many threads as we have."""
    if not (arguments.genai_python and arguments.genai_model):
        print("genai is left out: give --genai-python and --genai-model to compare with it")
        yield {}
        return
    equal = arguments.threads or physical_cores()
    counts = {"genai default": None, f"genai {equal} threads": equal}
    peers = {
        name: GenaiPeer(arguments.genai_python, arguments.genai_model, prompt, count) for name, count in counts.items()
    }
    try:
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def our_sides(arguments: argparse.Namespace) -> tuple[dict[str, Callable[[], OurRun]], list[int]]:
    """Ours, greedy and sampled, and the prompt's tokens."""
    engine = open_engine(arguments)
    prompt = encode(engine, arguments.prompt.read_text(encoding="utf-8"))
    config = SpeculativeConfig(draft_tokens_per_step=0, max_new_tokens=arguments.tokens + 1)

    def run(params: SamplingParams) -> OurRun:
        engine.target.cache.rewind_to(0, 0)  # read the prompt again, in one pass as the others do
        return decode(engine.decoder, prompt, config, params)

    return {OURS: lambda: run(SamplingParams()), SAMPLED: lambda: run(_SAMPLED)}, prompt


def report(timings: dict[str, list[Timing]], host: dict[str, list[float]]) -> Json:
    """Print the table; return what goes into the result line."""
    rows = [("side", "tok/s", "ours / side", "host share %")]
    results: Json = {}
    ours = [run.speed for run in timings[OURS]]
    for name, runs in timings.items():
        speeds = [run.speed for run in runs]
        ratio, share = ratios(ours, speeds), host.get(name)
        results[name] = {"tokens_per_second": speeds, "speed": Spread.of(speeds), "ours_over_side": Spread.of(ratio)}
        if share:
            results[name] |= {"host_share": Spread.of(share)}
        shown = Spread.of(share).text(1, 100) if share else "-"
        against = "-" if name == OURS else Spread.of(ratio).text(3)
        rows.append((name, Spread.of(speeds).text(1), against, shown))
    print(table(rows))
    return results


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    ours, prompt = our_sides(arguments)
    bare = FusedLoop(arguments.bundle, arguments.threads)
    runs: dict[str, list[OurRun]] = {name: [] for name in ours}
    tokens = arguments.tokens

    def timed(name: str) -> Timing:
        runs[name].append(ours[name]())
        return runs[name][-1].timing

    with genai_peers(arguments, prompt) as peers:
        sides = {name: lambda name=name: timed(name) for name in ours}
        sides[BARE] = lambda: bare.run(prompt, tokens)
        sides |= {name: lambda peer=peer: peer.run(tokens) for name, peer in peers.items()}
        interleave(sides, 1, "warm-up")
        for kept in runs.values():
            kept.clear()
        timings = interleave(sides, arguments.repeats)
        version = next((peer.version for peer in peers.values()), None)
    host = {name: [run.host_share for run in found] for name, found in runs.items()}
    same = timings[OURS][0].token_ids == timings[BARE][0].token_ids
    print(f"prompt {len(prompt)} tokens, {tokens} tokens timed, {arguments.repeats} repeats: median (low-high)")
    results = report(timings, host)
    print(f"ours and the bare loop chose {'the same tokens' if same else 'DIFFERENT TOKENS'}")
    facts = {"prompt_tokens": len(prompt), "tokens": tokens, "same_tokens_as_bare_loop": same, "sides": results}
    host_ms = [run.stats.host_ms / run.stats.rounds for run in runs[OURS]]
    print(f"host time per greedy round: {median(host_ms) * 1e3:.0f} us")
    versions = {"onnxruntime-genai": version} if version else {}
    print(f"written to {record.write('decode', facts, versions)}")


if __name__ == "__main__":
    main()
