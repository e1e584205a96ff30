"""DSpark drafts taught by a tiny target: accepted the more they learnt, and no more once they are read askew."""

from dataclasses import replace

import numpy as np
import pytest
from school import Graduate, School, found_school
from school_dspark import teach_dspark

from oxidize.runtime.drafters.dflash import DFlash
from oxidize.runtime.drafters.markov import MarkovReader
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.session import Tensor

STAGES = (0, 60, 150)  # steps of training
COLLAPSED = 0.55  # of a rate near 1.0; the rows of a block know much of the texts by themselves


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> School:
    return found_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(scope="module")
def vanilla(school: School) -> Graduate:
    return teach_dspark(school, STAGES, "vanilla")


@pytest.fixture(scope="module")
def gated(school: School) -> Graduate:
    return teach_dspark(school, STAGES, "gated")


@pytest.fixture(scope="module", params=["vanilla", "gated"])
def dspark(request: pytest.FixtureRequest) -> Graduate:
    return request.getfixturevalue(request.param)


def test_what_is_learnt_is_accepted(dspark: Graduate) -> None:
    untaught, halfway, taught = (dspark.acceptance(f"stage{stage}", stage) for stage in range(len(STAGES)))
    assert untaught < 0.05  # the texts are made of two dozen tokens
    assert halfway > untaught + 0.1
    assert taught > halfway + 0.2
    assert taught > 0.9


def correct_by_the_token_before_the_previous(drafter: RowReader) -> None:
    assert isinstance(drafter, DFlash) and isinstance(drafter._reader, MarkovReader)
    reader, first = drafter._reader, drafter.plan.first
    look, text = reader._look, []

    def look_back(hidden: Tensor, row: int, before: int) -> float:
        text[:] = [*(drafter._tokens[:-1] if row == first else text), before]
        return look(hidden, row, text[-2])

    reader._look = look_back


def test_corrected_by_the_token_before_the_previous(dspark: Graduate) -> None:
    assert dspark.acceptance("late", damage=correct_by_the_token_before_the_previous) < COLLAPSED


def test_tables_of_the_markov_head_exchanged(dspark: Graduate) -> None:
    tensors = dict(dspark.stages[-1])
    one, other = (f"markov_head.markov_w{part}.weight" for part in (1, 2))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    assert replace(dspark, stages=[tensors]).acceptance("tables") < COLLAPSED


def test_row_and_code_exchanged_before_the_gate(gated: Graduate) -> None:
    name = "markov_head.gate_proj.weight"
    weight = gated.stages[-1][name]
    tensors = {**gated.stages[-1], name: np.roll(weight, weight.shape[0], axis=1)}
    assert replace(gated, stages=[tensors]).acceptance("gate") < COLLAPSED


def test_row_0_taken_for_one_that_does_not_predict(dspark: Graduate) -> None:
    """Every row takes the place of the one before it."""
    config = {"dflash_config": {**dspark.config["dflash_config"], "sample_from_anchor": False}}
    assert dspark.acceptance("anchor", config=config) < COLLAPSED
