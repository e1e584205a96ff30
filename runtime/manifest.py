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

from .contracts import (
    PROFILES,
    BodyShape,
    DraftShape,
    GraphContract,
    body_contract,
    draft_contract,
    embed_contract,
    fuse_contract,
    head_contract,
    markov_contract,
    select_contract,
)
from .errors import BundleError
from .schema import decode, read_json

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
_COUNTS = (
    "layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab_size",
    "token_count",
    "max_positions",
)
_ACTIVATIONS = ("float32", "float16")
NEURAL_KINDS = ("dflash", "eagle3", "mtp", "medusa")


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
    graph. layers, kv_heads and head_dim are 0 for "medusa", which keeps no KV.
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


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """A draft shipped inside the bundle, in `folder`.

    Kind "model": the folder is itself a bundle. Kinds "dflash", "eagle3", "mtp" and "medusa": `neural` and `graphs`
    describe it; roles "draft", for "eagle3" also "fuse", for "dflash" also "select" (DFlash 2) or "markov" (DSpark),
    "embed" and "head" where it has its own.
    """

    name: str
    kind: str
    folder: str
    neural: NeuralDraft | None = None
    graphs: tuple[GraphEntry, ...] = ()


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
    _check_facts(manifest.model)
    _check_graphs(manifest)
    for draft in manifest.drafts:
        _check_draft(manifest, draft)
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


def _check_facts(facts: ModelFacts) -> None:
    for name in _COUNTS:
        value = getattr(facts, name)
        if not 1 <= value < 1 << 31:
            raise BundleError(f"manifest.model.{name} must be a positive number, not {value}; export the bundle again")
    if facts.token_count > facts.vocab_size:
        raise BundleError(
            f"manifest.model has {facts.token_count} tokens in a vocabulary of {facts.vocab_size}; "
            "export the bundle again"
        )


def _check_graphs(manifest: Manifest) -> None:
    """Buffers are sized after the facts and filled by the graphs, so both must say the same."""
    for graph in manifest.graphs:
        if graph.contract != _expected_contract(manifest, graph):
            raise BundleError(
                f"the contract of graph {brief(graph.file)} is not that of a {brief(graph.role)} graph "
                f"(profile {brief(graph.profile)}) of this model; export the bundle again"
            )
    kinds = {(graph.role, graph.profile, graph.ragged) for graph in manifest.graphs}
    if len(kinds) < len(manifest.graphs) or len({_activations(graph) for graph in manifest.graphs}) > 1:
        raise BundleError(
            "the manifest's graphs contradict each other: two of one kind, or of different types; "
            "export the bundle again"
        )


def _expected_contract(manifest: Manifest, graph: GraphEntry) -> GraphContract | None:
    """The contract that role and profile demand for this model; None when there can be none."""
    facts, dtype = manifest.model, _activations(graph)
    if graph.profile not in PROFILES or dtype not in _ACTIVATIONS:
        return None
    if graph.role == "embed":
        return embed_contract(facts.hidden_size, dtype)
    if graph.role == "head":
        return head_contract(facts.hidden_size, facts.vocab_size, dtype)
    names = {spec.name for spec in graph.contract.inputs}
    sliding = "attn_mask_sliding" in names
    if graph.role != "body" or len(names) < facts.layers or (sliding and facts.sliding_window is None):
        return None
    shape = BodyShape(facts.hidden_size, facts.layers, facts.kv_heads, facts.head_dim, dtype, manifest.taps, sliding)
    return body_contract(shape, graph.profile, graph.ragged)


def _check_draft(manifest: Manifest, draft: DraftEntry) -> None:
    """A draft that reads the target's rows: facts in range, graphs of the contracts these facts demand."""
    neural = draft.neural
    if (draft.kind == "model") != (neural is None) or draft.kind not in ("model", *NEURAL_KINDS):
        raise BundleError(f"draft {brief(draft.name)} of kind {brief(draft.kind)} cannot be read; update oxidize")
    if neural is None:
        return
    cache = (neural.layers, neural.kv_heads, neural.head_dim)
    counts = (neural.hidden_size, neural.feature_size, neural.max_positions, neural.block_size)
    counts += cache if draft.kind != "medusa" else ()
    vocabulary = manifest.model.vocab_size
    good = all(1 <= count < 1 << 31 for count in counts)
    good = good and (neural.choices is None or 1 <= neural.choices <= vocabulary)
    good = good and all(0 <= tap < manifest.model.layers for tap in neural.taps)
    good = good and (neural.mask_token_id is None or 0 <= neural.mask_token_id < vocabulary)
    if not good:
        raise BundleError(f"the facts of draft {brief(draft.name)} are out of range; export the bundle again")
    for graph in draft.graphs:
        if graph.contract != _expected_draft_contract(draft.kind, neural, vocabulary, graph):
            raise BundleError(
                f"the contract of graph {brief(graph.file)} is not that of a {brief(graph.role)} graph of draft "
                f"{brief(draft.name)}; export the bundle again"
            )


_DRAFT_CONTRACTS = {
    "draft": draft_contract,
    "fuse": fuse_contract,
    "select": select_contract,
    "markov": markov_contract,
}


def _expected_draft_contract(
    kind: str, neural: NeuralDraft, vocabulary: int, graph: GraphEntry
) -> GraphContract | None:
    inputs = {spec.name: spec for spec in graph.contract.inputs}
    outputs = {spec.name for spec in graph.contract.outputs}
    specs = (*graph.contract.inputs, *graph.contract.outputs)
    dtype = next((spec.dtype for spec in specs if spec.dtype in _ACTIVATIONS), "")
    if not dtype or (graph.role == "draft" and len(inputs) < neural.layers):
        return None
    if graph.role == "embed":
        return embed_contract(neural.hidden_size, dtype)
    if graph.role == "head":
        return head_contract(neural.hidden_size, neural.draft_vocab_size or 0, dtype)
    if graph.role not in _DRAFT_CONTRACTS or (graph.role == "select") > (neural.choices is not None):
        return None
    shape = DraftShape(
        kind=kind,
        hidden_size=neural.hidden_size,
        layers=neural.layers,
        kv_heads=neural.kv_heads,
        head_dim=neural.head_dim,
        feature_size=neural.feature_size,
        vocab_size=vocabulary,
        draft_vocab_size=neural.draft_vocab_size,
        sliding="attn_mask_sliding" in inputs,
        heads=neural.block_size - 1,
        choices=neural.choices,
        confident="confidence" in outputs,
        dtype=dtype,
    )
    return _DRAFT_CONTRACTS[graph.role](shape)


def _activations(graph: GraphEntry) -> str:
    """The type of the hidden states the graph takes or gives."""
    types = {spec.name: spec.dtype for spec in (*graph.contract.inputs, *graph.contract.outputs)}
    return types.get("hidden", types.get("inputs_embeds", ""))


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
