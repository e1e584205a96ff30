"""Reads checkpoint tensors lazily and strictly, one at a time, under Hugging Face's names.

A format (`safetensors_source`, `gguf_source`) supplies a `LazyTensor` per name, `TensorTable` the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from oxidize.runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class BlockQuantized:
    """A [N,K] weight stored as symmetric blocks along K, exactly as the source had it.

    quants: int8 [N,K] in [-8,7] for bits 4 or [-128,127] for bits 8; scales: float32 [N,K/block].
    """

    bits: int
    block: int
    quants: np.ndarray
    scales: np.ndarray


class WeightSource(Protocol):
    """Tensors of one checkpoint. Each read is recorded, so that unread tensors can be refused at the end."""

    def names(self) -> list[str]:
        """All tensor names, Hugging Face style ("model.layers.0.self_attn.q_proj.weight")."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape without reading it; a missing name is a CheckpointError naming the file."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor as float32, C-contiguous; a shape other than expected is a CheckpointError."""
        ...

    def read_quantized(self, name: str) -> BlockQuantized | None:
        """The blocks of a Q4_0 or Q8_0 tensor without loss, else None (then use `read`)."""
        ...

    def unread(self) -> list[str]:
        """Names nobody has read yet."""
        ...


class LazyTensor(Protocol):
    """One tensor at rest. Nothing is held in memory until it is loaded."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        ...

    def load(self) -> np.ndarray:
        """The values as a fresh C-contiguous float32 array."""
        ...

    def blocks(self) -> BlockQuantized | None:
        """The quantised blocks where the source has lossless ones, else None."""
        ...


class TensorTable:
    """The `WeightSource` over stored tensors of any format."""

    def __init__(self, origin: str, tensors: Mapping[str, LazyTensor]):
        self._origin = origin  # the file or folder that error messages name
        self._tensors = dict(tensors)
        self._unread = dict.fromkeys(self._tensors)

    def names(self) -> list[str]:
        """All tensor names in the source's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self._get(name).shape

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """See `WeightSource.read`."""
        stored = self._get(name)
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"{self._origin}: tensor {name} has shape {list(stored.shape)}, the config asks for "
                f"{list(shape)}; config and weights are not of the same model"
            )
        values = stored.load()
        self._unread.pop(name, None)
        return values

    def read_quantized(self, name: str) -> BlockQuantized | None:
        """See `WeightSource.read_quantized`."""
        blocks = self._get(name).blocks()
        if blocks is not None:
            self._unread.pop(name, None)
        return blocks

    def unread(self) -> list[str]:
        """Names nobody has read yet, in the source's order."""
        return list(self._unread)

    def _get(self, name: str) -> LazyTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._origin} has no tensor {name}, which its config asks for; it is incomplete")
        return stored
