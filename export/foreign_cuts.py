"""Finds where a decoder graph of onnxruntime-genai is to be cut into embed, body and head, or refuses it by name.

Understood are graphs in which every layer is one GroupQueryAttention over its cache of keys and values: such a graph
can write the rows of a pass in place, and takes the lengths this project's runtime keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from .foreign_config import GenaiConfig, GraphNames
from .onnx_surgery import Cut, NewOp, Op, SourceGraph

_GQA = "com.microsoft::GroupQueryAttention"
_ROTARY = "com.microsoft::RotaryEmbedding"
_LOOKUPS = ("Gather", "com.microsoft::GatherBlockQuantized")
_PRODUCTS = ("MatMul", "com.microsoft::MatMulNBits")
_BEHIND_HEAD = ("Cast", "Add", "Sub", "Mul", "Div", "Tanh", "Where")  # row by row, with constants
_ROWWISE = ("Cast", "Add", "Mul", "Div")
_UNREAD = {9: "position ids", 10: "an attention bias", 12: "a quantised cache", 13: "a quantised cache"}
_PROBES = (1, 5, 64)  # lengths at which the graph's arithmetic on the mask is tried


@dataclass(frozen=True, slots=True)
class Cuts:
    """Three pieces of one graph, and what it says about itself.

    dtype: of hidden states and cache. window: tokens a sliding layer sees, None if none slides. positions: how many the
    rope tables and the config allow.
    """

    embed: Cut
    body: Cut
    head: Cut
    dtype: str
    window: int | None
    positions: int


def find_cuts(graph: SourceGraph, config: GenaiConfig) -> Cuts:
    """Check the graph against the config and find its cuts; whatever is not understood is refused by name."""
    names = config.names
    _check_ops(graph)
    dtype = _check_values(graph, config)
    layers = _attentions(graph, config)
    lookup, hidden = _lookup(graph, names), _hidden(graph, names)
    for value in (lookup, hidden):
        _check_width(graph, value, dtype, config.hidden_size)
    head_type = graph.outputs[names.logits].dtype
    raw = "logits" if head_type == "float32" else "logits.raw"
    after = () if raw == "logits" else (NewOp("Cast", (raw,), "logits", {"to": 1}),)  # 1 is float32
    wanted = NewOp("Gather", ("hidden", "rows"), "rows_wanted", {"axis": 0})
    return Cuts(
        embed=Cut({names.input_ids: "input_ids"}, {lookup: "inputs_embeds"}),
        body=_body(graph, names, layers[0], lookup, hidden),
        head=Cut({hidden: "rows_wanted"}, {names.logits: raw}, (wanted,), after),
        dtype=dtype,
        window=_window(layers),
        positions=min(config.context, *_table_lengths(graph)),
    )


def _window(layers: Sequence[Op]) -> int | None:
    """What sliding layers see; for people, since the graph itself knows."""
    windows = [int(op.numbers.get("local_window_size", -1)) for op in layers]
    return max((window for window in windows if window > 0), default=None)


def _check_ops(graph: SourceGraph) -> None:
    attentions = [op for op in graph.ops if "Attention" in op.kind]
    others = [op for op in attentions if op.kind != _GQA]
    if others or not attentions:
        found = f"{others[0].kind} ({others[0].name})" if others else "attention written out, or a cache that grows"
        raise UnsupportedModelError(
            f"{graph.path} has {found}; only graphs whose layers are all GroupQueryAttention over a shared buffer of "
            "keys and values can be wrapped: build it with onnxruntime-genai's model builder, or export the checkpoint"
        )
    nested = [op for op in graph.ops if op.nested]
    if nested or graph.functions:
        what = f"{nested[0].kind} ({nested[0].name})" if nested else f"the function {graph.functions[0]}"
        raise UnsupportedModelError(
            f"{graph.path} has graphs within the graph: {what}, for instance to change rope tables with the length; "
            "that is not understood, export the checkpoint instead"
        )


def _check_values(graph: SourceGraph, config: GenaiConfig) -> str:
    """Inputs and outputs are those the config names; returns the cache's type."""
    names = config.names
    past = [name for layer in names.past for name in layer]
    strange = sorted(graph.inputs.keys() - {names.input_ids, names.attention_mask, names.position_ids, *past})
    if strange:
        raise UnsupportedModelError(
            f"{graph.path} has an input {strange[0]!r}; only token ids, a mask, positions and a cache of keys and "
            "values for each layer are understood"
        )
    present = [name for layer in names.present for name in layer]
    missing = [name for name in (names.input_ids, *past) if name not in graph.inputs]
    missing += [name for name in (names.logits, *present) if name not in graph.outputs]
    if missing:
        raise CheckpointError(
            f"{graph.path} has no {missing[0]!r}, which genai_config.json names; the files do not belong together"
        )
    if graph.inputs[names.input_ids].dtype != "int64":
        raise UnsupportedModelError(
            f"{graph.path}: {names.input_ids} is {graph.inputs[names.input_ids].dtype}; only int64 is understood"
        )
    width = graph.outputs[names.logits].shape[-1:]
    if width and isinstance(width[0], int) and width[0] not in (0, config.vocab_size):
        raise CheckpointError(
            f"genai_config.json says vocab_size {config.vocab_size}, {graph.path} gives {width[0]} logits; "
            "the files do not belong together"
        )
    types = sorted({graph.inputs[name].dtype for name in past})
    if types not in (["float32"], ["float16"]):
        raise UnsupportedModelError(
            f"{graph.path} keeps its cache as {' and '.join(types)}; only float32 or float16 throughout is understood"
        )
    for name in past:
        _check_cache(graph, name, config)
    return types[0]


def _check_cache(graph: SourceGraph, name: str, config: GenaiConfig) -> None:
    """[B, kv heads, rows, head size], where the file gives numbers."""
    shape = graph.inputs[name].shape
    expected = (None, config.kv_heads, None, config.head_dim)
    pairs = zip(shape, expected, strict=False)
    if len(shape) != 4 or any(isinstance(size, int) and size and wanted not in (None, size) for size, wanted in pairs):
        raise CheckpointError(
            f"{graph.path}: {name} has shape {list(shape)}, genai_config.json says {config.kv_heads} heads of "
            f"{config.head_dim}; the files do not belong together"
        )


def _attentions(graph: SourceGraph, config: GenaiConfig) -> list[Op]:
    """The attention of every layer, in order; all take the same lengths and their own cache."""
    found = [op for op in graph.ops if op.kind == _GQA]
    if len(found) != config.layers:
        raise UnsupportedModelError(
            f"{graph.path} has {len(found)} GroupQueryAttention nodes for {config.layers} layers; "
            "only one for each layer, with a cache of its own, is understood"
        )
    by_past = {(op.input(3), op.input(4)): op for op in found}
    layers = []
    for past, present in zip(config.names.past, config.names.present, strict=True):
        op = by_past.get(past)
        if op is None or (op.output(1), op.output(2)) != present:
            raise UnsupportedModelError(
                f"{graph.path}: no GroupQueryAttention goes from {past[0]} to {present[0]} itself; "
                "a cache that is changed on its way is not understood"
            )
        _check_attention(graph, op, config)
        layers.append(op)
    if len({(op.input(5), op.input(6)) for op in layers}) != 1:
        raise UnsupportedModelError(f"{graph.path}: its layers take different lengths, which is not understood")
    _check_lengths(graph, config.names.attention_mask, layers[0])
    return layers


def _check_attention(graph: SourceGraph, op: Op, config: GenaiConfig) -> None:
    for index, what in _UNREAD.items():
        if op.input(index):
            raise UnsupportedModelError(f"{graph.path}: {op.name} takes {what}, which is not understood")
    heads = (op.numbers.get("num_heads"), op.numbers.get("kv_num_heads"))
    if heads != (config.heads, config.kv_heads):
        raise CheckpointError(
            f"{graph.path}: {op.name} has {heads[0]} heads and {heads[1]} for keys, genai_config.json says "
            f"{config.heads} and {config.kv_heads}; the files do not belong together"
        )


def _check_lengths(graph: SourceGraph, mask: str, op: Op) -> None:
    """For a mask of n ones the graph must work out the lengths n - 1 and n: then these can be given instead."""
    for count in _PROBES:
        known = mask in graph.inputs and graph.inputs[mask].dtype in ("int64", "int32")
        feeds = {mask: np.ones((1, count), graph.inputs[mask].dtype)} if known else {}
        found = [graph.compute(op.input(index), feeds) for index in (5, 6)]
        good = all(array is not None and array.dtype == np.int32 and array.size == 1 for array in found)
        if not good or [int(array.item()) for array in found if array is not None] != [count - 1, count]:
            raise UnsupportedModelError(
                f"{graph.path}: the lengths its attention takes ({op.input(5)}, {op.input(6)}) do not follow from "
                f"{mask} as its sum less one and its width; that is not understood"
            )


def _lookup(graph: SourceGraph, names: GraphNames) -> str:
    """The rows of the embedding table."""
    users = graph.users(names.input_ids)
    odd = [
        op for op in users if op.kind not in _LOOKUPS or op.input(1) != names.input_ids or graph.reads([op.input(0)])
    ]
    if odd or len(users) != 1:
        what = f"{odd[0].kind} ({odd[0].name})" if odd else f"{len(users)} nodes"
        raise UnsupportedModelError(
            f"{graph.path}: {names.input_ids} goes to {what}; only one lookup in the embedding table is understood"
        )
    return users[0].output(0)


def _hidden(graph: SourceGraph, names: GraphNames) -> str:
    """What the head's matrix is multiplied with, found from the logits backwards."""
    value = names.logits
    while True:
        op = graph.maker(value)
        moving = [name for name in op.inputs if name and graph.reads([name])] if op else []
        if op is not None and op.kind in _PRODUCTS and moving == [op.input(0)]:
            break
        if op is None or op.kind not in _BEHIND_HEAD or len(moving) != 1 or not _are_flat(graph, op, moving[0]):
            what = f"{op.kind} ({op.name})" if op else "an input"
            raise UnsupportedModelError(
                f"{graph.path}: {names.logits} come from {what}; only a MatMul or MatMulNBits with weights, with "
                f"{', '.join(_BEHIND_HEAD)} behind it, is understood as a head"
            )
        value = moving[0]
    hidden = op.input(0)
    maker = graph.maker(hidden)
    if maker is None or not (maker.kind.endswith("Normalization") or maker.kind in _ROWWISE):
        what = f"{maker.kind} ({maker.name})" if maker else "an input"
        raise UnsupportedModelError(
            f"{graph.path}: its head reads {what}, not the final norm of every row; build it without prune_lm_head"
        )
    return hidden


def _are_flat(graph: SourceGraph, op: Op, moving: str) -> bool:
    """Whether what an operator takes beside `moving` are constants of at most one axis, which fit [N,V] too."""
    others = [graph.compute(name, {}) for name in op.inputs if name and name != moving]
    return all(array is not None and array.ndim <= 1 for array in others)


def _check_width(graph: SourceGraph, value: str, dtype: str, width: int) -> None:
    known = graph.known(value)
    if known is None:
        return
    last = known.shape[-1] if known.shape else 0
    if known.dtype != dtype or (isinstance(last, int) and last not in (0, width)):
        raise UnsupportedModelError(
            f"{graph.path}: {value} is {known.dtype} {list(known.shape)}; expected {dtype}, as the cache, "
            f"and {width} columns, as genai_config.json says"
        )


def _table_lengths(graph: SourceGraph) -> list[int]:
    """Rows of every rope table; tables that are not stored are not understood."""
    tables = [op.input(index) for op in graph.ops if op.kind == _GQA for index in (7, 8) if op.input(index)]
    tables += [op.input(index) for op in graph.ops if op.kind == _ROTARY for index in (2, 3)]
    lengths = []
    for name in dict.fromkeys(tables):
        table = graph.stored(name)
        if table is None:
            raise UnsupportedModelError(f"{graph.path}: the rope table {name} is not stored but worked out")
        lengths.append(int(table.shape[0]))
    return lengths


def _body(graph: SourceGraph, names: GraphNames, attention: Op, lookup: str, hidden: str) -> Cut:
    given = {lookup: "inputs_embeds", attention.input(5): "seqlens_k", attention.input(6): "total_sequence_length"}
    results = {hidden: "hidden"}
    for layer, (past, present) in enumerate(zip(names.past, names.present, strict=True)):
        for part, source, result in zip(("key", "value"), past, present, strict=True):
            given[source] = f"past_key_values.{layer}.{part}"
            results[result] = f"present.{layer}.{part}"
    before = ()
    if names.position_ids in graph.reads(results, given):
        _check_positions(graph, names.position_ids)
        given[names.position_ids], before = "row_positions", _positions()
    left = sorted(graph.reads(results, given))
    if left:
        reader = graph.readers(left[0], results, given)[0]
        raise UnsupportedModelError(
            f"{graph.path}: {reader.kind} ({reader.name}) reads {left[0]} for more than the lengths of attention; "
            "that is not understood"
        )
    return Cut(given, results, before)


def _check_positions(graph: SourceGraph, name: str) -> None:
    spec = graph.inputs[name]
    if spec.dtype != "int64" or len(spec.shape) != 2:
        raise UnsupportedModelError(
            f"{graph.path}: {name} is {spec.dtype} {list(spec.shape)}; only one int64 position a row, [batch, rows], "
            "is understood"
        )


def _positions() -> tuple[NewOp, ...]:
    """row_positions [1,S], int64: those of the last S of total_sequence_length."""
    return (
        NewOp("Constant", (), "one", {"value_int": 1}),
        NewOp("Shape", ("inputs_embeds",), "rows_shape", {}),
        NewOp("Gather", ("rows_shape", "one"), "row_count", {"axis": 0}),
        NewOp("Cast", ("total_sequence_length",), "row_end", {"to": 7}),  # 7 is int64
        NewOp("Sub", ("row_end", "row_count"), "row_start", {}),
        NewOp("Range", ("row_start", "row_end", "one"), "row_range", {}),
        NewOp("Constant", (), "row_axes", {"value_ints": (0,)}),
        NewOp("Unsqueeze", ("row_range", "row_axes"), "row_positions", {}),
    )
