"""What a checkpoint is, by its content: each format of drafts, drafts whose config hides it, and models."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VARIANTS, write_gguf_checkpoint, write_hf_checkpoint
from draft_checkpoints_dflash import DFLASH2, target_config, write_dflash, write_dflash_gguf, write_speculators
from draft_checkpoints_dflash import VARIANTS as DFLASH
from draft_checkpoints_dspark import write_dspark, write_dspark_gguf, write_dspark_speculators
from draft_checkpoints_eagle import EAGLE_VARIANTS, write_eagle, write_eagle_gguf
from draft_checkpoints_medusa import write_medusa
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint
from safetensors.numpy import load_file, save_file

from oxidize.export.drafts import recognise
from oxidize.export.drafts.base import DraftCheckpoint
from oxidize.export.drafts.recognise import DraftWishes, draft_kind, open_draft
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

_DFLASH, _EAGLE, _DSPARK = "a DFlash draft", "an EAGLE-3 draft", "a DSpark draft"
_MEDUSA = "a set of Medusa heads"
_TARGET = target_config()
_LLAMA: dict[str, Any] = EAGLE_VARIANTS["safeailab_full"].config  # nothing in it is of a draft
_WRITERS: dict[str, tuple[str | None, Callable[[Path], object]]] = {
    "dflash": (_DFLASH, write_dflash),
    "dflash2": ("a DFlash 2 draft", lambda path: write_dflash(path, DFLASH2)),
    "dflash_speculators": (_DFLASH, write_speculators),
    "dflash.gguf": (_DFLASH, write_dflash_gguf),
    "dspark": (_DSPARK, write_dspark),
    "dspark_speculators": (_DSPARK, write_dspark_speculators),
    "dspark.gguf": (_DSPARK, write_dspark_gguf),
    "eagle": (_EAGLE, lambda path: write_eagle(path, "specforge")),
    "eagle_full": (_EAGLE, lambda path: write_eagle(path, "safeailab_full")),
    "eagle_speculators": (_EAGLE, lambda path: write_eagle(path, "speculators")),
    "eagle.gguf": (_EAGLE, lambda path: write_eagle_gguf(path, "safeailab")),
    "medusa": (_MEDUSA, lambda path: write_medusa(path, "reference")),
    "medusa_vllm": (_MEDUSA, lambda path: write_medusa(path, "vllm")),
    "model": (None, lambda path: write_hf_checkpoint(path, VARIANTS["llama2"])),
    "model.gguf": (None, lambda path: write_gguf_checkpoint(path, VARIANTS["llama2"])),
    "model_mtp": (None, lambda path: write_mtp_checkpoint(path, "llama2", head_weights("llama2", "mtp"))),
    "model_nextn": (None, lambda path: write_mtp_checkpoint(path, "llama2", head_weights("llama2", "nextn"))),
    "nothing": (None, Path.mkdir),
}


@pytest.mark.parametrize("name", _WRITERS)
def test_each_format(name: str, tmp_path: Path) -> None:
    """A file is the same inside a folder, unless there are two."""
    kind, write = _WRITERS[name]
    write(tmp_path / name)
    assert draft_kind(tmp_path / name) == kind
    if name.endswith(".gguf"):
        assert draft_kind(tmp_path) == kind
        shutil.copy(tmp_path / name, tmp_path / "other.gguf")
        with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files"):
            draft_kind(tmp_path)


def _write(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        ({"midlayer.mlp.up_proj.weight": (96, 64)}, _EAGLE),
        ({"model.midlayer.mlp.up_proj.weight": (96, 64)}, _EAGLE),
        ({"layers.0.hidden_norm.weight": (64,)}, _EAGLE),
        ({"fc.weight": (64, 192)}, _EAGLE),
        ({"fc.weight": (64, 128), "layers.0.hidden_norm.weight": (64,)}, _EAGLE),
        ({"fc.weight": (64, 192), "hidden_norm.weight": (64,)}, _DFLASH),
        ({"fc.weight": (64, 128), "hidden_norm.weight": (64,)}, _DFLASH),
        ({"fc.weight": (64, 64)}, None),
        ({"fc.weight": (64,)}, None),
        ({"layers.1.hidden_norm.weight": (64,), "model.layers.0.mlp.up_proj.weight": (96, 64)}, None),
    ],
)
def test_by_tensors_alone(shapes: dict[str, tuple[int, ...]], kind: str | None, tmp_path: Path) -> None:
    assert draft_kind(_write(tmp_path / "draft", _LLAMA, shapes)) == kind


def test_shards_are_looked_into(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path / "draft", "safeailab_full")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert draft_kind(folder) == _EAGLE
    opened = open_draft(str(folder), _TARGET, DraftWishes())
    assert isinstance(opened, DraftCheckpoint) and opened.config.draft_vocab_size == 320
    (folder / "model-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors"):
        draft_kind(folder)


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({}, {"fc.weight": (64, 128), "layers.0.mlp.up_proj.weight": (96, 64)}),
        ({}, {"model.fc.weight": (64, 128), "fc.bias": (64,)}),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, {}),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {}),
        ({"architectures": ["LlamaForCausalLMEagle"]}, {}),
    ],
)
def test_older_eagle_drafts(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    folder = _write(tmp_path / "draft", {**_LLAMA, **config}, shapes)
    for ask in (draft_kind, lambda path: open_draft(str(path), _TARGET, DraftWishes())):
        with pytest.raises(UnsupportedModelError, match=r"draft is an EAGLE-1 or EAGLE-2 draft.*use an EAGLE-3 draft"):
            ask(folder)


@pytest.mark.parametrize("name", ["EagleVisionModel", "Eagle2_5_VLForConditionalGeneration", "Eagle3LlamaForCausalLM"])
def test_other_eagles(name: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", {**_LLAMA, "architectures": [name]}, {"a.weight": (1,)})
    assert draft_kind(folder) == (_EAGLE if "3" in name else None)


def test_an_unstated_dflash_draft_is_read_as_one(tmp_path: Path) -> None:
    """Its config is then asked for what it lacks."""
    kept = {key: value for key, value in DFLASH["qwen3"].items() if key not in ("architectures", "dflash_config")}
    folder = write_dflash(tmp_path / "draft")
    (folder / "config.json").write_text(json.dumps(kept))
    assert draft_kind(folder) == _DFLASH
    with pytest.raises(CheckpointError, match=r"mask_token_id|target_layer_ids"):
        open_draft(str(folder), _TARGET, DraftWishes())


def test_families_that_are_not_implemented(tmp_path: Path) -> None:
    folder = _write(tmp_path / "draft", {**_LLAMA, "speculators_model_type": "mlp"}, {})
    with pytest.raises(UnsupportedModelError, match="speculators_model_type 'mlp' is not implemented"):
        draft_kind(folder)


@pytest.mark.parametrize("medusa", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_a_model_with_heads_beside_it_is_a_model(medusa: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_hf_checkpoint(folder, VARIANTS["llama2"])
    (folder / medusa).write_bytes(b"")
    assert draft_kind(folder) is None
    (folder / "model.safetensors").unlink()
    assert draft_kind(folder) == _MEDUSA
    shutil.copy(folder / medusa, write_medusa(tmp_path / "heads", "vllm"))
    assert draft_kind(tmp_path / "heads") == _MEDUSA


def test_a_draft_of_the_hub_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_dflash(tmp_path / "c0ffee")
    monkeypatch.setattr(recognise, "locate", lambda source, offline: (folder, "c0ffee"))
    opened = open_draft("org/name", _TARGET, DraftWishes())
    assert isinstance(opened, DraftCheckpoint) and (opened.name, opened.revision) == ("org/name", "c0ffee")
