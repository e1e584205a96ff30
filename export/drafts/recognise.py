"""Tells by its content what a draft's checkpoint is, and opens it; whatever is none of the families is a model."""

from dataclasses import dataclass
from pathlib import Path

from oxidize.runtime.errors import UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, read_json
from ..source import Checkpoint, locate, open_source
from .base import DraftCheckpoint
from .dflash2 import read_dflash2, recognises_dflash2
from .dflash_gguf import read_dflash_gguf, recognises_dflash_gguf
from .dflash_hf import read_dflash, recognises_dflash
from .dflash_speculators import read_dflash_speculators, recognises_dflash_speculators
from .dspark import read_dspark, read_dspark_speculators, recognises_dspark, recognises_dspark_speculators
from .dspark_gguf import read_dspark_gguf, recognises_dspark_gguf
from .eagle_gguf import is_eagle_gguf, open_eagle_gguf
from .eagle_hf import is_eagle_hf, open_eagle_hf
from .eagle_speculators import is_eagle_speculators, open_eagle_speculators
from .medusa import is_medusa, read_medusa
from .mtp import split_mtp


@dataclass(frozen=True, slots=True)
class DraftWishes:
    """How to read drafts: tap ids counted "input" or "output" whatever the checkpoint says; whether to go on with a
    DFlash draft that was made for another target but is defined for this one too."""

    tap_convention: str | None = None
    force: bool = False


def open_draft(
    source: str, target: ModelConfig, wishes: DraftWishes, offline: bool = False
) -> Checkpoint | DraftCheckpoint:
    """Open a draft for this target: one that reads its rows, or a model of its own.

    Raises UnsupportedModelError for families that are not implemented, UsageError for a draft that does not fit.
    """
    path, _ = locate(source, offline)
    draft = (_open_gguf if path.is_file() else _open_folder)(path, target, wishes)
    if draft is not None:
        return draft
    model, _ = split_mtp(open_source(source, offline), wanted=False)
    return model


def _open_gguf(path: Path, target: ModelConfig, wishes: DraftWishes) -> DraftCheckpoint | None:
    from ..gguf_file import read_gguf

    file = read_gguf(path)
    if recognises_dspark_gguf(file):
        return read_dspark_gguf(path, target, wishes.force)
    if recognises_dflash_gguf(file):
        return read_dflash_gguf(path, target, wishes.force)
    if is_eagle_gguf(file.metadata):
        return open_eagle_gguf(path, target, wishes.tap_convention)
    return None


def _open_folder(folder: Path, target: ModelConfig, wishes: DraftWishes) -> DraftCheckpoint | None:
    if is_medusa(folder):
        return read_medusa(folder, target)
    if not (folder / CONFIG_NAME).is_file():
        return None
    raw = read_json(folder / CONFIG_NAME)
    if recognises_dspark_speculators(raw):
        return read_dspark_speculators(folder, target, wishes.force)
    if recognises_dspark(raw):
        return read_dspark(folder, target, wishes.force)
    if recognises_dflash_speculators(raw):
        return read_dflash_speculators(folder, target, wishes.force)
    if recognises_dflash2(raw):
        return read_dflash2(folder, target, wishes.force)
    if recognises_dflash(raw):
        return read_dflash(folder, target, wishes.force)
    if is_eagle_speculators(raw):
        return open_eagle_speculators(folder, target, wishes.tap_convention)
    if is_eagle_hf(raw):
        return open_eagle_hf(folder, target, wishes.tap_convention)
    if "speculators_model_type" in raw:
        raise UnsupportedModelError(
            f"{folder / CONFIG_NAME}: speculators_model_type {raw['speculators_model_type']!r} is not implemented; "
            "this version knows dflash, dspark and eagle3"
        )
    return None
