"""T(M): milliseconds of one target pass by its number of rows, the curve on which every draft length depends.

Each pass appends M rows behind the same context, scores all of them and is then taken back. Widths take turns.
"""

import argparse
from statistics import median
from time import perf_counter

from common import (
    Json,
    Record,
    Spread,
    add_runtime_options,
    benchmark_parser,
    show_progress,
    table,
    wait_until_idle,
)
from ours import runtime_options

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.target import Rows, Target

_WARM_UP = 3


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, repeats=30)
    add_runtime_options(parser)
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache (default 200)")
    return parser.parse_args()


def one_pass(target: Target, context: int, rows: int) -> float:
    """Milliseconds of a pass of `rows` rows behind `context` tokens."""
    tokens = [(7 * index) % target.token_count for index in range(rows)]
    started = perf_counter()
    target.forward([Rows(0, tokens, rows)])
    elapsed = perf_counter() - started
    target.cache.rewind_to(0, context)
    return 1e3 * elapsed


def measure(target: Target, arguments: argparse.Namespace) -> dict[int, list[float]]:
    """All times in ms by number of rows."""
    widths, context = range(1, arguments.max_rows + 1), arguments.context
    target.cache.reserve(context + arguments.max_rows)
    target.prefill(0, [(31 * index) % target.token_count for index in range(context)])
    times: dict[int, list[float]] = {rows: [] for rows in widths}
    wait_until_idle()
    for repeat in range(-_WARM_UP, arguments.repeats):
        show_progress(f"{repeat}/{arguments.repeats}")
        for rows in widths:
            elapsed = one_pass(target, context, rows)
            if repeat >= 0:
                times[rows].append(elapsed)
    show_progress("")
    return times


def report(times: dict[int, list[float]]) -> Json:
    """Print the table; return what goes into the result line."""
    rows = [("rows", "ms", "T(M)/T(1)", "ms per row")]
    results: Json = {}
    for count, found in times.items():
        middle, relative = median(found), median(a / b for a, b in zip(found, times[1], strict=True))
        rows.append((str(count), Spread.of(found).text(), f"{relative:.2f}", f"{middle / count:.2f}"))
        results[str(count)] = {"ms": Spread.of(found), "relative": relative}
    print(table(rows))
    return results


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    target = Target(open_bundle(arguments.bundle), runtime_options(arguments))
    results = report(measure(target, arguments))
    print(f"written to {record.write('passes', {'context': arguments.context, 'rows': results})}")


if __name__ == "__main__":
    main()
