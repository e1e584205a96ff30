"""Readers of EAGLE-3 checkpoints: what they understand of the published layouts, and what they refuse."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_eagle import (
    DRAFT_VOCAB,
    EAGLE_VARIANTS,
    TARGET,
    EagleVariant,
    TinyTarget,
    draft_ids,
    eagle_tensors,
    write_config,
    write_eagle,
    write_eagle_gguf,
)
from safetensors.numpy import save_file

from oxidize.export.bundle import export_bundle
from oxidize.export.drafts.base import DraftCheckpoint
from oxidize.export.drafts.eagle_gguf import is_eagle_gguf, open_eagle_gguf
from oxidize.export.drafts.eagle_hf import is_eagle_hf, open_eagle_hf
from oxidize.export.drafts.eagle_speculators import is_eagle_speculators, open_eagle_speculators
from oxidize.export.drafts.write import NeuralSource
from oxidize.export.gguf_file import read_gguf
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from oxidize.runtime.manifest import load_manifest

Tensors = dict[str, np.ndarray]
IDS = "eagle_aux_hidden_state_layer_ids"


def open_variant(folder: Path, target: TinyTarget = TARGET, convention: str | None = None) -> DraftCheckpoint:
    raw = json.loads((folder / "config.json").read_text())
    opener = open_eagle_speculators if is_eagle_speculators(raw) else open_eagle_hf
    return opener(folder, target, convention)


def changed(name: str, **keys: Any) -> EagleVariant:
    """A variant with other config keys; None takes a key away."""
    variant = EAGLE_VARIANTS[name]
    config = {key: value for key, value in {**variant.config, **keys}.items() if keys.get(key, 0) is not None}
    return replace(variant, config=config)


def with_tensors(folder: Path, name: str, change: Callable[[Tensors], object]) -> Path:
    write_eagle(folder, name)
    tensors = eagle_tensors(EAGLE_VARIANTS[name])
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", EAGLE_VARIANTS)
def test_every_variant_is_understood(name: str, tmp_path: Path):
    variant = EAGLE_VARIANTS[name]
    draft = open_variant(write_eagle(tmp_path, name))
    assert draft.config.kind == "eagle3" and draft.config.taps == variant.taps
    assert draft.config.own_embedding == variant.own_embedding
    assert draft.config.feature_size == 3 * TARGET.hidden_size
    if "d2t" in variant.leave_out:
        assert draft.d2t is None
    else:
        assert draft.config.draft_vocab_size == DRAFT_VOCAB and np.array_equal(draft.d2t, draft_ids(variant))
    assert {path.name for path in draft.files} == {"config.json", "model.safetensors"}


def test_a_full_table_that_changes_nothing_is_dropped(tmp_path: Path):
    variant = replace(EAGLE_VARIANTS["nvidia"], leave_out=())
    assert open_variant(write_eagle(tmp_path, variant)).d2t is None


def test_names_under_model_and_shards_are_the_same_draft(tmp_path: Path):
    tensors = {f"model.{name}": values for name, values in eagle_tensors(EAGLE_VARIANTS["specforge"]).items()}
    names = list(tensors)
    shards = {f"model-{part + 1:05}-of-00002.safetensors": names[part::2] for part in range(2)}
    tmp_path.joinpath("draft").mkdir()
    folder = tmp_path / "draft"
    write_config(folder, EAGLE_VARIANTS["specforge"].config)
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    draft = open_variant(folder)
    plain = open_variant(write_eagle(tmp_path / "plain", "specforge"))
    assert draft.config == plain.config and sorted(draft.weights.names()) == sorted(plain.weights.names())
    assert len(draft.files) == 4


@pytest.mark.parametrize(
    ("ids", "convention", "taps", "words"),
    [
        ([1, 4, 6], None, (1, 4, 6), "output of layer i, ids 1 4 6"),
        ([1, 4, 6], "input", (0, 3, 5), "input of layer i, ids 1 4 6 (as asked for)"),
        ([2, 4, 5], None, (1, 3, 4), "reference's default"),
        ([2, 4, 5], "output", (2, 4, 5), "output of layer i"),
        ([3, 5, 8], None, (2, 4, 7), "8 is the final output"),
        (None, None, (1, 3, 4), "states none"),
        (None, "output", (2, 4, 5), "output of layer i, ids 2 4 5 (as asked for)"),
    ],
)
def test_taps_of_eagle_config(ids: Any, convention: Any, taps: tuple[int, ...], words: str, tmp_path: Path):
    variant = changed("specforge", eagle_config={IDS: ids} if ids else None)
    config = open_variant(write_eagle(tmp_path, variant), TARGET, convention).config
    assert config.taps == taps and words in config.tap_convention


def test_taps_of_vllms_own_key_are_hidden_states(tmp_path: Path):
    config = open_variant(write_eagle(tmp_path, changed("specforge", eagle_config=None, **{IDS: [1, 4, 8]}))).config
    assert config.taps == (0, 3, 7) and "hidden_states" in config.tap_convention


@pytest.mark.parametrize(
    ("ids", "convention", "message"),
    [
        ([1, 4, 9], None, r"\[1, 4, 9\].*0 to 7.*target of 8 layers"),
        ([0, 4, 8], "input", r"\[0, 4, 8\].*1 to 8.*target of 8 layers"),
        ([1, 4, 8], "output", r"0 to 7"),
        ([4, 1, 6], None, "do not ascend"),
        ([1, 4, 4], None, "do not ascend"),
        ([1, 4, 6], "before", "'input' or 'output', not 'before'"),
    ],
)
def test_taps_that_cannot_be(ids: list[int], convention: str | None, message: str, tmp_path: Path):
    folder = write_eagle(tmp_path, changed("specforge", eagle_config={IDS: ids}))
    with pytest.raises(UsageError, match=message):
        open_variant(folder, TARGET, convention)


def test_a_target_too_shallow_for_the_default_taps(tmp_path: Path):
    with pytest.raises(UsageError, match=r"\[2, 3, 3\].*do not ascend; a target of 6 layers"):
        open_variant(write_eagle(tmp_path, "safeailab"), TinyTarget(layers=6))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TinyTarget(vocab_size=321), "vocabulary of 320, the target has 321"),
        (TinyTarget(hidden_size=128), r"safetensors: tensor fc.weight has shape \[64, 192\], expected \[64, 384\]"),
    ],
)
@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_a_draft_of_another_target(target: TinyTarget, message: str, name: str, tmp_path: Path):
    with pytest.raises(UsageError, match=message):
        open_variant(write_eagle(tmp_path, name), target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("midlayer.hidden_norm.weight"),
            r"no tensor midlayer.hidden_norm.weight, expected shape \[64\]",
        ),
        (lambda t: t.pop("fc.weight"), r"no tensor fc.weight, expected shape \[64, 192\]"),
        (lambda t: t.update({"fc.weight": t["norm.weight"]}), r"fc.weight has shape \[64\], expected \[64, 192\]"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:50]}), r"fc.weight has shape \[50, 192\], expected \[64"),
        (lambda t: t.update({"fc.bias": t["norm.weight"]}), r"model.safetensors: tensor fc.bias \[64\] is not part of"),
        (lambda t: t.update({"mask_hidden": t["norm.weight"]}), "tensor mask_hidden"),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.weight": t["midlayer.self_attn.o_proj.weight"]}),
            r"safetensors: tensor midlayer.self_attn.q_proj.weight has shape \[64, 128\].*, expected \[128, 128\]",
        ),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:50]}), "draft_vocab_size is 96.*50 rows; correct"),
        (
            lambda t: t.update({"lm_head.weight": t["norm.weight"]}),
            r"lm_head.weight has shape \[64\], expected \[96, 64",
        ),
        (lambda t: t.pop("lm_head.weight"), r"no tensor lm_head.weight, expected shape \[96, 64\].*\[320, 64\] cannot"),
        (lambda t: t.pop("d2t"), "scores 96 of 320 ids, and no d2t"),
        (lambda t: t.update(d2t=t["d2t"][:90]), r"model.safetensors: d2t has shape \[90\], expected \[96\]"),
        (lambda t: t.update(d2t=t["d2t"] + 300), "d2t sends draft id .* to .*, the target has the ids 0 to 319"),
        (lambda t: t.update(d2t=-np.arange(96)), "d2t sends 96 draft ids to 1 target ids"),
        (lambda t: t.update(t2d=t["t2d"][:300]), r"t2d has shape \[300\], expected \[320\]"),
        (lambda t: t.update(t2d=np.roll(t["t2d"], 1)), "t2d and d2t disagree on"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "d2t is F32, expected"),
    ],
)
def test_tensors_that_contradict(change: Callable[[Tensors], object], message: str, tmp_path: Path):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        open_variant(with_tensors(tmp_path, "specforge", change))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"hidden_size": 48, "head_dim": 32},
            "hidden size 48 and no embed_tokens, and the target's embeddings have 64",
        ),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, the target has 64; use a draft"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, but there are 3 tap ids"),
        ({"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, "norm_before_fc is given in two places"),
        (
            {"norm_output": True, "eagle_config": {"return_hidden_post_norm": False}},
            "norm_output is given in two places",
        ),
        ({IDS: [2, 4, 6]}, r"\[2, 4, 6\] at the top and \[1, 4, 6\]"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config: key parallel_draft_step = 4"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "key use_aux_hidden_state = False"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "key eh_proj_before_attn = True"),
        ({"eagle_config": {IDS: [1, 2.5]}}, "must be a list of layer numbers"),
        ({"residual_gate": True}, "key residual_gate = True"),
        ({"bias": True}, "bias on fc"),
        ({"mask_token_id": 319}, "P-EAGLE .mask_token_id 319"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, r"Eagle3DeepseekV2ForCausalLM.*\(MLA\)"),
        ({"model_type": "gemma3_text"}, "model_type 'gemma3_text' is not implemented"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2.*more than one midlayer"),
        ({"layer_types": ["sliding_attention"]}, "layer_types .* and sliding_window None disagree"),
        ({"fc_norm": True}, r"has no tensor fc_norm.0.weight, expected shape \[64\]"),
    ],
)
def test_configs_that_are_refused(keys: dict[str, Any], message: str, tmp_path: Path):
    folder = write_eagle(tmp_path, "specforge")
    write_config(folder, changed("specforge", **keys).config)
    with pytest.raises((CheckpointError, UsageError), match=message) as caught:
        open_variant(folder)
    assert str(folder) in str(caught.value)  # there may be several drafts, and a target


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"speculators_model_type": "peagle"}, UnsupportedModelError, "speculators_model_type 'peagle'"),
        ({"speculators_config": {"algorithm": "eagle"}}, CheckpointError, "'eagle3', but .* is 'eagle'"),
        ({"norm_before_residual": None}, CheckpointError, "norm_before_residual is missing"),
        ({"aux_gate": 3}, UnsupportedModelError, "key aux_gate = 3"),
        ({"draft_vocab_size": 90}, CheckpointError, "draft_vocab_size is 90, but lm_head.weight has 96 rows"),
    ],
)
def test_speculators_that_are_refused(keys: dict[str, Any], error: type[Exception], message: str, tmp_path: Path):
    folder = write_eagle(tmp_path, "speculators")
    write_config(folder, changed("speculators", **keys).config)
    with pytest.raises(error, match=message) as caught:
        open_variant(folder)
    assert str(folder) in str(caught.value)


def test_training_copies_of_the_target_are_left_out(tmp_path: Path):
    assert not [
        name for name in open_variant(write_eagle(tmp_path, "speculators")).weights.names() if "verifier" in name
    ]


@pytest.mark.parametrize("name", ["safeailab", "specforge_70b", "nvidia", "target_head"])
def test_gguf_says_what_its_source_says(name: str, tmp_path: Path):
    draft = open_eagle_gguf(write_eagle_gguf(tmp_path / "draft.gguf", name), TARGET)
    source = open_variant(write_eagle(tmp_path / "source", name))
    assert draft.config.taps == source.config.taps and "llama.cpp counts inputs" in draft.config.tap_convention
    assert draft.config.flags == source.config.flags and draft.config.own_embedding == source.config.own_embedding
    assert (draft.d2t is None and source.d2t is None) or np.array_equal(draft.d2t, source.d2t)
    assert sorted(draft.weights.names()) == sorted(source.weights.names())


def test_gguf_whose_table_holds_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offsets = draft_ids(EAGLE_VARIANTS["safeailab"]) - np.arange(DRAFT_VOCAB)
    monkeypatch.setattr("draft_checkpoints_eagle.draft_ids", lambda *_: offsets)
    path = write_eagle_gguf(tmp_path / "draft.gguf", "safeailab")
    with pytest.raises(CheckpointError, match="d2t repeats target ids, so it holds offsets"):
        open_eagle_gguf(path, TARGET)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eagle3.target_layers", [3, 4, 5], r"extract_layers is \[2, 4, 5\], but target_layers is \[3, 4, 5\]"),
        ("eagle3.w1a1.version", 1, "draft.gguf, whose layer is read as a Llama's.*w1a1.version"),
        ("eagle3.norm_before_fc", True, "no tensor input_norm.weight"),
    ],
)
def test_gguf_metadata_that_is_refused(
    key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept = gguf.GGUFWriter.write_header_to_file

    def with_key(writer: gguf.GGUFWriter) -> None:
        add = writer.add_array if isinstance(value, list) else writer.add_bool if value is True else writer.add_uint32
        add(key, value)
        kept(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_key)
    path = write_eagle_gguf(tmp_path / "draft.gguf", "safeailab")
    with pytest.raises(CheckpointError, match=message):
        open_eagle_gguf(path, TARGET)


def test_recognition_by_content(tmp_path: Path):
    for name, variant in EAGLE_VARIANTS.items():
        speculators = variant.layout == "layers"
        assert is_eagle_speculators(variant.config) == speculators, name
        assert (
            is_eagle_hf(variant.config, {key: array.shape for key, array in eagle_tensors(variant).items()})
            != speculators
        ), name
    assert is_eagle_hf(EAGLE_VARIANTS["safeailab"].config)
    assert not is_eagle_hf(VARIANTS["llama2"]) and not is_eagle_hf({"dflash_config": {}, "draft_vocab_size": 9})
    assert is_eagle_speculators({"speculators_model_type": "peagle"})
    assert is_eagle_gguf(read_gguf(write_eagle_gguf(tmp_path / "draft.gguf", "safeailab")).metadata)
    assert not is_eagle_gguf({"general.architecture": "llama"})


@pytest.mark.parametrize("name", ["specforge", "eagle31", "target_head", "speculators_sliding"])
def test_a_draft_becomes_part_of_a_bundle(name: str, tmp_path: Path):
    config = {**VARIANTS["llama2"], "num_hidden_layers": TARGET.layers, "vocab_size": TARGET.vocab_size}
    target = open_source(str(write_hf_checkpoint(tmp_path / "target", config)))
    draft = open_variant(write_eagle(tmp_path / "draft", name))
    plan = ExportPlan("fp32")
    export_bundle(target, plan, tmp_path / "bundle", [NeuralSource("eagle", draft, plan)])
    manifest = load_manifest(tmp_path / "bundle")
    (entry,) = manifest.drafts
    assert entry.neural is not None and entry.neural.taps == draft.config.taps and entry.neural.causal
    own = {"embed": draft.config.own_embedding, "head": draft.config.draft_vocab_size is not None}
    assert {graph.role for graph in entry.graphs} == {"fuse", "draft", *(role for role, has in own.items() if has)}
    if draft.d2t is not None:
        stored = np.fromfile(tmp_path / "bundle" / entry.neural.d2t, "<i8")
        assert np.array_equal(stored, draft.d2t)
