"""DFlash in plain torch, without a cache: every round is computed from all taps of the text. Knows no code of ours."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class LayerRules:
    """Whether rows of a block see earlier rows only, and how many positions a row sees (None: all)."""

    causal: bool
    window: int | None


class DFlashReference:
    """The maths of a draft. config: keys as in a Qwen3 config.json; tensors under z-lab's names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], rules: list[LayerRules]) -> None:
        self.config, self.rules = config, rules
        self.tensors = {name: value.float() for name, value in tensors.items() if value.is_floating_point()}
        self.theta = float((config.get("rope_parameters") or {}).get("rope_theta") or config["rope_theta"])

    def hidden(self, features: Tensor, block: Tensor) -> Tensor:
        """Final hidden states [S,H] of a block [S,H] of embeddings behind a text whose taps are features [n,F]."""
        context = self._norm(linear(features, self.tensors["fc.weight"]), "hidden_norm")
        x = block
        for index, rules in enumerate(self.rules):
            name = f"layers.{index}"
            attend = partial(self._attention, index, rules, context)
            x = x + self._around(f"{name}.attention_conv", attend, self._norm(x, f"{name}.input_layernorm"))
            feed = partial(self._mlp, index)
            x = x + self._around(f"{name}.mlp_conv", feed, self._norm(x, f"{name}.post_attention_layernorm"))
        return self._norm(x, "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """[S,Vd] of the draft's own head."""
        return linear(hidden, self.tensors["lm_head.weight"])

    def pair_scores(self, hidden: Tensor, logits: Tensor, row: int, before: int) -> tuple[Tensor, Tensor]:
        """DFlash 2: the likeliest tokens [K] of a row, best first, and their scores [K] after token `before`."""
        own = self.config["dflash_config"]
        cap = own["final_logit_softcapping"]
        bent = torch.tanh(logits[row] * own["output_multiplier"] / cap) * cap
        best, tokens = bent.topk(own["selector_top_k"])
        part = "candidate_selector."
        given = self.tensors[part + "predecessor_codebook"][before] * linear(
            hidden[row], self.tensors[part + "hidden_projection.weight"]
        )
        return tokens, torch.stack(
            [best[i] + given @ self.tensors[part + "successor_codebook"][token] for i, token in enumerate(tokens)]
        )

    def _around(self, name: str, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """DFlash 2: a convolution before and after a part of a layer; in DFlash the part alone."""
        if f"{name}.base_kernel" not in self.tensors:
            return part(x)
        base = self.tensors[f"{name}.base_kernel"]  # [side,tap,H]
        groups = x.shape[1] // self.config["dflash_config"]["conv_group_size"]
        dynamic = linear(x, self.tensors[f"{name}.kernel_projection.weight"])
        dynamic = dynamic.reshape(len(x), 2, base.shape[1], groups)  # [S,side,tap,group]
        kernels = base + dynamic.repeat_interleave(x.shape[1] // groups, dim=3)  # [S,side,tap,H]
        return self._convolved(kernels[:, 1], part(self._convolved(kernels[:, 0], x)))

    @staticmethod
    def _convolved(kernels: Tensor, x: Tensor) -> Tensor:
        """Row t is the sum over taps of its kernel times row t - tap; kernels [S,tap,H]."""
        rows = []
        for t in range(len(x)):
            terms = [kernels[t, tap] * x[t - tap] for tap in range(kernels.shape[1]) if t >= tap]
            rows.append(torch.stack(terms).sum(0))
        return torch.stack(rows)

    def _attention(self, index: int, rules: LayerRules, context: Tensor, x: Tensor) -> Tensor:
        part, known, size = f"layers.{index}.self_attn", len(context), len(x)
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        queries = self._project(x, f"{part}.q_proj", heads)  # [heads,S,D]
        keys = torch.cat([self._project(rows, f"{part}.k_proj", groups) for rows in (context, x)], dim=1)
        values = torch.cat([self._project(rows, f"{part}.v_proj", groups) for rows in (context, x)], dim=1)
        positions = torch.arange(known + size)
        queries = self._turn(self._norm(queries, f"{part}.q_norm"), positions[known:])
        keys = self._turn(self._norm(keys, f"{part}.k_norm"), positions)
        keys, values = (part.repeat_interleave(heads // groups, dim=0) for part in (keys, values))
        scores = queries @ keys.transpose(1, 2) * self.config["head_dim"] ** -0.5
        scores = scores.masked_fill(~self._visible(rules, known, size), float("-inf"))
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(size, -1)
        return linear(mixed, self.tensors[f"{part}.o_proj.weight"], self.tensors.get(f"{part}.o_proj.bias"))

    @staticmethod
    def _visible(rules: LayerRules, known: int, size: int) -> Tensor:
        """bool [S, known + S]: what each row of the block sees."""
        rows, columns = torch.arange(known, known + size)[:, None], torch.arange(known + size)[None]
        seen = torch.ones(size, known + size, dtype=torch.bool)
        if rules.causal:
            seen &= columns <= rows
        if rules.window is not None:
            seen &= columns > rows - rules.window
        return seen

    def _project(self, x: Tensor, name: str, heads: int) -> Tensor:
        rows = linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
        return rows.reshape(len(x), heads, self.config["head_dim"]).transpose(0, 1)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate element i of each head's first half against element i of its second."""
        half = x.shape[-1] // 2
        angles = positions[:, None].float() * self.theta ** (-torch.arange(half) / half)[None]
        left, right = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"layers.{index}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]


def load_zlab(folder: Path, rules: list[LayerRules]) -> DFlashReference:
    """The reference for a checkpoint in z-lab's layout; rules are for the caller to know."""
    config = json.loads((folder / "config.json").read_text())
    return DFlashReference(config, load_file(folder / "model.safetensors"), rules)


def load_speculators(folder: Path, rules: list[LayerRules]) -> DFlashReference:
    """The reference for a checkpoint saved by vLLM's speculators, whose layers have a config of their own."""
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    return DFlashReference(config, load_file(folder / "model.safetensors"), rules)
