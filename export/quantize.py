"""Symmetric block quantisation of weight matrices, and the packing of ONNX Runtime's MatMulNBits. Numpy only.

A block is 32 consecutive weights of one output row; w is stored as scale * q with q in [-8, 7] (4 bits) or
[-127, 127] (8 bits). The scale may be negative: that lets the largest weight of a 4-bit block take the value -8.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .weights import BlockQuantized

BLOCK = 32
THREADS = 2  # numpy releases the GIL in everything that costs time here
CHUNK = 8192  # blocks per piece of work: 1 MB of float32, small enough for the cache
SCALE_GRID = np.linspace(0.86, 1.10, 9, dtype=np.float32)  # of the inverse scale -8 / (largest weight)


def quantize(weight: np.ndarray, bits: int) -> BlockQuantized:
    """Quantise a float32 [N,K] matrix to 4 or 8 bits; a last block shorter than 32 is padded with zeros."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    if columns % BLOCK:
        weight = np.pad(weight, ((0, 0), (0, blocks * BLOCK - columns)))
    quants = np.empty((rows * blocks, BLOCK), np.int8)
    scales = np.empty(rows * blocks, np.float32)
    flat = weight.reshape(-1, BLOCK)
    search = _search4 if bits == 4 else _round8

    def work(start: int) -> None:
        piece = slice(start, start + CHUNK)
        quants[piece], scales[piece] = search(flat[piece])

    _parallel(work, range(0, len(flat), CHUNK))
    quants = quants.reshape(rows, -1)[:, :columns]
    return BlockQuantized(bits, BLOCK, quants, scales.reshape(rows, blocks))


def dequantize(weight: BlockQuantized) -> np.ndarray:
    """The float32 [N,K] matrix that the blocks stand for."""
    columns = weight.quants.shape[1]
    scales = np.repeat(weight.scales, weight.block, axis=1)[:, :columns]  # [N,K]
    return weight.quants * scales


def concatenate(weights: Sequence[BlockQuantized]) -> BlockQuantized:
    """Stack matrices of equal K, bits and block along N."""
    first = weights[0]
    quants = np.concatenate([weight.quants for weight in weights])
    return BlockQuantized(
        first.bits, first.block, quants, np.concatenate([weight.scales for weight in weights])
    )


def pack(weight: BlockQuantized) -> np.ndarray:
    """MatMulNBits' B, uint8 [N, K/block, block*bits/8]: q + 8 in nibbles, the even one low, or q + 128 in bytes.

    GatherBlockQuantized reads the same bytes as a table [N, K*bits/8].
    """
    rows, columns = weight.quants.shape
    blocks = weight.scales.shape[1]
    zero = 1 << (weight.bits - 1)
    values = (
        weight.quants.view(np.uint8) if weight.quants.flags.c_contiguous else weight.quants.astype(np.uint8)
    )
    values = values + np.uint8(zero)  # wraps around, as two's complement wants
    if blocks * weight.block != columns:
        values = np.pad(values, ((0, 0), (0, blocks * weight.block - columns)), constant_values=zero)
    if weight.bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return values.reshape(rows, blocks, -1)


def _search4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """4-bit quants and scales of blocks [n,32], by least squares over a grid of scales.

    For given quants q the best scale is (w.q)/(q.q), which leaves an error of w.w - (w.q)^2/(q.q); so the grid value
    with the largest (w.q)^2/(q.q) wins. Worked on transposed, to add whole rows.
    """
    columns = np.array(weight.T, order="C")  # [32,n], a copy
    largest = np.take_along_axis(columns, np.abs(columns).argmax(axis=0)[None], axis=0)[0]
    inverse = np.divide(-8.0, largest, out=np.zeros_like(largest), where=np.abs(largest) > 1e-30)
    columns *= inverse  # now in [-8,8]
    quants, products = np.empty_like(columns), np.empty_like(columns)
    best, chosen, scales = (np.zeros_like(largest) for _ in range(3))
    for step in SCALE_GRID:
        _round4(columns, step, quants)
        dot = np.multiply(quants, columns, out=products).sum(axis=0)
        norm = np.multiply(quants, quants, out=products).sum(axis=0)
        scale = dot / np.maximum(norm, 1.0)
        better = dot * scale > best
        best[better], chosen[better], scales[better] = (dot * scale)[better], step, scale[better]
    _round4(columns, chosen, quants)
    scales = np.divide(scales, inverse, out=np.zeros_like(scales), where=inverse != 0)
    return quants.T.astype(np.int8), scales


def _round4(values: np.ndarray, step: np.ndarray, out: np.ndarray) -> None:
    np.multiply(values, step, out=out)
    np.rint(out, out=out)
    np.clip(out, -8, 7, out=out)


def _round8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8-bit quants and scales of blocks [n,32]: the largest weight becomes 127."""
    scales = np.abs(weight).max(axis=1) / np.float32(127)  # [n]
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 1e-30)
    return np.rint(weight * inverse[:, None]).astype(np.int8), scales


def _parallel(work: Callable[[int], None], items: Sequence[int]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, items))
