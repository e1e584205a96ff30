"""Safetensors are read exactly, lazily and strictly; damaged checkpoints are refused by name."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import VARIANTS, random_weights, write_gguf_checkpoint, write_hf_checkpoint
from safetensors.numpy import save_file

from oxidize.export import safetensors_source
from oxidize.export.safetensors_source import read_header
from oxidize.export.source import open_source
from oxidize.runtime.errors import CheckpointError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint(tmp_path_factory.mktemp("sharded") / "llama2", "llama2", seed=3, shards=3)


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "copy")


def raw_safetensors(path: Path, header: Any, data: bytes) -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_exactly(tmp_path, dtype, shards):
    source = open_source(str(write_hf_checkpoint(tmp_path / "model", "qwen2", 5, dtype, shards)))
    expected = random_weights("qwen2", seed=5)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert sorted(source.weights.names()) == sorted(source.weights.unread()) == sorted(expected)
    for name, values in expected.items():
        assert source.weights.shape(name) == values.shape
        got = source.weights.read(name, values.shape)
        assert got.dtype == np.float32 and got.flags.c_contiguous
        np.testing.assert_array_equal(got, values.astype(kind).astype(np.float32))
        assert source.weights.read_quantized(name) is None
    assert source.weights.unread() == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_checkpoints_are_what_transformers_expects(tmp_path, variant):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write_hf_checkpoint(tmp_path / variant, variant, seed=1, shards=2)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    source, state = open_source(str(folder)), model.state_dict()
    for name in source.weights.names():
        np.testing.assert_array_equal(source.weights.read(name, tuple(state[name].shape)), state[name].numpy())
    assert set(state) - set(source.weights.names()) <= {HEAD}


def test_a_checkpoint_says_where_it_came_from(sharded):
    source = open_source(str(sharded))
    assert (source.kind, source.name, source.revision, source.folder) == (
        "safetensors",
        "llama2",
        None,
        sharded,
    )
    assert source.generation.eos_token_ids == (2, 0) and source.gguf_metadata is None
    names = {path.name for path in source.files}
    assert {"config.json", "tokenizer.json", "model-00003-of-00003.safetensors"} <= names
    assert all(path.is_file() for path in source.files)


def test_a_wrong_shape_or_a_missing_tensor_is_named(sharded):
    weights = open_source(str(sharded)).weights
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[64\], the config asks for \[65\]"):
        weights.read("model.norm.weight", (65,))
    assert "model.norm.weight" in weights.unread()
    with pytest.raises(CheckpointError, match=r"llama2 has no tensor model.layers.9"):
        weights.shape("model.layers.9.mlp.up_proj.weight")


def test_reading_holds_one_tensor_and_a_bounded_piece(tmp_path):
    values = np.ones((4096, 4096), ml_dtypes.bfloat16)
    save_file({"w": values}, tmp_path / "model.safetensors")
    (stored,) = read_header(tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        loaded = stored.load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < loaded.nbytes + values.nbytes / 2
    assert loaded.min() == loaded.max() == 1.0


def _cut_shard(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _drop_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _edit_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit


def _repeat_shard(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")


def _only_pickles(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def _no_weights(folder: Path) -> None:
    _only_pickles(folder)
    (folder / "pytorch_model.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_cut_shard, "model-00002-of-00003.safetensors is truncated: tensor .* ends at byte"),
        (_drop_shard, "cannot read .*model-00002-of-00003.safetensors: No such file.*download it again"),
        (_repeat_shard, "tensor model.embed_tokens.weight occurs twice"),
        (_edit_index(lambda entries: entries.update(ghost=entries[EMBEDDING])), "lacks tensor ghost"),
        (_edit_index(lambda entries: entries.pop(EMBEDDING)), f"tensor {EMBEDDING} is in a shard but not in"),
        (
            _edit_index(lambda entries: entries.update(ghost="../model.safetensors")),
            "not a file of this folder",
        ),
        (_edit_index(lambda entries: entries.clear()), "lists no tensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "no readable weight_map"),
        (_only_pickles, "pickled weights only.*convert them to model.safetensors"),
        (_no_weights, "neither model.safetensors nor"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), "neither config.json nor a .gguf file"),
    ],
)
def test_damaged_folders_are_refused(copy, damage, named):
    damage(copy)
    with pytest.raises(CheckpointError, match=named) as caught:
        open_source(str(copy))
    assert "\n" not in str(caught.value)


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "named"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensor b overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "tensor b leaves a hole"),
        ({"a": entry(0, 8)}, 12, "4 bytes after the last tensor"),
        ({"a": entry(0, 8)}, 7, "truncated: tensor a"),
        ({"a": entry(0, 8, shape=(3,))}, 8, "tensor a .* does not fill"),
        ({"a": entry(0, 8, shape=(-2,))}, 8, "tensor a .* does not fill"),
        ({"a": entry(0, 8, dtype="F31")}, 8, "entry of tensor a is malformed"),
        ({"a": {"dtype": "F32"}}, 8, "entry of tensor a is malformed"),
        ({"a": 5}, 8, "entry of tensor a is malformed"),
        ([], 0, "not an object"),
        (b"{'a'", 0, "not valid JSON"),
        (b'{"a": {}, "a": {}}', 0, "a occurs twice in the header"),
    ],
)
def test_impossible_headers_are_refused(tmp_path, header, size, named):
    path = raw_safetensors(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=named):
        read_header(path)


def test_any_cut_or_flipped_byte_is_an_error_or_harmless(tmp_path):
    """No damage may end in another exception than ours, nor in a tensor that reaches outside the file."""
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    path = tmp_path / "model.safetensors"
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            read_header(path)
    noise = np.random.default_rng(0)
    for position in range(len(good)):
        path.write_bytes(good[:position] + noise.bytes(1) + good[position + 1 :])
        try:
            for stored in read_header(path):
                stored.load()
        except CheckpointError:
            pass


def test_a_dtype_that_is_no_weight_is_refused_when_read(tmp_path):
    path = raw_safetensors(tmp_path / "model.safetensors", {"ids": entry(0, 16, "I64")}, bytes(16))
    (stored,) = read_header(path)
    with pytest.raises(CheckpointError, match="tensor ids is I64"):
        stored.load()


def test_a_tied_head_may_be_stored_as_long_as_it_is_the_embedding(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_source, "_CHUNK", 1000)
    folder = write_hf_checkpoint(tmp_path / "tied", "smollm2", seed=1)
    weights = random_weights("smollm2", seed=1)
    head = weights[EMBEDDING].copy()
    save_file({**weights, HEAD: head}, folder / "model.safetensors")
    assert HEAD not in open_source(str(folder)).weights.names()
    head[0, 0] += 1
    save_file({**weights, HEAD: head}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings, but lm_head.weight differs"):
        open_source(str(folder))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_gemma(tmp_path, prefix):
    folder = write_hf_checkpoint(tmp_path / "gemma", "gemma3", seed=2)
    weights = random_weights("gemma3", seed=2)
    stored = {name.replace("model.", prefix, 1): values for name, values in weights.items()}
    vision = "model.vision_tower.patch" if prefix.startswith("model.") else "vision_tower.patch"
    extra = {vision: np.ones(3, np.float32), "adapter": np.ones(3, np.float32)}
    save_file({**stored, **extra}, folder / "model.safetensors")
    config = {"model_type": "gemma3", "text_config": VARIANTS["gemma3"], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    assert sorted(source.weights.names()) == sorted([*weights, "adapter"])
    assert source.config.architecture == "gemma3_text"


def test_buffers_of_old_checkpoints_are_left_out(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "old", "llama2", seed=1)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file({**random_weights("llama2", seed=1), **buffer}, folder / "model.safetensors")
    assert not set(buffer) & set(open_source(str(folder)).weights.names())


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no folder, no .gguf file and no hub name"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match=r"no folder, no .gguf file"):
        open_source("models/missing.gguf")


def test_a_file_that_goes_away_is_an_error(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "gone", "llama2", seed=1)
    weights = open_source(str(folder)).weights
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        weights.read("model.norm.weight", (64,))


def test_a_folder_with_config_and_gguf_is_read_from_the_gguf(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "both", "llama2", seed=1)
    write_gguf_checkpoint(folder / "model.gguf", "llama2", seed=1)
    assert open_source(str(folder)).kind == "safetensors"
    (folder / "model.safetensors").unlink()
    assert open_source(str(folder)).kind == "gguf"


def test_hub_names(sharded, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(sharded)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = open_source("some-org/model-1", offline=True, revision="main")
    assert (source.name, source.revision) == ("some-org/model-1", sharded.name)
    assert asked[0]["local_files_only"] is True and asked[0]["revision"] == "main"
    assert not any("bin" in pattern for pattern in asked[0]["allow_patterns"])

    def absent(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("not cached\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(CheckpointError, match="not in the local hub cache; drop --offline"):
        open_source("some-org/model-1", offline=True)

    def unreachable(name: str, **options: Any) -> str:
        raise ConnectionError("no route\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"cannot fetch some-org/model-1 from the hub \(no route\)"):
        open_source("some-org/model-1")
