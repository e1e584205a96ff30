"""Trains tiny drafts on a tiny target's text until they know it by heart, in seconds on one thread."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from checkpoints import VARIANTS, write_hf_checkpoint
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad, silu

from oxidize.export.reference import reference_model
from oxidize.export.source import open_source

SPOKEN = 24  # so few tokens that each is followed by many others, and only the rows tell by which
_SHAPE = {"num_hidden_layers": 9, "max_window_layers": 9, "head_dim": 16, "vocab_size": 320}


def write_lively_target(folder: Path, seed: int = 0, uneven_norm: bool = False) -> Path:
    """A random target of few words, whose layers weigh so much that its greedy text does not run in circles.

    uneven_norm: its final norm weighs some channels a lot more than others and its head makes up for it, so that rows
    differ before and behind that norm, and texts do not.
    """
    write_hf_checkpoint(folder, {**VARIANTS["qwen3"], **_SHAPE}, seed)
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if ".layers." in name and values.ndim == 2:
            weights[name] = values * np.float32(3)
    weights["lm_head.weight"][SPOKEN:] *= np.float32(0.1)
    if uneven_norm:
        scale = np.exp2(np.random.default_rng(seed).integers(-3, 4, len(weights["model.norm.weight"])))
        weights["model.norm.weight"] *= scale.astype(np.float32)
        weights["lm_head.weight"] /= scale.astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass(frozen=True)
class Lesson:
    """Texts of one length and what the target has computed for them.

    ids [N,n]; features [N,n,F]; embed, head [V,H]: the target's ends.
    """

    ids: Tensor
    features: Tensor
    embed: Tensor
    head: Tensor


def prepare_lesson(target: Path, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> Lesson:
    """Run texts through transformers. taps: layers counted from 0, whose outputs are the features."""
    model = reference_model(open_source(str(target)))
    ids = torch.tensor([list(text) for text in texts])
    with torch.no_grad(), one_thread():
        states = model(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[tap + 1] for tap in taps], dim=-1)  # state 0 is the embedding
    return Lesson(ids, features, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())


class Student:
    """A draft in training, its tensors under the names of its checkpoint, and the arithmetic of its layers.

    config: keys of a config.json, and of our own: "norm_offset" is added to the weights of norms, "gated" says that
    attention is as in Qwen3-Next.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self.tensors = {
            name: torch.tensor(values.astype(np.float32), requires_grad=True) for name, values in tensors.items()
        }

    def saved(self) -> dict[str, np.ndarray]:
        """The tensors as they are now, in the type that checkpoints are published in."""
        return {name: value.detach().numpy().astype(ml_dtypes.bfloat16) for name, value in self.tensors.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (self.tensors[f"{name}.weight"] + self.config.get("norm_offset", 0))

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"])

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        """With the norm before it, in DFlash 2 between the sides of a convolution."""
        normed = self.norm(x, f"{layer}.post_attention_layernorm")
        return self.around(f"{layer}.mlp_conv", lambda rows: self._feed(rows, layer), normed)

    def around(self, name: str, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A part of a layer over normed rows [*,S,H] of a block, in DFlash 2 between the sides of a convolution."""
        if f"{name}.base_kernel" not in self.tensors:
            return part(x)
        base = self.tensors[f"{name}.base_kernel"]  # [2,taps,H]
        dynamic = self.project(x, f"{name}.kernel_projection").unflatten(-1, (*base.shape[:2], -1))  # [*,S,2,taps,G]
        kernels = base + dynamic.repeat_interleave(base.shape[2] // dynamic.shape[-1], dim=-1)

        def convolved(side: int, rows: Tensor) -> Tensor:
            moved = [pad(rows, (0, 0, tap, 0))[..., : rows.shape[-2], :] for tap in range(base.shape[1])]
            return torch.stack([kernels[..., side, tap, :] * each for tap, each in enumerate(moved)]).sum(0)

        return convolved(1, part(convolved(0, x)))

    def _feed(self, x: Tensor, layer: str) -> Tensor:
        gate, up = (self.project(x, f"{layer}.mlp.{part}_proj") for part in ("gate", "up"))
        return self.project(silu(gate) * up, f"{layer}.mlp.down_proj")

    def queries(self, x: Tensor, layer: str, positions: Tensor) -> Tensor:
        turned = self._turned(x, f"{layer}.self_attn.q", positions)
        return turned[..., ::2, :, :] if self.config.get("gated") else turned

    def gate(self, x: Tensor, layer: str) -> Tensor | None:
        """[*,S,heads*D] where there is one: the query projection then gives [query, gate] for each head."""
        if not self.config.get("gated"):
            return None
        return self._split(x, f"{layer}.self_attn.q")[..., 1::2, :, :].transpose(-2, -3).flatten(-2)

    def keys(self, x: Tensor, layer: str, positions: Tensor) -> Tensor:
        return self._turned(x, f"{layer}.self_attn.k", positions)

    def values(self, x: Tensor, layer: str) -> Tensor:
        """[*,n,H] -> [*,heads,n,D]."""
        return self._split(x, f"{layer}.self_attn.v")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, layer: str, gate: Tensor | None = None) -> Tensor:
        """q [*,heads,S,D] over k and v [*,kv,C,D] where `seen` [*,S,C], then the output projection: [*,S,H]."""
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], dim=-3) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) * self.config["head_dim"] ** -0.5).masked_fill(~seen, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        mixed = mixed if gate is None else mixed * gate.sigmoid()
        return self.project(mixed, f"{layer}.self_attn.o_proj")

    def _split(self, x: Tensor, name: str) -> Tensor:
        return self.project(x, f"{name}_proj").unflatten(-1, (-1, self.config["head_dim"])).transpose(-2, -3)

    def _turned(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """[*,n,H] -> [*,heads,n,D], normed where there is a norm, rotated by halves to positions [*,n]."""
        rows, half = self._split(x, name), self.config["head_dim"] // 2
        if f"{name}_norm.weight" in self.tensors:
            rows = self.norm(rows, f"{name}_norm")
        angles = positions[..., None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        (left, right), cos, sin = rows.split(half, dim=-1), angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


Loss = Callable[[Student, Lesson, torch.Generator], Tensor]


def train(student: Student, lesson: Lesson, loss_of: Loss, steps: int, rate: float = 3e-3) -> None:
    """So many steps of Adam on one thread, always the same ones."""
    optimizer = torch.optim.Adam(student.tensors.values(), lr=rate)
    dice = torch.Generator().manual_seed(steps)
    with one_thread():
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(student, lesson, dice).backward()
            optimizer.step()


def dflash_loss(student: Student, lesson: Lesson, dice: torch.Generator) -> Tensor:
    """Blocks behind random anchors: rows 1.. are to say what the target wrote there. Scored by the target's head."""
    size = student.config["block_size"]
    count = lesson.ids.shape[1] - size
    anchors = torch.randperm(count, generator=dice)[:16] + 1  # [A]
    places = anchors[:, None] + torch.arange(size)  # [A,S]
    hidden = block_rows(student, lesson, places)[:, :, 1:]
    logits, wanted = linear(hidden, lesson.head), lesson.ids[:, places[:, 1:]].flatten()
    if "candidate_selector.successor_codebook" not in student.tensors:
        return cross_entropy(logits.flatten(0, 2), wanted)
    own, before = student.config["dflash_config"], lesson.ids[:, places[:, :-1]]
    cap = own["final_logit_softcapping"]
    unary = torch.tanh(logits * own["output_multiplier"] / cap) * cap  # [N,A,S-1,V]
    codes = {part: student.tensors[f"candidate_selector.{part}_codebook"] for part in ("predecessor", "successor")}
    given = codes["predecessor"][before] * student.project(hidden, "candidate_selector.hidden_projection")
    scores = unary + linear(given, codes["successor"])
    return cross_entropy(unary.flatten(0, 2), wanted) + cross_entropy(scores.flatten(0, 2), wanted)


def block_rows(student: Student, lesson: Lesson, places: Tensor) -> Tensor:
    """Final hidden states [N,A,S,H] of the blocks at `places` [A,S], each behind the text before its anchor."""
    (count, size), known = places.shape, torch.arange(lesson.ids.shape[1])
    context = student.norm(student.project(lesson.features, "fc"), "hidden_norm")[:, None]  # [N,1,n,H]
    block = lesson.ids[:, places].clone()  # [N,A,S]
    block[:, :, 1:] = student.config["dflash_config"]["mask_token_id"]
    x = lesson.embed[block]
    before = (known < places[:, :1])[:, None, None].expand(-1, 1, size, -1)  # [A,1,S,n]
    seen = torch.cat([before, torch.ones(count, 1, size, size, dtype=torch.bool)], dim=-1)
    turns = places[:, None]  # [A,1,S]
    for index in range(student.config["num_hidden_layers"]):
        name = f"layers.{index}"

        def attend(rows: Tensor, name: str = name) -> Tensor:
            k = _join(student.keys(context, name, known), student.keys(rows, name, turns))
            v = _join(student.values(context, name), student.values(rows, name))
            return student.attend(student.queries(rows, name, turns), k, v, seen, name)

        x = x + student.around(f"{name}.attention_conv", attend, student.norm(x, f"{name}.input_layernorm"))
        x = x + student.mlp(x, name)
    return student.norm(x, "norm")


def _join(context: Tensor, block: Tensor) -> Tensor:
    """The context [N,1,kv,n,D] before each block [N,A,kv,S,D]."""
    return torch.cat([context.expand(-1, block.shape[1], -1, -1, -1), block], dim=-2)


class ChainAttention:
    """The one layer of drafts that go on their own rows, for chains from all rows of a text at once.

    In step s row i reads the target's rows up to i - s and, in place of the others, what the chain put out.
    """

    def __init__(self, student: Student, layer: str) -> None:
        self._student, self._layer = student, layer
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        """The next step, from normed rows [N,n,*] to [N,n,H]."""
        student, layer, step, rows = self._student, self._layer, len(self._keys), torch.arange(x.shape[1])
        self._keys.append(student.keys(x, layer, rows))
        self._values.append(student.values(x, layer))
        apart = rows[:, None] - rows  # [n,n]
        seen = torch.cat([apart >= step, *(apart == step - made for made in range(1, step + 1))], dim=-1)
        k, v = torch.cat(self._keys, dim=-2), torch.cat(self._values, dim=-2)
        return student.attend(student.queries(x, layer, rows), k, v, seen, layer, student.gate(x, layer))


def eagle_loss(student: Student, lesson: Lesson, _dice: torch.Generator, depth: int = 2) -> Tensor:
    """Chains of `depth` drafted tokens from every row; row i of the first step predicts token i + 2."""
    tokens = torch.full((len(lesson.head),), -1)
    tokens[student.config["ids"]] = torch.arange(len(student.config["ids"]))
    embeds, wanted = lesson.embed[lesson.ids[:, 1:-1]], tokens[lesson.ids[:, 2:]]  # [N,n,H], [N,n]
    fused = student.project(lesson.features[:, :-2], "fc")
    attention, losses = ChainAttention(student, "midlayer"), []
    for step in range(depth):
        own = torch.cat(
            [student.norm(embeds, "midlayer.input_layernorm"), student.norm(fused, "midlayer.hidden_norm")], dim=-1
        )
        stream = fused + attention(own)
        stream = stream + student.mlp(stream, "midlayer")
        logits = student.project(student.norm(stream, "norm"), "lm_head")[:, step:]
        losses.append(cross_entropy(logits.flatten(0, 1), wanted[:, step:].flatten()))
        fused = stream.roll(1, dims=1)
    return torch.stack(losses).mean()


@contextmanager
def one_thread():
    """Torch with a single thread: tiny products are no faster with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
