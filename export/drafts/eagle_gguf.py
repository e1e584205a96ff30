"""Reads EAGLE-3 drafts from GGUF files of architecture "eagle3", as llama.cpp's converter writes them.

Its layer is Llama's, with q and k rows in pairs like there, so the file is read as a Llama with some tensors more.
Tap ids (`extract_layers`, later `target_layers`) are inputs of layers. `d2t` holds target ids and not, as everywhere
else, what to add to draft ids.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config import ModelConfig
from ..config_gguf import config_from_gguf
from ..config_keys import Keys
from ..gguf_file import GgufFile, read_gguf
from ..gguf_source import map_tensors, read_integers, rope_factors
from ..weights import TensorTable
from .base import DraftCheckpoint
from .eagle_hf import id_list
from .eagle_rules import INPUT, EagleFacts, TapIds, TargetShape, check_eagle_tensors, eagle_config
from .eagle_vocabulary import check_vocabulary

ARCHITECTURE = "eagle3"
_PREFIX = f"{ARCHITECTURE}."
_OWN_KEYS = ("extract_layers", "target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc")
_NAMES = {
    "blk.0.attn_norm_2.weight": "model.layers.0.hidden_norm.weight",
    "enc.output_norm.weight": "input_norm.weight",
}


def is_eagle_gguf(metadata: Mapping[str, Any]) -> bool:
    """Whether a GGUF file's metadata is of such a draft."""
    return metadata.get("general.architecture") == ARCHITECTURE


def open_eagle_gguf(path: Path, target: TargetShape, convention: str | None = None) -> DraftCheckpoint:
    """Open a draft's file, for this target. Parameters and errors as for `open_eagle_hf`."""
    file = read_gguf(path)
    as_llama = replace(file, metadata=_llama_metadata(file))
    tensors = {_NAMES.get(name, name): tensor for name, tensor in map_tensors(as_llama).items()}
    tensors.pop("d2t", None)
    facts = _facts(file, as_llama, _layer(as_llama, target))
    config = eagle_config(facts, tensors, target, convention)
    check_eagle_tensors(config, tensors, path)
    return DraftCheckpoint(
        name=path.name,
        revision=None,
        config=config,
        weights=TensorTable(str(path), tensors),
        files=(path,),
        d2t=check_vocabulary(config, _target_ids(file), None, str(path)),
    )


def _facts(file: GgufFile, as_llama: GgufFile, model: ModelConfig) -> EagleFacts:
    own = {key: file.metadata.get(_PREFIX + key) for key in _OWN_KEYS}
    keys = Keys(own, {}, f"{file.path}: {ARCHITECTURE}")
    stated = [ids for ids in (id_list(keys, "extract_layers"), id_list(keys, "target_layers")) if ids is not None]
    if len(set(stated)) > 1:
        raise CheckpointError(
            f"{keys.where}.extract_layers is {list(stated[0])}, but target_layers is {list(stated[1])}; "
            "convert the draft again"
        )
    if model.layers > 1:
        raise UnsupportedModelError(
            f"{keys.where}.block_count is {model.layers}, an EAGLE-3 draft has one block; convert it again"
        )
    normed = any(place.name.startswith("fc_norm.") for place in file.tensors)
    return EagleFacts(
        where=keys.where,
        model=model,
        taps=TapIds(stated[0], INPUT, "llama.cpp counts inputs") if stated else None,
        draft_vocab_size=None,
        target_hidden_size=keys.optional_integer("target_hidden_size"),
        flags={
            "norm_before_residual": keys.flag("norm_before_residual", False),
            "norm_before_fc": keys.flag("norm_before_fc", False),
            "fc_norm": normed,
        },
    )


def _llama_metadata(file: GgufFile) -> dict[str, Any]:
    """The metadata as a Llama of this shape would have it."""
    if not is_eagle_gguf(file.metadata):
        raise CheckpointError(
            f"{file.path} is a GGUF file of {file.metadata.get('general.architecture')!r}, not eagle3"
        )
    renamed = {
        f"llama.{key.removeprefix(_PREFIX)}": value
        for key, value in file.metadata.items()
        if key.startswith(_PREFIX) and key.removeprefix(_PREFIX) not in _OWN_KEYS
    }
    general = {key: value for key, value in file.metadata.items() if not key.startswith(_PREFIX)}
    return {**general, **renamed, "general.architecture": "llama"}


def _layer(as_llama: GgufFile, target: TargetShape) -> ModelConfig:
    """The decoder layer; the vocabulary is what the file says, or the target's, whose embeddings it reads."""
    shapes = {place.name: place.shape for place in as_llama.tensors}
    vocabulary = as_llama.metadata.get("llama.vocab_size", target.vocab_size)
    shapes.setdefault("token_embd.weight", (vocabulary, as_llama.metadata.get("llama.embedding_length", 0)))
    try:
        return config_from_gguf(as_llama.metadata, shapes, rope_factors(as_llama))
    except CheckpointError as error:
        raise type(error)(f"{as_llama.path}, whose layer is read as a Llama's: {error}") from None


def _target_ids(file: GgufFile) -> np.ndarray | None:
    """The target ids; a table that would only make sense as something to add is refused."""
    places = [place for place in file.tensors if place.name == "d2t"]
    if not places:
        return None
    ids = read_integers(file.path, places[0]).reshape(-1)
    if len(np.unique(ids)) < len(ids):
        raise CheckpointError(
            f"{file.path}: d2t repeats target ids, so it holds offsets, which llama.cpp would read as ids; convert the "
            "draft again with a current llama.cpp, or give its Hugging Face folder"
        )
    return ids
