"""What every benchmark shares: interleaving, medians, provenance, result lines, tables, prompts.

Standard library only, so that a script in another environment can use it too.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "benchmarks" / "prompts"
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("oxidize-ort", "onnxruntime", "onnxruntime-gpu", "numpy", "onnx", "tokenizers")
_SETTLE_STEP_S, _SETTLE_LIMIT_S, _IDLE_SHARE = 0.02, 2.0, 0.05

T = TypeVar("T")
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed decode: seconds of wall time for `tokens` tokens, and all ids chosen, the first one included."""

    seconds: float
    tokens: int
    token_ids: tuple[int, ...]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of a few measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """For people: median (low-high)."""
        median, low, high = (f"{scale * value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low}-{high})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios of measurements of the same repeat: what slows the machine for a while slows both."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def interleave(sides: Mapping[str, Callable[[], T]], repeats: int, label: str = "") -> dict[str, list[T]]:
    """Measure every side once per repeat; the order turns round each time, so no side is always the first."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            show_progress(f"{label} {repeat + 1}/{repeats} {name}")
            wait_until_idle()
            results[name].append(sides[name]())
    show_progress("")
    return results


def wait_until_idle() -> None:
    """Sleep until this process's threads have stopped spinning, so that the next side has the machine."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    while time.monotonic() < deadline:
        cpu = time.process_time()
        time.sleep(_SETTLE_STEP_S)
        if time.process_time() - cpu < _IDLE_SHARE * _SETTLE_STEP_S:
            return


def show_progress(text: str) -> None:
    """One line on a terminal that overwrites itself; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text.strip()}", end="", file=sys.stderr, flush=True)


def next_power_of_two(value: int) -> int:
    """The least power of two that is not under `value` (>= 1)."""
    return 1 << (value - 1).bit_length()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in aligned columns; the first row is the heading, the first column is flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `answer` is a beginning that is put into the model's mouth, if it is not empty."""

    name: str
    prompt: str
    answer: str = ""


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file with one JSON object a line, keyed like `Prompt`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines if line.strip()]


def benchmark_parser(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has; `description` is the script's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help=f"default {repeats}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--note", default="", help="a remark to keep with the result")
    return parser


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """The bundle and how to run it."""
    parser.add_argument("--bundle", type=Path, required=True, help="folder written by `oxidize export`")
    parser.add_argument("--threads", type=int, default=0, help="0 (default): one per physical core")
    parser.add_argument("--spin", choices=("auto", "on", "off"), default="auto")


@dataclass(slots=True)
class Record:
    """Begins when a benchmark does and writes its one result line when it is over."""

    arguments: argparse.Namespace
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    load_begin: tuple[float, ...] = field(default_factory=os.getloadavg)

    def write(self, name: str, results: Json, versions: Mapping[str, str] | None = None) -> Path:
        """Append the line to `<results folder>/<name>.jsonl`."""
        line = {
            "benchmark": name,
            **self._provenance(versions or {}),
            "results": results,
        }
        path = self.arguments.results / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, default=_plain) + "\n")
        return path

    def _provenance(self, versions: Mapping[str, str]) -> Json:
        options = vars(self.arguments)
        return {
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(UTC) - self.started).total_seconds(), 1),
            "git": git_state(),
            "argv": [portable(argument) for argument in sys.argv],
            "note": options["note"],
            "repeats": options["repeats"],
            "threads": options.get("threads"),
            "spin": options.get("spin"),
            "bundle": bundle_facts(options["bundle"]) if options.get("bundle") else None,
            "versions": {"python": platform.python_version(), **_installed(), **versions},
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "physical_cores": physical_cores(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_begin": self.load_begin,
            "load_end": os.getloadavg(),
        }


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return {"median": value.median, "low": value.low, "high": value.high}
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def portable(argument: str) -> str:
    """An argument without the folders of this machine: of an absolute path only the last part stays."""
    option, equals, value = argument.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={portable(value)}"
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def git_state() -> str:
    """The commit, with "-dirty" when tracked files differ from it; "unknown" outside a repository."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def bundle_facts(folder: Path) -> Json:
    """What identifies a bundle: its source, precision and size."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {
        "source": manifest["provenance"]["source"],
        "precision": manifest["precision"],
        "megabytes": round(sum(entry["size"] for entry in manifest["files"].values()) / 1e6, 1),
        "weights_sha256": {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".bin")},
    }


def cpu_model() -> str:
    """The processor's own name."""
    return next((value for key, value in _cpu_facts() if key == "model name"), platform.processor())


def physical_cores() -> int:
    """Cores, hyperthreads not counted; all logical processors where that is not known."""
    packages = [value for key, value in _cpu_facts() if key == "physical id"]
    cores = [value for key, value in _cpu_facts() if key == "core id"]
    return len(set(zip(packages, cores, strict=False))) or os.cpu_count() or 1


def _cpu_facts() -> Iterator[tuple[str, str]]:
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
