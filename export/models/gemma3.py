"""Gemma 3 text: head norms on queries and keys, and norms after attention and the MLP as well as before."""

from ..layers import Scope, Stream, attention_qk_norm, gated_mlp, residual_norm, rms_norm


def decoder_layer(scope: Scope, index: int, x: str, residual: str) -> Stream:
    """x: the stream after input_layernorm; residual: the stream itself; both [B,S,H]."""
    name, size = f"model.layers.{index}", scope.config.hidden_size
    attended = attention_qk_norm(scope, index, x)
    attended = rms_norm(scope, attended, f"{name}.post_attention_layernorm", size)
    x, residual = residual_norm(scope, Stream(residual, attended), f"{name}.pre_feedforward_layernorm")
    fed = gated_mlp(scope, x, f"{name}.mlp")
    return Stream(residual, rms_norm(scope, fed, f"{name}.post_feedforward_layernorm", size))
