"""Structured output: which tokens may follow, by JSON schema, regular expression or Lark grammar.

The only door to the `llguidance` package, imported when the first grammar is compiled. What it decides is a mask over
the target's logits, one row for each position of a round, drafted tokens included; it draws nothing.

Where a grammar leaves no choice of text (a key of an object, say) its mask leaves no choice of token either: the one
the tokenizer would choose. So `GrammarState.forced` is a draft that is always accepted, and `legal_prefix` may refuse
another spelling of the same text. Both are functions of the committed tokens alone, so a draft changes nothing.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import OxidizeError, UsageError
from .grammar_vocab import WORD, GrammarVocabulary
from .text import Tokenizer

if TYPE_CHECKING:
    import llguidance

KINDS = ("json_schema", "json_object", "regex", "lark")
_SPACE = r"( |\n {0,24})"  # at most once at each place where JSON allows white space
_STRICT = {"lenient": False, "coerce_one_of": False}  # what is not supported is an error
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a request asks for.

    kind: "json_schema", "json_object" (any JSON object), "regex" (the whole answer matches; syntax of Rust's `regex`
        without look-around and back references) or "lark" (llguidance's dialect of Lark, `start` is the entry).
    text: the schema as JSON text, the regular expression or the grammar; "" for json_object.
    after: the grammar begins after this text was generated, as "</think>". Until then the text is free: any UTF-8 and
        any special token but EOS, because an answer that ends before the tag would lack what was asked for. The tag
        may be one special token or ordinary text cut into tokens in any way; if a token completes the tag and goes on,
        its rest obeys the grammar. JSON may be preceded by up to two spaces or line breaks there.

    White space in JSON: at each place where JSON allows it, nothing, one space, or one line break with up to 24
    spaces. So compact, spaced and indented JSON are all possible (a model that learned one is not forced into
    another), and a model cannot loop on white space. A schema with `"x-guidance": {"whitespace_flexible": false}` has
    no white space, so that more tokens are forced. Keys come in the order of the schema.
    """

    kind: str
    text: str
    after: str | None = None


class GrammarCompiler:
    """Makes grammars for one tokenizer; building it reads the whole vocabulary once, compiling is then cheap.

    eos: all ids that end an answer: allowed where the grammar may end, nowhere else.
    vocab_size: rows V of the target's logits; ids without a token are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int], vocab_size: int) -> None:
        package = _package()
        self._vocabulary = GrammarVocabulary(tokenizer, frozenset(eos), vocab_size)
        wrapped = package.TokenizerWrapper(self._vocabulary)
        self._tokenizer = package.LLTokenizer(wrapped, eos_token=sorted(self._vocabulary.eos))
        self._executor = package.LLExecutor(1)

    def compile(self, spec: GrammarSpec) -> "GrammarState":
        """The state of an answer that has not begun; a grammar that is wrong or not supported is a UsageError."""
        if spec.kind not in KINDS:
            raise UsageError(f"a grammar is one of {', '.join(KINDS)}, not {spec.kind!r}")
        try:
            grammar = _one_grammar(spec)
        except ValueError as error:
            raise UsageError(f"the {_named(spec)} cannot be used: {_one_line(str(error))}") from None
        state = self._state([grammar])
        if reason := state.flaw():
            raise UsageError(f"the {_named(spec)} cannot be used: {reason}")
        if spec.after is None:
            return state
        entry = self._vocabulary.free_until(spec.after, gap=spec.kind.startswith("json"))
        return self._state([{"lark_grammar": entry}, {**grammar, "name": "answer"}])

    def _state(self, grammars: list[dict[str, Any]]) -> "GrammarState":
        text = json.dumps({"grammars": grammars})
        return GrammarState(_Compiled(self._vocabulary, self._tokenizer, self._executor, text))


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar with what runs it."""

    vocabulary: GrammarVocabulary
    tokenizer: "llguidance.LLTokenizer"
    executor: "llguidance.LLExecutor"
    text: str

    def matcher(self) -> "llguidance.LLMatcher":
        """A matcher at the beginning."""
        package = _package()
        limits = package.LLParserLimits(verbose_errors=False)
        return package.LLMatcher(self.tokenizer, self.text, log_level=0, limits=limits)


_DEAD_END = "the grammar cannot go on: no token of the vocabulary fits; change the grammar"


class GrammarState:
    """Where one answer stands in its grammar, by its committed tokens alone."""

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher()
        self._committed: list[int] = []
        self._forced: list[int] = []  # what `forced` last found, less what was committed since
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether nothing but EOS may follow; also after EOS."""
        return self._ended or self._matcher.is_stopped()

    def masks(self, drafted: Sequence[int]) -> np.ndarray:
        """The tokens allowed after the committed ones and drafted[:i], in row i; the state stays as it is.

        Returns bool [n, V], where n - 1 is `legal_prefix(drafted)`. Every row allows at least one token: EOS ids where
        the grammar may end, and after EOS they alone. A grammar that cannot go on after the committed tokens (too
        complex, or no token fits) is an OxidizeError.
        """
        packed = self._rows(drafted)  # [n, words]
        count = self._compiled.vocabulary.size
        return np.unpackbits(packed.view(np.uint8), axis=1, count=count, bitorder="little").view(np.bool_)

    def legal_prefix(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens, from the first on, `masks` allows; the state stays as it is."""
        return len(self._rows(drafted)) - 1

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that were drawn under the masks; an EOS id ends the answer."""
        for token in tokens:
            if self._ended:
                raise OxidizeError(f"token {token} was committed after EOS; nothing may follow it")
            if token in self._compiled.vocabulary.eos:
                if not (self.over or self._matcher.is_accepting()):  # the drafted token before it led to a dead end
                    raise OxidizeError(_DEAD_END)
                self._ended = True
            elif not self._matcher.consume_token(token):
                raise OxidizeError(f"token {token} was committed against the grammar; mask the law it is drawn from")
            else:
                self._committed.append(token)
        told, self._forced = self._forced, []
        if told[: len(tokens)] == list(tokens):
            self._forced = told[len(tokens) :]

    def forced(self) -> list[int]:
        """The tokens that must follow, where the grammar leaves no choice; the state stays as it is."""
        if not self._forced and not self.over:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced.copy()

    def fork(self) -> "GrammarState":
        """An independent state of the same text."""
        twin = object.__new__(GrammarState)
        twin._compiled = self._compiled
        twin._matcher = self._matcher.deep_copy()
        twin._committed = self._committed.copy()
        twin._forced = self._forced.copy()
        twin._ended = self._ended
        return twin

    def flaw(self) -> str | None:
        """Why no answer can be written with this grammar, of a state at the beginning; None if one can."""
        if self._matcher.is_error():
            return _one_line(self._matcher.get_error())
        try:
            first = self._rows([])
        except OxidizeError:
            return "it matches no text at all"
        vocabulary = self._compiled.vocabulary
        text = first[0] & ~vocabulary.eos_row
        if not text.any():
            return "it matches only the empty text"
        probe = self._matcher.deep_copy()
        probe.consume_token(_first(text))
        return None if probe.rollback(1) else _one_line(probe.get_error())

    def _rows(self, drafted: Sequence[int]) -> np.ndarray:
        """`masks` with a bit for each token: uint32 [n, words]."""
        vocabulary = self._compiled.vocabulary
        if self._ended:
            return vocabulary.eos_row[None]
        played = list(takewhile(lambda token: 0 <= token < vocabulary.size and token not in vocabulary.eos, drafted))
        rows = self._computed(played) & vocabulary.allowed
        legal = sum(1 for _ in takewhile(lambda pair: _has(rows, *pair), enumerate(played)))
        if not rows[legal].any():  # the last token leads to where nothing fits
            legal -= 1
        if legal < 0:
            raise OxidizeError(_DEAD_END)
        if legal == len(played) < len(drafted) and _has(rows, legal, drafted[legal], vocabulary.eos):
            return np.concatenate([rows, vocabulary.eos_row[None]])
        return rows[: legal + 1]

    def _computed(self, played: list[int]) -> np.ndarray:
        """uint32 [len(played) + 1, words]: what llguidance allows; rows it did not reach allow nothing."""
        rows = np.zeros((len(played) + 1, len(self._compiled.vocabulary.allowed)), np.uint32)
        width = rows[0].nbytes
        if played:
            work = [(self._matcher, 0, played)]
            self._compiled.executor.unsafe_compute_mask_ptr_with_draft_token(work, rows.ctypes.data, width, len(rows))
        else:
            self._matcher.unsafe_compute_mask_ptr(rows.ctypes.data, width)
        return self._computed_apart(played) if self._matcher.is_error() else rows

    def _computed_apart(self, played: list[int]) -> np.ndarray:
        """The same, row by row on copies: a matcher that failed, on a drafted token too, never recovers."""
        ahead = self._compiled.matcher()
        ahead.consume_tokens(self._committed)
        self._matcher = ahead.deep_copy()
        rows = np.zeros((len(played) + 1, len(self._compiled.vocabulary.allowed)), np.uint32)
        for row, token in zip(rows, [*played, None], strict=True):
            work = ahead.deep_copy()
            work.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if work.is_error():
                row[:] = 0
            if work.is_error() or token is None or not ahead.consume_token(token):
                break
        return rows


def _package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "structured output needs the package llguidance; install it with: pip install 'oxidize-ort[grammar]'"
        ) from None
    return llguidance


def _one_grammar(spec: GrammarSpec) -> dict[str, Any]:
    """The grammar in llguidance's own JSON form; ValueError if it is none."""
    matcher = _package().LLMatcher
    if spec.kind == "json_object":
        if spec.text:
            raise ValueError("json_object takes no text; give a json_schema instead")
        spec = GrammarSpec("json_schema", '{"type": "object"}')
    if spec.kind == "json_schema":
        grammar = json.loads(matcher.grammar_from_json_schema(spec.text, None, _STRICT))["grammars"][0]
        options = grammar["json_schema"]["x-guidance"]
        if not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
            options["whitespace_pattern"] = _SPACE
        return grammar
    if spec.kind == "regex":
        return json.loads(matcher.grammar_from_regex(spec.text))["grammars"][0]
    if _TEMPERATURE.search(spec.text):
        raise ValueError("temperature= is not supported; use the request's own temperature")
    return {"lark_grammar": spec.text}


def _has(rows: np.ndarray, row: int, token: int, among: Collection[int] | None = None) -> bool:
    if among is not None and token not in among:
        return False
    return bool(int(rows[row, token // WORD]) >> (token % WORD) & 1)


def _first(packed: np.ndarray) -> int:
    return int(np.flatnonzero(np.unpackbits(packed.view(np.uint8), bitorder="little"))[0])


def _named(spec: GrammarSpec) -> str:
    return {"regex": "regular expression", "lark": "Lark grammar"}.get(spec.kind, "JSON schema")


def _one_line(message: str) -> str:
    """The reason in llguidance's message, which may show the source in lines below it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason was given"]
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *reasons])[:300]
