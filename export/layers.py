"""The vocabulary models are written in: norm, linear, gated MLP, attention. One function per layer variant."""

from dataclasses import dataclass

import numpy as np

from .config import ModelConfig
from .graph import GraphBuilder
from .plan import ExportPlan
from .profiles import Attention, Profile
from .tensors import ModelTensors, Projection


@dataclass(frozen=True, slots=True)
class Scope:
    """What every layer function needs: the model, the plan, the graph it grows in and how to write to it."""

    config: ModelConfig
    plan: ExportPlan
    graph: GraphBuilder
    tensors: ModelTensors
    profile: Profile


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream [B,S,H] after a layer: base plus, if any, a delta that the next norm adds."""

    base: str
    delta: str | None = None


def short(name: str) -> str:
    """A node name from a tensor name."""
    return name.removeprefix("model.")


def float32(scope: Scope, value: str) -> str:
    """An activation or a stored weight in float32, which at most plans it is already."""
    if scope.plan.dtype == "float32":
        return value
    return scope.graph.op("Cast", [value], f"{value}.float32", {"to": scope.graph.element_type("float32")})


def rms_norm(scope: Scope, x: str, name: str, size: int) -> str:
    """RMS norm over the last axis of width `size`."""
    return scope.profile.norm(scope.graph, x, _norm_weight(scope, name, size), scope.config.norm_eps, short(name))


def residual_norm(scope: Scope, stream: Stream, name: str) -> tuple[str, str]:
    """The norm of the stream and the stream itself as one value, both [B,S,H]."""
    size = scope.config.hidden_size
    if stream.delta is None:
        return rms_norm(scope, stream.base, name, size), stream.base
    weight = _norm_weight(scope, name, size)
    terms = (stream.base, stream.delta)
    return scope.profile.add_norm(scope.graph, terms, weight, scope.config.norm_eps, short(name))


def linear(scope: Scope, x: str, projection: Projection) -> str:
    """x [B,S,K] times the stacked weights: [B,S,N]."""
    name = short(projection.key)
    bias = scope.graph.stored(f"{name}.bias", scope.tensors.bias(projection)) if projection.bias else None
    if scope.plan.precision == "int4":
        bits = 8 if projection.part in scope.plan.wide_parts(scope.config) else 4
        blocks = scope.tensors.blocks(projection, bits, scope.plan.zero_points)
        return scope.profile.matmul_blocks(scope.graph, x, blocks, bias, name)
    weight = scope.graph.stored(f"{name}.weight", scope.tensors.dense(projection))
    if bias is None:
        return scope.graph.op("MatMul", [x, weight], name)
    return scope.graph.op("Add", [scope.graph.op("MatMul", [x, weight], f"{name}.matmul"), bias], name)


def gated_mlp(scope: Scope, x: str, prefix: str) -> str:
    """down(activation(gate(x)) * up(x)); gate and up are one product, which costs less than two."""
    config, graph, name = scope.config, scope.graph, short(prefix)
    inner, names = config.intermediate_size, tuple(f"{prefix}.{part}_proj" for part in ("gate", "up"))
    stacked = Projection(
        "gate_up", f"{prefix}.gate_up_proj", names, (inner, inner), config.hidden_size, config.mlp_bias
    )
    sizes = graph.constant("gate_up_sizes", np.array([inner, inner], np.int64))
    gate, up = graph.ops("Split", [linear(scope, x, stacked), sizes], f"{name}.split", ("gate", "up"), {"axis": -1})
    active = scope.profile.activation(graph, gate, config.activation, f"{name}.act")
    product = graph.op("Mul", [active, up], f"{name}.mul")
    down = f"{prefix}.down_proj"
    return linear(scope, product, Projection("down", down, (down,), (config.hidden_size,), inner, config.mlp_bias))


def attention(scope: Scope, index: int, x: str, width: int | None = None) -> str:
    """Self-attention with rotary embedding over the cache of layer `index`; width: of x, if not the hidden size."""
    spec = _attention_spec(scope, index)
    qkv = _project_qkv(scope, spec, x, width)
    return _attend(scope, spec, (qkv,))


def attention_qk_norm(scope: Scope, index: int, x: str, width: int | None = None) -> str:
    """Self-attention whose queries and keys pass an RMS norm per head before the rotary embedding."""
    spec, graph = _attention_spec(scope, index), scope.graph
    prefix = _prefix(index)
    sizes = graph.constant("qkv_sizes", np.array(spec.widths, np.int64))
    qkv = _project_qkv(scope, spec, x, width)
    query, key, value = graph.ops("Split", [qkv, sizes], f"{short(prefix)}.split", ("q", "k", "v"), {"axis": -1})
    query = _head_norm(scope, query, spec.head_dim, f"{prefix}.q_norm")
    key = _head_norm(scope, key, spec.head_dim, f"{prefix}.k_norm")
    return _attend(scope, spec, (query, key, value))


def _prefix(index: int) -> str:
    return f"model.layers.{index}.self_attn"


def _norm_weight(scope: Scope, name: str, size: int) -> str:
    tensor = scope.tensors.vector(f"{name}.weight", size, scope.config.norm_offset)
    return scope.graph.stored(f"{short(name)}.weight", tensor)


def _attention_spec(scope: Scope, index: int) -> Attention:
    config = scope.config
    sliding = config.is_sliding(index)
    rope = config.rope_local if sliding and config.rope_local else config.rope
    cos, sin = scope.tensors.rope(rope, config.head_dim, scope.plan.positions(config))
    return Attention(
        layer=index,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.sliding_window if sliding else None,
        cos=cos,
        sin=sin,
    )


def _project_qkv(scope: Scope, spec: Attention, x: str, width: int | None) -> str:
    prefix = _prefix(spec.layer)
    names = tuple(f"{prefix}.{part}_proj" for part in ("q", "k", "v"))
    config = scope.config
    return linear(
        scope,
        x,
        Projection("qkv", f"{prefix}.qkv_proj", names, spec.widths, width or config.hidden_size, config.attention_bias),
    )


def _head_norm(scope: Scope, x: str, head_dim: int, name: str) -> str:
    """Norm each head of [B,S,heads*D] on its own."""
    graph = scope.graph
    apart = graph.constant("heads_apart", np.array([0, 0, -1, head_dim], np.int64))
    together = graph.constant("heads_together", np.array([0, 0, -1], np.int64))
    heads = graph.op("Reshape", [x, apart], f"{short(name)}.heads")
    return graph.op("Reshape", [rms_norm(scope, heads, name, head_dim), together], f"{short(name)}.flat")


def _attend(scope: Scope, spec: Attention, qkv: tuple[str, ...]) -> str:
    config = scope.config
    prefix = _prefix(spec.layer)
    mixed = scope.profile.attend(scope.graph, qkv, spec, short(prefix))
    name, width = f"{prefix}.o_proj", spec.widths[0]
    return linear(scope, mixed, Projection("o", name, (name,), (config.hidden_size,), width, config.output_bias))
