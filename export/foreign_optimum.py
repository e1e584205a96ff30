"""Reads a folder as optimum writes it, and transformers.js reads it: config.json, one model.onnx whose cache grows."""

import re
from collections.abc import Sequence
from pathlib import Path

from oxidize.runtime.contracts import TensorSpec
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from .config_hf import CONFIG_NAME, generation_from_hf, read_json
from .config_keys import Keys
from .foreign_config import ForeignConfig, GraphNames
from .onnx_surgery import SourceGraph

GRAPH_NAME = "model.onnx"
_SUBFOLDER = "onnx"
_CACHE = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_AGAIN = "export the checkpoint again with today's optimum, which writes one model.onnx, or with --exporter optimum"
_OLD_FORMS = {
    "decoder_model_merged.onnx": f"it chooses between two graphs within an If node, which is not understood; {_AGAIN}",
    "decoder_with_past_model.onnx": f"it goes with a second graph for the prompt, which is not understood; {_AGAIN}",
    "decoder_model.onnx": f"it gives back no cache that it would take; {_AGAIN}",
}
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


def graph_files(folder: Path) -> list[Path]:
    """The ONNX files of a folder, also where transformers.js looks for them."""
    return sorted([*folder.glob("*.onnx"), *folder.glob(f"{_SUBFOLDER}/*.onnx")])


def find_graph(folder: Path) -> Path:
    """The file of the one decoder graph, relative to the folder; older forms are refused by name."""
    files = [path.relative_to(folder) for path in graph_files(folder)]
    encoder = next((path for path in files if path.name.startswith("encoder_model")), None)
    if encoder is not None:
        raise UnsupportedModelError(f"{folder / encoder} is an encoder; only a decoder alone can be wrapped")
    found = [path for path in files if path.name == GRAPH_NAME]
    if len(found) == 1 or len(files) == 1:
        return _refuse_old(folder, (found or files)[0])
    for path in files:
        _refuse_old(folder, path)
    names = ", ".join(path.as_posix() for path in files)
    raise CheckpointError(f"{folder} has the graphs {names} and not one {GRAPH_NAME}; leave only the one to wrap there")


def read_optimum_config(folder: Path, graph: SourceGraph, context: int | None = None) -> ForeignConfig:
    """What config.json and the graph's inputs say; `context` stands in where the config has no length of its own."""
    keys = Keys(read_json(folder / CONFIG_NAME), {}, CONFIG_NAME)
    ids = _layer_ids(graph)
    kv_heads, head_dim = _cache_shape(graph, ids)
    positions = _first(keys, _POSITIONS) or context
    hidden = _first(keys, _HIDDEN)
    if positions is None or hidden is None:
        what, tried = ("hidden size", _HIDDEN) if hidden is None else ("length", _POSITIONS)
        remedy = "give --context" if hidden is not None else "it is no config of a decoder"
        raise CheckpointError(f"{folder / CONFIG_NAME} states no {what} ({', '.join(tried)}); {remedy}")
    architecture = keys.get("model_type")
    return ForeignConfig(
        file=CONFIG_NAME,
        architecture=architecture if isinstance(architecture, str) else "unknown",
        graph=graph.path.relative_to(folder).as_posix(),
        layers=len(ids),
        hidden_size=hidden,
        heads=_first(keys, _HEADS) or kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.size("vocab_size"),
        context=positions,
        names=_names(ids),
        generation=generation_from_hf(folder),
    )


def _refuse_old(folder: Path, path: Path) -> Path:
    if path.name in _OLD_FORMS:
        raise UnsupportedModelError(f"{folder / path} is of an older form of optimum: {_OLD_FORMS[path.name]}")
    return path


def _layer_ids(graph: SourceGraph) -> list[int]:
    """The layers that have a cache, by the graph's inputs."""
    found = [match for match in map(_CACHE.fullmatch, graph.inputs) if match]
    if not found:
        shown = ", ".join(sorted(graph.inputs)[:6])
        raise UnsupportedModelError(
            f"{graph.path} takes no past_key_values.0.key (it takes {shown}); only a decoder with a cache for each "
            "layer is understood: optimum writes one for the task text-generation-with-past"
        )
    return sorted({int(match[1]) for match in found})


def _cache_shape(graph: SourceGraph, ids: Sequence[int]) -> tuple[int, int]:
    """Heads and head size of the cache, the same in every layer."""
    specs = [graph.inputs[name] for layer in _names(ids).past for name in layer if name in graph.inputs]
    sizes = {_heads_and_size(graph, spec) for spec in specs}
    if len(sizes) > 1:
        shown = " and ".join(f"{heads} heads of {size}" for heads, size in sorted(sizes))
        raise UnsupportedModelError(f"{graph.path} has caches of {shown}; only one shape for all layers is understood")
    return sizes.pop()


def _heads_and_size(graph: SourceGraph, spec: TensorSpec) -> tuple[int, int]:
    if len(spec.shape) == 4:
        heads, size = spec.shape[1], spec.shape[3]
        if isinstance(heads, int) and isinstance(size, int) and heads and size:
            return heads, size
    raise UnsupportedModelError(
        f"{graph.path}: {spec.name} has shape {list(spec.shape)}; only [batch, heads, rows, head size], with numbers "
        "for heads and head size, is understood"
    )


def _names(ids: Sequence[int]) -> GraphNames:
    past, present = (
        tuple((f"{prefix}.{layer}.key", f"{prefix}.{layer}.value") for layer in ids)
        for prefix in ("past_key_values", "present")
    )
    return GraphNames("input_ids", "attention_mask", "position_ids", "logits", past, present)


def _first(keys: Keys, names: Sequence[str]) -> int | None:
    """The first of several spellings that is there, in the text model's own part where there is one."""
    parts = (keys, Keys(keys.mapping("text_config"), {}, f"{keys.where}: text_config"))
    return next((keys.size(name) for keys in parts for name in names if keys.get(name) is not None), None)
