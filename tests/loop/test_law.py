"""Sampled speculation has the target's law: chi-square over 20,000 seeded texts; under the match rule, equal texts."""

import itertools
from functools import lru_cache

import pytest
from fakes import FakeDraft, FakeTarget, hashed_logits
from laws import SAMPLES, assert_follows, text_law

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.draft_model import DraftModel
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.sampling import SamplingParams, law_of
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

LENGTH = 3
PROMPT = [1, 2, 1, 2, 1]
SETTINGS = [{"temperature": 0.7, "top_k": 4}, {"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9}]


@lru_cache(maxsize=100_000)
def _cached_logits(context, vocabulary):
    return hashed_logits(context, vocabulary)


def rule(context, vocabulary):
    return _cached_logits(tuple(context), vocabulary)


def fixed(k, count, strict):
    return SpeculativeConfig(
        draft_tokens_per_step=k, max_new_tokens=count, min_acceptance_rate=0.0, strict_mode=strict, adaptive=False
    )


@pytest.mark.parametrize("strict", [False, True], ids=["reject", "match"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"T{s['temperature']}")
def test_fake_vocabulary(setting, strict):
    """A draft whose own law is a blurred copy of the target's, k = 2, so that all outcomes of a round occur."""
    target = FakeTarget(vocabulary=5, rule=rule)
    params = SamplingParams(**setting)

    @lru_cache(maxsize=100_000)
    def draft_law(context):
        return law_of(0.5 * rule(context, 5) + 0.5 * rule((9, *context), 5), params)

    decoder = SpeculativeDecoder(target, FakeDraft(lambda context: draft_law(tuple(context))))
    texts = []
    for seed in range(SAMPLES):
        stream = decoder.stream(PROMPT, SamplingParams(**setting, seed=seed), config=fixed(2, LENGTH, strict))
        texts.append(tuple(token for emission in stream for token in emission.tokens))
    assert_follows(texts, text_law(lambda tokens: law_of(rule([*PROMPT, *tokens], 5), params), LENGTH))
    assert 0.2 < decoder.stats.acceptance_rate <= 1.0 or decoder.stats.draft_tokens <= 4


@pytest.fixture(scope="module")
def real(tiny_bundle):
    """A tiny target on ONNX Runtime and another random model as its draft; exact floor, so laws are reproducible."""
    options = RuntimeOptions(threads=1)
    target = Target(open_bundle(tiny_bundle("llama2")), options, floor=2)
    draft = Target(open_bundle(tiny_bundle("llama2", seed=5)), options)
    return target, draft


@pytest.mark.parametrize("strict", [False, True], ids=["reject", "match"])
@pytest.mark.parametrize("setting", [{"temperature": 0.7, "top_k": 4}, {"temperature": 1.5, "top_p": 0.02}])
def test_real_bundle(real, setting, strict):
    target, draft = real
    params = SamplingParams(**setting)
    decoder = SpeculativeDecoder(target, draft)
    texts = []
    for seed in range(SAMPLES):
        stream = decoder.stream(PROMPT, SamplingParams(**setting, seed=seed), config=fixed(1, 2, strict))
        texts.append(tuple(token for emission in stream for token in emission.tokens))

    def law_after(tokens):
        target.cache.rewind_to(0, 0)
        (logits,) = target.forward([Rows(0, [*PROMPT, *tokens], 1)])
        return law_of(logits[0], params)

    assert_follows(texts, text_law(law_after, 2))


def test_match_rule_gives_one_text_per_seed(real):
    """The same seed gives the same text without a draft, with lookup, with a draft model, and for every k."""
    target, draft = real
    drafters = [None, NgramDrafter(min_match=1), DraftModel(draft)]
    for seed, setting in itertools.product(range(6), SETTINGS):
        params = SamplingParams(**setting, seed=seed)
        texts = set()
        for drafter, k in itertools.product(drafters, (1, 3, 8)):
            decoder = SpeculativeDecoder(target, drafter, fixed(k, 24, strict=True))
            target.cache.rewind_to(0, 0)
            if drafter is not None:
                drafter.reset()
            texts.add(tuple(decoder.generate(PROMPT * 3, params)))
        assert len(texts) == 1, (seed, setting)


def test_adaptive_lookup_gives_one_text_per_seed_under_either_rule(real):
    """A lookup proposes with certainty, so timing-driven choices of k cannot change its text."""
    target, _ = real
    texts = set()
    for strict, k in itertools.product((False, True), (0, 2, 15)):
        decoder = SpeculativeDecoder(target, NgramDrafter(), SpeculativeConfig(k, 40, strict_mode=strict))
        target.cache.rewind_to(0, 0)
        texts.add(tuple(decoder.generate(PROMPT * 4, SamplingParams(temperature=0.8, seed=3))))
    assert len(texts) == 1
