"""An MTP head that was taught the texts of the target whose checkpoint it is in."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distil import ChainAttention, Lesson, Student
from draft_checkpoints_mtp import add_head, head_keys, head_weights
from safetensors.numpy import load_file
from school import Graduate, School, Tensors, open_engine
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from oxidize.runtime.engine import Engine

DEPTH = 3  # tokens of a chain
_CONFIG = "config.json"


@dataclass(frozen=True)
class HeadNames:
    """What a layout calls a head's parts: the norms of embedding and hidden state, the projection, layer, last norm."""

    embedding_norm: str
    hidden_norm: str
    join: str
    layer: str
    norm: str


def names_in(layout: str, layers: int) -> HeadNames:
    """Layout "mtp", or "nextn" behind so many layers."""
    if layout == "mtp":
        return HeadNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm")
    layer = f"model.layers.{layers}"
    return HeadNames(f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", layer, f"{layer}.shared_head.norm")


@dataclass(frozen=True)
class MtpGraduate(Graduate):
    """It is exported with its target, in one checkpoint."""

    names: HeadNames

    def engine(self, name: str, stage: int = -1, config: Mapping[str, Any] | None = None) -> Engine:
        folder = self.school.root / f"{self.kind}-{name}"
        self.write(folder, {**self.config, **(config or {})}, self.stages[stage])
        return open_engine(folder, own="mtp")


def teach_mtp(school: School, steps: Sequence[int], layout: str = "mtp") -> MtpGraduate:
    """In layout "mtp" with Qwen3-Next's attention and norms, in "nextn" with the target's."""
    raw = json.loads((school.target / _CONFIG).read_text())
    layers, offset = raw["num_hidden_layers"], int(layout == "mtp")
    names, start = names_in(layout, layers), head_weights(raw, layout)
    start[f"{names.norm}.weight"] = load_file(school.target / "model.safetensors")["model.norm.weight"] - offset

    def loss(student: Student, lesson: Lesson, _dice: torch.Generator) -> Tensor:
        return mtp_loss(student, lesson, names)

    def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
        shutil.copytree(school.target, folder)
        (folder / _CONFIG).write_text(json.dumps(config))
        add_head(folder, tensors)

    student = Student({**raw, "norm_offset": offset, "gated": layout == "mtp"}, start)
    stages = school.stages(student, [layers - 1], loss, steps)  # transformers norms the last layer's output
    return MtpGraduate(school, layout, DEPTH, {**raw, **head_keys(start)}, stages, write, names)


def mtp_loss(student: Student, lesson: Lesson, names: HeadNames) -> Tensor:
    """Chains of DEPTH drafted tokens from every row; row i of the first step predicts token i + 2."""
    embeds, wanted = lesson.embed[lesson.ids[:, 1:-1]], lesson.ids[:, 2:]  # [N,n,H], [N,n]
    hidden, attention, losses = lesson.features[:, :-2], ChainAttention(student, names.layer), []
    for step in range(DEPTH):
        pair = [student.norm(embeds, names.embedding_norm), student.norm(hidden, names.hidden_norm)]
        stream = student.project(torch.cat(pair, dim=-1), names.join)
        stream = stream + attention(student.norm(stream, f"{names.layer}.input_layernorm"))
        scored = student.norm(stream + student.mlp(stream, names.layer), names.norm)
        logits = linear(scored, lesson.head)[:, step:]
        losses.append(cross_entropy(logits.flatten(0, 1), wanted[:, step:].flatten()))
        hidden = scored.roll(1, dims=1)
    return torch.stack(losses).mean()
