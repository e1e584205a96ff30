"""Structured output: masks say the same however a round is cut, drafts leave no trace, what comes out obeys."""

import json
import random
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from grammars import (
    END,
    EOS,
    PADDING,
    PERSON,
    SPECS,
    START,
    STOP,
    Walk,
    answer,
    both_ways,
    byte_level,
    compact,
    hostile,
    schemas,
    sentencepiece,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.errors import OxidizeError, UsageError
from oxidize.runtime.grammar import GrammarCompiler, GrammarSpec, GrammarState
from oxidize.runtime.text import Tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, EOS, tokenizer.vocab_size + PADDING)


@pytest.fixture(params=[*SPECS, "begun"])
def state(request: pytest.FixtureRequest, compiler: GrammarCompiler, tokenizer: Tokenizer) -> GrammarState:
    if request.param != "begun":
        return compiler.compile(SPECS[request.param])
    state = compiler.compile(SPECS["after"])
    state.commit(tokenizer.encode("hm </think"))
    return state


def one_by_one(state: GrammarState, drafted: list[int]) -> np.ndarray:
    rows, fork = [state.masks([])[0]], state.fork()
    for token in drafted:
        if not (0 <= token < len(rows[-1]) and rows[-1][token]) or (fork.over and token not in EOS):
            break
        fork.commit([token])
        rows.append(fork.masks([])[0])
        if token in EOS:
            break
    return np.array(rows)


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_a_draft_are_masks_one_token_at_a_time(tokenizer: Tokenizer, state: GrammarState, seed: int) -> None:
    choice, walk = random.Random(seed), Walk(tokenizer, state, seed)
    size = state.masks([]).shape[1]
    assert size == tokenizer.vocab_size + PADDING
    propose = hostile(choice, size)
    while walk.tokens[-1:] not in ([END], [STOP]) and len(walk.tokens) < 80:
        drafted = propose(walk)
        rows = state.masks(drafted)
        assert rows.dtype == np.bool_ and 1 <= len(rows) <= len(drafted) + 1
        assert np.array_equal(rows, one_by_one(state, drafted))
        assert state.legal_prefix(drafted) == len(rows) - 1
        walk.round(drafted)


def test_questions_leave_no_trace(tokenizer: Tokenizer, state: GrammarState) -> None:
    walk, choice = Walk(tokenizer, state, 5), random.Random(5)
    size = state.masks([]).shape[1]
    for _ in range(12):
        untouched = state.fork()
        for _ in range(4):
            drafted = hostile(choice, size)(walk)
            state.masks(drafted)
            state.legal_prefix(drafted)
            state.forced()
        assert np.array_equal(state.masks([]), untouched.masks([]))
        assert state.forced() == untouched.forced() and state.over == untouched.over
        if state.over:
            break
        walk.round([])


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(GrammarSpec("regex", "a+|b+"))
    fork = state.fork()
    state.commit(tokenizer.encode("a"))
    fork.commit(tokenizer.encode("b"))
    assert [allowed(tokenizer, each) for each in (state, fork)] == [{"a", "<EOS>"}, {"b", "<EOS>"}]
    again = fork.fork()
    fork.commit([STOP])
    assert (fork.over, again.over) == (True, False)


def allowed(tokenizer: Tokenizer, state: GrammarState) -> set[str]:
    """The single characters that may follow, and <EOS> if all of EOS may."""
    tokens = np.flatnonzero(state.masks([])[0]).tolist()
    ends = set(EOS) & set(tokens)
    assert ends in (set(), set(EOS))
    text = {tokenizer.token_bytes(token).decode() for token in tokens if token not in EOS}
    return {one for one in text if len(one) == 1} | ({"<EOS>"} if ends else set())


def test_every_eos_where_the_grammar_may_end_and_only_there(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(GrammarSpec("regex", "[0-9]{2,3}"))
    digits = set("0123456789")
    assert allowed(tokenizer, state) == digits
    state.commit(tokenizer.encode("1"))
    assert allowed(tokenizer, state) == digits
    state.commit(tokenizer.encode("2"))
    assert allowed(tokenizer, state) == {*digits, "<EOS>"} and not state.over
    state.commit(tokenizer.encode("3"))
    assert allowed(tokenizer, state) == {"<EOS>"} and state.over
    state.commit([END])
    assert allowed(tokenizer, state) == {"<EOS>"} and state.over
    assert state.legal_prefix([STOP]) == 0 and state.forced() == []
    with pytest.raises(OxidizeError, match="after EOS"):
        state.commit(tokenizer.encode("4"))


def test_nothing_is_legal_after_a_drafted_eos(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("1")[0], tokenizer.encode("2")[0]
    state = compiler.compile(GrammarSpec("regex", "[0-9]{2,3}"))
    assert state.legal_prefix([one, STOP, two]) == 1  # too early to end
    assert state.legal_prefix([one, two, STOP, one]) == 3
    assert state.legal_prefix([one, two, END, STOP]) == 3
    rows = state.masks([one, two, STOP, one])
    assert np.flatnonzero(rows[3]).tolist() == list(EOS)
    assert state.legal_prefix([one, two, one, END]) == 4
    assert state.legal_prefix([one, -1]) == state.legal_prefix([one, 10**6]) == 1


def test_ids_without_a_token_and_special_tokens_stay_out(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = compiler.compile(GrammarSpec("regex", r"(?s:.*)")).masks([])[0]
    assert not text[START] and not text[tokenizer.vocab_size :].any()
    anything = compiler.compile(GrammarSpec("lark", 'start: <[*]> "x"')).masks([])[0]
    assert anything[: tokenizer.vocab_size].all() and not anything[tokenizer.vocab_size :].any()
    named = compiler.compile(GrammarSpec("lark", 'start: "x" <|im_start|>'))
    named.commit(tokenizer.encode("x"))
    assert np.flatnonzero(named.masks([])[0]).tolist() == [START]


def test_a_commit_against_the_grammar_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(SPECS["regex"])
    with pytest.raises(OxidizeError, match="mask the law"):
        state.commit(tokenizer.encode("x"))


def test_where_there_is_no_choice_all_is_forced(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    value = {"name": "x<|im_end|>y", "age": 36}
    state, tokens = compiler.compile(compact({"const": value})), list[int]()
    while not state.over:
        forced = state.forced() or np.flatnonzero(state.masks([])[0])[:1].tolist()
        assert state.legal_prefix(forced) == len(forced)
        state.commit(forced)
        tokens += forced
    # the special token's name is spelled; its id would end the answer
    assert json.loads(answer(tokenizer, [*tokens, STOP])) == value
    assert len(compiler.compile(compact({"const": value})).forced()) > 5


@pytest.mark.parametrize(("make", "eos"), [(byte_level, EOS), (sentencepiece, [STOP])])
def test_forced_tokens_are_legal_all_along(make: Callable[[], Backend], eos: Collection[int]) -> None:
    tokenizer = Tokenizer(make())
    state = GrammarCompiler(tokenizer, eos, tokenizer.vocab_size).compile(compact(PERSON))
    walk, some = Walk(tokenizer, state, 3), 0
    while not state.over:
        forced = state.forced()
        assert state.legal_prefix(forced) == len(forced)
        some += len(forced)
        walk.round(forced)
    assert some >= 3
    if walk.tokens[-1] not in eos:
        walk.round([STOP])
    jsonschema.validate(json.loads(answer(tokenizer, walk.tokens)), PERSON)


def test_forced_text_is_tokenized_as_in_the_middle_of_a_text() -> None:
    """No space before it, and the tokens of the tokenizer: the longest first would be `nam`."""
    tokenizer = Tokenizer(sentencepiece())
    state = GrammarCompiler(tokenizer, [STOP], tokenizer.vocab_size).compile(GrammarSpec("regex", "anami!"))
    assert list(map(tokenizer.token, state.forced())) == ["a", "na", "m", "i", "!"]


def test_a_vocabulary_that_spells_a_text_twice_allows_both() -> None:
    tokenizer = Tokenizer(sentencepiece())
    state = GrammarCompiler(tokenizer, [2], tokenizer.vocab_size).compile(GrammarSpec("regex", "[\na]+"))
    twice = [tokenizer.token_id(token) for token in ("\n", "<0x0A>")]
    assert state.masks([])[0][twice].all()


def test_a_drafted_dead_end_is_no_end() -> None:
    """A token after which nothing fits is refused as a draft, and the state survives it."""
    backend = Backend(models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    state = GrammarCompiler(Tokenizer(backend), [1], 5).compile(GrammarSpec("regex", "(a[cd])|bb|ba+"))
    assert state.masks([2, 2]).tolist() == [[False, False, True, True, False]]
    assert state.masks([3, 3]).tolist()[2] == [False, True, False, False, False]
    assert state.legal_prefix([3, 2, 2, 1]) == 4
    state.commit([2])
    with pytest.raises(OxidizeError, match="cannot go on"):
        state.masks([])


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": ', "EOF"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "format": "colour"}', "colour"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}', "oneOf"),
        ("json_schema", '{"$ref": "http://localhost/schema"}', "localhost"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("json_object", "{}", "json_schema"),
        ("regex", "[", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("lark", 'start: "a', "lexer"),
        ("lark", 'begin: "a"', "start"),
        ("lark", 'start: <|nobody|> "a"', "nobody"),
        ("lark", "start: X\nX: /a/ & /b/", "no text"),
        ("lark", 'start: ""', "empty"),
        ("lark", 'start: a "x"\na[max_tokens=3]: /[a-z]+/', "max_tokens"),
        ("lark", 'start: a "x"\na[stop="q"]: /[a-z]+/', "stop"),
        ("lark", "start: a\na[temperature=0.5]: /[a-z]+/", "temperature"),
        ("regex", "[" + "a" * 500, "invalid"),
        ("yaml", "a: 1", "json_schema"),
    ],
)
@pytest.mark.parametrize("after", [None, "</think>"])
def test_what_is_wrong_or_not_supported_is_said_in_one_line(
    compiler: GrammarCompiler, kind: str, text: str, reason: str, after: str | None
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        compiler.compile(GrammarSpec(kind, text, after))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("tag", "reason"), [("", "empty"), ("<|im_end|>", "EOS"), ("a<|im_start|>", "special")])
def test_tags_that_cannot_be(compiler: GrammarCompiler, tag: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        compiler.compile(GrammarSpec("regex", "a", after=tag))


def test_without_an_eos_of_the_target(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="EOS"):
        GrammarCompiler(tokenizer, [10**6], tokenizer.vocab_size)


def test_without_the_package(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install 'oxidize-ort\[grammar\]'"):
        GrammarCompiler(tokenizer, EOS, tokenizer.vocab_size)


class TestAfter:
    def test_free_before_the_tag(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        state = compiler.compile(SPECS["after"])
        state.commit([*tokenizer.encode('Well {"a": é, </ think>'), START, *tokenizer.encode("</thin")])
        row = state.masks([])[0]
        assert not row[list(EOS)].any() and row[START] and not state.over
        spelled = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size) if token not in EOS}
        assert row[[token for token, text in spelled.items() if text.isascii() and b"k>" not in text]].all()
        assert not any(row[token] for token, text in spelled.items() if b'</think>\n{"name":"Bob","age":-' in text)
        assert state.forced() == []

    def test_an_end_tag_with_illegal_json_in_one_block(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        state = compiler.compile(SPECS["after"])
        state.commit(tokenizer.encode("hm"))
        head = tokenizer.encode("</think")
        for tail, legal in ((">nonsense", 1), (">[1]", 1), (">\n", 2), (">" + "\n" * 3, 3)):
            end = [token for character in tail for token in tokenizer.encode(character)]
            assert state.legal_prefix([*head, *end]) == len(head) + legal
        assert state.legal_prefix([*head, *tokenizer.encode(">"), STOP]) == len(head) + 1

    @pytest.mark.parametrize(
        ("kind", "text", "legal"),
        [
            ("regex", '"[a-z]"', {">", '>"'}),
            ("regex", "[0-9]{2}", {">", ">12"}),
            ("regex", "[0-9]", {">"}),
            ("json_object", "", {">", ">\n{", '>{"', ">\n", ">{"}),
            ("json_schema", '{"type": "string"}', {">", '>"', ">\n"}),
            ("lark", 'start: "{" <|im_start|>', {">", ">{"}),
        ],
    )
    def test_a_token_that_completes_the_tag_and_goes_on(
        self, compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str, text: str, legal: set[str]
    ) -> None:
        state = compiler.compile(GrammarSpec(kind, text, after="</think>"))
        state.commit([token for character in "a </think" for token in tokenizer.encode(character)])
        tokens = np.flatnonzero(state.masks([])[0]).tolist()
        ends = {text for token in tokens if (text := tokenizer.token(token) or "").startswith(">")}
        assert {end.replace("Ċ", "\n") for end in ends} >= legal
        vocabulary = {tokenizer.token_bytes(token).decode(errors="replace") for token in range(tokenizer.vocab_size)}
        assert {end.replace("Ċ", "\n") for end in ends} <= legal | (vocabulary - {">12", '>"', '>x"', '>{"', ">\n{"})

    def test_a_special_token_is_the_tag_or_is_spelled(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        for tag in ([START], [token for character in "<|im_start|>" for token in tokenizer.encode(character)]):
            state = compiler.compile(SPECS["after_special"])
            state.commit([*tokenizer.encode("free"), *tag])
            assert allowed(tokenizer, state) == set("0123456789")
            assert state.legal_prefix([START]) == 0

    @pytest.mark.parametrize("tag", ["</think>", "<tool>", '"quoted\\"\n', "né✓", "."])
    def test_any_text_can_be_the_tag(self, compiler: GrammarCompiler, tokenizer: Tokenizer, tag: str) -> None:
        state = compiler.compile(GrammarSpec("regex", "[0-9]!", after=tag))
        state.commit(tokenizer.encode("free"))
        state.commit(tokenizer.encode(tag))
        assert allowed(tokenizer, state) == set("0123456789")

    def test_a_stray_beginning_of_the_tag(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        state = compiler.compile(GrammarSpec("regex", "[0-9]+", after="aab"))
        state.commit(tokenizer.encode("xaa"))
        state.commit(tokenizer.encode("ab"))
        assert allowed(tokenizer, state) == set("0123456789")


def test_200_random_schemas_with_hostile_drafts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed, schema in schemas(200):
        tokens = both_ways(tokenizer, compiler.compile(GrammarSpec("json_schema", json.dumps(schema))), seed)
        value = json.loads(answer(tokenizer, tokens))
        jsonschema.Draft202012Validator(schema).validate(value)


def test_random_schemas_after_a_tag(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed, schema in schemas(30):
        state = compiler.compile(GrammarSpec("json_schema", json.dumps(schema), after="</think>"))
        thoughts = tokenizer.encode("Hm. <think> </think")
        state.commit([*thoughts, *tokenizer.encode(">")])
        value = json.loads(answer(tokenizer, both_ways(tokenizer, state, seed)))
        jsonschema.Draft202012Validator(schema).validate(value)


def test_any_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed in range(10):
        tokens = both_ways(tokenizer, compiler.compile(SPECS["object"]), seed)
        assert isinstance(json.loads(answer(tokenizer, tokens)), dict)


@pytest.mark.parametrize(
    "pattern",
    [r"[0-9]{3}-[0-9]{4}", "(yes|no|né)(, maybe)*", r'"[^"\n]{0,9}"', "a/b|c//", r"^\d\d?:\d\d$", "(ab|ba)+c?", "x*?y"],
)
def test_regex(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    for seed in range(6):
        tokens = both_ways(tokenizer, compiler.compile(GrammarSpec("regex", pattern)), seed)
        assert re.fullmatch(pattern, answer(tokenizer, tokens))


def test_lark(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    seen = set()
    for seed in range(20):
        text = answer(tokenizer, both_ways(tokenizer, compiler.compile(SPECS["lark"]), seed))
        assert re.fullmatch(r"[0-9+*()]+", text)
        seen |= set(text)
        eval(re.sub(r"\b0+(?=\d)", "", text))  # Python reads it too, but for leading zeros
    assert set("+*()") <= seen


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ('{"name":"a","age":1}', True),
        ('{"name": "a", "age": 1}', True),
        ('{\n  "name": "a",\n  "age": 1\n}', True),
        ('{ "name" : "a" , "age" : 1 }', True),
        ('{"name":  "a","age":1}', False),
        ('{\n\n"name":"a","age":1}', False),
        ('{"name":"a",\n' + " " * 24 + '"age":1}', True),
        ('{"name":"a",\n' + " " * 25 + '"age":1}', False),
        (' {"name":"a","age":1}', False),
    ],
)
def test_white_space_is_possible_but_bounded(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, legal: bool
) -> None:
    state, rest = compiler.compile(SPECS["schema"]), text.encode()
    spelled = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    while rest and not state.over:
        row = state.masks([])[0]
        fits = [token for token in np.flatnonzero(row).tolist() if spelled[token] and rest.startswith(spelled[token])]
        if not fits:
            break
        token = max(fits, key=lambda token: len(spelled[token]))
        state.commit([token])
        rest = rest[len(spelled[token]) :]
    assert (not rest and state.over) == legal


@pytest.mark.checkpoint
def test_with_a_real_vocabulary(smollm2_int4: Path) -> None:
    bundle = open_bundle(smollm2_int4)
    tokenizer = Tokenizer.load(bundle.folder, bundle.manifest.tokenizer)
    compiler = GrammarCompiler(tokenizer, EOS, tokenizer.vocab_size)
    for seed, schema in schemas(4):
        tokens = both_ways(tokenizer, compiler.compile(GrammarSpec("json_schema", json.dumps(schema))), seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer(tokenizer, tokens)))
