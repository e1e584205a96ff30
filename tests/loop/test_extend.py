"""Drafts added to a bundle that exists: it becomes what exporting them together would have made, or stays as it was."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from checkpoints import VARIANTS, write_gguf_checkpoint, write_hf_checkpoint
from draft_checkpoints_dflash import DFLASH2, write_dflash
from draft_checkpoints_dflash import VARIANTS as DFLASH
from draft_checkpoints_dspark import write_dspark
from draft_checkpoints_eagle import write_eagle
from draft_checkpoints_medusa import write_medusa
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint
from genai_folders import write_genai_folder

from oxidize.cli.main import run
from oxidize.export import extend
from oxidize.runtime.bundle import check_hashes, open_bundle
from oxidize.runtime.contracts import TensorSpec
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.manifest import GraphEntry, Manifest, load_manifest
from oxidize.runtime.request import Request
from oxidize.runtime.session import RuntimeOptions

LAYERS = 9  # of the target that the drafts' writers have in mind, with a width of 64 and 320 rows of logits
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"
BOTH = ("--profile", "ort", "--profile", "std")
FIRST_AND_LAST = {**DFLASH["qwen3"], "dflash_config": {"mask_token_id": 310, "target_layer_ids": [0, 2, LAYERS - 1]}}


FIRST, SECOND = ("wide", "small"), ("dflash", "dflash2", "dspark", "eagle", "medusa")


def given(drafts: Path, names: tuple[str, ...]) -> list[object]:
    """The options that name these drafts."""
    return [word for name in names for word in ("--draft-model", drafts / name)]


def target(folder: Path, variant: str = "qwen3") -> Path:
    shape = {"num_hidden_layers": LAYERS, "vocab_size": 320, "head_dim": 16}
    windows = {"max_window_layers": LAYERS} if variant.startswith("qwen") else {}
    return write_hf_checkpoint(folder, {**VARIANTS[variant], **shape, **windows})


def export(*arguments: object, code: int = 0) -> None:
    assert run(["export", *map(str, arguments)]) == code


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder, None for the latter."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def check(folder: Path) -> Manifest:
    """Hashes and facts; nothing lies in the folder that is not listed."""
    bundle = open_bundle(folder)
    check_hashes(bundle, cache=None)
    files = {name for name, content in contents(folder).items() if content is not None}
    assert files == {*bundle.manifest.files, "manifest.json"}
    return bundle.manifest


def greedy(bundle: Path, draft: str, k: int = 0) -> str:
    engine = Engine.open(bundle, EngineOptions(RuntimeOptions(threads=1), draft=draft, exact=True))
    request = Request(SpeculativeConfig(k, 24, 0.0, strict_mode=True, adaptive=False))
    text = "".join(delta.text for delta in engine.stream(engine.encode(PROMPT), request))
    assert (engine.stats.draft_tokens > 0) == (k > 0)
    return text


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of drafts: small is a model, medusa reads no taps, wide taps 0, 2, 8, the others 1, 3, 4, 6."""
    root = tmp_path_factory.mktemp("drafts")
    write_dflash(root / "wide", FIRST_AND_LAST)
    write_dflash(root / "dflash", "qwen3", seed=1)
    write_dflash(root / "dflash2", DFLASH2)
    write_dspark(root / "dspark")
    write_eagle(root / "eagle", "specforge")
    write_medusa(root / "medusa", "reference")
    write_hf_checkpoint(root / "small", {**VARIANTS["llama2"], "vocab_size": 320}, seed=5)
    return root


CASES = [("llama2", "fp32"), ("llama2", "fp16"), ("qwen3", "int4"), ("gemma3", "int4")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def family(request: pytest.FixtureRequest, drafts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of one target: `plain`, `once` with some drafts, `twice` with more."""
    variant, precision = request.param
    root = tmp_path_factory.mktemp("family")
    source = target(root / "target", variant)
    arguments = (source, "--precision", precision, *BOTH, "--no-eval")
    export(*arguments, "-o", root / "plain")
    export(*arguments, "-o", root / "once", *given(drafts, FIRST))
    export(*arguments, "-o", root / "twice", *given(drafts, FIRST + SECOND))
    return root


def test_extending_is_exporting_together(family: Path, drafts: Path, tmp_path: Path) -> None:
    """Byte for byte: graphs, weights, drafts and manifest; also where taps are there already."""
    before = contents(family / "plain")
    export(family / "plain", "-o", tmp_path / "once", *given(drafts, FIRST))
    assert contents(tmp_path / "once") == contents(family / "once")
    export(tmp_path / "once", "-o", tmp_path / "twice", *given(drafts, SECOND))
    assert contents(tmp_path / "twice") == contents(family / "twice")
    assert contents(tmp_path / "once") == contents(family / "once")
    assert contents(family / "plain") == before


def test_half_activations_are_those_of_the_bundle(drafts: Path, tmp_path: Path) -> None:
    arguments = (target(tmp_path / "target"), "--device", "cuda", "--no-eval")
    export(*arguments, "-o", tmp_path / "plain")
    export(*arguments, "-o", tmp_path / "together", *given(drafts, ("small", "dflash")))
    export(tmp_path / "plain", "-o", tmp_path / "extended", *given(drafts, ("small", "dflash")))
    assert contents(tmp_path / "extended") == contents(tmp_path / "together")


def test_extending_in_place(family: Path, drafts: Path, tmp_path: Path) -> None:
    """Only names differ from what exporting together makes: those of bodies that were there under the plain one."""
    bundle = shutil.copytree(family / "plain", tmp_path / "bundle")
    export(bundle, *given(drafts, FIRST))
    assert_same(bundle, family / "once")
    assert {graph.file for graph in load_manifest(bundle).graphs if graph.role == "body"} <= {
        "body.ort.2.onnx",
        "body.std.2.onnx",
        "body.ort.ragged.2.onnx",
    }
    export(bundle, "-o", bundle, *given(drafts, SECOND))
    assert_same(bundle, family / "twice")
    assert (bundle / "body.ort.onnx").is_file()  # the name was free again


def assert_same(bundle: Path, expected: Path) -> None:
    ours, theirs = check(bundle), check(expected)
    names = {graph.file: other.file for graph, other in zip(ours.graphs, theirs.graphs, strict=True)}
    assert {names.get(name, name): entry for name, entry in ours.files.items()} == theirs.files
    assert (ours.taps, ours.drafts) == (theirs.taps, theirs.drafts)


def test_graphs_give_the_same_bits(family: Path, drafts: Path, tmp_path: Path) -> None:
    """Hidden states are those of the plain bodies; taps those of bodies exported with them."""
    bundle = shutil.copytree(family / "plain", tmp_path / "bundle")
    export(bundle, "--draft-model", drafts / "wide")
    plain, ours, theirs = (load_manifest(folder).graphs for folder in (family / "plain", bundle, family / "once"))
    bodies = 0
    for before, mine, other in zip(plain, ours, theirs, strict=True):
        if mine.role != "body":
            continue
        found = outputs(bundle, mine)
        assert found["taps"].shape == (1, 3, 3 * 64) and np.unique(found["taps"]).size > 500
        for expected in (outputs(family / "plain", before), outputs(family / "once", other)):
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values, name)
        bodies += 1
    assert bodies >= 2


def outputs(folder: Path, graph: GraphEntry) -> dict[str, Any]:
    """What a body makes of three rows, the outputs by name."""
    rows, capacity = 3, 16
    sizes = {"B": 1, "S": rows, "C": capacity}
    known = {
        "seqlens_k": np.array([rows - 1], np.int32),
        "total_sequence_length": np.array(rows, np.int32),
        "query_seqlens": np.array([rows], np.int32),
        "position_ids": np.arange(rows)[None],
        "write_indices": np.zeros(1, np.int64),
        "attn_mask": np.tri(rows, capacity, dtype=bool)[None, None],
    }
    known["attn_mask_sliding"] = known["attn_mask"]

    def feed(spec: TensorSpec) -> np.ndarray:
        if spec.name in known:
            return known[spec.name]
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        values = np.random.default_rng(0).normal(0, 1, shape) if spec.name == "inputs_embeds" else np.zeros(shape)
        return values.astype(spec.dtype)

    session = onnxruntime.InferenceSession(folder / graph.file, providers=["CPUExecutionProvider"])
    names = [spec.name for spec in graph.contract.outputs]
    feeds = {spec.name: feed(spec) for spec in graph.contract.inputs}
    return dict(zip(names, session.run(names, feeds), strict=True))


GROWN = ("dflash", "small", "medusa", "eagle", "dspark", "dflash2", "file", "nested")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is only read."""
    root = tmp_path_factory.mktemp("plain")
    export(target(root / "target"), "-o", root / "bundle", "--precision", "fp32", "--no-eval")
    return root / "bundle"


@pytest.fixture(scope="module")
def grown(plain: Path, drafts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that got one draft of each kind, one at a time."""
    root = tmp_path_factory.mktemp("grown")
    bundle, small = shutil.copytree(plain, root / "bundle"), {**VARIANTS["llama2"], "vocab_size": 320}
    write_gguf_checkpoint(root / "file.gguf", small, seed=6)
    itself = ("--draft-model", drafts / "small")
    export(drafts / "small", "-o", root / "nested", "--precision", "fp32", "--no-eval", *itself)
    for draft in (*(drafts / name for name in GROWN[:6]), root / "file.gguf", root / "nested"):
        export(bundle, "--draft-model", draft)
        check(bundle)
    return bundle


@pytest.mark.parametrize("draft", GROWN)
def test_every_kind_runs(grown: Path, draft: str) -> None:
    plain = greedy(grown, "none")
    assert all(greedy(grown, draft, k) == plain for k in (1, 3, 5))


def test_inspect_shows_them(grown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(grown)]) == 0
    shown = capsys.readouterr().out
    for name in GROWN:
        assert f"draft      {name}: " in shown
    assert "taps       1, 3, 4, 6\n" in shown


def test_a_bundle_inside_comes_without_its_own_drafts(grown: Path) -> None:
    inner = load_manifest(grown / "drafts/nested")
    assert not inner.drafts
    assert not any(name.startswith("drafts/") for name in inner.files)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_the_mtp_head_of_the_bundles_own_checkpoint(precision: str, tmp_path: Path) -> None:
    source = write_mtp_checkpoint(tmp_path / "target", "qwen3", head_weights("qwen3", "mtp"))
    arguments = (source, "--precision", precision, "--no-eval")
    export(*arguments, "-o", tmp_path / "bundle", "--no-mtp")
    export(*arguments, "-o", tmp_path / "together")
    export(tmp_path / "bundle", "--draft-model", source)
    assert contents(tmp_path / "bundle") == contents(tmp_path / "together")
    assert greedy(tmp_path / "bundle", "mtp", 3) == greedy(tmp_path / "bundle", "none")


def test_the_mtp_head_of_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same shape: refused, or a draft model if that is meant. Of another shape: a draft model."""
    source = write_mtp_checkpoint(tmp_path / "target", "qwen3", head_weights("qwen3", "mtp"))
    other = write_mtp_checkpoint(tmp_path / "other", "qwen3", head_weights("qwen3", "mtp"), seed=1)
    smaller = write_mtp_checkpoint(tmp_path / "smaller", "qwen2", head_weights("qwen2", "mtp", gated=False))
    bundle = tmp_path / "bundle"
    export(source, "-o", bundle, "--precision", "fp32", "--no-eval")
    capsys.readouterr()
    export(bundle, "--draft-model", other, code=2)
    assert "model.safetensors is not the file that" in capsys.readouterr().err
    export(bundle, "--draft-model", other, "--draft-model", smaller, "--no-mtp")
    export(bundle, "-o", tmp_path / "new", "--draft-model", source, code=2)
    assert "already has a draft called 'mtp'" in capsys.readouterr().err
    assert [draft.name for draft in check(bundle).drafts] == ["mtp", "other", "smaller"]
    assert greedy(bundle, "other", 3) == greedy(bundle, "none")


def test_a_new_bundle_shares_the_weights_and_outlives_the_old_one(
    drafts: Path, tmp_path: Path, tiny_bundle: Callable[..., Path]
) -> None:
    old = shutil.copytree(tiny_bundle("padded_vocab"), tmp_path / "old")
    export(old, "-o", tmp_path / "new", "--draft-model", drafts / "small")
    assert (old / "weights.bin").samefile(tmp_path / "new/weights.bin")
    shutil.rmtree(old)
    check(tmp_path / "new")
    assert greedy(tmp_path / "new", "small", 3) == greedy(tmp_path / "new", "none")


def test_where_nothing_can_be_shared_it_is_copied(
    drafts: Path, tmp_path: Path, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "other disk")

    monkeypatch.setattr(os, "link", refuse)
    old = tiny_bundle("padded_vocab")
    export(old, "-o", tmp_path / "new", "--draft-model", drafts / "small")
    check(tmp_path / "new")
    assert not (old / "weights.bin").samefile(tmp_path / "new/weights.bin")


def test_wrapped_graphs_take_draft_models_alone(
    drafts: Path, tmp_path: Path, tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_genai_folder(tiny_bundle("padded_vocab"), tmp_path / "source")
    export(source, "-o", tmp_path / "bundle")
    capsys.readouterr()
    for draft in ("dflash", "eagle"):
        export(tmp_path / "bundle", "--draft-model", drafts / draft, code=1)
        assert "gives no taps" in capsys.readouterr().err
    export(tmp_path / "bundle", "--draft-model", drafts / "small")
    assert check(tmp_path / "bundle").drafts[0].graphs == ()
    assert greedy(tmp_path / "bundle", "small", 3) == greedy(tmp_path / "bundle", "none")


@pytest.mark.parametrize("other", ["small", "dflash"])
def test_two_at_a_time(
    plain: Path, drafts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    """The one that comes last does not undo what the other has added, even where both write bodies."""
    bundle, write, busy = shutil.copytree(plain, tmp_path / "bundle"), extend.write_draft, []

    def write_slowly(*arguments: Any) -> Any:
        if not busy:
            busy.append(other)
            patch.setattr(os, "getpid", lambda: 1)
            export(bundle, "--draft-model", drafts / other)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend, "write_draft", write_slowly)
        export(bundle, "--draft-model", drafts / "eagle", code=2)
    assert "was changed by somebody else meanwhile" in capsys.readouterr().err
    assert [draft.name for draft in check(bundle).drafts] == [other]


def test_a_link_to_a_bundle_stays_one(plain: Path, drafts: Path, tmp_path: Path) -> None:
    bundle, link = shutil.copytree(plain, tmp_path / "bundle"), tmp_path / "link"
    link.symlink_to(bundle)
    folder = bundle.stat().st_ino
    export(link, "-o", bundle, "--draft-model", drafts / "small")
    assert link.is_symlink() and bundle.stat().st_ino == folder
    assert [draft.name for draft in check(bundle).drafts] == ["small"]


CHANGING = (
    *((Path, name) for name in ("replace", "mkdir", "write_text", "write_bytes")),
    (os, "fsync"),
    (extend, "share"),
)


class Interruption:
    """Raises at the n-th call that changes something on the disk, before it or after it."""

    def __init__(self, patch: pytest.MonkeyPatch, point: int, after: bool, error: BaseException) -> None:
        self.calls, self.point, self._after, self._error = 0, point, after, error
        for owner, name in CHANGING:
            patch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            due = self.calls == self.point
            if due and not self._after:
                raise self._error
            result = original(*arguments, **options)
            if due:
                raise self._error
            return result

        return call


@pytest.mark.parametrize("where", ["inside", "beside"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["interrupt", "full"])
def test_an_interrupted_extension_leaves_a_whole_bundle(
    plain: Path, drafts: Path, tmp_path: Path, where: str, after: bool, error: BaseException
) -> None:
    """At every call that changes something on the disk: what is there is the old bundle or the new one."""
    bundle, new = shutil.copytree(plain, tmp_path / "bundle"), tmp_path / "new"
    before = contents(bundle)
    place = ("-o", new) if where == "beside" else ()
    points = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            interruption = Interruption(patch, points + 1, after, error)
            code = run(["export", *map(str, (bundle, *place, "--draft-model", drafts / "eagle"))])
        if interruption.calls < interruption.point:
            break
        points += 1
        assert code in (1, 130), points
        if where == "inside" and (bundle / "manifest.json").read_bytes() != before["manifest.json"]:
            assert after and [draft.name for draft in check_listed(bundle).drafts] == ["eagle"]
            shutil.rmtree(bundle)
            shutil.copytree(plain, bundle)
        assert contents(bundle) == before, points
        if new.exists():
            check(new)
            shutil.rmtree(new)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"], points
    assert code == 0 and points >= (10 if where == "inside" else 5)
    assert check(new if new.exists() else bundle).taps == (1, 4, 6)


def check_listed(folder: Path) -> Manifest:
    """Hashes and facts; the bodies that were there before may still lie around."""
    bundle = open_bundle(folder)
    check_hashes(bundle, cache=None)
    return bundle.manifest
