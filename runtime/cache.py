"""The KV cache: slots, one absolute length per slot, storage that ONNX Runtime reads and writes in place."""

from dataclasses import dataclass

import numpy as np

from .session import Device, Tensor

_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one slot of the cache holds."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"


class KVCache:
    """Keys and values of every layer, [slots, kv_heads, capacity, head_dim] each, aliased as input and output.

    `lengths[slot]` is the truth; rows past it are stale and never read. Capacity grows in powers of two, which moves
    the storage: `generation` then changes and bindings to the old storage must be made again.
    """

    def __init__(self, shape: CacheShape, slots: int, device: Device) -> None:
        self.shape, self.slots, self.device = shape, slots, device
        self.lengths = [0] * slots
        self.generation = 0
        self.capacity = _FIRST_CAPACITY
        self.tensors = self._allocate(self.capacity)

    def reserve(self, length: int) -> None:
        """Make room for `length` rows in every slot."""
        if length > self.capacity:
            self._grow(1 << (length - 1).bit_length())

    def advance(self, slot: int, rows: int) -> None:
        """Rows were written behind the slot's length; they count from now on."""
        length = self.lengths[slot] + rows
        if rows < 0 or length > self.capacity:
            raise ValueError(f"advance({slot}, {rows}) leaves [0, {self.capacity}] from length {self.lengths[slot]}")
        self.lengths[slot] = length

    def rewind_to(self, slot: int, length: int) -> None:
        """Forget everything past an absolute length, in O(1)."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"rewind_to({slot}, {length}) is outside [0, {self.lengths[slot]}]")
        self.lengths[slot] = length

    def wipe(self, slot: int) -> None:
        """Forget all of a slot, and overwrite its rows with zeros: a pass that overflowed leaves some that masks do
        not hide, because they multiply what they hide by zero."""
        self.lengths[slot] = 0
        for tensor in self.tensors:
            array = tensor.read()
            array[slot] = 0
            if tensor.host is None:
                tensor.write(array)

    def fill_stale(self, value: float) -> None:
        """Overwrite every row past each slot's length; a diagnostic for tests that stale rows never leak."""
        for tensor in self.tensors:
            array = tensor.read()
            for slot, length in enumerate(self.lengths):
                array[slot, :, length:] = value
            tensor.write(array)

    def slot_elements(self) -> int:
        """Elements of one slot in one tensor, for binding a range of slots."""
        return self.shape.kv_heads * self.capacity * self.shape.head_dim

    def _allocate(self, capacity: int) -> list[Tensor]:
        shape = (self.slots, self.shape.kv_heads, capacity, self.shape.head_dim)
        return [Tensor(shape, self.shape.dtype, self.device) for _ in range(2 * self.shape.layers)]

    def _grow(self, capacity: int) -> None:
        kept = max(self.lengths)
        for index, old in enumerate(self.tensors):
            new = Tensor((*old.shape[:2], capacity, old.shape[3]), self.shape.dtype, self.device)
            if kept:
                _copy_rows(old, new, kept)
            self.tensors[index] = new
        self.capacity = capacity
        self.generation += 1


def _copy_rows(old: Tensor, new: Tensor, rows: int) -> None:
    if new.host is not None:
        new.host[:, :, :rows] = old.read()[:, :, :rows]
        return
    whole = np.zeros(new.shape, new.dtype)
    whole[:, :, :rows] = old.read()[:, :, :rows]
    new.write(whole)
