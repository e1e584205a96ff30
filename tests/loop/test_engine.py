"""Prompt to text on a real tiny bundle: the text does not depend on how rounds cut the tokens."""

import json
import math
import shutil
from types import MappingProxyType

import pytest
from checkpoints import write_hf_checkpoint

from oxidize.export.build import ExportPlan
from oxidize.export.bundle import DraftSource, export_bundle
from oxidize.export.source import open_source
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.errors import OxidizeError, UsageError
from oxidize.runtime.grammar import GrammarSpec
from oxidize.runtime.logprobs import LogprobsParams
from oxidize.runtime.parsing import ReasoningParser
from oxidize.runtime.processors import Controls
from oxidize.runtime.request import Request
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions

OPTIONS = RuntimeOptions(threads=1)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    return Engine.open(tiny_bundle("smollm2"), EngineOptions(OPTIONS, draft="ngram", exact=True))


def answer(engine, prompt="one two three one two", k=8, stops=(), count=48, rest=MappingProxyType({}), **sampling):
    config = SpeculativeConfig(k, count, adaptive=False, min_acceptance_rate=0.0)
    request = Request(config, SamplingParams(**sampling), stops=stops, **rest)
    deltas = list(engine.stream(engine.encode(prompt), request))
    return "".join(delta.text for delta in deltas), deltas


def test_text_is_the_decoded_tokens(engine):
    text, deltas = answer(engine)
    tokens = [token for delta in deltas for token in delta.tokens]
    eos = set(engine.bundle.manifest.generation.eos_token_ids)
    assert text == engine.tokenizer.decode([token for token in tokens if token not in eos])
    assert deltas[-1].finish_reason in ("stop", "length")
    assert all(delta.finish_reason is None for delta in deltas[:-1])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_does_not_depend_on_k(engine, temperature):
    texts = {answer(engine, k=k, temperature=temperature, seed=4)[0] for k in (0, 1, 3, 8)}
    assert len(texts) == 1


def test_stop_strings_end_the_text_wherever_they_fall(engine):
    whole, _ = answer(engine)
    assert len(whole) > 12
    for start in range(4, 12):
        stop = whole[start : start + 3]
        expected = whole[: whole.index(stop)]
        for k in (0, 1, 8):
            text, deltas = answer(engine, k=k, stops=(stop,))
            assert text == expected
            assert deltas[-1].finish_reason == "stop"


def test_longest_answer_is_bounded_by_the_context(engine):
    prompt = "a b " * 100
    room = engine.target.context - len(engine.encode(prompt))
    _, deltas = answer(engine, prompt, count=10_000)
    tokens = sum(len(delta.tokens) for delta in deltas)
    assert tokens == room or deltas[-1].finish_reason == "stop"


def test_prompt_beyond_the_context_is_refused(engine):
    with pytest.raises(UsageError, match="context"):
        answer(engine, "a b c d " * 600)


def test_a_draft_of_another_vocabulary_is_refused(tiny_bundle, tmp_path):
    """The digest of the id -> token table decides, not a name."""
    draft = tmp_path / "draft"
    shutil.copytree(tiny_bundle("smollm2"), draft)
    manifest = json.loads((draft / "manifest.json").read_text())
    manifest["tokenizer"]["vocab_sha256"] = "0" * 64
    (draft / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="vocabulary"):
        Engine.open(tiny_bundle("smollm2"), EngineOptions(OPTIONS, draft=str(draft)))


def test_unknown_draft_names_are_refused(tiny_bundle):
    with pytest.raises(UsageError, match="no draft called 'nosuch'"):
        Engine.open(tiny_bundle("smollm2"), EngineOptions(OPTIONS, draft="nosuch"))


def test_stats_add_up(engine):
    _, deltas = answer(engine)
    stats = engine.stats
    tokens = sum(len(delta.tokens) for delta in deltas)
    assert stats.generated_tokens == tokens
    assert stats.rounds == len(deltas)
    assert tokens == stats.accepted_draft_tokens + stats.rounds or deltas[-1].finish_reason is not None
    assert stats.accepted_draft_tokens == sum(stats.accepted_per_position)
    parts = sum(stats.ort_ns.values()) / 1e6 + stats.host_ms
    assert parts == pytest.approx(stats.decode_ns / 1e6)
    assert 0 < stats.host_ms < stats.decode_ns / 1e6


def test_padded_vocabulary_rows_are_never_produced(tiny_bundle):
    engine = Engine.open(tiny_bundle("padded_vocab"), EngineOptions(OPTIONS, draft="none"))
    facts = engine.bundle.manifest.model
    assert facts.token_count < facts.vocab_size
    for seed in range(20):
        _, deltas = answer(engine, temperature=5.0, seed=seed)
        assert all(token < facts.token_count for delta in deltas for token in delta.tokens)


def test_a_draft_inside_the_bundle_is_found_and_used(tmp_path):
    """The draft has the target's own weights, so under the exact floor it is always right."""
    source = tmp_path / "source"
    write_hf_checkpoint(source, "smollm2")
    plan = ExportPlan("fp32")
    draft = DraftSource("small", open_source(str(source)), plan)
    export_bundle(open_source(str(source)), plan, tmp_path / "bundle", [draft])
    both = Engine.open(tmp_path / "bundle", EngineOptions(OPTIONS, exact=True))
    text, _ = answer(both, k=4)
    assert both.stats.drafter == "ngram+small"
    engine = Engine.open(tmp_path / "bundle", EngineOptions(OPTIONS, draft="small", exact=True))
    assert answer(engine, k=4)[0] == text
    assert engine.stats.drafter == "small"
    assert engine.stats.draft_forward_passes >= engine.stats.draft_tokens > 0
    assert engine.stats.acceptance_rate > 0.9
    plain = Engine.open(tmp_path / "bundle", EngineOptions(OPTIONS, draft="none", exact=True))
    assert answer(plain)[0] == text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_control_reaches_the_answer_and_does_not_depend_on_k(engine, temperature):
    """Each request differs from the plain one, and is the same with and without drafts."""
    plain, deltas = answer(engine, k=0, temperature=temperature, seed=2)
    first = deltas[0].tokens[0]
    word = engine.tokenizer.decode([first])
    requests = {
        "bias": {"controls": Controls(logit_bias=((first, -math.inf),))},
        "repetition": {"controls": Controls(repetition_penalty=5.0)},
        "presence": {"controls": Controls(presence_penalty=2.0, frequency_penalty=2.0)},
        "bad words": {"bad_words": (word,)},
        "grammar": {"grammar": GrammarSpec("regex", "[a-z]{3}( [a-z]{3})*")},
    }
    for name, request in requests.items():
        made = [answer(engine, k=k, rest=request, temperature=temperature, seed=2)[0] for k in (0, 1, 8)]
        assert len(set(made)) == 1, name
        assert name in ("presence", "repetition") or made[0] != plain, name


def test_logprobs_agree_with_and_without_drafts(engine):
    """One entry per token, the emitted token's own; bit for bit equal for any k."""
    wanted = {"logprobs": LogprobsParams(2)}
    made = []
    for k in (0, 3, 8):
        _, deltas = answer(engine, k=k, rest=wanted)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert [entry.token for entry in entries] == [token for delta in deltas for token in delta.tokens]
        assert all(entry.top[0][1] == entry.logprob < 0 and len(entry.top) == 2 for entry in entries)
        made.append(entries)
    assert made[0] == made[1] == made[2]
    assert answer(engine)[1][0].logprobs is None


def test_choices_are_texts_of_their_own_and_each_ends(engine):
    _, deltas = answer(engine, count=12, rest={"choices": 3}, temperature=1.5, seed=1)
    texts = ["".join(delta.text for delta in deltas if delta.choice == choice) for choice in range(3)]
    assert len(set(texts)) == 3
    assert [delta.choice for delta in deltas if delta.finish_reason] == [0, 1, 2]
    assert texts[0] == answer(engine, count=12, temperature=1.5, seed=1)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_with_a_draft_model_gives_the_plain_text(tiny_bundle, temperature):
    """Another random model drafts under the same masks; k, penalties and a least length make no difference."""
    texts = set()
    for draft in ("none", "ngram", str(tiny_bundle("smollm2", seed=5)), str(tiny_bundle("smollm2"))):
        engine = Engine.open(tiny_bundle("smollm2"), EngineOptions(OPTIONS, draft=draft, exact=True))
        for k in (1, 5):
            config = SpeculativeConfig(k, 60, 0.0, strict_mode=True, adaptive=False)
            request = Request(
                config,
                SamplingParams(temperature, seed=3),
                Controls(1.1, 0.2, min_new_tokens=6),
                grammar=GrammarSpec("regex", "[a-f]{2,9}(-[0-9]{3}){1,4}"),
            )
            texts.add("".join(delta.text for delta in engine.stream(engine.encode("one two"), request)))
            assert draft == "none" or engine.stats.draft_tokens > 0
    assert len(texts) == 1


def test_reasoning_is_split_off_when_asked_for(engine):
    whole, _ = answer(engine)
    tag = whole[6:9]
    parsers = {"parsers": lambda: [ReasoningParser("<none>", tag, open=True)]}
    _, deltas = answer(engine, rest=parsers)
    assert "".join(delta.reasoning for delta in deltas) == whole[: whole.index(tag)]


def test_a_stop_string_ends_the_statistics_too(engine):
    """What the round made behind the stop string is not counted, with any k."""
    whole, _ = answer(engine)
    for k in (0, 1, 8):
        _, deltas = answer(engine, k=k, stops=(whole[9:12],))
        assert engine.stats.generated_tokens == sum(len(delta.tokens) for delta in deltas)
        last = engine.stats.state_changes[-1]
        assert (last.at, last.state, last.reason) == (engine.stats.generated_tokens, "done", "stop")


def test_a_failed_answer_leaves_the_engine_usable(engine, monkeypatch):
    """An error in the middle of a round: the next text is that of a fresh engine."""
    expected, _ = answer(engine)
    forward = engine.target.forward
    calls = iter(range(100))

    def fail(requests):
        if next(calls) == 3:
            raise OxidizeError("no")
        return forward(requests)

    monkeypatch.setattr(engine.target, "forward", fail)
    with pytest.raises(OxidizeError, match="no"):
        answer(engine)
    monkeypatch.undo()
    assert answer(engine)[0] == expected


def test_bad_words_are_forbidden_where_no_space_comes_before(engine):
    whole, _ = answer(engine, temperature=1.5, seed=9, count=60)
    for word in sorted(set(whole))[:6]:
        _, deltas = answer(engine, temperature=1.5, seed=9, count=60, rest={"bad_words": (word,)})
        (forbidden,) = engine.tokenizer.encode_inside(word)
        assert forbidden not in [token for delta in deltas for token in delta.tokens]


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(engine):
    passes = engine.target.passes
    with pytest.raises(UsageError, match="cannot be used"):
        answer(engine, rest={"grammar": GrammarSpec("json_schema", '{"type": 7}')})
    assert engine.target.passes == passes
