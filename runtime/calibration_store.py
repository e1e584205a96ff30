"""Where calibrations are kept: one JSON file per model and circumstances, in the folder for what is worth remembering.

Losing a file only costs measuring again, so nothing here is an error: not a damaged file, not a folder that cannot be
written.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .costs import CostCurve
from .errors import BundleError
from .machine import Machine
from .manifest import DraftEntry, GraphEntry, Manifest
from .schema import decode, read_json
from .session import RuntimeOptions
from .target import Target

_FORMAT = 1
_FOLDER = "calibration"
BUSY = 0.2  # share of waiting from which a measurement is taken for disturbed ...
_BUSY_FOR = timedelta(hours=1)  # ... and how long it is used all the same


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of passes of one model: `ms[i]` milliseconds for `rows[i]` rows, ascending in both.

    Of a draft that is timed by whole proposals, `rows` are the tokens proposed. The other fields are those of
    `Calibration`; budget_s is how many seconds were allowed.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    measured_at: str
    seconds: float
    budget_s: float
    context: int
    waited: float

    def curve(self) -> CostCurve:
        """Milliseconds by rows; ValueError if they make no curve."""
        return CostCurve(tuple(zip(self.rows, self.ms, strict=True)))


@dataclass(frozen=True, slots=True)
class _File:
    """The content of a file. The key is kept in full: for people, and to be sure that the file is the one wanted."""

    format: int
    key: dict[str, str]
    measurement: Measurement


def measurement_key(
    model: Target, use: str, options: RuntimeOptions, machine: Machine, draft: DraftEntry | None = None
) -> dict[str, str]:
    """All on which the cost depends of this model's passes ("target", "draft"), or of proposals, by name.

    A `draft` that proposes with the model's embed and head adds what it is.
    """
    manifest = model.bundle.manifest
    on_cpu = model.provider == "cpu"
    own = {"draft": _draft_digest(manifest, draft)} if draft is not None else {}
    return own | {
        "weights": _weights_digest(manifest, manifest.graphs),
        "precision": manifest.precision,
        "use": use,
        "slots": str(model.slots),
        "floor": str(model.floor),
        "provider": model.provider,
        "provider_options": json.dumps(dict(options.provider_options), sort_keys=True),
        "threads": str(options.threads or machine.cores),
        "spin": options.spin,
        "ort": machine.onnxruntime,
        "cpu": machine.cpu,
        "cores": str(machine.cores),
        "gpus": "" if on_cpu else ", ".join(machine.gpus),
        "device": "" if on_cpu else f"{options.device_id} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}",
    }


def recall(cache: Path | None, key: dict[str, str] | None, budget_s: float) -> Measurement | None:
    """The measurement kept under `key`, if there is one that is whole and was allowed `budget_s` seconds or more.

    One from a busy machine is forgotten after an hour: until then it spares every start the measuring.
    """
    if cache is None or key is None:
        return None
    try:
        file = decode(_File, read_json(_path(cache, key)), "calibration")
    except (OSError, BundleError, OverflowError):
        return None
    found: Measurement = file.measurement
    ours = file.format == _FORMAT and file.key == key
    return found if ours and found.budget_s >= budget_s and _is_sound(found) and _is_current(found) else None


def remember(cache: Path | None, key: dict[str, str] | None, measurement: Measurement) -> None:
    """Keep a measurement under `key`, in place of an older one; without folder or key, do nothing."""
    if cache is None or key is None:
        return
    path = _path(cache, key)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(_File(_FORMAT, key, measurement)), indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def _path(cache: Path, key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()
    return cache / _FOLDER / f"{digest[:32]}.json"


def _weights_digest(manifest: Manifest, graphs: Sequence[GraphEntry]) -> str:
    """Of the hashes of graphs and their weights."""
    names = sorted({name for graph in graphs for name in (graph.file, *graph.data)})
    lines = [f"{name} {manifest.files[name].sha256}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _draft_digest(manifest: Manifest, draft: DraftEntry) -> str:
    """Of all that is the draft's own: graphs, weights, facts such as the size of its block."""
    facts = json.dumps(asdict(draft.neural), sort_keys=True) if draft.neural is not None else ""
    return hashlib.sha256(f"{facts}\n{_weights_digest(manifest, draft.graphs)}".encode()).hexdigest()


def _is_sound(measurement: Measurement) -> bool:
    """Whether the times make a curve that begins at one row, costs something and never falls."""
    try:
        points = measurement.curve().points
    except ValueError:
        return False
    times = [ms for _, ms in points]
    return points[0][0] == 1 and times[0] > 0 and times == sorted(times)


def _is_current(measurement: Measurement) -> bool:
    """Whether the machine was calm, or the measurement is new."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(measurement.measured_at)
    except (ValueError, TypeError):  # TypeError: without a time zone
        return False
    return measurement.waited <= BUSY or timedelta() <= age < _BUSY_FOR
