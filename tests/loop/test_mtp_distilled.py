"""MTP heads taught by a tiny target: accepted the more they learnt, and no more once they are read askew.

The target's final norm is uneven, so that its rows before and behind it are not alike.
"""

from dataclasses import replace

import numpy as np
import pytest
from mutations import read_before_the_norm, read_the_row_before, unshift_embeddings
from safetensors.numpy import load_file
from school import School, found_school
from school_mtp import MtpGraduate, teach_mtp

STAGES = (0, 30, 130)  # steps of training
COLLAPSED = 0.5  # of the rate 1.0 that a head has which knows the texts by heart; three tokens are drafted


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> School:
    return found_school(tmp_path_factory.mktemp("school"), uneven_norm=True)


@pytest.fixture(scope="module")
def mtp(school: School) -> MtpGraduate:
    return teach_mtp(school, STAGES, "mtp")


@pytest.fixture(scope="module")
def nextn(school: School) -> MtpGraduate:
    return teach_mtp(school, STAGES, "nextn")


@pytest.fixture(scope="module", params=["mtp", "nextn"])
def graduate(request: pytest.FixtureRequest) -> MtpGraduate:
    return request.getfixturevalue(request.param)


def test_what_is_learnt_is_accepted(graduate: MtpGraduate) -> None:
    untaught, halfway, taught = (graduate.acceptance(f"stage{stage}", stage) for stage in range(len(STAGES)))
    assert untaught < 0.05  # the texts are made of two dozen tokens
    assert halfway > untaught + 0.1
    assert taught > halfway + 0.2
    assert taught > 0.95


def test_the_row_before_the_right_one(graduate: MtpGraduate) -> None:
    assert graduate.acceptance("late-row", damage=read_the_row_before) < COLLAPSED


def test_rows_before_the_final_norm(graduate: MtpGraduate) -> None:
    weight = load_file(graduate.school.target / "model.safetensors")["model.norm.weight"]
    assert graduate.acceptance("before-norm", damage=lambda drafter: read_before_the_norm(drafter, weight)) < COLLAPSED


def test_embeddings_not_shifted(graduate: MtpGraduate) -> None:
    assert graduate.acceptance("embeddings", damage=unshift_embeddings) < COLLAPSED


def test_embedding_and_hidden_state_exchanged(graduate: MtpGraduate) -> None:
    """In the matrix that joins them."""
    tensors, name = graduate.stages[-1], f"{graduate.names.join}.weight"
    exchanged = np.roll(tensors[name], tensors[name].shape[0], axis=1)
    assert replace(graduate, stages=[{**tensors, name: exchanged}]).acceptance("exchanged") < COLLAPSED
