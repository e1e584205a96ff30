"""The graph of an MTP head: embeddings and hidden states are joined, pass one decoder layer and a norm."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from oxidize.runtime.contracts import draft_contract

from ..layers import Scope, Stream, gated_mlp, linear, residual_norm, rms_norm
from ..models import decoder_layer
from ..profiles import Attention
from ..tensors import Projection
from .base import DraftConfig, DraftGraph
from .ends import own_ends
from .mtp import GATED

_LAYER = "model.layers.0"


def mtp_graphs(config: DraftConfig, dtype: str) -> Sequence[DraftGraph]:
    """The graphs of an MTP head: "draft", and "embed" and "head" where it has its own."""
    write = partial(_draft, gated=config.flags[GATED])
    return [DraftGraph(draft_contract(config.shape(dtype)), write, "draft.onnx"), *own_ends(config, dtype)]


def _draft(scope: Scope, gated: bool) -> None:
    """fused, inputs_embeds -> the normed hidden states, to be scored and to be read again by the next step."""
    graph, size = scope.graph, scope.config.hidden_size
    joined = [
        rms_norm(scope, graph.input("inputs_embeds"), "model.enorm", size),
        rms_norm(scope, graph.input("fused"), "model.hnorm", size),
    ]
    pair = graph.op("Concat", joined, "joined", {"axis": -1})  # [B,S,2H]
    # "qkv": one small matrix that all else depends on is worth the same bits
    stream = linear(scope, pair, Projection("qkv", "model.fc", ("model.fc",), (size,), 2 * size))
    x, residual = residual_norm(scope, Stream(stream), f"{_LAYER}.input_layernorm")
    layer = _gated_layer if gated else decoder_layer("qwen3" if scope.config.qk_norm else "llama")
    hidden, _ = residual_norm(scope, layer(scope, 0, x, residual), "model.norm")
    graph.output("hidden", hidden)
    graph.output("recycled", hidden)


def _gated_layer(scope: Scope, _index: int, x: str, residual: str) -> Stream:
    """Qwen3-Next's full-attention layer: Qwen3's, with a gate on what is attended."""
    attended = _gated_attention(scope, x)
    x, residual = residual_norm(scope, Stream(residual, attended), f"{_LAYER}.post_attention_layernorm")
    return Stream(residual, gated_mlp(scope, x, f"{_LAYER}.mlp"))


def _gated_attention(scope: Scope, x: str) -> str:
    """Attention times sigmoid(gate); the query projection gives [query, gate] for each head."""
    graph, config, prefix, name = scope.graph, scope.config, f"{_LAYER}.self_attn", "layers.0.self_attn"
    spec = _spec(scope)
    wide, narrow, _ = spec.widths
    names = tuple(f"{prefix}.{part}_proj" for part in ("q", "k", "v"))
    rows = (2 * wide, narrow, narrow)
    stacked = Projection("qkv", f"{prefix}.qkv_proj", names, rows, config.hidden_size, config.attention_bias)
    sizes = graph.constant("qgkv_sizes", np.array(rows, np.int64))
    parts = graph.ops("Split", [linear(scope, x, stacked), sizes], f"{name}.split", ("qg", "k", "v"), {"axis": -1})
    queries, gate = _halves(scope, parts[0], f"{name}.halves")  # [B,S,heads,D] each
    keys = graph.op("Reshape", [parts[1], _shape(scope, "heads_apart", 0, 0, -1, spec.head_dim)], f"{name}.k.heads")
    queries = _flat(scope, rms_norm(scope, queries, f"{prefix}.q_norm", spec.head_dim), f"{name}.q.flat")
    keys = _flat(scope, rms_norm(scope, keys, f"{prefix}.k_norm", spec.head_dim), f"{name}.k.flat")
    mixed = scope.profile.attend(graph, (queries, keys, parts[2]), spec, name)
    opened = graph.op("Sigmoid", [_flat(scope, gate, f"{name}.gate.flat")], f"{name}.gate")
    mixed = graph.op("Mul", [mixed, opened], f"{name}.gated")
    out = f"{prefix}.o_proj"
    return linear(scope, mixed, Projection("o", out, (out,), (config.hidden_size,), wide, config.output_bias))


def _spec(scope: Scope) -> Attention:
    config = scope.config
    cos, sin = scope.tensors.rope(config.rope, config.head_dim, scope.plan.positions(config))
    return Attention(
        layer=0,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=None,
        cos=cos,
        sin=sin,
    )


def _halves(scope: Scope, x: str, name: str) -> tuple[str, str]:
    """[B,S,heads*2D] -> [B,S,heads,D] twice."""
    graph, size = scope.graph, scope.config.head_dim
    pairs = graph.op("Reshape", [x, _shape(scope, "pairs_apart", 0, 0, -1, 2 * size)], f"{name}.pairs")
    sizes = graph.constant("pair_sizes", np.array([size, size], np.int64))
    first, second = graph.ops("Split", [pairs, sizes], name, ("q", "gate"), {"axis": -1})
    return first, second


def _flat(scope: Scope, x: str, name: str) -> str:
    """[B,S,heads,D] -> [B,S,heads*D]."""
    return scope.graph.op("Reshape", [x, _shape(scope, "heads_together", 0, 0, -1)], name)


def _shape(scope: Scope, name: str, *sizes: int) -> str:
    return scope.graph.constant(name, np.array(sizes, np.int64))
