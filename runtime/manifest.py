"""The bundle's manifest: schema, loading, validation. The reader defines the format; the exporter obeys it.

Standard library only. The prose of this format is docs/bundle-format.md.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from reprlib import repr as brief
from typing import Any

from .contracts import GraphContract
from .errors import BundleError
from .manifest_checks import check_draft, check_facts, check_graphs
from .schema import decode, read_json

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
class NeuralDraft:
    """Facts of a draft that reads the target's rows instead of tokens alone.

    taps: the target layers it reads, 0-based "output of layer i"; () where it reads the final hidden states.
    tap_convention: how the checkpoint counted them, in words. block_size: tokens of a block, the anchor included
    ("dflash"), or the anchor and a token per head ("medusa"); 1 for drafts that go token by token. sample_from_anchor:
    row 0 of a block predicts too. draft_vocab_size, d2t: rows of its own head, and the file (int64, little endian) with
    the target id of each; null where the target's head, or the target's ids, are used. causal, sliding_causal: whether
    rows of a block see earlier rows of it only, in full and in sliding layers. choices: tokens per row of the "select"
    graph. layers, kv_heads and head_dim are 0 for "medusa", which keeps no KV. mismatch: for what other target it was
    made, if it was forced upon this one.
    """

    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    feature_size: int
    taps: tuple[int, ...]
    tap_convention: str
    max_positions: int
    block_size: int = 1
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    draft_vocab_size: int | None = None
    d2t: str | None = None
    sliding_window: int | None = None
    causal: bool = False
    sliding_causal: bool = True
    choices: int | None = None
    mismatch: str | None = None


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """A draft shipped inside the bundle, in `folder`.

    Kind "model": the folder is itself a bundle. Kinds "dflash", "eagle3", "mtp" and "medusa": `neural` and `graphs`
    describe it; roles "draft", for "eagle3" also "fuse", for "dflash" also "select" (DFlash 2) or "markov" (DSpark),
    "embed" and "head" where it has its own. provenance: of the draft's own files; None where the inner bundle has one,
    or where they are the target's ("mtp").
    """

    name: str
    kind: str
    folder: str
    neural: NeuralDraft | None = None
    graphs: tuple[GraphEntry, ...] = ()
    provenance: Provenance | None = None


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
    """Read `manifest.json` and check all it says but the hashes (`verify_hashes`), file sizes included."""
    path = folder / MANIFEST_NAME
    try:
        raw = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_NAME}; make one with `oxidize export`"
        ) from None
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error}") from error
    manifest = parse_manifest(raw)
    _check_files(folder, manifest)
    return manifest


def parse_manifest(raw: Any) -> Manifest:
    """Build a Manifest from decoded JSON; anything unknown, missing or contradictory is a BundleError."""
    version = raw.get("schema_version") if isinstance(raw, Mapping) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"manifest schema_version is {brief(version)}, this version reads {SCHEMA_VERSION}; export the bundle again"
        )
    manifest = decode(Manifest, raw, "manifest")
    for name in (*manifest.files, *(draft.folder for draft in manifest.drafts)):
        check_relative(name)
    _check_listed(manifest)
    check_facts(manifest.model)
    check_graphs(manifest)
    for draft in manifest.drafts:
        check_draft(manifest, draft)
    return manifest


def check_relative(name: str) -> None:
    """Refuse a path that could leave the bundle folder or that some system reads in another way."""
    path = PurePosixPath(name)
    odd = path.is_absolute() or ".." in path.parts or str(path) != name or any(c in name for c in "\\:")
    if odd or not path.parts or not name.isprintable():
        raise BundleError(
            f"manifest path {brief(name)} is not a plain path inside the bundle folder; the bundle is not safe to load"
        )


def verify_hashes(folder: Path, manifest: Manifest, names: tuple[str, ...] | None = None) -> None:
    """Compare the sha256 of the named files (all by default) with the manifest."""
    for name in names if names is not None else tuple(manifest.files):
        actual = sha256_of(folder / name)
        if actual != manifest.files[name].sha256:
            raise BundleError(
                f"{folder / name} has sha256 {actual[:12]}..., the manifest says "
                f"{manifest.files[name].sha256[:12]}...; it was altered, export or copy the bundle again"
            )


def sha256_of(path: Path) -> str:
    """The file's sha256 as hex."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error}") from error


def _check_listed(manifest: Manifest) -> None:
    """Every file that is going to be read must have a hash."""
    tokenizer = manifest.tokenizer
    needed = [(tokenizer.tokenizer, "the tokenizer"), (tokenizer.chat_template, "the chat template")]
    for draft in manifest.drafts:
        if draft.neural is None:
            needed.append((f"{draft.folder}/{MANIFEST_NAME}", f"draft {draft.name}"))
        else:
            needed.append((draft.neural.d2t, f"draft {draft.name}"))
    drafted = [graph for draft in manifest.drafts for graph in draft.graphs]
    for graph in (*manifest.graphs, *drafted):
        needed += [(name, f"graph {graph.role}") for name in (graph.file, *graph.data)]
    for name, purpose in needed:
        if name is not None and name not in manifest.files:
            raise BundleError(
                f"manifest names {brief(name)} for {brief(purpose)} but does not list its hash; export the bundle again"
            )


def _check_files(folder: Path, manifest: Manifest) -> None:
    root = folder.resolve()
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            inside, status = path.resolve().is_relative_to(root), path.stat()
        except (OSError, RuntimeError):  # RuntimeError: a link that points at itself
            raise BundleError(f"{path} is missing; export or copy the bundle again") from None
        if not inside or not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} leaves the bundle folder, or is no plain file; the bundle is not safe to load")
        if status.st_size != entry.size:
            raise BundleError(
                f"{path} has {status.st_size} bytes, the manifest says {entry.size}; export or copy the bundle again"
            )
