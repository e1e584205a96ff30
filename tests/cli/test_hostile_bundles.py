"""Bundles that are damaged, or made to do harm: exit code 4, one line, nothing read from elsewhere."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

Change = Callable[[dict[str, Any]], object]
SECRET = "../secret.bin"


@pytest.mark.parametrize("command", [["run", "hello"], ["inspect"]])
def test_what_is_no_bundle(oxidize, tmp_path: Path, command: list[str]) -> None:
    name, *rest = command
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        oxidize(name, path, *rest).assert_error(4, "is not a bundle", "make one with `oxidize export`")


@pytest.mark.parametrize("name", ["weights.bin", "body.ort.onnx", "head.onnx", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("command", [["run", "hello"], ["inspect"]])
def test_missing_truncated_and_altered_files(oxidize, bundle, name: str, command: list[str]) -> None:
    verb, *rest = command
    path = bundle.folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    oxidize(verb, bundle, *rest).assert_error(4, f"{name} has {len(content) - 1} bytes", "export or copy")
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    oxidize(verb, bundle, *rest).assert_error(4, name)
    path.unlink()
    oxidize(verb, bundle, *rest).assert_error(4, f"{name} is missing", "export or copy the bundle again")


def test_an_altered_file_is_caught_on_every_run(oxidize, bundle) -> None:
    assert oxidize("run", bundle, "hello", "-n", 1).code == 0
    path = bundle.folder / "weights.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        oxidize("run", bundle, "hello").assert_error(4, "weights.bin has sha256", "it was altered")


def _files(name: str) -> Change:
    return lambda raw: raw["files"].update({name: {"size": 1, "sha256": "0" * 64}})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_files("../../etc/passwd"), "not safe to load"),
        (_files("/etc/passwd"), "not safe to load"),
        (_files("..\\secret"), "not safe to load"),
        (lambda raw: raw["tokenizer"].update(tokenizer="../secret.bin"), "does not list its hash"),
        (lambda raw: raw["tokenizer"].update(chat_template="/etc/passwd"), "does not list its hash"),
        (lambda raw: raw["graphs"][0].update(file="../embed.onnx"), "does not list its hash"),
        (lambda raw: raw["drafts"].append({"name": "d", "kind": "model", "folder": ".."}), "not safe to load"),
        (lambda raw: raw.update(schema_version=99), "schema_version is 99, this version reads 1"),
        (lambda raw: raw.update(surprise=1), "unknown key 'surprise'"),
        (lambda raw: raw.pop("model"), "lacks the key 'model'"),
        (lambda raw: raw["model"].update(layers="two"), "manifest.model.layers must be int"),
        (lambda raw: raw["model"].update(kv_heads=1), "is not that of a 'body' graph"),
        (lambda raw: raw["graphs"][1]["contract"]["inputs"][0].update(dtype="int8"), "is not that of a"),
        (lambda raw: raw["model"].update(rope_theta=float("nan")), "NaN is no JSON number"),
    ],
)
def test_manifests_that_lie(oxidize, bundle, change: Change, word: str) -> None:
    bundle.edit(change)
    for command in (["run", bundle, "hello"], ["inspect", bundle]):
        oxidize(*command).assert_error(4, word)


@pytest.mark.parametrize("text", ["", "not json", "[" * 10**6, "{}", "[]", "null", '{"schema_version": 1}'])
def test_manifests_that_are_none(oxidize, bundle, text: str) -> None:
    (bundle.folder / "manifest.json").write_text(text)
    oxidize("run", bundle, "hello").assert_error(4, "export the bundle again")


def test_links_out_of_the_bundle(oxidize, bundle) -> None:
    path = bundle.folder / "tokenizer.json"
    outside = path.replace(bundle.folder.parent / "outside.json")
    path.symlink_to(outside)
    oxidize("run", bundle, "hello").assert_error(4, "leaves the bundle folder", "not safe to load")


def _claim(raw: dict[str, Any], old: object, new: object) -> None:
    """Let all contracts speak of another size."""
    for graph in raw["graphs"]:
        for spec in (*graph["contract"]["inputs"], *graph["contract"]["outputs"]):
            spec["shape"] = [new if axis == old else axis for axis in spec["shape"]]


def _half(raw: dict[str, Any]) -> None:
    for graph in raw["graphs"]:
        for spec in (*graph["contract"]["inputs"], *graph["contract"]["outputs"]):
            if spec["dtype"] == "float32" and spec["name"] != "logits":
                spec["dtype"] = "float16"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda raw: (raw["model"].update(vocab_size=310), _claim(raw, 300, 310)), "logits"),
        (lambda raw: (raw["model"].update(hidden_size=32), _claim(raw, 64, 32)), "inputs_embeds"),
        (lambda raw: (raw["model"].update(head_dim=8), _claim(raw, 16, 8)), "past_key_values.0.key"),
        (_half, "inputs_embeds"),
    ],
)
def test_graphs_are_held_against_the_manifest(oxidize, bundle, change: Change, word: str) -> None:
    """The manifest agrees with itself here, but not with what ONNX Runtime finds in the graphs."""
    bundle.edit(change)
    oxidize("run", bundle, "hello").assert_error(4, word, "the manifest says", "export the bundle again")


def test_graphs_with_other_inputs(oxidize, bundle) -> None:
    model = onnx.load(bundle.folder / "head.onnx", load_external_data=False)
    for node in model.graph.node:
        node.input[:] = ["lines" if name == "rows" else name for name in node.input]
    next(value for value in model.graph.input if value.name == "rows").name = "lines"
    bundle.overwrite("head.onnx", model.SerializeToString())
    oxidize("run", bundle, "hello").assert_error(4, "head.onnx", "disagree about the input 'lines'")


@pytest.mark.parametrize("content", [b"", b"not onnx", b"\x08" * 1000, b"\0" * 1000])
@pytest.mark.parametrize("name", ["embed.onnx", "body.ort.onnx", "head.onnx"])
def test_graphs_that_are_no_onnx(oxidize, bundle, name: str, content: bytes) -> None:
    bundle.overwrite(name, content)
    oxidize("run", bundle, "hello").assert_error(4, name, "cannot load")


@pytest.mark.parametrize("location", [SECRET, "/etc/hostname", "link.bin", "missing.bin"])
def test_graphs_cannot_read_outside_the_bundle(oxidize, bundle, location: str) -> None:
    """ONNX Runtime itself refuses external data that lies elsewhere; this test tells when it no longer does."""
    secret = bundle.folder.parent / "secret.bin"
    secret.write_bytes((bundle.folder / "weights.bin").read_bytes())
    (bundle.folder / "link.bin").symlink_to(secret)
    model = onnx.load(bundle.folder / "embed.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    bundle.overwrite("embed.onnx", model.SerializeToString())
    oxidize("run", bundle, "hello").assert_error(4, "embed.onnx", "cannot load")


def test_weights_that_end_early(oxidize, bundle) -> None:
    bundle.overwrite("weights.bin", (bundle.folder / "weights.bin").read_bytes()[:4096])
    oxidize("run", bundle, "hello").assert_error(4, "cannot load")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"version": "9"}', b"[" * 10**5])
def test_broken_tokenizers(oxidize, bundle, content: bytes) -> None:
    bundle.overwrite("tokenizer.json", content)
    oxidize("run", bundle, "hello").assert_error(4, "tokenizer.json", "export the bundle again")


@pytest.mark.parametrize(
    "content",
    [
        b"{% for %}",
        b"{{ messages",
        b"\xff",
        b"{{ ''.__class__.__mro__ }}",
    ],
)
def test_broken_and_hostile_templates(oxidize, bundle, content: bytes) -> None:
    bundle.overwrite("chat_template.jinja", content)
    oxidize("run", bundle, "hello").assert_error(4, "template")
    assert oxidize("run", bundle, "hello", "--raw", "-n", 1).code == 0


def test_a_bundle_without_a_template_does_not_chat(oxidize, bundle) -> None:
    bundle.edit(lambda raw: raw["tokenizer"].update(chat_template=None))
    assert oxidize("run", bundle, "hello", "-n", 1).code == 0
    oxidize("run", bundle, "hello", "--chat").assert_error(2, "no chat template", "--raw")


@pytest.mark.parametrize("missing", ["embed", "body", "head"])
def test_a_bundle_that_lacks_a_graph(oxidize, bundle, missing: str) -> None:
    bundle.edit(lambda raw: raw.update(graphs=[graph for graph in raw["graphs"] if graph["role"] != missing]))
    result = oxidize("run", bundle, "hello")
    assert result.code in (1, 4)
    result.assert_error(result.code, "has no graphs", "export it again")


def test_nested_drafts_are_checked_too(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert oxidize("export", checkpoint, "-o", out, "--draft-model", checkpoint, "--no-eval").code == 0
    assert oxidize("inspect", out).code == 0
    weights = out / "drafts" / "tiny" / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    for command in (["run", out, "hello", "-n", 3], ["inspect", out]):
        oxidize(*command).assert_error(4, "drafts/tiny/weights.bin has sha256")


def test_names_in_a_manifest_do_not_steer_the_terminal(oxidize, bundle) -> None:
    bundle.edit(lambda raw: raw["provenance"].update(source="\x1b[2Jgood\nname\ud800"))
    result = oxidize("inspect", bundle)
    assert result.code == 0
    assert result.out.startswith("target     \ufffd[2Jgood\ufffdname\ufffd (llama)")
    assert oxidize("inspect", bundle, "--json").out.isascii()


def test_a_pipe_in_the_bundle_does_not_block(oxidize, bundle) -> None:
    path = bundle.folder / "chat_template.jinja"
    path.unlink()
    os.mkfifo(path)
    bundle.edit(lambda raw: raw["files"]["chat_template.jinja"].update(size=0))
    start = time.monotonic()
    oxidize("run", bundle, "hello").assert_error(4, "no plain file")
    assert time.monotonic() - start < 5
