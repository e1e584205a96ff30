"""DSpark checkpoints are read strictly: three layouts and GGUF, defaults that differ, head types refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from draft_checkpoints_dflash import HIDDEN, VARIANTS, VOCAB, target_config, vocabulary_map, write_dflash
from draft_checkpoints_dspark import (
    BLOCK,
    RANK,
    deepspec,
    heads_of,
    proposal,
    specforge,
    write_dspark,
    write_dspark_gguf,
    write_dspark_speculators,
)

from oxidize.export.drafts.base import MarkovHead
from oxidize.export.drafts.dflash_gguf import read_dflash_gguf
from oxidize.export.drafts.dflash_hf import read_dflash
from oxidize.export.drafts.dspark import (
    read_dspark,
    read_dspark_speculators,
    recognises_dspark,
    recognises_dspark_speculators,
)
from oxidize.export.drafts.dspark_gguf import read_dspark_gguf, recognises_dspark_gguf
from oxidize.export.drafts.recognise import DraftWishes, open_draft
from oxidize.export.gguf_file import read_gguf
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

BF16 = ml_dtypes.bfloat16
CODES = "markov_head.markov_w1.weight"


def config_of(tmp_path: Path, config: Mapping[str, Any]):
    return read_dspark(write_dspark(tmp_path / "draft", config), target_config()).config


@pytest.mark.parametrize("layout", [specforge, deepspec])
def test_what_configs_say(layout, tmp_path):
    config = config_of(tmp_path, layout())
    assert (config.kind, config.taps, config.block_size, config.mask_token_id) == ("dflash", (1, 3, 6), BLOCK, 310)
    assert config.sample_from_anchor and "z-lab" in config.tap_convention
    assert (config.draft_vocab_size, config.own_embedding, config.paths) == (None, False, None)
    assert config.markov == MarkovHead(RANK, confident=True)
    assert config.shape("float32").confident


@pytest.mark.parametrize("layout", [specforge, deepspec])
@pytest.mark.parametrize(
    ("own", "markov"),
    [
        ({"markov_head_type": "gated"}, MarkovHead(RANK, gated=True, confident=True)),
        ({"markov_rank": 12}, MarkovHead(12, confident=True)),
        ({"confidence_head_with_markov": False}, MarkovHead(RANK, confident=True, confidence_reads_code=False)),
        ({"enable_confidence_head": False}, MarkovHead(RANK)),
    ],
)
def test_kinds_of_heads(layout, own, markov, tmp_path):
    config = config_of(tmp_path, layout(**own))
    assert config.markov == markov
    assert config.shape("float32").confident == markov.confident


def test_the_anchors_row_predicts_unless_that_is_denied(tmp_path):
    assert config_of(tmp_path / "1", specforge(sample_from_anchor=True)).sample_from_anchor
    assert not config_of(tmp_path / "2", specforge(sample_from_anchor=False)).sample_from_anchor
    assert not config_of(tmp_path / "3", deepspec(sample_from_anchor=False)).sample_from_anchor
    assert config_of(tmp_path / "4", deepspec(sample_from_anchor=None)).sample_from_anchor


def test_copies_of_the_targets_tables_are_the_drafts_own(tmp_path):
    """DeepSpec saves the frozen embedding and head beside the rest."""
    tables = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    tensors = {name: np.zeros(shape, BF16) for name, shape in tables.items()}
    draft = read_dspark(write_dspark(tmp_path / "draft", deepspec(), tensors=tensors), target_config())
    assert (draft.config.own_embedding, draft.config.draft_vocab_size, draft.d2t) == (True, VOCAB, None)


def test_codes_are_of_the_targets_tokens_corrections_of_the_drafts(tmp_path):
    draft = read_dspark(write_dspark(tmp_path / "draft", own_vocab=120), target_config())
    assert draft.d2t is not None and len(draft.d2t) == 120
    assert draft.weights.shape(CODES) == (VOCAB, RANK)
    assert draft.weights.shape("markov_head.markov_w2.weight") == (120, RANK)


def test_speculators(tmp_path):
    config = read_dspark_speculators(write_dspark_speculators(tmp_path / "draft"), target_config()).config
    assert config.taps == (0, 3, 6) and "speculators" in config.tap_convention
    assert config.markov == MarkovHead(RANK, confident=True) and config.sample_from_anchor
    assert (config.block_size, config.draft_vocab_size, config.own_embedding) == (BLOCK, 120, True)


@pytest.mark.parametrize(
    ("changes", "predicts"),
    [
        ({"sample_from_anchor": False}, False),
        ({"sample_from_anchor": "absent"}, True),
        ({"sample_from_anchor": "absent", "speculators_config": proposal(BLOCK - 1)}, False),
        ({"sample_from_anchor": "absent", "speculators_config": {"algorithm": "dspark"}}, True),
        ({"sample_from_anchor": True, "speculators_config": proposal(BLOCK - 1)}, True),
    ],
)
def test_speculators_that_do_not_say_whether_row_0_predicts(changes, predicts, tmp_path):
    """Before the library knew the key, row 0 was not trained; the recommended number of tokens tells."""
    source = write_dspark_speculators(tmp_path / "draft", own_vocab=None, changes=changes)
    assert read_dspark_speculators(source, target_config()).config.sample_from_anchor == predicts


def test_the_speculators_library_has_confidence_heads_by_default(tmp_path):
    changes = dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov", "markov_head_type"), "absent")
    config = read_dspark_speculators(write_dspark_speculators(tmp_path / "draft"), target_config()).config
    source = write_dspark_speculators(tmp_path / "draft", changes=changes)
    raw = json.loads((source / "config.json").read_text())
    assert "enable_confidence_head" not in raw
    assert read_dspark_speculators(source, target_config()).config == config


def test_gguf_is_the_checkpoint_it_was_converted_from(tmp_path):
    theirs = read_dspark(write_dspark(tmp_path / "draft"), target_config())
    ours = read_dspark_gguf(write_dspark_gguf(tmp_path / "draft.gguf"), target_config())
    assert "llama.cpp" in ours.config.tap_convention
    assert (ours.config.markov, ours.config.taps) == (theirs.config.markov, theirs.config.taps)
    assert ours.config.sample_from_anchor and ours.config.model == theirs.config.model
    assert sorted(ours.weights.names()) == sorted(theirs.weights.names())
    for name in theirs.weights.names():
        shape = theirs.weights.shape(name)
        np.testing.assert_array_equal(ours.weights.read(name, shape), theirs.weights.read(name, shape), name)


def test_what_gguf_may_leave_out(tmp_path):
    """The converter's later steps leave out outer dimensions of 1, and files without the keys exist."""
    row = heads_of(specforge())["confidence_head.proj.weight"]
    flat = write_dspark_gguf(tmp_path / "flat.gguf", tensors={"conf_proj.weight": row[0], "conf_proj.bias": None})
    draft = read_dspark_gguf(flat, target_config())
    assert draft.config.markov == MarkovHead(RANK, confident=True, confidence_bias=False)
    np.testing.assert_array_equal(draft.weights.read("confidence_head.proj.weight", row.shape), row)
    without = {"conf_proj.weight": None, "conf_proj.bias": None}
    changes = {"dflash.sample_from_anchor": None, "dflash.has_confidence_head": False}
    bare = read_dspark_gguf(
        write_dspark_gguf(tmp_path / "bare.gguf", changes=changes, tensors=without), target_config()
    )
    assert bare.config.markov == MarkovHead(RANK, confidence_bias=False) and bare.config.sample_from_anchor
    denied = write_dspark_gguf(tmp_path / "denied.gguf", changes={"dflash.sample_from_anchor": False})
    assert not read_dspark_gguf(denied, target_config()).config.sample_from_anchor


@pytest.mark.parametrize(
    ("changes", "tensors", "kind", "match"),
    [
        (
            {"dflash.has_confidence_head": False},
            {},
            CheckpointError,
            r"has_confidence_head = False.*a tensor conf_proj",
        ),
        ({}, {"markov_w1.weight": None}, CheckpointError, "no tensor markov_w1.weight"),
        ({}, {"markov_w2.weight": None}, CheckpointError, r"no tensor markov_head.markov_w2.weight.*\[320, 32\]"),
        ({}, {"markov_w2.scale": np.ones(1, np.float32)}, UnsupportedModelError, "markov_w2.scale"),
        ({}, {"markov_gate.weight": np.ones((4, 4), np.float32)}, UnsupportedModelError, "markov_gate.weight"),
        ({}, {"conf_proj.weight": np.ones((1, 64), np.float32)}, CheckpointError, r"\[1, 64\], expected \[1, 96\]"),
        ({"dflash.markov_rank": 32}, {}, UnsupportedModelError, "markov_rank"),
    ],
)
def test_gguf_refused(changes, tensors, kind, match, tmp_path):
    path = write_dspark_gguf(tmp_path / "draft.gguf", changes=changes, tensors=tensors)
    with pytest.raises(kind, match=match):
        read_dspark_gguf(path, target_config())


@pytest.mark.parametrize(
    ("config", "kind", "match"),
    [
        (specforge(markov_head_type="rnn"), UnsupportedModelError, "markov_head_type = 'rnn'.*vanilla, gated"),
        (deepspec(markov_head_type="fir"), UnsupportedModelError, "markov_head_type = 'fir'"),
        (specforge(projector_type="domino"), UnsupportedModelError, "projector_type = 'domino'"),
        (specforge(dspark_backbone_conv_enabled=True), UnsupportedModelError, "dspark_backbone_conv_enabled"),
        (specforge(attention_mode="mla"), UnsupportedModelError, "attention_mode"),
        (specforge(shift_label=True), UnsupportedModelError, "shift_label"),
        (deepspec(dspark_draft_topk=8), UnsupportedModelError, "dspark_draft_topk"),
        (deepspec(log_snr_conditioning=True), UnsupportedModelError, "log_snr_conditioning"),
        (deepspec(target_layer_ids=[-1, 3, 6]), CheckpointError, "layers from 0"),
        ({**specforge(), "markov_rank": 12}, CheckpointError, "markov_rank = 12 but dflash_config says 32"),
        ({**specforge(), "enable_confidence_head": False}, CheckpointError, "enable_confidence_head = False"),
        ({**specforge(sample_from_anchor=True), "sample_from_anchor": False}, CheckpointError, "sample_from_anchor"),
    ],
)
def test_other_maths_and_contradictions_are_refused(config, kind, match, tmp_path):
    source = write_dspark(tmp_path / "draft")
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=match) as caught:
        read_dspark(source, target_config())
    assert str(source / "config.json") in str(caught.value)


def test_a_draft_without_a_markov_head_is_no_dspark_draft(tmp_path):
    source = write_dspark(tmp_path / "draft")
    for config in (specforge(markov_rank=0), specforge(markov_rank=None)):
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="markov_rank must be a positive integer"):
            read_dspark(source, target_config())


def test_strict_tensors(tmp_path):
    for name, values in heads_of(specforge(markov_head_type="gated")).items():
        config = specforge(markov_head_type="gated")
        missing = write_dspark(tmp_path / "missing", config, tensors={name: None})
        with pytest.raises(CheckpointError, match=f"missing has no tensor {name}, expected shape"):
            read_dspark(missing, target_config())
        wrong = write_dspark(tmp_path / "wrong", config, tensors={name: np.zeros((*values.shape[:-1], 5), BF16)})
        with pytest.raises(CheckpointError, match=rf"model.safetensors: tensor {name} has shape .*5\], expected"):
            read_dspark(wrong, target_config())


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ({"enable_confidence_head": False}, "confidence_head.proj.weight"),
        ({"markov_head_type": "vanilla"}, "markov_head.gate_proj.weight"),
        ({}, "markov_head.joint_proj.weight"),
        ({}, "markov_w1.weight"),
    ],
)
def test_tensors_that_the_config_does_not_ask_for(own, name, tmp_path):
    source = write_dspark(tmp_path / "draft", specforge(**own), tensors={name: np.zeros((2, 2), BF16)})
    with pytest.raises(UnsupportedModelError, match=f"model.safetensors: tensor {name} "):
        read_dspark(source, target_config())


def test_other_descendants_are_refused(tmp_path):
    for name, meaning in (("layers.0.attention_conv.base_kernel", "DFlash2"), ("prefix_gru.weight_ih_l0", "Domino")):
        source = write_dspark(tmp_path / "draft", tensors={name: np.zeros((2, 2), BF16)})
        with pytest.raises(UnsupportedModelError, match=f"{name} belongs to {meaning}"):
            read_dspark(source, target_config())


def test_dspark_is_never_read_as_dflash(tmp_path):
    disguised = {**specforge(), "architectures": ["DFlashDraftModel"]}
    with pytest.raises(UnsupportedModelError, match=r"markov|DSpark|dspark"):
        read_dflash(write_dspark(tmp_path / "draft", disguised), target_config())
    with pytest.raises(UnsupportedModelError, match="belongs to DSpark"):
        read_dflash_gguf(write_dspark_gguf(tmp_path / "draft.gguf"), target_config())


def test_recognition(tmp_path):
    vllm = json.loads((write_dspark_speculators(tmp_path / "vllm") / "config.json").read_text())
    raws = (specforge(), deepspec(), vllm, VARIANTS["qwen3"], {"architectures": ["Gemma4DSparkModel"]})
    assert [recognises_dspark(raw) for raw in raws] == [True, True, False, False, True]
    assert [recognises_dspark_speculators(raw) for raw in raws] == [False, False, True, False, False]
    assert recognises_dspark_gguf(read_gguf(write_dspark_gguf(tmp_path / "draft.gguf")))


def test_every_layout_is_opened_by_its_content(tmp_path):
    sources = (
        write_dspark(tmp_path / "specforge"),
        write_dspark(tmp_path / "deepspec", deepspec()),
        write_dspark_speculators(tmp_path / "speculators"),
        write_dspark_gguf(tmp_path / "draft.gguf"),
    )
    for source in sources:
        draft = open_draft(str(source), target_config(), DraftWishes())
        assert draft.config.markov == MarkovHead(RANK, confident=True), source
    plain = open_draft(str(write_dflash(tmp_path / "plain")), target_config(), DraftWishes())
    assert plain.config.markov is None
    other = write_dspark(tmp_path / "gemma", {**deepspec(), "architectures": ["Gemma4DSparkModel"]})
    with pytest.raises(UnsupportedModelError, match="Gemma4DSparkModel"):
        open_draft(str(other), target_config(), DraftWishes())


def test_d2t_names_target_ids(tmp_path):
    draft = read_dspark(write_dspark(tmp_path / "draft", own_vocab=120), target_config())
    np.testing.assert_array_equal(draft.d2t, np.flatnonzero(vocabulary_map(120, 0)["t2d"]))
