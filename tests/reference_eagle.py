"""EAGLE-3 in torch, written from the published description and sharing nothing with the exporter.

No cache: every pass computes all rows anew. float64, from the tensors as the checkpoint stores them.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional


class EagleReference:
    """One draft. `fuse`, then `forward` over the rows so far; `tokens` are target ids of the head's rows."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.layer: dict[str, Any] = self.config.get("transformer_layer_config") or self.config
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name: values.double() for name, values in stored.items() if values.is_floating_point()}
        self.tokens = torch.arange(len(stored["d2t"])) + stored["d2t"] if "d2t" in stored else None
        self.eps = self.layer["rms_norm_eps"]

    def fuse(self, features: Tensor) -> Tensor:
        """Taps side by side [n, 3*Ht] -> [n, H]."""
        features = features.double()
        if self._flag("norm_before_fc"):
            features = self._norm(features, "input_norm")
        if self._flag("fc_norm"):
            chunks = features.chunk(3, dim=-1)
            features = torch.cat([self._norm(chunk, f"fc_norm.{index}") for index, chunk in enumerate(chunks)], dim=-1)
        return features @ self.tensors["fc.weight"].T

    def forward(self, fused: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [n,Vd] (or, without a head, the normed hidden states [n,H]) and what is recycled [n,H]."""
        name = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        normed = self._norm(fused, f"{name}.hidden_norm")
        attention_input = torch.cat([self._norm(embeds.double(), f"{name}.input_layernorm"), normed], dim=-1)
        stream = normed if self._flag("norm_before_residual") else fused
        stream = stream + self._attend(attention_input, name, 0)
        stream = stream + self._mlp(self._norm(stream, f"{name}.post_attention_layernorm"), name)
        for index in range(1, self.layer["num_hidden_layers"]):
            name = f"layers.{index}"
            stream = stream + self._attend(self._norm(stream, f"{name}.input_layernorm"), name, index)
            stream = stream + self._mlp(self._norm(stream, f"{name}.post_attention_layernorm"), name)
        hidden = self.final_norm(stream)
        scores = hidden @ self.tensors["lm_head.weight"].T if "lm_head.weight" in self.tensors else hidden
        return scores, hidden if self._flag("norm_output") else stream

    def final_norm(self, x: Tensor) -> Tensor:
        return self._norm(x, "norm")

    def _flag(self, name: str) -> bool:
        return bool(self.config.get(name) or (self.config.get("eagle_config") or {}).get(name))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return self._linear(functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def _attend(self, x: Tensor, name: str, index: int) -> Tensor:
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        query, key, value = (self._linear(x, f"{name}.self_attn.{part}_proj") for part in "qkv")
        query, key, value = (
            part.unflatten(-1, (count, -1)).transpose(0, 1)  # [heads,n,D]
            for part, count in zip((query, key, value), (heads, kv_heads, kv_heads), strict=True)
        )
        if f"{name}.self_attn.q_norm.weight" in self.tensors:
            query, key = self._norm(query, f"{name}.self_attn.q_norm"), self._norm(key, f"{name}.self_attn.k_norm")
        query, key = self._rotate(query), self._rotate(key)
        key, value = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        mixed = scores.masked_fill(~self._visible(len(x), index), -math.inf).softmax(-1) @ value
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")

    def _visible(self, count: int, index: int) -> Tensor:
        rows, columns = torch.arange(count)[:, None], torch.arange(count)[None]
        visible = columns <= rows
        types = self.layer.get("layer_types")
        if types and types[index] == "sliding_attention":
            visible &= columns > rows - self.layer["sliding_window"]
        return visible

    def _rotate(self, x: Tensor) -> Tensor:
        """Half-split rotary embedding of [heads,n,D] at positions 0..n-1."""
        count, size = x.shape[1:]
        angles = torch.outer(torch.arange(count).double(), self._frequencies(size)).repeat(1, 2)
        turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
        return x * angles.cos() + turned * angles.sin()

    def _frequencies(self, size: int) -> Tensor:
        rope = self.layer.get("rope_parameters") or self.layer.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.layer.get("rope_theta") or 10000.0
        base = float(theta) ** (-torch.arange(0, size, 2).double() / size)
        if rope.get("rope_type", "default") == "default":
            return base
        assert rope["rope_type"] == "llama3"
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * base / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * base / rope["factor"] + smooth * base
