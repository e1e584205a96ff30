"""The KV cache on ONNX Runtime: rewinding, stale rows, growth and ragged slots leave no trace."""

import numpy as np
import pytest

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.errors import UsageError
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

VARIANTS = ["llama2", "mistral_sliding", "gemma3"]
STALE = {
    "ort": np.nan,
    "std": 3e4,
}  # standard Attention multiplies stale rows by 0, which only numbers survive


def open_target(tiny_bundle, variant="llama2", profile="ort", slots=1, floor=2, precision="fp32"):
    bundle = open_bundle(tiny_bundle(variant, precision, (profile,)))
    return Target(bundle, RuntimeOptions(threads=1), slots=slots, floor=floor)


def run(target, tokens, slot=0):
    (logits,) = target.forward([Rows(slot, tokens, len(tokens))])
    return logits.copy()


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(3, 200, length).tolist()


@pytest.mark.parametrize("profile", ["ort", "std"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rewind_and_replay_is_bit_equal_at_every_length(tiny_bundle, variant, profile):
    target, tokens, ahead = open_target(tiny_bundle, variant, profile), tokens_of(24), tokens_of(12, seed=1)
    expected = run(target, tokens)
    for length in range(25):
        target.cache.rewind_to(0, length)
        run(target, ahead)
        target.cache.rewind_to(0, length)
        target.cache.fill_stale(STALE[profile])
        if length < 24:
            assert np.array_equal(run(target, tokens[length:]), expected[length:]), length
        else:
            assert target.cache.lengths == [24]


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_growth_of_capacity_changes_nothing(tiny_bundle, precision):
    tokens = tokens_of(500)
    grown = open_target(tiny_bundle, precision=precision)
    roomy = open_target(tiny_bundle, precision=precision)
    roomy.cache.reserve(1024)
    for start in range(0, 500, 50):
        assert np.array_equal(run(grown, tokens[start : start + 50]), run(roomy, tokens[start : start + 50]))
    assert grown.cache.generation > 0
    assert roomy.cache.capacity == 1024 > grown.cache.capacity


@pytest.mark.parametrize("length", [-1, 6])
def test_rewind_outside_the_text_raises(tiny_bundle, length):
    target = open_target(tiny_bundle)
    run(target, tokens_of(5))
    with pytest.raises(ValueError, match="outside"):
        target.cache.rewind_to(0, length)


def test_pass_beyond_the_context_is_refused_and_changes_nothing(tiny_bundle):
    target = open_target(tiny_bundle)
    run(target, tokens_of(5))
    with pytest.raises(UsageError, match="context"):
        run(target, tokens_of(target.context))
    assert target.cache.lengths == [5]


@pytest.mark.parametrize("profile", ["ort", "std"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_slots_equal_single_runs(tiny_bundle, variant, profile):
    """Four slots of different lengths, prompts and then steps of different widths, idle slots included."""
    batch = open_target(tiny_bundle, variant, profile, slots=4)
    singles = [open_target(tiny_bundle, variant, profile) for _ in range(4)]
    texts = [tokens_of(length, seed=length) for length in (3, 21, 9, 14)]
    plans = [[3, 21, 9, 14], [1, 4, 0, 2], [0, 2, 3, 0], [5, 1, 1, 1], [0, 0, 7, 0]]
    worst = 0.0
    for step, widths in enumerate(plans):
        fresh = [tokens_of(width, seed=10 * step + slot) if step else texts[slot] for slot, width in enumerate(widths)]
        requests = [Rows(slot, tokens, len(tokens)) for slot, tokens in enumerate(fresh) if tokens]
        together = batch.forward(requests)
        for request, logits in zip(requests, together, strict=True):
            alone = run(singles[request.slot], request.tokens)
            worst = max(worst, float(np.abs(alone - logits).max()))
            assert np.array_equal(alone.argmax(axis=1), logits.argmax(axis=1))
        batch.cache.fill_stale(STALE[profile])
    assert worst <= 1e-4
