"""What `oxidize export` refuses of its arguments before any weights are read, and which of them had no effect."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oxidize.runtime.errors import UsageError

if TYPE_CHECKING:
    from oxidize.export.bundle import AnyDraft


def check_arguments(source: str, out: Path | None, drafts: Sequence[str]) -> None:
    """Refuse empty names, a draft given twice, and a new bundle inside one that is read."""
    from oxidize.export.nested import is_bundle

    if not source:
        raise UsageError("SOURCE is an empty name; give a folder, a .gguf file, a hub id or a bundle")
    if "" in drafts:
        raise UsageError("--draft-model is an empty name; give a folder, a .gguf file, a hub id or a bundle")
    places = Counter(os.path.realpath(draft) if os.path.lexists(draft) else draft for draft in drafts)
    for place, count in places.items():
        if count > 1:
            raise UsageError(f"the draft {place} is given twice; name each draft once")
    if out is None:
        return
    for bundle in filter(is_bundle, map(Path, (source, *drafts))):
        if Path(os.path.realpath(bundle)) in Path(os.path.realpath(out)).parents:
            raise UsageError(f"{out} lies inside the bundle {bundle}, which is read; choose another -o")


def no_place(source: str) -> click.UsageError:
    """The error where a checkpoint is to be exported nowhere."""
    problem = "is no bundle" if os.path.lexists(source) else "does not exist here; check the path"
    message = f"{source} {problem}, and to export a checkpoint -o / --out is required, the bundle folder to write"
    return click.UsageError(message, click.get_current_context())


def check_target(source: str, path: Path, out: Path | None) -> None:
    """Refuse a draft as the target. path: where the source lies."""
    from oxidize.export.drafts.recognise import draft_kind

    kind = draft_kind(path)
    if kind is not None:
        raise UsageError(
            f"{source} is {kind}, which needs its target: "
            f"oxidize export TARGET -o {out or 'BUNDLE'} --draft-model {source}"
        )


def warn_without_effect(options: dict[str, Any], sources: "Sequence[AnyDraft]") -> None:
    """A warning for each option on how drafts are read that concerns none of these."""
    from oxidize.export.drafts.write import NeuralSource

    kinds = {source.draft.config.kind for source in sources if isinstance(source, NeuralSource)}
    if options["tap_convention"] and "eagle3" not in kinds:
        click.echo("warning: --tap-convention has no effect: no EAGLE-3 draft is exported", err=True)
    if options["force_dflash"] and "dflash" not in kinds:
        click.echo("warning: --force-dflash has no effect: no DFlash draft is exported", err=True)
