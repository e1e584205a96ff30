"""What DFlash 2 adds to DFlash's graph: convolutions over the block, and the graph that scores paths."""

from dataclasses import dataclass

import numpy as np

from ..layers import Scope, float32, linear
from ..quantize import BLOCK
from ..tensors import Projection
from .base import DraftConfig, PathSelection
from .dflash_common import SELECTOR


@dataclass(frozen=True, slots=True)
class Convolution:
    """A dynamic convolution around a part of a layer: its name, and its kernels [1,S,H] by (side, tap)."""

    name: str
    kernels: dict[tuple[int, int], str]


def prepare_convolution(scope: Scope, paths: PathSelection, x: str, name: str) -> Convolution:
    """The kernels that the normed input x [1,S,H] of a part asks for, for both of its sides.

    A channel's kernel is its own fixed one plus what a projection of the row gives all channels of its group.
    """
    graph, hidden = scope.graph, scope.config.hidden_size
    rows, groups = 2 * paths.conv_taps, hidden // paths.conv_group
    projection = Projection(
        "qkv", f"{name}.kernel_projection", (f"{name}.kernel_projection",), (rows * groups,), hidden
    )
    by_group = graph.constant(f"conv_groups.{rows}", np.array([0, 0, rows * groups, 1], np.int64))
    dynamic = graph.op("Reshape", [linear(scope, x, projection), by_group], f"{name}.dynamic")  # [1,S,rows*G,1]
    base = graph.stored(f"{name}.base_kernel.weight", scope.tensors.table(f"{name}.base_kernel", rows, hidden))
    grouped = graph.constant("conv_base_groups", np.array([rows * groups, paths.conv_group], np.int64))
    base = graph.op("Reshape", [base, grouped], f"{name}.base")  # [rows*G,group]
    kernels = graph.op("Add", [dynamic, base], f"{name}.kernels")  # [1,S,rows*G,group]
    flat = graph.constant("conv_rows", np.array([0, 0, rows, hidden], np.int64))
    kernels = graph.op("Reshape", [kernels, flat], f"{name}.kernels.rows")  # [1,S,rows,H]
    places = [(side, tap) for side in range(2) for tap in range(paths.conv_taps)]
    return Convolution(name, {place: _row(scope, kernels, index, name) for index, place in enumerate(places)})


def convolve(scope: Scope, convolution: Convolution, side: int, x: str) -> str:
    """The sum over taps of x [1,S,H], moved down by the tap, times its kernel; nothing comes before the block."""
    name, total = f"{convolution.name}.side{side}", None
    for (where, tap), kernel in convolution.kernels.items():
        if where != side:
            continue
        term = scope.graph.op("Mul", [_moved(scope, x, tap, name), kernel], f"{name}.tap{tap}")
        total = term if total is None else scope.graph.op("Add", [total, term], f"{name}.sum{tap}")
    assert total is not None
    return total


def select_graph(config: DraftConfig, scope: Scope) -> None:
    """Score neighbouring tokens among the likeliest of each row: u(b) + <pred[a] * W h, succ[b]>, in float32."""
    graph, paths = scope.graph, config.paths
    assert paths is not None
    top = graph.constant("top_k", np.array([paths.top_k], np.int64))
    logits = _bent(scope, paths, graph.input("logits"))
    unary, tokens = graph.ops("TopK", [logits, top], "top", ("values", "ids"), {"axis": -1})  # [N,K]
    graph.output("tokens", tokens)
    one = graph.constant("one_row", np.array([1, paths.top_k], np.int64))
    anchor = graph.op("Expand", [graph.input("anchor"), one], "anchor_row")  # [1,K]
    bounds = [graph.constant(f"int64.{n}", np.array([n], np.int64)) for n in (0, -1, 0)]
    earlier = graph.op("Slice", [tokens, *bounds], "earlier_tokens")  # all rows but the last
    before = graph.op("Concat", [anchor, earlier], "tokens_before", {"axis": 0})  # [N,K]
    projection = Projection(
        "qkv",
        f"{SELECTOR}.hidden_projection",
        (f"{SELECTOR}.hidden_projection",),
        (paths.rank,),
        config.model.hidden_size,
    )
    projected = float32(scope, linear(scope, graph.input("hidden"), projection))  # [N,R]
    middle = graph.constant("axis.1", np.array([1], np.int64))
    projected = graph.op("Unsqueeze", [projected, middle], "projected.row")
    given = graph.op("Mul", [_codes(scope, paths, "predecessor", before), projected], "given")  # [N,K,R]
    codes = _codes(scope, paths, "successor", tokens)
    codes = graph.op("Transpose", [codes], "successor.columns", {"perm": (0, 2, 1)})
    pairs = graph.op("MatMul", [given, codes], "pairs")  # [N,K,K]
    graph.output("scores", graph.op("Add", [pairs, graph.op("Unsqueeze", [unary, middle], "unary.row")], "scores.sum"))


def _bent(scope: Scope, paths: PathSelection, logits: str) -> str:
    graph = scope.graph
    if paths.multiplier != 1.0:
        factor = graph.constant("multiplier", np.array(paths.multiplier, np.float32))
        logits = graph.op("Mul", [logits, factor], "logits.scaled")
    if paths.softcap is None:
        return logits
    cap = graph.constant("softcap", np.array(paths.softcap, np.float32))
    bent = graph.op("Tanh", [graph.op("Div", [logits, cap], "logits.ratio")], "logits.tanh")
    return graph.op("Mul", [bent, cap], "logits.capped")


def _codes(scope: Scope, paths: PathSelection, part: str, tokens: str) -> str:
    """Rows of a codebook, float32 [N,K,R]. At precision int4 stored like an embedding table, if in whole blocks."""
    name = f"{SELECTOR}.{part}_codebook"
    if scope.plan.precision == "int4" and paths.rank % BLOCK == 0:
        projection = Projection("table", name, (name,), (scope.config.vocab_size,), paths.rank)
        blocks = scope.tensors.blocks(projection, scope.plan.head_bits)
        return float32(scope, scope.profile.gather_blocks(scope.graph, tokens, blocks, f"{part}.codes"))
    table = scope.graph.stored(f"{name}.weight", scope.tensors.table(name, scope.config.vocab_size, paths.rank))
    return float32(scope, scope.graph.op("Gather", [table, tokens], f"{part}.codes", {"axis": 0}))


def _row(scope: Scope, kernels: str, index: int, name: str) -> str:
    """kernels [1,S,rows,H] -> [1,S,H] of one row."""
    place = scope.graph.constant(f"kernel.{index}", np.array(index, np.int64))
    return scope.graph.op("Gather", [kernels, place], f"{name}.kernel{index}", {"axis": 2})


def _moved(scope: Scope, x: str, rows: int, name: str) -> str:
    """x [1,S,H] moved down by some rows, zeros at the top."""
    if rows == 0:
        return x
    graph = scope.graph
    pads = graph.constant(f"pad_top.{rows}", np.array([0, rows, 0, 0, 0, 0], np.int64))
    padded = graph.op("Pad", [x, pads], f"{name}.padded{rows}")
    bounds = [graph.constant(f"int64.{n}", np.array([n], np.int64)) for n in (0, -rows, 1)]
    return graph.op("Slice", [padded, *bounds], f"{name}.moved{rows}")
