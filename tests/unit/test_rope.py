"""Rope tables against transformers' own, at small and large positions."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from oxidize.export.config import RopeConfig
from oxidize.export.rope import attention_factor, inverse_frequencies, rope_tables
from oxidize.runtime.errors import UnsupportedModelError

D = 64
POSITIONS = 131072
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096}
CASES = [
    (RopeConfig(theta=1e6), {}),
    (RopeConfig(5e5, "linear", 4.0), {"factor": 4.0}),
    (RopeConfig(5e5, "llama3", 8.0, original_max_positions=8192), {"factor": 8.0, **LLAMA3}),
    (RopeConfig(5e5, "llama3", 32.0, original_max_positions=8192), {"factor": 32.0, **LLAMA3}),
    (RopeConfig(1e6, "yarn", 32.0, original_max_positions=4096), YARN),
    (
        RopeConfig(1e4, "yarn", 32.0, original_max_positions=4096, beta_fast=16.0, beta_slow=2.0, truncate=False),
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    ),
    (
        RopeConfig(1e4, "yarn", 32.0, original_max_positions=4096, mscale=0.7, mscale_all_dim=1.3),
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    (
        RopeConfig(1e4, "yarn", 32.0, original_max_positions=4096, attention_factor=1.25),
        {**YARN, "attention_factor": 1.25},
    ),
]
NAMES = [f"{index}-{rope.kind}" for index, (rope, _) in enumerate(CASES)]


def transformers_rope(rope: RopeConfig, extra: dict) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **extra}
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * D,
            num_attention_heads=4,
            head_dim=D,
            max_position_embeddings=POSITIONS,
            rope_parameters=parameters,
        )
    )


@pytest.mark.parametrize(("rope", "extra"), CASES, ids=NAMES)
def test_tables_equal_transformers_up_to_large_positions(rope: RopeConfig, extra: dict):
    module = transformers_rope(rope, extra)
    cos, sin = rope_tables(rope, D, POSITIONS)
    assert cos.shape == sin.shape == (POSITIONS, D // 2)
    assert cos.dtype == sin.dtype == np.float32
    # one ulp of a frequency is a rounding the two libraries do not share; at position p it moves the angle by p ulps
    positions = np.array([0, 1, 2, 100, 4095, 4096, 8192, 65537, POSITIONS - 1])
    expected = module(torch.zeros(1), torch.from_numpy(positions)[None])
    allowed = 1e-6 + 4e-7 * positions[:, None] * inverse_frequencies(rope, D)
    for table, wanted in zip((cos, sin), expected, strict=True):
        assert (np.abs(table[positions] - wanted[0, :, : D // 2].numpy()) <= allowed).all()


@pytest.mark.parametrize(("rope", "extra"), CASES, ids=NAMES)
def test_frequencies_and_factor_equal_transformers(rope: RopeConfig, extra: dict):
    module = transformers_rope(rope, extra)
    np.testing.assert_allclose(inverse_frequencies(rope, D), module.inv_freq.numpy(), rtol=5e-7)
    assert attention_factor(rope) == pytest.approx(module.attention_scaling)


def test_factors_divide_the_frequencies():
    factors = tuple(np.linspace(1, 8, D // 2))
    plain = inverse_frequencies(RopeConfig(), D)
    divided = inverse_frequencies(RopeConfig(kind="factors", factors=factors), D)
    np.testing.assert_allclose(divided, plain / np.array(factors), rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (RopeConfig(kind="dynamic"), "'dynamic'"),
        (RopeConfig(kind="yarn", factor=2.0), "original_max_position_embeddings"),
        (RopeConfig(kind="factors"), "32 factors, the checkpoint has none"),
        (RopeConfig(kind="factors", factors=(1.0,)), "32 factors, the checkpoint has 1"),
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused(rope: RopeConfig, said: str):
    with pytest.raises(UnsupportedModelError, match=said):
        inverse_frequencies(rope, D)
