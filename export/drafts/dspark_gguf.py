"""Reads DSpark drafts in GGUF: architecture "dflash" as well, told by the tensors of the heads.

Names are those of llama.cpp's src/models/dflash.cpp. It knows the plain Markov head alone, whose rank is the width of
its codes, and a confidence head that reads codes too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from oxidize.runtime.errors import CheckpointError

from ..config import ModelConfig
from ..gguf_file import GgufFile, read_gguf
from ..gguf_source import GgufTensor
from ..weights import BlockQuantized, LazyTensor
from .base import CONFIDENCE, MARKOV, DraftCheckpoint, MarkovHead
from .dflash_common import assemble, refuse_foreign
from .dflash_gguf import ARCHITECTURE, opened_gguf, stated_by_gguf
from .dspark import NAME

_TENSORS = {
    "markov_w1.weight": f"{MARKOV}.markov_w1.weight",
    "markov_w2.weight": f"{MARKOV}.markov_w2.weight",
    "conf_proj.weight": f"{CONFIDENCE}.weight",
    "conf_proj.bias": f"{CONFIDENCE}.bias",
}
_ANCHOR, _CONFIDENT = f"{ARCHITECTURE}.sample_from_anchor", f"{ARCHITECTURE}.has_confidence_head"


@dataclass(frozen=True, slots=True)
class OneRow:
    """A vector [n] as [1,n]: llama.cpp's tools leave out outer dimensions of 1."""

    tensor: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        return (1, *self.tensor.shape)

    def load(self) -> np.ndarray:
        """The values as float32."""
        return self.tensor.load().reshape(self.shape)

    def blocks(self) -> BlockQuantized | None:
        """Never quantised."""
        return None


def recognises_dspark_gguf(file: GgufFile) -> bool:
    """Whether a GGUF file is a DSpark draft."""
    known = file.metadata.get("general.architecture") == ARCHITECTURE
    return known and any(place.name.startswith(("markov", "conf_proj")) for place in file.tensors)


def read_dspark_gguf(path: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft for this target; see `dflash_hf.read_dflash`."""
    file = read_gguf(path)
    refuse_foreign((place.name for place in file.tensors), path, NAME)
    plain = replace(
        file,
        metadata={_ANCHOR: True} | {key: value for key, value in file.metadata.items() if key != _CONFIDENT},
        tensors=tuple(place for place in file.tensors if place.name not in _TENSORS),
    )
    opened, heads = opened_gguf(plain), _heads(file)
    stated = replace(stated_by_gguf(plain, target), markov=_markov(file, heads))
    return assemble(stated, replace(opened, tensors={**opened.tensors, **heads}), target, force)


def _heads(file: GgufFile) -> dict[str, LazyTensor]:
    """The tensors of the heads by canonical name."""
    found: dict[str, LazyTensor] = {}
    for place in file.tensors:
        if place.name in _TENSORS:
            tensor = GgufTensor(file.path, place)
            single = place.name == "conf_proj.weight" and len(place.shape) == 1
            found[_TENSORS[place.name]] = OneRow(tensor) if single else tensor
    return found


def _markov(file: GgufFile, heads: Mapping[str, LazyTensor]) -> MarkovHead:
    codes = heads.get(f"{MARKOV}.markov_w1.weight")
    if codes is None or len(codes.shape) != 2:
        raise CheckpointError(
            f"{file.path} has no tensor markov_w1.weight of two dimensions, whose width is the head's rank; "
            "convert the draft again"
        )
    confident = f"{CONFIDENCE}.weight" in heads
    said = file.metadata.get(_CONFIDENT)
    if said is not None and said is not confident:
        raise CheckpointError(
            f"{file.path}: {_CONFIDENT} = {said}, but there is {'a' if confident else 'no'} tensor conf_proj.weight; "
            "convert the draft again"
        )
    return MarkovHead(codes.shape[1], confident=confident, confidence_bias=f"{CONFIDENCE}.bias" in heads)
