"""Parity and the loop on the CUDA and TensorRT providers. Skipped, with the reason, where there is no GPU."""

import numpy as np
import pytest
from draft_texts import KINDS, assert_texts_are_plain, open_target_and_drafts, write_bundle_of_all_kinds

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.errors import ProviderError
from oxidize.runtime.session import RuntimeOptions, resolve_provider
from oxidize.runtime.target import Rows, Target

pytestmark = pytest.mark.gpu

VARIANTS = ["llama3", "mistral_sliding", "qwen2", "qwen3", "gemma3"]
TOLERANCE = {"fp32": 2e-3, "fp16": 5e-2}


@pytest.fixture(scope="module", params=["cuda", "tensorrt"])
def provider(request):
    try:
        return resolve_provider(request.param)
    except ProviderError as error:
        pytest.skip(str(error))


def open_target(folder, provider):
    return Target(open_bundle(folder), RuntimeOptions(provider, threads=1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_logits_equal_the_cpu_ones(tiny_bundle, provider, variant, precision):
    """Prefill, one-row steps, a wide pass and a replay after a rewind, against the CPU in float32."""
    profile = "std" if provider == "tensorrt" or precision == "fp32" else "ort"
    ours = open_target(tiny_bundle(variant, precision, (profile,)), provider)
    reference = open_target(tiny_bundle(variant), "cpu")
    tokens = np.random.default_rng(0).integers(3, 200, 40).tolist()
    for start, width in ((0, 20), (20, 1), (21, 1), (22, 5), (18, 6)):
        for target in (ours, reference):
            target.cache.rewind_to(0, start)
        got, expected = (
            target.forward([Rows(0, tokens[start : start + width], width)])[0] for target in (ours, reference)
        )
        assert np.abs(got - expected).max() <= TOLERANCE[precision], (start, width)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_speculative_text_equals_plain(tiny_bundle, provider, k):
    target = open_target(tiny_bundle("llama2", "fp32", ("std",)), provider)
    for seed in range(10):
        prompt = np.random.default_rng(seed).integers(3, 200, 12).tolist()
        texts = []
        for drafter, drafts in ((None, 0), (NgramDrafter(min_match=1), k)):
            target.cache.rewind_to(0, 0)
            config = SpeculativeConfig(drafts, 32, min_acceptance_rate=0.0, adaptive=False)
            texts.append(SpeculativeDecoder(target, drafter, config).generate(prompt))
        assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def bundle_of_all_kinds(tmp_path_factory):
    return write_bundle_of_all_kinds(tmp_path_factory.mktemp("all"))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_drafted_from_the_targets_rows_equal_plain_ones(provider, bundle_of_all_kinds, kind):
    """Greedy and in strict mode; the same on the CPU is tests/loop/test_draft_texts.py."""
    target, (drafter,) = open_target_and_drafts(bundle_of_all_kinds, provider, (kind,))
    for k in (1, 5):
        assert_texts_are_plain(target, drafter, k)
