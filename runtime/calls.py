"""Tool calls as JSON text: where a JSON value in a growing text ends, which calls it makes, and their deltas."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

_SPACE = " \t\r\n"
_OUTSIDE_STRINGS = frozenset(_SPACE + "{}[]:,-+.0123456789eEtrufalsn")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call number `index`: first its id and name, then its arguments, as JSON text, to be joined."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name and its arguments, the JSON object as the model wrote it."""

    name: str
    arguments: str


def deltas_of(index: int, call: Call, salt: str) -> tuple[ToolCallDelta, ToolCallDelta]:
    """A call as it is streamed."""
    return ToolCallDelta(index, call_id(salt, index), call.name), ToolCallDelta(index, arguments=call.arguments)


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta per call."""
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        known = calls.get(delta.index, ToolCallDelta(delta.index))
        arguments = known.arguments + delta.arguments
        calls[delta.index] = ToolCallDelta(delta.index, known.id or delta.id, known.name or delta.name, arguments)
    return tuple(calls.values())


def call_id(salt: str, index: int) -> str:
    """The id of a call: nine letters and digits, which is what Mistral's chat templates demand."""
    return sha256(f"{salt}:{index}".encode()).hexdigest()[:9]


class JsonScan:
    """Looks for the end of the JSON object or array in a growing text, reading every character once.

    Only strings and brackets are understood, the rest is left to `read_calls`; `bad` is set at a character that no
    JSON has in that place.
    """

    def __init__(self, start: int) -> None:
        self.at = start
        self.done = self.bad = False
        self._depth = 0
        self._string = self._escaped = False

    def read(self, text: str) -> bool:
        """Read on; whether the end of the value, or of its being JSON, was found: at `self.at`."""
        while not (self.done or self.bad) and self.at < len(text):
            self._step(text[self.at])
            self.at += not self.bad
        return self.done or self.bad

    def _step(self, char: str) -> None:
        if self._string:
            self._in_string(char)
        elif char == '"' and self._depth:
            self._string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.done = not self._depth
        else:
            self.bad = char not in (_OUTSIDE_STRINGS if self._depth else _SPACE)

    def _in_string(self, char: str) -> None:
        self.bad = char < " "
        self._string = self._escaped or char != '"'
        self._escaped = char == "\\" and not self._escaped


def read_calls(text: str, names: Collection[str] | None = None, bare: bool = False) -> list[Call] | None:
    """The calls in a JSON object or an array of them; None when it is no JSON or anything in it is no call.

    names: the tools there are, if known. bare: nothing but the JSON says it is a call, so it must have arguments.
    """
    try:
        json.loads(text)
        calls = [_call(members, bare) for members in _objects(text)]
    except (ValueError, RecursionError):
        return None
    return calls if calls and all(names is None or call.name in names for call in calls) else None


def _call(members: dict[str, str], bare: bool) -> Call:
    name = json.loads(members.get("name", "null"))
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ValueError("a call needs a name")
    raw = members.get("arguments", members.get("parameters"))
    if raw is None and bare:
        raise ValueError("a bare call needs arguments")
    return Call(name, _arguments(raw or "null"))


def _arguments(raw: str) -> str:
    """The JSON object of the arguments; some models write it as a string."""
    value = json.loads(raw)
    if isinstance(value, str):
        raw, value = value, json.loads(value, parse_constant=_refuse)
        raw.encode("utf-8")  # an escape may stand for half a character
    if value is not None and not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    return "{}" if value is None else raw


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _objects(text: str) -> list[dict[str, str]]:
    """The object in a valid JSON text, or the objects in an array; their values as they are written."""
    at = _skip(text, 0)
    if text[at] == "{":
        return [_members(text, at)[0]]
    objects = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        members, at = _members(text, at)
        objects.append(members)
        at = _skip(text, at, ",")
    return objects


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """The members of the object at `at`, and where it ends."""
    if text[at] != "{":
        raise ValueError("a call must be an object")
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        start = _skip(text, at, ":")
        _, at = decoder.raw_decode(text, start)
        members[key] = text[start:at]
        at = _skip(text, at, ",")
    return members, at + 1


def _skip(text: str, at: int, mark: str = "") -> int:
    """Behind white space and `mark`."""
    while at < len(text) and (text[at] in _SPACE or text[at] == mark):
        at += 1
    return at
