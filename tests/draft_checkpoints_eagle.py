"""Small random EAGLE-3 checkpoints with the names, shapes, types and config keys of the published ones.

Target: TARGET. A layout is "midlayer" (SafeAILab, SpecForge, AngelSlim, NVIDIA) or "layers" (speculators).
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from checkpoints import llama3_factors
from safetensors.numpy import save_file


@dataclass(frozen=True, slots=True)
class TinyTarget:
    """What a draft has to know of its target."""

    layers: int = 8
    hidden_size: int = 64
    vocab_size: int = 320


@dataclass(frozen=True, slots=True)
class EagleVariant:
    """A whole config.json, how its tensors are called, and which layer outputs (0-based) its taps really are."""

    config: dict[str, Any]
    taps: tuple[int, ...]
    layout: str = "midlayer"
    dtype: str = "bfloat16"
    own_embedding: bool = False
    own_head: bool = True
    leave_out: tuple[str, ...] = field(default=())

    @property
    def layer(self) -> dict[str, Any]:
        """The config of the decoder layer."""
        return self.config.get("transformer_layer_config", self.config)


TARGET = TinyTarget()
DRAFT_VOCAB = 96
_ON_DISK = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_SAFEAILAB: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 320,
    "draft_vocab_size": DRAFT_VOCAB,
}
_SPECFORGE = {
    **_SAFEAILAB,
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 32,
    "max_window_layers": 64,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
}
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
_NVIDIA = {
    **_SPECFORGE,
    "draft_vocab_size": 320,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [3, 5, 8],
        "next_layer_regular": True,
        "norm_before_fc": True,
        "parallel_draft_heads_num_layers": 1,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
    "mlp_bias": False,
}
_LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {**_LLAMA3, "rope_theta": 500000.0},
    "use_cache": True,
    "vocab_size": 320,
}
_SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": DRAFT_VOCAB,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.4.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": _LAYER,
    "transformers_version": "5.0.0",
}
_QWEN3_LAYER = {
    **_LAYER,
    "model_type": "qwen3",
    "layer_types": ["full_attention"],
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
_SLIDING_LAYER = {
    **_LAYER,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}
EAGLE_VARIANTS: dict[str, EagleVariant] = {
    "safeailab": EagleVariant(_SAFEAILAB, (1, 3, 4), dtype="float16"),
    "safeailab_full": EagleVariant(
        {key: value for key, value in _SAFEAILAB.items() if key != "draft_vocab_size"},
        (1, 3, 4),
        dtype="float16",
        leave_out=("d2t", "t2d"),
    ),
    "specforge": EagleVariant(
        {**_SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}},
        (1, 4, 6),
    ),
    "specforge_70b": EagleVariant({**_SPECFORGE, "rope_scaling": _LLAMA3}, (1, 3, 4), own_embedding=True),
    "angelslim_bias": EagleVariant({**_SPECFORGE, "attention_bias": True, "mlp_bias": True}, (1, 3, 4)),
    "nvidia": EagleVariant(_NVIDIA, (2, 4, 7), leave_out=("d2t", "t2d")),
    "eagle31": EagleVariant(
        {**_SPECFORGE, "hidden_size": 48, "target_hidden_size": 64, "fc_norm": True, "norm_output": True},
        (1, 3, 4),
        own_embedding=True,
    ),
    "target_head": EagleVariant(
        {key: value for key, value in _SPECFORGE.items() if key != "draft_vocab_size"},
        (1, 3, 4),
        own_head=False,
        leave_out=("d2t", "t2d"),
    ),
    "speculators": EagleVariant(_SPECULATORS, (1, 3, 4), "layers", own_embedding=True),
    "speculators_qwen3": EagleVariant(
        {
            **_SPECULATORS,
            "transformer_layer_config": _QWEN3_LAYER,
            "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
            "norm_before_residual": False,
        },
        (0, 3, 7),
        "layers",
    ),
    "speculators_sliding": EagleVariant(
        {
            **_SPECULATORS,
            "transformer_layer_config": _SLIDING_LAYER,
            "norm_before_fc": True,
            "norm_output": True,
            "fc_norm": False,
        },
        (1, 3, 4),
        "layers",
        own_embedding=True,
    ),
}


def write_eagle(folder: Path, variant: str | EagleVariant, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; returns the folder."""
    chosen = EAGLE_VARIANTS[variant] if isinstance(variant, str) else variant
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, chosen.config)
    save_file(eagle_tensors(chosen, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def eagle_tensors(variant: EagleVariant, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the file, by its name there."""
    tensors = {
        name: _values(name, shape, seed).astype(_ON_DISK[variant.dtype])
        for name, shape in eagle_shapes(variant).items()
    }
    chosen = draft_ids(variant, seed)
    if "d2t" not in variant.leave_out:
        tensors["d2t"] = chosen - np.arange(len(chosen))
    if "t2d" not in variant.leave_out:
        tensors["t2d"] = np.isin(np.arange(variant.layer["vocab_size"]), chosen)
    return tensors


def draft_ids(variant: EagleVariant, seed: int = 0) -> np.ndarray:
    """The target ids, ascending, that the draft's head scores: int64 [Vd]."""
    vocabulary = variant.layer["vocab_size"]
    count = variant.config.get("draft_vocab_size") or vocabulary
    return np.sort(np.random.default_rng([seed, 7]).permutation(vocabulary)[:count]).astype(np.int64)


def eagle_shapes(variant: EagleVariant) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the floating-point tensors of the file."""
    config, layer = variant.config, variant.layer
    hidden, vocabulary, features = layer["hidden_size"], layer["vocab_size"], 3 * TARGET.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, features), "norm.weight": (hidden,)}
    if variant.own_head:
        shapes["lm_head.weight"] = (config.get("draft_vocab_size") or vocabulary, hidden)
    if variant.own_embedding:
        shapes["embed_tokens.weight"] = (vocabulary, hidden)
    if config.get("norm_before_fc") or config.get("eagle_config", {}).get("norm_before_fc"):
        shapes["input_norm.weight"] = (features,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (TARGET.hidden_size,) for index in range(3)}
    if variant.layout == "layers":
        shapes["verifier_norm.weight"] = (hidden,)
        shapes["verifier_lm_head.weight"] = shapes["lm_head.weight"]
    for index in range(layer["num_hidden_layers"]):
        prefix = "midlayer" if variant.layout == "midlayer" else f"layers.{index}"
        shapes |= {f"{prefix}.{name}": shape for name, shape in _layer_shapes(layer, first=index == 0).items()}
    return shapes


def _layer_shapes(layer: Mapping[str, Any], first: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    head_dim = layer.get("head_dim") or hidden // layer["num_attention_heads"]
    wide, narrow = head_dim * layer["num_attention_heads"], head_dim * layer["num_key_value_heads"]
    width = 2 * hidden if first else hidden
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (wide, width),
        "self_attn.k_proj.weight": (narrow, width),
        "self_attn.v_proj.weight": (narrow, width),
        "self_attn.o_proj.weight": (hidden, wide),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if first:
        shapes["hidden_norm.weight"] = (hidden,)
    if layer["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if layer.get("attention_bias"):
        shapes |= {f"self_attn.{part}_proj.bias": shapes[f"self_attn.{part}_proj.weight"][:1] for part in "qkvo"}
    if layer.get("mlp_bias"):
        shapes |= {f"mlp.{part}_proj.bias": shapes[f"mlp.{part}_proj.weight"][:1] for part in ("gate", "up", "down")}
    return shapes


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(0, 0.1, shape)
    return (1 + noise if "norm" in name else noise).astype(np.float32)


def write_eagle_gguf(path: Path, variant: str | EagleVariant, seed: int = 0, quant: str = "F32") -> Path:
    """Write the variant (of one layer, "midlayer") as llama.cpp's converter does; returns the file."""
    chosen = EAGLE_VARIANTS[variant] if isinstance(variant, str) else variant
    config = chosen.config
    writer = gguf.GGUFWriter(path, "eagle3")
    _add_gguf_metadata(writer, chosen)
    names = {name: _gguf_name(name) for name in eagle_shapes(chosen)}
    for name, values in eagle_tensors(chosen, seed).items():
        if name not in names:
            continue
        stored = values.astype(np.float32)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        stored = _paired(stored, config[heads]) if heads else stored
        kind = gguf.GGMLQuantizationType[quant if stored.ndim == 2 else "F32"]
        writer.add_tensor(names[name], gguf.quantize(np.ascontiguousarray(stored), kind), raw_dtype=kind)
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    if "d2t" not in chosen.leave_out:
        writer.add_tensor("d2t", draft_ids(chosen, seed), raw_dtype=gguf.GGMLQuantizationType.I64)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def _add_gguf_metadata(writer: gguf.GGUFWriter, variant: EagleVariant) -> None:
    config = variant.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(1)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_array("eagle3.extract_layers", [tap + 1 for tap in variant.taps])
    writer.add_uint32("eagle3.target_hidden_size", TARGET.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", config.get("norm_before_residual", False))
    if (config.get("eagle_config") or {}).get("norm_before_fc"):
        writer.add_bool("eagle3.norm_before_fc", True)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    fixed = {
        "fc.weight": "fc.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "embed_tokens.weight": "token_embd.weight",
        "input_norm.weight": "enc.output_norm.weight",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "hidden_norm": "attn_norm_2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    if name in fixed:
        return fixed[name]
    stem, _, kind = name.removeprefix("midlayer.").rpartition(".")
    return f"blk.0.{parts[stem]}.{kind}"


def _paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second become neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
