"""Wraps a folder of onnxruntime-genai or optimum as a bundle: its graph is cut in three, its weights kept."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from oxidize.runtime.contracts import BodyShape, GraphContract, body_contract, embed_contract, head_contract
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError
from oxidize.runtime.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    GraphEntry,
    Manifest,
    ModelFacts,
    Provenance,
    sha256_of,
)

from .build import WEIGHTS_NAME, Progress
from .bundle import (
    AnyDraft,
    check_drafts,
    check_free,
    check_space,
    estimate_draft,
    list_files,
    write_draft,
)
from .config_hf import CONFIG_NAME as HF_CONFIG_NAME
from .config_hf import GENERATION_NAME
from .drafts.mtp import split_mtp
from .drafts.recognise import draft_kind
from .foreign_config import CONFIG_NAME, ForeignConfig, read_genai_config
from .foreign_cuts import find_fused_cuts, has_fused_cache
from .foreign_ends import Cuts
from .foreign_growing import find_growing_cuts
from .foreign_optimum import find_graph, graph_files, read_optimum_config
from .nested import Vocabulary
from .onnx_surgery import Cut, SourceGraph
from .source import TOKENIZER_NAMES, Checkpoint, locate, open_source
from .store import TensorStore
from .tokenizer import write_tokenizer
from .workspace import move_into_place, workspace

_MINIMUM_ORT = "1.31"  # the oldest this project runs on
NO_TAPS = (
    "a wrapped ONNX graph gives no taps, the hidden states between its layers, which DFlash and EAGLE-3 drafts read, "
    "and its bundle does not hand the final ones to drafts, which MTP and Medusa heads read; export the original "
    "checkpoint for those, or draft with n-grams or a draft model"
)


@dataclass(frozen=True, slots=True)
class OnnxFolder:
    """An opened folder: config, graph (weights not read) and where to cut it."""

    folder: Path
    config: ForeignConfig
    graph: SourceGraph
    cuts: Cuts
    kind: str = "onnx"
    gguf_metadata: Mapping[str, Any] | None = None  # for write_tokenizer, which asks every source

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def precision(self) -> str:
        """In words, for people."""
        bits = [int(op.numbers["bits"]) for op in self.graph.ops if op.kind.endswith("MatMulNBits")]
        return f"int{min(bits)}" if bits else {"float32": "fp32", "float16": "fp16"}[self.cuts.dtype]

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything it consists of."""
        graph = (self.graph.path, *self.graph.data_files())
        others = (self.folder / name for name in (CONFIG_NAME, HF_CONFIG_NAME, GENERATION_NAME, *TOKENIZER_NAMES))
        return (*graph, *(path for path in others if path.is_file()))


def is_onnx_folder(path: Path) -> bool:
    """Whether a folder holds ONNX graphs rather than a checkpoint (whose weights are worth more) or a bundle."""
    if not path.is_dir() or (path / MANIFEST_NAME).exists() or any(path.glob("*.safetensors")):
        return False
    return not any(path.glob("*.gguf")) and ((path / CONFIG_NAME).is_file() or bool(graph_files(path)))


def open_onnx_folder(folder: Path, context: int | None = None) -> OnnxFolder:
    """Open a folder and find its cuts; what is missing is a CheckpointError, what is not understood is refused.

    context: the most positions to allow; it has to be given where the folder does not say.
    """
    if (folder / CONFIG_NAME).is_file():
        config = read_genai_config(folder)
        graph = SourceGraph(folder / config.graph)
        find_cuts = find_fused_cuts if has_fused_cache(graph) else find_growing_cuts
    elif (folder / HF_CONFIG_NAME).is_file():
        graph = SourceGraph(folder / find_graph(folder))
        config, find_cuts = read_optimum_config(folder, graph, context), find_growing_cuts
    else:
        raise UnsupportedModelError(
            f"{folder} has ONNX graphs but neither {CONFIG_NAME}, as onnxruntime-genai writes, nor {HF_CONFIG_NAME}, "
            "as optimum does; only folders of these two can be wrapped: add the file, or export the checkpoint"
        )
    return OnnxFolder(folder, config, graph, find_cuts(graph, config))


def wrap_onnx_folder(
    source: OnnxFolder | Path,
    out: Path,
    force: bool = False,
    context: int | None = None,
    drafts: Sequence[AnyDraft] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Write the bundle `out`, whole or not at all; `force` replaces a bundle that is there.

    context: the most positions to allow, if fewer than the graph does. The bundle has the "ort" profile, for one slot,
    and no taps.
    """
    source = open_onnx_folder(source, context) if isinstance(source, Path) else source
    out = Path(os.path.realpath(out))  # a link to a bundle stays a link
    check_free(out, force)
    check_drafts(drafts)
    size = sum(path.stat().st_size for path in source.files if path.is_file())
    check_space(out, size + sum(map(estimate_draft, drafts)))
    with workspace(out) as folder:
        manifest = _write(source, folder, context, drafts, progress)
        move_into_place(folder, out)
    return manifest


def open_model_draft(source: str, offline: bool = False) -> Checkpoint:
    """A draft that is a model of its own; one that would read the target's rows is a UsageError with the reason."""
    path, _ = locate(source, offline)
    if is_onnx_folder(path):
        raise UnsupportedModelError(
            f"{source} is an ONNX folder; wrap it as a bundle of its own and give that as the draft"
        )
    kind = draft_kind(path)
    if kind is not None:
        raise UnsupportedModelError(f"draft {source} is {kind} and does not fit: {NO_TAPS}")
    model, _ = split_mtp(open_source(source, offline), wanted=False)
    return model


def _write(
    source: OnnxFolder, folder: Path, context: int | None, drafts: Sequence[AnyDraft], progress: Progress | None
) -> Manifest:
    tokenizer = write_tokenizer(source, folder)
    facts = _facts(source, tokenizer.token_count, context)
    vocabulary = Vocabulary(tokenizer.token_count, tokenizer.files.vocab_sha256)
    entries = tuple(write_draft(draft, folder, vocabulary, progress) for draft in drafts)
    graphs = _write_graphs(source, folder)
    provenance = Provenance(
        f"oxidize-ort {metadata.version('oxidize-ort')}",
        source.name,
        None,
        {path.relative_to(source.folder).as_posix(): sha256_of(path) for path in source.files},
    )
    manifest = Manifest(
        SCHEMA_VERSION,
        source.precision,
        provenance,
        facts,
        tokenizer.files,
        source.config.generation,
        graphs,
        list_files(folder),
        entries,
    )
    (folder / MANIFEST_NAME).write_text(manifest.dumps(), encoding="utf-8")
    return manifest


def _write_graphs(source: OnnxFolder, folder: Path) -> tuple[GraphEntry, ...]:
    config, cuts = source.config, source.cuts
    shape = BodyShape(config.hidden_size, config.layers, config.kv_heads, config.head_dim, cuts.dtype)
    parts: tuple[tuple[str, GraphContract, Cut], ...] = (
        ("embed.onnx", embed_contract(config.hidden_size, cuts.dtype), cuts.embed),
        ("body.ort.onnx", body_contract(shape, "ort"), cuts.body),
        ("head.onnx", head_contract(config.hidden_size, config.vocab_size, cuts.dtype), cuts.head),
    )
    with TensorStore(folder / WEIGHTS_NAME) as store:
        for file, contract, cut in parts:
            source.graph.write_piece(contract, cut, store, folder / file)
    return tuple(
        GraphEntry(
            contract.role,
            "ort",
            False,
            file,
            (WEIGHTS_NAME,),
            source.graph.opset,
            source.precision,
            _MINIMUM_ORT,
            contract,
        )
        for file, contract, _ in parts
    )


def _facts(source: OnnxFolder, token_count: int, context: int | None) -> ModelFacts:
    config = source.config
    if token_count > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer knows {token_count} tokens and {config.file} says vocab_size {config.vocab_size}; "
            "the tokenizer belongs to another model"
        )
    positions = source.cuts.positions
    return ModelFacts(
        architecture=config.architecture,
        layers=config.layers,
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        token_count=token_count,
        max_positions=min(context or positions, positions),
        sliding_window=source.cuts.window,
        rope_theta=0.0,  # only the tables are there
    )
