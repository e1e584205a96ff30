"""Token blocks in, the user's text out. How the tokens were cut into blocks leaves no trace.

Here it is decided where an answer ends for the reader: at its EOS, before a stop string, at its length. Every token
goes through the same steps on its own: detokenize, look for stop strings, split reasoning and tool calls off.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from .calls import ToolCallDelta, join_calls
from .parsing import Chain, Label, Parser, Piece
from .text import StopStrings, Tokenizer

if TYPE_CHECKING:
    from .generation import Emission
    from .logprobs import TokenLogprob

_KINDS = {"correction": "corrected", "bonus": "bonus", "plain": "plain"}


@dataclass(frozen=True, slots=True)
class Span:
    """Some text with the sort of token that completed it: "accepted", "corrected", "bonus" or "plain"."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer: new text, the tokens of a round, how many were drafted, and at the end the reason.

    The tokens run to the one that completed a stop string, or to the EOS, which has no text. Text that may become a
    stop string or markup comes with a later delta than its tokens. `text` and `spans` are without reasoning and tool
    calls. finish_reason: "stop", "length" or "tool_calls"; None but for the last delta.
    """

    text: str
    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None
    logprobs: tuple["TokenLogprob", ...] | None = None
    spans: tuple[Span, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. A token counts as reasoning if any text it completed is reasoning or a tag of it."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


class Answer:
    """One answer while it grows.

    eos: ids that end it. max_tokens: where to cut, if nobody did so before. parsers: for reasoning, then for tool
    calls; special tokens spelled as one of their tags are kept in the text for them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos: Collection[int],
        stops: Sequence[str] = (),
        max_tokens: int | None = None,
        parsers: Sequence[Parser] = (),
        prompt_tokens: int = 0,
        choice: int = 0,
    ) -> None:
        self._eos, self._max_tokens = frozenset(eos), max_tokens
        self._parsers = Chain(parsers)
        tags = {tokenizer.token_id(tag) for tag in self._parsers.tags}
        self._detokenizer = tokenizer.detokenizer(tokenizer.special_ids & tags - {None})
        self._stops = StopStrings(stops)
        self._ledger = _Ledger()
        self._prompt_tokens, self._choice = prompt_tokens, choice
        self._completion_tokens = 0
        self._called = False
        self.finish_reason: str | None = None

    @property
    def usage(self) -> Usage:
        """Of what was delivered so far."""
        return Usage(self._prompt_tokens, self._completion_tokens, self._ledger.reasoning_tokens)

    def push(self, emission: "Emission") -> Delta:
        """What a round adds; nothing once there is a finish_reason."""
        if self.finish_reason is not None:
            return Delta("", (), 0, None, choice=self._choice)
        pieces: list[Piece] = []
        count, reason = 0, None
        while reason is None and count < len(emission.tokens):
            kind = "accepted" if count < emission.accepted else _KINDS[emission.kind]
            more, reason = self._read(emission.tokens[count], kind)
            pieces += more
            count += 1
        if (reason := reason or emission.finish_reason) is not None:
            more, reason = self._end(reason)
            pieces += more
        return self._delta(emission, count, pieces, reason)

    def _read(self, token: int, kind: str) -> tuple[list[Piece], str | None]:
        """One token: what it adds, and why the answer ends with it, if it does."""
        self._completion_tokens += 1
        if token in self._eos:
            return [], "stop"
        text = self._detokenizer.push([token])
        self._ledger.add(len(text), kind)
        shown, stopped = self._stops.push(text)
        full = self._completion_tokens == self._max_tokens
        return self._parsers.push(shown), "stop" if stopped else "length" if full else None

    def _end(self, reason: str) -> tuple[list[Piece], str]:
        """Everything held back, which may complete a stop string yet."""
        text = self._detokenizer.flush()
        self._ledger.add_rest(len(text))
        shown, stopped = self._stops.push(text)
        if not stopped:
            shown += self._stops.flush()
        return self._parsers.push(shown) + self._parsers.flush(), "stop" if stopped else reason

    def _delta(self, emission: "Emission", count: int, pieces: list[Piece], reason: str | None) -> Delta:
        spans = [span for piece in pieces for span in self._ledger.take(piece)]
        calls = tuple(delta for piece in pieces for delta in piece.calls)
        self._called |= bool(calls)
        self.finish_reason = "tool_calls" if self._called and reason == "stop" else reason
        return Delta(
            text="".join(span.text for span in spans),
            tokens=emission.tokens[:count],
            accepted=min(emission.accepted, count),
            finish_reason=self.finish_reason,
            logprobs=None if emission.logprobs is None else emission.logprobs[:count],
            spans=merge_spans(spans),
            reasoning="".join(piece.text for piece in pieces if piece.label is Label.REASONING),
            tool_calls=calls,
            choice=self._choice,
        )


def join_deltas(deltas: Iterable[Delta]) -> Delta:
    """The deltas of one answer as a single one: what a reader gets who does not stream."""
    deltas = list(deltas)
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        accepted=sum(delta.accepted for delta in deltas),
        finish_reason=next((delta.finish_reason for delta in deltas if delta.finish_reason is not None), None),
        logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
        spans=merge_spans(span for delta in deltas for span in delta.spans),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=join_calls(call for delta in deltas for call in delta.tool_calls),
        choice=deltas[0].choice if deltas else 0,
    )


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours of one kind become one span."""
    groups = groupby(spans, key=lambda span: span.kind)
    return tuple(Span("".join(span.text for span in group), kind) for kind, group in groups)


@dataclass(slots=True)
class _Entry:
    """Characters on their way to the reader, and the token that completed them; `tokens` of it are not counted yet."""

    length: int
    kind: str
    tokens: int


class _Ledger:
    """Remembers which token every character came from until the parsers have said what it is."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._entries: deque[_Entry] = deque()
        self._silent = 0  # tokens since the last text, part of a character not complete yet
        self._kind = "plain"

    def add(self, length: int, kind: str) -> None:
        """A token completed `length` characters."""
        self._silent, self._kind = self._silent + 1, kind
        self.add_rest(length)

    def add_rest(self, length: int) -> None:
        """The end of the answer completed `length` more."""
        if length:
            self._entries.append(_Entry(length, self._kind, self._silent))
            self._silent = 0

    def take(self, piece: Piece) -> list[Span]:
        """The next characters are `piece`; its text by kind of token, if it is the answer's."""
        spans, at = [], 0
        while at < len(piece.text):
            entry = self._entries[0]
            count = min(entry.length, len(piece.text) - at)
            if piece.label in (Label.REASONING, Label.TAG):
                self.reasoning_tokens += entry.tokens
                entry.tokens = 0
            if piece.label is Label.TEXT:
                spans.append(Span(piece.text[at : at + count], entry.kind))
            entry.length -= count
            at += count
            if not entry.length:
                self._entries.popleft()
        return spans
