"""The operators of draft graphs beside the ort profile: attention of plain ONNX, quantised products of ONNX Runtime."""

from ..graph import Dialect, GraphBuilder
from ..profile_ort import OrtProfile
from ..profile_std import StdProfile
from ..tensors import StoredBlocks


class DraftProfile(StdProfile):
    """Plain ONNX, whose attention takes the masks that blocks need, with MatMulNBits, which is what makes int4 fast."""

    name = "ort"
    dialect = Dialect(opset=24, ir_version=11, contrib=True)

    def matmul_blocks(self, graph: GraphBuilder, x: str, weight: StoredBlocks, bias: str | None, name: str) -> str:
        """MatMulNBits."""
        return OrtProfile().matmul_blocks(graph, x, weight, bias, name)

    def gather_blocks(self, graph: GraphBuilder, ids: str, table: StoredBlocks, name: str) -> str:
        """GatherBlockQuantized."""
        return OrtProfile().gather_blocks(graph, ids, table, name)
