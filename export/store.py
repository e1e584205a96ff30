"""The external data file of a bundle: tensors are appended once each, page-aligned, one at a time.

Knows bytes, offsets and keys; nothing of ONNX or models.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

PAGE = 4096  # so that a runtime can map each tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. `dtype` is ONNX's name; "uint4" holds two elements a byte, low nibble first."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def viewed(self, shape: tuple[int, ...], dtype: str | None = None) -> "StoredTensor":
        """The same bytes under another shape or element type of the same total size."""
        dtype = dtype or self.dtype
        size = (math.prod(shape) * _bits(dtype) + 7) // 8
        if size != self.length:
            raise ValueError(f"{dtype}{list(shape)} has {size} bytes, the stored tensor has {self.length}")
        return StoredTensor(self.file, dtype, shape, self.offset, self.length)


class TensorStore:
    """Appends tensors to one file; a key that is already there is not made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")
        self._tensors: dict[str, StoredTensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __getitem__(self, key: str) -> StoredTensor:
        return self._tensors[key]

    def put(self, key: str, make: Callable[[], np.ndarray]) -> StoredTensor:
        """The tensor of this key; `make` is called, and its array written, the first time only."""
        if key not in self._tensors:
            self._tensors[key] = self._append(make())
        return self._tensors[key]

    def _append(self, array: np.ndarray) -> StoredTensor:
        array = np.ascontiguousarray(array)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        offset = self._stream.tell()
        padding = -offset % PAGE
        self._stream.write(bytes(padding))
        self._stream.write(array.reshape(-1).view(np.uint8).data)
        return StoredTensor(self.path.name, array.dtype.name, array.shape, offset + padding, array.nbytes)


def _bits(dtype: str) -> int:
    return 4 if dtype in ("uint4", "int4") else np.dtype(dtype).itemsize * 8
