"""Wrapping onnxruntime-genai folders: what the bundle says and holds, and what every folder that is no such answers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import write_dflash
from draft_checkpoints_eagle import EAGLE_VARIANTS, write_eagle, write_eagle_gguf
from genai_folders import EMBEDDED, HIDDEN, LENGTHS, BareLoop, Change, with_rotary_nodes, write_genai_folder
from onnx import helper, numpy_helper

from oxidize.cli.main import run
from oxidize.export.build import ExportPlan
from oxidize.export.bundle import DraftSource
from oxidize.export.foreign import is_onnx_folder, open_model_draft, open_onnx_folder, wrap_onnx_folder
from oxidize.export.graph import graph_summary
from oxidize.export.source import open_source
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.errors import CheckpointError, OxidizeError, UsageError
from oxidize.runtime.manifest import load_manifest, verify_hashes
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

Make = Callable[..., Path]


@pytest.fixture
def make(tiny_bundle: Make, tmp_path: Path) -> Make:
    """make(change, variant, precision, **config) -> a folder."""

    def build(change: Change | None = None, variant: str = "llama2", precision: str = "fp32", **config: Any) -> Path:
        return write_genai_folder(tiny_bundle(variant, precision), tmp_path / "source", change, **config)

    return build


def edit(folder: Path, path: str, value: Any) -> None:
    """Set a key of genai_config.json, or remove it with None."""
    raw = json.loads((folder / "genai_config.json").read_text())
    *parents, key = path.split(".")
    place = raw
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[key]
    else:
        place[key] = value
    (folder / "genai_config.json").write_text(json.dumps(raw))


def node_of(graph: onnx.GraphProto, kind: str, index: int = 0) -> onnx.NodeProto:
    return [node for node in graph.node if node.op_type == kind][index]


def set_number(graph: onnx.GraphProto, kind: str, name: str, value: int, index: int = 0) -> None:
    node = node_of(graph, kind, index)
    for item in [item for item in node.attribute if item.name == name]:
        node.attribute.remove(item)
    node.attribute.append(helper.make_attribute(name, value))


def insert(graph: onnx.GraphProto, reader: onnx.NodeProto, node: onnx.NodeProto) -> None:
    graph.node.insert(list(graph.node).index(reader), node)


def detour(kind: str, value: str, *others: str, **attributes: Any) -> Change:
    """Everybody who takes `value` gets it through one more node."""

    def change(graph: onnx.GraphProto) -> None:
        readers = [node for node in graph.node if value in node.input]
        for node in readers:
            node.input[:] = [f"{value}.detour" if name == value else name for name in node.input]
        insert(graph, readers[0], helper.make_node(kind, [value, *others], [f"{value}.detour"], "detour", **attributes))

    return change


def tie(graph: onnx.GraphProto) -> None:
    """The embedding looks up the bytes of the head, seen as another shape."""
    lookup = node_of(graph, "GatherBlockQuantized")
    dims = {tensor.name: tensor.dims for tensor in graph.initializer}[lookup.input[0]]
    shape = numpy_helper.from_array(np.array(dims, np.int64), "value")
    insert(graph, lookup, helper.make_node("Constant", [], ["flat"], value=shape))
    insert(graph, lookup, helper.make_node("Reshape", ["lm_head.packed", "flat"], ["table"]))
    lookup.input[0], lookup.input[2] = "table", "lm_head.scales"
    kept = [tensor for tensor in graph.initializer if not tensor.name.startswith("embed_tokens")]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def test_only_folders_of_graphs_are_onnx_folders(make: Make, tiny_bundle: Make, tmp_path: Path) -> None:
    source = make()
    assert is_onnx_folder(source) and not is_onnx_folder(source / "model.onnx")
    assert not is_onnx_folder(tiny_bundle("llama2")) and not is_onnx_folder(tmp_path)
    (source / "genai_config.json").unlink()
    assert is_onnx_folder(source)
    (source / "model.safetensors").write_bytes(b"")
    assert not is_onnx_folder(source)  # a checkpoint gives more than a graph does


def test_what_the_bundle_says(make: Make, tiny_bundle: Make, tmp_path: Path) -> None:
    wrap_onnx_folder(make(variant="mistral_sliding", precision="int4"), tmp_path / "out", context=100)
    manifest, ours = load_manifest(tmp_path / "out"), load_manifest(tiny_bundle("mistral_sliding", "int4"))
    verify_hashes(tmp_path / "out", manifest)
    assert manifest.model == replace(ours.model, max_positions=100, rope_theta=0.0)
    assert (manifest.precision, manifest.taps, manifest.drafts) == ("int4", (), ())
    assert (manifest.tokenizer, manifest.generation) == (
        replace(ours.tokenizer, bos_token=None, eos_token=None),
        ours.generation,
    )
    for role in ("embed", "body", "head"):
        entry, own = manifest.graph(role, "ort"), ours.graph(role, "ort")
        assert entry is not None and own is not None and entry.contract == own.contract
    assert set(manifest.provenance.files) >= {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_no_table_of_rope_is_outrun(make: Make, tmp_path: Path) -> None:
    assert open_onnx_folder(make(context_length=4096)).cuts.positions == 512


def test_every_weight_lies_once_in_the_file(make: Make, tmp_path: Path) -> None:
    """A tied table is one, however it is looked at; nothing of the arithmetic on the mask is left."""
    source = make(tie, "smollm2", "int4")
    wrap_onnx_folder(source, tmp_path / "out")
    places = {}
    for path in (tmp_path / "out").glob("*.onnx"):
        for tensor in onnx.load_model(path, load_external_data=False).graph.initializer:
            place = {item.key: item.value for item in tensor.external_data}
            if place:
                places[path.stem, tensor.name] = (int(place["offset"]), int(place["length"]))
    ordered = sorted(set(places.values()))
    assert all(end + length <= start for (end, length), (start, _) in pairwise(ordered))
    assert places["embed", "table"] == places["head", "lm_head.packed"]
    size = sum(length + -length % 4096 for _, length in ordered[:-1]) + ordered[-1][1]
    assert (tmp_path / "out/weights.bin").stat().st_size == size
    assert graph_summary(tmp_path / "out/embed.onnx")["operators"] == {"com.microsoft::GatherBlockQuantized": 1}
    assert not {"ReduceSum", "Shape", "Cast"} & set(graph_summary(tmp_path / "out/body.ort.onnx")["operators"])


def test_tensors_within_the_graph_file_move_out(make: Make, tmp_path: Path) -> None:
    source = make()
    model = onnx.load_model(source / "model.onnx")
    onnx.save_model(model, source / "model.onnx", save_as_external_data=False)
    (source / "model.onnx.data").unlink()
    wrap_onnx_folder(source, tmp_path / "out")
    largest = max(path.stat().st_size for path in (tmp_path / "out").glob("*.onnx"))
    assert largest < 20_000 < (tmp_path / "out/weights.bin").stat().st_size


def half_logits(graph: onnx.GraphProto) -> None:
    detour("Cast", HIDDEN, to=onnx.TensorProto.FLOAT)(graph)  # so that the head's input is not the norm itself
    node = next(node for node in graph.node if "logits" in node.output)
    node.output[0] = "/lm_head/raw"
    graph.node.append(helper.make_node("Cast", ["/lm_head/raw"], ["logits"], to=onnx.TensorProto.FLOAT16))
    graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def capped_logits(graph: onnx.GraphProto) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(2.0, np.float32), "cap"))
    node = next(node for node in graph.node if "logits" in node.output)
    node.output[0] = "/lm_head/raw"
    graph.node.append(helper.make_node("Div", ["/lm_head/raw", "cap"], ["/lm_head/Div"]))
    graph.node.append(helper.make_node("Tanh", ["/lm_head/Div"], ["/lm_head/Tanh"]))
    graph.node.append(helper.make_node("Mul", ["cap", "/lm_head/Tanh"], ["logits"]))


def awkward_names(graph: onnx.GraphProto) -> None:
    """Values and tensors that are called as our contracts call others."""
    names = {"layers.0.mlp.mul": "hidden", "layers.1.mlp.mul": "rows", "gate_up_sizes": "seqlens_k"}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)


@pytest.mark.parametrize("change", [half_logits, capped_logits, awkward_names])
def test_other_heads_and_names(make: Make, tmp_path: Path, change: Change) -> None:
    source = make(change)
    wrap_onnx_folder(source, tmp_path / "out")
    target = Target(open_bundle(tmp_path / "out"), RuntimeOptions(threads=1))
    (logits,) = target.forward([Rows(0, [5, 6, 7, 8], 4)])
    assert logits.dtype == np.float32 and logits.std() > 0
    np.testing.assert_array_equal(logits, BareLoop(source).logits([5, 6, 7, 8], 0))


def second_lookup(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Shape", ["input_ids"], ["ids.shape"]))


def other_attention(graph: onnx.GraphProto) -> None:
    node_of(graph, "GroupQueryAttention", 1).op_type = "MultiHeadAttention"


def no_attention(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.op_type = "Custom" if node.op_type == "GroupQueryAttention" else node.op_type


def dropped_attention(graph: onnx.GraphProto) -> None:
    node_of(graph, "GroupQueryAttention", 1).op_type = "Custom"


def quantised_cache(graph: onnx.GraphProto) -> None:
    node_of(graph, "GroupQueryAttention").input.extend(["", "", "", "cos", "cos"])


def biased(graph: onnx.GraphProto) -> None:
    node_of(graph, "GroupQueryAttention").input.extend(["", "attention_mask"])


def crossed_caches(graph: onnx.GraphProto) -> None:
    node = node_of(graph, "GroupQueryAttention")
    node.input[3], node.input[4] = node.input[4], node.input[3]


def crossed_outputs(graph: onnx.GraphProto) -> None:
    first, second = (node_of(graph, "GroupQueryAttention", layer) for layer in (0, 1))
    first.output[1], second.output[1] = second.output[1], first.output[1]


def own_lengths(graph: onnx.GraphProto) -> None:
    node = node_of(graph, "GroupQueryAttention", 1)
    node.input[5] = "other"
    insert(graph, node, helper.make_node("Identity", [LENGTHS["seqlens_k"]], ["other"]))


def wrong_lengths(graph: onnx.GraphProto) -> None:
    """The sum of the mask, not one less."""
    node = node_of(graph, "Sub")
    node.op_type = "Mul"


def mask_reader(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["float_mask"], "mask/Cast", to=1))
    detour("Mul", EMBEDDED, "float_mask")(graph)


def extra_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("past_conv.0", 1, ["B", 4]))


def short_ids(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32


def three_positions(graph: onnx.GraphProto) -> None:
    """As of models that see images: three position ids a row."""
    with_rotary_nodes(graph)
    del graph.input[-1]
    graph.input.append(helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, [3, "B", "S"]))


def flat_cache(graph: onnx.GraphProto) -> None:
    del graph.input[2].type.tensor_type.shape.dim[1:]


def half_cache(graph: onnx.GraphProto) -> None:
    graph.input[2].type.tensor_type.elem_type = onnx.TensorProto.INT8


def other_cache(graph: onnx.GraphProto) -> None:
    graph.input[2].type.tensor_type.shape.dim[1].dim_value = 3


def inner_graph(graph: onnx.GraphProto) -> None:
    inner = helper.make_graph([], "inner", [], [])
    graph.node.append(helper.make_node("If", ["x"], ["y"], "rope/If", then_branch=inner, else_branch=inner))


def computed_rope(graph: onnx.GraphProto) -> None:
    detour("Abs", node_of(graph, "GroupQueryAttention").input[7])(graph)


def fewer_logits(graph: onnx.GraphProto) -> None:
    graph.output[0].type.tensor_type.shape.dim[2].dim_value = 7


def odd_type(graph: onnx.GraphProto) -> None:
    graph.value_info.append(helper.make_tensor_value_info(EMBEDDED, onnx.TensorProto.FLOAT16, ["B", "S", 64]))


def sampled(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if "logits" in node.output)
    node.output[0] = "raw"
    graph.node.append(helper.make_node("Softmax", ["raw"], ["logits"], "probabilities"))


def escaping(graph: onnx.GraphProto) -> None:
    for item in graph.initializer[0].external_data:
        item.value = "../secret" if item.key == "location" else item.value


def far_away(graph: onnx.GraphProto) -> None:
    for item in graph.initializer[0].external_data:
        item.value = "99999999999" if item.key == "offset" else item.value


def giant(graph: onnx.GraphProto) -> None:
    tensor = graph.initializer[0]
    tensor.dims[0] = 1 << 50
    for item in tensor.external_data:
        item.value = str(1 << 60) if item.key == "length" else item.value


GRAPHS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "other attention": (other_attention, ("MultiHeadAttention", "shared buffer")),
    "unknown attention": (no_attention, ("present.0.key comes from com.microsoft::Custom",)),
    "fewer attentions": (dropped_attention, ("1 GroupQueryAttention nodes for 2 layers",)),
    "quantised cache": (quantised_cache, ("a quantised cache",)),
    "attention bias": (biased, ("an attention bias",)),
    "crossed caches": (crossed_caches, ("past_key_values.0.key", "present.0.key")),
    "crossed outputs": (crossed_outputs, ("past_key_values.0.key", "present.0.key")),
    "own lengths": (own_lengths, ("different lengths",)),
    "wrong lengths": (wrong_lengths, ("attention_mask", "sum less one")),
    "mask read": (mask_reader, ("Cast (mask/Cast) reads attention_mask",)),
    "ids read": (second_lookup, ("input_ids goes to Shape",)),
    "extra input": (extra_input, ("past_conv.0",)),
    "cache type": (half_cache, ("float32 and int8",)),
    "cache shape": (other_cache, ("past_key_values.0.key", "2 heads of 16")),
    "flat cache": (flat_cache, ("past_key_values.0.key", "['B']")),
    "ids type": (short_ids, ("input_ids is int32",)),
    "positions": (three_positions, ("position_ids is int64 [3, 'B', 'S']",)),
    "inner graph": (inner_graph, ("If (rope/If)",)),
    "computed rope": (computed_rope, (".detour is not stored",)),
    "heads": (lambda graph: set_number(graph, "GroupQueryAttention", "num_heads", 8), ("8 heads", "4 and 2")),
    "logits": (fewer_logits, ("vocab_size 300", "7 logits")),
    "type": (odd_type, (EMBEDDED, "float16", "expected float32")),
    "sampled": (sampled, ("Softmax (probabilities)",)),
    "pruned": (detour("Slice", HIDDEN, "a", "b"), ("Slice (detour)", "prune_lm_head")),
    "escaping": (escaping, ("'../secret'", "not read")),
    "giant": (giant, ("tensor embed_tokens.weight takes",)),
    "far away": (far_away, ("takes 76800 bytes", "0 are there")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_are_not_understood(make: Make, tmp_path: Path, name: str) -> None:
    change, words = GRAPHS[name]
    source = make(change)
    with pytest.raises(CheckpointError) as raised:
        wrap_onnx_folder(source, tmp_path / "out")
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


CONFIGS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "no layers": ("model.decoder.num_hidden_layers", None, ("num_hidden_layers must be a positive integer",)),
    "vision": ("model.vision", {"filename": "v.onnx"}, ("several graphs", "vision")),
    "pipeline": ("model.decoder.pipeline", [{}], ("pipeline",)),
    "inputs": ("model.decoder.inputs.inputs_embeds", "x", ("'inputs_embeds'",)),
    "pattern": ("model.decoder.inputs.past_key_names", "past", ("'past'", "%d")),
    "names": ("model.decoder.outputs.present_key_names", "new.%d.key", ("'new.0.key'", "do not belong together")),
    "outside": ("model.decoder.filename", "../model.onnx", ("'../model.onnx'",)),
    "absent": ("model.decoder.filename", "other.onnx", ("other.onnx", "is the folder complete?")),
    "no model": ("model.decoder.filename", "tokenizer.json", ("tokenizer.json is not an ONNX model",)),
    "eos": ("model.eos_token_id", "</s>", ("eos_token_id", "'</s>'")),
    "vocabulary": ("model.vocab_size", 7, ("vocab_size 7",)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit(make: Make, tmp_path: Path, name: str) -> None:
    key, value, words = CONFIGS[name]
    source = make()
    edit(source, key, value)
    with pytest.raises(CheckpointError) as raised:
        wrap_onnx_folder(source, tmp_path / "out")
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.onnx.data", "genai_config.json"])
def test_files_that_are_missing(make: Make, tmp_path: Path, missing: str) -> None:
    source = make()
    (source / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.removesuffix(".data")):
        wrap_onnx_folder(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tokenizer_of_another_model(make: Make, tmp_path: Path) -> None:
    source = make()
    raw = json.loads((source / "tokenizer.json").read_text())
    raw["model"]["vocab"]["one more"] = 300
    (source / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"knows 301 tokens and genai_config.json says vocab_size 300"):
        wrap_onnx_folder(source, tmp_path / "out")


def test_sampling_defaults_are_taken_only_where_sampling_is_asked_for(make: Make) -> None:
    source = make()
    assert open_onnx_folder(source).config.generation.top_k is None
    edit(source, "search.do_sample", True)
    assert open_onnx_folder(source).config.generation.top_k == 50


def test_an_older_bundle_is_replaced_on_demand_only(make: Make, tmp_path: Path) -> None:
    source = make()
    wrap_onnx_folder(source, tmp_path / "out")
    with pytest.raises(UsageError, match="already holds a bundle"):
        wrap_onnx_folder(source, tmp_path / "out")
    wrap_onnx_folder(source, tmp_path / "out", force=True)


def test_a_draft_model_goes_with_it(make: Make, tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path / "small", VARIANTS["llama2"], 3)
    draft = DraftSource("small", open_model_draft(str(tmp_path / "small")), ExportPlan("int4"))
    wrap_onnx_folder(make(), tmp_path / "out", drafts=[draft])
    assert [(entry.name, entry.kind) for entry in load_manifest(tmp_path / "out").drafts] == [("small", "model")]
    assert open_source(str(tmp_path / "small")).config.layers == 2


def test_drafts_that_read_taps_are_refused_with_the_reason(make: Make, tmp_path: Path) -> None:
    write_dflash(tmp_path / "dflash")
    write_eagle(tmp_path / "eagle", "safeailab_full")
    write_eagle_gguf(tmp_path / "eagle.gguf", next(iter(EAGLE_VARIANTS)))
    kinds = {"dflash": "a DFlash draft", "eagle": "an EAGLE-3 draft", "eagle.gguf": "an EAGLE-3 draft"}
    for name, kind in kinds.items():
        with pytest.raises(OxidizeError, match=f"is {kind} and does not fit: .* gives no taps.* MTP and Medusa heads"):
            open_model_draft(str(tmp_path / name))
    with pytest.raises(OxidizeError, match="bundle of its own"):
        open_model_draft(str(make()))


def test_the_command(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make(), tmp_path / "out"
    assert run(["export", str(source), "-o", str(out), "--dry-run"]) == 0
    assert not out.exists()
    assert run(["export", str(source), "-o", str(out)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "source: llama, 2 layers, hidden 64, vocabulary 300, context 512",
        f"fp32 as it is, profile ort, one slot, no taps -> {out}",
    ]
    assert run(["run", str(out), "hello", "-n", "4"]) == 0


@pytest.mark.parametrize("option", [["--precision", "int4"], ["--profile", "ort"], ["--no-mtp"], ["--head-bits", "8"]])
def test_options_that_make_no_sense(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert run(["export", str(make()), "-o", str(tmp_path / "out"), *option]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option[0]} does not apply to ") and error.count("\n") == 1


def test_a_folder_of_links_is_read(make: Make, tmp_path: Path) -> None:
    """The hub's cache keeps snapshots as links."""
    source, linked = make(), tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    wrap_onnx_folder(linked, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    shutil.rmtree(source)
    verify_hashes(tmp_path / "out", load_manifest(tmp_path / "out"))
