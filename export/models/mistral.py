"""Mistral: Llama's layer; the window of sliding layers comes with the config."""

from .llama import decoder_layer

__all__ = ["decoder_layer"]
