"""Reads Hugging Face's rotary embedding keys: old rope_theta and rope_scaling, new rope_parameters."""

from collections.abc import Callable, Mapping
from typing import Any

from oxidize.runtime.errors import CheckpointError

from .config import RopeConfig
from .config_keys import Keys, shown

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(keys: Keys) -> RopeConfig:
    """The one rotary embedding of Llama, Mistral and Qwen."""
    stated = _merge(keys, keys.mapping("rope_parameters"), "rope_scaling", keys.mapping("rope_scaling"))
    theta = _outer_theta(keys, "rope_theta", stated, default=10_000.0)
    return _parse(stated, theta, keys)


def read_rope_per_layer_type(keys: Keys) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's two rotary embeddings, (full, sliding). Scaling applies to full layers alone."""
    nested = Keys(keys.mapping("rope_parameters"), {}, f"{keys.where}: rope_parameters")
    full, sliding = nested.mapping(_FULL), nested.mapping(_SLIDING)
    nested.refuse_unread()
    full = _merge(keys, full, "rope_scaling", keys.mapping("rope_scaling"))
    full_theta = _outer_theta(keys, "rope_theta", full, default=1_000_000.0)
    sliding_theta = _outer_theta(keys, "rope_local_base_freq", sliding, default=10_000.0)
    return _parse(full, full_theta, keys), _parse(sliding, sliding_theta, keys)


def _merge(keys: Keys, stated: dict[str, Any], other_name: str, other: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        if stated.setdefault(key, value) != value:
            raise CheckpointError(
                f"{keys.where}: rope_parameters and {other_name} disagree on {key}: "
                f"{shown(stated[key])}, {shown(value)}"
            )
    return stated


def _outer_theta(keys: Keys, name: str, stated: Mapping[str, Any], default: float) -> float:
    """The base given beside the rope object, checked against the one inside it."""
    outer = keys.optional_number(name)
    inner = Keys(stated, {}, f"{keys.where}: rope_parameters").optional_number("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{keys.where}: {name} = {outer} but rope_parameters says rope_theta = {inner}")
    theta = next(theta for theta in (inner, outer, default) if theta is not None)
    if theta <= 1:
        raise CheckpointError(f"{keys.where}: {name} must exceed 1, not {theta}")
    return theta


def _parse(stated: Mapping[str, Any], theta: float, outer: Keys) -> RopeConfig:
    keys = Keys(stated, {}, f"{outer.where}: rope")
    keys.get("rope_theta")
    name = "type" if "rope_type" not in stated else "rope_type"
    if keys.get("type") not in (None, keys.get("rope_type", keys.get("type"))):
        raise CheckpointError(f"{keys.where}: type and rope_type disagree: {stated['type']!r}, {stated['rope_type']!r}")
    kind = keys.choice(name, {kind: kind for kind in _READERS}, "default")
    rope = _READERS[kind](keys, theta, outer.size("max_position_embeddings"))
    keys.refuse_unread(only={"partial_rotary_factor": 1.0})
    return rope


def _default(_keys: Keys, theta: float, _max_positions: int) -> RopeConfig:
    return RopeConfig(theta)


def _linear(keys: Keys, theta: float, _max_positions: int) -> RopeConfig:
    return RopeConfig(theta, "linear", keys.positive("factor"))


def _llama3(keys: Keys, theta: float, max_positions: int) -> RopeConfig:
    low, high = keys.positive("low_freq_factor"), keys.positive("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{keys.where}: high_freq_factor {high} must exceed low_freq_factor {low}")
    original = _original(keys, max_positions)
    return RopeConfig(theta, "llama3", keys.positive("factor"), low, high, original)


def _yarn(keys: Keys, theta: float, max_positions: int) -> RopeConfig:
    original = _original(keys, max_positions)
    return RopeConfig(
        theta,
        "yarn",
        keys.positive("factor") if keys.get("factor") is not None else max_positions / original,
        original_max_positions=original,
        beta_fast=keys.optional_number("beta_fast") or 32.0,
        beta_slow=keys.optional_number("beta_slow") or 1.0,
        attention_factor=keys.optional_number("attention_factor"),
        mscale=keys.optional_number("mscale"),
        mscale_all_dim=keys.optional_number("mscale_all_dim"),
        truncate=keys.flag("truncate", True),
    )


def _original(keys: Keys, max_positions: int) -> int:
    stated = keys.optional_integer("original_max_position_embeddings")
    return stated if stated else max_positions


_READERS: dict[str, Callable[[Keys, float, int], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
