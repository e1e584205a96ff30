"""Trains tiny drafts on the text of a tiny target until they know it by heart, in seconds on one thread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import VARIANTS, write_hf_checkpoint
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu

from oxidize.export.reference import reference_model
from oxidize.export.source import open_source

LAYERS = 9
TARGET = {**VARIANTS["qwen3"], "num_hidden_layers": LAYERS, "max_window_layers": LAYERS, "head_dim": 16}


def write_target(folder: Path, gain: float, seed: int = 0) -> Path:
    """A random target whose layers say so much that its greedy text does not soon repeat itself."""
    write_hf_checkpoint(folder, {**TARGET, "vocab_size": 320}, seed)
    weights = load_file(folder / "model.safetensors")
    louder = {
        name: values * np.float32(gain) if ".layers." in name and values.ndim == 2 else values
        for name, values in weights.items()
    }
    save_file(louder, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass(frozen=True)
class Lesson:
    """Texts of one length with what the target computes for them: ids [N,n], features [N,n,F], its two ends [V,H]."""

    ids: Tensor
    features: Tensor
    embed: Tensor
    head: Tensor


def prepare_lesson(target: Path, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> Lesson:
    """Run the texts through transformers; taps are layers counted from 0, of which the output is taken."""
    model, ids = reference_model(open_source(str(target))), torch.tensor([list(text) for text in texts])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[tap + 1] for tap in taps], dim=-1)
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Lesson(ids, features, *(end.detach() for end in ends))


class Stack:
    """The layer arithmetic of a Qwen3-like draft under the names of its checkpoint; rows [*,n,H]."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self.tensors = {name: torch.tensor(values, requires_grad=True) for name, values in tensors.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"])

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return self.project(silu(self.project(x, f"{name}.gate_proj")) * self.project(x, f"{name}.up_proj"), f"{name}.down_proj")

    def heads(self, x: Tensor, name: str, positions: Tensor | None) -> Tensor:
        """[*,n,H] -> [*,heads,n,D], turned to their positions [*,1,n] where given."""
        rows = self.project(x, f"{name}_proj").unflatten(-1, (-1, self.config["head_dim"])).transpose(-2, -3)
        if positions is None:
            return rows
        norm = f"{name}_norm"
        rows = self.norm(rows, norm) if f"{norm}.weight" in self.tensors else rows
        half = self.config["head_dim"] // 2
        angles = positions[..., None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        left, right = rows.split(half, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, name: str) -> Tensor:
        """Attention of q [*,heads,S,D] over k and v [*,kv,C,D], then the output projection: [*,S,H]."""
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], dim=-3) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) * self.config["head_dim"] ** -0.5).masked_fill(~seen, -torch.inf)
        return self.project((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2), f"{name}.o_proj")


def dflash_loss(draft: Stack, lesson: Lesson, anchors: Tensor) -> Tensor:
    """Of blocks behind the anchors [A] of every text: what the target wrote at positions 1.. of each block."""
    size, mask = draft.config["block_size"], draft.config["dflash_config"]["mask_token_id"]
    texts, length = lesson.ids.shape
    places = anchors[:, None] + torch.arange(size)  # [A,S]
    context = draft.norm(draft.project(lesson.features, "fc"), "hidden_norm")[:, None]  # [N,1,n,H]
    block = lesson.ids[:, anchors, None].repeat(1, 1, size)
    block[:, :, 1:] = mask
    x = lesson.embed[block]  # [N,A,S,H]
    before = (torch.arange(length) < anchors[:, None])[:, None, None].expand(-1, 1, size, -1)
    seen = torch.cat([before, torch.ones(len(anchors), 1, size, size, dtype=torch.bool)], dim=-1)  # [A,1,S,n+S]
    for index in range(draft.config["num_hidden_layers"]):
        name = f"layers.{index}"
        part, normed = f"{name}.self_attn", draft.norm(x, f"{name}.input_layernorm")
        q = draft.heads(normed, f"{part}.q", places[:, None])
        k, v = (
            torch.cat([draft.heads(context, f"{part}.{letter}", here).expand(-1, len(anchors), -1, -1, -1),
                       draft.heads(normed, f"{part}.{letter}", there)], dim=-2)
            for letter, here, there in (("k", torch.arange(length), places[:, None]), ("v", None, None))
        )
        x = x + draft.mix(q, k, v, seen, part)
        x = x + draft.mlp(draft.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    logits = linear(draft.norm(x, "norm")[:, :, 1:], lesson.head)
    return cross_entropy(logits.flatten(0, 2), lesson.ids[:, places[:, 1:]].flatten())
