"""`oxidize export`: a checkpoint in, a bundle out."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from oxidize.export.build import ExportPlan, Progress
    from oxidize.export.bundle import AnyDraft
    from oxidize.export.source import Checkpoint

_WRITING = ("precision", "profiles", "device", "head_bits", "tap_convention", "force_dflash", "no_mtp", "revision")


@click.command()
@click.argument("source")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The bundle folder to write.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int4"]),
    default="int4",
    show_default=True,
    help="How the weights are stored.",
)
@click.option(
    "--profile",
    "profiles",
    type=click.Choice(["ort", "std"]),
    multiple=True,
    help="ort (default), std, or both.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="int4 for which kernels.",
)
@click.option(
    "--head-bits",
    type=click.Choice(["4", "8"]),
    default="8",
    show_default=True,
    help="Bits of embedding and head at int4.",
)
@click.option("--context", type=click.IntRange(1), help="Longest context to allow, if less than the model's.")
@click.option("--draft-model", "drafts", multiple=True, metavar="SRC", help="A draft model to put into the bundle.")
@click.option(
    "--tap-convention",
    type=click.Choice(["input", "output"]),
    help="What an EAGLE-3 draft's layer ids count; else as its format does.",
)
@click.option("--force-dflash", is_flag=True, help="Go on with a DFlash draft made for another revision or depth.")
@click.option("--no-mtp", is_flag=True, help="Leave the checkpoint's own MTP head out.")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--offline", is_flag=True, help="Never ask the hub; use its local cache.")
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@click.option("--no-eval", is_flag=True, help="Skip the perplexity of bundle and source.")
def command(source: str, out: Path, drafts: tuple[str, ...], **options: Any) -> None:
    """Turn SOURCE (a Hugging Face folder, a GGUF file, a hub id or an onnxruntime-genai folder) into a bundle."""
    from oxidize.export.bundle import check_drafts, check_free, export_bundle
    from oxidize.export.drafts.mtp import split_mtp
    from oxidize.export.drafts.write import NeuralSource
    from oxidize.export.foreign import is_onnx_folder
    from oxidize.export.source import open_source

    from .quality import describe_quality

    check_free(out, options["force"])
    if is_onnx_folder(Path(source)):
        _wrap(Path(source), out, drafts, options)
        return
    opened = open_source(source, options["offline"], options["revision"])
    checkpoint, head = split_mtp(opened, not options["no_mtp"])
    plan = _plan(options)
    plan.check(checkpoint.config)
    sources = _draft_sources(drafts, checkpoint, plan, options)
    if head is not None:
        sources.append(NeuralSource("mtp", head, plan))
    check_drafts(sources)
    _announce(checkpoint, plan, out)
    for draft in sources:
        _say(_describe_draft(draft))
    if options["dry_run"]:
        return
    start = time.perf_counter()
    with _progress() as progress:
        manifest = export_bundle(checkpoint, plan, out, sources, options["force"], progress)
    size = sum(entry.size for entry in manifest.files.values())
    _say(f"wrote {out}: {size / 1e6:.0f} MB in {time.perf_counter() - start:.1f} s")
    if not options["no_eval"]:
        _say(describe_quality(checkpoint, plan, out))
    _say(f"next: oxidize run {out} 'Hello'")


def _wrap(folder: Path, out: Path, drafts: tuple[str, ...], options: dict[str, Any]) -> None:
    """A folder of onnxruntime-genai instead of a checkpoint: its graph is cut, not written anew."""
    from oxidize.export.bundle import DraftSource, check_drafts
    from oxidize.export.foreign import open_model_draft, open_onnx_folder, wrap_onnx_folder

    _refuse_writing_options(folder)
    opened = open_onnx_folder(folder)
    config, plan = opened.config, _plan(options)
    models = [DraftSource(_draft_name(draft), open_model_draft(draft, options["offline"]), plan) for draft in drafts]
    context = min(options["context"] or opened.cuts.positions, opened.cuts.positions)
    check_drafts(models)
    _say(
        f"{opened.name}: {config.architecture}, {config.layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, context {context}"
    )
    _say(f"{opened.precision} as it is, profile ort, one slot, no taps -> {out}")
    for draft in models:
        _say(_describe_draft(draft))
    if options["dry_run"]:
        return
    with _progress() as progress:
        manifest = wrap_onnx_folder(opened, out, options["force"], context, models, progress)
    _say(f"wrote {out}: {sum(entry.size for entry in manifest.files.values()) / 1e6:.0f} MB")
    _say(f"next: oxidize run {out} 'Hello'")


def _refuse_writing_options(folder: Path) -> None:
    """Refuse options that say how graphs are written, or how drafts read them, if they were given."""
    from click.core import ParameterSource

    from oxidize.runtime.errors import UsageError

    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if name in _WRITING and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(
                f"{option.opts[0]} does not apply to {folder}: an ONNX folder is wrapped as it is, without taps; "
                "leave the option out, or export the original checkpoint"
            )


def _say(text: str) -> None:
    click.echo(text, err=True)


def _plan(options: dict[str, Any]) -> "ExportPlan":
    from oxidize.export.build import ExportPlan

    return ExportPlan(
        options["precision"],
        options["profiles"] or ("ort",),
        max_positions=options["context"],
        half_activations=options["device"] == "cuda" and options["precision"] == "int4",
        head_bits=int(options["head_bits"]),
    )


def _draft_sources(
    drafts: tuple[str, ...], target: "Checkpoint", plan: "ExportPlan", options: dict[str, Any]
) -> "list[AnyDraft]":
    from oxidize.export.bundle import DraftSource
    from oxidize.export.drafts.base import DraftCheckpoint
    from oxidize.export.drafts.recognise import DraftWishes, open_draft
    from oxidize.export.drafts.write import NeuralSource

    forced = (lambda reason: _say(f"warning: {reason}; going on")) if options["force_dflash"] else None
    wishes = DraftWishes(options["tap_convention"], forced)
    sources: list[AnyDraft] = []
    for draft in drafts:
        opened, name = open_draft(draft, target.config, wishes, options["offline"]), _draft_name(draft)
        neural = isinstance(opened, DraftCheckpoint)
        sources.append(NeuralSource(name, opened, plan) if neural else DraftSource(name, opened, plan))
    return sources


def _describe_draft(source: "AnyDraft") -> str:
    from oxidize.export.bundle import DraftSource

    if isinstance(source, DraftSource):
        return f"draft {source.name}: a model, {source.checkpoint.config.layers} layers"
    config = source.draft.config
    reads = f"taps {', '.join(map(str, config.taps))}" if config.taps else "the final hidden states"
    return f"draft {source.name}: {config.kind}, {config.model.layers} layers, reads {reads} ({config.tap_convention})"


def _draft_name(source: str) -> str:
    """The last part of a path or hub id, without .gguf."""
    name = Path(source).resolve().name if Path(source).exists() else source.rpartition("/")[2]
    return name.removesuffix(".gguf")


def _announce(checkpoint: "Checkpoint", plan: "ExportPlan", out: Path) -> None:
    from oxidize.export.bundle import estimate_bytes

    config = checkpoint.config
    _say(
        f"{checkpoint.name}: {config.architecture}, {config.layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, context {plan.positions(config)}"
    )
    size = estimate_bytes(config, plan) / 1e6
    _say(f"{plan.precision}, profile {' and '.join(plan.profiles)}, about {size:.0f} MB -> {out}")


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A bar on a terminal, a plain line every tenth elsewhere."""
    if sys.stderr.isatty():
        with _bar() as advance:
            yield advance
        return
    shown = [0]

    def report(_name: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > shown[0]:
            _say(f"weights {10 * tenth} %")
        shown[0] = tenth  # falls back when the next model begins

    yield report


@contextmanager
def _bar() -> "Iterator[Progress]":
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)

        def report(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name[-40:])

        yield report
