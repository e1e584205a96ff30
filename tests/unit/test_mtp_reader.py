"""MTP heads are told from their target, and refused where their maths is not ours."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VARIANTS, write_gguf_checkpoint, write_hf_checkpoint
from draft_checkpoints_mtp import as_nextn, head_weights, write_mtp_checkpoint, write_mtp_gguf

from oxidize.export.bundle import export_bundle
from oxidize.export.config_gguf import config_from_gguf
from oxidize.export.drafts.mtp import GATED, split_mtp
from oxidize.export.gguf_file import read_gguf
from oxidize.export.plan import ExportPlan
from oxidize.export.source import Checkpoint, open_source
from oxidize.runtime.errors import CheckpointError, OxidizeError, UnsupportedModelError

HIDDEN = 64
PLAN = ExportPlan("fp32", ("std",))


def opened(folder: Path, variant: str, head: dict, keys: dict | None = None) -> Checkpoint:
    return open_source(str(write_mtp_checkpoint(folder / "source", variant, head, keys=keys)))


def opened_gguf(folder: Path, variant: str, head: dict, heads: int = 1) -> Checkpoint:
    return open_source(str(write_mtp_gguf(folder / "model.gguf", variant, head, heads=heads)))


def head_of(checkpoint: Checkpoint):
    _, draft = split_mtp(checkpoint)
    assert draft is not None
    return draft


@pytest.mark.parametrize("variant", ["qwen3", "smollm2"])
@pytest.mark.parametrize(("layout", "gated"), [("mtp", True), ("mtp", False), ("nextn", False)])
def test_what_the_head_says_of_itself(variant: str, layout: str, gated: bool, tmp_path: Path):
    draft = head_of(opened(tmp_path, variant, head_weights(variant, layout, gated=gated)))
    config, model = draft.config, draft.config.model
    assert (config.kind, config.taps, config.feature_size, config.block_size) == ("mtp", (), HIDDEN, 1)
    assert (config.draft_vocab_size, config.own_embedding, config.flags) == (None, False, {GATED: gated})
    assert (model.layers, model.layer_types, model.sliding_window) == (1, ("full_attention",), None)
    assert model.norm_offset == (1.0 if layout == "mtp" else 0.0)
    assert model.qk_norm == (gated or variant == "qwen3")
    assert "model.fc.weight" in draft.weights.names() and "lm_head.weight" not in draft.weights.names()


def test_both_formats_of_a_head_are_the_same_but_for_the_norms(tmp_path: Path):
    head = head_weights("qwen3", "mtp", seed=2)
    ours = head_of(opened(tmp_path, "qwen3", head))
    theirs = head_of(opened_gguf(tmp_path, "qwen3", as_nextn("qwen3", head)))
    assert sorted(ours.weights.names()) == sorted(theirs.weights.names())
    for name in ours.weights.names():
        shape = ours.weights.shape(name)
        shift = ours.config.model.norm_offset if len(shape) == 1 else 0
        np.testing.assert_array_equal(ours.weights.read(name, shape) + shift, theirs.weights.read(name, shape), name)
    assert ours.weights.unread() == theirs.weights.unread() == []


@pytest.mark.parametrize("write", [write_hf_checkpoint, lambda path, *rest: write_gguf_checkpoint(path / "m", *rest)])
def test_without_a_head_nothing_changes(write: Callable, tmp_path: Path):
    tmp_path.joinpath("c").mkdir()
    checkpoint = open_source(str(write(tmp_path / "c", "qwen3")))
    assert split_mtp(checkpoint) == (checkpoint, None)


def test_keys_of_a_head_that_was_left_out_do_no_harm(tmp_path: Path):
    keys = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_nextn_predict_layers": 1}
    checkpoint = opened(tmp_path, "qwen3", {}, keys)
    assert split_mtp(checkpoint) == (checkpoint, None)


@pytest.mark.parametrize("variant", ["qwen3", "smollm2"])
@pytest.mark.parametrize("layout", ["mtp", "nextn"])
def test_tables_that_repeat_the_targets_are_left_out(layout: str, variant: str, tmp_path: Path):
    draft = head_of(opened(tmp_path, variant, head_weights(variant, layout, tables="shared")))
    assert (draft.config.draft_vocab_size, draft.config.own_embedding) == (None, False)
    assert "model.embed_tokens.weight" not in draft.weights.names()


@pytest.mark.parametrize("layout", ["mtp", "nextn"])
def test_tables_that_differ_are_the_heads_own(layout: str, tmp_path: Path):
    draft = head_of(opened(tmp_path, "qwen3", head_weights("qwen3", layout, tables="own")))
    assert (draft.config.draft_vocab_size, draft.config.own_embedding) == (VARIANTS["qwen3"]["vocab_size"], True)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(draft.weights.names())


def test_a_gguf_block_without_a_norm_has_the_targets(tmp_path: Path):
    head = head_weights("qwen3", "nextn")
    del head["model.layers.2.shared_head.norm.weight"]
    checkpoint = opened_gguf(tmp_path, "qwen3", head)
    draft = head_of(checkpoint)
    norms = [weights.read("model.norm.weight", (HIDDEN,)) for weights in (draft.weights, checkpoint.weights)]
    np.testing.assert_array_equal(*norms)


@pytest.mark.parametrize("layout", ["mtp", "nextn"])
def test_only_the_split_target_can_be_exported(layout: str, tmp_path: Path):
    checkpoint = opened(tmp_path, "qwen3", head_weights("qwen3", layout))
    with pytest.raises(CheckpointError, match="tensors this architecture does not use"):
        export_bundle(checkpoint, PLAN, tmp_path / "whole")
    target, _ = split_mtp(checkpoint)
    export_bundle(target, PLAN, tmp_path / "bundle")
    assert target.weights.unread() == []


def refused(checkpoint: Checkpoint, kind: type[OxidizeError], *texts: str) -> None:
    with pytest.raises(kind) as caught:
        split_mtp(checkpoint)
    for text in texts:
        assert text in str(caught.value)
    assert str(checkpoint.files[0].parent) in str(caught.value)
    target, draft = split_mtp(checkpoint, wanted=False)
    assert draft is None
    assert not [name for name in target.weights.names() if "mtp" in name or "nextn" in name or ".layers.2." in name]


@pytest.mark.parametrize("layout", ["mtp", "nextn"])
def test_missing_unknown_and_misshapen_tensors(layout: str, tmp_path: Path):
    good = head_weights("qwen3", layout)
    for number, name in enumerate(good):
        checkpoint = opened(tmp_path / f"{number}", "qwen3", {key: good[key] for key in good if key != name})
        shape = "shape" if "q_proj" in name else str(list(good[name].shape))  # whose width tells of a gate
        refused(checkpoint, CheckpointError, name, shape)
    name = next(name for name in good if "o_proj" in name)
    wide = {**good, name: np.zeros((5, 6), np.float32)}
    refused(opened(tmp_path / "wide", "qwen3", wide), CheckpointError, name, "[5, 6]", str(list(good[name].shape)))
    odd = name.rpartition(".self_attn")[0] + ".extra.weight"
    more = {**good, odd: np.zeros(1, np.float32)}
    refused(opened(tmp_path / "more", "qwen3", more), UnsupportedModelError, odd)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("mlp.experts.0.gate_proj", "mixture of experts"),
        ("mlp.gate", "mixture of experts"),
        ("mlp.shared_expert_gate", "mixture of experts"),
        ("self_attn.kv_a_proj_with_mqa", "latent attention"),
        ("self_attn.q_a_proj", "latent attention"),
    ],
)
@pytest.mark.parametrize(("layout", "prefix"), [("mtp", "mtp.layers.0."), ("nextn", "model.layers.2.")])
def test_other_kinds_of_layers_are_refused_by_name(layout: str, prefix: str, part: str, reason: str, tmp_path: Path):
    head = head_weights("qwen3", layout, gated=False) | {f"{prefix}{part}.weight": np.zeros((2, 2), np.float32)}
    refused(opened(tmp_path, "qwen3", head), UnsupportedModelError, reason, f"{prefix}{part}.weight", "--no-mtp")


@pytest.mark.parametrize("variant", ["gemma3", "mistral_sliding", "qwen2_sliding"])
def test_targets_whose_heads_we_do_not_know(variant: str, tmp_path: Path):
    reason = "gemma3_text" if variant == "gemma3" else "sliding layers"
    head = head_weights(variant, "mtp", gated=False)
    with pytest.raises(UnsupportedModelError, match=reason):
        split_mtp(opened(tmp_path, variant, head))


def test_several_heads(tmp_path: Path):
    head = head_weights("qwen3", "nextn")
    second = {name.replace(".2.", ".3."): values for name, values in head.items()}
    refused(opened(tmp_path / "stated", "qwen3", head, {"num_nextn_predict_layers": 2}), UnsupportedModelError, "2 MTP")
    several = opened(tmp_path / "unstated", "qwen3", head | second, {})
    refused(several, UnsupportedModelError, "2 MTP heads")
    target, _ = split_mtp(several, wanted=False)
    assert not [name for name in target.weights.names() if ".3." in name]


@pytest.mark.parametrize(
    ("layout", "keys", "text"),
    [
        ("mtp", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0"),
        ("mtp", {"mtp_num_hidden_layers": "1"}, "mtp_num_hidden_layers is '1'"),
        ("nextn", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ("mtp", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
    ],
)
def test_keys_that_contradict_the_tensors(layout: str, keys: dict, text: str, tmp_path: Path):
    refused(opened(tmp_path, "qwen3", head_weights("qwen3", layout), keys), CheckpointError, text)


def test_keys_may_be_absent(tmp_path: Path):
    assert head_of(opened(tmp_path, "qwen3", head_weights("qwen3", "mtp"), {})).config.kind == "mtp"


def test_gguf_blocks_behind_the_models_own(tmp_path: Path):
    checkpoint = opened_gguf(tmp_path, "qwen3", head_weights("qwen3", "nextn"))
    assert checkpoint.config.layers == VARIANTS["qwen3"]["num_hidden_layers"]
    file = read_gguf(tmp_path / "model.gguf")
    shapes = {place.name: place.shape for place in file.tensors}
    with pytest.raises(CheckpointError, match="nextn_predict_layers = 3 leaves no layers of 3 blocks"):
        config_from_gguf({**file.metadata, "qwen3.nextn_predict_layers": 3}, shapes)


def test_a_gate_among_reordered_rows_is_refused(tmp_path: Path):
    head = as_nextn("llama2", head_weights("llama2", "mtp"))
    head = {name: values for name, values in head.items() if "q_norm" not in name and "k_norm" not in name}
    refused(opened_gguf(tmp_path, "llama2", head), CheckpointError, "q_proj.weight has shape [128, 64]", "[64, 64]")


def test_a_configuration_of_another_model_is_still_refused(tmp_path: Path):
    folder = write_hf_checkpoint(tmp_path / "odd", {**VARIANTS["qwen3"], "mtp_something": 1})
    assert json.loads((folder / "config.json").read_text())["mtp_something"] == 1
    with pytest.raises(UnsupportedModelError, match="mtp_something"):
        open_source(str(folder))
