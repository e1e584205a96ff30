"""Tiny random targets with an MTP head, in the published layouts: mtp.*, nextn, and GGUF's blk.N.nextn.*"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import (
    _GGUF_ARCHITECTURES,
    VARIANTS,
    _add_gguf_metadata,
    _add_gguf_tokenizer,
    _to_gguf,
    random_weights,
    tensor_shapes,
    write_hf_checkpoint,
)
from safetensors.numpy import load_file, save_file

Weights = dict[str, np.ndarray]
_GGUF_NAMES = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "embed_tokens": "embed_tokens",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
}


def head_weights(
    variant: str | Mapping[str, Any], layout: str, seed: int = 0, tables: str = "none", gated: bool = True
) -> Weights:
    """The head's tensors under their published names. `gated`: Qwen3-Next attention, in the "mtp" layout alone.

    tables: "shared" where its embedding and output matrix repeat the target's, "own" where they differ, or "none".
    """
    config = VARIANTS[variant] if isinstance(variant, str) else variant
    hidden = config["hidden_size"]
    layer = 0 if layout == "mtp" else config["num_hidden_layers"]
    shapes = {
        f"{_prefix(layout, layer)}{name}": shape for name, shape in _layer(config, gated and layout == "mtp").items()
    }
    joined = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    root = "mtp."
    if layout == "nextn":
        joined, root = ("eh_proj", "enorm", "hnorm", "shared_head.norm"), f"model.layers.{layer}."
    shapes |= {f"{root}{name}.weight": (hidden,) for name in joined[1:]}
    shapes[f"{root}{joined[0]}.weight"] = (hidden, 2 * hidden)
    weights = {name: _random(name, shape, seed, layout == "mtp") for name, shape in shapes.items()}
    return weights | (_tables(config, root, layout, seed, tables) if tables != "none" else {})


def _tables(config: Mapping[str, Any], root: str, layout: str, seed: int, tables: str) -> Weights:
    target = random_weights(config, seed)
    embedding = target["model.embed_tokens.weight"]
    head = embedding if config["tie_word_embeddings"] else target["lm_head.weight"]
    names = [f"{root}embed_tokens.weight", f"{root}{'lm_head' if layout == 'mtp' else 'shared_head.head'}.weight"]
    if tables == "shared":
        return dict(zip(names, (embedding, head), strict=True))
    return {name: _random(name, embedding.shape, seed, False) for name in names}


def write_mtp_checkpoint(
    folder: Path,
    variant: str,
    head: Mapping[str, np.ndarray],
    seed: int = 0,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face folder of the variant with these tensors of a head; `keys` replaces the head's config keys."""
    write_hf_checkpoint(folder, {**VARIANTS[variant], **(head_keys(head) if keys is None else keys)}, seed)
    add_head(folder, head)
    return folder


def add_head(folder: Path, head: Mapping[str, np.ndarray]) -> None:
    """Put the tensors of a head among those of the target in this folder."""
    path = folder / "model.safetensors"
    tensors = {name: values.copy() for name, values in load_file(path).items()}
    save_file({**tensors, **head}, path, {"format": "pt"})


def write_mtp_gguf(
    path: Path, variant: str, head: Mapping[str, np.ndarray], seed: int = 0, quant: str = "F32", heads: int = 1
) -> Path:
    """A GGUF file of the variant whose last block is the head, given under its nextn names."""
    config = VARIANTS[variant]
    layers, architecture = config["num_hidden_layers"], _GGUF_ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    longer = {**config, "num_hidden_layers": layers + 1}
    _add_gguf_metadata(writer, longer)
    writer.add_nextn_predict_layers(heads)
    _add_gguf_tokenizer(writer, config["vocab_size"])
    for name, values in {**random_weights(variant, seed), **head}.items():
        part = name.removeprefix(f"model.layers.{layers}.").removesuffix(".weight")
        if part in _GGUF_NAMES:
            stored = f"blk.{layers}.nextn.{_GGUF_NAMES[part]}.weight"
        else:
            stored, values = _to_gguf(name, values, longer, architecture)
        kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_nextn(variant: str, head: Mapping[str, np.ndarray]) -> Weights:
    """An mtp.* head as llama.cpp's converter stores it: nextn names, one added to its norms."""
    prefix = f"model.layers.{VARIANTS[variant]['num_hidden_layers']}."
    joined = {
        "mtp.fc": "eh_proj",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "shared_head.norm",
    }
    renamed = {}
    for name, values in head.items():
        stem = name.removesuffix(".weight")
        target = f"{prefix}{joined[stem]}.weight" if stem in joined else name.replace("mtp.layers.0.", prefix)
        renamed[target] = values + 1 if values.ndim == 1 else values
    return renamed


def head_keys(head: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What config.json says of a head."""
    if not any(name.startswith("mtp.") for name in head):
        return {"num_nextn_predict_layers": 1}
    return {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": "mtp.embed_tokens.weight" in head}


def _prefix(layout: str, layer: int) -> str:
    return f"mtp.layers.{layer}." if layout == "mtp" else f"model.layers.{layer}."


def _layer(config: Mapping[str, Any], gated: bool) -> dict[str, tuple[int, ...]]:
    """A decoder layer of the target, or with Qwen3-Next's attention."""
    prefix = "model.layers.0."
    shapes = {
        name.removeprefix(prefix): shape for name, shape in tensor_shapes(config).items() if name.startswith(prefix)
    }
    if gated:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias"):
            if name in shapes:
                shapes[name] = (2 * shapes[name][0], *shapes[name][1:])
        shapes |= {f"self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    return shapes


def _random(name: str, shape: tuple[int, ...], seed: int, zero_centred: bool) -> np.ndarray:
    """Norms are multiples of 1/128, so that one can be added and taken away without loss."""
    noise = np.random.default_rng([seed, 7, zlib.crc32(name.encode())]).normal(0, 0.1, shape)
    if name.endswith("norm.weight") or "_norm_" in name:
        noise = np.round((noise if zero_centred else 1 + noise) * 128) / 128
    return noise.astype(np.float32)
