"""Small random Medusa heads in the published layouts, config keys included, and what they compute in torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file
from torch.nn.functional import silu

HIDDEN, VOCAB = 64, 320
Tensors = dict[str, np.ndarray]
_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class MedusaVariant:
    """One form of heads. layout: "reference" or "vllm". output: "own", "one" or "target", as `MedusaHeads` has it.

    truncated: rows of a token_map; whole_rows: the matrices have all rows all the same. keys: more of config.json.
    """

    layout: str
    heads: int = 3
    layers: int = 1
    biased: bool = True
    output: str = "own"
    prefix: str = ""
    truncated: int | None = None
    whole_rows: bool = False
    hidden: int = HIDDEN
    vocab: int = VOCAB
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return "medusa_lm_head.safetensors" if self.layout == "reference" else "model.safetensors"


VARIANTS = {
    # text-generation-inference's Mistral-7B-Instruct-v0.2-medusa
    "reference": MedusaVariant("reference"),
    # FasterDecoding's uploads, converted: five heads and a config that says two
    "uploaded": MedusaVariant("reference", heads=5, keys={"medusa_num_heads": 2, "transformers_version": "4.31.0"}),
    # text-generation-inference's MedusaHeadV2: the target's lm_head scores
    "version2": MedusaVariant("reference", output="target", keys={"version": "2"}),
    # Narsil/mistral-medusa: no blocks
    "no_blocks": MedusaVariant("reference", heads=2, layers=0),
    "deep": MedusaVariant("reference", heads=2, layers=3),
    "one_head": MedusaVariant("reference", heads=1),
    "prefixed": MedusaVariant("reference", prefix="medusa_heads."),
    # abhigoyal/vllm-medusa-vicuna-7b-v1.3
    "vllm": MedusaVariant("vllm", biased=False, keys={"truncated_vocab_size": None}),
    "vllm_bias": MedusaVariant("vllm", heads=2, layers=2, keys={"medusa_fc_bias": True, "truncated_vocab_size": VOCAB}),
    "vllm_one": MedusaVariant("vllm", biased=False, output="one", keys={"original_lm_head": True}),
    "vllm_map": MedusaVariant("vllm", biased=False, truncated=96),
    "vllm_map_whole": MedusaVariant("vllm", biased=False, truncated=96, whole_rows=True),
    "vllm_map_one": MedusaVariant(
        "vllm", biased=False, output="one", truncated=96, keys={"original_lm_head": True}, prefix="medusa_heads."
    ),
}


def medusa_tensors(variant: MedusaVariant, seed: int = 0) -> Tensors:
    """Tensors under their published names, float32."""
    random = np.random.default_rng([seed, 11])
    rows = variant.truncated if variant.truncated and not variant.whole_rows else variant.vocab
    tensors: Tensors = {}

    def put(name: str, *shape: int) -> None:
        values = random.normal(0, 1.5 * shape[-1] ** -0.5, shape)
        tensors[f"{variant.prefix}{name}"] = values.astype(ml_dtypes.bfloat16).astype(np.float32)

    reference = variant.layout == "reference"
    for head in range(variant.heads):
        for layer in range(variant.layers):
            block = f"{head}.{layer}.linear" if reference else f"blocks.{head}.layers.{layer}"
            put(f"{block}.weight", variant.hidden, variant.hidden)
            if variant.biased:
                put(f"{block}.bias", variant.hidden)
        if variant.output == "own" or (variant.output == "one" and head == 0):
            put(f"{head}.{variant.layers}.weight" if reference else f"lm_heads.{head}.weight", rows, variant.hidden)
    if variant.truncated:
        tensors["token_map"] = random.permutation(variant.vocab)[: variant.truncated]
    return tensors


def medusa_config(variant: MedusaVariant) -> dict[str, Any]:
    """config.json as it is published."""
    if variant.layout == "reference":
        config: dict[str, Any] = {
            "base_model_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "medusa_num_heads": variant.heads,
            "medusa_num_layers": variant.layers,
            "transformers_version": "4.38.1",
        }
    else:
        config = {
            "_name_or_path": "abhigoyal/vllm-medusa-vicuna-7b-v1.3",
            "architectures": ["MedusaModel"],
            "hidden_size": variant.hidden,
            "model_type": "medusa",
            "num_heads": variant.heads,
            "num_hidden_layers": variant.layers,
            "transformers_version": "4.41.2",
            "truncated_vocab_size": variant.truncated,
            "vocab_size": variant.vocab,
        }
    return {**config, **variant.keys}


def write_medusa(
    folder: Path,
    variant: str | MedusaVariant,
    seed: int = 0,
    dtype: str = "bfloat16",
    tensors: Tensors | None = None,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A folder of this variant. tensors: in place of random ones; keys: replaces keys of the config."""
    variant = VARIANTS[variant] if isinstance(variant, str) else variant
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**medusa_config(variant), **(keys or {})}))
    values = medusa_tensors(variant, seed) if tensors is None else tensors
    stored = {name: each.astype(_TYPES[dtype]) if each.dtype.kind == "f" else each for name, each in values.items()}
    save_file(stored, folder / variant.file, {"format": "pt"})
    return folder


class MedusaReference:
    """What the heads compute, from their published names alone. `target_head` [V,H] where they have none."""

    def __init__(self, variant: str | MedusaVariant, tensors: Tensors, target_head: torch.Tensor | None = None) -> None:
        self.variant = VARIANTS[variant] if isinstance(variant, str) else variant
        self.tensors = {name.removeprefix("medusa_heads."): torch.from_numpy(each) for name, each in tensors.items()}
        self.target_head = target_head

    def hidden(self, row: torch.Tensor) -> torch.Tensor:
        """The rows [heads,H] of all heads for one row [H] of the target."""
        return torch.stack([self._blocks(head, row) for head in range(self.variant.heads)])

    def logits(self, row: torch.Tensor) -> torch.Tensor:
        """[heads,V] over the target's ids; -inf where the heads have no row."""
        found = torch.stack([self._output(head) @ x for head, x in enumerate(self.hidden(row))])
        if "token_map" not in self.tensors:
            return found
        ids = self.tensors["token_map"].long()
        wide = torch.full((len(found), self.variant.vocab), -torch.inf)
        wide[:, ids] = found[:, ids] if self.variant.whole_rows else found
        return wide

    def _blocks(self, head: int, x: torch.Tensor) -> torch.Tensor:
        for layer in range(self.variant.layers):
            reference = self.variant.layout == "reference"
            name = f"{head}.{layer}.linear" if reference else f"blocks.{head}.layers.{layer}"
            product = self.tensors[f"{name}.weight"] @ x
            x = x + silu(product + self.tensors[f"{name}.bias"] if self.variant.biased else product)
        return x

    def _output(self, head: int) -> torch.Tensor:
        if self.variant.output == "target":
            assert self.target_head is not None
            return self.target_head
        if self.variant.layout == "reference":
            return self.tensors[f"{head}.{self.variant.layers}.weight"]
        return self.tensors[f"lm_heads.{0 if self.variant.output == 'one' else head}.weight"]
