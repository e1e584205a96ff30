"""One answer: where it ends, what of it is text, what its deltas carry."""

import random

import pytest
from tiny_tokenizers import byte_level, sentencepiece

from oxidize.runtime.answer import Answer, Delta, Span, Usage, join_deltas
from oxidize.runtime.calls import ToolCallDelta
from oxidize.runtime.generation import Emission
from oxidize.runtime.logprobs import TokenLogprob
from oxidize.runtime.parsing import LLAMA3, MISTRAL, ReasoningParser, ToolCallParser
from oxidize.runtime.text import Tokenizer

TOKENIZER = Tokenizer(byte_level())
TAGGED = Tokenizer(byte_level(tags=("</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")))
EOS = 1


def ids(text: str, tokenizer: Tokenizer = TOKENIZER) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special=False))


def letters(text: str) -> tuple[int, ...]:
    return tuple(token for letter in text for token in ids(letter))


def logprobs_of(tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -0.5 * index) for index, token in enumerate(tokens))


def emission(tokens: tuple[int, ...], accepted: int = 0, reason: str | None = None, kind: str = "plain") -> Emission:
    return Emission(tokens, accepted, reason, kind, logprobs_of(tokens))


def test_a_delta_carries_its_round() -> None:
    answer = Answer(TOKENIZER, [EOS], prompt_tokens=7, choice=2)
    tokens = letters("abc")
    assert answer.push(emission(tokens, 2, kind="correction")) == Delta(
        "abc", tokens, 2, None, logprobs_of(tokens), (Span("ab", "accepted"), Span("c", "corrected")), choice=2
    )
    assert answer.usage == Usage(7, 3, 0)
    assert answer.usage.total_tokens == 10
    assert answer.finish_reason is None


def test_logprobs_are_none_when_there_are_none() -> None:
    answer = Answer(TOKENIZER, [EOS])
    assert answer.push(Emission(letters("a"), 0, None)).logprobs is None


def test_eos_counts_and_has_no_text_and_nothing_follows_it() -> None:
    answer = Answer(TOKENIZER, [EOS])
    delta = answer.push(emission((*letters("ab"), EOS, *letters("cd")), 4))
    assert (delta.text, delta.finish_reason, delta.accepted) == ("ab", "stop", 3)
    assert delta.tokens == (*letters("ab"), EOS)
    assert delta.logprobs == logprobs_of(delta.tokens)
    assert answer.usage.completion_tokens == 3
    assert answer.push(emission(letters("e"), 0, "length")) == Delta("", (), 0, None)
    assert answer.usage.completion_tokens == 3
    assert answer.finish_reason == "stop"


def test_an_eos_that_is_no_special_token_has_no_text_either() -> None:
    (full_stop,) = ids(".")
    delta = Answer(TOKENIZER, {EOS, full_stop}).push(emission(letters("ab.c")))
    assert (delta.text, delta.tokens) == ("ab", letters("ab."))


@pytest.mark.parametrize("k", range(1, 6))
def test_the_cap_is_met_exactly(k: int) -> None:
    tokens = letters("abcdefghij"[: k + 1])
    for cap in range(1, k + 4):
        answer = Answer(TOKENIZER, [EOS], max_tokens=cap)
        delta = answer.push(emission(tokens, k))
        assert delta.tokens == tokens[:cap]
        assert delta.finish_reason == ("length" if cap <= k + 1 else None)
        assert answer.usage.completion_tokens == min(cap, k + 1)


def test_eos_or_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert Answer(TOKENIZER, [EOS], max_tokens=2).push(emission((*letters("a"), EOS))).finish_reason == "stop"
    delta = Answer(TOKENIZER, [EOS], ["bc"], max_tokens=3).push(emission(letters("abcd")))
    assert (delta.text, delta.tokens, delta.finish_reason) == ("a", letters("abc"), "stop")


def test_the_loops_reason_is_kept_when_nothing_was_cut() -> None:
    assert Answer(TOKENIZER, [EOS]).push(emission(letters("a"), 0, "length")).finish_reason == "length"
    assert Answer(TOKENIZER, [EOS], max_tokens=1).push(emission(letters("ab"), 0, "stop")).finish_reason == "length"


def test_tokens_run_to_the_one_that_completed_the_stop() -> None:
    answer = Answer(TOKENIZER, [EOS], ["END"])
    first = answer.push(emission(letters("oneE")))
    assert (first.text, first.tokens) == ("one", letters("oneE"))
    second = answer.push(emission(letters("NDtwo"), 3))
    assert (second.text, second.tokens, second.accepted) == ("", letters("ND"), 2)
    assert second.logprobs == logprobs_of(letters("ND"))


def test_held_text_comes_at_the_end_and_may_complete_a_stop() -> None:
    answer = Answer(TOKENIZER, [EOS], ["END"])
    assert answer.push(emission(letters("aEN"))).text == "a"
    assert answer.push(emission((EOS,))).text == "EN"
    half = ids("🚀")[:1]
    cut = Answer(TOKENIZER, [EOS], ["b\ufffd"]).push(emission((*letters("ab"), *half), 0, "length"))
    assert (cut.text, cut.finish_reason, cut.tokens) == ("a", "stop", (*letters("ab"), *half))


def test_a_span_tells_which_token_completed_the_text_though_it_was_held_back() -> None:
    answer = Answer(TOKENIZER, [EOS], ["bcX"])
    assert answer.push(emission(letters("ab"), 1, kind="correction")).spans == (Span("a", "accepted"),)
    assert answer.push(emission(letters("c"), 1)).spans == ()
    last = answer.push(emission(letters("d"), 0, kind="bonus"))
    assert last.spans == (Span("b", "corrected"), Span("c", "accepted"), Span("d", "bonus"))


def test_reasoning_is_split_off_and_counted() -> None:
    answer = Answer(TOKENIZER, [EOS], parsers=[ReasoningParser()])
    delta = answer.push(emission((*letters("<think>ab</think>"), *letters("so"), EOS)))
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("ab", "so", "stop")
    assert answer.usage == Usage(0, 20, 17)


def test_tokens_that_only_begin_a_character_of_reasoning_count() -> None:
    answer = Answer(TOKENIZER, [EOS], parsers=[ReasoningParser(open=True)])
    assert len(letters("世")) == 3
    answer.push(emission((*letters("世</think>界a"), EOS)))
    assert answer.usage == Usage(0, 3 + 8 + 3 + 1 + 1, 3 + 8)


def test_a_token_of_reasoning_and_tag_and_text_counts_once() -> None:
    backend = byte_level()
    backend.add_tokens(["why</think>so"])
    tokenizer = Tokenizer(backend)
    answer = Answer(tokenizer, [EOS], parsers=[ReasoningParser()])
    delta = answer.push(emission((*ids("<think>", tokenizer), *ids("why</think>so", tokenizer))))
    assert (delta.reasoning, delta.text) == ("why", "so")
    assert answer.usage == Usage(0, 2, 2)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, TAGGED], ids=["spelled", "special"])
def test_tags_are_seen_whether_or_not_they_are_special_tokens(tokenizer: Tokenizer) -> None:
    text = '<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": "你"}}</tool_call>'
    tokens = (*ids(text, tokenizer), EOS)
    answer = Answer(tokenizer, [EOS], parsers=[ReasoningParser(), ToolCallParser()])
    whole = join_deltas([answer.push(emission((token,))) for token in tokens])
    assert (whole.text, whole.reasoning, whole.finish_reason) == ("b", "a", "tool_calls")
    (call,) = whole.tool_calls
    assert (call.name, call.arguments) == ("f", '{"x": "你"}')
    assert Answer(tokenizer, [EOS]).push(emission(tokens)).text == tokenizer.decode(tokens)


def test_special_tags_of_other_formats() -> None:
    for form, text in (
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}'),
    ):
        answer = Answer(TAGGED, [EOS], parsers=[ToolCallParser(form)])
        delta = answer.push(emission((*ids(text, TAGGED), EOS)))
        assert (delta.text, delta.finish_reason) == ("", "tool_calls")
        assert [call.name for call in delta.tool_calls] == ["f", None]


def test_the_reason_is_tool_calls_when_the_call_came_in_an_earlier_round() -> None:
    answer = Answer(TOKENIZER, [EOS], parsers=[ToolCallParser()])
    first = answer.push(emission(letters('<tool_call>{"name": "f"}</tool_call>')))
    assert [call.name for call in first.tool_calls] == ["f", None]
    assert answer.push(emission((EOS,))).finish_reason == "tool_calls"


def test_an_answer_cut_by_its_length_is_not_ended_by_calls() -> None:
    tokens = letters('<tool_call>{"name": "f"}</tool_call>')
    delta = Answer(TOKENIZER, [EOS], max_tokens=len(tokens), parsers=[ToolCallParser()]).push(emission(tokens))
    assert (delta.finish_reason, len(delta.tool_calls)) == ("length", 2)
    cut = Answer(TOKENIZER, [EOS], max_tokens=20, parsers=[ToolCallParser()]).push(emission(tokens))
    assert (cut.finish_reason, cut.text, cut.tool_calls) == ("length", '<tool_call>{"name": ', ())


def test_a_stop_inside_a_call_loses_no_text() -> None:
    answer = Answer(TOKENIZER, [EOS], ["STOP"], parsers=[ToolCallParser()])
    whole = join_deltas(answer.push(emission((token,))) for token in letters('a<tool_call>{"name": "STOP"}'))
    assert (whole.text, whole.tool_calls, whole.finish_reason) == ('a<tool_call>{"name": "', (), "stop")


def test_a_stop_and_the_end_of_reasoning_in_one_block() -> None:
    answer = Answer(TOKENIZER, [EOS], ["STOP"], parsers=[ReasoningParser()])
    delta = answer.push(emission(letters("<think>why S</think>so STOP more")))
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("why S", "so ", "stop")


def test_joined_deltas_are_one() -> None:
    calls = (ToolCallDelta(0, "i", "f"), ToolCallDelta(0, arguments="{"))
    first = Delta("a", (1,), 1, None, logprobs_of((1,)), (Span("a", "accepted"),), "r", calls, 3)
    last = Delta(
        "b", (2,), 1, "stop", logprobs_of((2,)), (Span("b", "accepted"),), "s", (ToolCallDelta(0, None, None, "}"),), 3
    )
    assert join_deltas([first, last]) == Delta(
        *("ab", (1, 2), 2, "stop", logprobs_of((1,)) + logprobs_of((2,)), (Span("ab", "accepted"),)),
        *("rs", (ToolCallDelta(0, "i", "f", "{}"),), 3),
    )
    assert join_deltas([]).logprobs is None


@pytest.mark.parametrize("tokenizer", [TOKENIZER, TAGGED, Tokenizer(sentencepiece())], ids=["plain", "tagged", "bytes"])
def test_token_soup_gives_text_that_can_be_written(tokenizer: Tokenizer) -> None:
    chooser = random.Random(5)
    for _ in range(200):
        tokens = tuple(chooser.randrange(tokenizer.vocab_size + 3) for _ in range(60))
        answer = Answer(tokenizer, [EOS], ["at"], parsers=[ReasoningParser(), ToolCallParser()])
        delta = answer.push(emission(tokens, 30, "length"))
        assert (delta.text + delta.reasoning).encode("utf-8") is not None
        assert answer.usage.reasoning_tokens <= answer.usage.completion_tokens == len(delta.tokens)


def test_sixteen_thousand_tokens_take_the_same_work_each() -> None:
    work = 0

    class Counting(Tokenizer):
        def token(self, token_id: int) -> str | None:
            nonlocal work
            work += 1
            return super().token(token_id)

    tokens = (letters('<think>hm</think>a < b <tool_call>{"name": "f"}</tool_call>') * 300)[:16_000]
    answer = Answer(Counting(byte_level()), [EOS], ["</s>", "<|end|>"], parsers=[ReasoningParser(), ToolCallParser()])
    for token in tokens:
        answer.push(emission((token,)))
    assert work <= 3 * len(tokens)
    assert len(answer._ledger._entries) < 50
