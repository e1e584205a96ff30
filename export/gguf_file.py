"""The GGUF container: header, metadata and the place of each tensor, checked against the file's size.

Parsed here and not with `gguf.GGUFReader`, which makes several arrays per string (a 262k vocabulary takes it
seconds and hundreds of megabytes) and slices past the end of a truncated file without noticing. The format is
described in ggml's docs/gguf.md.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from oxidize.runtime.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMENSIONS = 4
_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
READABLE = tuple(GGMLQuantizationType[name] for name in _TYPES)
INTEGERS = (GGMLQuantizationType.I32, GGMLQuantizationType.I64)  # token ids, not weights: `gguf_source.read_integers`


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: `start` and `size` in bytes of the file; `shape` is outermost first."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked header. Metadata values are str, int, float, bool or lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorPlace, ...]


def read_gguf(path: Path) -> GgufFile:
    """Parse and check a GGUF file's header; anything unreadable is a CheckpointError naming it."""
    try:
        with path.open("rb") as stream:
            return _Header(path, stream).parse()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


class _Header:
    """A cursor over the header of one file that never runs past its end."""

    def __init__(self, path: Path, stream: BinaryIO):
        self._path = path
        self._stream = stream
        self._position = 0
        self._size = path.stat().st_size

    def parse(self) -> GgufFile:
        magic = self._take(min(4, self._size))
        if magic != _MAGIC:
            raise CheckpointError(
                f"{self._path} is not a GGUF file: it begins with {magic!r}; for safetensors give the folder"
            )
        self._check_version(self._u32())
        tensor_count, pair_count = self._u64(), self._u64()
        metadata = self._metadata(pair_count)
        heads = [self._tensor_head() for _ in range(tensor_count)]
        return GgufFile(self._path, metadata, self._places(heads, metadata.get("general.alignment", 32)))

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self._path} is a big-endian GGUF file; convert it to little-endian")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}, this version reads 2 and 3; convert the model again"
            )

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._text()
            if key in metadata:
                raise CheckpointError(f"{self._path}: metadata key {key} occurs twice; the file is damaged")
            metadata[key] = self._value(key, self._u32())
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(key, kind, 1)[0]
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: metadata key {key} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return (values != 0).tolist() if kind == _BOOL else values.tolist()

    def _tensor_head(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._text(), self._u32()
        if dimensions > _MAX_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {name} has {dimensions} dimensions; the file is damaged")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        return name, self._u32(), shape, self._u64()

    def _places(self, heads: list[tuple[str, int, tuple[int, ...], int]], alignment: Any) -> tuple[TensorPlace, ...]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self._path}: general.alignment must be a power of two, not {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        places = tuple(self._place(name, kind, shape, data_start + offset) for name, kind, shape, offset in heads)
        end, names = 0, set()
        for place in sorted(places, key=lambda place: place.start):
            if place.start < end or place.name in names:
                raise CheckpointError(
                    f"{self._path}: tensor {place.name} overlaps or repeats another; download it again"
                )
            end = place.start + place.size
            names.add(place.name)
        return places

    def _place(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> TensorPlace:
        if kind not in READABLE + INTEGERS:
            known = {item.value: item.name for item in GGMLQuantizationType}
            raise CheckpointError(
                f"{self._path}: tensor {name} has the type {known.get(kind, kind)}, which is not readable "
                f"here; use a file with {', '.join(_TYPES)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % block:
            raise CheckpointError(f"{self._path}: tensor {name} {list(shape)} is not made of blocks of {block}")
        size = math.prod(shape) // block * block_bytes
        if start + size > self._size:
            raise CheckpointError(
                f"{self._path} is truncated: tensor {name} ends at byte {start + size}, the file at "
                f"{self._size}; download it again"
            )
        return TensorPlace(name, GGMLQuantizationType(kind), shape, start, size)

    def _text(self) -> str:
        raw = self._take(self._u64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: {raw[:20]!r} in the header is not UTF-8") from None

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._position:
            raise CheckpointError(
                f"{self._path} is truncated: its header goes on past byte {self._size}; download it again"
            )
        self._position += count
        return self._stream.read(count)
