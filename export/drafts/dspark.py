"""Reads DSpark drafts, DFlash with a Markov head and a confidence head, in three layouts with tensors of one name.

DeepSpec ("Qwen3DSparkModel") states everything at the top of config.json, SpecForge ("DSparkDraftModel") what is new in
dflash_config, and vLLM's speculators library describes the layers apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, read_json
from ..config_keys import Keys, shown
from .base import DraftCheckpoint, MarkovHead
from .dflash_common import Stated, assemble
from .dflash_hf import ARCHITECTURE as DFLASH
from .dflash_hf import either, open_tensors, stated_by_hf
from .dflash_speculators import TARGETS_OWN, stated_by_speculators
from .strict import REMEDY

NAME = "DSpark"  # as `refuse_foreign` knows it
ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
_KIND = "dspark"
_HEADS = {"vanilla": "vanilla", "gated": "gated"}  # "rnn" carries a state from row to row: there is no graph for it
_OWN = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_TRAINING = (
    "confidence_head_alpha",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "num_anchors",
    "max_anchors",
)
# What changes the maths, with the one value that is implemented.
_ONLY: dict[str, Any] = {"attention_mode": "gqa", "dspark_backbone_conv_enabled": False}
_TAKEN = (*_OWN, *_TRAINING, *_ONLY, "projector_type")


def recognises_dspark(raw: Mapping[str, Any]) -> bool:
    """Whether a decoded config.json is of a DSpark draft that states it by its architecture, one we refuse included."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any(isinstance(name, str) and NAME in name for name in names)
    return named and "speculators_model_type" not in raw


def recognises_dspark_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a decoded config.json is of a DSpark draft in the speculators layout."""
    return raw.get("speculators_model_type") == _KIND


def read_dspark(folder: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft in DeepSpec's or SpecForge's layout for this target; see `dflash_hf.read_dflash`."""
    config = folder / CONFIG_NAME
    stated = stated_by_dspark(read_json(config), str(config))
    return assemble(stated, open_tensors(folder, allowed=NAME), target, force)


def read_dspark_speculators(folder: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft in the speculators layout for this target; see `dflash_hf.read_dflash`."""
    config = folder / CONFIG_NAME
    stated = stated_by_dspark_speculators(read_json(config), str(config))
    return assemble(stated, open_tensors(folder, TARGETS_OWN, NAME), target, force)


def stated_by_dspark(raw: Mapping[str, Any], where: str) -> Stated:
    """What a decoded config.json of DeepSpec or SpecForge says; row 0 of a block predicts unless it denies that."""
    if raw.get("architectures") not in [[name] for name in ARCHITECTURES]:
        raise UnsupportedModelError(
            f"{where}: architectures {shown(raw.get('architectures'))} is not implemented; this version knows "
            f"{', '.join(ARCHITECTURES)}"
        )
    nested = raw.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    inner = Keys({key: nested[key] for key in nested if key in _TAKEN}, {}, f"{where}: dflash_config")
    top = Keys({key: raw[key] for key in raw if key in _TAKEN}, {}, where)
    projector = either(top, inner, "projector_type").get("projector_type")
    if projector not in (None, _KIND):
        raise UnsupportedModelError(f"{where}: projector_type = {shown(projector)}, expected {_KIND!r}; {REMEDY}")
    markov = _markov(lambda key: either(top, inner, key))
    for keys in (top, inner):
        keys.refuse_unread(frozenset(_TRAINING), _ONLY)
    plain = {key: value for key, value in raw.items() if key not in _TAKEN}
    plain["dflash_config"] = {key: value for key, value in nested.items() if key not in _TAKEN}
    if plain.get("sample_from_anchor") is None and nested.get("sample_from_anchor") is None:
        plain["sample_from_anchor"] = True
    return replace(stated_by_hf({**plain, "architectures": [DFLASH]}, where), markov=markov)


def stated_by_dspark_speculators(raw: Mapping[str, Any], where: str) -> Stated:
    """What a decoded config.json of the speculators library says."""
    own = Keys({key: raw[key] for key in raw if key in _OWN}, {"enable_confidence_head": True}, where)
    markov = _markov(lambda _: own)
    plain = {key: value for key, value in raw.items() if key not in (*_OWN, *_TRAINING)}
    if plain.get("sample_from_anchor") is None:
        plain["sample_from_anchor"] = _anchor_predicts(Keys(raw, {}, where))
    return replace(stated_by_speculators(plain, where, _KIND), markov=markov)


def _markov(place: Callable[[str], Keys]) -> MarkovHead:
    """The heads; `place` finds the object that states a key."""
    rank = place("markov_rank").size("markov_rank")
    kind = place("markov_head_type").choice("markov_head_type", _HEADS, default="vanilla")
    return MarkovHead(
        rank=rank,
        gated=kind == "gated",
        confident=place("enable_confidence_head").flag("enable_confidence_head", False),
        confidence_reads_code=place("confidence_head_with_markov").flag("confidence_head_with_markov", True),
    )


def _anchor_predicts(keys: Keys) -> bool:
    """Whether row 0 predicts, where the config does not say.

    The library did not know the key at first, and then row 0 was never trained; today it is true by default. The
    number of tokens that the checkpoint recommends to propose tells the two apart.
    """
    methods = keys.mapping("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens != keys.size("block_size") - 1
