"""The graphs of an EAGLE-3 draft (https://arxiv.org/abs/2503.01840): "fuse", "draft", "embed" and "head" if its own.

Row i of the draft reads the feature of token i and the embedding of token i+1, and scores token i+2. In a chain the
feature of a token just drafted is what the row before gave as `recycled`.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from oxidize.runtime.contracts import draft_contract, fuse_contract

from ..layers import Scope, Stream, attention, attention_qk_norm, gated_mlp, residual_norm, rms_norm
from ..models import decoder_layer
from .base import DraftConfig, DraftGraph
from .ends import own_ends
from .taps import joined_taps

_HALF_MAX = 65504.0


def eagle_graphs(config: DraftConfig, dtype: str) -> Sequence[DraftGraph]:
    """The graphs to write, activations of `dtype`."""
    shape = config.shape(dtype)
    graphs = [
        DraftGraph(fuse_contract(shape), partial(_fuse, config), "fuse.onnx"),
        DraftGraph(draft_contract(shape), partial(_draft, config), "draft.onnx"),
    ]
    return graphs + own_ends(config, dtype)


def _fuse(config: DraftConfig, scope: Scope) -> None:
    """Features [B,T,L*Ht] -> fused [B,T,H], after the norms of the variant."""
    graph = scope.graph
    features = graph.input("features")
    if config.flags["norm_before_fc"]:
        features = rms_norm(scope, features, "input_norm", config.feature_size)
    if config.flags["fc_norm"]:
        features = _normed_taps(config, scope, features)
    fused = joined_taps(scope, features, config.feature_size)
    if scope.plan.dtype == "float16":
        fused = _clipped(scope, fused, "float32", "fc.clip")
        fused = graph.op("Cast", [fused], "fc.cast", {"to": graph.element_type("float16")})
    graph.output("fused", fused)


def _normed_taps(config: DraftConfig, scope: Scope, features: str) -> str:
    """Each tap through a norm of its own."""
    count, width = len(config.taps), config.target_hidden_size
    sizes = scope.graph.constant("tap_sizes", np.full(count, width, np.int64))
    parts = [f"tap{tap}" for tap in range(count)]
    taps = scope.graph.ops("Split", [features, sizes], "taps", parts, {"axis": -1})
    normed = [rms_norm(scope, tap, f"fc_norm.{index}", width) for index, tap in enumerate(taps)]
    return scope.graph.op("Concat", normed, "taps.normed", {"axis": -1})


def _draft(config: DraftConfig, scope: Scope) -> None:
    """The layers and the final norm."""
    graph, model = scope.graph, config.model
    stream = _first_layer(config, scope)
    for index in range(1, model.layers):
        stream = _bounded(scope, stream, f"layers.{index}.stream")
        x, residual = residual_norm(scope, stream, f"model.layers.{index}.input_layernorm")
        stream = decoder_layer(model.architecture)(scope, index, x, residual)
    hidden, residual = residual_norm(scope, _bounded(scope, stream, "stream"), "model.norm")
    graph.output("recycled", hidden if config.flags["norm_output"] else residual)
    graph.output("hidden", hidden)


def _first_layer(config: DraftConfig, scope: Scope) -> Stream:
    """A decoder layer whose attention reads [normed embedding, normed feature] and whose stream is the feature."""
    graph, model, name = scope.graph, config.model, "model.layers.0"
    hidden, feature = model.hidden_size, graph.input("fused")
    embeds = rms_norm(scope, graph.input("inputs_embeds"), f"{name}.input_layernorm", hidden)
    normed = rms_norm(scope, feature, f"{name}.hidden_norm", hidden)
    both = graph.op("Concat", [embeds, normed], "layers.0.input", {"axis": -1})  # [B,S,2H]
    attend = attention_qk_norm if model.qk_norm else attention
    attended = attend(scope, 0, both, 2 * hidden)
    residual = normed if config.flags["norm_before_residual"] else feature
    stream = _bounded(scope, Stream(residual, attended), "layers.0.stream")
    x, residual = residual_norm(scope, stream, f"{name}.post_attention_layernorm")
    return Stream(residual, gated_mlp(scope, x, f"{name}.mlp"))


def _bounded(scope: Scope, stream: Stream, name: str) -> Stream:
    """The stream; at float16 as one value no larger than its largest number, which what fc gives may be already."""
    if scope.plan.dtype == "float32" or stream.delta is None:
        return stream
    total = scope.graph.op("Add", [stream.base, stream.delta], f"{name}.sum")
    return Stream(_clipped(scope, total, "float16", name))


def _clipped(scope: Scope, value: str, dtype: str, name: str) -> str:
    """A value of `dtype` within float16's range."""
    graph = scope.graph
    bounds = [graph.constant(f"{dtype}.{end * _HALF_MAX}", np.array(end * _HALF_MAX, dtype)) for end in (-1, 1)]
    return graph.op("Clip", [value, *bounds], name)
