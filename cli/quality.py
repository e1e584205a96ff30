"""The perplexity of a fresh bundle beside its source's, both on the text that ships with the exporter."""

import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxidize.export.build import ExportPlan
    from oxidize.export.source import Checkpoint
    from oxidize.runtime.quality import Perplexity

_REFERENCE_LIMIT = 8e9  # bytes of float32 weights up to which measuring the source is worth its time


def describe_quality(checkpoint: "Checkpoint", plan: "ExportPlan", out: Path) -> str:
    """One line about the bundle in `out`; says why where something could not be measured."""
    from oxidize.runtime.errors import OxidizeError

    try:
        ours = _measure(out)
    except OxidizeError as error:
        return f"perplexity not measured: {error}"
    found = f"perplexity {ours.value:.3f}"
    if plan.precision == "fp32":
        return f"{found} over {ours.tokens} tokens (float32: the source's own)"
    try:
        source = _measure_source(checkpoint, plan, out.absolute().parent)
    except OxidizeError as error:
        return f"{found} over {ours.tokens} tokens; the source's was not measured: {error}"
    loss = 100 * (ours.value / source.value - 1)
    return f"{found}, source {source.value:.3f} ({loss:+.1f} %), over {ours.tokens} tokens"


def _measure_source(checkpoint: "Checkpoint", plan: "ExportPlan", near: Path) -> "Perplexity":
    """Of the checkpoint in float32, through a bundle that exists only meanwhile, in the folder `near`."""
    from oxidize.export.build import ExportPlan
    from oxidize.export.bundle import estimate_bytes, export_bundle
    from oxidize.runtime.errors import OxidizeError

    reference = ExportPlan("fp32", max_positions=plan.positions(checkpoint.config))
    size = estimate_bytes(checkpoint.config, reference)
    if size > _REFERENCE_LIMIT:
        raise OxidizeError(f"in float32 it takes {size / 1e9:.0f} GB")
    with tempfile.TemporaryDirectory(prefix=".oxidize-", dir=near) as folder:
        export_bundle(checkpoint, reference, Path(folder) / "reference")
        return _measure(Path(folder) / "reference")


def _measure(bundle: Path) -> "Perplexity":
    from oxidize.runtime.bundle import open_bundle
    from oxidize.runtime.quality import measure_perplexity
    from oxidize.runtime.session import RuntimeOptions
    from oxidize.runtime.target import Target
    from oxidize.runtime.text import Tokenizer

    opened = open_bundle(bundle)
    text = resources.files("oxidize.export").joinpath("data", "perplexity.txt").read_text(encoding="utf-8")
    target = Target(opened, RuntimeOptions(spin="on"))
    tokens = Tokenizer.load(bundle, opened.manifest.tokenizer).encode(text)[: target.context]
    return measure_perplexity(target, tokens)
