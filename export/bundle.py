"""Assembles a bundle: graphs, tokenizer, drafts and manifest, written aside, then moved into place."""

import json
import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from oxidize.runtime.errors import BundleError, CheckpointError, OxidizeError, UsageError
from oxidize.runtime.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DraftEntry,
    FileEntry,
    Manifest,
    ModelFacts,
    check_relative,
    sha256_of,
)

from .build import ExportPlan, Progress, build_graphs
from .config import ModelConfig
from .drafts.write import NeuralSource, write_neural
from .nested import BundleSource, Vocabulary, check_vocabulary, write_nested
from .provenance import provenance_of
from .source import Checkpoint
from .tokenizer import write_tokenizer
from .workspace import move_into_place, workspace

DRAFTS_FOLDER = "drafts"
_TAKEN = ("auto", "none", "ngram")  # what `--draft-model` means by these words is settled


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model to put into the bundle under a name of its own."""

    name: str
    checkpoint: Checkpoint
    plan: ExportPlan


AnyDraft = DraftSource | NeuralSource | BundleSource


def export_bundle(
    checkpoint: Checkpoint,
    plan: ExportPlan,
    out: Path,
    drafts: Sequence[AnyDraft] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write the bundle `out`; an interrupted or failed export leaves nothing behind.

    An existing `out` is a UsageError unless `force` is set and it is a bundle; that is replaced at the end.
    """
    out = Path(os.path.realpath(out))  # a link to a bundle stays a link
    check_free(out, force)
    check_drafts(drafts)
    plan = replace(plan, taps=tapped(drafts) or plan.taps)
    check_space(out, estimate_bytes(checkpoint.config, plan) + sum(map(estimate_draft, drafts)))
    with workspace(out) as folder:
        manifest = _write(checkpoint, plan, folder, drafts, progress)
        move_into_place(folder, out)
    return manifest


def check_free(out: Path, force: bool) -> None:
    """Refuse to overwrite anything but an empty folder or, when asked to, a bundle and nothing else."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    listed = _bundle_files(out)
    if listed is None:
        raise UsageError(f"{out} exists and is not a bundle; nothing was written, choose another -o")
    if not force:
        raise UsageError(f"{out} already holds a bundle; nothing was written, choose another -o or pass --force")
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name not in listed and (path.is_symlink() or not path.is_dir()):
            raise UsageError(f"{path} is no part of the bundle; nothing was written, move it away first")


def _bundle_files(folder: Path) -> set[str] | None:
    """What the bundle in `folder` consists of, whatever its version or damage; None if it is none."""
    try:
        raw = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        return {MANIFEST_NAME, *raw["files"]} if "schema_version" in raw else None
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None


def tapped(drafts: Sequence[AnyDraft]) -> tuple[int, ...]:
    """The target layers that drafts read, each once, in ascending order."""
    return tuple(
        sorted({tap for draft in drafts if isinstance(draft, NeuralSource) for tap in draft.draft.config.taps})
    )


def check_drafts(drafts: Sequence[AnyDraft]) -> None:
    """Refuse names that cannot be told apart or used, and plans that do not fit."""
    names = [draft.name for draft in drafts]
    for draft in drafts:
        if draft.name in _TAKEN or names.count(draft.name) > 1:
            raise UsageError(f"the draft name {draft.name!r} is taken; rename the draft's file or folder")
        if not _is_folder_name(draft.name):
            raise UsageError(f"the draft name {draft.name!r} cannot name a folder; rename the draft's file")
        if not isinstance(draft, BundleSource):
            draft.plan.check(draft.draft.config.model if isinstance(draft, NeuralSource) else draft.checkpoint.config)


def _is_folder_name(name: str) -> bool:
    try:
        check_relative(name)
    except BundleError:
        return False
    return "/" not in name


def estimate_bytes(config: ModelConfig, plan: ExportPlan) -> int:
    """About how many bytes the weights of a bundle take."""
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = config.intermediate_size
    sizes = {"qkv": q_size + 2 * kv_size, "o": q_size, "gate_up": 2 * inner, "down": inner}
    wide = plan.wide_parts(config)
    layer = sum(
        config.hidden_size * size * _weight_bytes(plan, 8 if part in wide else 4) for part, size in sizes.items()
    )
    table = config.vocab_size * config.hidden_size * _weight_bytes(plan, plan.head_bits)
    tables = table * (1 if config.tie_word_embeddings else 2)
    rope = plan.positions(config) * config.head_dim * (2 if config.rope_local else 1)
    return int(config.layers * layer + tables + rope * 4)


def _weight_bytes(plan: ExportPlan, bits: int) -> float:
    """Bytes of one weight; a block of 32 quantised ones shares a float32 scale."""
    return {"fp32": 4.0, "fp16": 2.0, "int4": bits / 8 + 4 / 32}[plan.precision]


def estimate_draft(draft: AnyDraft) -> int:
    """About how many bytes a draft takes, at most."""
    if isinstance(draft, BundleSource):
        return sum(draft.manifest.files[name].size for name in draft.files)
    if isinstance(draft, DraftSource):
        return estimate_bytes(draft.checkpoint.config, draft.plan)
    weights = draft.draft.weights
    return sum(4 * math.prod(weights.shape(name)) for name in weights.names())


def check_space(out: Path, needed: int) -> None:
    """Refuse to begin an export that cannot end."""
    parent = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OxidizeError(
            f"the bundle needs about {needed / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free; "
            "free some space or choose another -o"
        )


def _write(
    checkpoint: Checkpoint,
    plan: ExportPlan,
    folder: Path,
    drafts: Sequence[AnyDraft],
    progress: Progress | None,
    drafts_for: Vocabulary | None = None,
) -> Manifest:
    """Tokenizer and drafts come first: what can be refused is refused before the long work.

    drafts_for: of the target, where this is a draft model.
    """
    with ThreadPoolExecutor(1) as pool:
        provenance = pool.submit(provenance_of, checkpoint.name, checkpoint.revision, checkpoint.files)
        tokenizer = write_tokenizer(checkpoint, folder)
        vocabulary = Vocabulary(tokenizer.token_count, tokenizer.files.vocab_sha256)
        if drafts_for is not None:
            check_vocabulary(checkpoint.name, vocabulary, drafts_for)
        facts = _facts(checkpoint.config, plan, tokenizer.token_count)
        entries = tuple(write_draft(draft, folder, vocabulary, progress) for draft in drafts)
        graphs = build_graphs(checkpoint.config, checkpoint.weights, plan, folder, progress)
        _refuse_unread(checkpoint)
    manifest = Manifest(
        SCHEMA_VERSION,
        plan.precision,
        provenance.result(),
        facts,
        tokenizer.files,
        checkpoint.generation,
        graphs,
        list_files(folder),
        entries,
        plan.taps,
    )
    (folder / MANIFEST_NAME).write_text(manifest.dumps(), encoding="utf-8")
    return manifest


def write_draft(draft: AnyDraft, folder: Path, target: Vocabulary, progress: Progress | None) -> DraftEntry:
    """Write a draft into the folder of the target's bundle and return its manifest entry."""
    name = f"{DRAFTS_FOLDER}/{draft.name}"
    (folder / name).mkdir(parents=True)
    if isinstance(draft, NeuralSource):
        return write_neural(draft, folder, name, progress)
    if isinstance(draft, BundleSource):
        write_nested(draft, folder / name, target)
    else:
        _write(draft.checkpoint, draft.plan, folder / name, (), progress, target)
    return DraftEntry(draft.name, "model", name)


def _facts(config: ModelConfig, plan: ExportPlan, token_count: int) -> ModelFacts:
    if token_count > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer knows {token_count} tokens and the embedding table has {config.vocab_size} rows; "
            "the tokenizer belongs to another checkpoint"
        )
    return ModelFacts(
        architecture=config.architecture,
        layers=config.layers,
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        token_count=token_count,
        max_positions=plan.positions(config),
        sliding_window=config.sliding_window,
        rope_theta=config.rope.theta,
    )


def _refuse_unread(checkpoint: Checkpoint) -> None:
    """A tensor nobody read is maths nobody did; only tables that others determine may stay unread."""
    known = ("rotary_emb.inv_freq",)
    tied = checkpoint.config.tie_word_embeddings
    odd = [
        name
        for name in checkpoint.weights.unread()
        if not name.endswith(known) and not (tied and name == "lm_head.weight")
    ]
    if odd:
        raise CheckpointError(
            f"{checkpoint.name} holds {len(odd)} tensors this architecture does not use, such as {odd[0]}; "
            "it is not a plain checkpoint of its model_type"
        )


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and sha256 of every file in the folder, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, sha256_of(path)) for path in paths}
