"""Drafts taught by a tiny target: accepted the more the more they learnt, and no more once something is read askew.

The text is the plain one whatever the draft is worth.
"""

from dataclasses import replace

import numpy as np
import pytest
from mutations import unshift_embeddings
from school import DFLASH, EAGLE, MASK, Graduate, School, found_school, teach_dflash, teach_dflash2, teach_eagle

from oxidize.runtime.drafters.heads import OwnHead
from oxidize.runtime.drafters.passes import DraftPasses, PassShape
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.session import Tensor

STAGES = (0, 40, 130)  # steps of training
COLLAPSED = 0.45  # of the rate 1.0 that a draft has which knows the texts by heart


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> School:
    return found_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(scope="module")
def dflash(school: School) -> Graduate:
    return teach_dflash(school, STAGES)


@pytest.fixture(scope="module")
def dflash2(school: School) -> Graduate:
    return teach_dflash2(school, STAGES)


@pytest.fixture(scope="module")
def eagle(school: School) -> Graduate:
    return teach_eagle(school, STAGES)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "eagle"])
def test_what_is_learnt_is_accepted(request: pytest.FixtureRequest, name: str) -> None:
    graduate: Graduate = request.getfixturevalue(name)
    untaught, halfway, taught = (graduate.acceptance(f"stage{stage}", stage) for stage in range(len(STAGES)))
    assert untaught < 0.05  # the texts are made of two dozen tokens
    assert halfway > untaught + 0.1
    assert taught > halfway + 0.2
    assert taught > 0.95


@pytest.mark.parametrize("by", [1, -1])
def test_dflash_taps_one_layer_off(dflash: Graduate, by: int) -> None:
    own = DFLASH["dflash_config"]
    taps = [tap + by for tap in own["target_layer_ids"]]
    assert dflash.acceptance(f"taps{by}", config={"dflash_config": {**own, "target_layer_ids": taps}}) < COLLAPSED


def test_dflash_another_mask(dflash: Graduate) -> None:
    own = {**DFLASH["dflash_config"], "mask_token_id": MASK + 1}
    assert dflash.acceptance("mask", config={"dflash_config": own}) < COLLAPSED


@pytest.mark.parametrize(("name", "by"), [("position_ids", 1), ("position_ids", -1), ("context_positions", 1)])
def test_dflash_positions_one_off(dflash: Graduate, monkeypatch: pytest.MonkeyPatch, name: str, by: int) -> None:
    """Of the block against those of its context: rotary positions are relative, a shift of both changes nothing."""
    place = DraftPasses._place

    def shifted(self: DraftPasses, inputs: dict[str, Tensor], shape: PassShape) -> None:
        place(self, inputs, shape)
        inputs[name].write(inputs[name].read() + by)

    monkeypatch.setattr(DraftPasses, "_place", shifted)
    assert dflash.acceptance(f"{name}{by}") < COLLAPSED


def reversed_in(graduate: Graduate, ending: str, axis: int) -> Graduate:
    """Tensors whose names end so, with one axis the other way round."""
    tensors = graduate.stages[-1]
    changed = {name: np.flip(tensors[name], axis).copy() for name in tensors if name.endswith(ending)}
    assert changed
    return replace(graduate, stages=[{**tensors, **changed}])


@pytest.mark.parametrize(("what", "axis"), [("sides", 0), ("taps", 1), ("channels", 2)])
def test_dflash2_base_kernels_the_other_way_round(dflash2: Graduate, what: str, axis: int) -> None:
    assert reversed_in(dflash2, "base_kernel", axis).acceptance(f"base-{what}") < COLLAPSED


def test_dflash2_rows_of_the_kernel_projection_the_other_way_round(dflash2: Graduate) -> None:
    assert reversed_in(dflash2, "kernel_projection.weight", 0).acceptance("projection") < COLLAPSED


def test_dflash2_codebooks_exchanged(dflash2: Graduate) -> None:
    tensors = dict(dflash2.stages[-1])
    one, other = (f"candidate_selector.{part}_codebook" for part in ("predecessor", "successor"))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    assert replace(dflash2, stages=[tensors]).acceptance("codebooks") < 0.65  # the rows alone are right so often


@pytest.mark.parametrize("by", [1, -1])
def test_eagle_taps_one_layer_off(eagle: Graduate, by: int) -> None:
    own = EAGLE["eagle_config"]
    taps = [tap + by for tap in own["eagle_aux_hidden_state_layer_ids"]]
    config = {"eagle_config": {**own, "eagle_aux_hidden_state_layer_ids": taps}}
    assert eagle.acceptance(f"taps{by}", config=config) < COLLAPSED


def test_eagle_embeddings_not_shifted(eagle: Graduate) -> None:
    assert eagle.acceptance("embeddings", damage=unshift_embeddings) < COLLAPSED


def test_eagle_target_ids_one_off(eagle: Graduate) -> None:
    """The ids of the draft's vocabulary turned by one row."""

    def turn(drafter: RowReader) -> None:
        head = drafter._parts.head
        assert isinstance(head, OwnHead)
        head._ids = head._ids[[*range(1, len(head._ids)), 0]]

    assert eagle.acceptance("ids", damage=turn) < 0.1
