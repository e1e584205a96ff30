"""Tensors of one source under other names, for checkpoints that hold more than one model."""

from collections.abc import Mapping

import numpy as np

from oxidize.runtime.errors import CheckpointError

from ..weights import BlockQuantized, WeightSource


class TensorView:
    """Some tensors of another source, under names of their own. `names` maps them to the source's."""

    def __init__(self, source: WeightSource, names: Mapping[str, str], origin: str) -> None:
        self._source = source
        self._stored = dict(names)
        self._origin = origin  # what error messages name

    def names(self) -> list[str]:
        """See `WeightSource.names`."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self._source.shape(self._find(name))

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """See `WeightSource.read`."""
        return self._source.read(self._find(name), shape)

    def read_quantized(self, name: str) -> BlockQuantized | None:
        """See `WeightSource.read_quantized`."""
        return self._source.read_quantized(self._find(name))

    def unread(self) -> list[str]:
        """See `WeightSource.unread`."""
        left = set(self._source.unread())
        return [name for name, stored in self._stored.items() if stored in left]

    def _find(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"{self._origin} has no tensor {name}, which its config asks for; it is incomplete")
        return self._stored[name]
