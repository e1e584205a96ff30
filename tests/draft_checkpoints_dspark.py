"""Small random DSpark checkpoints in the published formats: DeepSpec, SpecForge, vLLM speculators, GGUF."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from draft_checkpoints_dflash import HIDDEN, VARIANTS, VOCAB, write_dflash, write_dflash_gguf, write_speculators
from safetensors.numpy import load_file, save_file

RANK, BLOCK = 32, 7
HEADS: dict[str, Any] = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_BASE = {key: value for key, value in VARIANTS["qwen3"].items() if key not in ("auto_map", "dflash_config")}


def specforge(**own: Any) -> dict[str, Any]:
    """config.json as SpecForge trains and publishes it; `own` are keys of dflash_config, None leaves one out."""
    nested = {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "mask_token_id": 310,
        "projector_type": "dspark",
        "target_layer_ids": [1, 3, 6],
        **HEADS,
        **own,
    }
    return {
        **_BASE,
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": BLOCK,
        "dflash_config": {key: value for key, value in nested.items() if value is not None},
    }


def deepspec(**own: Any) -> dict[str, Any]:
    """config.json as DeepSpec publishes it: everything at the top."""
    stated = {"mask_token_id": 310, "target_layer_ids": [1, 3, 6], "num_anchors": 512, **HEADS, **own}
    return {**_BASE, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, **stated}


def head_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the heads, wherever they stand."""
    return {key: {**config, **config.get("dflash_config", {})}.get(key) for key in HEADS}


def heads_of(config: Mapping[str, Any], seed: int = 0, rows: int = VOCAB) -> dict[str, np.ndarray]:
    """The tensors of the heads under their published names, float32 values that bfloat16 holds exactly."""
    keys = head_keys(config)
    rank = keys["markov_rank"]
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "markov_head.markov_w1.weight": ((VOCAB, rank), 1.0),
        "markov_head.markov_w2.weight": ((rows, rank), 0.3),
    }
    if keys["markov_head_type"] == "gated":
        shapes["markov_head.gate_proj.weight"] = ((rank, HIDDEN + rank), 0.2)
        shapes["markov_head.gate_proj.bias"] = ((rank,), 0.5)
    if keys["enable_confidence_head"]:
        width = HIDDEN + rank if keys["confidence_head_with_markov"] else HIDDEN
        shapes["confidence_head.proj.weight"] = ((1, width), 0.15)
        shapes["confidence_head.proj.bias"] = ((1,), 0.5)
    made = {}
    for name, (shape, size) in shapes.items():
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).normal(0, size, shape)
        made[name] = noise.astype(ml_dtypes.bfloat16).astype(np.float32)
    return made


def write_dspark(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    own_vocab: int | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write config.json and model.safetensors; own_vocab and tensors as in `write_dflash`."""
    config = specforge() if config is None else config
    heads = {name: _half(values) for name, values in heads_of(config, seed, own_vocab or VOCAB).items()}
    return write_dflash(folder, config, seed, own_vocab=own_vocab, tensors={**heads, **(tensors or {})})


def write_dspark_speculators(
    folder: Path, seed: int = 0, own_vocab: int | None = 120, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a draft as vLLM's speculators library saves it; a change to "absent" leaves the key out."""
    stated = {
        "architectures": ["DSparkSpeculator"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "block_size": BLOCK,
        "sample_from_anchor": True,
        "speculators_config": proposal(BLOCK),
        "speculators_model_type": "dspark",
        **HEADS,
        **(changes or {}),
    }
    stated = {key: value for key, value in stated.items() if value != "absent"}
    write_speculators(folder, seed, own_vocab, stated)
    file = folder / "model.safetensors"
    heads = heads_of({**HEADS, **stated}, seed, own_vocab or VOCAB)
    save_file(load_file(file) | {name: _half(values) for name, values in heads.items()}, file, {"format": "pt"})
    return folder


def proposal(tokens: int) -> dict[str, Any]:
    """speculators_config that recommends so many tokens."""
    return {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    }


_GGUF = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def write_dspark_gguf(
    path: Path,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write SpecForge's `config` as llama.cpp's converter does; tensors: replaced under its names, or left out."""
    config = specforge() if config is None else config
    heads: dict[str, np.ndarray | None] = {_GGUF[name]: values for name, values in heads_of(config, seed).items()}
    kept = {name: values for name, values in {**heads, **(tensors or {})}.items() if values is not None}
    stated = {"dflash.sample_from_anchor": True, "dflash.attention.causal": False, **(changes or {})}
    return write_dflash_gguf(path, config, seed, stated, kept)


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16)
