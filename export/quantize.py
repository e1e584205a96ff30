"""Block quantisation of weight matrices, and the packing of ONNX Runtime's MatMulNBits. Numpy only.

A block is 32 consecutive weights of one output row; w is stored as scale * (code - zero). A code has 4 or 8 bits;
the zero point is the middle of the range, or, at 4 bits, one more 4-bit number a block: that costs no time on the
CPU and takes a tenth to a sixth off the error.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .weights import BlockQuantized

BLOCK = 32
THREADS = 2  # numpy releases the GIL in everything that costs time here
TINY = 1e-30  # weights below are zero: their inverse would overflow
CHUNK = 8192  # blocks per piece of work: 1 MB of float32, small enough for the cache
SYMMETRIC_GRID = np.linspace(0.86, 1.10, 9, dtype=np.float32)  # of the inverse scale, -8 / (largest weight)
ZERO_POINT_GRID = np.linspace(0.95, 1.11, 5, dtype=np.float32)  # of the inverse scale, 15 / (range of weights)

Quantised = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes [n,32], scales [n], zeros [n]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised [N,K] matrix: codes uint8 [N,K], scales float32 [N, K/32], zeros uint8 [N, K/32].

    zeros None means the middle, 8 or 128, everywhere. The last block of a row may be shorter than 32.
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None

    @property
    def middle(self) -> int:
        """The zero point of symmetric blocks."""
        return 1 << (self.bits - 1)


def quantize(weight: np.ndarray, bits: int, zero_points: bool = False) -> Blocks:
    """Quantise a float32 [N,K] matrix to 4 or 8 bits; `zero_points` is for 4 bits."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    flat = _padded(weight, blocks * BLOCK, 0).reshape(-1, BLOCK)
    codes = np.empty((rows * blocks, BLOCK), np.uint8)
    scales = np.empty(rows * blocks, np.float32)
    zeros = np.empty(rows * blocks, np.uint8)
    fit = _fit8 if bits == 8 else _fit4_zero_point if zero_points else _fit4_symmetric

    def work(start: int) -> None:
        piece = slice(start, start + CHUNK)
        codes[piece], scales[piece], zeros[piece] = fit(flat[piece])

    _parallel(work, range(0, len(flat), CHUNK))
    kept = zeros.reshape(rows, blocks) if bits == 4 and zero_points else None
    return Blocks(bits, codes.reshape(rows, -1)[:, :columns], scales.reshape(rows, blocks), kept)


def from_symmetric(weight: BlockQuantized) -> Blocks:
    """The blocks of a Q4_0 or Q8_0 tensor, without loss."""
    if weight.block != BLOCK:
        raise ValueError(f"blocks must have {BLOCK} weights, not {weight.block}")
    middle = np.uint8(1 << (weight.bits - 1))
    return Blocks(weight.bits, weight.quants.astype(np.uint8) + middle, weight.scales)  # wraps, as it should


def dequantize(weight: Blocks) -> np.ndarray:
    """The float32 [N,K] matrix that the blocks stand for."""
    zeros = np.full(weight.scales.shape, weight.middle, np.uint8) if weight.zeros is None else weight.zeros
    columns = weight.codes.shape[1]
    zeros, scales = (np.repeat(values, BLOCK, axis=1)[:, :columns] for values in (zeros, weight.scales))
    return (weight.codes.astype(np.float32) - zeros) * scales


def concatenate(weights: Sequence[Blocks]) -> Blocks:
    """Stack matrices of equal K and bits along N."""
    codes = np.concatenate([weight.codes for weight in weights])
    scales = np.concatenate([weight.scales for weight in weights])
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        filled = [np.full(w.scales.shape, w.middle, np.uint8) if w.zeros is None else w.zeros for w in weights]
        zeros = np.concatenate(filled)
    return Blocks(weights[0].bits, codes, scales, zeros)


def pack(weight: Blocks) -> np.ndarray:
    """MatMulNBits' B, uint8 [N, K/32, 32*bits/8]. GatherBlockQuantized reads the same bytes as [N, K*bits/8]."""
    rows, blocks = weight.scales.shape
    codes = _padded(weight.codes, blocks * BLOCK, weight.middle)
    return (pack_nibbles(codes) if weight.bits == 4 else codes).reshape(rows, blocks, -1)


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """Two values of 0..15 a byte along the last axis, the even one low: uint8 [..., n] -> uint8 [..., (n+1)/2]."""
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    return values[..., 0::2] | values[..., 1::2] << 4


def _padded(values: np.ndarray, width: int, fill: int) -> np.ndarray:
    missing = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill) if missing else values


def _fit4_symmetric(weight: np.ndarray) -> Quantised:
    """Blocks [n,32] around the fixed zero point 8. The scale has a sign: the largest weight may be the -8."""
    columns = np.array(weight.T, order="C")  # [32,n], to add whole rows
    largest = np.take_along_axis(columns, np.abs(columns).argmax(axis=0)[None], axis=0)[0]
    inverse = np.divide(-8.0, largest, out=np.zeros_like(largest), where=np.abs(largest) > TINY)
    columns *= inverse  # now in [-8,8]
    best = _Best(columns)
    for step in SYMMETRIC_GRID:
        best.offer(step, np.full_like(largest, 8))
    return best.quantised(inverse)


def _fit4_zero_point(weight: np.ndarray) -> Quantised:
    """Blocks [n,32] with a zero point each, next to where the smallest weight gets code 0."""
    columns = np.array(weight.T, order="C")  # [32,n]
    low, high = np.minimum(columns.min(axis=0), 0), np.maximum(columns.max(axis=0), 0)
    inverse = np.divide(15.0, high - low, out=np.zeros_like(low), where=high - low > TINY)
    columns *= inverse  # now at most 15 wide
    best = _Best(columns)
    for step in ZERO_POINT_GRID:
        below = np.floor(-low * inverse * step)
        best.offer(step, np.minimum(below, 15))
        best.offer(step, np.minimum(below + 1, 15))
    return best.quantised(inverse)


class _Best:
    """The best of the scales and zero points offered for each column of x [32,n], by least squares.

    For given q = code - zero the best scale is (x.q)/(q.q), which leaves an error of x.x - (x.q)^2/(q.q); so the
    largest (x.q)^2/(q.q) wins.
    """

    def __init__(self, columns: np.ndarray) -> None:
        self._columns = columns
        self._quants, self._products = np.empty_like(columns), np.empty_like(columns)
        count = columns.shape[1]
        self._gain, self._scale, self._step, self._zero = (np.zeros(count, np.float32) for _ in range(4))

    def offer(self, step: np.ndarray, zero: np.ndarray) -> None:
        """Try codes rint(x * step) + zero."""
        self._round(step, zero)
        dot = np.multiply(self._quants, self._columns, out=self._products).sum(axis=0)
        norm = np.multiply(self._quants, self._quants, out=self._products).sum(axis=0)
        scale = dot / np.maximum(norm, 1.0)
        better = dot * scale > self._gain
        np.copyto(self._gain, dot * scale, where=better)
        np.copyto(self._scale, scale, where=better)
        np.copyto(self._step, step, where=better)
        np.copyto(self._zero, zero, where=better)

    def quantised(self, inverse: np.ndarray) -> Quantised:
        """Codes, scales and zero points in terms of x / inverse."""
        self._round(self._step, self._zero)
        scales = np.divide(self._scale, inverse, out=np.zeros_like(inverse), where=inverse != 0)
        return (self._quants + self._zero).T.astype(np.uint8), scales, self._zero.astype(np.uint8)

    def _round(self, step: np.ndarray, zero: np.ndarray) -> None:
        np.multiply(self._columns, step, out=self._quants)
        np.rint(self._quants, out=self._quants)
        np.clip(self._quants, -zero, 15 - zero, out=self._quants)


def _fit8(weight: np.ndarray) -> Quantised:
    """Blocks [n,32] around the zero point 128: the largest weight gets the code 1 or 255."""
    largest = np.abs(weight).max(axis=1)  # [n]
    inverse = np.divide(127, largest, out=np.zeros_like(largest), where=largest > TINY)
    codes = (np.rint(weight * inverse[:, None]) + 128).astype(np.uint8)
    return codes, largest / np.float32(127), np.full(len(largest), 128, np.uint8)


def _parallel(work: Callable[[int], None], items: Sequence[int]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, items))
