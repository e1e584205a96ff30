"""Reads EAGLE-3 drafts as SafeAILab, SpecForge, AngelSlim and NVIDIA publish them: config.json and safetensors.

One decoder layer called `midlayer` or `layers.0`, `fc`, `norm`, its own head over a part of the vocabulary (`d2t`,
`t2d`) and sometimes its own `embed_tokens`. A key or tensor we do not know is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, FULL, SLIDING, config_from_hf, read_json
from ..config_keys import Keys
from ..safetensors_source import INDEX_NAME, SafetensorsTensor, find_safetensors, read_safetensors
from ..weights import TensorTable
from .base import DraftCheckpoint
from .eagle_rules import (
    FLAGS,
    INPUT,
    OUTPUT,
    EagleFacts,
    TapIds,
    TargetShape,
    check_eagle_tensors,
    default_taps,
    eagle_config,
)
from .eagle_vocabulary import absolute_ids, check_vocabulary
from .strict import REMEDY

_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN_KEYS = (*FLAGS, _IDS, "eagle_config", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "bias")
_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_TABLES = ("d2t", "t2d")
_TRAINING = ("verifier_lm_head.", "verifier_norm.")
_ONLY = {  # of NVIDIA's eagle_config: the values that mean EAGLE-3 as everyone else has it
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "eh_proj_before_attn": False,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
_OLDER = re.compile("E(?:agle|AGLE)(?:Model|[a-zA-Z]*ForCausalLM)|[a-zA-Z0-9]+ForCausalLMEagle")  # architectures
_INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "|u1", "U8": "|u1"}


def is_eagle_hf(raw: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None) -> bool:
    """Whether a config.json, with the shapes of the tensors beside it if they are at hand, is of such a draft.

    The reference's own drafts say Llama; what tells them is a layer called `midlayer`, a `hidden_norm` in the first
    layer, or an `fc` that joins more than two rows.
    """
    if "speculators_model_type" in raw or "dflash_config" in raw or "block_size" in raw:
        return False
    architectures = " ".join(map(str, raw.get("architectures") or ())).lower()
    stated = "eagle3" in architectures or "eagle_config" in raw or "draft_vocab_size" in raw
    names = {canonical_name(name) for name in shapes or ()}
    midlayer = any(name.removeprefix("model.").startswith("midlayer.") for name in shapes or ())
    joins = "hidden_norm.weight" not in names and _joined_rows(shapes or {}) > 2
    return stated or midlayer or joins or "model.layers.0.hidden_norm.weight" in names


def refuse_older_eagle(where: Path, raw: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """An UnsupportedModelError where a checkpoint that is no EAGLE-3 draft is one of EAGLE-1 or 2.

    Their `fc` joins an embedding and one hidden state, and nothing norms the latter.
    """
    architectures = map(str, raw.get("architectures") or ())
    stated = raw.get("model_type") == "eagle" or any(map(_OLDER.fullmatch, architectures))
    normed = any(name.endswith("hidden_norm.weight") for name in shapes)
    if stated or (not normed and _joined_rows(shapes) == 2):
        raise UnsupportedModelError(
            f"{where} is an EAGLE-1 or EAGLE-2 draft, which is not implemented; use an EAGLE-3 draft of the same "
            "target, or draft with n-grams or a draft model"
        )


def _joined_rows(shapes: Mapping[str, Sequence[int]]) -> int:
    """How many rows of its own width `fc` makes one of; 0 where there is no such matrix."""
    shape = next((tuple(shape) for name, shape in shapes.items() if canonical_name(name) == "fc.weight"), ())
    return shape[1] // shape[0] if len(shape) == 2 and shape[0] and shape[1] % shape[0] == 0 else 0


def open_eagle_hf(folder: Path, target: TargetShape, convention: str | None = None) -> DraftCheckpoint:
    """Open a draft's folder, for this target; all but the values of its matrices is checked.

    convention: "input" or "output" overrides how tap ids count. Raises CheckpointError where the draft contradicts
    itself, UnsupportedModelError where its maths is not implemented, UsageError where it does not fit the target.
    """
    config = folder / CONFIG_NAME
    return assemble(folder, _facts(read_json(config), target, str(config)), target, convention)


def assemble(folder: Path, facts: EagleFacts, target: TargetShape, convention: str | None) -> DraftCheckpoint:
    """The checkpoint of a folder whose config says `facts`: tensors found, renamed and checked."""
    tensors = read_safetensors(folder, canonical_name)
    if facts.model.layers > 1 and any(tensor.name.startswith("midlayer.") for tensor in tensors.values()):
        raise UnsupportedModelError(
            f"{folder}: num_hidden_layers is {facts.model.layers}, and how more than one midlayer is wired is not "
            "published; use a draft with layers.0, layers.1, ... instead"
        )
    tables = {name: tensors.pop(name) for name in _TABLES if name in tensors}
    config = eagle_config(facts, tensors, target, convention)
    check_eagle_tensors(config, tensors, folder)
    ids = absolute_ids(_integers(tables["d2t"])) if "d2t" in tables else None
    where = tables["d2t"].path if "d2t" in tables else folder
    mask = _integers(tables["t2d"]).astype(bool) if "t2d" in tables else None
    return DraftCheckpoint(
        name=folder.resolve().name,
        revision=None,
        config=config,
        weights=TensorTable(str(folder), tensors),
        files=tuple(
            path for path in (folder / CONFIG_NAME, folder / INDEX_NAME, *find_safetensors(folder)) if path.is_file()
        ),
        d2t=check_vocabulary(config, ids, mask, str(where)),
    )


def canonical_name(name: str) -> str | None:
    """The name of a stored tensor inside the exporter; None for copies of the target's that only training reads."""
    name = name.removeprefix("model.")
    if name.startswith(_TRAINING):
        return None
    if name.startswith("midlayer."):
        return f"model.layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def layer_model(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The draft's own decoder layers, from the keys a Llama or Qwen3 of this shape would have."""
    kind = raw.get("model_type")
    if kind == "qwen3":
        return config_from_hf(raw, where)
    if kind != "llama":
        raise UnsupportedModelError(
            f"{where}: an EAGLE-3 layer of model_type {kind!r} is not implemented; this version knows llama, qwen3"
        )
    model = config_from_hf({key: value for key, value in raw.items() if key not in _WINDOW_KEYS}, where)
    keys = Keys(raw, {}, where)
    types = keys.texts("layer_types") or (FULL,) * model.layers
    window = keys.optional_integer("sliding_window")
    slides = SLIDING in types
    if len(types) != model.layers or not set(types) <= {FULL, SLIDING}:
        raise CheckpointError(f"{where}: layer_types {list(types)} does not describe {model.layers} layers; {REMEDY}")
    if keys.flag("use_sliding_window", slides) != slides or (slides and not window):
        raise CheckpointError(
            f"{where}: layer_types {list(types)}, use_sliding_window and sliding_window {window} disagree; {REMEDY}"
        )
    return replace(model, layer_types=types, sliding_window=window if slides else None)


def id_list(keys: Keys, key: str) -> tuple[int, ...] | None:
    """A list of layer numbers; None where absent, null or empty."""
    value = keys.get(key)
    if value in (None, []):
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise CheckpointError(f"{keys.where}: {key} must be a list of layer numbers, not {value!r}; {REMEDY}")
    return tuple(value)


def _facts(raw: Mapping[str, Any], target: TargetShape, where: str) -> EagleFacts:
    _refuse_variants(raw, where)
    keys = Keys(raw, {}, where)
    nested = Keys(keys.mapping("eagle_config"), {}, f"{where}: eagle_config")
    flags = {flag: _flag(flag, (keys, flag), (nested, flag)) for flag in FLAGS if flag != "norm_output"}
    places = ((keys, "norm_output"), (nested, "norm_output"), (nested, "return_hidden_post_norm"))
    flags["norm_output"] = _flag("norm_output", *places)
    taps = _taps(id_list(keys, _IDS), id_list(nested, _IDS), target, where)
    stated, count = keys.optional_integer("num_aux_hidden_states"), len(taps.ids if taps else default_taps(target).ids)
    if stated not in (None, count):
        raise CheckpointError(f"{where}: num_aux_hidden_states is {stated}, but there are {count} tap ids; {REMEDY}")
    if keys.flag("bias", False):
        raise UnsupportedModelError(f"{where}: bias = True, a bias on fc, is not implemented; use a draft without it")
    nested.refuse_unread(only=_ONLY)
    return EagleFacts(
        where=where,
        model=layer_model({key: value for key, value in raw.items() if key not in _OWN_KEYS}, where),
        taps=taps,
        draft_vocab_size=keys.optional_integer("draft_vocab_size"),
        target_hidden_size=keys.optional_integer("target_hidden_size"),
        flags=flags,
    )


def _refuse_variants(raw: Mapping[str, Any], where: str) -> None:
    """Relatives of EAGLE-3 that other code computes otherwise."""
    architectures = list(map(str, raw.get("architectures") or ()))
    if any("deepseek" in name.lower() or "mla" in name.lower() for name in architectures) or "kv_lora_rank" in raw:
        raise UnsupportedModelError(
            f"{where}: {', '.join(architectures)} is an EAGLE-3 draft with latent attention (MLA), which is not "
            "implemented; use a draft with Llama's attention"
        )
    if raw.get("mask_token_id") is not None or any("peagle" in name.lower() for name in architectures):
        raise UnsupportedModelError(
            f"{where}: P-EAGLE (mask_token_id {raw.get('mask_token_id')}, all tokens in one pass) is not "
            "implemented; use the draft's EAGLE-3 version"
        )


def _flag(name: str, *places: tuple[Keys, str]) -> bool:
    """A flag that may be stated in several places, which then must agree; False where none does."""
    stated = {keys.flag(key, False) for keys, key in places if keys.get(key) is not None}
    if len(stated) > 1:
        where = places[0][0].where
        raise CheckpointError(f"{where}: {name} is given in two places, which disagree: true and false; {REMEDY}")
    return True in stated


def _taps(
    outer: tuple[int, ...] | None, nested: tuple[int, ...] | None, target: TargetShape, where: str
) -> TapIds | None:
    """Tap ids and what they count, by where they stand.

    vLLM's own key, at the top, indexes hidden_states, so an id is the layer it enters. SpecForge and Model Optimizer
    write eagle_config, whose ids are layers whose output is read, with two exceptions seen in published drafts: an
    id equal to the number of layers can only be a hidden_states index, and the reference's default ids are inputs.
    """
    if outer is not None and nested is not None and outer != nested:
        raise CheckpointError(
            f"{where}: {_IDS} is {list(outer)} at the top and {list(nested)} in eagle_config; {REMEDY}"
        )
    if nested is None:
        return TapIds(outer, INPUT, "vLLM's key counts hidden_states") if outer else None
    if max(nested) == target.layers:
        return TapIds(nested, INPUT, f"{target.layers} is the final output, so the ids index hidden_states")
    if nested == default_taps(target).ids:
        return TapIds(nested, INPUT, "these are the reference's default ids")
    return TapIds(nested, OUTPUT, "eagle_config counts outputs, as SpecForge and Model Optimizer write it")


def _integers(tensor: SafetensorsTensor) -> np.ndarray:
    """The values of an integer or boolean tensor as int64."""
    if tensor.dtype not in _INTEGERS:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}, expected {', '.join(_INTEGERS)}")
    pieces = [piece.astype(np.int64) for _, piece in tensor.pieces(_INTEGERS[tensor.dtype])]
    return np.concatenate([np.empty(0, np.int64), *pieces]).reshape(tensor.shape)
