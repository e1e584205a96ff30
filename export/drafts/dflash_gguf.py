"""Reads DFlash and DFlash 2 drafts in GGUF, architecture "dflash": taps counted by the layer they enter, norms as they
are. Keys and names are those of llama.cpp's src/models/dflash.cpp."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config import ModelConfig
from ..config_gguf import ONLY, layers_from_gguf
from ..config_hf import FULL, SLIDING
from ..config_keys import Keys
from ..gguf_file import GgufFile, read_gguf
from ..gguf_source import LAYER_NAMES, GgufTensor, read_integers, rope_factors
from ..weights import LazyTensor
from .base import DraftCheckpoint, PathSelection
from .dflash2 import SIZES, FlatTensor
from .dflash_common import EMBEDDING, HEAD, SELECTOR, Opened, Stated, assemble, refuse_foreign, with_layout
from .dflash_hf import block_size, tap_ids, token_id

ARCHITECTURE = "dflash"
_CONVENTION = "input of layer i (llama.cpp)"
_ROPE_FACTORS, _TARGET_IDS = "rope_freqs.weight", "d2t"
_MASK = "mask_token_id"
_AGAIN = "convert the draft again"
_TOP = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "token_embd": EMBEDDING.removesuffix(".weight"),
    "output": HEAD.removesuffix(".weight"),
    "selector_hidden": f"{SELECTOR}.hidden_projection",
    "selector_predecessor": f"{SELECTOR}.predecessor_codebook",
    "selector_successor": f"{SELECTOR}.successor_codebook",
}
_LAYER = {
    **LAYER_NAMES,
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
_BARE = {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}  # without ".weight"
# What changes the maths, with the one value that DFlash v1 has.
_ONLY = {
    **{key: value for key, value in ONLY.items() if key != "attention.causal"},
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
}


def recognises_dflash_gguf(file: GgufFile) -> bool:
    """Whether a GGUF file is a DFlash draft, one in a fork's layout that we refuse included."""
    return file.metadata.get("general.architecture") in (ARCHITECTURE, "dflash-draft")


def read_dflash_gguf(path: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft for this target; see `dflash_hf.read_dflash`."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"{path}: general.architecture {architecture!r} is another layout than llama.cpp's dflash and not "
            "implemented; convert the draft with llama.cpp's convert_hf_to_gguf.py, or export its safetensors"
        )
    refuse_foreign((place.name for place in file.tensors), path, allowed="DFlash2")
    return assemble(stated_by_gguf(file, target), opened_gguf(file), target, force)


def stated_by_gguf(file: GgufFile, target: ModelConfig) -> Stated:
    """What the metadata says; the vocabulary's rows are the target's where the file has no token list."""
    prefix = f"{ARCHITECTURE}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Keys(own, {}, f"{file.path}: GGUF metadata {prefix}*")
    shapes = {place.name: place.shape for place in file.tensors}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    rows = len(tokens) if isinstance(tokens, list) and tokens else target.vocab_size
    shapes.setdefault("token_embd.weight", (rows, target.hidden_size))
    tokenizer = Keys({_MASK: file.metadata.get(f"tokenizer.ggml.{_MASK}")}, {}, f"{file.path}: tokenizer.ggml")
    model = replace(layers_from_gguf(keys, "qwen3", shapes, rope_factors(file)), tie_word_embeddings=False)
    _check_sections(keys, model.head_dim)
    types, window = _layout(keys, model.layers)
    stated = Stated(
        model=with_layout(model, types, window),
        layer_causal=_causal(keys, types),
        block_size=block_size(keys),
        mask_token_id=token_id(tokenizer),
        taps=_taps(keys),
        tap_convention=_CONVENTION,
        target_hidden_size=keys.optional_integer("target_hidden_size"),
        sample_from_anchor=keys.flag("sample_from_anchor", False),
        paths=_paths(keys),
    )
    keys.refuse_unread(only=_ONLY)
    return stated


def opened_gguf(file: GgufFile) -> Opened:
    """The tensors under canonical names; one without a counterpart keeps its own."""
    tensors: dict[str, LazyTensor] = {}
    ids = None
    for place in file.tensors:
        if place.name.removesuffix(".weight") == _TARGET_IDS:
            ids = read_integers(file.path, place).astype(np.int64)
        elif place.name != _ROPE_FACTORS:
            tensor, bare = GgufTensor(file.path, place), place.name.rpartition(".")[2] in _BARE
            tensors[_canonical(place.name)] = FlatTensor(tensor) if bare and len(place.shape) == 3 else tensor
    return Opened(
        name=file.path.name, where=file.path, tensors=tensors, files=(file.path,), d2t=ids, map_file=file.path
    )


def _canonical(name: str) -> str:
    """The canonical name; one without a counterpart stays as it is and is refused later."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if prefix == "blk" and number.isdecimal() and part in _LAYER:
        return f"layers.{number}.{_LAYER[part]}.{kind}"
    if prefix == "blk" and rest.isdecimal() and kind in _BARE:
        return f"layers.{rest}.{_BARE[kind]}.weight"
    return name


def _paths(keys: Keys) -> PathSelection | None:
    """What DFlash 2 has beside DFlash; None where none of its sizes is there. A scale or cap of 0 is none."""
    if all(keys.get(key) is None for key in SIZES):
        return None
    taps, group, rank, top_k = (keys.size(key) for key in SIZES)
    scale, cap = (keys.optional_number(key) for key in ("logit_scale", "final_logit_softcapping"))
    return PathSelection(taps, group, rank, top_k, scale or 1.0, cap or None)


def _layout(keys: Keys, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer types and window. llama.cpp wants a flag per layer wherever there is a window."""
    window = keys.optional_integer("attention.sliding_window")
    pattern = keys.get("attention.sliding_window_pattern")
    if not window:
        if isinstance(pattern, list) and any(pattern):
            raise CheckpointError(f"{keys.where}: sliding layers need attention.sliding_window; {_AGAIN}")
        return (FULL,) * layers, None
    if not isinstance(pattern, list) or len(pattern) != layers or not all(type(item) is bool for item in pattern):
        raise CheckpointError(
            f"{keys.where}: attention.sliding_window_pattern must be a flag for each of {layers} layers; {_AGAIN}"
        )
    return tuple(SLIDING if item else FULL for item in pattern), window if any(pattern) else None


def _causal(keys: Keys, types: tuple[str, ...]) -> tuple[bool, ...]:
    stated = keys.get("attention.causal")
    if stated is None:
        return tuple(kind == SLIDING for kind in types)
    return (keys.flag("attention.causal", False),) * len(types)


def _taps(keys: Keys) -> tuple[int, ...]:
    taps = tap_ids(keys, "target_layers", first=1)
    if taps is None:
        raise CheckpointError(f"{keys.where}: target_layers is missing, and GGUF has no default; {_AGAIN}")
    return taps


def _check_sections(keys: Keys, head_dim: int) -> None:
    """Text has one position, so sections change nothing as long as they cover the head."""
    sections = keys.get("rope.dimension_sections")
    if sections is not None and (not isinstance(sections, list) or sum(sections) != head_dim // 2):
        raise UnsupportedModelError(
            f"{keys.where}: rope.dimension_sections {sections!r} do not cover the {head_dim // 2} frequencies of a "
            f"head; {_AGAIN}"
        )
