"""The tensors of a foreign ONNX file: their bytes, wherever they lie, and their move into a bundle's weights file."""

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from oxidize.runtime.errors import BundleError, CheckpointError
from oxidize.runtime.manifest import check_relative

from .store import TensorStore

_SMALL = 1024  # bytes up to which a tensor stays inside the graph file
_HALF_BYTE = ("uint4", "int4", "float4e2m1")
_NO_NUMBERS = ("undefined", "string", "uint2", "int2")


class ForeignTensors:
    """The initializers of the graph file at `path`, by name. Damage and odd places are CheckpointErrors."""

    def __init__(self, path: Path, tensors: dict[str, onnx.TensorProto]) -> None:
        self.path = path
        self._tensors = tensors

    def data_files(self) -> tuple[Path, ...]:
        """The files its tensors lie in, apart from itself."""
        names = {_place(tensor)["location"] for tensor in self._tensors.values() if _is_external(tensor)}
        return tuple(self._data_file(name) for name in sorted(names))

    def moved(
        self, source: str, name: str, store: TensorStore, dims: tuple[int, ...] | None = None
    ) -> onnx.TensorProto:
        """The tensor `source` under a new name and, if given, shape; its bytes go to `store` unless they are few."""
        tensor, key = self._tensors[source], source
        if dims is not None:
            tensor = _reshaped(tensor, dims)
        moved = onnx.TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
        if not _is_external(tensor) and (not tensor.HasField("raw_data") or len(tensor.raw_data) <= _SMALL):
            moved.CopyFrom(tensor)
            moved.name = name
            return moved
        if _is_external(tensor):
            place = _place(tensor)
            key = f"{place['location']}:{place.get('offset')}:{place.get('length')}"
        stored = store.put(key, lambda: self._bytes(tensor))
        moved.data_location = onnx.TensorProto.EXTERNAL
        for field, value in (("location", stored.file), ("offset", stored.offset), ("length", stored.length)):
            moved.external_data.add(key=field, value=str(value))
        return moved

    def inline(self, name: str) -> onnx.TensorProto:
        """The tensor with its bytes in it."""
        tensor = self._tensors[name]
        if not _is_external(tensor):
            return tensor
        raw = self._bytes(tensor).tobytes()
        return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)

    def _bytes(self, tensor: onnx.TensorProto) -> np.ndarray:
        """The tensor's bytes [n] as they are stored."""
        if not _is_external(tensor):
            return np.frombuffer(tensor.raw_data, np.uint8)
        place, expected = _place(tensor), _size(tensor)
        path, offset = self._data_file(place["location"]), _number(place.get("offset", "0"))
        length = _number(place.get("length", str(expected)))
        try:
            there = path.stat().st_size - offset
            if length == expected <= there:
                return np.fromfile(path, np.uint8, length, offset=offset)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}; is the folder complete?") from None
        raise CheckpointError(
            f"{path}: tensor {tensor.name} takes {expected} bytes, {length} are named and {max(there, 0)} are there; "
            "download the file again"
        )

    def _data_file(self, location: str) -> Path:
        try:
            check_relative(location)
        except BundleError:
            raise CheckpointError(
                f"{self.path} keeps weights at {location!r}, which is no plain path inside its folder; it is not read"
            ) from None
        return self.path.parent / location


def type_name(number: int) -> str:
    """The name contracts use for an element type of ONNX."""
    name = onnx.TensorProto.DataType.Name(number) if number in onnx.TensorProto.DataType.values() else "UNDEFINED"
    return {"FLOAT": "float32"}.get(name, name.lower())


def _reshaped(tensor: onnx.TensorProto, dims: tuple[int, ...]) -> onnx.TensorProto:
    result = onnx.TensorProto()
    result.CopyFrom(tensor)
    del result.dims[:]
    result.dims.extend(dims)
    return result


def _is_external(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def _place(tensor: onnx.TensorProto) -> dict[str, str]:
    """Location, offset and length of external data."""
    return {"location": "", **{item.key: item.value for item in tensor.external_data}}


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise CheckpointError(f"external data at {text!r} is at no place in a file; download the ONNX file again")
    return int(text)


def _size(tensor: onnx.TensorProto) -> int:
    """Bytes of a stored tensor."""
    count, name = math.prod(tensor.dims), type_name(tensor.data_type)
    if name in _HALF_BYTE:
        return (count + 1) // 2
    if name in _NO_NUMBERS:
        raise CheckpointError(f"tensor {tensor.name} is of type {name}, which no weights are; download the file again")
    return count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
