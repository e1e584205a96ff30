"""`oxidize verify`: whether drafts change the text on this machine."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import cache_folder, runtime_of, runtime_options

if TYPE_CHECKING:
    from oxidize.runtime.bundle import Bundle
    from oxidize.runtime.session import RuntimeOptions
    from oxidize.runtime.target import Target
    from oxidize.runtime.verify import Check, Report

PROMPTS = (
    "What is the capital of Portugal?",
    "Count from one to thirty, one number a line.",
    "Write a Python function that adds up the even numbers of a list.",
    "Explain to a child why leaves turn yellow in autumn.",
    "Repeat this line four times: the grey cat sleeps on the warm stone wall.",
    "Give me three names for a bakery by the sea.",
    "Translate to Spanish: where is the railway station?",
    "What is 12 times 34? Think it through.",
    "Write a JSON object with a title, an author and a year for a novel of your choice.",
    "Rename a to price and b to tax:\na = 10\nb = a * 0.2\nprint(a + b)",
    "Name the months that have thirty days.",
    "Tell the story of a lighthouse keeper in five sentences.",
    "Write an SQL query for the ten newest customers.",
    "Which is heavier, a kilogram of iron or a kilogram of wool? Why?",
    "Make a shopping list for pancakes.",
    "Correct the spelling: yesturday we wnet to the libary.",
    "Write a short letter that asks a neighbour to water the plants.",
    "Describe how a bicycle pump works.",
    "List the planets from the sun outwards, with one fact each.",
    "Go on: red green blue red green blue red green",
)
DEFAULT_PROMPTS = 6


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Length of each text, in tokens.")
@click.option(
    "--prompts",
    "count",
    type=click.IntRange(1),
    help=f"Use the first so many prompts.  [default: {DEFAULT_PROMPTS} of {len(PROMPTS)}, or the whole file]",
)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Prompts of your own, one a line.")
@click.option(
    "--draft-model",
    "drafts",
    multiple=True,
    default=("auto",),
    show_default=True,
    help="auto, ngram, none, a draft's name, or a bundle; may be repeated.",
)
@click.option("--full", is_flag=True, help="Every draft length with every prompt, not one of them in turn.")
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON line.")
def command(bundle: Path, as_json: bool, **options: Any) -> None:
    """Compare plain and speculative texts of BUNDLE, and measure the rounding between them.

    Exits 3 if a text parts where rounding cannot explain it, or at all in exact mode.
    """
    from oxidize.runtime.bundle import check_hashes, open_bundle
    from oxidize.runtime.errors import VerificationError

    opened = open_bundle(bundle)
    check_hashes(opened, cache_folder())
    report = _measure(opened, options)
    click.echo(json.dumps(report.as_dict()) if as_json else "\n".join(table(report)))
    if not report.passed:
        raise VerificationError(
            f"{bundle} does not keep its promise on provider {report.provider}: {'; '.join(report.verdict())}; "
            "report it with the output of --json"
        )


def _measure(bundle: "Bundle", options: dict[str, Any]) -> "Report":
    from oxidize.runtime.drafts import open_drafters
    from oxidize.runtime.verify import VerifyPlan, verify

    prompts = _encode(bundle, _read_prompts(options["prompt_file"], options["count"]))
    runtime = runtime_of(options)
    lender = _lender(bundle, options["drafts"], runtime)
    drafters = open_drafters(bundle, options["drafts"], runtime, cache_folder(), lender, force=True)
    plan = VerifyPlan(options["tokens"], every_k=options["full"])
    try:
        return verify(bundle, runtime, prompts, drafters, plan, _show_progress)
    finally:
        _show_progress("")


def _lender(bundle: "Bundle", names: Sequence[str], runtime: "RuntimeOptions") -> "Target | None":
    """One target whose embed and head all drafts that read rows share; None where none of them is asked for."""
    from oxidize.runtime.target import Target

    entries = [draft for draft in bundle.manifest.drafts if draft.neural is not None]
    return Target(bundle, runtime) if any({"auto", draft.name} & {*names} for draft in entries) else None


def _read_prompts(path: Path | None, count: int | None) -> list[str]:
    from oxidize.runtime.errors import UsageError

    if path is None:
        if count is not None and count > len(PROMPTS):
            raise UsageError(f"there are {len(PROMPTS)} prompts built in, not {count}; give more with --prompt-file")
        return list(PROMPTS[: count or DEFAULT_PROMPTS])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    prompts = [line for line in lines if line.strip()][:count]
    if not prompts:
        raise UsageError(f"{path} holds no prompt; write one a line")
    return prompts


def _encode(bundle: "Bundle", prompts: list[str]) -> list[list[int]]:
    """As `oxidize run` reads them: in the chat template, if there is one."""
    from oxidize.runtime.chat import ChatTemplate
    from oxidize.runtime.text import Tokenizer

    entry = bundle.manifest.tokenizer
    tokenizer = Tokenizer.load(bundle.folder, entry)
    if entry.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    template = ChatTemplate.load(bundle.folder, entry)
    texts = [
        template.render([{"role": "user", "content": prompt}], add_generation_prompt=True, tools=None)
        for prompt in prompts
    ]
    return [tokenizer.encode(text, add_special=False) for text in texts]


def _show_progress(text: str) -> None:
    """One line on a terminal that overwrites itself; nothing elsewhere."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def table(report: "Report") -> list[str]:
    """For people: the noise, the checks, every parting, and the verdict."""
    from oxidize.runtime.rounding import describe

    lines = [f"{report.provider}, {report.precision}, {report.prompts} prompts of {report.plan.tokens} tokens", ""]
    lines.append(f"{'logits against passes of 2 rows':<34}{'largest':>10}{'rms':>10}{'margin':>10}{'--exact':>10}")
    floored = [f"{each.largest:.2g}" for each in report.floored] or ["-"] * len(report.noise)
    for free, exact in zip(report.noise, floored, strict=True):
        lines.append(
            f"{describe(free.widths):<34}{free.largest:>10.2g}{free.rms:>10.2g}{free.margin:>10.2g}{exact:>10}"
        )
    lines += ["", f"{'texts against plain decoding':<34}{'texts':>8}{'parted':>8}{'not allowed':>13}"]
    for check in report.checks:
        lines.append(f"{check.name:<34}{check.texts:>8}{len(check.partings):>8}{len(check.broken):>13}")
    lines += [f"not tested: {reason}" for reason in report.skipped]
    lines += [line for check in report.checks for line in _parting_lines(check)]
    return [*lines, "", *report.verdict()]


def _parting_lines(check: "Check") -> list[str]:
    return [
        f"  {check.name}: prompt {each.prompt + 1}, {each.drafter}, k={each.k}, token {each.position}: "
        f"{each.other} for {each.plain}, gap {each.gap:.3g}, noise {each.noise:.3g}"
        for each in check.partings
    ]
