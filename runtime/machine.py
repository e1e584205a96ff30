"""Facts about this machine on which speed depends. Best effort: what a system does not tell is empty."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .session import load_ort, usable_cores

_CPU_FACTS = Path("/proc/cpuinfo")
_GPU_FACTS = Path("/proc/driver/nvidia/gpus")
_THREADS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: physical ones this process may use. memory: bytes of RAM, 0 where unknown. gpus: model names."""

    cpu: str
    cores: int
    memory: int
    gpus: tuple[str, ...]
    onnxruntime: str


def describe_machine() -> Machine:
    """Look at the machine this process runs on; ProviderError without ONNX Runtime."""
    return Machine(_cpu_name(), usable_cores(), _memory(), tuple(_gpu_names()), load_ort().__version__)


def scheduled_ns() -> tuple[int, int]:
    """How long the threads of this process ran so far, and how long they waited for a core; zeros where unknown."""
    ran = waited = 0
    for path in _THREADS.glob("*/schedstat"):
        try:
            first, second, *_ = map(int, path.read_text(encoding="ascii").split())
        except (OSError, ValueError):  # a thread that has just ended
            continue
        ran, waited = ran + first, waited + second
    return ran, waited


def _cpu_name() -> str:
    return _field(_CPU_FACTS, "model name") or platform.processor() or platform.machine()


def _gpu_names() -> Iterator[str]:
    for path in sorted(_GPU_FACTS.glob("*/information")):
        yield _field(path, "Model") or "unknown"


def _field(path: Path, name: str) -> str:
    """The value of the first `name: value` line."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return " ".join(value.split())
    except OSError:
        pass
    return ""


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
