"""Tells by its content what a draft's checkpoint is, and opens it; whatever is none of the families is a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, read_json
from ..gguf_file import GgufFile, read_gguf
from ..safetensors_source import INDEX_NAME, SINGLE_NAME, find_safetensors, read_header
from ..source import Checkpoint, file_or_folder, locate, open_source
from .base import DraftCheckpoint
from .dflash2 import read_dflash2, recognises_dflash2
from .dflash_gguf import read_dflash_gguf, recognises_dflash_gguf
from .dflash_hf import read_dflash, recognises_dflash
from .dflash_speculators import read_dflash_speculators, recognises_dflash_speculators
from .dspark import read_dspark, read_dspark_speculators, recognises_dspark, recognises_dspark_speculators
from .dspark_gguf import read_dspark_gguf, recognises_dspark_gguf
from .eagle_gguf import is_eagle_gguf, open_eagle_gguf
from .eagle_hf import is_eagle_hf, open_eagle_hf, refuse_older_eagle
from .eagle_speculators import is_eagle_speculators, open_eagle_speculators
from .medusa import is_medusa, read_medusa
from .mtp import split_mtp


@dataclass(frozen=True, slots=True)
class DraftWishes:
    """How to read drafts: tap ids counted "input" or "output" whatever the checkpoint says; whether to go on with a
    DFlash draft that was made for another target but is defined for this one too."""

    tap_convention: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """Drafts of one format: what such a draft is, in words, and how it is read for a target."""

    kind: str
    read: Callable[[Path, ModelConfig, DraftWishes], DraftCheckpoint]


def _forcible(kind: str, read: Callable[[Path, ModelConfig, bool], DraftCheckpoint]) -> _Family:
    """A family that can be forced upon another target."""
    return _Family(kind, lambda path, target, wishes: read(path, target, wishes.force))


def _counting(kind: str, read: Callable[[Path, ModelConfig, str | None], DraftCheckpoint]) -> _Family:
    """A family whose tap ids can be counted in two ways."""
    return _Family(kind, lambda path, target, wishes: read(path, target, wishes.tap_convention))


_DFLASH, _DFLASH2, _DSPARK, _EAGLE = "a DFlash draft", "a DFlash 2 draft", "a DSpark draft", "an EAGLE-3 draft"
_MEDUSA = _Family("a set of Medusa heads", lambda path, target, _: read_medusa(path, target))
_FILES: tuple[tuple[Callable[[GgufFile], bool], _Family], ...] = (
    (recognises_dspark_gguf, _forcible(_DSPARK, read_dspark_gguf)),
    (recognises_dflash_gguf, _forcible(_DFLASH, read_dflash_gguf)),
    (lambda file: is_eagle_gguf(file.metadata), _counting(_EAGLE, open_eagle_gguf)),
)
_CONFIGS: tuple[tuple[Callable[[Mapping[str, Any]], bool], _Family], ...] = (
    (recognises_dspark_speculators, _forcible(_DSPARK, read_dspark_speculators)),
    (recognises_dspark, _forcible(_DSPARK, read_dspark)),
    (recognises_dflash_speculators, _forcible(_DFLASH, read_dflash_speculators)),
    (recognises_dflash2, _forcible(_DFLASH2, read_dflash2)),
    (recognises_dflash, _forcible(_DFLASH, read_dflash)),
    (is_eagle_speculators, _counting(_EAGLE, open_eagle_speculators)),
)
_UNSTATED_DFLASH, _PLAIN_EAGLE = _forcible(_DFLASH, read_dflash), _counting(_EAGLE, open_eagle_hf)


def draft_kind(path: Path) -> str | None:
    """What a file or folder is, in words, if it is a draft that reads its target's rows; None for anything else.

    Only configs and headers are read. A whole model stays one if Medusa heads lie beside it. Raises
    UnsupportedModelError for families that are not implemented.
    """
    found = _recognise(path)
    if found is None or (found[1] is _MEDUSA and _holds_model(path)):
        return None
    return found[1].kind


def open_draft(
    source: str, target: ModelConfig, wishes: DraftWishes, offline: bool = False
) -> Checkpoint | DraftCheckpoint:
    """Open a draft for this target: one that reads its rows, or a model of its own.

    Raises UnsupportedModelError for families that are not implemented, UsageError for a draft that does not fit.
    """
    path, commit = locate(source, offline)
    found = _recognise(path)
    if found is not None:
        place, family = found
        draft = family.read(place, target, wishes)
        return draft if commit is None else replace(draft, name=source, revision=commit)
    model, _ = split_mtp(open_source(source, offline), wanted=False)
    return model


def _recognise(path: Path) -> tuple[Path, _Family] | None:
    """What is to be read of a draft, and its family; None where it is of none."""
    if path.is_dir() and is_medusa(path):
        return path, _MEDUSA
    place = file_or_folder(path)
    family = _file_family(place) if place.is_file() else _folder_family(place)
    return None if family is None else (place, family)


def _file_family(path: Path) -> _Family | None:
    file = read_gguf(path)
    return next((family for recognises, family in _FILES if recognises(file)), None)


def _folder_family(folder: Path) -> _Family | None:
    """By what the config says, or where that could be any model's, by the tensors."""
    if not (folder / CONFIG_NAME).is_file():
        return None
    raw = read_json(folder / CONFIG_NAME)
    for recognises, family in _CONFIGS:
        if recognises(raw):
            return family
    if "speculators_model_type" in raw:
        raise UnsupportedModelError(
            f"{folder / CONFIG_NAME}: speculators_model_type {raw['speculators_model_type']!r} is not implemented; "
            "this version knows dflash, dspark and eagle3"
        )
    shapes = _shapes(folder)
    if is_eagle_hf(raw, shapes):
        return _PLAIN_EAGLE
    refuse_older_eagle(folder, raw, shapes)
    return _UNSTATED_DFLASH if {"fc.weight", "hidden_norm.weight"} <= shapes.keys() else None


def _holds_model(folder: Path) -> bool:
    """Whether the config beside Medusa heads is not theirs, and its weights are there."""
    raw = read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    stated = raw.get("model_type") not in (None, "medusa") and "medusa_num_heads" not in raw
    return stated and _has_weights(folder)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors, from the headers; none where there are no safetensors of a model."""
    if not _has_weights(folder):
        return {}
    return {tensor.name: tensor.shape for path in find_safetensors(folder) for tensor in read_header(path)}


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
