"""Greedy speculation over fakes: the same tokens as plain decoding, whatever is proposed."""

import numpy as np
import pytest
from fakes import FakeTarget, OracleDrafter, cyclic_logits, hashed_logits

from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.errors import OxidizeError, UsageError
from oxidize.runtime.policy import State
from oxidize.runtime.sampling import SamplingParams

PROMPTS = [[1], [3, 3, 3], [1, 2, 3, 4, 1, 2, 3], list(range(12)) * 3, [5] * 40]


def plain(rule, prompt, count, eos=()):
    """The executable reference: one token at a time, no cache, no loop."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(rule(tokens, 13).argmax()))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def config(k, count, **rest):
    return SpeculativeConfig(draft_tokens_per_step=k, max_new_tokens=count, **rest)


@pytest.mark.parametrize("rule", [hashed_logits, cyclic_logits])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_ngram_equals_plain(rule, prompt):
    expected = plain(rule, prompt, 60)
    for k in range(9):
        for adaptive in (True, False):
            decoder = SpeculativeDecoder(FakeTarget(rule=rule), NgramDrafter(), config(k, 60, adaptive=adaptive))
            assert decoder.generate(prompt) == expected
            assert decoder.target.cache.lengths[0] == len(prompt) + 60 - 1


@pytest.mark.parametrize("wrong_from", range(6))
@pytest.mark.parametrize("floor", [1, 2])
def test_rejection_at_every_index(wrong_from, floor):
    expected = plain(hashed_logits, [1, 2], 40)
    target = FakeTarget(floor=floor)
    decoder = SpeculativeDecoder(
        target, OracleDrafter(target, wrong_from), config(5, 40, adaptive=False, min_acceptance_rate=0.0)
    )
    assert decoder.generate([1, 2]) == expected
    stats = decoder.stats
    assert stats.draft_tokens > 0
    assert stats.generated_tokens == 40
    if wrong_from >= 5:
        assert stats.acceptance_rate == 1.0
    if wrong_from == 0:
        assert stats.accepted_draft_tokens == 0


@pytest.mark.parametrize("eos_at", range(1, 14))
def test_eos_at_every_index(eos_at):
    """EOS ends the text wherever in a block it falls, and nothing after it is kept."""
    script = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 2, 3, 4, 5]

    def rule(context, vocabulary):
        logits = np.zeros(vocabulary, np.float32)
        position = len(context) - 1
        logits[1 if position == eos_at else script[position]] = 9
        return logits

    expected = plain(rule, [0], 15, eos={1})
    for k in (1, 3, 8):
        target = FakeTarget(rule=rule)
        decoder = SpeculativeDecoder(target, OracleDrafter(target, 99), config(k, 15, adaptive=False))
        emissions = list(decoder.stream([0], eos={1}))
        tokens = [token for emission in emissions for token in emission.tokens]
        assert tokens == expected
        assert emissions[-1].finish_reason == ("stop" if 1 in expected else "length")
        assert target.cache.lengths[0] == len(tokens)


@pytest.mark.parametrize("count", range(1, 12))
def test_length_limit_with_k_beyond_the_room(count):
    target = FakeTarget()
    decoder = SpeculativeDecoder(target, OracleDrafter(target, 99), config(8, count, adaptive=False))
    assert decoder.generate([1]) == plain(hashed_logits, [1], count)
    assert max(target.widths) <= count


def test_context_limit_is_never_crossed():
    target = FakeTarget(context=20)
    decoder = SpeculativeDecoder(target, OracleDrafter(target, 99), config(8, 14, adaptive=False))
    assert len(decoder.generate([1] * 6)) == 14


@pytest.mark.parametrize("length", range(1, 41))
def test_prefill_of_any_length_and_chunk(length):
    prompt = [(i * 5) % 13 for i in range(length)]
    expected = plain(hashed_logits, prompt, 5)
    for chunk in (1, 2, 3, 7, 16, 64):
        decoder = SpeculativeDecoder(FakeTarget(), NgramDrafter(), config(3, 5))
        stream = decoder.stream(prompt, chunk=chunk)
        assert [token for emission in stream for token in emission.tokens] == expected


def test_second_prompt_reuses_the_common_prefix():
    decoder = SpeculativeDecoder(FakeTarget(), NgramDrafter(), config(3, 10))
    first = [1, 2, 3, 4, 5, 6]
    answer = decoder.generate(first)
    second = first + answer + [7, 8]
    assert decoder.generate(second) == plain(hashed_logits, second, 10)
    assert decoder.stats.cached_tokens >= len(first) + len(answer) - 1
    third = [1, 2, 9]
    assert decoder.generate(third) == plain(hashed_logits, third, 10)
    assert decoder.stats.cached_tokens == 2


def test_two_decoders_may_share_a_target():
    """What the cache holds is the target's knowledge: another decoder's text is never taken for one's own."""
    target = FakeTarget()
    first, second = (SpeculativeDecoder(target, NgramDrafter(), config(3, 10)) for _ in range(2))
    for decoder, prompt in ((first, [1, 2, 3, 4]), (second, [9, 8, 7, 6, 5]), (first, [1, 2, 3, 4, 7])):
        assert decoder.generate(prompt) == plain(hashed_logits, prompt, 10)
    assert first.stats.cached_tokens == 0


def test_abandoned_stream_leaves_the_decoder_usable():
    decoder = SpeculativeDecoder(FakeTarget(), NgramDrafter(), config(3, 30))
    stream = decoder.stream([1, 2, 3])
    next(stream)
    next(stream)
    stream.close()
    assert decoder.generate([1, 2, 3]) == plain(hashed_logits, [1, 2, 3], 30)


def test_fallback_is_entered_and_reported():
    target = FakeTarget()
    decoder = SpeculativeDecoder(
        target, OracleDrafter(target, 0), config(4, 120, adaptive=False, min_acceptance_rate=0.5)
    )
    assert decoder.generate([1]) == plain(hashed_logits, [1], 120)
    states = [change.state for change in decoder.stats.state_changes]
    assert states[0] == State.SPECULATING
    assert State.FALLBACK in states
    assert states[-1] == State.DONE
    assert decoder.stats.fallback_tokens > 0
    assert any("under 0.50" in change.reason for change in decoder.stats.state_changes)


def test_nan_logits_are_refused():
    def rule(context, vocabulary):
        logits = hashed_logits(context, vocabulary)
        if len(context) > 4:
            logits[3] = np.nan
        return logits

    decoder = SpeculativeDecoder(FakeTarget(rule=rule), NgramDrafter(), config(3, 30))
    with pytest.raises(OxidizeError, match="NaN"):
        decoder.generate([1, 2])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "the prompt is empty"), ([1] * 4096, "4096 tokens"), ([1] * 5000, "5000 tokens")],
)
def test_bad_prompts(prompt, message):
    with pytest.raises(UsageError, match=message):
        SpeculativeDecoder(FakeTarget()).generate(prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_tokens_per_step": 99},
        {"draft_tokens_per_step": -1},
        {"max_new_tokens": 0},
        {"min_acceptance_rate": 2.0},
    ],
)
def test_bad_config(fields):
    with pytest.raises(UsageError, match="must be"):
        SpeculativeConfig(**fields)


def test_builder_and_presets():
    built = SpeculativeConfig.builder().draft_tokens_per_step(6).min_acceptance_rate(0.4).build()
    assert (built.draft_tokens_per_step, built.min_acceptance_rate, built.max_new_tokens) == (6, 0.4, 128)
    built = SpeculativeConfig.builder().strict_mode(True).max_new_tokens(5).adaptive(False).build()
    assert (built.strict_mode, built.max_new_tokens, built.adaptive) == (True, 5, False)
    assert SpeculativeConfig.conservative().draft_tokens_per_step < SpeculativeConfig.aggressive().draft_tokens_per_step


def test_sampling_params_reach_the_law():
    decoder = SpeculativeDecoder(FakeTarget(), NgramDrafter(), config(3, 30))
    first = decoder.generate([1, 2, 3], SamplingParams(temperature=1.0, seed=1))
    assert first == decoder.generate([1, 2, 3], SamplingParams(temperature=1.0, seed=1))
    assert first != decoder.generate([1, 2, 3], SamplingParams(temperature=1.0, seed=2))


def test_a_draft_that_breaks_down_is_named_and_left_out(caplog):
    class Broken(OracleDrafter):
        name, calls = "small", 0

        @property
        def ort_ns(self):
            return 10**6 * self.calls

        def propose(self, committed, k, context):
            self.calls += 1
            if self.calls == 3:
                context.law(np.full(13, np.nan, np.float32), ())
            return super().propose(committed, k, context)

    target = FakeTarget()
    broken, lookup = Broken(target, 2), NgramDrafter()
    decoder = SpeculativeDecoder(target, [broken, lookup], config(4, 40, adaptive=False, min_acceptance_rate=0.0))
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3)):
        expected = SpeculativeDecoder(FakeTarget(), None, config(0, 40)).generate([1, 2, 3], params)
        broken.calls = 0
        if params.greedy:
            assert decoder.generate([1, 2, 3], params) == expected
        else:
            assert len(decoder.generate([1, 2, 3], params)) == 40
        assert broken.calls == 3
        assert decoder.stats.ort_ns["draft"] == 2 * 10**6  # the first round is not of the decode time
        assert "draft 'small' broke down and is left out of this answer: expected finite logits" in caplog.text
        caplog.clear()
    broken.calls = 3
    assert decoder.generate([4, 5], SamplingParams()) == plain(hashed_logits, [4, 5], 40)
    assert broken.calls > 10
