"""Reads DFlash drafts as z-lab publishes them: a config.json like Qwen3's and safetensors without a `model.` prefix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, FULL, SLIDING, config_from_hf, read_json
from ..config_keys import Keys, shown
from ..safetensors_source import INDEX_NAME, SafetensorsTensor, find_safetensors, read_safetensors
from ..weights import LazyTensor
from .base import DraftCheckpoint
from .dflash_common import EMBEDDING, Opened, Stated, assemble, refuse_foreign, with_layout
from .strict import REMEDY

ARCHITECTURE = "DFlashDraftModel"
_CONVENTION = "output of layer i (z-lab)"
_MODEL_TYPES = ("qwen3", "llama")
LAYOUT = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_OWN = (
    "dflash_config",
    "auto_map",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "target_hidden_size",
    "draft_vocab_size",
    "sample_from_anchor",
    "is_causal",
    *LAYOUT,
)
# What changes the maths, with the one value that DFlash v1 has; at either place.
_ONLY: dict[str, Any] = {
    "projector_type": "dflash",
    "is_neox_style": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_aux_hidden_state": True,
    "shift_label": False,
    "pure_draft_prefix_len": 1,
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "causal_head": False,
    "use_qk_norm": True,
}
_TRAINING = frozenset(("num_anchors", "max_anchors", "loss_decay_gamma"))  # in dflash_config
_MROPE = ("mrope_section", "mrope_interleaved")  # text has one position: they change nothing


def recognises_dflash(raw: Mapping[str, Any]) -> bool:
    """Whether a decoded config.json is of a DFlash draft in z-lab's layout, a variant we refuse included."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any(isinstance(name, str) and _is_family(name) for name in names)
    return "speculators_model_type" not in raw and (named or "dflash_config" in raw)


def read_dflash(folder: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft for this target.

    force: go on where the draft was made for another target but is defined for this one too, and note it. Raises
    UnsupportedModelError naming what is not implemented, CheckpointError for what is damaged or contradicts itself,
    UsageError for a draft that does not fit the target.
    """
    config = folder / CONFIG_NAME
    stated = stated_by_hf(read_json(config), str(config))
    return assemble(stated, open_tensors(folder), target, force)


def open_tensors(folder: Path, unused: tuple[str, ...] = (), allowed: str | None = None) -> Opened:
    """The tensors of a folder under canonical names, without `unused` ones; variants but `allowed` are refused."""
    stored = read_safetensors(folder, lambda name: None if name in unused else name)
    refuse_foreign(stored, folder, allowed)
    offsets, chosen = stored.pop("d2t", None), stored.pop("t2d", None)
    tensors: dict[str, LazyTensor] = {
        EMBEDDING if name == "embed_tokens.weight" else name: tensor for name, tensor in stored.items()
    }
    names = (folder / CONFIG_NAME, folder / INDEX_NAME)
    return Opened(
        name=folder.resolve().name,
        where=folder,
        tensors=tensors,
        files=(*(path for path in names if path.is_file()), *find_safetensors(folder)),
        d2t=None if offsets is None else _ids(offsets),
        map_file=None if offsets is None else offsets.path,
        t2d=None if chosen is None else _vector(chosen, {"BOOL": "u1", "U8": "u1"}),
    )


def stated_by_hf(raw: Mapping[str, Any], where: str) -> Stated:
    """What a decoded config.json says; `where` begins every error message."""
    _check_architecture(raw, where)
    top = Keys({key: raw[key] for key in raw if key in (*_OWN, *_ONLY)}, {}, where)
    nested = Keys(top.mapping("dflash_config"), {}, f"{where}: dflash_config")
    top.get("auto_map")
    model = base_model({key: value for key, value in raw.items() if key not in (*_OWN, *_ONLY)}, where)
    types, window, derived = layer_layout(top, nested, model.layers)
    stated = Stated(
        model=with_layout(model, types, window),
        layer_causal=_causal(top, nested, derived, model.layers),
        block_size=block_size(either(top, nested, "block_size")),
        mask_token_id=token_id(either(top, nested, "mask_token_id")),
        taps=tap_ids(either(top, nested, "target_layer_ids"), "target_layer_ids"),
        tap_convention=_CONVENTION,
        target_layers=either(top, nested, "num_target_layers").optional_integer("num_target_layers"),
        target_hidden_size=top.optional_integer("target_hidden_size"),
        draft_vocab_size=top.optional_integer("draft_vocab_size"),
        sample_from_anchor=either(top, nested, "sample_from_anchor").flag("sample_from_anchor", False),
    )
    top.refuse_unread(only=_ONLY)
    nested.refuse_unread(_TRAINING, _ONLY)
    return stated


def base_model(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The stack of layers, all of them full, from the keys that a Qwen3 or Llama config has too."""
    if raw.get("model_type") not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"{where}: a DFlash draft of model_type {raw.get('model_type')!r} is not implemented; this version "
            f"knows {', '.join(_MODEL_TYPES)}"
        )
    plain = {key: value for key, value in raw.items() if key not in LAYOUT}
    ropes = [key for key in ("rope_parameters", "rope_scaling") if isinstance(plain.get(key), Mapping)]
    plain |= {key: _without_mrope(plain[key]) for key in ropes}
    if plain.get("rope_theta") is None and not any("rope_theta" in plain[key] for key in ropes):
        raise CheckpointError(f"{where}: rope_theta is missing, and engines differ in what they take it for; {REMEDY}")
    return config_from_hf(plain, where)


def layer_layout(top: Keys, nested: Keys, layers: int) -> tuple[tuple[str, ...], int | None, tuple[str, ...] | None]:
    """Layer types and window as they are used, and the types that causality follows (None: none said).

    layer_types goes before max_window_layers, which published drafts of sliding layers set to their number of layers.
    `use_swa` makes all layers slide where the types name none, with the draft's own window, whatever the model's may
    be. Where types name sliding layers, a flag that denies them or a second window is a contradiction, as engines
    differ in which of the two they follow; but transformers by itself writes use_sliding_window = false without
    sliding_window beside sliding layers, and then the draft's own window counts.
    """
    types = top.texts("layer_types")
    if types is not None and (len(types) != layers or not set(types) <= {FULL, SLIDING}):
        raise UnsupportedModelError(
            f"{top.where}: layer_types {shown(list(types))} is not implemented for {layers} layers; {REMEDY}"
        )
    first = top.optional_integer("max_window_layers")
    if top.flag("use_sliding_window", False) and types is None:
        types = tuple(FULL if layer < (first or 0) else SLIDING for layer in range(layers))
    used = types or (FULL,) * layers
    if SLIDING in used:
        _check_windows(top, nested)
    elif nested.flag("use_swa", False):
        used = (SLIDING,) * layers
    window = nested.optional_integer("swa_window_size") or top.optional_integer("sliding_window")
    top.get("sliding_window")
    if SLIDING not in used:
        return used, None, types
    if not window:
        raise CheckpointError(
            f"{top.where}: sliding layers need sliding_window, or dflash_config.swa_window_size; {REMEDY}"
        )
    return used, window, types


def _check_windows(top: Keys, nested: Keys) -> None:
    """Beside layer types that slide: no flag that denies it, and no second window of another size."""
    theirs, own = top.optional_integer("sliding_window"), nested.optional_integer("swa_window_size")
    chosen = nested.flag("use_swa", False)
    in_force = top.flag("use_sliding_window", True)  # sliding_window, by the rule of Qwen's configs
    denied = None
    if nested.get("use_swa") is False:
        denied = "dflash_config says use_swa = False"
    elif not in_force and theirs and not chosen:
        denied = f"use_sliding_window = False with sliding_window = {theirs}"
    elif in_force and theirs and own and theirs != own:
        denied = f"sliding_window = {theirs} and dflash_config says swa_window_size = {own}"
    if denied is not None:
        raise CheckpointError(f"{top.where}: layers slide, but {denied}; {REMEDY}")


def _causal(top: Keys, nested: Keys, types: tuple[str, ...] | None, layers: int) -> tuple[bool, ...]:
    """For each layer whether rows of a block see earlier ones only: as stated, else in sliding layers."""
    outer, inner = top.get("is_causal"), nested.get("causal")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{top.where}: is_causal = {outer} but dflash_config says causal = {inner}; {REMEDY}")
    if outer is not None or inner is not None:
        return (top.flag("is_causal", nested.flag("causal", False)),) * layers
    return tuple(types is not None and types[layer] == SLIDING for layer in range(layers))


def either(top: Keys, nested: Keys, key: str) -> Keys:
    """The place that states a key which may be at the top or in dflash_config; stated twice it has to be the same."""
    outer, inner = top.get(key), nested.get(key)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{top.where}: {key} = {shown(outer)} but dflash_config says {shown(inner)}; {REMEDY}")
    return nested if outer is None else top


def block_size(keys: Keys) -> int:
    """Tokens of a block, the anchor included."""
    size = keys.size("block_size")
    if size < 2:
        raise CheckpointError(
            f"{keys.where}: block_size must be at least 2 (the anchor and a mask), not {size}; {REMEDY}"
        )
    return size


def token_id(keys: Keys, key: str = "mask_token_id") -> int:
    """A token id that has to be there."""
    found = keys.optional_integer(key)
    if found is None:
        raise CheckpointError(f"{keys.where}: {key} is missing; a block is filled up with that token: {REMEDY}")
    return found


def tap_ids(keys: Keys, key: str, first: int = 0) -> tuple[int, ...] | None:
    """A list of layer ids counted from `first`, as ids counted from 0; None where absent."""
    ids = keys.get(key)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(tap) is int and tap >= first for tap in ids):
        raise CheckpointError(f"{keys.where}: {key} must be a list of layers from {first}, not {shown(ids)}; {REMEDY}")
    return tuple(tap - first for tap in ids)


def _check_architecture(raw: Mapping[str, Any], where: str) -> None:
    names = raw.get("architectures")
    if names not in (None, [], [ARCHITECTURE]):
        raise UnsupportedModelError(
            f"{where}: architectures {shown(names)} is not implemented; this version knows {ARCHITECTURE}"
        )


def _is_family(name: str) -> bool:
    return any(part in name for part in ("DFlash", "DSpark", "Domino"))


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope object without the keys that divide positions among image axes: text has the same one on each."""
    plain = {key: value for key, value in rope.items() if key not in _MROPE}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def _ids(offsets: SafetensorsTensor) -> np.ndarray:
    """Target ids from the offsets that d2t holds: row i is token i + d2t[i]. int64 [Vd]."""
    found = _vector(offsets, {"I64": "<i8", "I32": "<i4"})
    return found.astype(np.int64) + np.arange(len(found))


def _vector(tensor: SafetensorsTensor, types: Mapping[str, str]) -> np.ndarray:
    stored = types.get(tensor.dtype)
    if stored is None or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, expected one dimension of "
            f"{' or '.join(types)}"
        )
    return np.concatenate([np.empty(0, stored), *(piece for _, piece in tensor.pieces(stored))])
