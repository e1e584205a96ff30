"""The matrix that joins the taps of a draft: all that it knows of the target passes through it."""

from ..layers import Scope, float32
from ..tensors import Projection

_BITS = 8  # at precision "int4": it is small beside the layers, and every one of them depends on it


def joined_taps(scope: Scope, features: str, width: int) -> str:
    """features [B,T,width] times fc: float32 [B,T,H].

    In float32 whatever the plan: the sum over thousands of large taps passes float16's range on its way.
    """
    graph = scope.graph
    projection = Projection("fc", "fc", ("fc",), (scope.config.hidden_size,), width)
    if scope.plan.dtype == "float32" and scope.plan.precision == "int4":
        blocks = scope.tensors.blocks(projection, _BITS, scope.plan.zero_points)
        return scope.profile.matmul_blocks(graph, features, blocks, None, "fc")
    weight = float32(scope, graph.stored("fc.weight", scope.tensors.dense(projection)))
    return graph.op("MatMul", [float32(scope, features), weight], "fc")
