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
    from oxidize.export.bundle import DraftSource
    from oxidize.export.source import Checkpoint


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
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--offline", is_flag=True, help="Never ask the hub; use its local cache.")
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@click.option("--no-eval", is_flag=True, help="Skip the perplexity of bundle and source.")
def command(source: str, out: Path, drafts: tuple[str, ...], **options: Any) -> None:
    """Turn SOURCE (a Hugging Face folder, a GGUF file or a hub id) into a bundle of ONNX graphs."""
    from oxidize.export.bundle import check_drafts, check_free, export_bundle
    from oxidize.export.source import open_source

    from .quality import describe_quality

    check_free(out, options["force"])
    checkpoint = open_source(source, options["offline"], options["revision"])
    plan = _plan(options)
    plan.check(checkpoint.config)
    sources = _draft_sources(drafts, plan, options["offline"])
    check_drafts(sources)
    _announce(checkpoint, plan, out)
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


def _draft_sources(drafts: tuple[str, ...], plan: "ExportPlan", offline: bool) -> "list[DraftSource]":
    from oxidize.export.bundle import DraftSource
    from oxidize.export.source import open_source

    return [DraftSource(_draft_name(draft), open_source(draft, offline), plan) for draft in drafts]


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
