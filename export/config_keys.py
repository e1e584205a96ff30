"""Typed access to a decoded config, which keeps account of every key.

A key nobody reads may change the maths; `refuse_unread` turns it into an error that names it.
"""

import math
from collections.abc import Mapping
from typing import Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError


class Keys:
    """The keys of one config object. Absent keys take `defaults`; `where` begins every error message."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str):
        self.where = where
        self._raw = raw
        self._defaults = defaults
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` (or the table's own) when the key is absent."""
        self._read.add(key)
        return self._raw.get(key, self._defaults.get(key, default))

    def size(self, key: str) -> int:
        """A positive integer that has to be there."""
        value = self.optional_integer(key)
        if value is None or value == 0:
            raise self._wrong(key, "a positive integer", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """A non-negative integer, or None where absent or null."""
        value = self.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self._wrong(key, "a non-negative integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without a default it has to be there."""
        value = self.optional_number(key)
        if value is None:
            value = default
        if value is None:
            raise self._wrong(key, "a number", value)
        return value

    def positive(self, key: str) -> float:
        """A positive number that has to be there."""
        value = self.number(key)
        if value <= 0:
            raise self._wrong(key, "a positive number", value)
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None where absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or False; null counts as absent."""
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, copied; absent and null count as empty."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return dict(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def choice(self, key: str, choices: Mapping[str, str], default: str | None = None) -> str:
        """The meaning of a string among those implemented; another one is an UnsupportedModelError."""
        value = self.get(key)
        value = self._defaults.get(key, default) if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise UnsupportedModelError(
                f"{self.where}: {key} = {value!r} is not implemented; this version knows {', '.join(choices)}"
            )
        return choices[value]

    def refuse_unread(self, harmless: frozenset[str] = frozenset(), only: Mapping[str, Any] | None = None) -> None:
        """Refuse keys nobody read, save null and `harmless` ones and those with their value in `only`."""
        for key in sorted(self._raw.keys() - self._read - harmless):
            value = self._raw[key]
            if value in (None, {}, []) or (only is not None and key in only and value == only[key]):
                continue
            raise UnsupportedModelError(
                f"{self.where}: key {key} = {shown(value)} is not understood by this version and may "
                "change the maths; no bundle is made from a guess"
            )

    def _wrong(self, key: str, expected: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} must be {expected}, not {shown(value)}")


def shown(value: Any) -> str:
    """A value as it fits into a one-line message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
