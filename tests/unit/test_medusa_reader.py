"""Medusa heads are told by their folder, read in the published layouts, and refused where they contradict."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_hf_checkpoint
from draft_checkpoints_medusa import (
    HIDDEN,
    VARIANTS,
    VOCAB,
    MedusaVariant,
    Tensors,
    medusa_config,
    medusa_tensors,
    write_medusa,
)
from safetensors.numpy import load_file, save_file

from oxidize.export.config import ModelConfig
from oxidize.export.drafts.base import DraftCheckpoint, MedusaHeads
from oxidize.export.drafts.medusa import is_medusa, read_medusa
from oxidize.export.drafts.recognise import DraftWishes, open_draft
from oxidize.export.foreign import open_model_draft
from oxidize.export.source import open_source
from oxidize.runtime.errors import CheckpointError, OxidizeError, UnsupportedModelError, UsageError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_source(str(write_hf_checkpoint(tmp_path_factory.mktemp("target"), "padded_vocab"))).config


def opened(folder: Path, target: ModelConfig) -> DraftCheckpoint:
    found = open_draft(str(folder), target, DraftWishes())
    assert isinstance(found, DraftCheckpoint)
    return found


def refused(folder: Path, target: ModelConfig, kind: type[OxidizeError], *texts: str) -> None:
    with pytest.raises(kind) as caught:
        open_draft(str(folder), target, DraftWishes())
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)  # there may be several drafts, and a target


@pytest.mark.parametrize(
    ("variant", "heads"),
    [
        ("reference", MedusaHeads(3, 1, True, "own")),
        ("uploaded", MedusaHeads(5, 1, True, "own")),
        ("version2", MedusaHeads(3, 1, True, "target")),
        ("no_blocks", MedusaHeads(2, 0, True, "own")),
        ("deep", MedusaHeads(2, 3, True, "own")),
        ("prefixed", MedusaHeads(3, 1, True, "own")),
        ("vllm", MedusaHeads(3, 1, False, "own")),
        ("vllm_bias", MedusaHeads(2, 2, True, "own")),
        ("vllm_one", MedusaHeads(3, 1, False, "one")),
        ("vllm_map", MedusaHeads(3, 1, False, "own")),
    ],
)
def test_what_heads_say_of_themselves(variant: str, heads: MedusaHeads, target: ModelConfig, tmp_path: Path) -> None:
    draft = opened(write_medusa(tmp_path / "heads", variant), target)
    config = draft.config
    assert (config.kind, config.heads, config.block_size) == ("medusa", heads, heads.count + 1)
    assert (config.taps, config.feature_size, config.own_embedding) == ((), HIDDEN, False)
    own = None if heads.output == "target" else VARIANTS[variant].truncated or VOCAB
    assert config.draft_vocab_size == own
    assert (config.model.layers, config.model.kv_heads, config.model.head_dim) == (0, 0, 0)
    assert (config.model.hidden_size, config.model.vocab_size) == (target.hidden_size, target.vocab_size)
    assert draft.name == "heads"
    assert {path.name for path in draft.files} == {"config.json", VARIANTS[variant].file}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_layouts_hold_the_same_values_under_our_names(dtype: str, target: ModelConfig, tmp_path: Path) -> None:
    theirs = medusa_tensors(VARIANTS["reference"], seed=3)
    renamed = {}
    for name, values in theirs.items():
        head, block, *_ = name.split(".")
        renamed[
            f"blocks.{head}.layers.{block}.{name.rpartition('.')[2]}" if "linear" in name else f"lm_heads.{head}.weight"
        ] = values
    folders = (
        write_medusa(tmp_path / "a", "reference", dtype=dtype, tensors=theirs),
        write_medusa(
            tmp_path / "b",
            replace(VARIANTS["vllm"], biased=True),
            dtype=dtype,
            tensors=renamed,
            keys={"medusa_fc_bias": True},
        ),
    )
    ours, other = (opened(folder, target) for folder in folders)
    assert ours.config == other.config
    assert sorted(ours.weights.names()) == sorted(other.weights.names())
    for name in ours.weights.names():
        shape = ours.weights.shape(name)
        np.testing.assert_array_equal(ours.weights.read(name, shape), other.weights.read(name, shape))
    first = ours.weights.read("heads.1.blocks.0.weight", (HIDDEN, HIDDEN))
    limit = 0 if dtype != "float16" else 1e-3
    np.testing.assert_allclose(first, theirs["1.0.linear.weight"], atol=limit)


def test_a_single_matrix_may_have_either_name(target: ModelConfig, tmp_path: Path) -> None:
    tensors = medusa_tensors(VARIANTS["vllm_one"])
    tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    draft = opened(write_medusa(tmp_path / "heads", "vllm_one", tensors=tensors), target)
    assert "lm_head.weight" in draft.weights.names()
    shape = (VOCAB, HIDDEN)
    np.testing.assert_array_equal(draft.weights.read("lm_head.weight", shape), tensors["lm_head.weight"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_truncated_vocabulary(whole: bool, target: ModelConfig, tmp_path: Path) -> None:
    """The rows may be there already, or be taken from whole matrices."""
    variant = VARIANTS["vllm_map_whole" if whole else "vllm_map"]
    tensors = medusa_tensors(variant)
    draft = opened(write_medusa(tmp_path / "heads", variant, tensors=tensors), target)
    ids, matrix = tensors["token_map"], tensors["lm_heads.1.weight"]
    assert draft.d2t is not None and draft.d2t.dtype == np.int64
    np.testing.assert_array_equal(draft.d2t, ids)
    rows = draft.weights.read("heads.1.lm_head.weight", (96, HIDDEN))
    np.testing.assert_array_equal(rows, matrix[ids] if whole else matrix)
    block = draft.weights.read("heads.1.blocks.0.weight", (HIDDEN, HIDDEN))
    np.testing.assert_array_equal(block, tensors["blocks.1.layers.0.weight"])


def test_a_sharded_checkpoint(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "heads", "vllm")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed = {name: f"model-0000{1 + name.startswith('lm_heads')}-of-00002.safetensors" for name in tensors}
    for shard in set(placed.values()):
        mine = {name: each for name, each in tensors.items() if placed[name] == shard}
        save_file(mine, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    draft = opened(folder, target)
    assert len(draft.weights.names()) == len(tensors) and len(draft.files) == 4


def test_what_is_no_medusa_is_left_alone(target: ModelConfig, tmp_path: Path) -> None:
    model = write_hf_checkpoint(tmp_path / "model", "padded_vocab")
    assert not is_medusa(model)
    assert not is_medusa(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "medusa", "medusa_num_heads": 3}))
    assert not is_medusa(tmp_path)
    refused(tmp_path, target, UnsupportedModelError, "speculators_model_type 'medusa' is not implemented")


@pytest.mark.parametrize("beside", ["nothing", "a model"])
def test_pickles_are_refused_with_the_reason_and_the_way_out(beside: str, target: ModelConfig, tmp_path: Path) -> None:
    """The command of the message makes a file that is read."""
    folder = tmp_path / "heads"
    if beside == "a model":
        write_hf_checkpoint(folder, "padded_vocab")
    tensors = medusa_tensors(VARIANTS["deep"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(medusa_config(VARIANTS["deep"])))
    shared = {name: torch.from_numpy(each) for name, each in tensors.items()}
    for head in range(2):  # the reference repeats one module, so its blocks share their memory
        for part in ("weight", "bias"):
            shared[f"{head}.1.linear.{part}"] = shared[f"{head}.0.linear.{part}"]
    torch.save(shared, folder / "medusa_lm_head.pt")
    assert is_medusa(folder)
    with pytest.raises(UnsupportedModelError, match="is a pickle, which can run any program when it is read") as caught:
        open_draft(str(folder), target, DraftWishes())
    command = re.search(r'python -c "(.*)"', str(caught.value))
    assert command is not None
    subprocess.run([sys.executable, "-c", command.group(1)], cwd=folder, check=True, timeout=120)
    draft = opened(folder, target)
    for layer in (0, 1):
        found = draft.weights.read(f"heads.1.blocks.{layer}.weight", (HIDDEN, HIDDEN))
        np.testing.assert_array_equal(found, tensors["1.0.linear.weight"])


def test_a_config_without_its_weights(target: ModelConfig, tmp_path: Path) -> None:
    """As a hub's snapshot of pickled heads looks, of which pickles are not fetched."""
    (tmp_path / "config.json").write_text(json.dumps(medusa_config(VARIANTS["reference"])))
    refused(tmp_path, target, UnsupportedModelError, "has no medusa_lm_head.safetensors", "is a pickle", "torch.load")


def test_weights_without_a_config(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "heads", "reference")
    (folder / "config.json").unlink()
    refused(folder, target, CheckpointError, "config.json")


@pytest.mark.parametrize(
    ("variant", "keys", "texts"),
    [
        ("reference", {"medusa_num_heads": 4}, ("says 4 heads", "are of 3")),
        ("reference", {"medusa_num_heads": 2}, ("says 2 heads", "are of 3")),
        ("uploaded", {"medusa_num_heads": 3}, ("says 3 heads", "are of 5")),
        ("reference", {"medusa_num_layers": 2}, ("says 2 blocks a head", "are of 1")),
        ("no_blocks", {"medusa_num_layers": 1}, ("says 1 blocks a head", "are of 0")),
        ("vllm", {"num_heads": 2}, ("says 2 heads", "are of 3")),
        ("vllm", {"medusa_num_heads": 5}, ("medusa_num_heads 5 and num_heads 3 disagree",)),
        ("vllm", {"num_hidden_layers": 3}, ("says 3 blocks a head", "are of 1")),
        ("reference", {"hidden_size": 128}, ("hidden size of 128", "tensors have 64")),
        ("vllm", {"vocab_size": 400}, ("vocabulary of 400", "tensors have 320")),
        ("reference", {"version": "2"}, ("share an lm_head", "3 of their own")),
        ("reference", {"original_lm_head": True}, ("share an lm_head", "3 of their own")),
        ("vllm", {"truncated_vocab_size": 96}, ("truncated_vocab_size 96 of 320", "token_map [96]", "found none")),
        (
            "vllm_map",
            {"truncated_vocab_size": 97},
            ("truncated_vocab_size 97 of a vocabulary of 320", "have 96 rows, which is neither", "correct"),
        ),
        ("vllm_map_whole", {"truncated_vocab_size": 97}, ("token_map [97]", "found I64 [96]")),
        ("vllm_map_whole", {"truncated_vocab_size": None}, ("there is a token_map [96]", "is None of 320")),
        ("vllm_map_whole", {"truncated_vocab_size": VOCAB}, ("there is a token_map [96]", "is 320 of 320")),
        ("reference", {"medusa_num_heads": "3"}, ("medusa_num_heads must be a non-negative integer",)),
    ],
)
def test_a_config_that_contradicts(
    variant: str, keys: dict[str, Any], texts: tuple[str, ...], target: ModelConfig, tmp_path: Path
) -> None:
    refused(write_medusa(tmp_path / "heads", variant, keys=keys), target, CheckpointError, *texts)


@pytest.mark.parametrize(
    ("variant", "keys", "texts"),
    [
        ("reference", {"version": "3"}, ("version '3'",)),
        ("reference", {"architectures": ["LlamaForCausalLM"]}, ("architectures ['LlamaForCausalLM']",)),
        ("reference", {"medusa_choices": [[0]]}, ("key medusa_choices",)),
        ("vllm", {"logit_scale": 0.5}, ("key logit_scale = 0.5",)),
        ("reference", {"tiered_architecture": {"easy": 1}}, ("key tiered_architecture",)),
    ],
)
def test_what_is_not_implemented(
    variant: str, keys: dict[str, Any], texts: tuple[str, ...], target: ModelConfig, tmp_path: Path
) -> None:
    refused(write_medusa(tmp_path / "heads", variant, keys=keys), target, UnsupportedModelError, *texts)


def test_deep_heads_that_the_target_scores_are_not_implemented(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "heads", replace(VARIANTS["version2"], layers=2))
    refused(folder, target, UnsupportedModelError, "heads of 2 blocks that the target's lm_head scores")


def without(tensors: Tensors, name: str) -> Tensors:
    return {each: values for each, values in tensors.items() if each != name}


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [
        ("reference", "1.0.linear.bias", "[64]"),
        ("reference", "1.0.linear.weight", "[64, 64]"),
        ("reference", "0.1.weight", "[320, 64]"),
        ("version2", "2.0.linear.bias", "[64]"),
        ("deep", "1.1.linear.weight", "[64, 64]"),
        ("vllm", "blocks.0.layers.0.weight", "[64, 64]"),
        ("vllm", "lm_heads.2.weight", "[320, 64]"),
        ("vllm_bias", "blocks.1.layers.1.bias", "[64]"),
        ("vllm_one", "lm_heads.0.weight", "[320, 64]"),
    ],
)
def test_a_missing_tensor(variant: str, name: str, shape: str, target: ModelConfig, tmp_path: Path) -> None:
    tensors = without(medusa_tensors(VARIANTS[variant]), name)
    folder = write_medusa(tmp_path / "heads", variant, tensors=tensors)
    refused(folder, target, CheckpointError, f"has no tensor {name}, expected shape {shape}", str(folder))


def test_a_missing_head_is_not_skipped(target: ModelConfig, tmp_path: Path) -> None:
    """Heads 0 and 2: there are two, and the second is not called 1."""
    tensors = {name: each for name, each in medusa_tensors(VARIANTS["reference"]).items() if not name.startswith("1.")}
    folder = write_medusa(tmp_path / "heads", "reference", tensors=tensors, keys={"medusa_num_heads": 2})
    refused(folder, target, CheckpointError, "has no tensor 1.0.linear.weight")


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("reference", "0.1.bias"),
        ("reference", "0.2.weight"),
        ("reference", "sequential_head.0.linear.weight"),
        ("reference", "heads.0.0.linear.weight"),
        ("version2", "lm_head_norm.weight"),
        ("vllm", "blocks.0.layers.0.bias"),
        ("vllm", "lm_head.weight"),
        ("vllm_one", "lm_heads.1.weight"),
        ("vllm", "0.0.linear.weight"),
    ],
)
def test_an_extra_tensor(variant: str, name: str, target: ModelConfig, tmp_path: Path) -> None:
    tensors = {**medusa_tensors(VARIANTS[variant]), name: np.zeros((HIDDEN, HIDDEN), np.float32)}
    folder = write_medusa(tmp_path / "heads", variant, tensors=tensors)
    refused(folder, target, UnsupportedModelError, f"tensor {name} [64, 64] is not part of Medusa heads")


@pytest.mark.parametrize(
    ("variant", "name", "shape", "expected"),
    [
        ("reference", "1.0.linear.weight", (64, 32), "[64, 64]"),
        ("reference", "0.0.linear.weight", (64,), "[64, 64]"),
        ("reference", "0.0.linear.bias", (64, 1), "[64]"),
        ("reference", "1.1.weight", (319, 64), "[320, 64]"),
        ("vllm", "lm_heads.1.weight", (320, 65), "[320, 64]"),
        ("vllm_map", "lm_heads.2.weight", (320, 64), "[96, 64]"),
    ],
)
def test_a_misshapen_tensor(
    variant: str, name: str, shape: tuple[int, ...], expected: str, target: ModelConfig, tmp_path: Path
) -> None:
    tensors = {**medusa_tensors(VARIANTS[variant]), name: np.zeros(shape, np.float32)}
    folder = write_medusa(tmp_path / "heads", variant, tensors=tensors)
    texts = (VARIANTS[variant].file, f"tensor {name} has shape {list(shape)}, expected {expected}")
    refused(folder, target, CheckpointError, *texts)


@pytest.mark.parametrize("layout", ["reference", "vllm"])
def test_another_target(layout: str, target: ModelConfig, tmp_path: Path) -> None:
    """Both numbers are in the message."""
    wide = MedusaVariant(layout, biased=layout == "reference", hidden=128)
    texts = ("for a hidden size of 128, the target has 64",)
    refused(write_medusa(tmp_path / "wide", wide), target, UsageError, *texts)
    large = MedusaVariant(layout, biased=layout == "reference", vocab=400)
    texts = ("for a vocabulary of 400, the target has 320",)
    refused(write_medusa(tmp_path / "large", large), target, UsageError, *texts)


def test_another_target_of_heads_without_matrices(target: ModelConfig, tmp_path: Path) -> None:
    wide = replace(VARIANTS["version2"], hidden=32)
    refused(write_medusa(tmp_path / "wide", wide), target, UsageError, "hidden size of 32, the target has 64")
    keys = {"vocab_size": 400}
    folder = write_medusa(tmp_path / "large", "version2", keys=keys)
    refused(folder, target, UsageError, "vocabulary of 400, the target has 320")


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (np.arange(96) + 300, "from 300 to 395, expected 96 from 0 to 319"),
        (np.arange(96) - 1, "from -1 to 94, expected 96"),
        (np.arange(96) // 2, "48 different tokens from 0 to 47"),
        (np.arange(96).astype(np.float32), "found F32 [96]"),
        (np.arange(95), "found I64 [95]"),
        (np.arange(96).reshape(2, 48), "found I64 [2, 48]"),
    ],
)
def test_a_bad_token_map(ids: np.ndarray, text: str, target: ModelConfig, tmp_path: Path) -> None:
    tensors = {**medusa_tensors(VARIANTS["vllm_map"]), "token_map": ids}
    folder = write_medusa(tmp_path / "heads", "vllm_map", dtype="float32", tensors=tensors)
    refused(folder, target, CheckpointError, text)


def test_names_that_hold_no_heads(target: ModelConfig, tmp_path: Path) -> None:
    tensors = {"heads.0.0.linear.weight": np.zeros((64, 64), np.float32)}
    folder = write_medusa(tmp_path / "heads", "reference", tensors=tensors)
    refused(folder, target, UnsupportedModelError, "holds no Medusa heads", "heads.0.0.linear.weight")
    tensors = {f"{'9' * 5000}.0.linear.weight": np.zeros((1, 1), np.float32)}
    folder = write_medusa(tmp_path / "long", "reference", tensors=tensors)
    refused(folder, target, UnsupportedModelError, "holds no Medusa heads")


def test_names_with_and_without_the_prefix(target: ModelConfig, tmp_path: Path) -> None:
    tensors = medusa_tensors(VARIANTS["reference"])
    tensors["medusa_heads.0.1.weight"] = tensors["0.1.weight"] + 1
    refused(write_medusa(tmp_path / "heads", "reference", tensors=tensors), target, CheckpointError, "with and without")


def test_a_wrapped_onnx_folder_has_no_rows_for_heads(tmp_path: Path) -> None:
    for variant in ("reference", "vllm"):
        with pytest.raises(UnsupportedModelError, match="does not fit"):
            open_model_draft(str(write_medusa(tmp_path / variant, variant)))


def test_reading_straight(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "heads", "reference")
    assert is_medusa(folder)
    assert read_medusa(folder, target).config.heads == MedusaHeads(3, 1, True, "own")
