"""Qwen2 and 2.5: Llama's layer; the biases on q, k and v come with the config."""

from .llama import decoder_layer

__all__ = ["decoder_layer"]
