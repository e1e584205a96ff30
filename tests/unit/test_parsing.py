"""Reasoning and tool calls: every character is labelled once, and the labels do not depend on the cuts."""

import json
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidize.runtime.calls import ToolCallDelta, call_id, join_calls
from oxidize.runtime.parsing import (
    HERMES,
    LLAMA3,
    MISTRAL,
    TOOL_FORMATS,
    Chain,
    Label,
    Parser,
    Piece,
    ReasoningParser,
    ToolCallParser,
)

CALL = '{"name": "f", "arguments": {"a": [1, "}<"], "b": "你\\"好"}}'
ARGUMENTS = '{"a": [1, "}<"], "b": "你\\"好"}'


def parse(parser: Parser, text: str, cuts: tuple[int, ...] | None = None) -> list[Piece]:
    """Push `text`, cut at `cuts` or else everywhere, then flush."""
    bounds = range(len(text) + 1) if cuts is None else sorted({0, len(text), *cuts})
    pieces = [piece for start, end in pairwise(bounds) for piece in parser.push(text[start:end])]
    return pieces + parser.flush()


def of(label: Label, pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.label is label)


def calls_of(pieces: list[Piece]) -> list[tuple[str | None, str]]:
    joined = join_calls(delta for piece in pieces for delta in piece.calls)
    assert [call.index for call in joined] == list(range(len(joined)))
    return [(call.name, call.arguments) for call in joined]


def labelled(pieces: list[Piece]) -> list[tuple[Label, str]]:
    """Pieces with neighbours of one label joined."""
    merged: list[tuple[Label, str]] = []
    for piece in pieces:
        if merged and merged[-1][0] is piece.label:
            merged[-1] = (piece.label, merged[-1][1] + piece.text)
        else:
            merged.append((piece.label, piece.text))
    return merged


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>why</think>so", "why", "so"),
        ("\n <think>\nwhy\n</think>\n\nso", "why\n", "so"),
        ("so", "", "so"),
        ("", "", ""),
        ("  so", "", "  so"),
        ("<thin air", "", "<thin air"),
        ("<thi", "", "<thi"),
        ("<think>why", "why", ""),
        ("<think>why</thi", "why</thi", ""),
        ("<think>a < b </thin </think>c", "a < b </thin ", "c"),
        ("<think></think>so", "", "so"),
        ("the tag <think>x</think>", "", "the tag <think>x</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("why</think>so", "", "why</think>so"),
    ],
)
def test_reasoning_is_split_off(text: str, reasoning: str, answer: str) -> None:
    for pieces in (parse(ReasoningParser(), text), parse(ReasoningParser(), text, ())):
        assert (of(Label.REASONING, pieces), of(Label.TEXT, pieces)) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("why</think>\nso", "why", "so"),
        ("<think>why</think>so", "why", "so"),
        ("  why</think>so", "  why", "so"),
        ("<thi", "<thi", ""),
        ("why", "why", ""),
        ("</think>so", "", "so"),
    ],
)
def test_the_template_may_have_opened_the_reasoning(text: str, reasoning: str, answer: str) -> None:
    for pieces in (parse(ReasoningParser(open=True), text), parse(ReasoningParser(open=True), text, ())):
        assert (of(Label.REASONING, pieces), of(Label.TEXT, pieces)) == (reasoning, answer)


def test_other_reasoning_tags() -> None:
    pieces = parse(ReasoningParser("[THINK]", "[/THINK]"), "[THINK]a[/THINK]b")
    assert labelled(pieces) == [
        (Label.TAG, "[THINK]"),
        (Label.REASONING, "a"),
        (Label.TAG, "[/THINK]"),
        (Label.TEXT, "b"),
    ]


def test_reasoning_is_told_as_it_comes() -> None:
    parser = ReasoningParser()
    shown = [labelled(parser.push(text)) for text in ("<think>", "a", " b<", "c", "</think", ">", "d")]
    reasoning, tag = Label.REASONING, Label.TAG
    assert shown == [
        [(tag, "<think>")],
        [(reasoning, "a")],
        [(reasoning, " b")],
        [(reasoning, "<c")],
        [],
        [(tag, "</think>")],
        [(Label.TEXT, "d")],
    ]


@pytest.mark.parametrize(
    ("form", "text", "calls", "rest"),
    [
        (HERMES, f"ok\n<tool_call>\n{CALL}\n</tool_call>", [("f", ARGUMENTS)], "ok\n"),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [("f", ARGUMENTS)] * 2, ""),
        (HERMES, f"<tool_call>{CALL}</tool_call> done", [("f", ARGUMENTS)], "done"),
        (HERMES, f"<tool_call>{CALL}", [("f", ARGUMENTS)], ""),
        (HERMES, f"<tool_call>{CALL}</tool_", [("f", ARGUMENTS)], ""),
        (HERMES, '<tool_call>{"name": "g"}</tool_call>', [("g", "{}")], ""),
        (HERMES, '<tool_call>{"name": "g", "arguments": null}</tool_call>', [("g", "{}")], ""),
        (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "g"}</tool_call>', [("g", '{"a": 1}')], ""),
        (HERMES, '<tool_call>{"name": "g", "arguments": {"t": "</tool_call>"}}', [("g", '{"t": "</tool_call>"}')], ""),
        (HERMES, '<tool_call>{"name": "g"}}</tool_call>', [("g", "{}")], "}</tool_call>"),
        (HERMES, '<tool_call>{"name": "g", "arguments": {"p": "C:\\\\"}}', [("g", '{"p": "C:\\\\"}')], ""),
        (HERMES, "a < b and a <tool b", [], "a < b and a <tool b"),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", [("f", ARGUMENTS)], ""),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", [("f", ARGUMENTS)] * 2, ""),
        (MISTRAL, "see [TOOL", [], "see [TOOL"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')], ""),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")], ""),
        (LLAMA3, '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")], ""),
        (LLAMA3, '{"name": "f", "parameters": {}};{"name": "g"}', [("f", "{}"), ("g", "{}")], ""),
        (LLAMA3, 'see {"name": "f", "parameters": {}}', [], 'see {"name": "f", "parameters": {}}'),
        (LLAMA3, '{"name": "Ada", "age": 36}', [], '{"name": "Ada", "age": 36}'),
        (LLAMA3, '  {"a": 1} is JSON', [], '  {"a": 1} is JSON'),
    ],
)
def test_calls_are_found(form, text: str, calls: list[tuple[str, str]], rest: str) -> None:
    for pieces in (parse(ToolCallParser(form), text), parse(ToolCallParser(form), text, ())):
        assert calls_of(pieces) == calls
        assert of(Label.TEXT, pieces) == rest
        assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "two\nlines"}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no json"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": 3}',
        "{}",
        "[]",
        f"[{CALL}, 3]",
        "f(a)",
        '"f"',
        "",
        '{"name": "unclosed',
        "[" * 5000 + "]" * 5000,
        '{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}",
    ],
)
def test_what_is_no_call_stays_in_the_text(body: str) -> None:
    text = f"so: <tool_call>{body}</tool_call> and on"
    pieces = parse(ToolCallParser(), text)
    assert calls_of(pieces) == []
    assert of(Label.TEXT, pieces) == text


def test_a_good_call_behind_a_bad_one_is_found() -> None:
    text = f'<tool_call>{{"name": "f" <tool_call>{CALL}</tool_call>'
    pieces = parse(ToolCallParser(), text)
    assert of(Label.TEXT, pieces) == '<tool_call>{"name": "f" '
    assert calls_of(pieces) == [("f", ARGUMENTS)]


def test_only_tools_that_exist_are_called() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert calls_of(parse(ToolCallParser(names={"f", "g"}), text)) == [("f", ARGUMENTS)]
    pieces = parse(ToolCallParser(names={"g"}), text)
    assert (calls_of(pieces), of(Label.TEXT, pieces)) == ([], text)


def test_a_call_is_told_by_its_name_first_as_soon_as_it_is_complete() -> None:
    parser = ToolCallParser(salt="x")
    assert parser.push(f"<tool_call>{CALL[:-1]}") == []
    (piece,) = parser.push("}")
    assert piece.calls == (ToolCallDelta(0, call_id("x", 0), "f"), ToolCallDelta(0, arguments=ARGUMENTS))


def test_ids_of_calls() -> None:
    ids = {call_id(salt, index) for salt in ("a", "b") for index in range(3)}
    assert len(ids) == 6
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert call_id("a", 0) == call_id("a", 0)


def test_text_is_held_back_no_longer_than_it_may_be_markup() -> None:
    parser = ToolCallParser()
    shown = [of(Label.TEXT, parser.push(text)) for text in ("a", "<", "b", " <tool", "s", " {}", "[1]")]
    assert shown == ["a", "", "<b", " ", "<tools", " {}", "[1]"]
    broken = ToolCallParser()
    broken.push("<tool_call>{")
    assert of(Label.TEXT, broken.push("no")) == "<tool_call>{no"
    assert broken.push('<tool_call>{"two') == []
    assert of(Label.TEXT, broken.push("\nlines")) == '<tool_call>{"two\nlines'


def test_a_chain_looks_for_calls_in_the_answer_only() -> None:
    chain = Chain([ReasoningParser(), ToolCallParser()])
    assert chain.tags == ("<think>", "</think>", "<tool_call>", "</tool_call>")
    text = f"<think>maybe <tool_call>{CALL}</tool_call></think>\nok <tool_call>{CALL}</tool_call>"
    pieces = parse(chain, text)
    assert of(Label.REASONING, pieces) == f"maybe <tool_call>{CALL}</tool_call>"
    assert of(Label.TEXT, pieces) == "ok "
    assert calls_of(pieces) == [("f", ARGUMENTS)]


def makers() -> Iterator[tuple[str, Callable[[], Parser]]]:
    yield "reasoning", ReasoningParser
    yield "open", lambda: ReasoningParser(open=True)
    for name, form in TOOL_FORMATS.items():
        yield name, lambda form=form: ToolCallParser(form)
    yield "chain", lambda: Chain([ReasoningParser(), ToolCallParser()])


MAKERS = dict(makers())
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<th", "</tool", "[TOOL"),
    *(CALL, f"[{CALL}]", '{"name": "g", "parameters": {}}', '{"name": "g"', '{"a": 1}', '"', "\\", "}", "]", "[", "{"),
    *(" ", "\n", ";", ",", "x", "你", ":"),
]


@pytest.mark.parametrize("maker", MAKERS)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=9), cuts=st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=150, deadline=None)
def test_labels_are_the_same_for_any_cuts_and_nothing_is_lost(maker: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse(MAKERS[maker](), text, ())
    assert "".join(piece.text for piece in whole) == text
    for pieces in (parse(MAKERS[maker](), text), parse(MAKERS[maker](), text, tuple(c for c in cuts if c < len(text)))):
        assert labelled(pieces) == labelled(whole)
        assert calls_of(pieces) == calls_of(whole)
    for _, arguments in calls_of(whole):
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("maker", ["chain", "llama3", "mistral"])
def test_every_pair_of_cuts(maker: str) -> None:
    text = {
        "chain": '<think>a</think>b<tool_call>{"name":"f"}</tool_call>c',
        "llama3": '{"name":"f","parameters":{}};{"name":"g","parameters":{}}x',
        "mistral": 'b[TOOL_CALLS][{"name":"f"}] c[TOOL_',
    }[maker]
    whole = labelled(parse(MAKERS[maker](), text, ()))
    for cuts in combinations(range(len(text)), 2):
        assert labelled(parse(MAKERS[maker](), text, cuts)) == whole
