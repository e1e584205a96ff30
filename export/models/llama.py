"""Llama 2 and 3, SmolLM2: norms before attention and before the MLP."""

from ..layers import Scope, Stream, attention, gated_mlp, residual_norm


def decoder_layer(scope: Scope, index: int, x: str, residual: str) -> Stream:
    """x: the stream after input_layernorm; residual: the stream itself; both [B,S,H]."""
    name = f"model.layers.{index}"
    attended = attention(scope, index, x)
    x, residual = residual_norm(scope, Stream(residual, attended), f"{name}.post_attention_layernorm")
    return Stream(residual, gated_mlp(scope, x, f"{name}.mlp"))
