"""Reasoning and tool calls inside an answer, found while its text grows.

A parser takes text in any pieces and labels it: every character comes out again, once and in order, in one `Piece`.
What comes out, joined, depends on the text alone, never on its cuts. Only what may yet become markup is held back.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from .calls import JsonScan, ToolCallDelta, deltas_of, read_calls
from .text import beginning_of


class Label(StrEnum):
    """What a piece of an answer's text is: the answer itself, reasoning, the tags around that, or a tool call."""

    TEXT = "text"
    REASONING = "reasoning"
    TAG = "tag"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text with its label, and the calls that it completes."""

    text: str
    label: Label
    calls: tuple[ToolCallDelta, ...] = ()


class Parser(Protocol):
    """Labels a growing text."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Markup to look for, which a tokenizer may hold as special tokens."""
        ...

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        ...

    def flush(self) -> list[Piece]:
        """The rest, at the end."""
        ...


class Chain:
    """Several parsers in a row; each gets what the ones before it call text. Reasoning comes before tool calls."""

    def __init__(self, parsers: Sequence[Parser] = ()) -> None:
        self._parsers = tuple(parsers)
        self.tags = tuple(tag for parser in self._parsers for tag in parser.tags)

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        pieces = [Piece(text, Label.TEXT)] if text else []
        for parser in self._parsers:
            pieces = _feed(parser, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """The rest, at the end."""
        pieces: list[Piece] = []
        for parser in self._parsers:
            pieces = _feed(parser, pieces) + parser.flush()
        return pieces


def _feed(parser: Parser, pieces: Iterable[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        out += parser.push(piece.text) if piece.label is Label.TEXT else [piece]
    return out


class _Steps:
    """A parser as a state machine: `_state` takes a piece from the beginning of what is held, or waits for more."""

    def __init__(self, state: Callable[[], Piece | None]) -> None:
        self._state = state
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and (piece := self._state()) is not None:
            pieces.append(piece)
        return pieces

    def _go(self, state: Callable[[], Piece | None]) -> Piece | None:
        self._state = state
        return state()

    def _take(self, count: int, label: Label) -> Piece:
        text, self._held = self._held[:count], self._held[count:]
        return Piece(text, label)

    def _until(self, tag: str, label: Label) -> Piece | None:
        """The text that is certain to come before `tag`, where that is not at the very beginning."""
        at = self._held.find(tag)
        certain = at if at >= 0 else beginning_of(self._held, (tag,))
        return self._take(certain, label) if certain else None


class ReasoningParser(_Steps):
    """Splits reasoning from the answer: the text from `start`, at the very beginning, to the first `end`.

    open: the chat template has already opened the reasoning; `start` may then be missing. White space before `start`
    and newlines behind either tag belong to the tag. A tag later in the answer is plain text, such as a quotation.
    """

    def __init__(self, start: str = "<think>", end: str = "</think>", open: bool = False) -> None:
        super().__init__(self._before)
        self.tags = (start, end)
        self._start, self._end = start, end
        self._untagged = self._inside if open else self._answer
        self._rest = Label.REASONING if open else Label.TEXT  # what the text is if it ends here

    def flush(self) -> list[Piece]:
        """The rest, at the end: a tag that was only begun is none."""
        return [self._take(len(self._held), self._rest)] if self._held else []

    def _before(self) -> Piece | None:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._state, self._rest = self._entered, Label.REASONING
            return self._take(len(self._held) - len(text) + len(self._start), Label.TAG)
        return None if self._start.startswith(text) else self._go(self._untagged)

    def _entered(self) -> Piece | None:
        return self._newlines() or self._go(self._inside)

    def _inside(self) -> Piece | None:
        if not self._held.startswith(self._end):
            return self._until(self._end, Label.REASONING)
        self._state, self._rest = self._left, Label.TEXT
        return self._take(len(self._end), Label.TAG)

    def _left(self) -> Piece | None:
        return self._newlines() or self._go(self._answer)

    def _answer(self) -> Piece | None:
        return self._take(len(self._held), Label.TEXT)

    def _newlines(self) -> Piece | None:
        count = len(self._held) - len(self._held.lstrip("\n"))
        return self._take(count, Label.TAG) if count else None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are marked in text: `opener`, a JSON object or an array of them, then perhaps `closer`.

    separator: what may come between calls instead of another opener. bare: an answer that begins with JSON is a call
    without an opener.
    """

    opener: str
    closer: str = ""
    separator: str = ""
    bare: bool = False


HERMES = ToolFormat("<tool_call>", "</tool_call>")  # Qwen too
LLAMA3 = ToolFormat("<|python_tag|>", separator=";", bare=True)
MISTRAL = ToolFormat("[TOOL_CALLS]")
TOOL_FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}


class ToolCallParser(_Steps):
    """Finds tool calls. A call is told when its JSON is complete and right: name first, then its arguments.

    What looks like a call and is none (malformed JSON, a tool that is not in `names`, an answer cut off inside it)
    stays in the text as it was written; that is why nothing of a call is told earlier. White space behind a call
    belongs to it. salt: makes the calls' ids differ from those of other answers.
    """

    def __init__(self, form: ToolFormat = HERMES, names: Collection[str] | None = None, salt: str = "") -> None:
        super().__init__(self._first if form.bare else self._text)
        self.tags = tuple(tag for tag in (form.opener, form.closer) if tag)
        self._form, self._names, self._salt = form, names, salt
        self._body = JsonScan(0)
        self._start = 0  # of the JSON in what is held
        self._bare = form.bare
        self._calls = 0

    def flush(self) -> list[Piece]:
        """The rest, at the end: a call that was only begun is text."""
        label = Label.CALL if self._state == self._behind else Label.TEXT
        return [self._take(len(self._held), label)] if self._held else []

    def _first(self) -> Piece | None:
        text = self._held.lstrip()
        if not text:
            return None
        if text[0] in "{[":
            return self._enter(len(self._held) - len(text))
        self._bare = False
        return self._go(self._text)

    def _text(self) -> Piece | None:
        opener = self._form.opener
        return self._enter(len(opener)) if self._held.startswith(opener) else self._until(opener, Label.TEXT)

    def _enter(self, start: int) -> Piece | None:
        self._start, self._body = start, JsonScan(start)
        return self._go(self._inside)

    def _inside(self) -> Piece | None:
        if not self._body.read(self._held):
            return None
        end = self._body.at
        found = read_calls(self._held[self._start : end], self._names, self._bare) if self._body.done else None
        self._bare = False
        if found is None:
            self._state = self._text
            return self._take(end, Label.TEXT)
        deltas = [delta for call in found for delta in deltas_of(self._number(), call, self._salt)]
        self._state = self._behind
        return Piece(self._take(end, Label.CALL).text, Label.CALL, tuple(deltas))

    def _number(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _behind(self) -> Piece | None:
        text, closer, separator = self._held.lstrip(), self._form.closer, self._form.separator
        space = len(self._held) - len(text)
        if space:
            return self._take(space, Label.CALL)
        if closer and text.startswith(closer):
            return self._take(len(closer), Label.CALL)
        if closer.startswith(text):
            return None
        if separator and text.startswith(separator):
            return self._enter(len(separator))
        return self._go(self._text)
