"""The manifest: what is read back is what was written, and nothing that was not meant is accepted."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oxidize.runtime.contracts import BodyShape, GraphContract, body_contract, embed_contract, head_contract
from oxidize.runtime.errors import BundleError
from oxidize.runtime.manifest import (
    DraftEntry,
    FileEntry,
    GenerationDefaults,
    GraphEntry,
    Manifest,
    ModelFacts,
    Provenance,
    TokenizerFiles,
    check_relative,
    load_manifest,
    parse_manifest,
    sha256_of,
    verify_hashes,
)

HIDDEN, VOCAB, LAYERS = 8, 20, 2


def _entry(contract: GraphContract, file: str, profile: str = "ort", ragged: bool = False) -> GraphEntry:
    return GraphEntry(contract.role, profile, ragged, file, ("w.bin",), 23, "fp32", "1.31", contract)


def _graphs(profile: str, **body: Any) -> tuple[GraphEntry, ...]:
    shape = BodyShape(HIDDEN, LAYERS, 1, 4, **body)
    dtype = shape.dtype
    return (
        _entry(embed_contract(HIDDEN, dtype), "embed.onnx", profile),
        _entry(body_contract(shape, profile), "body.onnx", profile),
        _entry(head_contract(HIDDEN, VOCAB, dtype), "head.onnx", profile),
    )


def _write(folder: Path, graphs: tuple[GraphEntry, ...] | None = None, **changes: Any) -> Manifest:
    """A bundle whose files hold their own names."""
    names = ["embed.onnx", "body.onnx", "head.onnx", "w.bin", "tokenizer.json", "drafts/d/manifest.json"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    fields: dict[str, Any] = {
        "schema_version": 1,
        "precision": "fp32",
        "provenance": Provenance("tool", "source", None, {"a.gguf": "00"}),
        "model": ModelFacts("llama", LAYERS, HIDDEN, 2, 1, 4, VOCAB, 19, 64, None, 10000.0),
        "tokenizer": TokenizerFiles("tokenizer.json", None, None, "</s>", "11"),
        "generation": GenerationDefaults((2,), temperature=0.5),
        "graphs": graphs or _graphs("ort"),
        "files": {n: FileEntry((folder / n).stat().st_size, sha256_of(folder / n)) for n in names},
        "drafts": (DraftEntry("d", "model", "drafts/d"),),
    }
    manifest = Manifest(**{**fields, **changes})
    (folder / "manifest.json").write_text(manifest.dumps(), encoding="utf-8")
    return manifest


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """A valid manifest, decoded."""
    return json.loads(_write(tmp_path).dumps())


def _change(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path replaced."""
    result = copy.deepcopy(raw)
    *parents, last = path.split(".")
    where: Any = result
    for part in parents:
        where = where[int(part) if isinstance(where, list) else part]
    where[int(last) if isinstance(where, list) else last] = value
    return result


@pytest.mark.parametrize(
    "graphs",
    [
        _graphs("ort"),
        _graphs("std"),
        _graphs("ort", dtype="float16"),
        (*_graphs("ort"), *_graphs("std")),
        (
            *_graphs("ort"),
            _entry(body_contract(BodyShape(HIDDEN, LAYERS, 1, 4), "ort", ragged=True), "body.onnx", ragged=True),
        ),
    ],
)
def test_what_was_written_is_read_back(tmp_path: Path, graphs: tuple[GraphEntry, ...]) -> None:
    written = _write(tmp_path, graphs)
    read = load_manifest(tmp_path)
    assert read == written
    assert json.loads(read.dumps()) == json.loads(json.dumps(asdict(written)))


def test_taps_and_sliding_windows_are_part_of_the_contract(tmp_path: Path) -> None:
    graphs = _graphs("std", taps=(0, 1), sliding=True)
    facts = ModelFacts("gemma3", LAYERS, HIDDEN, 2, 1, 4, VOCAB, 19, 64, 8, 10000.0)
    written = _write(tmp_path, graphs, taps=(0, 1), model=facts)
    assert load_manifest(tmp_path) == written
    with pytest.raises(BundleError, match="contract"):
        parse_manifest(json.loads(_write(tmp_path, graphs, taps=(0,), model=facts).dumps()))
    with pytest.raises(BundleError, match="contract"):
        parse_manifest(json.loads(_write(tmp_path, graphs, taps=(0, 1)).dumps()))


def test_graphs_are_found_by_role_profile_and_raggedness(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    entry = manifest.graph("body", "ort")
    assert entry is not None and entry.file == "body.onnx"
    assert manifest.graph("body", "ort", ragged=True) is None
    assert manifest.graph("body", "std") is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version is 2, this version reads 1"),
        ("schema_version", [[[[[[[[]]]]]]]], "schema_version is"),
        ("precision", 4, "manifest.precision must be str"),
        ("extra", 1, "unknown key 'extra'"),
        ("model.extra", 1, "manifest.model has the unknown key 'extra'"),
        ("model.layers", True, "manifest.model.layers must be int"),
        ("model.layers", 2.0, "manifest.model.layers must be int"),
        ("model.layers", 0, "manifest.model.layers must be a positive number"),
        ("model.layers", 10**9, "contract of graph 'body.onnx'"),
        ("model.hidden_size", -8, "manifest.model.hidden_size must be a positive number"),
        ("model.max_positions", 1 << 40, "manifest.model.max_positions must be a positive number"),
        ("model.token_count", 21, "21 tokens in a vocabulary of 20"),
        ("model.rope_theta", "big", "manifest.model.rope_theta must be a finite number"),
        ("model.rope_theta", float("inf"), "manifest.model.rope_theta must be a finite number"),
        ("model.rope_theta", 10**400, "manifest.model.rope_theta must be a finite number"),
        ("model.sliding_window", "8", "manifest.model.sliding_window must be"),
        ("generation.eos_token_ids", 2, "manifest.generation.eos_token_ids must be a list"),
        ("generation.eos_token_ids", ["2"], r"eos_token_ids\[0\] must be int"),
        ("generation.temperature", float("inf"), "temperature must be a finite number"),
        ("graphs", {}, "manifest.graphs must be a list"),
        ("graphs.0", None, r"manifest.graphs\[0\] must be an object"),
        ("files", [], "manifest.files must be an object"),
        ("provenance", "me", "manifest.provenance must be an object"),
        ("drafts", [{"name": "d", "kind": "model"}], "lacks the key 'folder'"),
        ("tokenizer.tokenizer", "other.json", "'other.json' for 'the tokenizer' but does not list its hash"),
        ("tokenizer.chat_template", "c.jinja", "'c.jinja' for 'the chat template' but does not list"),
        ("drafts.0.folder", "elsewhere", "'elsewhere/manifest.json' for 'draft d' but does not list"),
        ("graphs.0.file", "x.onnx", "'x.onnx' for 'graph embed' but does not list"),
        ("graphs.0.data", ["w.bin", "y.bin"], "'y.bin' for 'graph embed' but does not list"),
    ],
)
def test_what_is_not_meant_is_refused(raw: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        parse_manifest(_change(raw, path, value))


@pytest.mark.parametrize("value", ["x" * 10**6, [[[[[[["x" * 1000]]]]]]], {"k" * 10**5: 1}])
def test_errors_stay_short_whatever_was_found(raw: dict[str, Any], value: Any) -> None:
    for path in ("model.layers", "graphs.0", "schema_version", "generation.temperature"):
        with pytest.raises(BundleError) as caught:
            parse_manifest(_change(raw, path, value))
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("raw", [None, [], 3, "manifest", {}])
def test_a_manifest_is_an_object_with_a_version(raw: Any) -> None:
    with pytest.raises(BundleError, match="schema_version is None"):
        parse_manifest(raw)


@pytest.mark.parametrize("key", [*Manifest.__dataclass_fields__])
def test_missing_keys_are_named_unless_they_have_a_default(raw: dict[str, Any], key: str) -> None:
    del raw[key]
    if key in ("drafts", "taps"):
        assert parse_manifest(raw).drafts == () or key == "taps"
        return
    with pytest.raises(BundleError, match="lacks the key" if key != "schema_version" else "schema_version"):
        parse_manifest(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.kv_heads", 2),  # buffers of this size would not hold what the graph writes
        ("model.head_dim", 2),
        ("model.layers", 1),
        ("model.vocab_size", 30),
        ("model.hidden_size", 4),
        ("graphs.0.role", "draft"),
        ("graphs.1.role", "taps"),
        ("graphs.1.profile", "std"),
        ("graphs.1.profile", "fast"),
        ("graphs.1.ragged", True),
        ("graphs.0.contract.inputs", []),
        ("graphs.0.contract.outputs.0.dtype", "int8"),
        ("graphs.2.contract.outputs.0.shape", ["N", 21]),
        ("graphs.1.contract.inputs.3.shape", ["B", 1, 256, 4]),
    ],
)
def test_contracts_follow_from_the_facts(raw: dict[str, Any], path: str, value: Any) -> None:
    with pytest.raises(BundleError, match="is not that of a"):
        parse_manifest(_change(raw, path, value))


def test_graphs_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    embed, body, head = _graphs("ort")
    half = _graphs("ort", dtype="float16")[0]
    for graphs in ((embed, body, head, head), (half, body, head)):
        with pytest.raises(BundleError, match="contradict each other"):
            parse_manifest(json.loads(_write(tmp_path, graphs).dumps()))


@pytest.mark.parametrize("name", ["a", "a.onnx", "drafts/small/body.onnx", "..a", "a b", "é.bin", "a..b"])
def test_plain_paths_are_accepted(name: str) -> None:
    check_relative(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../../b",
        "a/..",
        "/etc/passwd",
        "//a",
        "a//b",
        "./a",
        "a/",
        "a\\b",
        "..\\a",
        "C:a",
        "C:/a",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "\ud800",
    ],
)
def test_paths_that_could_lead_elsewhere_are_refused(name: str, raw: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="not a plain path inside the bundle"):
        check_relative(name)
    raw["files"][name] = {"size": 1, "sha256": "00"}
    with pytest.raises(BundleError, match="not a plain path inside the bundle"):
        parse_manifest(raw)
    del raw["files"][name]
    raw["drafts"][0]["folder"] = name
    with pytest.raises(BundleError, match="not a plain path inside the bundle"):
        parse_manifest(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"schema_version": ' + "[" * 500 + "]" * 500 + "}", "schema_version is"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\ufeff{}", "not valid JSON"),
    ],
)
def test_broken_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match=message) as caught:
        load_manifest(tmp_path)
    assert len(str(caught.value)) < 400


def test_a_manifest_that_is_no_utf8_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BundleError, match="not valid JSON"):
        load_manifest(tmp_path)
    with path.open("wb") as stream:
        stream.truncate(65 << 20)  # sparse
    with pytest.raises(BundleError, match="bytes, more than"):
        load_manifest(tmp_path)


def test_what_is_no_bundle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "none", file, tmp_path / "odd"):
        with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json; make one"):
            load_manifest(folder)


def _lose(path: Path) -> None:
    path.unlink()


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_out(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.parent.name}"
    path.replace(outside)
    path.symlink_to(outside)


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _make_pipe(path: Path) -> None:
    import os

    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose, "w.bin is missing"),
        (_lengthen, "w.bin has 6 bytes, the manifest says 5"),
        (_make_folder, "no plain file"),
        (_link_out, "leaves the bundle folder"),
        (_link_to_itself, "w.bin is missing"),
        (_make_pipe, "no plain file"),
    ],
)
def test_files_must_be_there_whole_and_inside(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    _write(folder)
    damage(folder / "w.bin")
    with pytest.raises(BundleError, match=message):
        load_manifest(folder)


def test_a_link_inside_the_bundle_is_fine(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "w.bin").rename(tmp_path / "real.bin")
    (tmp_path / "w.bin").symlink_to("real.bin")
    load_manifest(tmp_path)


def test_a_folder_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    _write(folder)
    (folder / "drafts").rename(tmp_path / "outside")
    (folder / "drafts").symlink_to(tmp_path / "outside")
    with pytest.raises(BundleError, match="leaves the bundle folder"):
        load_manifest(folder)


def test_an_altered_file_has_another_hash(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    verify_hashes(tmp_path, manifest)
    (tmp_path / "w.bin").write_text("W.BIN")
    verify_hashes(tmp_path, manifest, ("body.onnx",))
    with pytest.raises(BundleError, match=r"w\.bin has sha256 .*, the manifest says .*; it was altered"):
        verify_hashes(tmp_path, manifest)


def test_an_unreadable_file_is_a_bundle_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot read"):
        sha256_of(tmp_path / "none")
