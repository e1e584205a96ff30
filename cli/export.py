"""`oxidize export`: a checkpoint in, a bundle out."""

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .drafts import describe_draft, draft_sources, wishes_of
from .export_checks import check_arguments, check_target, no_place, warn_without_effect

if TYPE_CHECKING:
    from oxidize.export.build import ExportPlan, Progress
    from oxidize.export.extensible import OpenedBundle
    from oxidize.export.source import Checkpoint

_WRITING = ("precision", "profiles", "device", "head_bits", "tap_convention", "force_dflash", "no_mtp")
_SOURCE = ("revision", "exporter")  # how a checkpoint is found and read
_TARGETS = ("profiles", "device", *_SOURCE)  # what an option may say of a target but not of a draft


@click.command()
@click.argument("source")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="The bundle folder to write.  [required unless SOURCE is a bundle]",
)
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
@click.option(
    "--draft-model", "drafts", multiple=True, metavar="SRC", help="A draft to put into the bundle; may be repeated."
)
@click.option(
    "--tap-convention",
    type=click.Choice(["input", "output"]),
    help="What an EAGLE-3 draft's layer ids count; else as its format does.",
)
@click.option("--force-dflash", is_flag=True, help="Go on with a DFlash draft made for another revision or depth.")
@click.option("--no-mtp", is_flag=True, help="Leave the checkpoint's own MTP head out.")
@click.option(
    "--exporter",
    type=click.Choice(["optimum"]),
    help="Let optimum write the graph, of architectures that have no builder here.",
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--offline", is_flag=True, help="Never ask the hub; use its local cache.")
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@click.option("--no-eval", is_flag=True, help="Skip the perplexity of bundle and source.")
def command(source: str, out: Path | None, drafts: tuple[str, ...], **options: Any) -> None:
    """Turn SOURCE (a Hugging Face folder, GGUF file, hub id, onnxruntime-genai or optimum folder) into a bundle.

    If SOURCE is a bundle, --draft-model adds drafts to it, or with -o to a new one that shares its files, and
    --precision is the bundle's unless given.
    """
    from oxidize.export.bundle import check_free
    from oxidize.export.foreign import is_onnx_folder
    from oxidize.export.nested import is_bundle

    check_arguments(source, out, drafts)
    place = Path(source)
    if is_bundle(place):
        _extend(place, out, drafts, options)
        return
    if place.exists():
        check_target(source, place, out)
    if out is None:
        raise no_place(source)
    check_free(out, options["force"])
    if is_onnx_folder(place):
        _refuse_options(
            (*_WRITING, *_SOURCE),
            f"{source}: an ONNX folder is wrapped as it is, without taps; leave the option out, or export the original "
            "checkpoint",
        )
        _wrap(place, out, drafts, options)
        return
    if options["exporter"]:
        _export_by_optimum(source, out, drafts, options)
        return
    _export(source, out, drafts, options)


def _export(source: str, out: Path, drafts: tuple[str, ...], options: dict[str, Any]) -> None:
    """A checkpoint whose graphs are written here."""
    from oxidize.export.bundle import check_drafts, export_bundle
    from oxidize.export.drafts.mtp import split_mtp
    from oxidize.export.drafts.recognise import open_draft
    from oxidize.export.drafts.write import NeuralSource
    from oxidize.export.source import locate, open_source

    from .quality import describe_quality

    if not Path(source).exists():
        check_target(source, locate(source, options["offline"], options["revision"])[0], out)
    opened = open_source(source, options["offline"], options["revision"])
    checkpoint, head = split_mtp(opened, not options["no_mtp"])
    plan = _plan(options)
    plan.check(checkpoint.config)
    config, wishes = checkpoint.config, wishes_of(options)
    sources = draft_sources(drafts, lambda draft: open_draft(draft, config, wishes, options["offline"]), plan)
    if head is not None:
        sources.append(NeuralSource("mtp", head, plan))
    check_drafts(sources)
    _announce(checkpoint, plan, out)
    for draft in sources:
        _say(describe_draft(draft))
    warn_without_effect(options, sources)
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
    """A folder of onnxruntime-genai or optimum instead of a checkpoint: its graph is cut, not written anew."""
    from oxidize.export.bundle import check_drafts
    from oxidize.export.foreign import open_model_draft, open_onnx_folder, wrap_onnx_folder

    opened = open_onnx_folder(folder, options["context"])
    config, plan = opened.config, _plan(options)
    models = draft_sources(drafts, lambda draft: open_model_draft(draft, options["offline"]), plan)
    context = min(options["context"] or opened.cuts.positions, opened.cuts.positions)
    check_drafts(models)
    _say(
        f"{opened.name}: {config.architecture}, {config.layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, context {context}"
    )
    _say(f"{opened.precision} as it is, profile ort, one slot, no taps -> {out}")
    for draft in models:
        _say(describe_draft(draft))
    if options["dry_run"]:
        return
    with _progress() as progress:
        manifest = wrap_onnx_folder(opened, out, options["force"], context, models, progress)
    _say(f"wrote {out}: {sum(entry.size for entry in manifest.files.values()) / 1e6:.0f} MB")
    _say(f"next: oxidize run {out} 'Hello'")


def _export_by_optimum(source: str, out: Path, drafts: tuple[str, ...], options: dict[str, Any]) -> None:
    """A checkpoint whose graph optimum writes; what it writes is wrapped."""
    from oxidize.export.optimum import optimum_folder

    _refuse_options(_WRITING, "--exporter optimum, which writes float32 without taps; leave the option out")
    with optimum_folder(source, out, options["offline"], options["revision"]) as folder:
        _wrap(folder, out, drafts, options)


def _extend(folder: Path, out: Path | None, drafts: tuple[str, ...], options: dict[str, Any]) -> None:
    """A bundle instead of a checkpoint: drafts are added to it, or to a new one that shares its files."""
    from oxidize.export.extend import check_out, extend_bundle
    from oxidize.export.extensible import open_bundle
    from oxidize.runtime.errors import UsageError

    _refuse_options(_TARGETS, f"{folder}: a bundle's graphs are written already; leave the option out")
    if not drafts:
        raise UsageError(f"{folder} is a bundle already; add drafts to it with --draft-model SRC")
    bundle, wishes = open_bundle(folder), wishes_of(options)
    check_out(bundle, out, options["force"])
    plan = bundle.plan(
        options["precision"] if _is_given("precision") else None, int(options["head_bits"]), options["context"]
    )
    mtp = not options["no_mtp"]
    sources = draft_sources(drafts, lambda draft: bundle.open_draft(draft, wishes, options["offline"], mtp), plan)
    bundle.check(sources)
    _announce_bundle(bundle, out or folder)
    for draft in sources:
        _say(describe_draft(draft))
    warn_without_effect(options, sources)
    if options["dry_run"]:
        return
    start = time.perf_counter()
    with _progress() as progress:
        manifest = extend_bundle(bundle, sources, out, options["force"], progress)
    added = tuple(f"{draft.folder}/" for draft in manifest.drafts[-len(sources) :])
    size = sum(entry.size for name, entry in manifest.files.items() if name.startswith(added))
    _say(f"added {len(added)} to {out or folder}: {size / 1e6:.0f} MB in {time.perf_counter() - start:.1f} s")
    _say(f"next: oxidize run {out or folder} 'Hello'")


def _announce_bundle(bundle: "OpenedBundle", out: Path) -> None:
    manifest = bundle.manifest
    facts, names = manifest.model, [draft.name for draft in manifest.drafts]
    _say(
        f"{manifest.provenance.source}: {facts.architecture}, {facts.layers} layers, hidden {facts.hidden_size}, "
        f"vocabulary {facts.vocab_size}, context {facts.max_positions}"
    )
    _say(f"{manifest.precision}, drafts {', '.join(names) or 'none'} -> {out}")


def _refuse_options(names: Collection[str], reason: str) -> None:
    """Refuse these options if they were given."""
    from oxidize.runtime.errors import UsageError

    for option in click.get_current_context().command.params:
        if option.name in names and _is_given(option.name):
            raise UsageError(f"{option.opts[0]} does not apply to {reason}")


def _is_given(name: str) -> bool:
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


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
