"""`oxidize export`: what it says, what it writes, and what every bad checkpoint or output folder answers."""

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxidize.runtime.manifest import load_manifest


@pytest.fixture
def source(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "source")


def _edit_config(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "source")


def test_the_whole_story(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = oxidize("export", checkpoint, "-o", out)
    assert (result.code, result.out) == (0, "")
    lines = result.err.splitlines()
    assert lines[0] == "tiny: llama, 2 layers, hidden 64, vocabulary 300, context 512"
    assert re.fullmatch(rf"int4, profile ort, about 0 MB -> {re.escape(str(out))}", lines[1])
    weights = [int(line.split()[1]) for line in lines[2:-3]]
    assert weights == sorted(set(weights)) and weights[-1] == 100
    assert all(re.fullmatch(r"weights \d+ %", line) for line in lines[2:-3])
    assert re.fullmatch(rf"wrote {re.escape(str(out))}: 0 MB in \d+\.\d s", lines[-3])
    assert re.fullmatch(r"perplexity [\d.]+, source [\d.]+ \([+-][\d.]+ %\), over 511 tokens", lines[-2])
    assert lines[-1] == f"next: oxidize run {out} 'Hello'"
    assert _left(tmp_path) == ["out"]
    assert load_manifest(out).precision == "int4"


def test_float32_is_its_own_reference(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    result = oxidize("export", checkpoint, "-o", tmp_path / "a", "--precision", "fp32")
    assert re.search(r"^perplexity [\d.]+ over 511 tokens \(float32: the source's own\)$", result.err, re.M)
    assert _left(tmp_path) == ["a"]


def test_the_perplexity_can_be_left_out(
    oxidize, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = oxidize("export", checkpoint, "-o", tmp_path / "a", "--no-eval")
    assert result.code == 0 and "\nperplexity" not in result.err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = oxidize("export", checkpoint, "-o", tmp_path / "b")
    assert result.code == 0
    assert "perplexity not measured: ONNX Runtime is not installed" in result.err
    monkeypatch.undo()
    result = oxidize("export", checkpoint, "-o", tmp_path / "c", "--context", 1)
    assert result.code == 0
    assert "perplexity not measured: perplexity needs a text of at least two tokens" in result.err


def test_a_source_too_large_to_measure_says_so(
    oxidize, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oxidize.cli import quality

    monkeypatch.setattr(quality, "_REFERENCE_LIMIT", 1.0)
    result = oxidize("export", checkpoint, "-o", tmp_path / "a")
    assert result.code == 0
    assert re.search(r"^perplexity [\d.]+ over 511 tokens; the source's was not measured: in float32", result.err, re.M)


def test_a_dry_run_writes_nothing(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    result = oxidize("export", checkpoint, "-o", tmp_path / "deep" / "out", "--dry-run", "--profile", "std")
    assert (result.code, result.out) == (0, "")
    assert result.err.splitlines() == [
        "tiny: llama, 2 layers, hidden 64, vocabulary 300, context 512",
        f"int4, profile std, about 0 MB -> {tmp_path / 'deep' / 'out'}",
    ]
    assert not _left(tmp_path)


def test_options_reach_the_bundle(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--precision", "fp16", "--profile", "std", "--profile", "ort", "--context", 100, "--no-eval"]
    assert oxidize("export", checkpoint, "-o", out, *arguments).code == 0
    manifest = load_manifest(out)
    assert manifest.precision == "fp16" and manifest.model.max_positions == 100
    assert {graph.profile for graph in manifest.graphs} == {"std", "ort"}
    assert manifest.provenance.source == "tiny" and "config.json" in manifest.provenance.files


def test_drafts_are_named_after_their_source(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(checkpoint, tmp_path / "source" / "Small-0.5B")
    arguments = ["--draft-model", draft, "--draft-model", checkpoint, "--no-eval"]
    result = oxidize("export", checkpoint, "-o", tmp_path / "out", *arguments)
    assert result.code == 0 and result.err.count("weights 100 %") == 3
    manifest = load_manifest(tmp_path / "out")
    assert [entry.name for entry in manifest.drafts] == ["Small-0.5B", "tiny"]
    inspected = oxidize("inspect", tmp_path / "out").out
    assert "drafts     Small-0.5B (model), tiny (model)\n" in inspected
    for name, used in (("Small-0.5B", "Small-0.5B"), ("auto", "ngram+Small-0.5B")):
        answer = oxidize("run", tmp_path / "out", "hello", "-n", 6, "--draft-model", name, "--json")
        assert json.loads(answer.out)["stats"]["drafter"] == used


def test_a_gguf_draft_loses_its_suffix(oxidize, tmp_path: Path) -> None:
    from checkpoints import VARIANTS, write_gguf_checkpoint

    (tmp_path / "source").mkdir()
    target, draft = (tmp_path / "source" / name for name in ("big.gguf", "v1.5-small.gguf"))
    for path in (target, draft):
        write_gguf_checkpoint(path, VARIANTS["llama2"])
    result = oxidize("export", target, "-o", tmp_path / "out", "--draft-model", draft, "--no-eval")
    assert result.code == 0, result.err
    assert [entry.name for entry in load_manifest(tmp_path / "out").drafts] == ["v1.5-small"]


def test_two_drafts_of_one_name(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    drafts = [shutil.copytree(checkpoint, tmp_path / "source" / owner / "ngram") for owner in ("ours", "theirs")]
    export = ("export", checkpoint, "-o", tmp_path / "out", "--dry-run")
    oxidize(*export, "--draft-model", drafts[0]).assert_error(2, "the draft name 'ngram' is taken", "rename")
    shutil.move(drafts[1], tmp_path / "source" / "ours-ngram")
    arguments = [drafts[0], tmp_path / "source" / "ours-ngram", shutil.copytree(checkpoint, drafts[1])]
    result = oxidize(*export, *(word for draft in arguments for word in ("--draft-model", draft)))
    result.assert_error(2, "the draft name 'ours-ngram' is taken", "rename")


def test_a_draft_with_another_vocabulary(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(checkpoint, tmp_path / "source")
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_stop|>"))
    result = oxidize("export", checkpoint, "-o", tmp_path / "out", "--draft-model", draft)
    assert result.code == 2
    sizes = r"\(300 tokens, [0-9a-f]{8}\) than the target \(300 tokens, [0-9a-f]{8}\); "
    assert re.match(f"error: draft source has another vocabulary {sizes}", result.err.splitlines()[-1])
    assert "weights" not in result.err, "refused before the long work"
    assert not _left(tmp_path)


def test_drafts_of_one_name_are_told_apart_by_their_folders(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    drafts = [shutil.copytree(checkpoint, tmp_path / "source" / owner / "small") for owner in ("ours", "theirs")]
    arguments = [word for draft in [*drafts, checkpoint] for word in ("--draft-model", draft)]
    assert oxidize("export", checkpoint, "-o", tmp_path / "out", *arguments, "--no-eval").code == 0
    assert [draft.name for draft in load_manifest(tmp_path / "out").drafts] == ["ours-small", "theirs-small", "tiny"]


def test_a_bundle_is_a_draft_model_as_it_is(oxidize, bundle, checkpoint: Path, tmp_path: Path) -> None:
    result = oxidize("export", checkpoint, "-o", tmp_path / "out", "--draft-model", bundle, "--no-eval")
    assert result.code == 0
    assert "draft bundle: a model, 2 layers, fp32 as it is\n" in result.err
    answer = oxidize("run", tmp_path / "out", "hello", "-n", 6, "--draft-model", "bundle", "--json")
    assert json.loads(answer.out)["stats"]["drafter"] == "bundle"
    (bundle.folder / "weights.bin").write_bytes(bytes((bundle.folder / "weights.bin").stat().st_size))
    result = oxidize("export", checkpoint, "-o", tmp_path / "other", "--draft-model", bundle, "--no-eval")
    assert result.code == 4 and "weights.bin has sha256" in result.err
    bundle.edit(lambda raw: raw["tokenizer"].update(vocab_sha256="0" * 64))
    result = oxidize("export", checkpoint, "-o", tmp_path / "other", "--draft-model", bundle, "--no-eval")
    assert result.code == 2 and "another vocabulary (300 tokens, 00000000)" in result.err
    digest = load_manifest(tmp_path / "out").tokenizer.vocab_sha256
    assert f"than the target (300 tokens, {digest[:8]}); a draft model needs the target's tokenizer" in result.err
    add = ("export", tmp_path / "out", "--draft-model", shutil.copytree(bundle.folder, tmp_path / "source" / "wrong"))
    for more in ([], ["--dry-run"]):
        oxidize(*add, *more).assert_error(
            2, f"draft wrong has another vocabulary (300 tokens, 00000000) than the target (300 tokens, {digest[:8]})"
        )
    assert _left(tmp_path) == ["bundle", "out"]


def test_a_draft_is_added_to_a_bundle(oxidize, bundle, checkpoint: Path, tmp_path: Path) -> None:
    """As precise as the bundle, unless an option says otherwise."""
    result = oxidize("export", bundle, "--draft-model", checkpoint)
    assert (result.code, result.out) == (0, "")
    lines = [line for line in result.err.splitlines() if not line.startswith("weights ")]
    assert lines[:3] == [
        "llama2-0: llama, 2 layers, hidden 64, vocabulary 300, context 512",
        f"fp32, drafts none -> {bundle}",
        "draft tiny: a model, 2 layers",
    ]
    assert re.fullmatch(rf"added 1 to {re.escape(str(bundle))}: 1 MB in \d+\.\d s", lines[3])
    assert lines[4:] == [f"next: oxidize run {bundle} 'Hello'"]
    arguments = ["--precision", "int4", "--head-bits", 4, "--context", 100]
    new = tmp_path / "new"
    result = oxidize("export", bundle, "-o", new, "--draft-model", bundle, *arguments)
    assert f"fp32, drafts tiny -> {new}" in result.err
    other = shutil.copytree(checkpoint, tmp_path / "source" / "other")
    assert oxidize("export", new, "--draft-model", other, *arguments).code == 0
    made = [(draft.name, load_manifest(new / draft.folder)) for draft in load_manifest(new).drafts]
    precisions = [(name, inner.precision) for name, inner in made]
    assert precisions == [
        ("tiny", "fp32"),
        ("bundle", "fp32"),
        ("other", "int4"),
    ]
    assert [inner.model.max_positions for _, inner in made] == [512, 512, 100]


def test_a_dry_run_adds_nothing(oxidize, bundle, checkpoint: Path) -> None:
    before = (bundle.folder / "manifest.json").read_bytes()
    result = oxidize("export", bundle, "--draft-model", checkpoint, "--dry-run")
    assert result.code == 0 and result.err.splitlines()[-1] == "draft tiny: a model, 2 layers"
    assert (bundle.folder / "manifest.json").read_bytes() == before
    assert not (bundle.folder / "drafts").exists()


def test_what_cannot_be_added(oxidize, bundle, checkpoint: Path, tmp_path: Path) -> None:
    """Refused in one line, and the bundle stays as it was."""
    from draft_checkpoints_dflash import write_dflash

    assert oxidize("export", bundle, "--draft-model", checkpoint).code == 0
    before = {path: path.read_bytes() for path in bundle.folder.rglob("*") if path.is_file()}
    draft = shutil.copytree(checkpoint, tmp_path / "source" / "draft")
    add = ("export", bundle, "--draft-model")
    oxidize("export", bundle).assert_error(2, "is a bundle already", "--draft-model")
    oxidize(*add, checkpoint).assert_error(2, "already has a draft called 'tiny'", "rename")
    oxidize(*add, draft, "--draft-model", draft).assert_error(2, f"the draft {draft} is given twice")
    oxidize(*add, write_dflash(tmp_path / "source" / "dflash")).assert_error(2, "layers", "9", "2")
    oxidize(*add, tmp_path / "none").assert_error(1, "check the path")
    for option in (["--profile", "std"], ["--device", "cuda"], ["--revision", "main"]):
        oxidize(*add, draft, *option).assert_error(2, f"{option[0]} does not apply to {bundle}")
    (tmp_path / "file").write_text("mine")
    oxidize(*add, draft, "-o", tmp_path / "file").assert_error(2, "exists and is not a bundle")
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_stop|>"))
    result = oxidize(*add, draft)
    assert result.code == 2 and "draft draft has another vocabulary (300 tokens, " in result.err
    assert {path: path.read_bytes() for path in bundle.folder.rglob("*") if path.is_file()} == before
    assert _left(tmp_path) == ["bundle", "file"]


def test_what_lies_in_the_way_is_not_touched(oxidize, bundle, checkpoint: Path) -> None:
    place = bundle.folder / "drafts" / "tiny"
    place.mkdir(parents=True)
    (place / "mine").write_text("mine")
    result = oxidize("export", bundle, "--draft-model", checkpoint)
    assert result.code == 2 and "drafts/tiny is in the way" in result.err
    assert (place / "mine").read_text() == "mine"


def test_a_draft_in_other_numbers_than_the_bundle(oxidize, tmp_path: Path, tiny_bundle: Callable[..., Path]) -> None:
    from checkpoints import VARIANTS, write_hf_checkpoint
    from draft_checkpoints_dflash import write_dflash

    shape = {"num_hidden_layers": 9, "vocab_size": 320}
    target = write_hf_checkpoint(tmp_path / "source" / "target", {**VARIANTS["llama2"], **shape})
    draft = write_dflash(tmp_path / "source" / "dflash")
    out = tmp_path / "out"
    assert oxidize("export", target, "-o", out, "--precision", "fp32", "--no-eval").code == 0
    oxidize("export", out, "--draft-model", draft, "--precision", "fp16").assert_error(2, "float16", "float32")
    assert oxidize("export", out, "--draft-model", draft, "--precision", "int4").code == 0
    assert {graph.precision for graph in load_manifest(out).drafts[0].graphs} == {"int4"}


def test_damaged_bundles_are_not_extended(oxidize, bundle, checkpoint: Path) -> None:
    path = bundle.folder / "body.ort.onnx"
    path.write_bytes(bytes(path.stat().st_size))
    oxidize("export", bundle, "--draft-model", checkpoint).assert_error(4, "body.ort.onnx has sha256")
    (bundle.folder / "manifest.json").write_text("{}")
    oxidize("export", bundle, "--draft-model", checkpoint).assert_error(4, "schema_version")


KILLED = """
import os, pathlib
replace, left = pathlib.Path.replace, [POINT]
def killed(*arguments):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), 9)
    return replace(*arguments)
pathlib.Path.replace = killed
"""


@pytest.mark.parametrize("point", [1, 2])
def test_a_killed_extension_leaves_the_old_bundle(
    oxidize, child, bundle, checkpoint: Path, tmp_path: Path, point: int
) -> None:
    """Before the draft is moved in, and between that and the manifest."""
    before = (bundle.folder / "manifest.json").read_bytes()
    process = child(KILLED.replace("POINT", str(point)), "export", bundle, "--draft-model", checkpoint)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert (bundle.folder / "manifest.json").read_bytes() == before
    assert oxidize("inspect", bundle).code == 0
    assert (bundle.folder / "drafts/tiny").exists() == (point == 2)
    assert (bundle.folder / f".manifest.json.partial-{process.pid}").is_dir()
    again = oxidize("export", bundle, "--draft-model", checkpoint)
    assert again.code == (2 if point == 2 else 0), again
    other = shutil.copytree(checkpoint, tmp_path / "source" / "other")
    assert oxidize("export", bundle, "--draft-model", other).code == 0
    assert not [name for name in _left(bundle.folder) if "partial" in name]


def _truncate(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _truncate_header(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def _huge_header(source: Path) -> None:
    (source / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def _lose_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()


def _lose_config(source: Path) -> None:
    (source / "config.json").unlink()


def _break_config(source: Path) -> None:
    (source / "config.json").write_text("{")


def _lose_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").unlink()


def _break_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")


def _drop_tensor(source: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")


def _add_tensor(source: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros((4, 64), np.float32)
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, ["model.safetensors"]),
        (_truncate_header, ["model.safetensors"]),
        (_huge_header, ["model.safetensors"]),
        (_lose_weights, ["safetensors"]),
        (_lose_config, ["config.json"]),
        (_break_config, ["config.json"]),
        (_lose_tokenizer, ["tokenizer"]),
        (_break_tokenizer, ["tokenizer.json", "is not a tokenizer"]),
        (_drop_tensor, ["model.layers.1.mlp.up_proj.weight"]),
        (_add_tensor, ["model.layers.0.mlp.gate.weight"]),
        (lambda source: _edit_config(source, model_type="falcon"), ["falcon"]),
        (lambda source: _edit_config(source, final_logit_scale=2.0), ["final_logit_scale"]),
        (lambda source: _edit_config(source, hidden_act="relu"), ["relu"]),
        (lambda source: _edit_config(source, rope_scaling={"rope_type": "odd", "factor": 2.0}), ["odd"]),
        (lambda source: _edit_config(source, hidden_size=96), ["64", "96"]),
        (lambda source: _edit_config(source, num_hidden_layers="two"), ["num_hidden_layers"]),
        (lambda source: _edit_config(source, vocab_size=200), ["200"]),
    ],
)
def test_bad_checkpoints(
    oxidize, source: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(source)
    result = oxidize("export", source, "-o", tmp_path / "out")
    last = result.err.splitlines()[-1]
    assert result.code == 1 and result.out == "" and last.startswith("error: "), result
    assert "Traceback" not in result.err
    for word in words:
        assert word in last
    assert not _left(tmp_path)


def test_a_missing_shard(oxidize, tmp_path: Path) -> None:
    from checkpoints import VARIANTS, write_hf_checkpoint

    source = write_hf_checkpoint(tmp_path / "source", VARIANTS["llama2"], shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    result = oxidize("export", source, "-o", tmp_path / "out")
    result.assert_error(1, "model-00002-of-00003.safetensors")
    assert not _left(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGML" + bytes(100), b"GGUF", b"GGUF" + b"\xff" * 40, bytes(5000)])
def test_gguf_files_that_are_none(oxidize, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "source" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(content)
    oxidize("export", path, "-o", tmp_path / "out").assert_error(1, "model.gguf")
    assert not _left(tmp_path)


def test_sources_that_do_not_exist(oxidize, tmp_path: Path) -> None:
    oxidize("export", tmp_path / "none", "-o", tmp_path / "out").assert_error(1, "check the path")
    oxidize("export", "model.gguf", "-o", tmp_path / "out").assert_error(1, "check the path")
    oxidize("export", tmp_path, "-o", tmp_path / "out").assert_error(1, "not a checkpoint")
    assert not _left(tmp_path)


def test_what_is_there_is_not_overwritten(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for name in ("file", "folder"):
        for force in ([], ["--force"]):
            oxidize("export", checkpoint, "-o", tmp_path / name, *force).assert_error(
                2, "exists and is not a bundle; nothing was written", "choose another -o"
            )
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "file").read_text() == "mine"


def test_a_bundle_is_replaced_only_by_force(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert oxidize("export", checkpoint, "-o", out, "--no-eval").code == 0
    before = (out / "manifest.json").read_bytes()
    for more in ([], ["--dry-run"]):
        oxidize("export", checkpoint, "-o", out, "--precision", "fp32", *more).assert_error(
            2, "already holds a bundle; nothing was written", "--force"
        )
    assert (out / "manifest.json").read_bytes() == before
    (out / "notes.txt").write_text("mine")
    oxidize("export", checkpoint, "-o", out, "--force").assert_error(2, "notes.txt is no part of the bundle")
    (out / "notes.txt").unlink()
    assert oxidize("export", checkpoint, "-o", out, "--precision", "fp32", "--force", "--no-eval").code == 0
    assert load_manifest(out).precision == "fp32"
    assert _left(tmp_path) == ["out"]


def test_a_folder_that_cannot_be_written(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = oxidize("export", checkpoint, "-o", tmp_path / "file" / "out")
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert re.match(r"error: (cannot write|the bundle needs)", last) and str(tmp_path / "file") in last
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk(oxidize, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own answer, from /dev/full."""
    from oxidize.export import store

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    original = store.TensorStore.__init__

    def init(self: Any, path: Path) -> None:
        original(self, path)
        self._stream.close()
        self._stream = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    monkeypatch.setattr(store.TensorStore, "__init__", init)
    result = oxidize("export", checkpoint, "-o", tmp_path / "out")
    assert result.code == 1
    assert re.fullmatch(
        r"error: the disk of .*/out is full; nothing was kept, free some space", result.err.splitlines()[-1]
    )
    assert not _left(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "int3"], ["'int3' is not one of 'fp32', 'fp16', 'int4'"]),
        (["--profile", "fast"], ["'fast' is not one of"]),
        (["--context", "0"], ["'--context'"]),
        (["--head-bits", "5"], ["'5' is not one of"]),
    ],
)
def test_wrong_options(oxidize, checkpoint: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    result = oxidize("export", checkpoint, "-o", tmp_path / "out", *arguments)
    result.assert_error(2, *words, "see `oxidize export --help`")
