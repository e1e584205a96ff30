"""`oxidize run`: one prompt in, one answer out."""

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .generation import generation_options, request_of
from .options import cache_folder, runtime_of, runtime_options

if TYPE_CHECKING:
    from oxidize.runtime.answer import Delta
    from oxidize.runtime.engine import Engine
    from oxidize.runtime.logprobs import TokenLogprob
    from oxidize.runtime.stats import SpeculativeStats

_COLOURS = {"accepted": "green", "corrected": "red", "bonus": "cyan"}
_LEAST_LOGPROB = -9999.0  # what OpenAI's API says for impossible; JSON has no infinity


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
@generation_options
@click.option(
    "--draft-model",
    "draft_models",
    multiple=True,
    default=("auto",),
    show_default=True,
    help="auto, ngram, none, a draft's name, or a bundle. Repeatable: the best one drafts.",
)
@click.option(
    "--draft-tokens",
    default="auto",
    show_default=True,
    help="At most this many draft tokens a round, or auto.",
)
@click.option("--strict", is_flag=True, help="Keep only the target's own tokens: same seed, same text, with any draft.")
@click.option("--exact", is_flag=True, help="Passes of two rows or more only: bitwise the same with any draft and k.")
@click.option("--force-dflash", is_flag=True, help="Draft also with a draft that was made for another target.")
@click.option("--no-mtp", is_flag=True, help="Do not draft with the bundle's own MTP head.")
@click.option("--no-spec", is_flag=True, help="Decode plainly, one token at a time.")
@runtime_options
@click.option("--show-drafts", is_flag=True, help="Colour accepted, corrected and bonus tokens, on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line with text, tokens and statistics.")
def command(
    bundle: Path, prompt_argument: str | None, prompt: str | None, as_json: bool, show_drafts: bool, **options: Any
) -> None:
    """Answer PROMPT from BUNDLE. The text goes to stdout, one line of statistics to stderr."""
    from oxidize.runtime.engine import Engine

    if show_drafts and as_json:
        raise click.UsageError("--show-drafts colours text and --json prints none; give one of them")
    text = _read_prompt(prompt_argument, prompt)
    request = request_of(options)
    engine = Engine.open(bundle, _engine_options(options))
    misfits = _misfits(engine, options)
    tokens = _encode(engine, text, options["chat"])
    with _graceful_interrupt() as interrupt:
        deltas = _until(engine.stream(tokens, request), interrupt)
        if as_json:
            answers = [_collect(engine, group, misfits) for _, group in groupby(deltas, _choice)]
            choices = [{"index": index, **answer} for index, answer in enumerate(answers)]
            click.echo(json.dumps({"choices": choices} if request.choices > 1 else answers[0], ensure_ascii=False))
        else:
            for _, group in groupby(deltas, _choice):
                _print(engine, group, misfits, show_drafts and _colours())


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


def _engine_options(options: dict[str, Any]) -> Any:
    from oxidize.runtime.engine import EngineOptions

    runtime = runtime_of(options)
    drafts = ("none",) if options["no_spec"] else options["draft_models"]
    mtp, force = not options["no_mtp"], options["force_dflash"]
    return EngineOptions(runtime, drafts, options["exact"], cache_folder(), mtp, force)


def _misfits(engine: "Engine", options: dict[str, Any]) -> dict[str, str]:
    """By name, for what other target drafts that may be used were made; a note on those that "auto" leaves out."""
    from oxidize.runtime.drafts import mismatch

    found = {draft.name: reason for draft in engine.bundle.manifest.drafts if (reason := mismatch(draft))}
    opened = {drafter.name for drafter in engine.decoder.drafters}
    if not options["force_dflash"] and "auto" in options["draft_models"] and not options["no_spec"]:
        for name, reason in found.items():
            click.echo(f"draft {name} was {reason}: left out; --force-dflash uses it", err=True)
    return {name: reason for name, reason in found.items() if name in opened}


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


def _choice(delta: "Delta") -> int:
    return delta.choice


def _print(engine: "Engine", deltas: "Iterable[Delta]", misfits: dict[str, str], coloured: bool) -> None:
    stats = engine.stats
    for delta in deltas:
        stats = engine.stats  # complete when the deltas are over
        click.echo(_coloured(delta) if coloured else delta.text, nl=False)
    click.echo()
    click.echo(stats.line(), err=True)
    _report(stats, misfits)


def _report(stats: "SpeculativeStats", misfits: dict[str, str]) -> None:
    """How drafts that were made for another target fared at first: near zero says they are of no use."""
    for name, early in _early(stats, misfits).items():
        fared = (
            f"{early['accepted_draft_tokens']} of {early['draft_tokens']} draft tokens of its first {early['rounds']} "
            "rounds were kept"
        )
        said = fared if early["rounds"] else "it was not used in this answer"
        click.echo(f"draft {name} was {early['reason']}: {said}", err=True)


def _early(stats: "SpeculativeStats", misfits: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By name, the reason and the counts of the first rounds, all 0 for a draft that was not used."""
    from oxidize.runtime.stats import EARLY_ROUNDS, SourceStats

    found = {name: stats.by_drafter.get(name, SourceStats()) for name in misfits}
    return {
        name: {
            "reason": misfits[name],
            "rounds": min(counts.rounds, EARLY_ROUNDS),
            "draft_tokens": counts.early_draft_tokens,
            "accepted_draft_tokens": counts.early_accepted,
        }
        for name, counts in found.items()
    }


def _colours() -> bool:
    """Whether stdout is a terminal whose user has not said no (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _coloured(delta: "Delta") -> str:
    return "".join(click.style(span.text, fg=_COLOURS.get(span.kind)) for span in delta.spans)


def _collect(engine: "Engine", deltas: "Iterable[Delta]", misfits: dict[str, str]) -> dict[str, Any]:
    text: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    reason, stats = None, engine.stats
    for delta in deltas:
        text.append(delta.text)
        tokens.extend(delta.tokens)
        logprobs.extend(delta.logprobs or ())
        reason, stats = delta.finish_reason, engine.stats
    _report(stats, misfits)
    answer = {"text": "".join(text), "token_ids": tokens, "finish_reason": reason or "interrupt"}
    if logprobs:
        answer["logprobs"] = [_logprob(engine, entry) for entry in logprobs]
    if misfits:
        answer["mismatch"] = _early(stats, misfits)
    return {**answer, "stats": stats.as_dict()}


def _logprob(engine: "Engine", entry: "TokenLogprob") -> dict[str, Any]:
    top = [_chance(engine, token, logprob) for token, logprob in entry.top]
    return {**_chance(engine, entry.token, entry.logprob), "top_logprobs": top}


def _chance(engine: "Engine", token: int, logprob: float) -> dict[str, Any]:
    text = engine.tokenizer.token_bytes(token).decode("utf-8", "replace")
    return {"id": token, "token": text, "logprob": max(logprob, _LEAST_LOGPROB)}
