"""`oxidize export`: a checkpoint in, a bundle out."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from oxidize.export.build import ExportPlan, Progress
    from oxidize.export.source import Checkpoint

_REFERENCE_LIMIT = 8e9  # bytes of float32 weights up to which measuring the source is worth its time


@click.command()
@click.argument("source")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="The bundle folder to write."
)
@click.option("--precision", type=click.Choice(["fp32", "fp16", "int4"]), default="int4", show_default=True)
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
    "--head-bits", type=click.Choice(["4", "8"]), default=None, help="Bits of embedding and head at int4."
)
@click.option("--context", type=click.IntRange(1), help="Longest context to allow, if less than the model's.")
@click.option(
    "--draft-model", "drafts", multiple=True, metavar="SRC", help="A draft model to put into the bundle."
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--offline", is_flag=True, help="Never ask the hub; use its local cache.")
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@click.option("--no-eval", is_flag=True, help="Skip the perplexity of bundle and source.")
def command(source: str, out: Path, drafts: tuple[str, ...], **options: Any) -> None:
    """Turn SOURCE (a Hugging Face folder, a GGUF file or a hub id) into a bundle of ONNX graphs."""
    from oxidize.export.bundle import check_free, export_bundle
    from oxidize.export.source import open_source

    check_free(out, options["force"])
    checkpoint = open_source(source, options["offline"], options["revision"])
    plan = _plan(options)
    plan.check(checkpoint.config)
    sources = _draft_sources(drafts, plan, options["offline"])
    _announce(checkpoint, plan, out)
    if options["dry_run"]:
        return
    start = time.perf_counter()
    with _progress() as progress:
        manifest = export_bundle(checkpoint, plan, out, sources, options["force"], progress)
    size = sum(entry.size for entry in manifest.files.values())
    _say(f"wrote {out}: {size / 1e6:.0f} MB in {time.perf_counter() - start:.1f} s")
    if not options["no_eval"]:
        _report_quality(checkpoint, plan, out)
    _say(f"next: oxidize run {out} 'Hello'")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _plan(options: dict[str, Any]) -> "ExportPlan":
    from oxidize.export.build import ExportPlan

    extra = {"head_bits": int(options["head_bits"])} if options["head_bits"] else {}
    return ExportPlan(
        options["precision"],
        options["profiles"] or ("ort",),
        max_positions=options["context"],
        half_activations=options["device"] == "cuda" and options["precision"] == "int4",
        **extra,
    )


def _draft_sources(drafts: tuple[str, ...], plan: "ExportPlan", offline: bool) -> list[Any]:
    from oxidize.export.bundle import DraftSource
    from oxidize.export.source import open_source
    from oxidize.runtime.errors import UsageError

    sources = [DraftSource(Path(draft).stem, open_source(draft, offline), plan) for draft in drafts]
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UsageError(f"two drafts are called {max(names, key=names.count)!r}; rename one of their files")
    return sources


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
            shown[0] = tenth
            _say(f"weights {10 * tenth} %")

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


def _report_quality(checkpoint: "Checkpoint", plan: "ExportPlan", out: Path) -> None:
    """Print the bundle's perplexity beside the source's, both on the text that ships with the exporter."""
    from oxidize.export.bundle import estimate_bytes, export_bundle
    from oxidize.export.build import ExportPlan
    from oxidize.runtime.errors import ProviderError

    try:
        ours, count = _perplexity(out)
    except ProviderError as error:
        _say(f"perplexity not measured: {error}")
        return
    reference = ExportPlan("fp32", max_positions=plan.positions(checkpoint.config))
    if plan.precision == "fp32":
        _say(f"perplexity {ours:.3f} over {count} tokens (float32: the source's own)")
    elif estimate_bytes(checkpoint.config, reference) > _REFERENCE_LIMIT:
        _say(f"perplexity {ours:.3f} over {count} tokens (the source is too large to measure beside it)")
    else:
        with tempfile.TemporaryDirectory(prefix="oxidize-", dir=out.absolute().parent) as folder:
            export_bundle(checkpoint, reference, Path(folder) / "reference")
            source, _ = _perplexity(Path(folder) / "reference")
        loss = 100 * (ours / source - 1)
        _say(f"perplexity {ours:.3f}, source {source:.3f} ({loss:+.1f} %), over {count} tokens")


def _perplexity(bundle: Path) -> tuple[float, int]:
    from oxidize.runtime.bundle import open_bundle
    from oxidize.runtime.quality import measure_perplexity
    from oxidize.runtime.session import RuntimeOptions
    from oxidize.runtime.target import Target
    from oxidize.runtime.text import Tokenizer

    opened = open_bundle(bundle)
    text = resources.files("oxidize.export").joinpath("data", "perplexity.txt").read_text(encoding="utf-8")
    target = Target(opened, RuntimeOptions(spin="on"))
    tokens = Tokenizer.load(bundle, opened.manifest.tokenizer).encode(text)[: target.context]
    result = measure_perplexity(target, tokens)
    return result.value, result.tokens
