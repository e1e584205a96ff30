"""Every control under every drafter: the text and log probabilities of plain decoding, and the target's law.

Plain decoding itself is checked against a reference that knows no loop: one whole prefix after the other.
"""

from functools import lru_cache

import numpy as np
import pytest
from fakes import FakeDraft, FakeTarget, OracleDrafter, cyclic_logits, hashed_logits
from laws import SAMPLES, assert_follows, text_law

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder, Wishes
from oxidize.runtime.drafters.base import Proposal
from oxidize.runtime.drafters.draft_model import DraftModel
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.laws import Laws
from oxidize.runtime.logprobs import LogprobsParams
from oxidize.runtime.noise import Domain, NoiseKey
from oxidize.runtime.processors import Controls, Processors
from oxidize.runtime.sampling import SamplingParams, law_of
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

V, EOS, COUNT = 13, (1, 6), 40
PROMPT = [2, 3, 4, 2, 3, 4, 2, 3]

CONTROLS = {
    "none": Controls(),
    "repetition": Controls(repetition_penalty=1.4),
    "presence": Controls(presence_penalty=1.0),
    "frequency": Controls(frequency_penalty=0.6),
    "all penalties": Controls(1.2, 0.4, 0.3),
    "bias": Controls(logit_bias=((5, 3.0), (7, -float("inf")))),
    "min tokens": Controls(min_new_tokens=11),
    "bad words": Controls(bad_words=((4,), (2, 3), (8, 9, 10))),
    "everything": Controls(1.1, 0.2, 0.1, ((3, 1.0),), 5, ((4, 4), (9,))),
}
SAMPLING = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8, seed=3),
    "top-k": SamplingParams(temperature=1.0, top_k=4, seed=4),
    "top-p": SamplingParams(temperature=1.2, top_p=0.7, seed=5),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2, seed=6),
}


class Alternating:
    """A grammar: token parities alternate, starting odd; from six tokens on it may end, at ten it must."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def _allowed(self, length: int) -> np.ndarray:
        mask = np.arange(V) % 2 != length % 2
        mask[list(EOS)] = length >= 6
        return mask if length < 10 else np.isin(np.arange(V), EOS)

    def masks(self, drafted):
        legal = drafted[: self.legal_prefix(drafted)]
        ended = next((i for i, token in enumerate(legal) if token in EOS), len(legal))
        return np.array([self._allowed(len(self.tokens) + i) for i in range(ended + 1)])

    def legal_prefix(self, drafted):
        for index, token in enumerate(drafted):
            if not self._allowed(len(self.tokens) + index)[token] or any(t in EOS for t in drafted[:index]):
                return index
        return len(drafted)

    def forced(self):
        return [3] if len(self.tokens) == 2 else []  # a guess is all the loop may take it for

    def commit(self, tokens):
        assert self.legal_prefix(tokens) == len(tokens), "an illegal token was committed"
        self.tokens += tokens


class Blurred(FakeDraft):
    """Draws from the target's law, blurred, under the request's controls; as a real draft model does."""

    def __init__(self, rule) -> None:
        self._rule = rule
        super().__init__(lambda context: Laws(SamplingParams()).round(()).at(0, rule(context, V)))

    def propose(self, committed, k, context):
        tokens, laws = [], []
        for _ in range(k):
            text = [*committed, *tokens]
            laws.append(context.law(0.6 * self._rule(text, V) + 0.4 * self._rule([9, *text], V), tokens))
            tokens.append(context.draw(laws[-1], len(text)))
        return Proposal(tuple(tokens), tuple(laws))


class Hostile(FakeDraft):
    """Proposes what nobody asked for, with certainty: end tokens, forbidden tokens, repetitions."""

    name = "hostile"

    def __init__(self) -> None:
        super().__init__(lambda context: None)

    def propose(self, committed, k, context):
        return Proposal(tuple((len(committed) * 5 + 3 * index) % V for index in range(k)), match_length=9)


def drafters(target):
    return {
        "ngram": lambda: NgramDrafter(min_match=1),
        "right": lambda: OracleDrafter(target, 99),
        "half right": lambda: OracleDrafter(target, 2),
        "hostile": Hostile,
        "sampling": lambda: Blurred(target.rule),
        "ngram and sampling": lambda: [NgramDrafter(), Blurred(target.rule)],
    }


def reference(rule, controls, params, grammar, count=COUNT):
    """Plain decoding by definition: the processed row of the whole text, its law, the token of the noise."""
    answer = []
    while len(answer) < count:
        row = rule([*PROMPT, *answer], V)
        changed = Processors(controls, EOS, [*PROMPT], V)
        changed.commit(answer)
        processed = changed.apply(row)
        if grammar is not None:
            mask = grammar.masks([])[0]
            wins = not (processed[mask] > -np.inf).any()  # the controls forbid all that the grammar allows
            processed = np.where(mask, row if wins else processed, -np.inf)
        law = law_of(processed, params)
        answer.append(law.draw(NoiseKey(params.seed), Domain.TARGET, len(PROMPT) + len(answer)))
        if grammar is not None:
            grammar.commit(answer[-1:])
        if answer[-1] in EOS:
            break
    return answer


def decode(target, drafter, k, params, wishes, adaptive=False, strict=True, count=COUNT):
    config = SpeculativeConfig(k, count, 0.0, strict_mode=strict, adaptive=adaptive)
    decoder = SpeculativeDecoder(target, drafter, config)
    target.cache.rewind_to(0, 0)
    emissions = list(decoder.stream(PROMPT, params, EOS, wishes=wishes))
    tokens = [token for emission in emissions for token in emission.tokens]
    logprobs = [entry for emission in emissions for entry in emission.logprobs or ()]
    return tokens, logprobs, emissions[-1].finish_reason


@pytest.mark.parametrize("rule", [hashed_logits, cyclic_logits])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "grammar"])
def test_every_drafter_gives_the_plain_text(control, sampling, rule, constrained):
    controls, params = CONTROLS[control], SAMPLING[sampling]
    grammar = Alternating if constrained else lambda: None
    target = FakeTarget(V, rule)
    expected = reference(rule, controls, params, grammar())
    for of in ("model", "law"):
        wanted = LogprobsParams(3, of)
        plain = decode(target, None, 0, params, Wishes(controls, grammar(), wanted))
        assert plain[0] == expected
        assert plain[2] == ("stop" if expected[-1] in EOS else "length")
        for name, make in drafters(target).items():
            for k, adaptive in ((1, False), (3, False), (8, False), (8, True)):
                found = decode(target, make(), k, params, Wishes(controls, grammar(), wanted), adaptive)
                assert found == plain, (name, k)


def test_a_grammar_wins_over_controls_that_forbid_all_it_allows():
    target = FakeTarget(V, hashed_logits)
    wishes = Wishes(Controls(min_new_tokens=30), Alternating())
    tokens, _, reason = decode(target, NgramDrafter(), 4, SamplingParams(), wishes)
    assert len(tokens) == 11
    assert reason == "stop"


@pytest.mark.parametrize("control", ["all penalties", "bad words", "min tokens"])
def test_rejected_drafts_leave_no_trace(control):
    """Between rounds the state equals one that never saw a draft."""
    target = FakeTarget(V, hashed_logits)
    laws = Laws(SamplingParams(temperature=1.0), Processors(CONTROLS[control], EOS, PROMPT, V), Alternating())
    fresh = Laws(SamplingParams(temperature=1.0), Processors(CONTROLS[control], EOS, PROMPT, V), Alternating())
    for tokens in ([3, 2], [5], [4, 7, 8]):
        drafted = (*tokens, 0, 11, 12, 2)
        rows = laws.round(drafted)
        for row in range(len(tokens) + 1):
            rows.at(row, target.rule([*PROMPT, *drafted[:row]], V))
        laws.legal(drafted)
        laws.forced()
        laws.commit(tokens)
        fresh.commit(tokens)
        row = target.rule(PROMPT, V)
        ours, theirs = laws.round(()).at(0, row), fresh.round(()).at(0, row)
        assert np.array_equal(ours.probs, theirs.probs)
        assert np.array_equal(ours.ids if ours.ids is not None else [], theirs.ids if theirs.ids is not None else [])


@lru_cache(maxsize=100_000)
def _cached(context, vocabulary):
    return hashed_logits(context, vocabulary)


@pytest.mark.parametrize("control", ["all penalties", "bias", "min tokens", "bad words"])
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "grammar"])
def test_reject_rule_keeps_the_law(control, constrained):
    if constrained and control == "bad words":
        pytest.skip("together they can forbid every token")
    size, length = 5, 3
    controls = {
        "all penalties": Controls(1.5, 0.5, 0.5),
        "bias": Controls(logit_bias=((2, 1.5), (3, -1.0))),
        "min tokens": Controls(min_new_tokens=2),
        "bad words": Controls(bad_words=((2,), (3, 4))),
    }[control]
    params = SamplingParams(temperature=0.9)

    class Odd:
        """A grammar of five tokens: never the same token twice in a row."""

        def __init__(self) -> None:
            self.last = -1

        def masks(self, drafted):
            tokens = [self.last, *drafted[: self.legal_prefix(drafted)]]
            return np.array([np.arange(size) != token for token in tokens])

        def legal_prefix(self, drafted):
            pairs = zip([self.last, *drafted], drafted, strict=False)
            return next((i for i, (before, token) in enumerate(pairs) if before == token), len(drafted))

        def forced(self):
            return []

        def commit(self, tokens):
            self.last = tokens[-1]

    def rule(context, vocabulary):
        return _cached(tuple(context), vocabulary)

    class Draft(Blurred):
        def propose(self, committed, k, context):
            tokens, laws = [], []
            for _ in range(k):
                text = [*committed, *tokens]
                laws.append(context.law(0.5 * rule(text, size) + 0.5 * rule([9, *text], size), tokens))
                tokens.append(context.draw(laws[-1], len(text)))
            return Proposal(tuple(tokens), tuple(laws))

    prompt = [1, 2, 1, 2, 1]

    def law_after(tokens):
        processors = Processors(controls, (0,), prompt, size)
        grammar = Odd() if constrained else None
        laws = Laws(params, processors, grammar)
        if tokens:
            laws.commit(tokens)
        return laws.round(()).at(0, rule([*prompt, *tokens], size))

    target = FakeTarget(size, rule)
    decoder = SpeculativeDecoder(target, Draft(rule), SpeculativeConfig(2, length, 0.0, adaptive=False))
    texts = []
    for seed in range(SAMPLES):
        sampled = SamplingParams(temperature=0.9, seed=seed)
        wishes = Wishes(controls, Odd() if constrained else None)
        eos = (0,) if control == "min tokens" else ()
        stream = decoder.stream(prompt, sampled, eos, wishes=wishes)
        texts.append(tuple(token for emission in stream for token in emission.tokens))
    law = text_law(law_after, length, eos=(0,) if control == "min tokens" else ())
    assert_follows(texts, law)


@pytest.fixture(scope="module")
def real(tiny_bundle):
    options = RuntimeOptions(threads=1)
    target = Target(open_bundle(tiny_bundle("llama2")), options, floor=2)
    same = Target(open_bundle(tiny_bundle("llama2")), options)
    other = Target(open_bundle(tiny_bundle("llama2", seed=5)), options)
    return target, same, other


@pytest.mark.parametrize("sampling", SAMPLING)
def test_real_bundle(real, sampling):
    """Bit for bit, log probabilities included, with passes of two rows or more."""
    target, same, other = real
    prompt, params = [5, 6, 7, 8] * 4, SAMPLING[sampling]
    controls = {
        "penalties": Controls(1.3, 0.4, 0.2),
        "bias": Controls(logit_bias=((5, 4.0), (6, -float("inf")))),
        "min tokens": Controls(min_new_tokens=9),
        "bad words": Controls(bad_words=((7,), (5, 8))),
    }
    eos = tuple(range(20, 28))
    for control in controls.values():
        found = []
        choices = [(None, 0), *((name, k) for name in ("ngram", "same", "other", "both") for k in (1, 3, 8))]
        for name, k in choices:
            drafter = {
                None: lambda: None,
                "ngram": lambda: NgramDrafter(min_match=1),
                "same": lambda: DraftModel(same),
                "other": lambda: DraftModel(other),
                "both": lambda: [NgramDrafter(), DraftModel(same)],
            }[name]()
            target.cache.rewind_to(0, 0)
            for model in (same, other):
                model.cache.rewind_to(0, 0)
            config = SpeculativeConfig(k, 32, 0.0, strict_mode=True, adaptive=False)
            decoder = SpeculativeDecoder(target, drafter, config)
            stream = decoder.stream(prompt, params, eos, wishes=Wishes(control, None, LogprobsParams(2, "model")))
            found.append([(emission.tokens, emission.logprobs) for emission in stream])
        joined = [
            [(token, entry) for tokens, entries in run for token, entry in zip(tokens, entries, strict=True)]
            for run in found
        ]
        assert all(run == joined[0] for run in joined)
