"""Small random DFlash checkpoints in the published formats: z-lab safetensors, vLLM speculators, GGUF."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from oxidize.export.config import ModelConfig, RopeConfig

HIDDEN, VOCAB, TARGET_LAYERS = 64, 320, 9
_ON_DISK = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

_QWEN3: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 8,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 310, "target_layer_ids": [1, 3, 6]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": TARGET_LAYERS,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _changed(**changes: Any) -> dict[str, Any]:
    config = {**_QWEN3, **changes}
    return {key: value for key, value in config.items() if value != "absent"}


# The shapes of published configs: where block_size stands, how windows, causality and rope are said.
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "llama31": _changed(block_size=10, dflash_config={"mask_token_id": 300}, rope_theta=500000.0),
    "one_layer": _changed(
        num_hidden_layers=1, layer_types=["full_attention"], dflash_config={"mask_token_id": 300}, max_window_layers=1
    ),
    "qwen35": _changed(
        block_size="absent",
        rope_theta="absent",
        rope_scaling="absent",
        rope_parameters={"rope_theta": 10000000, "rope_type": "default", "mrope_section": [6, 5, 5]},
        bos_token_id=None,
        layer_types=_MIXED,
        pad_token_id=None,
        sliding_window=24,
        use_sliding_window=True,
        dflash_config={"block_size": 8, "mask_token_id": 310, "target_layer_ids": [0, 2, 4, 6, 8]},
    ),
    "use_swa": _changed(
        layer_types="absent",
        dflash_config={
            "mask_token_id": 310,
            "target_layer_ids": [1, 6],
            "use_swa": True,
            "swa_window_size": 24,
            "causal": False,
        },
    ),
    "is_causal": _changed(is_causal=True, layer_types=_MIXED, sliding_window=24, use_sliding_window=True),
    "all_sliding_not_causal": _changed(
        is_causal=False, layer_types=["sliding_attention"] * 3, sliding_window=24, use_sliding_window=True
    ),
    "bias": _changed(attention_bias=True),
}

# DFlash 2, which adds sizes to dflash_config and tensors to every layer.
DFLASH2 = _changed(
    architectures=["DFlash2DraftModel"],
    auto_map="absent",
    block_size="absent",
    is_causal=False,
    layer_types=["sliding_attention"] * 3,
    rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
    rope_scaling="absent",
    rope_theta="absent",
    sliding_window=24,
    use_sliding_window=True,
    dflash_config={
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "mask_token_id": 310,
        "output_multiplier": 0.7,
        "selector_rank": 12,
        "selector_top_k": 5,
        "target_layer_ids": [1, 3, 6],
    },
)


def target_config(**changes: Any) -> ModelConfig:
    """A target that the variants were made for."""
    facts: dict[str, Any] = {
        "architecture": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "layers": TARGET_LAYERS,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_positions": 512,
        "norm_eps": 1e-6,
        "rope": RopeConfig(10000.0),
        "tie_word_embeddings": False,
        "attention_scale": 0.25,
        "layer_types": ("full_attention",) * TARGET_LAYERS,
    }
    return ModelConfig(**{**facts, **changes})


def write_dflash(
    folder: Path,
    variant: str | Mapping[str, Any] = "qwen3",
    seed: int = 0,
    dtype: str = "bfloat16",
    own_vocab: int | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write config.json and model.safetensors as z-lab does; returns the folder.

    own_vocab: the draft brings an embedding, a head of so many rows, d2t and t2d. tensors: replaced, or left out
    where None.
    """
    config = dict(VARIANTS[variant] if isinstance(variant, str) else variant)
    if own_vocab:
        config["draft_vocab_size"] = own_vocab
    weights = {name: values.astype(_ON_DISK[dtype]) for name, values in weights_of(config, seed, own_vocab).items()}
    _write(folder, config, {**weights, **(vocabulary_map(own_vocab, seed) if own_vocab else {}), **(tensors or {})})
    return folder


def weights_of(config: Mapping[str, Any], seed: int, own_vocab: int | None = None) -> dict[str, np.ndarray]:
    """Every weight under z-lab's names, float32 values that bfloat16 holds exactly."""
    weights = {}
    for name, shape in shapes_of(config, own_vocab).items():
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(0, 1, shape)
        values = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * 0.1
        if name.endswith(("base_kernel", "codebook")):
            values = noise * 0.5
        weights[name] = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return weights


def shapes_of(config: Mapping[str, Any], own_vocab: int | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint with this config.json."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps = len(config.get("dflash_config", {}).get("target_layer_ids", ())) or config["num_hidden_layers"]
    target_hidden = config.get("target_hidden_size") or hidden
    second = {"conv_kernel_size", "selector_rank"} <= config.get("dflash_config", {}).keys()
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * target_hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        part = f"layers.{layer}."
        shapes |= {part + "input_layernorm.weight": (hidden,), part + "post_attention_layernorm.weight": (hidden,)}
        matrices = {"q": (wide, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, wide)}
        for letter, shape in matrices.items():
            shapes[f"{part}self_attn.{letter}_proj.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{part}self_attn.{letter}_proj.bias"] = shape[:1]
        shapes |= {f"{part}self_attn.{letter}_norm.weight": (dim,) for letter in "qk"}
        shapes |= {f"{part}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{part}mlp.down_proj.weight"] = (hidden, inner)
        if second:
            shapes |= _convolution_shapes(config, part)
    if second:
        rank = config["dflash_config"]["selector_rank"]
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        shapes |= {f"candidate_selector.{name}_codebook": (VOCAB, rank) for name in ("predecessor", "successor")}
    if own_vocab:
        shapes |= {"embed_tokens.weight": (config["vocab_size"], hidden), "lm_head.weight": (own_vocab, hidden)}
    return shapes


def _convolution_shapes(config: Mapping[str, Any], part: str) -> dict[str, tuple[int, ...]]:
    hidden, own = config["hidden_size"], config["dflash_config"]
    taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("attention_conv", "mlp_conv"):
        shapes[f"{part}{name}.base_kernel"] = (2, taps, hidden)
        shapes[f"{part}{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def vocabulary_map(rows: int, seed: int, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """d2t (offsets) and t2d of a draft with fewer rows than the target."""
    ids = np.sort(np.random.default_rng(seed).choice(vocab, rows, replace=False))
    return {"d2t": (ids - np.arange(rows)).astype(np.int64), "t2d": np.isin(np.arange(vocab), ids)}


def write_speculators(
    folder: Path, seed: int = 0, own_vocab: int | None = 120, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a draft as vLLM's speculators library saves it: nested layer config, tap ids counted from one."""
    layers = {key: value for key, value in VARIANTS["qwen35"].items() if key not in _ZLAB_ONLY}
    config = {
        "architectures": ["DFlashSpeculator"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [1, 4, 7],
        "block_size": 8,
        "draft_vocab_size": own_vocab or VOCAB,
        "dtype": "bfloat16",
        "has_no_defaults_at_init": False,
        "mask_token_id": 310,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": layers,
        "transformers_version": "4.57.1",
        **(changes or {}),
    }
    shaped = {**layers, "dflash_config": {"target_layer_ids": config["aux_hidden_state_layer_ids"]}}
    weights = weights_of(shaped, seed, own_vocab)
    if own_vocab:
        weights["verifier_norm.weight"] = np.ones(HIDDEN, np.float32)
        weights["verifier_lm_head.weight"] = np.zeros((own_vocab, HIDDEN), np.float32)
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights.items()}
    _write(folder, config, {**stored, **(vocabulary_map(own_vocab, seed) if own_vocab else {})})
    return folder


_ZLAB_ONLY = ("architectures", "auto_map", "dflash_config", "num_target_layers", "dtype", "transformers_version")
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
}
_GGUF_SECOND = {
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_dflash_gguf(
    path: Path,
    variant: str | Mapping[str, Any] = "qwen35",
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the variant as llama.cpp's converter does: taps counted by the layer they enter, norms as they are.

    changes: metadata replaced, or left out where None. tensors: more of them.
    """
    config = dict(VARIANTS[variant] if isinstance(variant, str) else variant)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in {**_metadata(config), **(changes or {})}.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in weights_of(config, seed).items():
        stored = _gguf_name(name)
        if values.ndim == 2:
            quantised = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(stored, quantised, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(stored, values)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    """llama.cpp's name; base kernels have no ending there, codebooks have one."""
    stem, kind = name.removesuffix(".weight"), "" if name.endswith("base_kernel") else ".weight"
    if name.endswith(".bias"):
        stem, kind = name.removesuffix(".bias"), ".bias"
    if not stem.startswith("layers."):
        return f"{_GGUF_NAMES[stem]}{kind}"
    _, number, part = stem.split(".", 2)
    return f"blk.{number}.{_GGUF_NAMES[part]}{kind}"


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config
    own = config["dflash_config"]
    found: dict[str, Any] = {
        "dflash.block_count": config["num_hidden_layers"],
        "dflash.context_length": config["max_position_embeddings"],
        "dflash.embedding_length": config["hidden_size"],
        "dflash.feed_forward_length": config["intermediate_size"],
        "dflash.attention.head_count": config["num_attention_heads"],
        "dflash.attention.head_count_kv": config["num_key_value_heads"],
        "dflash.attention.key_length": config["head_dim"],
        "dflash.attention.value_length": config["head_dim"],
        "dflash.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "dflash.rope.freq_base": float(rope["rope_theta"]),
        "dflash.block_size": config.get("block_size") or own["block_size"],
        "dflash.target_layers": [tap + 1 for tap in own["target_layer_ids"]],
        "tokenizer.ggml.mask_token_id": own["mask_token_id"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(config["vocab_size"])],
    }
    if "mrope_section" in rope:
        found["dflash.rope.dimension_sections"] = [config["head_dim"] // 2, 0, 0, 0]
    if config["sliding_window"]:
        found["dflash.attention.sliding_window"] = config["sliding_window"]
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["dflash.attention.sliding_window_pattern"] = kinds
    if "is_causal" in config:
        found["dflash.attention.causal"] = config["is_causal"]
    return found | {f"dflash.{_GGUF_SECOND[key]}": own[key] for key in own if key in _GGUF_SECOND}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    kept = {name: np.ascontiguousarray(values) for name, values in tensors.items() if values is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
