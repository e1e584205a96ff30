"""Finds where a decoder graph whose cache grows is to be cut into embed, body and head, or refuses it by name.

Such a graph, as optimum writes them, takes the past of every layer as [1,K,P,D] and gives it back S rows longer. The
body keeps all of its nodes, whatever they are: in front of them the P rows that count are taken off this project's
buffers, behind them the S new rows are written into the same buffers, in place.
"""

from collections.abc import Iterator
from itertools import chain

from oxidize.runtime.contracts import TensorSpec
from oxidize.runtime.errors import UnsupportedModelError

from .foreign_config import ForeignConfig, GraphNames
from .foreign_ends import (
    Cuts,
    check_positions,
    check_values,
    check_width,
    cut_ends,
    find_hidden,
    is_lookup,
    refuse_nested,
    refuse_other_readers,
    row_positions,
)
from .onnx_surgery import Cut, NewOp, Op, SourceGraph

_OLDEST_OPSET = 13  # axes are inputs from here on, as in the nodes that are added
_SAME_VALUES = ("Cast", "Identity")
_SAME_IDS = ("Reshape", "Cast", "Identity")
_FUSED = {  # attention with a cache of its own: where its past and present are
    "com.microsoft::GroupQueryAttention": ((3, 4), (1, 2)),
    "com.microsoft::MultiHeadAttention": ((6, 7), (1, 2)),
}
_ROWS_AXIS = (2, -2)
_PASS_WIDE = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM")


def find_growing_cuts(graph: SourceGraph, config: ForeignConfig) -> Cuts:
    """Check the graph against the config and find its cuts; whatever is not understood is refused by name."""
    names = config.names
    _check_ops(graph)
    dtype = check_values(graph, config)
    _check_growth(graph, names)
    lookup, (hidden, product) = _lookup(graph, names), find_hidden(graph, names)
    _check_tables(graph, lookup, product, dtype, config)
    for value in (lookup.output(0), hidden):
        check_width(graph, value, dtype, config)
    embed, head = cut_ends(graph, names, lookup.output(0), hidden)
    body = _body(graph, config, lookup.output(0), hidden)
    return Cuts(embed, body, head, dtype, None, config.context)


def _check_ops(graph: SourceGraph) -> None:
    refuse_nested(graph)
    if graph.opset < _OLDEST_OPSET:
        raise UnsupportedModelError(
            f"{graph.path} is of opset {graph.opset}; opset {_OLDEST_OPSET} or newer is understood: export it again"
        )
    wide = next((op for op in graph.ops if op.kind.rpartition("::")[2] in _PASS_WIDE), None)
    if wide is not None:
        raise UnsupportedModelError(
            f"{graph.path}: {wide.kind} ({wide.name}) scales a pass as a whole, so a token's logits would depend on "
            "what is drafted beside it; take the float32, float16 or 4-bit graph of this model"
        )


def _check_growth(graph: SourceGraph, names: GraphNames) -> None:
    """Every present is its past with rows behind it."""
    pairs = zip(chain(*names.past), chain(*names.present), strict=True)
    for past, present in pairs:
        op = graph.maker(_origin(graph, present))
        if op is None or not (_appends(graph, op, past) or _is_fused(graph, op, past, present)):
            what = f"{op.kind} ({op.name})" if op else "no node"
            raise UnsupportedModelError(
                f"{graph.path}: {present} comes from {what}; only {past} with the pass's rows behind it, by Concat or "
                "attention with a cache, is understood"
            )


def _origin(graph: SourceGraph, value: str) -> str:
    """The value before nodes that leave it as it is."""
    op = graph.maker(value)
    while op is not None and op.kind in _SAME_VALUES:
        value = op.input(0)
        op = graph.maker(value)
    return value


def _appends(graph: SourceGraph, op: Op, past: str) -> bool:
    joined = op.kind == "Concat" and len(op.inputs) == 2 and op.numbers.get("axis") in _ROWS_AXIS
    return joined and _origin(graph, op.input(0)) == past


def _is_fused(graph: SourceGraph, op: Op, past: str, present: str) -> bool:
    """Whether attention itself gives `present`, at the place that belongs to `past`."""
    pairs = zip(*_FUSED.get(op.kind, ((), ())), strict=True)
    made = _origin(graph, present)
    return any(_origin(graph, op.input(taken)) == past and op.output(given) == made for taken, given in pairs)


def _lookup(graph: SourceGraph, names: GraphNames) -> Op:
    """The one lookup of the ids in a table; everything else may only ask for their shape (see `_body`)."""
    found = [
        op
        for op in graph.ops
        if is_lookup(graph, op) and names.input_ids in (op.input(1), *_reshaped(graph, op.input(1)))
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{graph.path}: {names.input_ids} goes to {len(found)} lookups in tables; only one is understood"
        )
    return found[0]


def _reshaped(graph: SourceGraph, value: str) -> Iterator[str]:
    """The values of which this one is another shape."""
    op = graph.maker(value)
    while op is not None and op.kind in _SAME_IDS:
        yield op.input(0)
        op = graph.maker(op.input(0))


def _check_tables(graph: SourceGraph, lookup: Op, product: Op, dtype: str, config: ForeignConfig) -> None:
    """Hidden states are as wide as the config says, and of the cache's type, at both ends."""
    for what, op, index in (("embedding", lookup, 0), ("head", product, 1)):
        quantised = "com.microsoft::" in op.kind  # such tables are packed; their scales have the type
        tensor, last = _matrix(graph, op.input(2 if quantised else index))
        columns = tensor.shape[-1 if last != (op is product) else 0] if tensor else 0
        if tensor is not None and tensor.dtype == dtype and (quantised or columns == config.hidden_size):
            continue
        shown = f"{tensor.dtype} {list(tensor.shape)}" if tensor else f"worked out by the graph ({op.name})"
        raise UnsupportedModelError(
            f"{graph.path}: the weights of the {what} are {shown}; expected stored ones of {dtype}, as the cache, for "
            f"hidden states of {config.hidden_size}, as {config.file} says"
        )


def _matrix(graph: SourceGraph, value: str) -> tuple[TensorSpec | None, bool]:
    """The stored matrix behind a value, and whether it is taken as it lies (else transposed)."""
    op = graph.maker(value)
    if op is None or op.kind not in ("Transpose", "Identity"):
        return graph.stored(value), True
    return graph.stored(op.input(0)), op.kind == "Identity"


def _body(graph: SourceGraph, config: ForeignConfig, lookup: str, hidden: str) -> Cut:
    names = config.names
    given, results = {lookup: "inputs_embeds"}, {hidden: "hidden"}
    before, after = [*row_positions(), *_places(config)], []
    for layer, (past, present) in enumerate(zip(names.past, names.present, strict=True)):
        for part, source, result in zip(("key", "value"), past, present, strict=True):
            held, made = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
            given[source], results[result] = f"{held}.rows", f"{made}.whole"
            before.append(_take(held, "row_axes", "past_end", f"{held}.rows"))
            after.append(_take(f"{made}.whole", "past_end", "whole_end", f"{made}.rows"))
            after.append(NewOp("ScatterND", (held, "cells", f"{made}.rows"), made, {}))
    _check_ids(graph, names.input_ids, results, given)
    read = graph.reads(results, given)
    if names.attention_mask in read:
        _check_mask(graph, names.attention_mask)
    if names.position_ids in read:
        check_positions(graph, names.position_ids)
    given |= {names.input_ids: "row_positions", names.position_ids: "row_positions"}  # the shape of ids is the same
    given[names.attention_mask] = "all_seen"
    cut = Cut(given, results, tuple(before), tuple(after))
    refuse_other_readers(graph, cut)
    return cut


def _take(value: str, start: str, end: str, output: str) -> NewOp:
    """Rows [start, end) of keys or values [1,K,n,D]."""
    return NewOp("Slice", (value, start, end, "rows_axis"), output, {})


def _places(config: ForeignConfig) -> tuple[NewOp, ...]:
    """past_end and whole_end [1]: where the past and the present end; all_seen [1,P+S]: a mask that hides nothing.

    cells [1,K,S,3]: batch, head and position of every row the pass writes.
    """
    heads = tuple(range(config.kv_heads))
    return (
        NewOp("Constant", (), "rows_axis", {"value_ints": (2,)}),
        NewOp("Unsqueeze", ("row_start", "row_axes"), "past_end", {}),
        NewOp("Unsqueeze", ("row_end", "row_axes"), "whole_end", {}),
        NewOp("Constant", (), "ones", {"value_ints": (1,)}),
        NewOp("Concat", ("ones", "whole_end"), "mask_shape", {"axis": 0}),
        NewOp("Expand", ("ones", "mask_shape"), "all_seen", {}),
        NewOp("Constant", (), "heads", {"value_ints": heads}),
        NewOp("Constant", (), "head_count", {"value_ints": (len(heads),)}),
        NewOp("Unsqueeze", ("row_count", "row_axes"), "row_counts", {}),
        NewOp("Concat", ("ones", "head_count", "row_counts", "ones"), "cells_shape", {"axis": 0}),
        NewOp("Constant", (), "around_heads", {"value_ints": (0, 2, 3)}),
        NewOp("Unsqueeze", ("heads", "around_heads"), "heads_each", {}),
        NewOp("Constant", (), "around_rows", {"value_ints": (0, 1, 3)}),
        NewOp("Unsqueeze", ("row_range", "around_rows"), "rows_each", {}),
        NewOp("Expand", ("row_axes", "cells_shape"), "cell_batch", {}),  # row_axes holds a zero
        NewOp("Expand", ("heads_each", "cells_shape"), "cell_head", {}),
        NewOp("Expand", ("rows_each", "cells_shape"), "cell_row", {}),
        NewOp("Concat", ("cell_batch", "cell_head", "cell_row"), "cells", {"axis": -1}),
    )


def _check_ids(graph: SourceGraph, ids: str, results: dict[str, str], given: dict[str, str]) -> None:
    """Behind the lookup nothing may ask more of the ids than their shape."""
    waiting = [ids]
    while waiting:
        for op in graph.readers(value := waiting.pop(), results, given):
            if op.kind in _SAME_IDS and op.input(0) == value:
                waiting.append(op.output(0))
            elif op.kind != "Shape":
                raise UnsupportedModelError(
                    f"{graph.path}: {op.kind} ({op.name}) reads {ids} for more than the embedding and their shape; "
                    "that is not understood"
                )


def _check_mask(graph: SourceGraph, name: str) -> None:
    spec = graph.inputs[name]
    if spec.dtype != "int64" or len(spec.shape) != 2:
        raise UnsupportedModelError(
            f"{graph.path}: {name} is {spec.dtype} {list(spec.shape)}; only int64 [batch, past and new rows] is "
            "understood"
        )
