"""Rotary position embedding: inverse frequencies and cos/sin tables in numpy.

float32 is used where the reference implementations use it: a table computed more exactly would differ from what the
model was trained with by 1e-2 rad at position 100,000.
"""

import math

import numpy as np

from oxidize.runtime.errors import UnsupportedModelError

from .config import RopeConfig

KINDS = ("default", "linear", "factors", "llama3", "yarn")


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """The cos and sin tables, float32 [positions, head_dim/2], already multiplied by the attention factor."""
    frequencies = inverse_frequencies(rope, head_dim)  # [D/2]
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)  # [P,D/2]
    scale = np.float32(attention_factor(rope))
    return np.cos(angles) * scale, np.sin(angles) * scale


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, float32 [head_dim/2]."""
    if rope.kind not in KINDS:
        raise UnsupportedModelError(f"rope scaling must be one of {', '.join(KINDS)}, not {rope.kind!r}")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.float32(1.0) / np.float32(rope.theta) ** exponents  # [D/2]
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / np.float32(rope.factor)
    if rope.kind == "factors":
        return _divided(base, rope.factors)
    if rope.original_max_positions <= 0:
        raise UnsupportedModelError(
            f"{rope.kind} rope scaling needs original_max_position_embeddings, which the config lacks; add it there"
        )
    return _llama3(base, rope) if rope.kind == "llama3" else _yarn(base, rope, head_dim)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for yarn (https://arxiv.org/abs/2309.00071, section 3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _divided(base: np.ndarray, factors: tuple[float, ...] | None) -> np.ndarray:
    if factors is None or len(factors) != len(base):
        given = "none" if factors is None else len(factors)
        raise UnsupportedModelError(f"this rope needs {len(base)} factors, the checkpoint has {given}")
    return base / np.array(factors, np.float32)


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / base
    turns = rope.original_max_positions / wavelengths  # over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0).astype(np.float32)
    return (1 - blend) * base / np.float32(rope.factor) + blend * base


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN: dimensions that turn more than `beta_fast` times are kept, fewer than `beta_slow` interpolated."""
    low = _yarn_dimension(rope.beta_fast, rope, head_dim)
    high = _yarn_dimension(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0, 1).astype(np.float32)
    return base / np.float32(rope.factor) * ramp + base * (1 - ramp)


def _yarn_dimension(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The (fractional) dimension pair that makes this many turns over the original context."""
    return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
