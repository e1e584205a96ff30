"""Opens a checkpoint, whatever its form: a Hugging Face folder, a GGUF file, or a name on the hub."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError
from oxidize.runtime.manifest import GenerationDefaults

from .config import ModelConfig
from .config_hf import CONFIG_NAME, GENERATION_NAME, config_from_hf, generation_from_hf, read_json
from .safetensors_source import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsTensor,
    find_safetensors,
    read_safetensors,
    same_values,
)
from .weights import TensorTable, WeightSource

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_VISION = ("vision_tower.", "multi_modal_projector.")
_DERIVED = (
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
)  # buffers old checkpoints carry, not weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened source model: its config, its weights (not yet read) and where they came from.

    `files` are all files it consists of, for provenance. `folder` is set for safetensors, `gguf_metadata` for
    GGUF.
    """

    kind: str  # "safetensors" | "gguf"
    name: str
    revision: str | None
    config: ModelConfig
    weights: WeightSource
    generation: GenerationDefaults
    folder: Path | None
    gguf_metadata: Mapping[str, Any] | None
    files: tuple[Path, ...]


def open_source(source: str, offline: bool = False, revision: str | None = None) -> Checkpoint:
    """Open a local folder, a .gguf file, a folder with one .gguf file, or a hub name "organisation/model".

    `offline` uses the hub's local cache alone; `revision` is a branch, tag or commit on the hub. Whatever is
    missing, damaged or unsupported raises a CheckpointError.
    """
    path, commit = locate(source, offline, revision)
    place = file_or_folder(path)
    if place.is_file():
        return _open_gguf(place)
    if not (path / CONFIG_NAME).is_file():
        raise CheckpointError(f"{path} has neither {CONFIG_NAME} nor a .gguf file; it is not a checkpoint")
    return _open_hugging_face(path, path.resolve().name if commit is None else source, commit)


def locate(source: str, offline: bool = False, revision: str | None = None) -> tuple[Path, str | None]:
    """Where a source lies on this disk, fetched from the hub if need be, and its commit there (None if local)."""
    path = Path(source)
    if path.exists():
        return path, None
    if not _HUB_NAME.fullmatch(source) or source.endswith(".gguf"):
        raise CheckpointError(
            f"{source} is no folder, no .gguf file and no hub name (organisation/model); check the path"
        )
    folder = _download(source, offline, revision)
    return folder, folder.name


def file_or_folder(path: Path) -> Path:
    """What is read at a path: itself, or the one .gguf file of a folder without a whole Hugging Face checkpoint.

    Several .gguf files in such a folder are a CheckpointError.
    """
    ggufs = [] if path.is_file() else sorted(path.glob("*.gguf"))
    complete = any((path / weights).is_file() for weights in (SINGLE_NAME, INDEX_NAME))
    if not ggufs or ((path / CONFIG_NAME).is_file() and complete):
        return path
    if len(ggufs) > 1:
        raise CheckpointError(f"{path} holds {len(ggufs)} .gguf files; name the one to export")
    return ggufs[0]


def _open_hugging_face(folder: Path, name: str, revision: str | None) -> Checkpoint:
    raw = read_json(folder / CONFIG_NAME)
    config = config_from_hf(raw, str(folder / CONFIG_NAME))
    tensors = read_safetensors(folder, _text_model_name if raw["model_type"] == "gemma3" else _weight_name)
    if config.tie_word_embeddings and _HEAD in tensors:
        _check_tied(folder, tensors)
        del tensors[_HEAD]
    return Checkpoint(
        kind="safetensors",
        name=name,
        revision=revision,
        config=config,
        weights=TensorTable(str(folder), tensors),
        generation=generation_from_hf(folder),
        folder=folder,
        gguf_metadata=None,
        files=_files(folder),
    )


def _open_gguf(path: Path) -> Checkpoint:
    from .config_gguf import config_from_gguf, generation_from_gguf
    from .gguf_file import read_gguf
    from .gguf_source import map_tensors, rope_factors

    file = read_gguf(path)
    shapes = {place.name: place.shape for place in file.tensors}
    return Checkpoint(
        kind="gguf",
        name=path.name,
        revision=None,
        config=config_from_gguf(file.metadata, shapes, rope_factors(file)),
        weights=TensorTable(str(path), map_tensors(file)),
        generation=generation_from_gguf(file.metadata),
        folder=None,
        gguf_metadata=file.metadata,
        files=(path,),
    )


def _files(folder: Path) -> tuple[Path, ...]:
    names = (CONFIG_NAME, GENERATION_NAME, INDEX_NAME, *TOKENIZER_NAMES)
    return tuple(path for path in (*(folder / name for name in names), *find_safetensors(folder)) if path.is_file())


def _weight_name(name: str) -> str | None:
    return None if name.endswith(_DERIVED) else name


def _text_model_name(name: str) -> str | None:
    """The name in the text model of a tensor of a multimodal Gemma 3; None for the vision part."""
    if name.removeprefix("model.").startswith(_VISION):
        return None
    for outer, inner in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name


def _check_tied(folder: Path, tensors: Mapping[str, SafetensorsTensor]) -> None:
    """A tied checkpoint may store its head too, as long as it is the embedding."""
    embedding = tensors.get(_EMBEDDING)
    if embedding is None or not same_values(tensors[_HEAD], embedding):
        raise CheckpointError(
            f"{folder}: config.json says tie_word_embeddings, but {_HEAD} differs from {_EMBEDDING}; "
            "set it to false if the head is meant"
        )


def _download(name: str, offline: bool, revision: str | None) -> Path:
    """The hub's snapshot folder, named after its commit."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(f"reading {name} from the hub needs: pip install 'oxidize-ort[export]'") from None
    patterns = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", "model*.safetensors", "medusa*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except LocalEntryNotFoundError:
        how = "drop --offline or give a local folder" if offline else "check the network or give a local folder"
        raise CheckpointError(f"{name} is not in the local hub cache; {how}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(
            f"cannot fetch {name} from the hub ({first_line[0]}); check the name and the network, "
            "log in if it is gated, or give a local folder"
        ) from error
