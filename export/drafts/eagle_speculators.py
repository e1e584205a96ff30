"""Reads EAGLE-3 drafts in vLLM's "speculators" format: the layer's config nested, flags and tap ids at the top.

Tensors are those of the other layouts with `layers.0`; `verifier_*` are copies of the target's for training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config_hf import CONFIG_NAME, read_json
from ..config_keys import Keys
from ..config_tables import HARMLESS
from .base import DraftCheckpoint
from .eagle_hf import assemble, id_list, layer_model
from .eagle_rules import FLAGS, INPUT, EagleFacts, TapIds, TargetShape
from .strict import REMEDY

_KIND, _IDS = "speculators_model_type", "eagle_aux_hidden_state_layer_ids"
_LAYER = "transformer_layer_config"
_DESCRIPTIVE = HARMLESS | {
    "auto_map",
    "embed_requires_grad",
    "enable_sp_ulysses",
    "has_no_defaults_at_init",
    "speculators_version",
}


def is_eagle_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of such a draft, or of a relative that has to be refused by name."""
    return "eagle" in str(raw.get(_KIND, ""))


def open_eagle_speculators(folder: Path, target: TargetShape, convention: str | None = None) -> DraftCheckpoint:
    """Open a draft's folder, for this target. Parameters and errors as for `open_eagle_hf`."""
    config = folder / CONFIG_NAME
    return assemble(folder, _facts(read_json(config), str(config)), target, convention)


def _facts(raw: Mapping[str, Any], where: str) -> EagleFacts:
    keys = Keys(raw, {}, where)
    kind = keys.get(_KIND)
    if kind != "eagle3":
        raise UnsupportedModelError(
            f"{where}: {_KIND} {kind!r} is not implemented; of the EAGLE drafts this version knows eagle3 alone"
        )
    _check_algorithm(keys)
    ids = id_list(keys, _IDS)
    facts = EagleFacts(
        where=where,
        model=layer_model(keys.mapping(_LAYER), f"{where}: {_LAYER}"),
        taps=TapIds(ids, INPUT, "speculators counts hidden_states") if ids else None,
        draft_vocab_size=keys.optional_integer("draft_vocab_size"),
        target_hidden_size=keys.optional_integer("target_hidden_size"),
        flags={flag: keys.flag(flag, False) for flag in FLAGS},
    )
    if keys.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{where}: norm_before_residual is missing, and vLLM and speculators assume opposite values; "
            "add the one the draft was trained with"
        )
    keys.refuse_unread(_DESCRIPTIVE, only={"tie_word_embeddings": False})
    return facts


def _check_algorithm(keys: Keys) -> None:
    """speculators_config may name the algorithm once more; how many tokens it proposes is not a fact of the draft."""
    stated = keys.mapping("speculators_config").get("algorithm")
    if stated not in (None, "eagle3"):
        raise CheckpointError(
            f"{keys.where}: {_KIND} is 'eagle3', but speculators_config.algorithm is {stated!r}; {REMEDY}"
        )
