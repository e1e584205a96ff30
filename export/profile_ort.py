"""Profile "ort": ONNX Runtime's fused operators. Fastest on CPU and CUDA."""

from .graph import CONTRIB, Dialect, GraphBuilder
from .profiles import Attention
from .quantize import BLOCK
from .tensors import StoredBlocks

ACTIVATIONS = {"silu": ("QuickGelu", {"alpha": 1.0}), "gelu_tanh": ("FastGelu", {})}
INT8_COMPUTE = 4  # accuracy_level: activations are quantised too; the only fast form on CPU


class OrtProfile:
    """Contrib operators; the KV cache is one buffer per layer, given as past and present."""

    name = "ort"
    dialect = Dialect(opset=23, ir_version=10, contrib=True)

    def __init__(self, ragged: bool = False) -> None:
        self.ragged = ragged

    def norm(self, graph: GraphBuilder, x: str, weight: str, eps: float, name: str) -> str:
        """RMSNormalization, which has the kernel of ORT's SimplifiedLayerNormalization and a schema."""
        return graph.op("RMSNormalization", [x, weight], name, {"axis": -1, "epsilon": eps})

    def add_norm(
        self, graph: GraphBuilder, terms: tuple[str, str], weight: str, eps: float, name: str
    ) -> tuple[str, str]:
        """One node gives both."""
        outputs = ("", None, None, "sum")
        values = graph.ops(
            "SkipSimplifiedLayerNormalization", [*terms, weight], name, outputs, {"epsilon": eps}, CONTRIB
        )
        return values[0], values[3]

    def activation(self, graph: GraphBuilder, x: str, kind: str, name: str) -> str:
        """QuickGelu with alpha 1 is silu."""
        op, attributes = ACTIVATIONS[kind]
        return graph.op(op, [x], name, attributes, CONTRIB)

    def attend(self, graph: GraphBuilder, qkv: tuple[str, ...], spec: Attention, name: str) -> str:
        """GroupQueryAttention: positions follow from the lengths."""
        query, key, value = qkv if len(qkv) == 3 else (qkv[0], None, None)
        cache = [graph.input(f"past_key_values.{spec.layer}.{part}") for part in ("key", "value")]
        lengths = [graph.input("seqlens_k"), graph.input("total_sequence_length")]
        rope = [
            graph.stored(spec.table_name("cos"), spec.cos),
            graph.stored(spec.table_name("sin"), spec.sin),
        ]
        inputs = [query, key, value, *cache, *lengths, *rope]
        if self.ragged:
            inputs += [None] * (16 - len(inputs)) + [graph.input("query_seqlens")]
        attributes = {
            "num_heads": spec.heads,
            "kv_num_heads": spec.kv_heads,
            "scale": spec.scale,
            "do_rotary": 1,
            "local_window_size": spec.window or -1,
        }
        outputs = graph.ops("GroupQueryAttention", inputs, name, ("", "key", "value"), attributes, CONTRIB)
        graph.output(f"present.{spec.layer}.key", outputs[1])
        graph.output(f"present.{spec.layer}.value", outputs[2])
        return outputs[0]

    def matmul_blocks(self, graph: GraphBuilder, x: str, weight: StoredBlocks, bias: str | None, name: str) -> str:
        """MatMulNBits."""
        packed = graph.stored(f"{name}.packed", weight.packed)
        scales = graph.stored(f"{name}.scales", weight.scales)
        zeros = graph.stored(f"{name}.zeros", weight.zeros) if weight.zeros else None
        inputs = [x, packed, scales, zeros, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        attributes = {
            "N": weight.rows,
            "K": weight.columns,
            "bits": weight.bits,
            "block_size": BLOCK,
            "accuracy_level": INT8_COMPUTE,
        }
        return graph.op("MatMulNBits", inputs, name, attributes, CONTRIB)

    def gather_blocks(self, graph: GraphBuilder, ids: str, table: StoredBlocks, name: str) -> str:
        """GatherBlockQuantized over the bytes MatMulNBits reads, seen as [N, K*bits/8]."""
        flat = (table.rows, table.columns * table.bits // 8)
        packed = graph.stored(f"{name}.packed", table.packed.viewed(flat))
        scales = graph.stored(f"{name}.scales", table.scales)
        attributes = {"bits": table.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        return graph.op("GatherBlockQuantized", [packed, ids, scales], name, attributes, CONTRIB)
