"""Reads a GGUF file's metadata into a ModelConfig, strictly: an architecture key we do not know is refused.

What the metadata leaves out, llama.cpp's loaders hard-code; those constants are repeated here and said to be
theirs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError
from oxidize.runtime.manifest import GenerationDefaults

from .config import ModelConfig, RopeConfig
from .config_hf import FULL, SLIDING, every_nth_full
from .config_keys import Keys

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma3")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_GEMMA_27B_LAYERS = 62  # llama.cpp tells the one Gemma 3 with another attention scale by its depth
ONLY: dict[str, Any] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.finetuned": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "tensor_data_layout": "Meta AI original pth",
}


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The model of a GGUF file, from its metadata and its tensors' shapes under GGUF names, outermost first.

    `rope_factors` are the values of the `rope_freqs.weight` tensor, if the file has one. Raises what
    `config_from_hf` raises.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED:
        raise UnsupportedModelError(
            f"GGUF general.architecture {architecture!r} is not supported; this version exports " + ", ".join(SUPPORTED)
        )
    _check_whole(metadata)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    keys = Keys(own, {}, f"GGUF metadata {architecture}.*")
    config = _READERS[architecture](keys, _base(keys, architecture, shapes, rope_factors))
    keys.refuse_unread(only=ONLY)
    return config


def layers_from_gguf(
    keys: Keys, architecture: str, shapes: Mapping[str, tuple[int, ...]], factors: tuple[float, ...] | None
) -> ModelConfig:
    """The stack of layers that the keys shared by all architectures describe; the caller refuses what stays unread.

    `keys` are without the architecture's prefix, `shapes` as in `config_from_gguf`; `factors`: of the rope, if any.
    """
    return _base(keys, architecture, shapes, factors)


def generation_from_gguf(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Ids that end an answer: end of sequence, end of turn, end of message. GGUF has no sampling defaults."""
    names = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return GenerationDefaults(tuple(dict.fromkeys(item for item in ids if type(item) is int)))


def _check_whole(metadata: Mapping[str, Any]) -> None:
    if metadata.get("split.count", 0) > 1:
        raise CheckpointError("this GGUF file is one of several splits; merge them with llama-gguf-split --merge")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"GGUF general.type is {kind!r}, only a whole model can be exported")


def _base(
    keys: Keys, architecture: str, shapes: Mapping[str, tuple[int, ...]], factors: tuple[float, ...] | None
) -> ModelConfig:
    hidden, heads, layers = (
        keys.size("embedding_length"),
        keys.size("attention.head_count"),
        _layers(keys),
    )
    kv_heads = keys.optional_integer("attention.head_count_kv") or heads
    head_dim = _head_dim(keys, hidden, heads)
    if heads % kv_heads:
        raise CheckpointError(f"{keys.where}: {heads} attention heads cannot share {kv_heads} key/value heads")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=keys.size("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(keys, shapes),
        max_positions=keys.size("context_length"),
        norm_eps=_decimal(keys.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(keys, factors, head_dim),
        tie_word_embeddings=_OUTPUT not in shapes,
        attention_scale=head_dim**-0.5,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        layer_types=(FULL,) * layers,
    )


def _llama(_keys: Keys, base: ModelConfig) -> ModelConfig:
    return base


def _qwen3(_keys: Keys, base: ModelConfig) -> ModelConfig:
    return replace(base, qk_norm=True)


def _gemma3(keys: Keys, base: ModelConfig) -> ModelConfig:
    scale_dim = base.hidden_size / base.heads if base.layers == _GEMMA_27B_LAYERS else base.head_dim
    local_theta = _decimal(keys.number("rope.freq_base_swa", 10_000.0))  # llama.cpp's constant
    config = replace(
        base,
        architecture="gemma3_text",
        attention_scale=scale_dim**-0.5,
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=base.hidden_size**0.5,
        layer_types=_gemma3_layer_types(keys, base.layers),
    )
    window = keys.size("attention.sliding_window")
    if SLIDING not in config.layer_types:
        return config
    return replace(config, sliding_window=window, rope_local=RopeConfig(local_theta))


def _gemma3_layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    pattern = keys.get("attention.sliding_window_pattern", 6)  # llama.cpp's constant
    if type(pattern) is int and pattern > 0:
        return every_nth_full(layers, pattern)
    if not isinstance(pattern, list) or len(pattern) != layers or not all(type(item) is bool for item in pattern):
        raise CheckpointError(f"{keys.where}: attention.sliding_window_pattern must be a period or a flag per layer")
    return tuple(SLIDING if item else FULL for item in pattern)


def _decimal(value: float) -> float:
    """The number that was meant by a float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _layers(keys: Keys) -> int:
    """The model's own layers: the blocks without the MTP heads behind them."""
    blocks, heads = keys.size("block_count"), keys.optional_integer("nextn_predict_layers") or 0
    if heads >= blocks:
        raise CheckpointError(f"{keys.where}: nextn_predict_layers = {heads} leaves no layers of {blocks} blocks")
    return blocks - heads


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    head_dim = keys.optional_integer("attention.key_length") or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        other = keys.optional_integer(key)
        if other not in (None, head_dim):
            raise UnsupportedModelError(f"{keys.where}: {key} = {other} differs from the head size {head_dim}")
    if head_dim % 2:
        raise CheckpointError(f"{keys.where}: head size {head_dim} is odd, rotary embeddings need an even one")
    return head_dim


def _vocab_size(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    rows = shapes.get(_EMBEDDING, (0,))[0]
    stated = keys.optional_integer("vocab_size")
    if not rows:
        raise CheckpointError(f"the GGUF file has no tensor {_EMBEDDING}; it is incomplete")
    if stated not in (None, rows):
        raise CheckpointError(f"{keys.where}: vocab_size is {stated} but {_EMBEDDING} has {rows} rows")
    return rows


def _rope(keys: Keys, factors: tuple[float, ...] | None, head_dim: int) -> RopeConfig:
    """Rotary embedding of full layers. As in llama.cpp, yarn has the attention factor its scaling implies."""
    theta = _decimal(keys.number("rope.freq_base", 10_000.0))
    kind = keys.choice("rope.scaling.type", {"none": "default", "linear": "linear", "yarn": "yarn"}, "none")
    factor = _decimal(keys.number("rope.scaling.factor", 1.0))
    original = keys.optional_integer("rope.scaling.original_context_length") or keys.size("context_length")
    fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    if factors is not None:
        if kind != "default" or len(factors) != head_dim // 2:
            raise UnsupportedModelError(
                f"{keys.where}: {len(factors)} rope_freqs, heads of {head_dim}, rope.scaling.type {kind!r}"
            )
        return RopeConfig(theta, "factors", factors=factors)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        return RopeConfig(theta, "yarn", factor, original_max_positions=original, beta_fast=fast, beta_slow=slow)
    return RopeConfig(theta)


_READERS: dict[str, Callable[[Keys, ModelConfig], ModelConfig]] = {
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}
