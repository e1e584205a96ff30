"""Medusa heads taught by a tiny target: accepted the more they learnt, and no more once they are read askew."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from distil import Lesson, Student
from draft_checkpoints_medusa import MedusaVariant, medusa_tensors, write_medusa
from mutations import read_the_row_before
from school import LENGTH, School, fixed, found_school, open_engine
from torch.nn.functional import cross_entropy, linear, silu

from oxidize.runtime.drafters.medusa import Medusa

HEADS = 3
VARIANT = MedusaVariant("reference", heads=HEADS)
STAGES = (0, 30, 160)  # steps of training
LAST = 8  # the target's last layer; transformers gives its output behind the final norm
COLLAPSED = 0.45  # of the rate 1.0 that heads have which know the texts by heart
Tensors = Mapping[str, np.ndarray]


def medusa_loss(student: Student, lesson: Lesson, _dice: torch.Generator) -> torch.Tensor:
    """As the reference trains them: head h at row t is to say token t + 2 + h."""
    losses = []
    for head in range(HEADS):
        weight, bias = (student.tensors[f"{head}.0.linear.{part}"] for part in ("weight", "bias"))
        x = lesson.features + silu(linear(lesson.features, weight, bias))
        logits = student.project(x, f"{head}.1")[:, : -2 - head]
        losses.append(cross_entropy(logits.flatten(0, 1), lesson.ids[:, 2 + head :].flatten()))
    return torch.stack(losses).sum()


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> School:
    return found_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(scope="module")
def stages(school: School) -> list[Tensors]:
    return school.stages(Student({}, medusa_tensors(VARIANT)), [LAST], medusa_loss, STAGES)


def acceptance(school: School, name: str, tensors: Tensors, damage: Callable[[Medusa], None] | None = None) -> float:
    """Accepted per proposed over all prompts, none of whose texts may change. damage: done to the drafter."""
    folder = write_medusa(school.root / name, VARIANT, tensors=dict(tensors))
    decoder = open_engine(school.target, folder).decoder
    decoder.config = fixed(HEADS)
    (drafter,) = decoder.drafters
    assert isinstance(drafter, Medusa)
    if damage is not None:
        damage(drafter)
    drafted = accepted = 0
    for prompt, plain in zip(school.prompts, school.plain, strict=True):
        assert decoder.generate(prompt) == plain
        drafted += decoder.stats.draft_tokens
        accepted += decoder.stats.accepted_draft_tokens
    assert drafted > LENGTH
    print(f"{name}: {accepted} of {drafted} accepted")
    return accepted / drafted


def test_what_is_learnt_is_accepted(school: School, stages: list[Tensors]) -> None:
    untaught, halfway, taught = (acceptance(school, f"stage{stage}", tensors) for stage, tensors in enumerate(stages))
    print(f"acceptance {untaught:.2f}, {halfway:.2f}, {taught:.2f}")
    assert untaught < 0.05  # the texts are made of two dozen tokens
    assert halfway > untaught + 0.1
    assert taught > halfway + 0.2
    assert taught > 0.95


@pytest.mark.parametrize("by", [1, 2])
def test_heads_out_of_place(school: School, stages: list[Tensors], by: int) -> None:
    """Each head's tensors under the number of another."""
    moved = {}
    for name, values in stages[-1].items():
        head, rest = name.split(".", 1)
        moved[f"{(int(head) + by) % HEADS}.{rest}"] = values
    assert acceptance(school, f"moved{by}", moved) < COLLAPSED


def test_head_0_taken_for_the_anchor(school: School, stages: list[Tensors]) -> None:
    """As if it repeated the target's own head: everything comes one token late."""
    late = {name: values for name, values in stages[-1].items() if not name.startswith("0.")}
    late = {f"{int(name[0]) - 1}{name[1:]}": values for name, values in late.items()}
    last = {name: values for name, values in stages[-1].items() if name.startswith(f"{HEADS - 1}.")}
    assert acceptance(school, "late", {**late, **last}) < COLLAPSED


def test_the_row_before_the_right_one(school: School, stages: list[Tensors]) -> None:
    assert acceptance(school, "late-row", stages[-1], read_the_row_before) < COLLAPSED
