"""`oxidize run`: one prompt in, one answer out."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import cache_folder, provider_settings, runtime_options

if TYPE_CHECKING:
    from oxidize.runtime.engine import Delta, Engine

DEFAULT_DRAFT_TOKENS = 15


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt_argument", metavar="[PROMPT|-]", required=False)
@click.option("--prompt", help="The prompt, if not given as an argument or on stdin (-).")
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Wrap the prompt in the chat template (default when it has one).",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Longest answer, in tokens.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens that make up this much.")
@click.option("--min-p", type=float, default=0.0, help="Drop tokens less likely than this share of the likeliest.")
@click.option("--seed", type=int, default=0, show_default=True, help="Names the sampled text.")
@click.option("--stop", "stops", multiple=True, help="End the answer before this text; may be repeated.")
@click.option(
    "--draft-model", default="auto", show_default=True, help="auto, ngram, none, a draft's name, or a bundle."
)
@click.option(
    "--draft-tokens",
    default="auto",
    show_default=True,
    help="At most this many draft tokens a round, or auto.",
)
@click.option("--strict", is_flag=True, help="Keep only the target's own tokens: same seed, same text, with any draft.")
@click.option("--exact", is_flag=True, help="Passes of two rows or more only: bitwise the same with any draft and k.")
@click.option("--no-spec", is_flag=True, help="Decode plainly, one token at a time.")
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line with text, tokens and statistics.")
def command(bundle: Path, prompt_argument: str | None, prompt: str | None, as_json: bool, **options: Any) -> None:
    """Answer PROMPT from BUNDLE. The text goes to stdout, one line of statistics to stderr."""
    from oxidize.runtime.engine import Engine

    text = _read_prompt(prompt_argument, prompt)
    config, params = _config(options), _params(options)
    engine = Engine.open(bundle, _engine_options(options))
    tokens = _encode(engine, text, options["chat"])
    with _graceful_interrupt() as interrupt:
        deltas = _until(engine.stream(tokens, config, params, options["stops"]), interrupt)
        answer = _collect(deltas) if as_json else _print(deltas)
    if as_json:
        click.echo(json.dumps({**answer, "stats": engine.stats.as_dict()}, ensure_ascii=False))
    else:
        click.echo(engine.stats.line(), err=True)


def _read_prompt(argument: str | None, option: str | None) -> str:
    from oxidize.runtime.errors import UsageError

    if argument is not None and option is not None:
        raise UsageError("the prompt was given twice, as an argument and with --prompt; give it once")
    text = option if option is not None else argument
    if text is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no prompt: give one as an argument, with --prompt, or on stdin with -")
    if text is None or (text == "-" and option is None):
        text = _read_stdin()
    if not text:
        raise UsageError("the prompt is empty; give at least one character")
    return text


def _read_stdin() -> str:
    from oxidize.runtime.errors import UsageError

    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv") from None


def _config(options: dict[str, Any]) -> Any:
    from oxidize.runtime.decoder import SpeculativeConfig

    return SpeculativeConfig(
        draft_tokens_per_step=0 if options["no_spec"] else _draft_tokens(options["draft_tokens"]),
        max_new_tokens=options["max_tokens"],
        strict_mode=options["strict"],
    )


def _draft_tokens(value: str) -> int:
    from oxidize.runtime.errors import UsageError

    if value == "auto":
        return DEFAULT_DRAFT_TOKENS
    if not (value.isdecimal() and len(value) < 10):
        raise UsageError(f"--draft-tokens must be auto or a number from 0 on, not {value!r}")
    return int(value)


def _params(options: dict[str, Any]) -> Any:
    from oxidize.runtime.sampling import SamplingParams

    return SamplingParams(options["temperature"], options["top_k"], options["top_p"], options["min_p"], options["seed"])


def _engine_options(options: dict[str, Any]) -> Any:
    from oxidize.runtime.engine import EngineOptions
    from oxidize.runtime.session import RuntimeOptions

    settings = provider_settings(options["provider_options"])
    runtime = RuntimeOptions(options["provider"], options["threads"], options["spin"], 0, settings)
    draft = "none" if options["no_spec"] else options["draft_model"]
    return EngineOptions(runtime, draft, options["exact"], cache_folder())


def _encode(engine: "Engine", text: str, chat: bool | None) -> list[int]:
    if chat or (chat is None and engine.has_template):
        return engine.encode_chat([{"role": "user", "content": text}])
    return engine.encode(text)


@dataclass(slots=True)
class _Interrupt:
    """What Ctrl-C means: stop before the answer has begun, then end it cleanly, the second time stop."""

    begun: bool = False
    asked: bool = False

    def handle(self, *_: object) -> None:
        """The handler of SIGINT."""
        if self.asked or not self.begun:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def _graceful_interrupt() -> Iterator[_Interrupt]:
    interrupt = _Interrupt()
    previous = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def _until(deltas: "Iterator[Delta]", interrupt: _Interrupt) -> "Iterator[Delta]":
    for delta in deltas:
        interrupt.begun = True
        yield delta
        if interrupt.asked:
            return


def _print(deltas: "Iterator[Delta]") -> dict[str, Any]:
    for delta in deltas:
        click.echo(delta.text, nl=False)
    click.echo()
    return {}


def _collect(deltas: "Iterator[Delta]") -> dict[str, Any]:
    text: list[str] = []
    tokens: list[int] = []
    reason = None
    for delta in deltas:
        text.append(delta.text)
        tokens.extend(delta.tokens)
        reason = delta.finish_reason
    return {"text": "".join(text), "token_ids": tokens, "finish_reason": reason or "interrupt"}
