"""Reads DFlash drafts as vLLM's speculators library saves them: layers described apart, taps counted from one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, SLIDING, read_json
from ..config_keys import Keys, shown
from .base import DraftCheckpoint
from .dflash_common import Stated, assemble, with_layout
from .dflash_hf import LAYOUT, base_model, block_size, layer_layout, open_tensors, tap_ids, token_id
from .strict import REMEDY

_CONVENTION = "input of layer i (vLLM speculators)"
_KINDS = ("dflash", "dflash2", "dspark", "domino")
_LAYERS = "transformer_layer_config"
TARGETS_OWN = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)  # what training compared with; drafting needs neither
_ONLY: dict[str, Any] = {"projector_type": "dflash", "shift_label": False, "pure_draft_prefix_len": 1}
_NAMES = "architectures auto_map dtype torch_dtype transformers_version speculators_version has_no_defaults_at_init"
_TRAINING = "emb_dim gru_hidden_dim lambda_base_start lambda_base_decay_ratio auf max_anchors tie_word_embeddings"
_HARMLESS = frozenset((*_NAMES.split(), *_TRAINING.split()))


def recognises_dflash_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a decoded config.json is of a DFlash draft in the speculators layout, a variant we refuse included."""
    return raw.get("speculators_model_type") in _KINDS


def read_dflash_speculators(folder: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft for this target; see `dflash_hf.read_dflash`."""
    config = folder / CONFIG_NAME
    stated = stated_by_speculators(read_json(config), str(config))
    return assemble(stated, open_tensors(folder, TARGETS_OWN), target, force)


def stated_by_speculators(raw: Mapping[str, Any], where: str, wanted: str = "dflash") -> Stated:
    """What a decoded config.json says of a draft of the kind `wanted`, as far as all kinds say it.

    where: begins every error message.
    """
    kind = raw.get("speculators_model_type")
    if kind != wanted:
        raise UnsupportedModelError(
            f"{where}: speculators_model_type {kind!r} is not implemented; this version knows dflash and dspark"
        )
    keys = Keys(raw, {}, where)
    keys.get("speculators_model_type")
    _check_algorithm(keys, wanted)
    layers = keys.mapping(_LAYERS)
    layout = Keys({key: layers[key] for key in layers if key in LAYOUT}, {}, f"{where}: {_LAYERS}")
    model = base_model(layers, layout.where)
    types, window, _ = layer_layout(layout, Keys({}, {}, where), model.layers)
    sliding_causal = not keys.flag("sliding_window_non_causal", False)
    stated = Stated(
        model=with_layout(model, types, window),
        layer_causal=tuple(kind == SLIDING and sliding_causal for kind in types),
        block_size=block_size(keys),
        mask_token_id=token_id(keys),
        taps=_taps(keys),
        tap_convention=_CONVENTION,
        target_hidden_size=keys.optional_integer("target_hidden_size"),
        draft_vocab_size=keys.optional_integer("draft_vocab_size"),
        sample_from_anchor=keys.flag("sample_from_anchor", False),
    )
    keys.refuse_unread(_HARMLESS, _ONLY)
    return stated


def _taps(keys: Keys) -> tuple[int, ...]:
    taps = tap_ids(keys, "aux_hidden_state_layer_ids", first=1)
    if taps is None:
        raise CheckpointError(
            f"{keys.where}: aux_hidden_state_layer_ids is missing; this layout has no default: fetch the draft again"
        )
    return taps


def _check_algorithm(keys: Keys, wanted: str) -> None:
    algorithm = keys.mapping("speculators_config").get("algorithm")
    if algorithm not in (None, wanted):
        raise CheckpointError(
            f"{keys.where}: speculators_model_type is {wanted} but speculators_config says algorithm = "
            f"{shown(algorithm)}; {REMEDY}"
        )
