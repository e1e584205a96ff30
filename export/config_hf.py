"""Reads Hugging Face's config.json and generation_config.json, strictly.

A key we do not know may change the maths, so each key is read, listed as harmless, or refused. Absent keys
have the defaults of transformers 5.24's configuration classes, because published configs rely on them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError
from oxidize.runtime.manifest import GenerationDefaults

from .config import ModelConfig, RopeConfig
from .config_keys import Keys
from .config_rope import read_rope, read_rope_per_layer_type
from .config_tables import DEFAULTS, HARMLESS, IMAGE_KEYS, ONLY

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"

FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SUPPORTED = (*DEFAULTS, "gemma3")


def config_from_hf(raw: Mapping[str, Any], where: str = CONFIG_NAME) -> ModelConfig:
    """The model of a decoded config.json; `where` begins every error message.

    Raises UnsupportedModelError naming the key and value that are not implemented, CheckpointError where keys
    contradict each other or have the wrong type.
    """
    model_type = raw.get("model_type")
    if model_type == "gemma3":
        return _from_gemma3_wrapper(raw, where)
    if model_type not in DEFAULTS:
        raise UnsupportedModelError(
            f"{where}: model_type {model_type!r} is not supported; this version exports {', '.join(SUPPORTED)}; "
            "--exporter optimum lets optimum write the graph of others"
        )
    keys = Keys(raw, DEFAULTS[model_type], where)
    config = _READERS[model_type](keys)
    keys.refuse_unread(HARMLESS, ONLY)
    return config


def generation_from_hf(folder: Path) -> GenerationDefaults:
    """End-of-answer ids, from config.json where generation_config.json has none, and sampling defaults."""
    config = read_json(folder / CONFIG_NAME)
    path = folder / GENERATION_NAME
    given = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    fallback = {**(text if isinstance(text, Mapping) else {}), **config}
    eos = given.get("eos_token_id")
    if eos is None:
        eos = fallback.get("eos_token_id")
    sampling = {} if given.get("do_sample") is False else given
    keys = Keys(sampling, {}, GENERATION_NAME)
    return GenerationDefaults(
        eos_token_ids=_token_ids(eos),
        temperature=keys.optional_number("temperature"),
        top_k=keys.optional_integer("top_k"),
        top_p=keys.optional_number("top_p"),
        min_p=keys.optional_number("min_p"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; is the checkpoint complete?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(found).__name__}; download it again")
    return found


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _from_gemma3_wrapper(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The text model inside a multimodal Gemma 3 checkpoint."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: a gemma3 model needs a text_config object; the file is incomplete")
    outer = Keys(raw, {}, where)
    for key in ("text_config", "vision_config", *IMAGE_KEYS):
        outer.get(key)
    tied = outer.flag("tie_word_embeddings", True)
    outer.refuse_unread(HARMLESS, ONLY)
    if "tie_word_embeddings" in raw and text.get("tie_word_embeddings", tied) != tied:
        raise CheckpointError(f"{where}: tie_word_embeddings differs between the top level and text_config")
    return config_from_hf({"tie_word_embeddings": tied, **text, "model_type": "gemma3_text"}, where)


def _base(keys: Keys, rope: RopeConfig, tied: bool = False, activation_key: str = "hidden_act") -> ModelConfig:
    """What all architectures share: sizes, full attention, no bias."""
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    head_dim = _head_dim(keys, hidden, heads)
    kv_heads = keys.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(f"{keys.where}: {heads} attention heads cannot share {kv_heads} key/value heads")
    layers = keys.size("num_hidden_layers")
    return ModelConfig(
        architecture=str(keys.get("model_type")),
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.size("vocab_size"),
        max_positions=keys.size("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=keys.flag("tie_word_embeddings", tied),
        attention_scale=head_dim**-0.5,
        activation=keys.choice(activation_key, _ACTIVATIONS),
        layer_types=(FULL,) * layers,
    )


def _llama(keys: Keys) -> ModelConfig:
    biased = keys.flag("attention_bias", False)
    return replace(
        _base(keys, read_rope(keys)),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _mistral(keys: Keys) -> ModelConfig:
    base = _base(keys, read_rope(keys))
    window = keys.optional_integer("sliding_window")
    derived = (FULL if window is None else SLIDING,) * base.layers
    if _layer_types(keys, derived) != derived:
        raise CheckpointError(f"{keys.where}: layer_types and sliding_window = {window} disagree")
    return _with_window(keys, base, derived, window)


def _qwen2(keys: Keys) -> ModelConfig:
    return replace(_qwen(keys), attention_bias=True)


def _qwen3(keys: Keys) -> ModelConfig:
    biased = keys.flag("attention_bias", False)
    return replace(_qwen(keys), attention_bias=biased, output_bias=biased, qk_norm=True)


def _qwen(keys: Keys) -> ModelConfig:
    """Full attention first, a window from `max_window_layers` on; explicit layer_types have the last word."""
    base = _base(keys, read_rope(keys))
    window = keys.optional_integer("sliding_window")
    if not keys.flag("use_sliding_window", False):
        window = None
    full_layers = base.layers if window is None else keys.number("max_window_layers")
    derived = tuple(FULL if layer < full_layers else SLIDING for layer in range(base.layers))
    keys.get("max_window_layers")
    return _with_window(keys, base, _layer_types(keys, derived), window)


def _gemma3(keys: Keys) -> ModelConfig:
    rope, rope_local = read_rope_per_layer_type(keys)
    base = _base(keys, rope, tied=True, activation_key="hidden_activation")
    biased = keys.flag("attention_bias", False)
    config = replace(
        base,
        attention_scale=keys.positive("query_pre_attn_scalar") ** -0.5,
        attention_bias=biased,
        output_bias=biased,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=base.hidden_size**0.5,
    )
    config = _with_window(keys, config, _gemma3_layer_types(keys, base.layers), keys.optional_integer("sliding_window"))
    return replace(config, rope_local=rope_local) if config.sliding_window else config


def _gemma3_layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """Every `sliding_window_pattern`-th layer is full."""
    stated = [keys.optional_integer(key) for key in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = stated[0] or stated[1]
    derived = every_nth_full(layers, pattern or 6)
    types = _layer_types(keys, derived)
    if pattern and types != derived:
        raise CheckpointError(f"{keys.where}: layer_types and sliding_window_pattern = {pattern} disagree")
    return types


def every_nth_full(layers: int, period: int) -> tuple[str, ...]:
    """Gemma's order of layers: period - 1 sliding ones, then a full one."""
    return tuple(SLIDING if (layer + 1) % period else FULL for layer in range(layers))


def _layer_types(keys: Keys, derived: tuple[str, ...]) -> tuple[str, ...]:
    stated = keys.texts("layer_types")
    if stated is None:
        return derived
    unknown = sorted(set(stated) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModelError(f"{keys.where}: layer_types holds {unknown[0]!r}, which is not implemented")
    if len(stated) != len(derived):
        raise CheckpointError(f"{keys.where}: layer_types has {len(stated)} entries for {len(derived)} layers")
    return stated


def _with_window(keys: Keys, config: ModelConfig, types: tuple[str, ...], window: int | None) -> ModelConfig:
    if SLIDING not in types:
        return replace(config, layer_types=types)
    if not window:
        raise CheckpointError(f"{keys.where}: layer_types holds sliding layers but there is no sliding_window")
    return replace(config, layer_types=types, sliding_window=window)


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    head_dim = keys.optional_integer("head_dim")
    if not head_dim and hidden % heads:
        raise CheckpointError(f"{keys.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise CheckpointError(f"{keys.where}: head_dim {head_dim} is odd, rotary embeddings need an even one")
    return head_dim


_READERS: dict[str, Callable[[Keys], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}
