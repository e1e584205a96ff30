"""Reads safetensors checkpoints, single or sharded, in F32, F16 and BF16.

The header is checked before any tensor is handed out: every byte of the data belongs to exactly one tensor.
Plain file reads, not a mapping: a file cut short meanwhile is an error and no crash, and memory stays
bounded.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oxidize.runtime.errors import CheckpointError

from .weights import BlockQuantized

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit, bytes
_CHUNK = 1 << 20  # elements converted at a time
_WIDTHS = {
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("I64", "U64", "F64"),
}
_BITS = {name: bits for bits, names in _WIDTHS.items() for name in names}
_ON_DISK = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor in a safetensors file; `start` counts bytes from the beginning of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def load(self) -> np.ndarray:
        """The values as float32; other dtypes than F32, F16 and BF16 are a CheckpointError."""
        stored = _ON_DISK.get(self.dtype)
        if stored is None:
            raise CheckpointError(
                f"{self.path}: tensor {self.name} is {self.dtype}, only F32, F16 and BF16 can be exported"
            )
        values = np.empty(math.prod(self.shape), np.float32)
        for begin, piece in self.pieces(stored):
            values[begin : begin + piece.size] = _widen_bf16(piece) if self.dtype == "BF16" else piece
        return values.reshape(self.shape)

    def pieces(self, stored: str) -> Iterator[tuple[int, np.ndarray]]:
        """The elements as they lie in the file, a bounded number at a time, each with its first index."""
        count = math.prod(self.shape)
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.start)
                for begin in range(0, count, _CHUNK):
                    piece = np.fromfile(stream, stored, min(_CHUNK, count - begin))
                    if piece.size < min(_CHUNK, count - begin):
                        raise CheckpointError(f"{self.path} ends inside tensor {self.name}; download it again")
                    yield begin, piece
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error

    def blocks(self) -> BlockQuantized | None:
        """Never quantised."""
        return None


def find_safetensors(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder: one `model.safetensors`, or the index's shards in order."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds pickled weights only, which can run code when loaded; convert them to "
            f"{SINGLE_NAME} (transformers: model.save_pretrained) and export again"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; it is not a complete checkpoint")


def read_safetensors(
    folder: Path, rename: Callable[[str], str | None] = lambda name: name
) -> dict[str, SafetensorsTensor]:
    """All tensors of a checkpoint folder, nothing loaded. `rename` maps a stored name; None leaves it out."""
    tensors: dict[str, SafetensorsTensor] = {}
    for path in find_safetensors(folder):
        for stored in read_header(path):
            name = rename(stored.name)
            if name is None:
                continue
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {stored.name} occurs twice in {folder}; remove stale shards")
            tensors[name] = stored
    index = folder / INDEX_NAME
    if index.is_file() and not (folder / SINGLE_NAME).is_file():
        _check_index(index, tensors, rename)
    return tensors


def same_values(left: SafetensorsTensor, right: SafetensorsTensor) -> bool:
    """Whether two tensors of one type are equal byte for byte; neither is held in memory."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    stored = f"<u{_BITS[left.dtype] // 8}"
    pairs = zip(left.pieces(stored), right.pieces(stored), strict=True)
    return all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def read_header(path: Path) -> list[SafetensorsTensor]:
    """The tensors a safetensors file declares, after checking that they tile its data exactly."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path} is truncated or not safetensors: a header of {length} bytes in a file "
                    f"of {size}; download it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; download it again") from error
    entries = _parse_header(path, text)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    _check_tiling(path, tensors, 8 + length, size)
    return tensors


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: {twice} occurs twice in the header; the file is damaged")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON; download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object; download it again")
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers_ok = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        bits = _BITS[dtype] * math.prod(shape) if numbers_ok else -1
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header entry of tensor {name} is malformed; download it again") from None
    if bits < 0 or bits != 8 * (end - begin):
        raise CheckpointError(
            f"{path}: tensor {name} ({dtype} {list(shape)}) does not fill its bytes {begin}..{end}; download it again"
        )
    return SafetensorsTensor(path, name, dtype, shape, data_start + begin)


def _check_tiling(path: Path, tensors: list[SafetensorsTensor], data_start: int, size: int) -> None:
    position = data_start
    for stored in sorted(tensors, key=lambda stored: (stored.start, _nbytes(stored))):
        if stored.start != position:
            what = "overlaps another tensor" if stored.start < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {stored.name} {what}; the file is damaged, download it again")
        position += _nbytes(stored)
        if position > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {stored.name} ends at byte {position}, the file at {size}; "
                "download it again"
            )
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor; download it again")


def _nbytes(stored: SafetensorsTensor) -> int:
    return _BITS[stored.dtype] * math.prod(stored.shape) // 8


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name, from the index; a name that leaves the folder is refused."""
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(shard) for name, shard in mapping.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{index} has no readable weight_map; download it again") from None
    for name, shard in entries.items():
        if not shard or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(f"{index}: tensor {name} lies in {shard!r}, which is not a file of this folder")
    if not entries:
        raise CheckpointError(f"{index} lists no tensors; download it again")
    return entries


def _check_index(index: Path, tensors: Mapping[str, SafetensorsTensor], rename: Callable[[str], str | None]) -> None:
    listed = {renamed: shard for name, shard in _weight_map(index).items() if (renamed := rename(name)) is not None}
    for name, shard in listed.items():
        stored = tensors.get(name)
        if stored is None or stored.path.name != shard:
            raise CheckpointError(f"{index.parent / shard} lacks tensor {name}, which {index.name} puts there")
    extra = [name for name in tensors if name not in listed]
    if extra:
        raise CheckpointError(f"tensor {extra[0]} is in a shard but not in {index}; the folder mixes two checkpoints")


def _widen_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 from the bits of bfloat16, which are its upper half: uint16 [n] -> float32 [n]."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
