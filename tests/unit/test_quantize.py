"""Block quantisation: what the packed bytes mean to ONNX Runtime, what is lossless, how good the search is."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper, numpy_helper

from oxidize.export.quantize import BLOCK, concatenate, dequantize, pack, quantize
from oxidize.export.weights import BlockQuantized

SHAPES = [(7, 64), (16, 32), (5, 40), (3, 96), (9, 33)]  # 40 and 33: a last block that is not full
CONTRIB = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


def random_blocks(bits: int, shape: tuple[int, int], seed: int = 0) -> BlockQuantized:
    """Blocks that use every code, the lowest too, with scales of both signs."""
    rng = np.random.default_rng(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    quants = rng.integers(low, high, shape).astype(np.int8)
    return BlockQuantized(bits, BLOCK, quants, rng.normal(0, 0.1, (shape[0], -(-shape[1] // BLOCK))).astype(np.float32))


def run_node(kind: str, feeds: dict, given: dict, outputs: list, attributes: dict) -> np.ndarray:
    """One contrib node with initializers `given`."""
    node = helper.make_node(kind, [*feeds, *given] if kind == "MatMulNBits" else ["data", "ids", "scales"], ["y"])
    node.domain = "com.microsoft"
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    result = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, outputs)]
    initializers = [numpy_helper.from_array(array, name) for name, array in given.items()]
    graph = helper.make_graph([node], "node", inputs, result, initializers)
    model = helper.make_model(graph, opset_imports=CONTRIB, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_matmulnbits_reads_the_packed_bytes_as_the_dequantised_matrix(bits: int, shape: tuple[int, int]):
    weight = random_blocks(bits, shape)
    x = np.random.default_rng(1).normal(size=(3, shape[1])).astype(np.float32)
    given = {"data": pack(weight), "scales": weight.scales}
    attributes = {"N": shape[0], "K": shape[1], "bits": bits, "block_size": BLOCK, "accuracy_level": 1}
    y = run_node("MatMulNBits", {"x": x}, given, [3, shape[0]], attributes)
    np.testing.assert_allclose(y, x @ dequantize(weight).T, atol=2e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_gatherblockquantized_reads_the_same_bytes_as_a_table(bits: int):
    weight = random_blocks(bits, (11, 96))
    ids = np.array([[0, 10, 3]], np.int64)
    given = {"data": pack(weight).reshape(11, -1), "scales": weight.scales}
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    rows = run_node("GatherBlockQuantized", {"ids": ids}, given, [1, 3, 96], attributes)
    np.testing.assert_allclose(rows, dequantize(weight)[ids], rtol=1e-6)


def test_nibbles_are_packed_low_first():
    quants = np.zeros((1, 32), np.int8)
    quants[0, :4] = [-8, 7, 0, 1]
    packed = pack(BlockQuantized(4, 32, quants, np.ones((1, 1), np.float32)))
    assert packed.shape == (1, 1, 16)
    assert packed[0, 0, :3].tolist() == [0xF0, 0x98, 0x88]


@pytest.mark.parametrize("bits", [4, 8])
def test_values_on_the_grid_survive(bits: int):
    """A matrix that is exactly scale * q, with a full-range value in each block, comes back as it was."""
    weight = random_blocks(bits, (6, 64))
    quants = np.maximum(weight.quants, -127)
    quants[:, ::BLOCK] = -8 if bits == 4 else 127
    exact = dequantize(BlockQuantized(bits, BLOCK, quants, weight.scales))
    np.testing.assert_allclose(dequantize(quantize(exact, bits)), exact, atol=2e-6)


@pytest.mark.parametrize("shape", [(512, 576), (1024, 300)])
def test_the_search_beats_plain_rounding(shape: tuple[int, int]):
    weight = weights(shape)
    error = np.square(dequantize(quantize(weight, 4)) - weight).mean()
    assert error <= 0.93 * np.square(_plain(weight) - weight).mean()
    assert error / np.square(weight).mean() < 0.0068


def _plain(weight: np.ndarray) -> np.ndarray:
    """Q4_0's rule: the largest weight of a block becomes -8."""
    columns = weight.shape[1]
    blocks = np.pad(weight, ((0, 0), (0, -columns % BLOCK))).reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scales = largest / -8
    rounded = np.clip(np.rint(blocks / scales), -8, 7) * scales
    return rounded.reshape(len(weight), -1)[:, :columns]


@pytest.mark.parametrize("bits", [4, 8])
@given(
    values=arrays(np.float32, (2, 64), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)),
    power=st.integers(-20, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_bounded_by_the_largest_weight_of_the_block(bits: int, values: np.ndarray, power: int):
    values = values * np.float32(10.0**power)
    weight = quantize(values, bits)
    assert np.isfinite(weight.scales).all()
    peaks = np.abs(values).reshape(2, 2, BLOCK).max(axis=2)
    allowed = np.repeat(peaks, BLOCK, axis=1) * (0.15 if bits == 4 else 0.0041) + 1e-30
    error = np.abs(dequantize(weight).astype(np.float64) - values)
    assert (np.sqrt(np.square(error).reshape(2, 2, BLOCK).mean(axis=2)) <= allowed[:, ::BLOCK]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zero(bits: int):
    assert (dequantize(quantize(np.zeros((3, 40), np.float32), bits)) == 0).all()


def test_stacking_equals_quantising_the_stack():
    parts = [weights((5, 64), 1), weights((3, 64), 2)]
    stacked = concatenate([quantize(part, 4) for part in parts])
    whole = quantize(np.concatenate(parts), 4)
    assert np.array_equal(pack(stacked), pack(whole))
    assert np.array_equal(stacked.scales, whole.scales)


@pytest.mark.parametrize("shape", [(1, 32), (64, 64)])
def test_the_input_is_left_alone(shape: tuple[int, int]):
    weight = weights(shape)
    before = weight.copy()
    quantize(weight, 4)
    assert np.array_equal(weight, before)
