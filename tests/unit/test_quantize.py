"""Block quantisation: what the packed bytes mean to ONNX Runtime, what is lossless, how good the search is."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper, numpy_helper

from oxidize.export.quantize import (
    BLOCK,
    TINY,
    Blocks,
    concatenate,
    dequantize,
    from_symmetric,
    pack,
    pack_nibbles,
    quantize,
)
from oxidize.export.weights import BlockQuantized

SHAPES = [(7, 64), (16, 32), (5, 40), (3, 96), (9, 33)]  # 40 and 33: a last block that is not full
CONTRIB = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


def random_blocks(bits: int, shape: tuple[int, int], zero_points: bool = False) -> Blocks:
    """Blocks that use every code, with scales of both signs."""
    rng = np.random.default_rng(0)
    rows, blocks = shape[0], -(-shape[1] // BLOCK)
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    zeros = rng.integers(0, 16, (rows, blocks)).astype(np.uint8) if zero_points else None
    return Blocks(bits, codes, rng.normal(0, 0.1, (rows, blocks)).astype(np.float32), zeros)


def run_node(kind: str, inputs: list[str], feeds: dict, given: dict, shape: list[int], attributes: dict) -> np.ndarray:
    """One contrib node with initializers `given`."""
    node = helper.make_node(kind, inputs, ["y"], domain="com.microsoft")
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    result = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)]
    initializers = [numpy_helper.from_array(array, name) for name, array in given.items()]
    graph = helper.make_graph([node], "node", values, result, initializers)
    model = helper.make_model(graph, opset_imports=CONTRIB, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
def test_matmulnbits_reads_the_packed_bytes_as_the_dequantised_matrix(
    bits: int, zero_points: bool, shape: tuple[int, int]
):
    weight = random_blocks(bits, shape, zero_points)
    x = np.random.default_rng(1).normal(size=(3, shape[1])).astype(np.float32)
    given = {"data": pack(weight), "scales": weight.scales}
    if weight.zeros is not None:
        given["zeros"] = pack_nibbles(weight.zeros)
    attributes = {"N": shape[0], "K": shape[1], "bits": bits, "block_size": BLOCK, "accuracy_level": 1}
    y = run_node("MatMulNBits", ["x", *given], {"x": x}, given, [3, shape[0]], attributes)
    np.testing.assert_allclose(y, x @ dequantize(weight).T, atol=5e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_gatherblockquantized_reads_the_same_bytes_as_a_table(bits: int):
    weight = random_blocks(bits, (11, 96))
    ids = np.array([[0, 10, 3]], np.int64)
    given = {"data": pack(weight).reshape(11, -1), "scales": weight.scales}
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    rows = run_node("GatherBlockQuantized", ["data", "ids", "scales"], {"ids": ids}, given, [1, 3, 96], attributes)
    np.testing.assert_allclose(rows, dequantize(weight)[ids], rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_source_blocks_are_taken_over_without_loss(bits: int):
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    quants = np.random.default_rng(0).integers(low, high, (4, 64)).astype(np.int8)
    quants[0, :2] = low, high - 1
    scales = np.random.default_rng(1).normal(0, 0.1, (4, 2)).astype(np.float32)
    taken = from_symmetric(BlockQuantized(bits, BLOCK, quants, scales))
    assert np.array_equal(dequantize(taken), quants * np.repeat(scales, BLOCK, axis=1))


def test_nibbles_are_packed_low_first():
    codes = np.full((1, 32), 8, np.uint8)
    codes[0, :4] = [0, 15, 8, 9]
    packed = pack(Blocks(4, codes, np.ones((1, 1), np.float32)))
    assert packed.shape == (1, 1, 16)
    assert packed[0, 0, :3].tolist() == [0xF0, 0x98, 0x88]
    assert pack_nibbles(np.array([[1, 2, 3]], np.uint8)).tolist() == [[0x21, 0x03]]


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
def test_values_on_the_grid_survive(bits: int, zero_points: bool):
    """A matrix that is exactly scale * (code - zero), with the ends of the range in each block, comes back."""
    weight = random_blocks(bits, (6, 64), zero_points)
    codes = weight.codes.clip(1, 255)
    codes[:, ::BLOCK], codes[:, 1::BLOCK] = (0, 15) if bits == 4 else (255, 1)
    exact = dequantize(Blocks(bits, codes, weight.scales, weight.zeros))
    np.testing.assert_allclose(dequantize(quantize(exact, bits, zero_points)), exact, atol=2e-6)


@pytest.mark.parametrize("shape", [(512, 576), (1024, 300)])
def test_the_search_beats_plain_rounding_and_zero_points_beat_the_search(shape: tuple[int, int]):
    weight = weights(shape)
    plain, symmetric, free = (
        np.square(other - weight).mean()
        for other in (_plain(weight), dequantize(quantize(weight, 4)), dequantize(quantize(weight, 4, True)))
    )
    assert symmetric <= 0.93 * plain
    assert free <= 0.908 * symmetric


def _plain(weight: np.ndarray) -> np.ndarray:
    """Q4_0's rule: the largest weight of a block becomes -8."""
    columns = weight.shape[1]
    blocks = np.pad(weight, ((0, 0), (0, -columns % BLOCK))).reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scales = largest / -8
    rounded = np.clip(np.rint(blocks / scales), -8, 7) * scales
    return rounded.reshape(len(weight), -1)[:, :columns]


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
@given(
    values=arrays(np.float32, (2, 64), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)),
    power=st.integers(-20, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_bounded_by_the_largest_weight_of_the_block(
    bits: int, zero_points: bool, values: np.ndarray, power: int
):
    values = values * np.float32(10.0**power)
    weight = quantize(values, bits, zero_points)
    assert np.isfinite(weight.scales).all()
    peaks = np.abs(values).reshape(2, 2, BLOCK).max(axis=2)
    error = (dequantize(weight).astype(np.float64) - values).reshape(2, 2, BLOCK)
    allowed = peaks * (0.15 if bits == 4 else 0.0041) + 2 * TINY
    assert (np.sqrt(np.square(error).mean(axis=2)) <= allowed).all()


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
def test_zeros_stay_zero(bits: int, zero_points: bool):
    assert (dequantize(quantize(np.zeros((3, 40), np.float32), bits, zero_points)) == 0).all()


@pytest.mark.parametrize("zero_points", [False, True])
def test_stacking_equals_quantising_the_stack(zero_points: bool):
    parts = [weights((5, 64), 1), weights((3, 64), 2)]
    stacked = concatenate([quantize(part, 4, zero_points) for part in parts])
    whole = quantize(np.concatenate(parts), 4, zero_points)
    assert np.array_equal(pack(stacked), pack(whole))
    assert np.array_equal(stacked.scales, whole.scales)


def test_symmetric_blocks_stack_with_blocks_that_have_zero_points():
    parts = [quantize(weights((5, 64), 1), 4), quantize(weights((3, 64), 2), 4, zero_points=True)]
    assert np.array_equal(dequantize(concatenate(parts)), np.concatenate([dequantize(part) for part in parts]))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (64, 64)])
def test_the_input_is_left_alone(shape: tuple[int, int], zero_points: bool):
    weight = weights(shape)
    before = weight.copy()
    quantize(weight, 4, zero_points)
    assert np.array_equal(weight, before)
