"""Wrapping folders that optimum wrote: what the bundle says and holds, and what every other folder answers."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import write_dflash
from onnx import TensorProto, helper, numpy_helper
from optimum_folders import FINAL_NORM, HIDDEN, STYLES, Change, Model, Style, write_optimum_folder

from oxidize.cli.main import run
from oxidize.export.build import ExportPlan
from oxidize.export.bundle import DraftSource
from oxidize.export.foreign import is_onnx_folder, open_model_draft, open_onnx_folder, wrap_onnx_folder
from oxidize.export.graph import graph_summary
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.errors import CheckpointError
from oxidize.runtime.manifest import load_manifest, verify_hashes
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

PLAIN = STYLES["plain"]


def node_of(graph: onnx.GraphProto, output: str) -> onnx.NodeProto:
    return next(node for node in graph.node if output in node.output)


def value_of(graph: onnx.GraphProto, name: str) -> onnx.ValueInfoProto:
    return next(value for value in (*graph.input, *graph.output) if value.name == name)


def detour(kind: str, value: str, *others: str, **attributes: Any) -> Change:
    """Everybody who takes `value` gets it through one more node."""

    def change(graph: onnx.GraphProto) -> None:
        readers = [node for node in graph.node if value in node.input]
        for node in readers:
            node.input[:] = [f"{value}.detour" if name == value else name for name in node.input]
        node = helper.make_node(kind, [value, *others], [f"{value}.detour"], "detour", **attributes)
        graph.node.insert(list(graph.node).index(readers[0]), node)

    return change


@pytest.mark.parametrize("style", STYLES)
def test_what_the_bundle_says(tmp_path: Path, style: str) -> None:
    source = write_optimum_folder(tmp_path / "source", STYLES[style])
    wrap_onnx_folder(source, tmp_path / "out", context=100)
    manifest = load_manifest(tmp_path / "out")
    verify_hashes(tmp_path / "out", manifest)
    facts = manifest.model
    assert (facts.architecture, facts.layers, facts.hidden_size, facts.vocab_size) == ("gpt_neox", 2, 64, 300)
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (4, STYLES[style].kv_heads, 16)
    assert (facts.max_positions, facts.token_count, facts.sliding_window) == (100, 300, None)
    assert (manifest.precision, manifest.taps) == ("fp16" if style == "half" else "fp32", ())
    assert manifest.generation.eos_token_ids == (2, 0) and manifest.tokenizer.chat_template is not None
    assert manifest.provenance.source == "source"
    files = {"config.json", "generation_config.json", "tokenizer.json"}
    graph = "onnx/model.onnx" if STYLES[style].subfolder else "model.onnx"
    assert set(manifest.provenance.files) >= files | {graph, *([f"{graph}_data"] if STYLES[style].external else [])}
    assert [(entry.role, entry.profile, entry.ragged) for entry in manifest.graphs] == [
        ("embed", "ort", False),
        ("body", "ort", False),
        ("head", "ort", False),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_tied_table_lies_once_in_the_file(tmp_path: Path) -> None:
    wrap_onnx_folder(write_optimum_folder(tmp_path / "source", STYLES["tied, external"]), tmp_path / "out")
    places = []
    for name in ("embed", "head"):
        (tensor,) = onnx.load_model(tmp_path / f"out/{name}.onnx", load_external_data=False).graph.initializer
        places.append({item.key: item.value for item in tensor.external_data})
    assert places[0] == places[1] and places[0]["length"] == str(300 * HIDDEN * 4)


def test_the_pieces_hold_no_more_than_their_part(tmp_path: Path) -> None:
    """Ids are looked up in the embedding alone; the body's one write for each cache is the one that was added."""
    wrap_onnx_folder(write_optimum_folder(tmp_path / "source"), tmp_path / "out")
    assert graph_summary(tmp_path / "out/embed.onnx")["operators"] == {"Gather": 1}
    assert graph_summary(tmp_path / "out/head.onnx")["operators"] == {"Gather": 1, "MatMul": 1}
    assert graph_summary(tmp_path / "out/body.ort.onnx")["operators"]["ScatterND"] == 4


def test_folders_are_told_by_content(tmp_path: Path) -> None:
    for name, style in (("plain", PLAIN), ("sub", STYLES["tied, external"])):
        assert is_onnx_folder(write_optimum_folder(tmp_path / name, style))
    (tmp_path / "sub" / "model.safetensors").write_bytes(b"")
    assert not is_onnx_folder(tmp_path / "sub")  # a checkpoint gives more than a graph does
    (tmp_path / "plain/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither genai_config\.json.* nor config\.json"):
        open_onnx_folder(tmp_path / "plain")


def test_one_graph_of_any_name_will_do(tmp_path: Path) -> None:
    source = write_optimum_folder(tmp_path / "source")
    (source / "model.onnx").rename(source / "model_fp16.onnx")
    assert open_onnx_folder(source).config.graph == "model_fp16.onnx"
    (source / "model_q4.onnx").write_bytes((source / "model_fp16.onnx").read_bytes())
    with pytest.raises(CheckpointError, match=r"model_fp16\.onnx, model_q4\.onnx and not one model\.onnx"):
        open_onnx_folder(source)
    (source / "model.onnx").write_bytes((source / "model_fp16.onnx").read_bytes())
    assert open_onnx_folder(source).config.graph == "model.onnx"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decoder_model_merged.onnx", "an If node"),
        ("decoder_with_past_model.onnx", "a second graph for the prompt"),
        ("decoder_model.onnx", "gives back no cache"),
        ("encoder_model.onnx", "is an encoder"),
    ],
)
def test_older_forms_are_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    source = write_optimum_folder(tmp_path / "source")
    (source / "model.onnx").rename(source / name)
    with pytest.raises(CheckpointError, match=words) as raised:
        open_onnx_folder(source)
    assert name in str(raised.value) and ("optimum" in str(raised.value) or name.startswith("encoder"))
    (source / "other.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match=words):
        open_onnx_folder(source)


def fixed_positions(graph: onnx.GraphProto) -> None:
    value_of(graph, "position_ids").type.tensor_type.elem_type = TensorProto.INT32


def wide_mask(graph: onnx.GraphProto) -> None:
    value_of(graph, "attention_mask").type.tensor_type.elem_type = TensorProto.FLOAT
    node_of(graph, "/padding").input[0] = "attention_mask"


def extra_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))


def no_cache(graph: onnx.GraphProto) -> None:
    kept = [value for value in graph.input if not value.name.startswith("past")]
    del graph.input[:]
    graph.input.extend(kept)


def half_a_layer(graph: onnx.GraphProto) -> None:
    kept = [value for value in graph.input if value.name != "past_key_values.1.value"]
    del graph.input[:]
    graph.input.extend(kept)


def lost_output(graph: onnx.GraphProto) -> None:
    value_of(graph, "present.1.value").name = "present_1_value"


def symbolic_heads(graph: onnx.GraphProto) -> None:
    value_of(graph, "past_key_values.0.key").type.tensor_type.shape.dim[1].dim_param = "heads"


def unequal_layers(graph: onnx.GraphProto) -> None:
    value_of(graph, "past_key_values.1.key").type.tensor_type.shape.dim[3].dim_value = 8


def flat_cache(graph: onnx.GraphProto) -> None:
    del value_of(graph, "past_key_values.0.key").type.tensor_type.shape.dim[0]


def other_axis(graph: onnx.GraphProto) -> None:
    node_of(graph, "present.0.key").attribute[0].i = 1


def crossed(graph: onnx.GraphProto) -> None:
    first, second = (node_of(graph, f"present.0.{part}") for part in ("key", "value"))
    first.input[0], second.input[0] = second.input[0], first.input[0]


def new_rows_first(graph: onnx.GraphProto) -> None:
    node = node_of(graph, "present.0.key")
    node.input[:] = reversed(node.input)


def second_lookup(graph: onnx.GraphProto) -> None:
    graph.initializer.append(numpy_helper.from_array(np.ones((300, 64), np.float32), "segments"))
    graph.node.insert(0, helper.make_node("Gather", ["segments", "input_ids"], ["/segments"], "segments/Gather"))
    detour("Add", "/model/layers.0/Add_output_0", "/segments")(graph)


def padding_by_id(graph: onnx.GraphProto) -> None:
    nodes = [
        helper.make_node("Constant", [], ["/pad"], value=numpy_helper.from_array(np.int64(2), "value")),
        helper.make_node("Equal", ["input_ids", "/pad"], ["/is_pad"], "pad/Equal"),
        helper.make_node("Not", ["/is_pad"], ["/is_text"]),
        helper.make_node("Cast", ["/is_text"], ["/text"], to=TensorProto.FLOAT),
        helper.make_node("Constant", [], ["/last"], value=numpy_helper.from_array(np.array([2]), "value")),
        helper.make_node("Unsqueeze", ["/text", "/last"], ["/text_3d"]),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)
    detour("Mul", "/model/layers.0/Add_output_0", "/text_3d")(graph)


def dynamic_int8(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("DynamicQuantizeLinear", [FINAL_NORM], ["q", "s", "z"], "quantise"))


def inner_graph(graph: onnx.GraphProto) -> None:
    inner = helper.make_graph([], "inner", [], [])
    graph.node.append(helper.make_node("If", ["x"], ["y"], "rope/If", then_branch=inner, else_branch=inner))


def last_row(graph: onnx.GraphProto) -> None:
    for name in ("a", "b"):
        graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), name))
    detour("Slice", FINAL_NORM, "a", "b")(graph)


def narrow_table(graph: onnx.GraphProto) -> None:
    """As of OPT-350m: embeddings are projected up."""
    table = next(tensor for tensor in graph.initializer if tensor.name == "model.embed_tokens.weight")
    table.CopyFrom(numpy_helper.from_array(np.zeros((300, 32), np.float32), table.name))


def half_head(graph: onnx.GraphProto) -> None:
    head = next(tensor for tensor in graph.initializer if tensor.name == "onnx::MatMul_900")
    head.CopyFrom(numpy_helper.from_array(np.zeros((64, 300), np.float16), head.name))


def fewer_logits(graph: onnx.GraphProto) -> None:
    value_of(graph, "logits").type.tensor_type.shape.dim[2].dim_value = 7


GRAPHS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "positions": (fixed_positions, ("position_ids is int32",)),
    "mask": (wide_mask, ("attention_mask is float32",)),
    "extra input": (extra_input, ("num_logits_to_keep",)),
    "no cache": (no_cache, ("takes no past_key_values.0.key", "text-generation-with-past")),
    "half a layer": (half_a_layer, ("has no 'past_key_values.1.value'",)),
    "lost output": (lost_output, ("has no 'present.1.value'",)),
    "symbolic heads": (symbolic_heads, ("past_key_values.0.key", "'heads'", "numbers")),
    "unequal layers": (unequal_layers, ("2 heads of 8 and 2 heads of 16",)),
    "flat cache": (flat_cache, ("past_key_values.0.key has shape [2, ",)),
    "axis": (other_axis, ("present.0.key comes from Concat",)),
    "crossed": (crossed, ("present.0.key comes from Concat", "past_key_values.0.key")),
    "new rows first": (new_rows_first, ("present.0.key comes from Concat",)),
    "second lookup": (second_lookup, ("2 lookups",)),
    "padding by id": (padding_by_id, ("Equal (pad/Equal) reads input_ids",)),
    "dynamic int8": (dynamic_int8, ("DynamicQuantizeLinear (quantise)", "drafted beside it")),
    "inner graph": (inner_graph, ("If (rope/If)",)),
    "last row": (last_row, ("Slice (detour)",)),
    "narrow table": (narrow_table, ("weights of the embedding are float32 [300, 32]", "hidden states of 64")),
    "half head": (half_head, ("weights of the head are float16", "expected stored ones of float32")),
    "logits": (fewer_logits, ("vocab_size 300", "7 logits")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_are_not_understood(tmp_path: Path, name: str) -> None:
    change, words = GRAPHS[name]
    source = write_optimum_folder(tmp_path / "source", PLAIN, change)
    with pytest.raises(CheckpointError) as raised:
        wrap_onnx_folder(source, tmp_path / "out")
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"max_position_embeddings": None}, r"states no length .*; give --context"),
    "hidden": ({"hidden_size": None}, r"states no hidden size"),
    "width": ({"hidden_size": 128}, r"weights of the embedding are float32 \[300, 64\]"),
    "vocabulary": ({"vocab_size": None}, r"vocab_size must be a positive integer"),
    "another vocabulary": ({"vocab_size": 301}, r"vocab_size 301, .* gives 300 logits"),
    "eos": ({"max_position_embeddings": "long"}, r"max_position_embeddings must be"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit(tmp_path: Path, name: str) -> None:
    config, words = CONFIGS[name]
    with pytest.raises(CheckpointError, match=words):
        wrap_onnx_folder(write_optimum_folder(tmp_path / "source", **config), tmp_path / "out")


def test_a_length_nobody_states_can_be_given(tmp_path: Path) -> None:
    source = write_optimum_folder(tmp_path / "source", max_position_embeddings=None)
    assert wrap_onnx_folder(source, tmp_path / "out", context=90).model.max_positions == 90


def test_other_spellings_of_the_config(tmp_path: Path) -> None:
    names = {"n_positions": 77, "n_embd": 64, "n_head": 4}
    absent = dict.fromkeys(["max_position_embeddings", "hidden_size", "num_attention_heads"])
    source = write_optimum_folder(tmp_path / "source", PLAIN, **absent, **names)
    config = open_onnx_folder(source).config
    assert (config.context, config.hidden_size, config.heads) == (77, 64, 4)


def test_weights_that_are_missing(tmp_path: Path) -> None:
    source = write_optimum_folder(tmp_path / "source", Style(external=True))
    (source / "model.onnx_data").unlink()
    with pytest.raises(CheckpointError, match=r"model\.onnx_data.*is the folder complete\?"):
        wrap_onnx_folder(source, tmp_path / "out")


def test_values_and_nodes_may_be_called_as_those_that_are_added(tmp_path: Path) -> None:
    """ONNX Runtime would refuse two nodes of one name, onnx two values."""

    def rename(graph: onnx.GraphProto) -> None:
        node_of(graph, FINAL_NORM).name = "cells"
        for node in graph.node:
            node.input[:] = ["cells" if name == "/rows" else name for name in node.input]
            node.output[:] = ["cells" if name == "/rows" else name for name in node.output]

    wrap_onnx_folder(write_optimum_folder(tmp_path / "source", PLAIN, rename), tmp_path / "out")
    target = Target(open_bundle(tmp_path / "out"), RuntimeOptions(threads=1))
    (logits,) = target.forward([Rows(0, [5, 6, 7], 3)])
    np.testing.assert_allclose(logits, Model(PLAIN).logits([5, 6, 7]), atol=1e-4)


def test_drafts(tmp_path: Path) -> None:
    """A draft model goes with it; one that reads taps is refused with the reason."""
    write_hf_checkpoint(tmp_path / "small", VARIANTS["llama2"], 3)
    draft = DraftSource("small", open_model_draft(str(tmp_path / "small")), ExportPlan("int4"))
    wrap_onnx_folder(write_optimum_folder(tmp_path / "source"), tmp_path / "out", drafts=[draft])
    assert [(entry.name, entry.kind) for entry in load_manifest(tmp_path / "out").drafts] == [("small", "model")]
    write_dflash(tmp_path / "dflash")
    command = [
        "export",
        str(tmp_path / "source"),
        "-o",
        str(tmp_path / "no"),
        "--draft-model",
        str(tmp_path / "dflash"),
    ]
    assert run(command) == 1
    assert not (tmp_path / "no").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_optimum_folder(tmp_path / "source"), tmp_path / "out"
    assert run(["export", str(source), "-o", str(out), "--dry-run", "--context", "64"]) == 0
    assert not out.exists()
    assert capsys.readouterr().err.splitlines() == [
        "source: gpt_neox, 2 layers, hidden 64, vocabulary 300, context 64",
        f"fp32 as it is, profile ort, one slot, no taps -> {out}",
    ]
    assert run(["export", str(source), "-o", str(out)]) == 0
    assert run(["inspect", str(out), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["model"]["architecture"] == "gpt_neox" and described["taps"] == []
    assert run(["run", str(out), "hello", "-n", "8", "--draft-model", "ngram"]) == 0


def test_without_optimum_the_exporter_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optimum", None)
    write_hf_checkpoint(tmp_path / "source", VARIANTS["llama2"])
    assert run(["export", str(tmp_path / "source"), "-o", str(tmp_path / "out"), "--exporter", "optimum"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'oxidize-ort[cpu,export,optimum]'" in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("option", [["--precision", "fp16"], ["--profile", "std"], ["--no-mtp"]])
def test_options_the_exporter_has_no_use_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    write_hf_checkpoint(tmp_path / "source", VARIANTS["llama2"])
    command = ["export", str(tmp_path / "source"), "-o", str(tmp_path / "out"), "--exporter", "optimum", *option]
    assert run(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {option[0]} does not apply to --exporter optimum")


def test_the_exporter_is_for_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_optimum_folder(tmp_path / "source")
    assert run(["export", str(source), "-o", str(tmp_path / "out"), "--exporter", "optimum"]) == 2
    assert "--exporter does not apply to" in capsys.readouterr().err


class _Stub:
    """In place of optimum's exporter: keeps what it was called with, and does what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, []

    def __call__(self, source: str, out: str, **options: Any) -> None:
        self.calls.append((source, Path(out), options))
        print("noise on stdout")
        if self.error is not None:
            raise self.error
        write_optimum_folder(Path(out))


def install(monkeypatch: pytest.MonkeyPatch, stub: _Stub) -> None:
    from types import ModuleType

    for name in ("optimum", "optimum.exporters", "optimum.exporters.onnx"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["optimum.exporters.onnx"].main_export = stub  # type: ignore[attr-defined]


def test_what_optimum_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the local folder, offline, into a folder beside the bundle that is gone afterwards."""
    install(monkeypatch, stub := _Stub())
    source, out = write_hf_checkpoint(tmp_path / "neox", VARIANTS["llama2"]), tmp_path / "out"
    assert run(["export", str(source), "-o", str(out), "--exporter", "optimum", "--context", "99"]) == 0
    ((asked, folder, options),) = stub.calls
    assert asked == str(source) and folder.parent.parent == tmp_path
    assert (options["task"], options["dtype"], options["local_files_only"]) == (
        "text-generation-with-past",
        "fp32",
        True,
    )
    assert "trust_remote_code" not in options
    manifest = load_manifest(out)
    assert (manifest.provenance.source, manifest.model.max_positions) == ("neox", 99)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["neox", "out"]
    assert capsys.readouterr().out == ""


def test_what_optimum_cannot_do_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, _Stub(ValueError("no ONNX config\nfor starcoder2")))
    source = write_hf_checkpoint(tmp_path / "source", VARIANTS["llama2"])
    assert run(["export", str(source), "-o", str(tmp_path / "out"), "--exporter", "optimum"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(
        f"error: optimum cannot export {source} (no ONNX config for starcoder2)"
    )
    assert captured.out == "" and [path.name for path in tmp_path.iterdir()] == ["source"]
