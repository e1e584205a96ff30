"""Assembles a bundle: graphs, tokenizer, drafts and manifest, written aside and moved into place at the end."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from oxidize.runtime.errors import CheckpointError, OxidizeError, UsageError
from oxidize.runtime.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DraftEntry,
    FileEntry,
    Manifest,
    ModelFacts,
    Provenance,
    sha256_of,
)

from .build import ExportPlan, Progress, build_graphs
from .config import ModelConfig
from .source import Checkpoint
from .tokenizer import write_tokenizer

DRAFTS_FOLDER = "drafts"


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model to put into the bundle under a name of its own."""

    name: str
    checkpoint: Checkpoint
    plan: ExportPlan


def export_bundle(
    checkpoint: Checkpoint,
    plan: ExportPlan,
    out: Path,
    drafts: Sequence[DraftSource] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write the bundle `out`; an interrupted or failed export leaves nothing behind.

    An existing `out` is a UsageError unless `force` is set and it is a bundle; it is then replaced at the very end.
    """
    check_free(out, force)
    check_space(out, estimate_bytes(checkpoint.config, plan))
    with _workspace(out) as folder:
        manifest = _write(checkpoint, plan, folder, drafts, progress)
        _move_into_place(folder, out)
    return manifest


def check_free(out: Path, force: bool) -> None:
    """Refuse to overwrite anything but a bundle, and a bundle only when asked to."""
    if not out.exists():
        return
    is_bundle = (out / MANIFEST_NAME).is_file()
    if not is_bundle and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and is not a bundle; nothing was written, choose another -o")
    if is_bundle and not force:
        raise UsageError(
            f"{out} already holds a bundle; nothing was written, choose another -o or pass --force"
        )


def estimate_bytes(config: ModelConfig, plan: ExportPlan) -> int:
    """About how many bytes the weights of a bundle take."""
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    table = config.vocab_size * config.hidden_size
    tables = table * (1 if config.tie_word_embeddings else 2)
    rope = plan.positions(config) * config.head_dim * (2 if config.rope_local else 1)
    per_weight = {"fp32": 4.0, "fp16": 2.0, "int4": 0.5 + 4 / 32}[plan.precision]
    per_row = per_weight if plan.precision != "int4" else plan.head_bits / 8 + 4 / 32
    return int(config.layers * layer * per_weight + tables * per_row + rope * 4)


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
    drafts: Sequence[DraftSource],
    progress: Progress | None,
) -> Manifest:
    with ThreadPoolExecutor(1) as pool:
        sources = pool.submit(_hash_sources, checkpoint)
        graphs = build_graphs(checkpoint.config, checkpoint.weights, plan, folder, progress)
        _refuse_unread(checkpoint)
        tokenizer = write_tokenizer(checkpoint, folder)
        entries = tuple(
            _write_draft(draft, folder, tokenizer.files.vocab_sha256, progress) for draft in drafts
        )
        provenance = Provenance(
            f"oxidize-ort {metadata.version('oxidize-ort')}",
            checkpoint.name,
            checkpoint.revision,
            sources.result(),
        )
    manifest = Manifest(
        SCHEMA_VERSION,
        plan.precision,
        provenance,
        _facts(checkpoint.config, plan, tokenizer.token_count),
        tokenizer.files,
        checkpoint.generation,
        graphs,
        _list_files(folder),
        entries,
        plan.taps,
    )
    (folder / MANIFEST_NAME).write_text(manifest.dumps(), encoding="utf-8")
    return manifest


def _write_draft(
    draft: DraftSource, folder: Path, vocab_sha256: str, progress: Progress | None
) -> DraftEntry:
    name = f"{DRAFTS_FOLDER}/{draft.name}"
    target = folder / name
    target.mkdir(parents=True)
    manifest = _write(draft.checkpoint, draft.plan, target, (), progress)
    if manifest.tokenizer.vocab_sha256 != vocab_sha256:
        raise UsageError(
            f"draft {draft.checkpoint.name} has another vocabulary ({manifest.model.token_count} tokens, "
            f"{manifest.tokenizer.vocab_sha256[:8]}) than the target ({vocab_sha256[:8]}); "
            "a draft model needs the target's tokenizer"
        )
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


def _hash_sources(checkpoint: Checkpoint) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in checkpoint.files}


def _list_files(folder: Path) -> dict[str, FileEntry]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, sha256_of(path)) for path in paths
    }


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is gone again unless it was moved away."""
    folder = out.absolute().parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OxidizeError(f"the disk of {out} is full; nothing was kept, free some space") from error
        raise OxidizeError(f"cannot write {out}: {error}; nothing was kept") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_into_place(folder: Path, out: Path) -> None:
    old = folder.with_name(folder.name + "-replaced")
    if out.exists():
        out.replace(old)
    try:
        folder.replace(out)
    except OSError:
        if old.exists():
            old.replace(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
