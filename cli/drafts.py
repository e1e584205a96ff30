"""Opens the drafts that `oxidize export` is given, names them and describes them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from oxidize.export.build import ExportPlan
    from oxidize.export.bundle import AnyDraft
    from oxidize.export.drafts.base import DraftCheckpoint
    from oxidize.export.drafts.recognise import DraftWishes
    from oxidize.export.source import Checkpoint

    OpenDraft = Callable[[str], Checkpoint | DraftCheckpoint]


def wishes_of(options: dict[str, Any]) -> "DraftWishes":
    """What the options say of how drafts are read."""
    from oxidize.export.drafts.recognise import DraftWishes

    return DraftWishes(options["tap_convention"], options["force_dflash"])


def draft_sources(drafts: tuple[str, ...], open_draft: "OpenDraft", plan: "ExportPlan") -> "list[AnyDraft]":
    """Open the drafts, bundles as they are and all others by `open_draft`, to be written as the plan says."""
    from oxidize.export.bundle import DraftSource
    from oxidize.export.drafts.base import DraftCheckpoint
    from oxidize.export.drafts.write import NeuralSource
    from oxidize.export.nested import is_bundle, open_bundle_draft

    sources: list[AnyDraft] = []
    for name, draft in zip(draft_names(drafts), drafts, strict=True):
        if is_bundle(Path(draft)):
            sources.append(open_bundle_draft(name, Path(draft)))
            continue
        opened = open_draft(draft)
        if isinstance(opened, DraftCheckpoint):
            if opened.mismatch is not None:
                click.echo(f"warning: {draft} was {opened.mismatch}; going on", err=True)
            sources.append(NeuralSource("mtp" if opened.config.kind == "mtp" else name, opened, plan))
        else:
            sources.append(DraftSource(name, opened, plan))
    return sources


def describe_draft(source: "AnyDraft") -> str:
    """One line: what kind of draft it is and what it reads."""
    from oxidize.export.bundle import DraftSource
    from oxidize.export.nested import BundleSource

    if isinstance(source, BundleSource):
        manifest = source.manifest
        return f"draft {source.name}: a model, {manifest.model.layers} layers, {manifest.precision} as it is"
    if isinstance(source, DraftSource):
        return f"draft {source.name}: a model, {source.checkpoint.config.layers} layers"
    config = source.draft.config
    reads = f"taps {', '.join(map(str, config.taps))}" if config.taps else "the final hidden states"
    parts = f"{config.model.layers} layers" if config.heads is None else f"{config.heads.count} heads"
    family = " (DFlash 2)" if config.paths is not None else " (DSpark)" if config.markov is not None else ""
    return f"draft {source.name}: {config.kind}{family}, {parts}, reads {reads} ({config.tap_convention})"


def draft_names(sources: tuple[str, ...]) -> list[str]:
    """The last part of each path or hub id, without .gguf; those that would be equal have the part before in front."""
    places = [Path(source).resolve() if Path(source).exists() else Path(source) for source in sources]
    names = [place.name.removesuffix(".gguf") for place in places]
    twins = [{other for other, same in zip(places, names, strict=True) if same == name} for name in names]
    return [
        f"{place.parent.name}-{name}" if len(same) > 1 and place.parent.name else name
        for place, name, same in zip(places, names, twins, strict=True)
    ]
