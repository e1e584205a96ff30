"""DFlash checkpoints are read strictly: conventions converted once, variants refused by name, misfits with numbers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from draft_checkpoints_dflash import (
    DFLASH2,
    HIDDEN,
    TARGET_LAYERS,
    VARIANTS,
    VOCAB,
    target_config,
    vocabulary_map,
    weights_of,
    write_dflash,
    write_dflash_gguf,
    write_speculators,
)

from oxidize.export.drafts.base import DraftCheckpoint, PathSelection
from oxidize.export.drafts.dflash2 import SIZES, read_dflash2, recognises_dflash2
from oxidize.export.drafts.dflash_common import default_taps
from oxidize.export.drafts.dflash_gguf import read_dflash_gguf, recognises_dflash_gguf
from oxidize.export.drafts.dflash_hf import read_dflash, recognises_dflash
from oxidize.export.drafts.dflash_speculators import read_dflash_speculators, recognises_dflash_speculators
from oxidize.export.drafts.recognise import DraftWishes, open_draft
from oxidize.export.gguf_file import read_gguf
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError, UsageError

MIXED = ("sliding_attention", "full_attention", "sliding_attention")
SLIDING = ("sliding_attention",) * 3
BF16 = ml_dtypes.bfloat16


def changed(base: Mapping[str, Any] = VARIANTS["qwen3"], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value != "absent"}


def own(**changes: Any) -> dict[str, Any]:
    """qwen3 with other keys in dflash_config."""
    return changed(dflash_config={**VARIANTS["qwen3"]["dflash_config"], **changes})


def config_of(tmp_path: Path, config: Mapping[str, Any] | str, **target: Any):
    return read_dflash(write_dflash(tmp_path / "draft", config), target_config(**target)).config


def refused(tmp_path: Path, config: Mapping[str, Any], kind: type[Exception], match: str, **target: Any) -> None:
    with pytest.raises(kind, match=match) as caught:
        config_of(tmp_path, config, **target)
    assert str(tmp_path / "draft") in str(caught.value)  # there may be several drafts, and a target


@pytest.mark.parametrize(
    ("variant", "types", "window", "causal"),
    [
        ("qwen3", ("full_attention",) * 3, None, (False,) * 3),
        ("qwen35", MIXED, 24, (True, False, True)),
        ("use_swa", SLIDING, 24, (False,) * 3),
        ("is_causal", MIXED, 24, (True,) * 3),
        ("all_sliding_not_causal", SLIDING, 24, (False,) * 3),
    ],
)
def test_windows_and_causality(variant, types, window, causal, tmp_path):
    config = config_of(tmp_path, variant)
    assert (config.model.layer_types, config.model.sliding_window, config.layer_causal) == (types, window, causal)


def test_what_zlab_configs_say(tmp_path):
    draft = read_dflash(write_dflash(tmp_path / "draft", "qwen3"), target_config())
    config = draft.config
    assert (config.kind, config.taps, config.block_size, config.mask_token_id) == ("dflash", (1, 3, 6), 8, 310)
    assert (config.feature_size, config.target_hidden_size, config.model.head_dim) == (3 * HIDDEN, HIDDEN, 32)
    assert (config.draft_vocab_size, config.own_embedding, config.sample_from_anchor) == (None, False, False)
    assert "z-lab" in config.tap_convention
    assert (draft.name, draft.d2t) == ("draft", None)
    assert [path.name for path in draft.files] == ["config.json", "model.safetensors"]
    assert config_of(tmp_path, "qwen35").block_size == 8  # which stands in dflash_config there
    assert config_of(tmp_path, "qwen35").model.rope.theta == 1e7


def test_sections_for_images_change_nothing_for_text(tmp_path):
    rope = {"type": "mrope", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    assert config_of(tmp_path, changed(rope_scaling=rope)).model == config_of(tmp_path, "qwen3").model


def test_use_swa_leaves_stated_sliding_layers_alone(tmp_path):
    config = changed(layer_types=list(MIXED), sliding_window=16, dflash_config={"mask_token_id": 3, "use_swa": True})
    assert config_of(tmp_path, config).model.layer_types == MIXED


@pytest.mark.parametrize(
    ("keys", "own_keys", "match"),
    [
        ({"use_sliding_window": False}, {}, "layers slide, but use_sliding_window = False with sliding_window = 24"),
        ({"use_sliding_window": False}, {"swa_window_size": 24}, "use_sliding_window = False with sliding_window"),
        ({"use_sliding_window": True}, {"use_swa": False}, "layers slide, but .*use_swa = False"),
        ({"use_sliding_window": False, "sliding_window": None}, {"use_swa": False, "swa_window_size": 24}, "use_swa"),
        ({"use_sliding_window": True}, {"swa_window_size": 25}, "sliding_window = 24 and .*swa_window_size = 25"),
        ({}, {"use_swa": True, "swa_window_size": 25}, "sliding_window = 24 and .*swa_window_size = 25"),
        ({"layer_types": "absent", "max_window_layers": 0, "use_sliding_window": True}, {"use_swa": False}, "use_swa"),
    ],
)
def test_sliding_layers_that_something_else_contradicts(keys, own_keys, match, tmp_path):
    base = changed(layer_types=list(MIXED), sliding_window=24, use_sliding_window="absent")
    config = changed(base, dflash_config={**base["dflash_config"], **own_keys}, **keys)
    refused(tmp_path, config, CheckpointError, f"{match}.*; correct the config or fetch the draft again")


@pytest.mark.parametrize(
    ("keys", "own_keys"),
    [
        ({"use_sliding_window": True}, {}),
        ({"use_sliding_window": True, "max_window_layers": 3}, {}),  # as published, whatever Qwen makes of it
        ({}, {"use_swa": True, "swa_window_size": 24}),
        ({"use_sliding_window": False, "sliding_window": None}, {"swa_window_size": 24}),  # as transformers saves it
        ({"use_sliding_window": False}, {"use_swa": True}),
        ({"use_sliding_window": False, "sliding_window": 99}, {"use_swa": True, "swa_window_size": 24}),
    ],
)
def test_sliding_layers_whose_window_is_stated_once(keys, own_keys, tmp_path):
    base = changed(layer_types=list(MIXED), sliding_window=24, use_sliding_window="absent")
    model = config_of(tmp_path, changed(base, dflash_config={**base["dflash_config"], **own_keys}, **keys)).model
    assert (model.layer_types, model.sliding_window) == (MIXED, 24)


def test_flags_of_a_model_whose_layers_do_not_slide_change_nothing(tmp_path):
    config = changed(own(use_swa=False, swa_window_size=24), sliding_window=99)
    assert config_of(tmp_path, config).model == config_of(tmp_path, "qwen3").model


def test_the_drafts_own_window_goes_before_the_models(tmp_path):
    config = changed(own(use_swa=True, swa_window_size=24), sliding_window=99)
    assert config_of(tmp_path, config).model.sliding_window == 24


@pytest.mark.parametrize(
    ("layers", "draft_layers", "taps"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (9, 3, (1, 4, 6)), (9, 1, (4,)), (36, 1, (18,))],
)
def test_default_taps(layers, draft_layers, taps):
    assert default_taps(layers, draft_layers) == taps


def test_default_taps_are_used_where_none_are_named(tmp_path):
    assert config_of(tmp_path, "llama31").taps == (1, 4, 6)
    assert config_of(tmp_path, "one_layer").taps == (TARGET_LAYERS // 2,)


def test_own_vocabulary_becomes_target_ids(tmp_path):
    draft = read_dflash(write_dflash(tmp_path / "draft", "qwen3", own_vocab=120), target_config())
    chosen = np.flatnonzero(vocabulary_map(120, 0)["t2d"])
    assert draft.config.own_embedding and draft.config.draft_vocab_size == 120
    assert draft.d2t is not None and draft.d2t.dtype == np.int64
    np.testing.assert_array_equal(draft.d2t, chosen)


def test_a_head_for_all_tokens_needs_no_map(tmp_path):
    head = {"lm_head.weight": np.zeros((VOCAB, HIDDEN), BF16)}
    draft = read_dflash(write_dflash(tmp_path / "draft", "qwen3", tensors=head), target_config())
    assert (draft.config.draft_vocab_size, draft.config.own_embedding, draft.d2t) == (VOCAB, False, None)


def test_speculators_count_taps_from_one(tmp_path):
    draft = read_dflash_speculators(write_speculators(tmp_path / "draft"), target_config())
    config = draft.config
    assert config.taps == (0, 3, 6) and "speculators" in config.tap_convention
    assert (config.model.layer_types, config.layer_causal) == (MIXED, (True, False, True))
    assert (config.draft_vocab_size, config.own_embedding) == (120, True)
    assert draft.d2t is not None and len(draft.d2t) == 120


def test_speculators_without_copies_of_the_target(tmp_path):
    changes = {"sliding_window_non_causal": True, "sample_from_anchor": True}
    draft = read_dflash_speculators(
        write_speculators(tmp_path / "draft", own_vocab=None, changes=changes), target_config()
    )
    assert (draft.config.draft_vocab_size, draft.config.own_embedding, draft.d2t) == (None, False, None)
    assert draft.config.layer_causal == (False,) * 3 and draft.config.sample_from_anchor


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"speculators_model_type": "dspark"}, UnsupportedModelError, "'dspark' is not implemented"),
        ({"projector_type": "domino"}, UnsupportedModelError, "projector_type = 'domino'"),
        ({"shift_label": True}, UnsupportedModelError, "shift_label"),
        ({"speculators_config": {"algorithm": "eagle3"}}, CheckpointError, "algorithm = 'eagle3'"),
        ({"aux_hidden_state_layer_ids": [0, 1, 2]}, CheckpointError, "layers from 1"),
        ({"aux_hidden_state_layer_ids": [1, 2, TARGET_LAYERS + 1]}, UsageError, "layer 9 .*layers 0 to 8"),
        ({"mask_token_id": None}, CheckpointError, "mask_token_id is missing"),
        ({"block_size": 1}, CheckpointError, "at least 2"),
    ],
)
def test_speculators_refused(changes, kind, match, tmp_path):
    with pytest.raises(kind, match=match) as caught:
        read_dflash_speculators(write_speculators(tmp_path / "draft", changes=changes), target_config())
    assert str(tmp_path / "draft") in str(caught.value)


def test_gguf_is_the_checkpoint_it_was_converted_from(tmp_path):
    for variant in ("qwen3", "qwen35"):
        theirs = read_dflash(write_dflash(tmp_path / variant, variant), target_config())
        ours = read_dflash_gguf(write_dflash_gguf(tmp_path / f"{variant}.gguf", variant), target_config())
        assert "llama.cpp" in ours.config.tap_convention
        assert ours.config.taps == theirs.config.taps
        assert ours.config.layer_causal == theirs.config.layer_causal
        assert ours.config.model == theirs.config.model
        assert sorted(ours.weights.names()) == sorted(theirs.weights.names())
        for name in theirs.weights.names():
            shape = theirs.weights.shape(name)
            np.testing.assert_array_equal(ours.weights.read(name, shape), theirs.weights.read(name, shape), name)


def test_gguf_target_ids_are_absolute(tmp_path):
    ids = np.flatnonzero(vocabulary_map(120, 0)["t2d"])
    for kind in (np.int32, np.int64):
        tensors = {"d2t": ids.astype(kind), "output.weight": np.zeros((120, HIDDEN), np.float32)}
        path = write_dflash_gguf(tmp_path / f"{kind.__name__}.gguf", tensors=tensors)
        draft = read_dflash_gguf(path, target_config())
        assert draft.config.draft_vocab_size == 120 and draft.d2t is not None
        np.testing.assert_array_equal(draft.d2t, ids)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"dflash.conv_kernel_size": 2}, CheckpointError, "conv_group_size must be a positive integer, not None"),
        ({"dflash.final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping"),
        ({"dflash.rope.dimension_sections": [4, 4, 0, 0]}, UnsupportedModelError, "dimension_sections"),
        ({"dflash.attention.sliding_window_pattern": [True]}, CheckpointError, "flag for each of 3 layers"),
        ({"dflash.target_layers": [1, 2, 3, 4, 10]}, UsageError, "layer 9 .*layers 0 to 8"),
        ({"dflash.target_layers": None}, CheckpointError, "target_layers is missing"),
        ({"tokenizer.ggml.mask_token_id": None}, CheckpointError, "mask_token_id is missing"),
        ({"tokenizer.ggml.tokens": ["a"] * 7}, UsageError, "7 rows, the target 320"),
    ],
)
def test_gguf_refused(changes, kind, match, tmp_path):
    with pytest.raises(kind, match=match) as caught:
        read_dflash_gguf(write_dflash_gguf(tmp_path / "draft.gguf", changes=changes), target_config())
    assert str(tmp_path / "draft.gguf") in str(caught.value)


def test_gguf_of_dflash2_is_the_checkpoint_it_was_converted_from(tmp_path):
    draft = read_dflash_gguf(write_dflash_gguf(tmp_path / "draft.gguf", DFLASH2), target_config())
    source = read_dflash2(write_dflash(tmp_path / "source", DFLASH2), target_config())
    paths = draft.config.paths
    assert paths is not None and paths.multiplier == pytest.approx(0.7)  # a float32 there
    paths = replace(paths, multiplier=0.7)
    assert replace(draft.config, tap_convention=source.config.tap_convention, paths=paths) == source.config
    names = [*weights_of(DFLASH2, 0)]
    for name in names:
        stored = name if name.endswith(".weight") else f"{name}.weight"
        found, right = (each.weights.read(stored, draft.weights.shape(stored)) for each in (draft, source))
        np.testing.assert_array_equal(found, right, err_msg=name)
    assert draft.weights.unread() == []
    same = {"dflash.logit_scale": 0.0, "dflash.final_logit_softcapping": 0.0}  # none, in llama.cpp's words
    path = write_dflash_gguf(tmp_path / "plain.gguf", DFLASH2, changes=same)
    assert read_dflash_gguf(path, target_config()).config.paths == PathSelection(2, 16, 12, 5)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"dflash.selector_rank": None}, CheckpointError, "selector_rank must be a positive integer, not None"),
        ({"dflash.conv_group_size": 24}, CheckpointError, "24 does not divide hidden_size 64; correct"),
        ({"dflash.selector_top_k": VOCAB + 1}, CheckpointError, "exceeds the vocabulary"),
        ({"dflash.logit_scale": -1.0}, CheckpointError, "multiplied by -1.0"),
        (
            {"dflash.conv_kernel_size": 3},
            CheckpointError,
            r"draft.gguf: tensor blk.0.attn_conv_base .* shape \[4, 64\]",
        ),
        (
            {f"dflash.{key}": None for key in SIZES},
            UnsupportedModelError,
            "logit_scale|final_logit_softcapping",
        ),
    ],
)
def test_gguf_of_dflash2_refused(changes, kind, match, tmp_path):
    with pytest.raises(kind, match=match):
        read_dflash_gguf(write_dflash_gguf(tmp_path / "draft.gguf", DFLASH2, changes=changes), target_config())


def test_gguf_with_tensors_of_dflash2_but_none_of_its_keys(tmp_path):
    keys = {f"dflash.{key}": None for key in SIZES}
    changes = {**keys, "dflash.logit_scale": None, "dflash.final_logit_softcapping": None}
    with pytest.raises(UnsupportedModelError, match=r"tensor .*(conv|selector).* is not part of a DFlash draft"):
        read_dflash_gguf(write_dflash_gguf(tmp_path / "draft.gguf", DFLASH2, changes=changes), target_config())


def test_gguf_of_a_fork_or_a_descendant_is_refused(tmp_path):
    path = write_dflash_gguf(tmp_path / "dspark.gguf", tensors={"markov_w1.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"markov_w1.weight belongs to DSpark"):
        read_dflash_gguf(path, target_config())
    writer = gguf.GGUFWriter(tmp_path / "fork.gguf", "dflash-draft")
    writer.add_tensor("fc.weight", np.zeros((4, 4), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    assert recognises_dflash_gguf(read_gguf(tmp_path / "fork.gguf"))
    with pytest.raises(UnsupportedModelError, match="another layout"):
        read_dflash_gguf(tmp_path / "fork.gguf", target_config())


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (changed(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
        (changed(architectures=["Qwen3DSparkModel"]), "Qwen3DSparkModel"),
        (changed(model_type="muse_glimmer_assistant"), "muse_glimmer_assistant"),
        (own(projector_type="dspark"), "projector_type = 'dspark'"),
        (own(projector_type="novel"), "projector_type = 'novel'"),
        (own(selector_rank=256), "selector_rank"),
        (own(conv_kernel_size=2), "conv_kernel_size"),
        (own(attention_sink_bias=True), "attention_sink_bias"),
        (own(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (changed(is_neox_style=False), "is_neox_style"),
        (changed(selector_top_k=16), "selector_top_k"),
        (changed(partial_rotary_factor=0.25), "partial_rotary_factor"),
        (changed(layer_types=["linear_attention"] * 3), "linear_attention"),
    ],
)
def test_other_maths_is_refused_by_the_name_of_its_key(config, match, tmp_path):
    refused(tmp_path, config, UnsupportedModelError, match)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
        ("layers.0.mlp_conv.kernel_projection.weight", "DFlash2"),
        ("candidate_selector.predecessor_codebook", "DFlash2"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("confidence_head.proj.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("layers.0.self_attn.attention_sink_bias", "attention sinks"),
        ("mask_embedding", "embedding of the mask"),
        ("layers.0.self_attn.qkv_proj.weight", "fused"),
        ("layers.0.self_attn.g_proj.weight", "gated attention"),
        ("aux_hidden_norms.0.weight", "norm for each tap"),
        ("encoder.fc.weight", "Muse-Glimmer"),
    ],
)
def test_tensors_of_descendants_are_refused_by_what_they_are(name, match, tmp_path):
    source = write_dflash(tmp_path / "draft", tensors={name: np.zeros((2, 2), BF16)})
    with pytest.raises(UnsupportedModelError, match=f"{name} belongs to .*{match}"):
        read_dflash(source, target_config())


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers"])
def test_values_at_both_places_must_agree(key, tmp_path):
    values = {"block_size": 8, "mask_token_id": 310, "target_layer_ids": [1, 3, 6], "num_target_layers": 9}
    agreeing = changed(own(**{key: values[key]}), **{key: values[key]})
    assert config_of(tmp_path / "same", agreeing).block_size == 8
    other = [1, 3, 7] if key == "target_layer_ids" else values[key] + 1
    refused(
        tmp_path / "other",
        changed(own(**{key: values[key]}), **{key: other}),
        CheckpointError,
        f"{key} = .*says .*; correct",
    )


def test_causality_stated_twice_must_agree(tmp_path):
    assert config_of(tmp_path / "same", changed(own(causal=True), is_causal=True)).layer_causal == (True,) * 3
    refused(
        tmp_path / "other", changed(own(causal=True), is_causal=False), CheckpointError, "is_causal = False .*; correct"
    )


def test_no_rope_theta_is_assumed(tmp_path):
    refused(tmp_path, changed(rope_theta="absent"), CheckpointError, "rope_theta is missing")


def test_sliding_layers_need_a_window(tmp_path):
    refused(tmp_path, changed(layer_types=list(MIXED)), CheckpointError, "need sliding_window")


def test_strict_tensors(tmp_path):
    name = "layers.1.self_attn.k_proj.weight"
    shape = weights_of(VARIANTS["qwen3"], 0)[name].shape
    missing = write_dflash(tmp_path / "missing", tensors={name: None})
    with pytest.raises(CheckpointError, match=rf"missing has no tensor {name}.*\[64, 64\]"):
        read_dflash(missing, target_config())
    wrong = write_dflash(tmp_path / "wrong", tensors={name: np.zeros((shape[0], shape[1] + 1), BF16)})
    with pytest.raises(CheckpointError, match=rf"model.safetensors: tensor {name} has shape \[64, 65\].*\[64, 64\]"):
        read_dflash(wrong, target_config())
    flat = write_dflash(tmp_path / "flat", tensors={"lm_head.weight": np.zeros(64, BF16)})
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight has shape \[64\], expected \[320, 64\]"):
        read_dflash(flat, target_config())
    extra = write_dflash(tmp_path / "extra", tensors={"layers.3.input_layernorm.weight": np.zeros(64, BF16)})
    with pytest.raises(
        UnsupportedModelError, match=r"model.safetensors: tensor layers.3.input_layernorm.weight \[64\]"
    ):
        read_dflash(extra, target_config())


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"d2t": None, "t2d": None}, r"no tensor d2t, expected shape \[120\]"),
        ({"d2t": np.zeros(119, np.int64)}, r"model.safetensors: tensor d2t has shape \[119\], expected \[120\]"),
        ({"d2t": np.full(120, VOCAB, np.int64)}, "below 320"),
        ({"d2t": -np.arange(120, dtype=np.int64)}, "120 different tokens"),
        ({"d2t": np.zeros(120, np.int64)}, "d2t and t2d name different"),
        ({"d2t": np.zeros(120, np.float32)}, "d2t is F32"),
        ({"lm_head.weight": None}, r"no tensor lm_head.weight, expected shape \[120, 64\]"),
        ({"lm_head.weight": np.zeros(64, BF16)}, r"lm_head.weight has shape \[64\], expected \[120, 64\]"),
    ],
)
def test_vocabulary_maps_are_checked(tensors, match, tmp_path):
    source = write_dflash(tmp_path / "draft", own_vocab=120, tensors=tensors)
    with pytest.raises(CheckpointError, match=match):
        read_dflash(source, target_config())


@pytest.mark.parametrize(
    ("config", "target", "match"),
    [
        (VARIANTS["qwen3"], {"hidden_size": 128}, "width 64, the target's hidden size is 128"),
        (changed(target_hidden_size=128), {"hidden_size": 128}, "hidden size 64, the target 128"),
        (VARIANTS["qwen3"], {"vocab_size": 400}, "320 rows, the target 400"),
        (own(target_layer_ids=[1, 3, 9]), {}, "layer 9 .*layers 0 to 8"),
        (own(mask_token_id=VOCAB), {}, "mask token id 320 .*320 rows; choose the draft"),
    ],
)
def test_drafts_that_do_not_fit_the_target(config, target, match, tmp_path):
    refused(tmp_path, config, UsageError, match, **target)


def test_a_draft_of_another_target_can_be_forced_as_long_as_its_taps_exist(tmp_path):
    source = write_dflash(tmp_path / "draft", changed(num_target_layers=12))
    with pytest.raises(UsageError, match=r"12 layers, this one has 9.*--force-dflash"):
        read_dflash(source, target_config())
    draft = read_dflash(source, target_config(), force=True)
    assert draft.config.taps == (1, 3, 6) and draft.mismatch == "made for a target of 12 layers, this one has 9"
    right = write_dflash(tmp_path / "right", VARIANTS["qwen3"])
    assert read_dflash(right, target_config(), force=True).mismatch is None
    far = write_dflash(tmp_path / "far", changed(own(target_layer_ids=[1, 3, 11]), num_target_layers=12))
    with pytest.raises(UsageError, match="layer 11"):
        read_dflash(far, target_config(), force=True)


def test_recognition(tmp_path):
    zlab = json.loads((write_dflash(tmp_path / "zlab") / "config.json").read_text())
    vllm = json.loads((write_speculators(tmp_path / "vllm") / "config.json").read_text())
    ordinary = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert [recognises_dflash(raw) for raw in (zlab, vllm, ordinary)] == [True, False, False]
    assert [recognises_dflash_speculators(raw) for raw in (zlab, vllm, ordinary)] == [False, True, False]
    assert recognises_dflash({"architectures": ["DFlash2DraftModel"]})
    assert recognises_dflash_speculators({"speculators_model_type": "dspark"})
    assert recognises_dflash_gguf(read_gguf(write_dflash_gguf(tmp_path / "draft.gguf")))


def test_dflash2_configs(tmp_path):
    draft = read_dflash2(write_dflash(tmp_path / "draft", DFLASH2), target_config())
    config = draft.config
    assert config.paths == PathSelection(conv_taps=2, conv_group=16, rank=12, top_k=5, multiplier=0.7, softcap=20.0)
    assert (config.block_size, config.model.layer_types, config.layer_causal) == (8, SLIDING, (False,) * 3)
    assert recognises_dflash2(DFLASH2) and recognises_dflash(DFLASH2) and not recognises_dflash2(VARIANTS["qwen3"])


def test_dflash2_is_never_read_as_dflash(tmp_path):
    source = write_dflash(tmp_path / "draft", DFLASH2)
    opened = open_draft(str(source), target_config(), DraftWishes())
    assert isinstance(opened, DraftCheckpoint) and opened.config.paths is not None
    opened = open_draft(str(write_dflash_gguf(tmp_path / "draft.gguf", DFLASH2)), target_config(), DraftWishes())
    assert isinstance(opened, DraftCheckpoint) and opened.config.paths is not None
    for names in ([], ["DFlashDraftModel"], ["DFlash2DraftModel", "DFlashDraftModel"], ["DFlash3DraftModel"]):
        other = write_dflash(tmp_path / f"other{len(names)}{len(str(names))}", changed(DFLASH2, architectures=names))
        with pytest.raises(UnsupportedModelError):
            open_draft(str(other), target_config(), DraftWishes())
    with pytest.raises(UnsupportedModelError, match="DFlash2"):
        read_dflash(source, target_config())
    with pytest.raises(CheckpointError, match=r"no tensor layers.0.attention_conv.base_kernel.weight.*\[4, 64\]"):
        without = {name: None for name in weights_of(DFLASH2, 0) if "conv" in name}
        read_dflash2(write_dflash(tmp_path / "without", DFLASH2, tensors=without), target_config())


@pytest.mark.parametrize(
    ("own_keys", "match"),
    [
        ({"conv_group_size": 24}, "24 does not divide hidden_size 64; correct"),
        ({"selector_top_k": VOCAB + 1}, "exceeds the vocabulary of 320 rows; correct"),
        ({"selector_rank": None}, "selector_rank must be a positive integer"),
        ({"selector_rank": 13}, r"predecessor_codebook.* has shape \[320, 12\], expected \[320, 13\]"),
        ({"output_multiplier": 0.0}, "multiplied by 0.0, expected a positive number; correct"),
        ({"novel": 1}, "novel"),
    ],
)
def test_dflash2_refused(own_keys, match, tmp_path):
    tensors = {name: values.astype(BF16) for name, values in weights_of(DFLASH2, 0).items()}
    config = changed(DFLASH2, dflash_config={**DFLASH2["dflash_config"], **own_keys})
    source = write_dflash(tmp_path / "good", DFLASH2, tensors=tensors)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=match) as caught:
        read_dflash2(source, target_config())
    assert str(source) in str(caught.value)
