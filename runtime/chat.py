"""Chat templates: messages in, prompt text out, by the rules transformers uses.

Templates come with checkpoints, so they are hostile until proven otherwise: they run in jinja2's immutable
sandbox and see plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BundleError, UsageError
from .manifest import TokenizerFiles

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. `special` holds the special tokens it may name: bos_token, eos_token."""

    def __init__(self, source: str, special: Mapping[str, str], origin: str = "the chat template") -> None:
        from jinja2 import TemplateError

        self._special = dict(special)
        self._origin = origin
        try:
            self._template: Template = _environment().from_string(source)
        except (TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise BundleError(
                f"{origin} is not a valid template ({_one_line(error)}); replace it or use --raw"
            ) from None

    @classmethod
    def load(cls, folder: Path, files: TokenizerFiles) -> "ChatTemplate":
        """Read the chat template of the bundle in `folder`; without one it is a UsageError."""
        if files.chat_template is None:
            raise UsageError(f"{folder} has no chat template, so it cannot chat; give a plain prompt with --raw")
        path = folder / files.chat_template
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error
        named = {"bos_token": files.bos_token, "eos_token": files.eos_token}
        return cls(source, {name: token for name, token in named.items() if token is not None}, str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, ready for `encode(..., add_special=False)`.

        `variables` are extra names for the template ("enable_thinking"). Messages the template refuses are a
        UsageError; a template that breaks the sandbox is a BundleError.
        """
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        if not messages:
            raise UsageError("a chat needs at least one message, none came")
        names = {
            **self._special,
            **_plain(variables or {}),
            "messages": [_message(message) for message in messages],
            "tools": None if tools is None else _plain(list(tools)),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except SecurityError as error:
            raise BundleError(f"{self._origin} does what no template may ({_one_line(error)}); use --raw") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UsageError(f"{self._origin} refuses these messages: {_one_line(error)}") from None
        except (RecursionError, MemoryError):
            raise BundleError(f"{self._origin} does not end; use --raw") from None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: no empty keys, reasoning under the names they read."""
    if not isinstance(message, Mapping):
        raise UsageError(f"a chat message must be an object with role and content, not {type(message).__name__}")
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON types alone, so that a template finds no method worth calling."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise UsageError(f"a chat may hold text, numbers, lists and objects, not {type(value).__name__}")


def _environment() -> "Environment":
    """A sandbox with what transformers gives to templates."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what the model wrote, for training; here its body is simply rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """`namespace()` without underscore names, which lead to Python's internals."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *rest = args
            for name in dict(*rest, **values):
                _check_name(name)
            Namespace.__init__(self, *rest, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": PlainNamespace,
    }
    return environment


class _Dict:
    """`dict(...)` in templates, without the class and its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold the name {name!r}")


def _raise_exception(message: Any) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
