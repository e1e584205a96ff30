"""The architectures this version can build: a decoder layer for each, one file per architecture."""

from collections.abc import Callable

from oxidize.runtime.errors import UnsupportedModelError

from ..layers import Scope, Stream
from . import gemma3, llama, mistral, qwen2, qwen3

DecoderLayer = Callable[[Scope, int, str, str], Stream]

DECODER_LAYERS: dict[str, DecoderLayer] = {
    "llama": llama.decoder_layer,
    "mistral": mistral.decoder_layer,
    "qwen2": qwen2.decoder_layer,
    "qwen3": qwen3.decoder_layer,
    "gemma3_text": gemma3.decoder_layer,
}


def decoder_layer(architecture: str) -> DecoderLayer:
    """The layer function of an architecture."""
    try:
        return DECODER_LAYERS[architecture]
    except KeyError:
        known = ", ".join(DECODER_LAYERS)
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not implemented; this version builds {known}"
        ) from None
