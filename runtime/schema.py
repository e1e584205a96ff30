"""Strict JSON: reads a file and decodes it into dataclasses after their type hints, and never guesses.

Standard library only.
"""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from reprlib import repr as brief
from typing import Any, get_args, get_origin, get_type_hints

from .errors import BundleError

MAX_BYTES = 64 << 20  # a manifest of a 200-layer model has under one


def read_json(path: Path) -> Any:
    """The value in a JSON file; OSErrors pass, anything else wrong with it is a BundleError."""
    if not path.is_file():
        raise FileNotFoundError(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise BundleError(f"{path} has {size} bytes, more than {MAX_BYTES}; it is not a manifest of oxidize")
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not valid JSON ({error}); export the bundle again") from None


def decode(kind: Any, value: Any, where: str) -> Any:
    """Decode JSON into dataclasses, tuples, dicts and scalars; `where` names the value in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(kind, "__dataclass_fields__"):
        return _decode_dataclass(kind, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if arguments:  # a union: of scalars (X | None, int | str), or of a dataclass and None
        return _decode_union(arguments, value, where, str(kind))
    if kind is float:
        _expect(type(value) in (int, float) and abs(value) <= sys.float_info.max, where, "a finite number", value)
        return float(value)
    _expect(type(value) is kind, where, kind.__name__, value)
    return value


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str, expected: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    if float in kinds:
        return decode(float, value, where)
    for kind in kinds:
        if hasattr(kind, "__dataclass_fields__"):
            return decode(kind, value, where)
    _expect(type(value) in kinds, where, expected, value)
    return value


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints = get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise BundleError(f"{where} has the unknown key {brief(unknown[0])}; update oxidize or export the bundle again")
    given = {}
    for item in fields(kind):
        if item.name in value:
            given[item.name] = decode(hints[item.name], value[item.name], f"{where}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise BundleError(f"{where} lacks the key {item.name!r}; export the bundle again")
    return kind(**given)


def _expect(ok: bool, where: str, expected: str, value: Any) -> None:
    if not ok:
        raise BundleError(f"{where} must be {expected}, not {brief(value)}; export the bundle again")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} occurs twice")
    return result
