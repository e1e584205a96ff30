"""Decoding on a machine that is not ours alone: speed with a busy process on one core, against the idle speed.

Every setting of --spins and --thread-counts takes its turn, idle and beside a process that never pauses and is bound
to the first core. The last side is a bare loop with ONNX Runtime's default settings, for comparison. Retention is
busy speed over idle speed of the same repeat.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common import (
    PROMPTS,
    Json,
    Record,
    Spread,
    Timing,
    benchmark_parser,
    interleave,
    ratios,
    table,
)
from fused import FusedLoop
from ours import decode, encode, open_engine

from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.engine import Engine

_BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
IDLE, BUSY = "idle", "busy"
Decode = Callable[[], Timing]


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder written by `oxidize export`")
    parser.add_argument("--spins", nargs="+", choices=("auto", "on", "off"), default=["auto", "on", "off"])
    parser.add_argument("--thread-counts", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=64, help="timed tokens per run (default 64)")
    return parser.parse_args()


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """A process that keeps one core busy."""
    command = [sys.executable, "-c", _BUSY, str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # it is bound to its core now
        try:
            yield
        finally:
            process.kill()


def settings(arguments: argparse.Namespace) -> dict[str, Decode]:
    """One timed decode per setting, each with sessions of its own."""
    text = (PROMPTS / "decode.txt").read_text(encoding="utf-8")
    engines = {
        f"{threads} threads, spin {spin}": open_engine(
            argparse.Namespace(bundle=arguments.bundle, threads=threads, spin=spin)
        )
        for threads in arguments.thread_counts
        for spin in arguments.spins
    }
    prompt = encode(next(iter(engines.values())), text)
    config = SpeculativeConfig(draft_tokens_per_step=0, max_new_tokens=arguments.tokens + 1)

    def decoding(engine: Engine) -> Decode:
        return lambda: decode(engine.decoder, prompt, config).timing

    threads = max(arguments.thread_counts)
    bare = FusedLoop(arguments.bundle, threads)
    return {
        **{name: decoding(engine) for name, engine in engines.items()},
        f"bare loop, {threads} threads, ORT defaults": lambda: bare.run(prompt, arguments.tokens),
    }


def both_ways(decodes: dict[str, Decode]) -> dict[str, Decode]:
    """Each setting idle and beside a busy core."""
    core = min(os.sched_getaffinity(0))

    def beside(run: Decode) -> Timing:
        with busy_core(core):
            return run()

    sides: dict[str, Decode] = {}
    for name, run in decodes.items():
        sides[f"{name}, {IDLE}"] = run
        sides[f"{name}, {BUSY}"] = lambda run=run: beside(run)
    return sides


def report(names: list[str], timings: dict[str, list[Timing]]) -> Json:
    """Print the table; return what goes into the result line."""
    rows, results = [("setting", "idle tok/s", "busy tok/s", "retention %")], {}
    for name in names:
        idle, busy = ([run.speed for run in timings[f"{name}, {way}"]] for way in (IDLE, BUSY))
        kept = Spread.of(ratios(busy, idle))
        rows.append((name, Spread.of(idle).text(1), Spread.of(busy).text(1), kept.text(0, 100)))
        results[name] = {IDLE: Spread.of(idle), BUSY: Spread.of(busy), "retention": kept}
    print(table(rows))
    return results


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    decodes = settings(arguments)
    for run in decodes.values():
        run()
    results = report(list(decodes), interleave(both_ways(decodes), arguments.repeats))
    facts = {"tokens": arguments.tokens, "cores": sorted(os.sched_getaffinity(0)), "settings": results}
    print(f"written to {record.write('contention', facts)}")


if __name__ == "__main__":
    main()
