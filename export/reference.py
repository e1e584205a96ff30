"""The same checkpoint as a transformers model on torch: what exported graphs are compared with."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from oxidize.runtime.errors import UnsupportedModelError

from .config import ModelConfig, RopeConfig
from .rope import inverse_frequencies
from .source import Checkpoint


@dataclass(frozen=True, slots=True)
class _Family:
    """transformers' classes for one architecture."""

    config: Any
    model: Any


_FAMILIES = {
    "llama": _Family(transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": _Family(transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": _Family(transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": _Family(transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3_text": _Family(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


def reference_model(checkpoint: Checkpoint) -> Any:
    """The checkpoint's weights, dequantised, in transformers' model: float32, CPU, eager attention, eval mode."""
    config = checkpoint.config
    if config.architecture not in _FAMILIES:
        raise UnsupportedModelError(f"no reference model for architecture {config.architecture!r}")
    family = _FAMILIES[config.architecture]
    with torch.device("meta"):
        model = family.model(_hf_config(family, config))
    model.load_state_dict(_state(checkpoint), strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    _restore_rope(model, config)
    return model.eval()


def _state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = checkpoint.weights
    return {name: torch.from_numpy(weights.read(name, weights.shape(name)).copy()) for name in weights.names()}


def _hf_config(family: _Family, config: ModelConfig) -> Any:
    keys: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "rope_parameters": _rope_keys(config.rope),
        "pad_token_id": None,
    }
    if config.architecture != "mistral":
        keys["layer_types"] = list(config.layer_types)
    if config.architecture.startswith("qwen"):
        keys["use_sliding_window"] = "sliding_attention" in config.layer_types
    if config.architecture == "gemma3_text":
        keys["query_pre_attn_scalar"] = round(config.attention_scale**-2)
        local = _rope_keys(config.rope_local or config.rope)
        keys["rope_parameters"] = {"full_attention": _rope_keys(config.rope), "sliding_attention": local}
    result = family.config(**keys)
    result._attn_implementation = "eager"
    return result


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    kind = "default" if rope.kind == "factors" else rope.kind
    keys: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.theta}
    if kind != "default":
        keys["factor"] = rope.factor
    if kind == "llama3":
        keys |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if kind == "yarn":
        keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {name: getattr(rope, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        keys |= {name: value for name, value in optional.items() if value is not None}
    if kind in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = rope.original_max_positions
    return keys


def _restore_rope(model: Any, config: ModelConfig) -> None:
    """Compute the buffers that are not in a state dict: built on the meta device they have no values."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.__init__(module.config)
            if config.rope.kind == "factors":
                module.inv_freq = torch.from_numpy(inverse_frequencies(config.rope, config.head_dim))
        elif type(module).__name__.endswith("ScaledWordEmbedding"):
            module.embed_scale = torch.tensor(config.embedding_scale)
