"""Partition invariance: how an answer's tokens were cut into blocks leaves no trace in anything a reader gets.

Lists are replayed uncut, tokens behind EOS and cap included, as a careless caller would hand them over; and cut as the
loop cuts them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import pytest
from tiny_tokenizers import byte_level, sentencepiece

from oxidize.runtime.answer import Answer, Delta, Usage, join_deltas
from oxidize.runtime.generation import Emission
from oxidize.runtime.logprobs import TokenLogprob
from oxidize.runtime.parsing import LLAMA3, MISTRAL, Parser, ReasoningParser, ToolCallParser
from oxidize.runtime.text import Tokenizer

BYTES = Tokenizer(byte_level())
TAGGED = Tokenizer(byte_level(tags=("</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")))
PIECES = Tokenizer(sentencepiece())
GEMMA = Tokenizer(sentencepiece(prefix=False))
EOS, EOT = 1, 0
FAMILY = "👨\u200d👩\u200d👧"


@dataclass(frozen=True)
class Case:
    """A list of tokens and how it is read."""

    tokens: tuple[int, ...]
    tokenizer: Tokenizer = BYTES
    stops: tuple[str, ...] = ()
    cap: int | None = None
    eos: frozenset[int] = frozenset({EOS})
    parsers: Callable[[], Sequence[Parser]] = tuple
    kinds: tuple[str, ...] = ()  # of each token; default: all drafted but the last

    def answer(self) -> Answer:
        return Answer(self.tokenizer, self.eos, self.stops, self.cap, self.parsers(), prompt_tokens=5)

    def block(self, start: int, end: int) -> Emission:
        """Tokens of one round; the list ends for want of room."""
        kinds = (self.kinds or ("accepted",) * (len(self.tokens) - 1) + ("correction",))[start:end]
        accepted = next((i for i, kind in enumerate(kinds) if kind != "accepted"), len(kinds))
        assert accepted >= len(kinds) - 1, "no round yields such a block"
        tokens = self.tokens[start:end]
        logprobs = tuple(TokenLogprob(t, -(start + i) / 8, ((t, -0.5),)) for i, t in enumerate(tokens))
        reason = "length" if end == len(self.tokens) else None
        return Emission(tokens, accepted, reason, "plain" if accepted == len(kinds) else kinds[-1], logprobs)


@dataclass(frozen=True)
class Outcome:
    """All that a reader gets, and the counts."""

    answer: Delta
    usage: Usage


def replay(case: Case, cuts: Sequence[int], cut: bool = False) -> Outcome:
    """Push the blocks between `cuts`, stopping at the end of the answer; with `cut` as the loop cuts blocks."""
    answer = case.answer()
    deltas: list[Delta] = []
    for start, end in pairwise(sorted({0, len(case.tokens), *cuts})):
        block = case.block(start, end)
        deltas.append(answer.push(cut_block(case, block, start) if cut else block))
        if deltas[-1].finish_reason is not None:
            break
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    whole = join_deltas(deltas)
    check(case, whole, answer.usage)
    assert answer.push(case.block(0, 1)) == Delta("", (), 0, None)
    return Outcome(whole, answer.usage)


def check(case: Case, whole: Delta, usage: Usage) -> None:
    """What holds of every answer."""
    count = len(whole.tokens)
    assert whole.tokens == case.tokens[:count]
    assert whole.finish_reason is not None
    assert whole.logprobs is not None
    assert [entry.token for entry in whole.logprobs] == [*whole.tokens]
    assert "".join(span.text for span in whole.spans) == whole.text
    assert usage.completion_tokens == count <= (case.cap or count)
    assert 0 <= usage.reasoning_tokens <= count
    assert usage.total_tokens == 5 + count


def cut_block(case: Case, block: Emission, generated: int) -> Emission:
    """A block as the loop hands it on: up to its first EOS or the cap."""
    for index, token in enumerate(block.tokens):
        full = case.cap is not None and generated + index + 1 >= case.cap
        if token in case.eos or full:
            reason, keep = "stop" if token in case.eos else "length", index + 1
            logprobs = block.logprobs and block.logprobs[:keep]
            return Emission(block.tokens[:keep], min(block.accepted, keep), reason, block.kind, logprobs)
    return block


def partitions(length: int) -> Iterator[list[int]]:
    """Every way to cut a list into blocks."""
    for mask in range(1 << (length - 1)):
        yield [at for at in range(1, length) if mask >> (at - 1) & 1]


def assert_all_partitions_agree(case: Case) -> Outcome:
    """Against one token per block, for every partition, cut by the loop or not."""
    single = replay(case, range(len(case.tokens)))
    for cuts in partitions(len(case.tokens)):
        assert replay(case, cuts) == single, cuts
    for cut in (range(len(case.tokens)), [], [len(case.tokens) // 2], range(0, len(case.tokens), 3)):
        assert replay(case, cut, cut=True) == single
    return single


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Reading character by character, the text before the first stop that is complete, the longest of equals."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return None


def byte_ids(tokenizer: Tokenizer, data: bytes) -> tuple[int, ...]:
    single = {tokenizer.token_bytes(i): i for i in tokenizer.table if len(tokenizer.token_bytes(i)) == 1}
    ids = tokenizer.byte_ids or [single[bytes([byte])] for byte in range(256)]
    return tuple(ids[byte] for byte in data)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, GEMMA], ids=["byte-level", "prefix", "no-prefix"])
@pytest.mark.parametrize(
    "data",
    [
        "👩🏽e".encode()[:12],
        FAMILY.encode()[:12],
        FAMILY.encode()[7:18],
        "你好a世".encode(),
        "ก็é".encode() + b"\xff\xe4",
    ],
    ids=["skin", "zwj", "zwj-tail", "cjk", "bad"],
)
def test_characters_cut_into_bytes(tokenizer: Tokenizer, data: bytes) -> None:
    case = Case(byte_ids(tokenizer, data), tokenizer)
    whole = assert_all_partitions_agree(case).answer
    assert whole.text == tokenizer.decode(case.tokens)
    assert whole.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("to be or not", ("or", "not", "be o")),
        ("abcabdabe", ("abd", "abe", "bdab")),
        ("a is, b is", ("a", "is", ",")),
        ("xx 好 END a", ("好 E", "END")),
        ("aaaaaaaaab", ("aab", "ab", "aaaaab")),
        ("no stop at", ("stop at all", "t!")),
    ],
)
def test_stop_strings_across_blocks_in_any_order(text: str, stops: tuple[str, ...]) -> None:
    tokens = tuple(token for character in text for token in BYTES.encode(character, add_special=False))[:12]
    case = Case(tokens, stops=stops)
    outcome = assert_all_partitions_agree(case)
    shown = first_stop(BYTES.decode(tokens), stops)
    assert outcome.answer.text == (BYTES.decode(tokens) if shown is None else shown)
    assert outcome.answer.finish_reason == ("length" if shown is None else "stop")
    for order in permutations(stops):
        assert replay(replace(case, stops=order), [4, 9]) == outcome


@pytest.mark.parametrize("at", range(12))
def test_eos_at_every_index(at: int) -> None:
    tokens = [*byte_ids(BYTES, "ab你c好defg".encode())][:12]
    tokens[at] = EOS
    outcome = assert_all_partitions_agree(Case(tuple(tokens)))
    assert outcome.answer.tokens == tuple(tokens[: at + 1])
    assert outcome.answer.text == BYTES.decode(tokens[:at])
    assert (outcome.answer.finish_reason, outcome.usage.completion_tokens) == ("stop", at + 1)


def test_the_first_of_several_eos_ends_the_answer() -> None:
    for first, second in ((EOS, EOT), (EOT, EOS)):
        tokens = (*byte_ids(BYTES, b"abcd"), first, *byte_ids(BYTES, b"ef"), second, *byte_ids(BYTES, b"gh"))
        outcome = assert_all_partitions_agree(Case(tokens, eos=frozenset({EOS, EOT})))
        assert (outcome.answer.text, outcome.answer.tokens[-1]) == ("abcd", first)


@pytest.mark.parametrize("k", range(1, 10))
def test_every_cap_around_a_block(k: int) -> None:
    """Blocks of k + 1 tokens; the cap falls inside, at the end of, and behind them."""
    tokens = byte_ids(BYTES, "a你b好cd".encode())[:12]
    for cap in range(1, k + 4):
        case = Case(tokens, cap=cap)
        outcome = replay(case, range(0, 12, k + 1))
        assert outcome.answer.tokens == tokens[:cap]
        assert outcome.answer.text == BYTES.decode(tokens[:cap])
        assert outcome.answer.finish_reason == "length"
        assert outcome == replay(case, range(12)) == replay(case, range(0, 12, k + 1), cut=True)


@pytest.mark.parametrize("cap", [5, 6, 7])
def test_an_end_on_the_cap_is_told_by_what_ended_it(cap: int) -> None:
    tokens = (*byte_ids(BYTES, b"abcEN"), *byte_ids(BYTES, b"D"), EOS, *byte_ids(BYTES, b"xyz"))
    by_stop = assert_all_partitions_agree(Case(tokens, stops=("END",), cap=cap))
    assert (by_stop.answer.text, by_stop.answer.finish_reason) == (("abcEN", "length") if cap == 5 else ("abc", "stop"))
    by_eos = assert_all_partitions_agree(Case(tokens, cap=cap))
    assert by_eos.answer.finish_reason == ("stop" if cap == 7 else "length")


def reasoning() -> Sequence[Parser]:
    return [ReasoningParser("<t>", "</t>")]


def tagged() -> Sequence[Parser]:
    return [ReasoningParser(), ToolCallParser(salt="s")]


@pytest.mark.parametrize(
    ("parts", "stops", "shown", "thought"),
    [
        (("<", "t", ">", "why", "<", "/", "t", ">", "so"), (), "so", "why"),
        (("<", "t>", "a", "<", "b", "</", "t", ">", "\n", "c"), (), "c", "a<b"),
        (("<t", ">", "a", "</", "t", ">", "S", "x"), ("S",), "", "a"),
        (("<t", ">", "a", "</", "t", ">", "b"), ("t>b",), "", "a</"),
        (("<t", "x", "</t", ">"), (), "<tx</t>", ""),
    ],
)
def test_reasoning_cut_anywhere(parts: tuple[str, ...], stops: tuple[str, ...], shown: str, thought: str) -> None:
    tokens = tuple(token for part in parts for token in BYTES.encode(part, add_special=False))
    assert len(tokens) <= 12
    outcome = assert_all_partitions_agree(Case(tokens, stops=stops, parsers=reasoning))
    assert (outcome.answer.text, outcome.answer.reasoning) == (shown, thought)


def test_a_call_in_twelve_tokens() -> None:
    backend = byte_level(tags=("<tool_call>", "</tool_call>"))
    parts = ['{"name": ', '"f', '", ', '"arguments": {', '"x": ', "1", "}}", "ok "]
    backend.add_tokens(parts)
    tokenizer = Tokenizer(backend)
    order = ["ok ", "<tool_call>", *parts[:-1], "</tool_call>"]
    tokens = (*(tokenizer.token_id(part) or 0 for part in order), EOS)
    outcome = assert_all_partitions_agree(Case(tokens, tokenizer, parsers=lambda: [ToolCallParser()]))
    (call,) = outcome.answer.tool_calls
    assert (call.name, call.arguments, outcome.answer.text) == ("f", '{"x": 1}', "ok ")
    assert outcome.answer.finish_reason == "tool_calls"
    for length in range(2, len(tokens)):
        assert_long(Case(tokens[:length], tokenizer, parsers=lambda: [ToolCallParser()]), random.Random(length), 8)


def assert_long(case: Case, chooser: random.Random, tries: int) -> Outcome:
    """Random partitions against one token per block and the whole list in one block."""
    length = len(case.tokens)
    single = replay(case, range(length))
    assert replay(case, []) == single
    for _ in range(tries):
        cuts = chooser.sample(range(length), chooser.randrange(length))
        assert replay(case, cuts) == single
        assert replay(case, cuts, cut=True) == single
    return single


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "你"}}\n</tool_call>'
FRAGMENTS = [
    *(
        "the cat sat. ",
        "你好",
        "世界",
        FAMILY,
        "👩🏽\u200d💻",
        "🇩🇪",
        "สวัสดี",
        "naïve",
        "\n\n",
        "  ",
        "STOP",
        "ST",
        "END",
        "or ",
    ),
    *(CALL, CALL[:30], CALL.replace("}}", "}"), "[TOOL_CALLS]", '[{"name": "g"}]', '{"name": "h", "parameters": {}}'),
    *("<think>", "</think>", "<thi", "</th", "def f(x):\n    return x\n", "</s>"),
]
SETTINGS = [
    *((BYTES, tuple), (PIECES, tuple), (GEMMA, tuple), (TAGGED, tagged), (BYTES, tagged), (PIECES, tagged)),
    (BYTES, lambda: [ReasoningParser(open=True), ToolCallParser(LLAMA3)]),
    (TAGGED, lambda: [ToolCallParser(MISTRAL)]),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_random_answers_of_up_to_400_tokens(setting: int, seed: int) -> None:
    chooser = random.Random(100 * setting + seed)
    tokenizer, parsers = SETTINGS[setting]
    start = "<think>" if chooser.random() < 0.7 else ""
    text = start + "".join(chooser.choice(FRAGMENTS) for _ in range(60))
    tokens = list(tokenizer.encode(text, add_special=False))[: chooser.randrange(300, 400)]
    for _ in range(chooser.randrange(20)):  # soup
        tokens[chooser.randrange(len(tokens))] = chooser.randrange(2, tokenizer.vocab_size + 2)
    stops = tuple(chooser.sample(["STOP", "END", "zz", "你好世", "cat s"], chooser.randrange(3)))
    cap = chooser.choice([None, len(tokens) // 2, len(tokens)])
    base = Case(tuple(tokens), tokenizer, (), None, frozenset({EOS}), parsers)
    assert_long(base, chooser, 4)
    assert_long(replace(base, stops=stops, cap=cap), chooser, 4)
    assert_long(replace(base, eos=frozenset()), chooser, 3)


def test_colours_do_not_move_when_rounds_are_cut_finer() -> None:
    chooser = random.Random(3)
    for _ in range(20):
        tokens = tuple(chooser.randrange(2, BYTES.vocab_size) for _ in range(100))
        kinds: list[str] = []
        ends = []
        while len(kinds) < len(tokens):
            kinds += ["accepted"] * chooser.randrange(6) + [chooser.choice(["correction", "bonus", "plain"])]
            ends.append(len(kinds))
        case = Case(tokens, kinds=tuple(kinds[: len(tokens)]), stops=("the", "STOP", "a b"), eos=frozenset())
        rounds = replay(case, [end for end in ends if end < len(tokens)])
        assert {span.kind for span in rounds.answer.spans} <= {"accepted", "corrected", "bonus", "plain"}
        finer = sorted({*ends, *chooser.sample(range(100), 30)})
        assert replay(case, [end for end in finer if end < len(tokens)]) == rounds
        assert replay(case, range(len(tokens))) == rounds
