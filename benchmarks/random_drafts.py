"""Random drafts of a target's shape, in published file formats: what they propose is noise, what they cost is real."""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Shapes = dict[str, tuple[int, ...]]
_COMMON = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_DRAFT_VOCABULARY = 8192


def write_dflash(folder: Path, target: Mapping[str, Any], layers: int = 3, block: int = 8) -> Path:
    """A z-lab DFlash draft with five taps."""
    depth, hidden = target["num_hidden_layers"], target["hidden_size"]
    taps = [round(1 + i * (depth - 4) / 4) for i in range(5)]
    config = {
        **_shape(target),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": taps},
        "num_hidden_layers": layers,
        "num_target_layers": depth,
        "layer_types": ["full_attention"] * layers,
        "rms_norm_eps": 1e-6,
    }
    shapes: Shapes = {"fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,)}
    shapes |= {"norm.weight": (hidden,)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(target, hidden, norms=True).items()}
    return _write(folder, config, _random(shapes))


def write_eagle(folder: Path, target: Mapping[str, Any]) -> Path:
    """An EAGLE-3 draft as SpecForge writes it, with a head over a part of the vocabulary."""
    hidden = target["hidden_size"]
    config = {
        **_shape(target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": _DRAFT_VOCABULARY,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
    }
    shapes: Shapes = {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (_DRAFT_VOCABULARY, hidden), "midlayer.hidden_norm.weight": (hidden,)}
    shapes |= {f"midlayer.{name}": shape for name, shape in _layer(target, 2 * hidden, norms=False).items()}
    chosen = np.arange(target["vocab_size"]) < _DRAFT_VOCABULARY
    return _write(folder, config, {**_random(shapes), "d2t": np.zeros(_DRAFT_VOCABULARY, np.int64), "t2d": chosen})


def write_with_mtp(folder: Path, target_folder: Path) -> Path:
    """A copy of the target that carries a dense MTP head (`mtp.*`)."""
    shutil.copytree(target_folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden = config["hidden_size"]
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= {f"mtp.layers.0.{name}": shape for name, shape in _layer(config, hidden, norms=False).items()}
    weights = {name: values.copy() for name, values in load_file(folder / "model.safetensors").items()}
    return _write(folder, {**config, "mtp_num_hidden_layers": 1}, {**weights, **_random(shapes)})


def _shape(target: Mapping[str, Any]) -> dict[str, Any]:
    dim = target["hidden_size"] // target["num_attention_heads"]
    return {
        **{key: target[key] for key in _COMMON},
        "attention_bias": False,
        "head_dim": target.get("head_dim") or dim,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _layer(target: Mapping[str, Any], width: int, norms: bool) -> Shapes:
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    dim = target.get("head_dim") or hidden // target["num_attention_heads"]
    wide, narrow = dim * target["num_attention_heads"], dim * target["num_key_value_heads"]
    shapes: Shapes = {
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
    if norms:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def _random(shapes: Shapes) -> dict[str, np.ndarray]:
    made = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.02, shape)
        made[name] = (1 + noise if "norm" in name else noise).astype(ml_dtypes.bfloat16)
    return made


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder
