"""DFlash's graph: one pass turns target rows into keys and values and a block of masks into hidden states.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding". Which rows of a block see which is in the
masks, so causal and sliding layers differ in nothing else here.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from oxidize.runtime.contracts import draft_contract, markov_contract, select_contract

from ..layers import Scope, Stream, float32, gated_mlp, linear, residual_norm, rms_norm
from ..profiles import Attention
from ..tensors import Projection
from .base import DraftConfig, DraftGraph
from .dflash2_graph import convolve, prepare_convolution, select_graph
from .dspark_graph import markov_graph
from .ends import own_ends
from .taps import joined_taps


def dflash_graphs(config: DraftConfig, dtype: str) -> tuple[DraftGraph, ...]:
    """The graphs of a DFlash draft: "draft"; "embed" and "head" where it has its own, "select" in DFlash 2, "markov" in
    DSpark.

    dtype: of activations.
    """
    shape = config.shape(dtype)
    graphs = [DraftGraph(draft_contract(shape), partial(_draft_graph, config), "draft.onnx"), *own_ends(config, dtype)]
    if config.paths is not None:
        graphs.append(DraftGraph(select_contract(shape), partial(select_graph, config), "select.onnx"))
    if config.markov is not None:
        graphs.append(DraftGraph(markov_contract(shape), partial(markov_graph, config), "markov.onnx"))
    return tuple(graphs)


def _draft_graph(config: DraftConfig, scope: Scope) -> None:
    """features, inputs_embeds -> hidden."""
    graph = scope.graph
    context = _context(scope, config.feature_size)  # [1,T,H]
    places = [graph.input(name) for name in ("context_positions", "position_ids")]
    positions = graph.op("Concat", places, "positions", {"axis": 1})  # [1,T+S]
    stream = Stream(graph.input("inputs_embeds"))
    for index in range(config.model.layers):
        name = f"layers.{index}"
        x, residual = residual_norm(scope, stream, f"{name}.input_layernorm")
        attend = partial(_attention, scope, index, context, positions)
        attended = _around(scope, config, f"{name}.attention_conv", attend, x)
        x, residual = residual_norm(scope, Stream(residual, attended), f"{name}.post_attention_layernorm")
        feed = partial(gated_mlp, scope, prefix=f"{name}.mlp")
        stream = Stream(residual, _around(scope, config, f"{name}.mlp_conv", feed, x))
    hidden, _ = residual_norm(scope, stream, "norm")
    graph.output("hidden", hidden)


def _context(scope: Scope, feature_size: int) -> str:
    """fc, then hidden_norm: the context rows [1,T,H]. In float32 until the norm has brought them back into range."""
    graph, size = scope.graph, scope.config.hidden_size
    joined = joined_taps(scope, graph.input("features"), feature_size)
    norm = float32(scope, graph.stored("hidden_norm.weight", scope.tensors.vector("hidden_norm.weight", size)))
    normed = scope.profile.norm(graph, joined, norm, scope.config.norm_eps, "hidden_norm")
    if scope.plan.dtype == "float32":
        return normed
    return graph.op("Cast", [normed], "hidden_norm.cast", {"to": graph.element_type(scope.plan.dtype)})


def _around(scope: Scope, config: DraftConfig, name: str, part: Callable[[str], str], x: str) -> str:
    """A part of a layer, in DFlash 2 between the two sides of a convolution. x: its normed input [1,S,H]."""
    if config.paths is None:
        return part(x)
    convolution = prepare_convolution(scope, config.paths, x, name)
    return convolve(scope, convolution, 1, part(convolve(scope, convolution, 0, x)))


def _attention(scope: Scope, index: int, context: str, positions: str, x: str) -> str:
    """Queries from the block x [1,S,H], keys and values from the context rows and the block behind them."""
    graph, config, prefix = scope.graph, scope.config, f"layers.{index}.self_attn"
    spec = _spec(scope, index)
    rows = graph.op("Concat", [context, x], f"{prefix}.rows", {"axis": 1})  # [1,T+S,H]
    query = _heads(scope, linear(scope, x, _projection(scope, spec, "q")), f"{prefix}.q")
    keys_values = linear(scope, rows, _projection(scope, spec, "kv"))
    halves = graph.constant("key_value_sizes", np.array(spec.widths[1:], np.int64))
    key, value = graph.ops("Split", [keys_values, halves], f"{prefix}.split", ("k", "v"), {"axis": -1})
    query = _rotated(scope, query, spec, f"{prefix}.q", graph.input("position_ids"))
    key = _rotated(scope, _heads(scope, key, f"{prefix}.k"), spec, f"{prefix}.k", positions)
    key = _written(scope, key, f"{index}.key")
    value = _written(scope, _heads(scope, value, f"{prefix}.v"), f"{index}.value")
    mask = graph.input("attn_mask_sliding" if spec.window else "attn_mask")
    mixed = graph.op("Attention", [query, key, value, mask], prefix, {"scale": spec.scale})  # [1,heads,S,D]
    mixed = graph.op("Transpose", [mixed], f"{prefix}.rows_first", {"perm": (0, 2, 1, 3)})
    together = graph.constant("heads_together", np.array([0, 0, -1], np.int64))
    flat = graph.op("Reshape", [mixed, together], f"{prefix}.flat")
    name = f"{prefix}.o_proj"
    return linear(
        scope, flat, Projection("o", name, (name,), (config.hidden_size,), spec.widths[0], config.output_bias)
    )


def _spec(scope: Scope, index: int) -> Attention:
    config = scope.config
    cos, sin = scope.tensors.rope(config.rope, config.head_dim, scope.plan.positions(config))
    return Attention(
        layer=index,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.sliding_window if config.is_sliding(index) else None,
        cos=cos,
        sin=sin,
    )


def _projection(scope: Scope, spec: Attention, parts: str) -> Projection:
    """The projections named by the letters of `parts`, stacked."""
    prefix, widths = f"layers.{spec.layer}.self_attn", dict(zip("qkv", spec.widths, strict=True))
    return Projection(
        "qkv",
        f"{prefix}.{parts}_proj",
        tuple(f"{prefix}.{part}_proj" for part in parts),
        tuple(widths[part] for part in parts),
        scope.config.hidden_size,
        scope.config.attention_bias,
    )


def _heads(scope: Scope, x: str, name: str) -> str:
    """[1,R,heads*D] -> [1,heads,R,D]."""
    apart = scope.graph.constant("heads_apart", np.array([0, 0, -1, scope.config.head_dim], np.int64))
    heads = scope.graph.op("Reshape", [x, apart], f"{name}.heads")
    return scope.graph.op("Transpose", [heads], f"{name}.heads_first", {"perm": (0, 2, 1, 3)})


def _rotated(scope: Scope, heads: str, spec: Attention, name: str, positions: str) -> str:
    """The norm of each head, then the rotary embedding (halves of a head are turned against each other)."""
    graph = scope.graph
    normed = rms_norm(scope, heads, f"{name}_norm", spec.head_dim)
    tables = [graph.stored(spec.table_name(part), getattr(spec, part)) for part in ("cos", "sin")]
    return graph.op("RotaryEmbedding", [normed, *tables, positions], f"{name}.rope")


def _written(scope: Scope, rows: str, cache: str) -> str:
    """Put rows [1,heads,T+S,D] into the cache at write_indices: the whole cache [1,heads,C,D]."""
    graph = scope.graph
    inputs = [graph.input(f"past_key_values.{cache}"), rows, graph.input("write_indices")]
    written = graph.op("TensorScatter", inputs, f"cache.{cache}", {"axis": 2})
    graph.output(f"present.{cache}", written)
    return written
