"""Structured output through the whole loop: under hostile drafts, the plain text, and valid JSON."""

import json
import random

import jsonschema
import numpy as np
import pytest
from fakes import FakeDraft, FakeTarget
from grammars import EOS, PADDING, SPECS, answer, byte_level, closing, schemas

from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder, Wishes
from oxidize.runtime.drafters.base import Proposal
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.grammar import GrammarCompiler, GrammarSpec
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.text import Tokenizer

PROMPT = [40, 41, 42, 43, 40, 41]
SCHEMAS = 200


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="module")
def target(tokenizer) -> FakeTarget:
    size = tokenizer.vocab_size + PADDING
    ends = closing(tokenizer, size).astype(np.float32)

    def rule(context, vocabulary):
        """Noise that grows more and more eager to come to an end."""
        position = len(context) - len(PROMPT)
        noise = np.random.default_rng([len(context), *context[-2:]]).gumbel(size=vocabulary)
        return (noise + min(8.0, position / 8) * ends).astype(np.float32)

    return FakeTarget(size, rule)


@pytest.fixture(scope="module")
def compiler(tokenizer, target) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, EOS, target.vocabulary)


class HostileDrafter(FakeDraft):
    """Proposes with certainty what is mostly illegal: random ids, end tokens, and sometimes the right token before."""

    name = "hostile"
    free = True

    def __init__(self, target: FakeTarget, seed: int) -> None:
        super().__init__(lambda context: None)
        self._target, self._choice = target, random.Random(seed)

    def propose(self, committed, k, context):
        tokens: list[int] = []
        for _ in range(k):
            row = self._target.rule([*committed, *tokens], self._target.vocabulary)
            right = context.law(row, tokens) if context.laws.legal(tokens) == len(tokens) else None
            random_one = self._choice.choice([self._choice.randrange(self._target.vocabulary), *EOS])
            certain = right is not None and self._choice.random() < 0.6
            tokens.append(context.draw(right, len(committed) + len(tokens)) if certain else random_one)
            if tokens[-1] in EOS:
                break
        return Proposal(tuple(tokens), match_length=12)


class SamplingDrafter(HostileDrafter):
    """A costly one with laws, blind to the grammar: its illegal tokens must be rejected, and never change the law."""

    name = "sampling"
    free = False

    def propose(self, committed, k, context):
        blind = [self._target.rule([*committed[-i:], 7], self._target.vocabulary) for i in range(1, k + 1)]
        laws = tuple(type(context)(context.params, context.key).law(row, ()) for row in blind)
        tokens = tuple(context.draw(law, len(committed) + index) for index, law in enumerate(laws))
        return Proposal(tokens, laws)


def decode(target, drafters, state, seed, k, temperature, strict=True):
    config = SpeculativeConfig(k, 600, 0.0, strict_mode=strict, adaptive=False)
    target.cache.rewind_to(0, 0)
    decoder = SpeculativeDecoder(target, drafters, config)
    emissions = decoder.stream(PROMPT, SamplingParams(temperature, seed=seed), EOS, wishes=Wishes(grammar=state.fork()))
    return [token for emission in emissions for token in emission.tokens], decoder.stats


def test_random_schemas_with_hostile_drafts(tokenizer, target, compiler):
    """Token for token the plain text, valid under the schema, an end token only at its end."""
    proposed = accepted = 0
    for seed, schema in schemas(SCHEMAS):
        state = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        temperature = (0.0, 0.8, 1.3)[seed % 3]
        plain, _ = decode(target, None, state, seed, 0, temperature)
        drafters = [[HostileDrafter(target, seed)], [NgramDrafter(1)], [SamplingDrafter(target, seed)]][seed % 3]
        tokens, stats = decode(target, drafters, state, seed, 1 + seed % 7, temperature)
        assert tokens == plain, (seed, schema)
        jsonschema.validate(json.loads(answer(tokenizer, tokens)), schema)
        proposed, accepted = proposed + stats.draft_tokens, accepted + stats.accepted_draft_tokens
    assert proposed > accepted > 0


def test_reject_rule_with_illegal_drafts_stays_inside_the_grammar(tokenizer, target, compiler):
    for seed, schema in schemas(40):
        state = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        tokens, _ = decode(target, [SamplingDrafter(target, seed)], state, seed, 4, 1.0, strict=False)
        jsonschema.validate(json.loads(answer(tokenizer, tokens)), schema)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_every_kind_of_grammar(tokenizer, target, compiler, name, k):
    state = compiler.compile(SPECS[name])
    for seed in range(6):
        plain, _ = decode(target, None, state, seed, 0, 0.9)
        tokens, _ = decode(target, [HostileDrafter(target, seed), NgramDrafter(1)], state, seed, k, 0.9)
        assert tokens == plain
        assert tokens[-1] in EOS or SPECS[name].after  # free text may never come to its tag
