"""The door to ONNX Runtime: providers, sessions, device tensors and IO bindings. Knows nothing about decoding."""

import importlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .contracts import GraphContract, TensorSpec
from .errors import BundleError, ProviderError, UsageError

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
SPIN_MODES = ("auto", "on", "off")
_SPIN_AUTO_US = "10"  # long enough to bridge the gap between two nodes, too short to starve a neighbour
_LOG = logging.getLogger("oxidize")
_INSTALL = "install one of `pip install 'oxidize-ort[cpu]'` and `pip install 'oxidize-ort[gpu]'`"


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Where and how sessions run. `threads` 0 means one per physical core; `provider_options` go to ORT as they are."""

    provider: str = "auto"
    threads: int = 0
    spin: str = "auto"
    device_id: int = 0
    provider_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.provider != "auto" and self.provider not in PROVIDERS:
            raise UsageError(f"provider must be auto, {', '.join(PROVIDERS)}, not {self.provider!r}")
        if self.spin not in SPIN_MODES:
            raise UsageError(f"spin must be one of {', '.join(SPIN_MODES)}, not {self.spin!r}")
        if not 0 <= self.threads <= 1024:
            raise UsageError(f"threads must be between 0 (all cores) and 1024, not {self.threads}")


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors live: `kind` is "cpu" or "cuda"."""

    kind: str
    id: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether the host reads this memory directly."""
        return self.kind == "cpu"


def load_ort() -> Any:
    """Import onnxruntime, or say how to install it."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ProviderError(f"ONNX Runtime is not installed ({error}); {_INSTALL}") from None


def resolve_provider(name: str) -> str:
    """Turn "auto" into the best provider of this ONNX Runtime build; refuse one that is not there."""
    available = load_ort().get_available_providers()
    if name == "auto":
        return "cuda" if PROVIDERS["cuda"] in available and _has_gpu() else "cpu"
    if PROVIDERS[name] not in available:
        usable = ", ".join(key for key, value in PROVIDERS.items() if value in available)
        raise ProviderError(
            f"this ONNX Runtime build has no {name} provider (it has: {usable}); "
            "install `pip install 'oxidize-ort[gpu]'` on a machine with an NVIDIA GPU, or use --provider cpu"
        )
    if name != "cpu" and not _has_gpu():
        raise ProviderError(f"no NVIDIA GPU was found for provider {name}; check the driver, or use --provider cpu")
    return name


def _preload_cuda(ort: Any) -> None:
    """Let ONNX Runtime find the CUDA and cuDNN libraries that pip installed."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or os.name == "nt"


def usable_cores() -> int:
    """Physical cores this process may run on, bounded by a container's CPU quota; at least 1."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu)) for cpu in allowed}
    quota, _, period = _read("/sys/fs/cgroup/cpu.max", "max 100000").partition(" ")
    limit = math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else len(siblings)
    return max(1, min(len(siblings), limit))


def _read(path: str, default: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return default


class Tensor:
    """A value ONNX Runtime reads and writes in place. On the CPU `host` is a live view of it."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: Device) -> None:
        ort = load_ort()
        self.shape, self.dtype, self.device = shape, np.dtype(dtype), device
        if device.is_cpu:
            self.host: np.ndarray | None = np.zeros(shape, self.dtype)
            self.value = ort.OrtValue.ortvalue_from_numpy(self.host)
        else:
            self.host = None  # zeroed below: a mask multiplies what it hides by 0, which only numbers survive
            self.value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), self.dtype, device.kind, device.id)
            self.value.update_inplace(np.zeros(shape, self.dtype))
        self.pointer: int = self.value.data_ptr()

    def write(self, array: ArrayLike) -> None:
        """Replace the whole content (host to device)."""
        if self.host is not None:
            self.host[...] = array
        else:
            self.value.update_inplace(np.ascontiguousarray(array, self.dtype))

    def read(self) -> np.ndarray:
        """The content on the host: a live view on the CPU, a copy elsewhere."""
        return self.host if self.host is not None else self.value.numpy()


class Arena:
    """A flat buffer that only grows; passes of different sizes take a prefix of it."""

    def __init__(self, row: tuple[int, ...], dtype: str, device: Device) -> None:
        self._row, self._dtype, self._device = row, dtype, device
        self.tensor = Tensor((1, *row), dtype, device)

    def reserve(self, rows: int) -> bool:
        """Make room for this many rows; True when the buffer moved and bindings to it are stale."""
        if rows <= self.tensor.shape[0]:
            return False
        size = 1 << (rows - 1).bit_length()
        self.tensor = Tensor((size, *self._row), self._dtype, self._device)
        return True


class GraphSession:
    """One graph on one provider, checked against its contract, run through bindings only."""

    def __init__(
        self, path: Path, contract: GraphContract, provider: str, options: RuntimeOptions, light: bool
    ) -> None:
        """`light` graphs are too small for a thread pool of their own to pay, so they never spin."""
        self._ort = load_ort()
        self.contract = contract
        self.device = Device("cpu") if provider == "cpu" else Device("cuda", options.device_id)
        self.session = _create(self._ort, path, provider, options, light)
        self.elapsed_ns = 0
        self.runs = 0
        _check_contract(self.session, contract, path)
        if provider != "cpu":
            _check_assignment(self.session, provider, contract.role)

    def binding(self) -> "Binding":
        """A new, empty binding for one shape."""
        return Binding(self.session.io_binding(), self.device)

    def run(self, binding: "Binding") -> None:
        """Run once; the time goes to `elapsed_ns`."""
        start = perf_counter_ns()
        try:
            binding.run(self.session)
        except Exception as error:  # ORT raises several types, all of which mean the run failed
            reason = str(error).splitlines()[0][:300]
            raise ProviderError(f"ONNX Runtime failed in the {self.contract.role} graph: {reason}") from error
        self.elapsed_ns += perf_counter_ns() - start
        self.runs += 1


class Binding:
    """Inputs and outputs of one shape of one session, bound once and run many times."""

    def __init__(self, io: Any, device: Device) -> None:
        self._io, self._device = io, device
        self._raw = io._iobinding
        self._kept: dict[tuple[str, str], Tensor] = {}  # keeps what ORT points at alive
        self._read: dict[str, tuple[int, tuple[int, ...]]] = {}  # by input, where it is read from and as what shape

    def bind_input(self, name: str, tensor: Tensor, shape: tuple[int, ...], offset: int = 0) -> None:
        """Bind a prefix of `tensor`, starting `offset` elements in, read as `shape`."""
        pointer = tensor.pointer + offset * tensor.dtype.itemsize
        if self._read.get(name) != (pointer, shape):
            device = tensor.device
            self._io.bind_input(name, device.kind, device.id, tensor.dtype, list(shape), pointer)
            self._read[name] = (pointer, shape)
        self._kept["in", name] = tensor

    def bind_output(self, name: str, tensor: Tensor, shape: tuple[int, ...], offset: int = 0) -> None:
        """Have the output written into a prefix of `tensor`, read as `shape`."""
        pointer = tensor.pointer + offset * tensor.dtype.itemsize
        device = tensor.device
        self._io.bind_output(name, device.kind, device.id, tensor.dtype, list(shape), pointer)
        self._kept["out", name] = tensor

    def run(self, session: Any) -> None:
        """Run the session on what is bound."""
        if self._device.is_cpu:
            session._sess.run_with_iobinding(self._raw, None)
            return
        self._io.synchronize_inputs()
        session.run_with_iobinding(self._io)
        self._io.synchronize_outputs()


def check_version(minimum: str) -> None:
    """Refuse an ONNX Runtime older than a graph needs."""
    found = load_ort().__version__
    if _version(found) < _version(minimum):
        raise ProviderError(f"this bundle needs ONNX Runtime {minimum} or newer, this is {found}; upgrade it with pip")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _create(ort: Any, path: Path, provider: str, options: RuntimeOptions, light: bool) -> Any:
    if provider != "cpu":
        _preload_cuda(ort)
    settings = ort.SessionOptions()
    # 0 would let ONNX Runtime pin its workers to cores, where they collide with the calling thread.
    settings.intra_op_num_threads = options.threads or usable_cores()
    settings.inter_op_num_threads = 1
    settings.enable_mem_pattern = False
    settings.log_severity_level = 3
    config = _session_config(options.spin, light)
    if provider != "cpu":
        config["session.record_ep_graph_assignment_info"] = "1"
    for key, value in config.items():
        settings.add_session_config_entry(key, value)
    try:
        return ort.InferenceSession(str(path), settings, providers=_providers(provider, options))
    except Exception as error:  # ORT raises several types, all of which mean the graph did not load
        reason = str(error).splitlines()[0][:300]
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}") from error


def _session_config(spin: str, light: bool) -> dict[str, str]:
    config = {"session.set_denormal_as_zero": "1"}
    if light or spin == "off":
        return {**config, "session.intra_op.allow_spinning": "0"}
    config["session.force_spinning_stop"] = "1"
    if spin == "auto":
        config["session.intra_op.spin_duration_us"] = _SPIN_AUTO_US
    return config


def _providers(provider: str, options: RuntimeOptions) -> list[Any]:
    cpu = PROVIDERS["cpu"]
    if provider == "cpu":
        return [cpu]
    cuda = (
        PROVIDERS["cuda"],
        {"device_id": str(options.device_id), "arena_extend_strategy": "kSameAsRequested"},
    )
    if provider == "cuda":
        return [(cuda[0], {**cuda[1], **options.provider_options}), cpu]
    return [
        (PROVIDERS["tensorrt"], {"device_id": str(options.device_id), **options.provider_options}),
        cuda,
        cpu,
    ]


def _check_assignment(session: Any, provider: str, role: str) -> None:
    """Refuse a provider that ONNX Runtime dropped silently; warn about nodes it left to the CPU."""
    if PROVIDERS[provider] not in session.get_providers():
        raise ProviderError(
            f"ONNX Runtime could not start the {provider} provider for the {role} graph (see its message above); "
            "check the CUDA, cuDNN and TensorRT libraries, or use --provider cpu"
        )
    left = [
        f"{node.name} ({node.op_type})"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == PROVIDERS["cpu"]
        for node in part.get_nodes()
    ]
    if left:
        shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
        _LOG.warning("%d nodes of the %s graph run on the CPU, not on %s: %s", len(left), role, provider, shown)


def _check_contract(session: Any, contract: GraphContract, path: Path) -> None:
    for what, expected, actual in (
        ("input", contract.inputs, session.get_inputs()),
        ("output", contract.outputs, session.get_outputs()),
    ):
        found = {value.name: value for value in actual}
        if set(found) != {spec.name for spec in expected}:
            odd = sorted(set(found) ^ {spec.name for spec in expected})[0]
            raise BundleError(f"{path} and the manifest disagree about the {what} {odd!r}; export the bundle again")
        for spec in expected:
            _check_value(spec, found[spec.name], path)


_ORT_TYPES = {
    "float32": "tensor(float)", "float16": "tensor(float16)", "int64": "tensor(int64)",
    "int32": "tensor(int32)", "bool": "tensor(bool)",
}  # fmt: skip


def _check_value(spec: TensorSpec, value: Any, path: Path) -> None:
    shape = tuple(value.shape)
    same = len(shape) == len(spec.shape) and all(
        want == got for want, got in zip(spec.shape, shape, strict=True) if isinstance(want, int)
    )
    if value.type != _ORT_TYPES.get(spec.dtype) or not same:
        raise BundleError(
            f"{path}: {spec.name} is {value.type}{list(shape)}, the manifest says {spec.dtype}{list(spec.shape)}; "
            "export the bundle again"
        )
