"""Tiny random checkpoints of every supported architecture, in the published formats, made without torch.

The same variant and seed give the same weights in both formats. Norm weights are multiples of 1/128, so that
Gemma's "plus one" in GGUF loses nothing, in bfloat16 either.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 300  # of the tokenizer; config.json may have more rows
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog, then the dog sleeps in the sun.\n"
    "def add(left, right):\n    return left + right\n\nprint(add(1, 2), add(10, 20))\n"
    "A round proposes tokens, the target verifies them, and the loop commits what it accepts.\n"
)
_GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_ON_DISK = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_LLAMA = {
    **_SMALL,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_MISTRAL = {
    **_LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
_QWEN2 = {
    **_SMALL,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 16,
    "max_window_layers": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama2": _LLAMA,
    "llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_yarn": {
        **_LLAMA,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "llama_bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "padded_vocab": {**_LLAMA, "vocab_size": 320},
    "smollm2": {**_LLAMA, "num_hidden_layers": 3, "rope_theta": 100000.0, "tie_word_embeddings": True},
    "mistral": _MISTRAL,
    "mistral_sliding": {**_MISTRAL, "sliding_window": 8},
    "qwen2": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2_sliding": {
        **_QWEN2,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {
        **_QWEN2,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": False,
    },
    "gemma3": {
        **_SMALL,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
}


def write_hf_checkpoint(
    folder: Path,
    variant: str | Mapping[str, Any],
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write config.json, safetensors, tokenizer and generation_config.json; returns the folder.

    `variant` is a name in VARIANTS or a whole config; `dtype` is "float32", "float16" or "bfloat16".
    """
    config = {**_config(variant), "torch_dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2})
    write_tokenizer(folder)
    weights = {name: values.astype(_ON_DISK[dtype]) for name, values in random_weights(config, seed).items()}
    _write_safetensors(folder, weights, shards)
    return folder


def random_weights(variant: str | Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor of the model under its Hugging Face name, float32."""
    config = _config(variant)
    gemma = config["model_type"] == "gemma3_text"
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(0, 0.1, shape)
        if name.endswith("norm.weight"):
            noise = np.round((noise if gemma else 1 + noise) * 128) / 128
        weights[name] = noise.astype(np.float32)
    return weights


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes a checkpoint of this config.json has to have."""
    hidden = config["hidden_size"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (wide, hidden),
        "self_attn.k_proj.weight": (narrow, hidden),
        "self_attn.v_proj.weight": (narrow, hidden),
        "self_attn.o_proj.weight": (hidden, wide),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    kind = config["model_type"]
    biased = "qkv" if kind == "qwen2" else "qkvo" if config.get("attention_bias") else ""
    shapes |= {f"self_attn.{part}_proj.bias": shapes[f"self_attn.{part}_proj.weight"][:1] for part in biased}
    if config.get("mlp_bias"):
        sizes = {"gate": inner, "up": inner, "down": hidden}
        shapes |= {f"mlp.{part}_proj.bias": (size,) for part, size in sizes.items()}
    if kind in ("qwen3", "gemma3_text"):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if kind == "gemma3_text":
        shapes |= {f"{where}_feedforward_layernorm.weight": (hidden,) for where in ("pre", "post")}
    return shapes


def write_gguf_checkpoint(path: Path, variant: str | Mapping[str, Any], seed: int = 0, quant: str = "F32") -> Path:
    """Write the variant as llama.cpp's converter would; returns the file.

    `quant` is the type of matrices (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0); vectors stay F32.
    """
    config = _config(variant)
    architecture = _GGUF_ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _add_gguf_metadata(writer, config)
    _add_gguf_tokenizer(writer, config["vocab_size"])
    for name, values in random_weights(config, seed).items():
        stored, values = _to_gguf(name, values, config, architecture)
        kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """The divisors of rotary frequencies by which GGUF states Llama 3's scaling, float32 [head_dim/2]."""
    scaling = config["rope_scaling"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = smooth.clip(0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def _to_gguf(name: str, values: np.ndarray, config: Mapping[str, Any], architecture: str) -> tuple[str, np.ndarray]:
    """A tensor as the converter renames and changes it."""
    if architecture == "llama" and ".q_proj." in name:
        values = _pair_rows(values, config["num_attention_heads"])
    if architecture == "llama" and ".k_proj." in name:
        values = _pair_rows(values, config["num_key_value_heads"])
    if architecture == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    kind = gguf.MODEL_ARCH[architecture.upper()]
    stored = gguf.get_tensor_name_map(kind, config["num_hidden_layers"]).get_name(name, (".weight", ".bias"))
    assert stored is not None, name
    return stored, values


def _pair_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second become neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_gguf_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config["model_type"] == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, rows: int) -> None:
    described = json.loads(make_tokenizer().to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    padding = [f"[PAD{index}]" for index in range(len(tokens), rows)]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    kinds = [control if token in SPECIAL else normal for token in tokens]
    writer.add_token_types([*kinds, *(unused for _ in padding)])
    writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of VOCAB tokens, always the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with a chatml template."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "unk_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    _dump(folder / "tokenizer_config.json", described)


def _write_safetensors(folder: Path, weights: Mapping[str, np.ndarray], shards: int) -> None:
    names = list(weights)
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.nbytes for values in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _dump(folder / "model.safetensors.index.json", index)


def _config(variant: str | Mapping[str, Any]) -> dict[str, Any]:
    return dict(VARIANTS[variant] if isinstance(variant, str) else variant)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
