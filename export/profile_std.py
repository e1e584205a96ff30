"""Profile "std": plain ONNX opset 24, for TensorRT and any other runtime; batches, fp32 on CUDA, arbitrary masks."""

from collections.abc import Callable

import numpy as np

from .graph import Dialect, GraphBuilder
from .profiles import Attention
from .quantize import BLOCK
from .store import StoredTensor
from .tensors import StoredBlocks

Filled = Callable[[int, tuple[int, ...]], StoredTensor]  # (value, shape) -> uint8 tensor


class StdProfile:
    """No contrib operators. Positions, cache offsets and masks are inputs; causality is in the mask."""

    name = "std"
    dialect = Dialect(opset=24, ir_version=11, contrib=False)

    def __init__(self, filled: Filled) -> None:
        self._filled = filled

    def norm(self, graph: GraphBuilder, x: str, weight: str, eps: float, name: str) -> str:
        """RMSNormalization, which computes in float32 (its stash_type) whatever the type of x."""
        return graph.op("RMSNormalization", [x, weight], name, {"axis": -1, "epsilon": eps})

    def add_norm(
        self, graph: GraphBuilder, terms: tuple[str, str], weight: str, eps: float, name: str
    ) -> tuple[str, str]:
        """Add, then norm."""
        total = graph.op("Add", terms, f"{name}.sum")
        return self.norm(graph, total, weight, eps, name), total

    def activation(self, graph: GraphBuilder, x: str, kind: str, name: str) -> str:
        """Swish and Gelu."""
        if kind == "silu":
            return graph.op("Swish", [x], name)
        return graph.op("Gelu", [x], name, {"approximate": "tanh"})

    def attend(self, graph: GraphBuilder, qkv: tuple[str, ...], spec: Attention, name: str) -> str:
        """RotaryEmbedding, TensorScatter into the cache, Attention over its whole capacity under the mask."""
        if len(qkv) == 1:
            sizes = graph.constant("qkv_sizes", np.array(spec.widths, np.int64))
            qkv = graph.ops("Split", [*qkv, sizes], f"{name}.split", ("q", "k", "v"), {"axis": -1})
        query, key, value = (
            _split_heads(graph, x, spec.head_dim, f"{name}.{part}") for x, part in zip(qkv, "qkv", strict=True)
        )
        query = _rotate(graph, query, spec, f"{name}.q.rope")
        key = _write(graph, _rotate(graph, key, spec, f"{name}.k.rope"), f"{spec.layer}.key", f"{name}.key")
        value = _write(graph, value, f"{spec.layer}.value", f"{name}.value")
        mask = graph.input("attn_mask_sliding" if spec.window else "attn_mask")
        mixed = graph.op("Attention", [query, key, value, mask], name, {"scale": spec.scale})  # [B,heads,S,D]
        mixed = graph.op("Transpose", [mixed], f"{name}.rows", {"perm": (0, 2, 1, 3)})
        together = graph.constant("heads_together", np.array([0, 0, -1], np.int64))
        return graph.op("Reshape", [mixed, together], f"{name}.flat")

    def matmul_blocks(self, graph: GraphBuilder, x: str, weight: StoredBlocks, bias: str | None, name: str) -> str:
        """DequantizeLinear, then MatMul; runtimes fuse the two."""
        matrix = self._dequantized(graph, weight, name)  # [N,K]
        matrix = graph.op("Transpose", [matrix], f"{name}.transposed", {"perm": (1, 0)})
        if bias is None:
            return graph.op("MatMul", [x, matrix], name)
        return graph.op("Add", [graph.op("MatMul", [x, matrix], f"{name}.matmul"), bias], name)

    def gather_blocks(self, graph: GraphBuilder, ids: str, table: StoredBlocks, name: str) -> str:
        """Gather bytes and scales of the rows, then do the arithmetic of DequantizeLinear on those alone."""
        packed = graph.stored(f"{name}.packed", table.packed)
        scales = graph.stored(f"{name}.scales", table.scales)
        quants = graph.op("Gather", [packed, ids], f"{name}.quants", {"axis": 0})  # uint8 [B,S,blocks,bytes]
        if table.bits == 4:
            quants = _unpack_nibbles(graph, quants, name)
        dtype = table.scales.dtype
        quants = graph.op("Cast", [quants], f"{name}.cast", {"to": graph.element_type(dtype)})
        zero = graph.constant(f"{name}.zero", np.array(1 << (table.bits - 1), dtype))
        scale = graph.op("Gather", [scales, ids], f"{name}.scale", {"axis": 0})  # [B,S,blocks]
        scale = graph.op("Unsqueeze", [scale, _axis(graph)], f"{name}.scale.column")
        rows = graph.op("Mul", [graph.op("Sub", [quants, zero], f"{name}.centred"), scale], f"{name}.blocks")
        flat = graph.constant("embedding_shape", np.array([0, 0, table.columns], np.int64))
        return graph.op("Reshape", [rows, flat], name)

    def _dequantized(self, graph: GraphBuilder, weight: StoredBlocks, name: str) -> str:
        kind, width = f"uint{weight.bits}", weight.blocks * BLOCK
        zeros = weight.flat_zeros or self._middles(weight)
        inputs = [
            graph.stored(f"{name}.packed", weight.packed.viewed((weight.rows, width), kind)),
            graph.stored(f"{name}.scales", weight.scales),
            graph.stored(f"zeros.{zeros.offset}.{weight.rows}x{weight.blocks}", zeros),
        ]
        attributes = {"axis": 1, "block_size": BLOCK}
        matrix = graph.op("DequantizeLinear", inputs, f"{name}.dequantized", attributes)
        if width == weight.columns:
            return matrix
        bounds = [graph.constant(f"int64.{n}", np.array([n], np.int64)) for n in (0, weight.columns, 1)]
        return graph.op("Slice", [matrix, *bounds], f"{name}.sliced")

    def _middles(self, weight: StoredBlocks) -> StoredTensor:
        """Zero points for symmetric blocks, which DequantizeLinear wants written out."""
        shape = (weight.rows, weight.blocks)
        if weight.bits == 8:
            return self._filled(0x80, shape)
        return self._filled(0x88, ((weight.rows * weight.blocks + 1) // 2,)).viewed(shape, "uint4")


def _split_heads(graph: GraphBuilder, x: str, head_dim: int, name: str) -> str:
    """[B,S,heads*D] -> [B,heads,S,D]."""
    apart = graph.constant("heads_apart", np.array([0, 0, -1, head_dim], np.int64))
    heads = graph.op("Reshape", [x, apart], f"{name}.split_heads")
    return graph.op("Transpose", [heads], f"{name}.heads_first", {"perm": (0, 2, 1, 3)})


def _rotate(graph: GraphBuilder, x: str, spec: Attention, name: str) -> str:
    tables = [graph.stored(spec.table_name(part), getattr(spec, part)) for part in ("cos", "sin")]
    return graph.op("RotaryEmbedding", [x, *tables, graph.input("position_ids")], name)


def _write(graph: GraphBuilder, rows: str, cache: str, name: str) -> str:
    """Put rows [B,heads,S,D] into the cache at write_indices: the whole cache [B,heads,C,D]."""
    inputs = [graph.input(f"past_key_values.{cache}"), rows, graph.input("write_indices")]
    written = graph.op("TensorScatter", inputs, name, {"axis": 2})
    graph.output(f"present.{cache}", written)
    return written


def _unpack_nibbles(graph: GraphBuilder, packed: str, name: str) -> str:
    """uint8 [B,S,blocks,16] -> uint8 [B,S,blocks,32], low nibbles first."""
    low = graph.op("BitwiseAnd", [packed, graph.constant("low_nibble", np.array(15, np.uint8))], f"{name}.low")
    four = graph.constant("nibble_bits", np.array(4, np.uint8))
    high = graph.op("BitShift", [packed, four], f"{name}.high", {"direction": "RIGHT"})
    parts = [graph.op("Unsqueeze", [part, _axis(graph)], f"{part}.column") for part in (low, high)]
    pairs = graph.op("Concat", parts, f"{name}.pairs", {"axis": -1})
    shape = graph.constant("nibbles_shape", np.array([0, 0, 0, BLOCK], np.int64))
    return graph.op("Reshape", [pairs, shape], f"{name}.nibbles")


def _axis(graph: GraphBuilder) -> str:
    return graph.constant("last_axis", np.array([-1], np.int64))
