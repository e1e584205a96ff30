"""Times of whole commands: `oxidize --help`, start to first token of `oxidize run`, and `oxidize export`.

The cold start is measured from process start to the first byte of text, in three states: warm (everything in the
page cache), cold (the bundle's pages dropped first), and first (cold, and nothing remembered of earlier runs, so the
weights are hashed too). Python and its packages stay in the page cache in all three.

Exports give wall time and peak resident memory; with --genai-python and --genai-source onnxruntime-genai's model
builder takes its turns. No export measures perplexity.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Json, Record, Spread, benchmark_parser, interleave, table

WARM, COLD, FIRST = "warm", "cold", "first"
_PROMPT = "Name three things one can see from a lighthouse."


class ExportError(Exception):
    """An export failed; the text is the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One export: seconds and peak resident memory in MB (that of this script is its least)."""

    seconds: float
    megabytes: float


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--bundle", type=Path, help="measure `oxidize run` on this bundle")
    parser.add_argument("--source", action="append", default=[], help="measure its export; may be repeated")
    parser.add_argument("--precision", default="int4", help="of the exports (default int4)")
    parser.add_argument("--genai-python", type=Path, help="Python of an environment with onnxruntime-genai")
    parser.add_argument("--genai-source", type=Path, help="Hugging Face folder for genai's model builder")
    parser.add_argument("--help-repeats", type=int, default=15)
    parser.add_argument("--oxidize", type=Path, default=Path(sys.executable).with_name("oxidize"))
    return parser.parse_args()


def time_help(oxidize: Path) -> float:
    """Seconds of `oxidize --help`."""
    started = time.perf_counter()
    subprocess.run([str(oxidize), "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def time_first_token(oxidize: Path, bundle: Path, cache: str) -> float:
    """Seconds from the start of `oxidize run` to its first byte of text; `cache` is its XDG cache folder."""
    command = [str(oxidize), "run", str(bundle), "--prompt", _PROMPT, "-n", "8"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        begun = os.read(process.stdout.fileno(), 1)
        elapsed = time.perf_counter() - started
        process.stdout.read()
    if process.returncode or not begun:
        raise SystemExit(f"oxidize run {bundle} ended with exit code {process.returncode}")
    return elapsed


def drop_pages(folder: Path) -> None:
    """Ask the system to forget the cached pages of all files in `folder`."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def start_sides(arguments: argparse.Namespace, cache: str) -> dict[str, Callable[[], float]]:
    """The three states of a cold start."""
    oxidize, bundle = arguments.oxidize, arguments.bundle

    def cold() -> float:
        drop_pages(bundle)
        return time_first_token(oxidize, bundle, cache)

    def first() -> float:
        drop_pages(bundle)
        with tempfile.TemporaryDirectory() as empty:
            return time_first_token(oxidize, bundle, empty)

    return {WARM: lambda: time_first_token(oxidize, bundle, cache), COLD: cold, FIRST: first}


def run_export(command: Sequence[str], folder: Path) -> Finished:
    """Run an export in `folder` and wait for it; ExportError with the end of its output when it fails."""
    with (folder / "log").open("w+b") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise ExportError(log.read().decode(errors="replace")[-1000:].strip())
    unit = 1e6 if sys.platform == "darwin" else 1e3  # ru_maxrss is in bytes there, in KiB elsewhere
    return Finished(elapsed, usage.ru_maxrss / unit)


def export_sides(arguments: argparse.Namespace) -> dict[str, Callable[[], Finished]]:
    """One export per --source, and genai's builder if it was named."""
    commands: dict[str, list[str]] = {}
    for source in arguments.source:
        path = str(Path(source).resolve()) if Path(source).exists() else source
        command = [str(arguments.oxidize), "export", path, "-o", "out", "--no-eval"]
        commands[f"oxidize {Path(source).name}"] = [*command, "--precision", arguments.precision]
    if arguments.genai_python and arguments.genai_source:
        source = str(arguments.genai_source.resolve())
        command = [str(arguments.genai_python), "-m", "onnxruntime_genai.models.builder", "-i", source]
        command += ["-o", "out", "-p", arguments.precision, "-e", "cpu"]
        commands[f"genai {arguments.genai_source.name}"] = command

    def export(command: Sequence[str]) -> Finished:
        with tempfile.TemporaryDirectory() as folder:
            return run_export(command, Path(folder))

    return {name: lambda command=command: export(command) for name, command in commands.items()}


def report(heading: str, columns: Mapping[str, Mapping[str, Spread]], digits: int) -> None:
    """Print a table with one row per measurement and one column per quantity."""
    quantities = list(next(iter(columns.values())))
    rows = [(heading, *quantities)]
    rows += [(name, *(found[key].text(digits) for key in quantities)) for name, found in columns.items()]
    print(f"\n{table(rows)}")


def measure_commands(arguments: argparse.Namespace) -> Json:
    """`--help`, and the starts of a bundle when there is one; seconds."""
    help_sides = {"oxidize --help": lambda: time_help(arguments.oxidize)}
    times = interleave(help_sides, arguments.help_repeats)
    if arguments.bundle:
        with tempfile.TemporaryDirectory() as cache:
            time_first_token(arguments.oxidize, arguments.bundle, cache)
            found = interleave(start_sides(arguments, cache), arguments.repeats)
        times |= {f"first token, {state}": values for state, values in found.items()}
    spreads = {name: Spread.of(values) for name, values in times.items()}
    report("command", {name: {"seconds": spread} for name, spread in spreads.items()}, 3)
    return dict(spreads)


def measure_exports(arguments: argparse.Namespace) -> Json:
    """Seconds and megabytes of each export."""
    sides = {name: run for name, run in export_sides(arguments).items() if _works(name, run)}
    if not sides:
        return {}
    found = interleave(sides, arguments.repeats, "export")
    spreads = {
        name: {
            "seconds": Spread.of([run.seconds for run in runs]),
            "peak MB": Spread.of([run.megabytes for run in runs]),
        }
        for name, runs in found.items()
    }
    report("export", spreads, 1)
    return dict(spreads)


def _works(name: str, export: Callable[[], Finished]) -> bool:
    """Run an export once, as a warm-up; one that fails is left out, and said so."""
    try:
        export()
    except ExportError as error:
        print(f"\n{name} is left out, it failed: {error}")
        return False
    return True


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    results = {"commands": measure_commands(arguments), "exports": measure_exports(arguments)}
    print(f"\nwritten to {record.write('startup', results)}")


if __name__ == "__main__":
    main()
