"""Options that say how an answer is generated, and the request they make. Shared by the commands that generate."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from oxidize.runtime.request import Request

DEFAULT_DRAFT_TOKENS = 15
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_FILE_HINT = "TEXT or @FILE"

_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "-n", "--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest answer, in tokens."
    ),
    click.option("--min-tokens", type=click.IntRange(0), default=0, help="No end token before so many tokens."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0: all."),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens that make up this much."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--seed", type=int, default=0, show_default=True, help="Names the sampled text."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, help="Above 1 makes tokens of the text so far less likely."
    ),
    click.option("--presence-penalty", type=float, default=0.0, help="Taken off tokens that the answer has, -2 to 2."),
    click.option("--frequency-penalty", type=float, default=0.0, help="The same, for every time it has them."),
    click.option(
        "--logit-bias", multiple=True, metavar="ID=VALUE", help="Added to a token's logit; -inf forbids it. Repeatable."
    ),
    click.option("--bad-word", "bad_words", multiple=True, help="Never write this text as its own tokens. Repeatable."),
    click.option("--stop", "stops", multiple=True, help="End the answer before this text; may be repeated."),
    click.option("--json-object", is_flag=True, help="Answer with a JSON object."),
    click.option("--json-schema", metavar=_FILE_HINT, help="Answer with JSON of this schema."),
    click.option("--regex", metavar=_FILE_HINT, help="Answer with a match of this regular expression."),
    click.option("--grammar", metavar=_FILE_HINT, help="Answer with a text of this Lark grammar."),
    click.option("--grammar-after", metavar="TEXT", help="The structured part begins after this, e.g. </think>."),
    click.option(
        "--logprobs", type=click.IntRange(0, 20), help="With --json: log probabilities, also of so many other tokens."
    ),
    click.option("--choices", type=click.IntRange(1, 128), default=1, help="So many answers, one after the other."),
)


def generation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How answers are generated."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def request_of(options: dict[str, Any]) -> "Request":
    """The request that the options of `generation_options` and the speculation options make."""
    from oxidize.runtime.logprobs import LogprobsParams
    from oxidize.runtime.processors import Controls
    from oxidize.runtime.request import Request
    from oxidize.runtime.sampling import SamplingParams

    logprobs = options["logprobs"]
    return Request(
        config=_config(options),
        params=SamplingParams(*(options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed"))),
        controls=Controls(
            *(options[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")),
            logit_bias=tuple(map(_bias, options["logit_bias"])),
            min_new_tokens=options["min_tokens"],
        ),
        bad_words=options["bad_words"],
        stops=options["stops"],
        grammar=_grammar(options),
        logprobs=None if logprobs is None else LogprobsParams(logprobs),
        choices=options["choices"],
    )


def _config(options: dict[str, Any]) -> Any:
    from oxidize.runtime.decoder import SpeculativeConfig

    drafted = 0 if options["no_spec"] else _draft_tokens(options["draft_tokens"])
    config = SpeculativeConfig(drafted, options["max_tokens"], strict_mode=options["strict"])
    return replace(config, min_acceptance_rate=0.0) if options["draft_tokens"] == "auto" else config  # costs decide


def _draft_tokens(value: str) -> int:
    from oxidize.runtime.decoder import MAX_DRAFT_TOKENS
    from oxidize.runtime.errors import UsageError

    if value == "auto":
        return DEFAULT_DRAFT_TOKENS
    if not (value.isdecimal() and len(value) < 10 and int(value) <= MAX_DRAFT_TOKENS):
        raise UsageError(f"--draft-tokens must be auto or a number from 0 to {MAX_DRAFT_TOKENS}, not {value!r}")
    return int(value)


def _bias(pair: str) -> tuple[int, float]:
    from oxidize.runtime.errors import UsageError

    token, _, value = pair.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UsageError(f"--logit-bias must be ID=VALUE, such as 42=-1.5, not {pair!r}") from None


def _grammar(options: dict[str, Any]) -> Any:
    from oxidize.runtime.errors import UsageError
    from oxidize.runtime.grammar import GrammarSpec

    given = {
        "json_object": "" if options["json_object"] else None,
        "json_schema": options["json_schema"],
        "regex": options["regex"],
        "lark": options["grammar"],
    }
    asked = {kind: text for kind, text in given.items() if text is not None}
    if len(asked) > 1:
        raise UsageError("give only one of --json-object, --json-schema, --regex and --grammar")
    if not asked and options["grammar_after"] is not None:
        raise UsageError("--grammar-after needs --json-object, --json-schema, --regex or --grammar")
    for kind, text in asked.items():
        return GrammarSpec(kind, _text(text), options["grammar_after"])
    return None


def _text(value: str) -> str:
    """The value itself, the file that "@FILE" names, or, for "@@TEXT", a value that begins with @."""
    from oxidize.runtime.errors import UsageError

    if not value.startswith("@") or value.startswith("@@"):
        return value[1:] if value.startswith("@") else value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {value[1:]}: {error}") from None
