"""An MTP head in torch, from the published tensors, without a cache: what exported heads are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

# What can be got wrong, each of which must show.
MUTATIONS = ("concat_swapped", "no_hidden_norm", "norms_without_one", "no_gate", "recycles_before_norm")


@dataclass(frozen=True)
class MtpReference:
    """`weights`: the head's tensors under published names, "mtp.*" or one layer of "model.layers.N.*".

    `config`: the target's config.json. `mutation`: a mistake to make, one of MUTATIONS.
    """

    weights: Mapping[str, np.ndarray]
    config: Mapping[str, Any]
    mutation: str = ""

    @property
    def qwen(self) -> bool:
        return "mtp.fc.weight" in self.weights

    def step(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [n,H], embeds [n,H] of the tokens that follow -> all n outputs [n,H], to be scored and recycled."""
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if not self.qwen:
            names = tuple(self._find(part) for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        after = embeds, hidden
        normed_embeds = self._norm(names[0], after[0])
        normed_hidden = hidden if self.mutation == "no_hidden_norm" else self._norm(names[1], after[1])
        pair = [normed_embeds, normed_hidden]
        if self.mutation == "concat_swapped":
            pair.reverse()
        x = torch.cat(pair, -1) @ self._tensor(f"{names[2]}.weight").T
        x = x + self._attend(self._norm(self._layer("input_layernorm"), x))
        x = x + self._mlp(self._norm(self._layer("post_attention_layernorm"), x))
        scored = self._norm(names[3], x)
        return scored, x if self.mutation == "recycles_before_norm" else scored

    def propose(self, hidden: torch.Tensor, embeds: torch.Tensor, context: int) -> torch.Tensor:
        """Outputs of a chain: the last context row, then one row per embedding left, each on the output before.

        hidden [context,H] are the target's; embeds [context + k - 1, H]. Returns [k,H].
        """
        outputs = []
        for end in range(context, len(embeds) + 1):
            scored, recycled = self.step(hidden, embeds[:end])
            outputs.append(scored[-1])
            hidden = torch.cat([hidden, recycled[-1:]])
        return torch.stack(outputs)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[n,H] -> [n,V], by the head's own matrix."""
        return outputs @ self._tensor(self._find("shared_head.head") + ".weight").T

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """[n,H], from the head's own table."""
        return self._tensor(self._find("embed_tokens") + ".weight")[tokens]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        query, key, value = (self._linear(f"self_attn.{part}_proj", x) for part in "qkv")
        gate = None
        if query.shape[-1] == 2 * heads * size:
            query, gate = query.reshape(len(x), heads, 2 * size).chunk(2, -1)
        query, key, value = (part.reshape(len(x), -1, size).transpose(0, 1) for part in (query, key, value))
        if self._layer("self_attn.q_norm") + ".weight" in self.weights:
            query, key = (
                self._norm(self._layer("self_attn.q_norm"), query),
                self._norm(self._layer("self_attn.k_norm"), key),
            )
        query, key = self._rotate(query), self._rotate(key)
        key, value = (part.repeat_interleave(heads // kv_heads, 0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1)  # [n,heads,D]
        if gate is not None and self.mutation != "no_gate":
            mixed = mixed * gate.sigmoid()
        return self._linear("self_attn.o_proj", mixed.reshape(len(x), -1))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Halves of a head turn together: x [heads,n,D]."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequencies)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        opened = functional.silu(self._linear("mlp.gate_proj", x))
        return self._linear("mlp.down_proj", opened * self._linear("mlp.up_proj", x))

    def _linear(self, part: str, x: torch.Tensor) -> torch.Tensor:
        name = self._layer(part)
        out = x @ self._tensor(f"{name}.weight").T
        return out + self._tensor(f"{name}.bias") if f"{name}.bias" in self.weights else out

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensor(f"{name}.weight")
        if self.qwen and self.mutation != "norms_without_one":
            weight = 1 + weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _layer(self, part: str) -> str:
        return f"mtp.layers.0.{part}" if self.qwen else f"model.layers.{self.config['num_hidden_layers']}.{part}"

    def _find(self, part: str) -> str:
        return f"mtp.{part.replace('shared_head.head', 'lm_head')}" if self.qwen else self._layer(part)

    def _tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.weights[name]))
