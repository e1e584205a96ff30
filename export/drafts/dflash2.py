"""Reads DFlash 2 drafts in z-lab's layout: DFlash with convolutions over each block and a selector of paths."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, read_json
from ..config_keys import Keys
from ..weights import BlockQuantized, LazyTensor
from .base import DraftCheckpoint, PathSelection
from .dflash_common import CODEBOOKS, CONVOLUTIONS, Stated, assemble
from .dflash_hf import ARCHITECTURE as DFLASH
from .dflash_hf import either, open_tensors, stated_by_hf

ARCHITECTURE = "DFlash2DraftModel"
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OWN = (*SIZES, "output_multiplier", "final_logit_softcapping")
_BARE = ("base_kernel", *(f"{part}_codebook" for part in CODEBOOKS))  # stored without the ending ".weight"


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A tensor with its outer dimensions as one, [a,b,H] -> [a*b,H]."""

    tensor: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        outer, inner, width = self.tensor.shape
        return (outer * inner, width)

    def load(self) -> np.ndarray:
        """The values as float32."""
        return self.tensor.load().reshape(self.shape)

    def blocks(self) -> BlockQuantized | None:
        """Never quantised."""
        return None


def recognises_dflash2(raw: Mapping[str, Any]) -> bool:
    """Whether a decoded config.json is of a DFlash 2 draft in z-lab's layout."""
    return raw.get("architectures") == [ARCHITECTURE]


def read_dflash2(folder: Path, target: ModelConfig, force: bool = False) -> DraftCheckpoint:
    """Open a draft for this target; see `dflash_hf.read_dflash`."""
    config = folder / CONFIG_NAME
    stated = stated_by_dflash2(read_json(config), str(config))
    opened = open_tensors(folder, allowed="DFlash2")
    tensors = {}
    for name, tensor in opened.tensors.items():
        bare = name.rpartition(".")[2] in _BARE
        flat = len(tensor.shape) == 3 and any(f"{part}.base_kernel" in name for part in CONVOLUTIONS)
        stored = FlatTensor(tensor) if flat else tensor
        tensors[f"{name}.weight" if bare else name] = stored
    return assemble(stated, replace(opened, tensors=tensors), target, force)


def stated_by_dflash2(raw: Mapping[str, Any], where: str) -> Stated:
    """What a decoded config.json says; `where` begins every error message."""
    nested = raw.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    inner = Keys({key: nested[key] for key in nested if key in _OWN}, {}, f"{where}: dflash_config")
    top = Keys({key: raw[key] for key in raw if key in _OWN}, {}, where)
    plain = {key: value for key, value in raw.items() if key not in _OWN}
    plain["dflash_config"] = {key: value for key, value in nested.items() if key not in _OWN}
    stated = stated_by_hf({**plain, "architectures": [DFLASH]}, where)
    taps, group, rank, top_k = (either(top, inner, key).size(key) for key in SIZES)
    paths = PathSelection(
        conv_taps=taps,
        conv_group=group,
        rank=rank,
        top_k=top_k,
        multiplier=either(top, inner, "output_multiplier").number("output_multiplier", 1.0),
        softcap=either(top, inner, "final_logit_softcapping").optional_number("final_logit_softcapping") or None,
    )
    return replace(stated, paths=paths)
