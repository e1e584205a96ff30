"""Turns checkpoint tensors into the stored forms graphs refer to, one tensor at a time.

Each form has a key, so a second graph or profile that wants the same form gets the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from oxidize.runtime.errors import CheckpointError

from .config import RopeConfig
from .quantize import BLOCK, Blocks, concatenate, from_symmetric, pack, pack_nibbles, quantize
from .rope import rope_tables
from .store import StoredTensor, TensorStore
from .weights import WeightSource

Progress = Callable[[str, int, int], None]  # tensor name, weights done, weights in all


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A quantised [N,K] matrix: packed uint8 [N, K/32, 32*bits/8], scales [N, K/32] and, if any, 4-bit zero points.

    zeros: uint8 [N, K/64], each row packed on its own; flat_zeros: uint4 [N, K/32], packed without gaps.
    """

    bits: int
    columns: int
    packed: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    flat_zeros: StoredTensor | None = None

    @property
    def rows(self) -> int:
        """N."""
        return self.packed.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return self.packed.shape[1]


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear maps of one input, stacked: weights [rows[i], columns] by name, without the ".weight".

    part: which matrix of a layer it is ("qkv", "o", "gate_up", "down"), or "table".
    """

    part: str
    key: str
    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool = False


class ModelTensors:
    """The stored tensors of one model. `dtype` is the type of activations, vectors and dense matrices."""

    def __init__(self, source: WeightSource, store: TensorStore, dtype: str, progress: Progress | None) -> None:
        self.dtype = np.dtype(dtype)
        self._source = source
        self._store = store
        self._progress = progress
        self._blocks: dict[str, StoredBlocks] = {}
        self._done = 0
        self._total = sum(int(np.prod(source.shape(name))) for name in source.names()) if progress else 0

    def vector(self, name: str, size: int, offset: float = 0.0) -> StoredTensor:
        """A norm weight [size] plus offset."""
        return self._store.put(name, lambda: self._cast(name, self._read(name, (size,)) + np.float32(offset)))

    def bias(self, projection: Projection) -> StoredTensor:
        """The biases of a projection, [N]."""
        names = [f"{name}.bias" for name in projection.names]

        def make() -> np.ndarray:
            parts = [self._read(name, (rows,)) for name, rows in zip(names, projection.rows, strict=True)]
            return self._cast(names[0], np.concatenate(parts))

        return self._store.put(f"{projection.key}.bias", make)

    def dense(self, projection: Projection) -> StoredTensor:
        """The weights of a projection as MatMul wants them, [K,N]."""

        def make() -> np.ndarray:
            out = np.empty((projection.columns, sum(projection.rows)), self.dtype)
            start = 0
            for name, rows in zip(projection.names, projection.rows, strict=True):
                weight = self._read(f"{name}.weight", (rows, projection.columns))
                out[:, start : start + rows] = self._cast(name, weight).T
                start += rows
            return out

        return self._store.put(f"{projection.key}.weight", make)

    def table(self, name: str, rows: int, columns: int) -> StoredTensor:
        """A matrix as it is, [N,K]: an embedding table, or a head that multiplies by its transpose."""
        weight = f"{name}.weight"
        return self._store.put(weight, lambda: self._cast(weight, self._read(weight, (rows, columns))))

    def blocks(self, projection: Projection, bits: int, zero_points: bool = False) -> StoredBlocks:
        """The weights of a projection quantised in blocks of `bits`.

        Blocks of Q4_0 and Q8_0 sources are kept without loss where they have so many bits, or fewer.
        """
        if projection.key not in self._blocks:
            weight = self._quantized(projection, bits, zero_points)
            key = f"{projection.key}.blocks"
            packed = self._store.put(f"{key}.packed", lambda: pack(weight))
            scales = self._store.put(f"{key}.scales", lambda: self._cast(projection.key, weight.scales))
            zeros, flat = self._zeros(key, weight.zeros)
            stored = StoredBlocks(weight.bits, projection.columns, packed, scales, zeros, flat)
            self._blocks[projection.key] = stored
        return self._blocks[projection.key]

    def rope(self, rope: RopeConfig, head_dim: int, positions: int) -> tuple[StoredTensor, StoredTensor]:
        """The cos and sin tables [positions, head_dim/2], once per distinct rope."""
        key = f"rope.{rope}.{head_dim}.{positions}"
        if f"{key}.cos" not in self._store:
            for part, table in zip(("cos", "sin"), rope_tables(rope, head_dim, positions), strict=True):
                self._store.put(f"{key}.{part}", lambda table=table: table.astype(self.dtype))
        return self._store[f"{key}.cos"], self._store[f"{key}.sin"]

    def filled(self, value: int, shape: Sequence[int]) -> StoredTensor:
        """A uint8 tensor of one value."""
        key = f"filled.{value}.{'x'.join(map(str, shape))}"
        return self._store.put(key, lambda: np.full(shape, value, np.uint8))

    def _quantized(self, projection: Projection, bits: int, zero_points: bool) -> Blocks:
        shapes = {
            f"{name}.weight": (rows, projection.columns)
            for name, rows in zip(projection.names, projection.rows, strict=True)
        }
        given = {name: self._source.read_quantized(name) for name in shapes}
        if all(blocks is not None and blocks.bits == 4 for blocks in given.values()):
            bits = 4
        parts = []
        for name, shape in shapes.items():
            blocks = given[name]
            if blocks is not None and (blocks.bits, blocks.block, blocks.quants.shape) == (bits, BLOCK, shape):
                self._report(name, blocks.quants.size)
                parts.append(from_symmetric(blocks))
            else:
                parts.append(quantize(self._read(name, shape), bits, zero_points))
        return concatenate(parts) if len(parts) > 1 else parts[0]

    def _zeros(self, key: str, zeros: np.ndarray | None) -> tuple[StoredTensor | None, StoredTensor | None]:
        if zeros is None:
            return None, None
        packed = self._store.put(f"{key}.zeros", lambda: pack_nibbles(zeros))
        if zeros.shape[1] % 2 == 0:
            return packed, packed.viewed(zeros.shape, "uint4")
        flat = self._store.put(f"{key}.zeros.flat", lambda: pack_nibbles(zeros.reshape(-1)))
        return packed, flat.viewed(zeros.shape, "uint4")

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = self._source.read(name, shape)
        self._report(name, array.size)
        return array

    def _report(self, name: str, size: int) -> None:
        self._done += size
        if self._progress:
            self._progress(name, self._done, self._total)

    def _cast(self, name: str, array: np.ndarray) -> np.ndarray:
        if self.dtype == np.float32:
            return array
        with np.errstate(over="ignore"):
            cast = array.astype(self.dtype)
        if not np.isfinite(cast).all():
            raise CheckpointError(f"{name} has values beyond {self.dtype}'s range; export with --precision fp32")
        return cast
