"""Finds where a decoder graph of onnxruntime-genai is to be cut into embed, body and head, or refuses it by name.

Understood are graphs in which every layer is one GroupQueryAttention over its cache of keys and values: such a graph
can write the rows of a pass in place, and takes the lengths this project's runtime keeps.
"""

from collections.abc import Sequence

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from .foreign_config import ForeignConfig, GraphNames
from .foreign_ends import (
    Cuts,
    check_positions,
    check_values,
    check_width,
    cut_ends,
    find_hidden,
    find_lookup,
    refuse_nested,
    refuse_other_readers,
    row_positions,
)
from .onnx_surgery import Cut, Op, SourceGraph

_GQA = "com.microsoft::GroupQueryAttention"
_ROTARY = "com.microsoft::RotaryEmbedding"
_UNREAD = {9: "position ids", 10: "an attention bias", 12: "a quantised cache", 13: "a quantised cache"}
_PROBES = (1, 5, 64)  # lengths at which the graph's arithmetic on the mask is tried


def has_fused_cache(graph: SourceGraph) -> bool:
    """Whether some layer is a GroupQueryAttention, which may write into the buffer it reads."""
    return any(op.kind == _GQA for op in graph.ops)


def find_fused_cuts(graph: SourceGraph, config: ForeignConfig) -> Cuts:
    """Check the graph against the config and find its cuts; whatever is not understood is refused by name."""
    names = config.names
    _check_ops(graph)
    dtype = check_values(graph, config)
    layers = _attentions(graph, config)
    lookup, (hidden, _) = find_lookup(graph, names), find_hidden(graph, names)
    for value in (lookup, hidden):
        check_width(graph, value, dtype, config)
    embed, head = cut_ends(graph, names, lookup, hidden)
    return Cuts(
        embed=embed,
        body=_body(graph, names, layers[0], lookup, hidden),
        head=head,
        dtype=dtype,
        window=_window(layers),
        positions=min(config.context, *_table_lengths(graph)),
    )


def _window(layers: Sequence[Op]) -> int | None:
    """What sliding layers see; for people, since the graph itself knows."""
    windows = [int(op.numbers.get("local_window_size", -1)) for op in layers]
    return max((window for window in windows if window > 0), default=None)


def _check_ops(graph: SourceGraph) -> None:
    others = [op for op in graph.ops if "Attention" in op.kind and op.kind != _GQA]
    if others:
        raise UnsupportedModelError(
            f"{graph.path} has {others[0].kind} ({others[0].name}) beside GroupQueryAttention; only graphs whose "
            "layers are all GroupQueryAttention over a shared buffer, or none is, can be wrapped: export the checkpoint"
        )
    refuse_nested(graph)


def _attentions(graph: SourceGraph, config: ForeignConfig) -> list[Op]:
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


def _check_attention(graph: SourceGraph, op: Op, config: ForeignConfig) -> None:
    for index, what in _UNREAD.items():
        if op.input(index):
            raise UnsupportedModelError(f"{graph.path}: {op.name} takes {what}, which is not understood")
    heads = (op.numbers.get("num_heads"), op.numbers.get("kv_num_heads"))
    if heads != (config.heads, config.kv_heads):
        raise CheckpointError(
            f"{graph.path}: {op.name} has {heads[0]} heads and {heads[1]} for keys, {config.file} says "
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
        check_positions(graph, names.position_ids)
        given[names.position_ids], before = "row_positions", row_positions()
    cut = Cut(given, results, before)
    refuse_other_readers(graph, cut)
    return cut
