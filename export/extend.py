"""Adds drafts to a bundle that exists: its weights stay as they are, its bodies are made to give the taps asked for."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from oxidize.runtime.contracts import BodyShape, body_contract
from oxidize.runtime.errors import UsageError
from oxidize.runtime.manifest import MANIFEST_NAME, GraphEntry, Manifest, load_manifest, parse_manifest

from .bundle import (
    DRAFTS_FOLDER,
    AnyDraft,
    check_free,
    check_space,
    estimate_draft,
    list_files,
    tapped,
    write_draft,
)
from .extensible import OpenedBundle
from .graph import join_as_output
from .nested import share, vocabulary_of
from .tensors import Progress
from .workspace import move_into_place, workspace


def extend_bundle(
    bundle: OpenedBundle,
    drafts: Sequence[AnyDraft],
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Add drafts to the bundle itself, or leave it alone and write the bundle `out`, which shares its files.

    Whenever this fails or is interrupted, the bundle is the old one or the new one, whole. `force` replaces a bundle
    that is at `out`.
    """
    home = Path(os.path.realpath(bundle.folder))
    out = home if out is None else Path(os.path.realpath(out))
    bundle.check(drafts)
    check_out(bundle, out, force)
    check_space(out, sum(map(estimate_draft, drafts)) + (0 if out == home else _copied(bundle.manifest, home, out)))
    with workspace(out if out != home else home / MANIFEST_NAME) as folder:
        manifest = _write(OpenedBundle(home, bundle.manifest), drafts, folder, out == home, progress)
        if out == home:
            _move_in(folder, home, bundle.manifest, manifest)
        else:
            _fill(folder, home, manifest)
            move_into_place(folder, out)
    return manifest


def check_out(bundle: OpenedBundle, out: Path | None, force: bool) -> None:
    """Refuse a place for a new bundle as `check_free` does; None and the bundle's own place are good."""
    if out is not None and os.path.realpath(out) != os.path.realpath(bundle.folder):
        check_free(out, force)


def _copied(manifest: Manifest, home: Path, out: Path) -> int:
    """How many bytes cannot be shared because `out` is on another disk."""
    parent = next(path for path in out.parents if path.exists())
    apart = parent.stat().st_dev != home.stat().st_dev
    return sum(entry.size for entry in manifest.files.values()) if apart else 0


def _write(
    bundle: OpenedBundle, drafts: Sequence[AnyDraft], folder: Path, renamed: bool, progress: Progress | None
) -> Manifest:
    """Write what is new, the manifest included, into `folder`; `renamed`: under names the bundle does not have yet."""
    old = bundle.manifest
    taps = tuple(sorted({*old.taps, *tapped(drafts)}))
    graphs = old.graphs if taps == old.taps else tuple(_widened(bundle, taps, folder, renamed))
    entries = tuple(write_draft(draft, folder, vocabulary_of(old), progress) for draft in drafts)
    replaced = {graph.file for graph in old.graphs} - {graph.file for graph in graphs}
    files = {name: entry for name, entry in old.files.items() if name not in replaced} | list_files(folder)
    drafted = (*old.drafts, *entries)
    manifest = replace(old, graphs=graphs, files=dict(sorted(files.items())), drafts=drafted, taps=taps)
    parse_manifest(json.loads(manifest.dumps()))  # a bundle that could not be read again is not to replace one that can
    (folder / MANIFEST_NAME).write_text(manifest.dumps(), encoding="utf-8")
    return manifest


def _widened(bundle: OpenedBundle, taps: tuple[int, ...], folder: Path, renamed: bool) -> Iterator[GraphEntry]:
    """The graphs, with bodies that give these taps written to `folder`."""
    facts, streams = bundle.manifest.model, bundle.streams
    for graph in bundle.manifest.graphs:
        if graph.role != "body":
            yield graph
            continue
        sliding = any(spec.name == "attn_mask_sliding" for spec in graph.contract.inputs)
        shape = BodyShape(facts.hidden_size, facts.layers, facts.kv_heads, facts.head_dim, bundle.dtype, taps, sliding)
        contract = body_contract(shape, graph.profile, graph.ragged)
        file = _free_name(bundle.folder, graph.file) if renamed else graph.file
        join_as_output(bundle.folder / graph.file, folder / file, contract, "taps", [streams[tap] for tap in taps])
        yield replace(graph, file=file, contract=contract)


def _free_name(folder: Path, name: str) -> str:
    """The graph's name with the first number behind it that nothing in the folder has."""
    stem = re.sub(r"\.\d+$", "", name.removesuffix(".onnx"))
    names = (f"{stem}.onnx" if number == 1 else f"{stem}.{number}.onnx" for number in count(1))
    return next(free for free in names if not os.path.lexists(folder / free))


def _fill(folder: Path, home: Path, manifest: Manifest) -> None:
    """Share with `home` every file of the manifest that `folder` does not have."""
    for name in manifest.files:
        if not (folder / name).exists():
            share(home / name, folder / name)


def _move_in(folder: Path, home: Path, old: Manifest, new: Manifest) -> None:
    """Move what is new into the bundle, its manifest last; what is interrupted before that is taken back."""
    bodies = {graph.file for graph in new.graphs} - {graph.file for graph in old.graphs}
    names = [*sorted(bodies), *(draft.folder for draft in new.drafts[len(old.drafts) :])]
    for path in folder.rglob("*"):
        if path.is_file():
            _flush(path)
    try:
        for name in names:
            _require(not os.path.lexists(home / name), home)
            (home / name).parent.mkdir(exist_ok=True)
            (folder / name).replace(home / name)
        _require(load_manifest(home) == old, home)
        (folder / MANIFEST_NAME).replace(home / MANIFEST_NAME)
    except BaseException:
        if (folder / MANIFEST_NAME).exists():
            _take_back(folder, home, names)
        raise
    for name in old.files.keys() - new.files.keys():
        with suppress(OSError):
            (home / name).unlink()


def _require(unchanged: bool, home: Path) -> None:
    if not unchanged:
        raise UsageError(f"{home} was changed by somebody else meanwhile; nothing was kept, try again")


def _take_back(folder: Path, home: Path, names: Sequence[str]) -> None:
    """Remove from the bundle what was moved there."""
    for name in names:
        if not (folder / name).exists():
            shutil.rmtree(home / name, ignore_errors=True)  # a draft's folder
            with suppress(OSError):
                (home / name).unlink()  # a graph
    with suppress(OSError):
        (home / DRAFTS_FOLDER).rmdir()  # if it is empty


def _flush(path: Path) -> None:
    """Wait until the disk has it, so that a manifest never arrives there before what it names."""
    with suppress(PermissionError), path.open("rb+") as stream:
        os.fsync(stream.fileno())
