"""A DSpark draft that was taught a target's texts: each row of a block predicts, corrected by the token before it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from distil import Lesson, Student, block_rows
from draft_checkpoints_dflash import weights_of
from draft_checkpoints_dspark import heads_of, specforge, write_dspark
from school import BLOCK, DFLASH, Graduate, School, Tensors
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

_OWN = ("architectures", "auto_map", "dflash_config")


def dspark_config(kind: str) -> dict[str, Any]:
    """config.json, the Markov head being "vanilla" or "gated"; without a confidence head blocks are always whole."""
    stated = specforge(**DFLASH["dflash_config"], enable_confidence_head=False, markov_head_type=kind)
    return {**DFLASH, **{key: stated[key] for key in _OWN}}


def teach_dspark(school: School, steps: Sequence[int], kind: str = "vanilla") -> Graduate:
    """One that uses the target's ends."""

    def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
        write_dspark(folder, config, tensors=tensors)

    config = dspark_config(kind)
    start = {**weights_of(config, 0), **heads_of(config)}
    start["markov_head.markov_w2.weight"] *= 2  # from the start so heavy that rows must reckon with it
    taps = config["dflash_config"]["target_layer_ids"]
    stages = school.stages(Student(config, start), taps, dspark_loss, steps)
    return Graduate(school, f"dspark-{kind}", BLOCK, config, stages, write)


def dspark_loss(student: Student, lesson: Lesson, dice: torch.Generator) -> Tensor:
    """Blocks behind random anchors: row r, behind the token of place r, is to say the one of place r + 1."""
    size = student.config["block_size"]
    anchors = torch.randperm(lesson.ids.shape[1] - size - 1, generator=dice)[:16] + 1  # [A]
    places = anchors[:, None] + torch.arange(size)  # [A,S]
    hidden = block_rows(student, lesson, places)  # [N,A,S,H]
    logits = linear(hidden, lesson.head) + _corrections(student, hidden, lesson.ids[:, places])
    return cross_entropy(logits.flatten(0, 2), lesson.ids[:, places + 1].flatten())


def _corrections(student: Student, hidden: Tensor, before: Tensor) -> Tensor:
    """[N,A,S,V] behind the tokens [N,A,S]."""
    codes = student.tensors["markov_head.markov_w1.weight"][before]  # [N,A,S,R]
    if "markov_head.gate_proj.weight" in student.tensors:
        gate = student.project(torch.cat([hidden, codes], dim=-1), "markov_head.gate_proj")
        codes = (gate + student.tensors["markov_head.gate_proj.bias"]).sigmoid() * codes
    return student.project(codes, "markov_head.markov_w2")
