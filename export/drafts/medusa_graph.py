"""The graph of Medusa heads (https://arxiv.org/abs/2401.10774): one row of the target becomes a row for each head."""

from collections.abc import Sequence
from functools import partial

from oxidize.runtime.contracts import draft_contract

from ..layers import Scope, linear
from ..tensors import Projection
from .base import DraftConfig, DraftGraph, MedusaHeads


def medusa_graphs(config: DraftConfig, dtype: str) -> Sequence[DraftGraph]:
    """The "draft" graph, activations of `dtype`."""
    return [DraftGraph(draft_contract(config.shape(dtype)), partial(_draft, config), "draft.onnx")]


def _draft(config: DraftConfig, scope: Scope) -> None:
    """features [B,1,H] -> logits [B,heads,V] float32, or hidden [B,heads,H] where the target's head scores."""
    heads, graph = config.heads, scope.graph
    assert heads is not None
    rows = [_blocks(scope, heads, head) for head in range(heads.count)]
    if config.draft_vocab_size is None:
        graph.output("hidden", _together(scope, rows, "hidden_rows"))
        return
    if heads.output == "one":
        logits = _scores(scope, _together(scope, rows, "rows"), "lm_head", config.draft_vocab_size)
    else:
        scores = [
            _scores(scope, row, f"heads.{head}.lm_head", config.draft_vocab_size) for head, row in enumerate(rows)
        ]
        logits = _together(scope, scores, "scores")
    if scope.plan.dtype != "float32":
        logits = graph.op("Cast", [logits], "scores.float32", {"to": graph.element_type("float32")})
    graph.output("logits", logits)


def _blocks(scope: Scope, heads: MedusaHeads, head: int) -> str:
    """The residual blocks of a head: x + silu(W x + b), [B,1,H]."""
    x, size = scope.graph.input("features"), scope.config.hidden_size
    for layer in range(heads.layers):
        name = f"heads.{head}.blocks.{layer}"
        # "qkv": small beside the output matrix, and all that a head knows passes through it
        product = linear(scope, x, Projection("qkv", name, (name,), (size,), size, heads.biased))
        active = scope.profile.activation(scope.graph, product, "silu", f"{name}.act")
        x = scope.graph.op("Add", [x, active], f"{name}.sum")
    return x


def _scores(scope: Scope, x: str, name: str, rows: int) -> str:
    """x [B,*,H] times an output matrix, which is as precise as the target's head: [B,*,V]."""
    projection = Projection("table", name, (name,), (rows,), scope.config.hidden_size)
    if scope.plan.precision == "int4":
        blocks = scope.tensors.blocks(projection, scope.plan.head_bits)
        return scope.profile.matmul_blocks(scope.graph, x, blocks, None, name)
    weight = scope.graph.stored(f"{name}.weight", scope.tensors.dense(projection))
    return scope.graph.op("MatMul", [x, weight], name)


def _together(scope: Scope, rows: Sequence[str], name: str) -> str:
    """One row a head, [B,1,*] each -> [B,heads,*]."""
    return scope.graph.op("Concat", rows, name, {"axis": 1})
