"""The bundle's manifest: schema, strict loading, validation. The reader defines the format; the exporter obeys it.

Standard library only. The prose of this format is docs/bundle-format.md.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_origin, get_type_hints

from .contracts import GraphContract
from .errors import BundleError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a bundle came from. `files` maps source file names to their sha256."""

    tool: str
    source: str
    revision: str | None
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the target the runtime needs."""

    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # width of the logits
    token_count: int  # ids at or above this are padding and are never produced
    max_positions: int
    sliding_window: int | None
    rope_theta: float


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Files of the tokenizer, relative to the bundle."""

    tokenizer: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    vocab_sha256: str  # of the id -> token table, to compare two tokenizers by content


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for sampling, from the checkpoint, and every id that ends an answer."""

    eos_token_ids: tuple[int, ...]
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One ONNX graph of the bundle. `ragged` bodies take several slots of different lengths in one pass."""

    role: str
    profile: str
    ragged: bool
    file: str
    data: tuple[str, ...]
    opset: int
    precision: str
    minimum_ort: str
    contract: GraphContract


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """A draft shipped inside the bundle. Kind "model": `folder` is itself a bundle."""

    name: str
    kind: str
    folder: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a bundle says about itself."""

    schema_version: int
    precision: str
    provenance: Provenance
    model: ModelFacts
    tokenizer: TokenizerFiles
    generation: GenerationDefaults
    graphs: tuple[GraphEntry, ...]
    files: dict[str, FileEntry]
    drafts: tuple[DraftEntry, ...] = ()
    taps: tuple[int, ...] = field(default=())

    def graph(self, role: str, profile: str, ragged: bool = False) -> GraphEntry | None:
        """The graph of this role and profile, if the bundle has it."""
        for entry in self.graphs:
            if (entry.role, entry.profile, entry.ragged) == (role, profile, ragged):
                return entry
        return None

    def dumps(self) -> str:
        """The manifest as JSON text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def load_manifest(folder: Path) -> Manifest:
    """Read and validate `manifest.json`: schema, paths and file sizes (not hashes, see `verify_hashes`)."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_NAME}; make one with `oxidize export`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {path}: {error}") from error
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not valid JSON ({error}); export the bundle again") from None
    manifest = parse_manifest(raw)
    _check_files(folder, manifest)
    return manifest


def parse_manifest(raw: Any) -> Manifest:
    """Build a Manifest from decoded JSON; unknown keys, missing keys and wrong types are BundleErrors."""
    version = raw.get("schema_version") if isinstance(raw, Mapping) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"manifest schema_version is {version!r}, this version reads {SCHEMA_VERSION}; export the bundle again"
        )
    manifest = _decode(Manifest, raw, "manifest")
    for name in _paths(manifest):
        check_relative(name)
    listed = set(manifest.files)
    for entry in manifest.graphs:
        missing = sorted({entry.file, *entry.data} - listed)
        if missing:
            raise BundleError(f"manifest names {missing[0]} for graph {entry.role} but does not list its hash")
    return manifest


def check_relative(name: str) -> None:
    """Refuse a path that could leave the bundle folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise BundleError(f"manifest path {name!r} leaves the bundle folder; the bundle is not safe to load")


def verify_hashes(folder: Path, manifest: Manifest, names: tuple[str, ...] | None = None) -> None:
    """Compare the sha256 of the named files (all by default) with the manifest."""
    for name in names if names is not None else tuple(manifest.files):
        actual = sha256_of(folder / name)
        if actual != manifest.files[name].sha256:
            raise BundleError(
                f"{folder / name} has sha256 {actual[:12]}..., the manifest says "
                f"{manifest.files[name].sha256[:12]}...; the file was altered, export or copy the bundle again"
            )


def sha256_of(path: Path) -> str:
    """The file's sha256 as hex."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error}") from error


def _paths(manifest: Manifest) -> list[str]:
    names = [*manifest.files, manifest.tokenizer.tokenizer, *(draft.folder for draft in manifest.drafts)]
    if manifest.tokenizer.chat_template:
        names.append(manifest.tokenizer.chat_template)
    return names


def _check_files(folder: Path, manifest: Manifest) -> None:
    root = folder.resolve()
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(root):
            raise BundleError(f"{path} is a link that leaves the bundle folder; the bundle is not safe to load")
        try:
            size = path.stat().st_size
        except OSError:
            raise BundleError(f"{path} is missing; export or copy the bundle again") from None
        if size != entry.size:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {entry.size}; export or copy the bundle again"
            )


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Decode JSON into dataclasses, tuples, dicts and scalars after the type hints, strictly."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(kind, "__dataclass_fields__"):
        return _decode_dataclass(kind, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if arguments:  # a union: X | None, int | str
        if value is None and type(None) in arguments:
            return None
        _expect(type(value) in arguments or (float in arguments and type(value) is int), where, str(kind), value)
        return value
    if kind is float:
        _expect(type(value) in (int, float), where, "a number", value)
        return float(value)
    _expect(type(value) is kind, where, kind.__name__, value)
    return value


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints = get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise BundleError(f"{where} has the unknown key {unknown[0]!r}; update oxidize or export the bundle again")
    given = {}
    for item in fields(kind):
        if item.name in value:
            given[item.name] = _decode(hints[item.name], value[item.name], f"{where}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise BundleError(f"{where} lacks the key {item.name!r}; export the bundle again")
    return kind(**given)


def _expect(ok: bool, where: str, expected: str, value: Any) -> None:
    if not ok:
        shown = repr(value)
        raise BundleError(f"{where} must be {expected}, not {shown[:60]}; export the bundle again")
