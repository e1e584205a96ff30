"""Folders as onnxruntime-genai's model builder writes them, made from a tiny bundle: one graph, its data, a config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from oxidize.runtime.manifest import load_manifest

EMBEDDED, HIDDEN = "/model/embed_tokens/Gather/output_0", "/model/layers.2/final_norm_layernorm/output_0"
MASKED = "/model/attn_mask_reformat/attn_mask_subgraph"
LENGTHS = {
    "seqlens_k": f"{MASKED}/Sub/Cast/output_0",
    "total_sequence_length": f"{MASKED}/Gather/Cast/output_0",
}
Change = Callable[[onnx.GraphProto], None]


def write_genai_folder(bundle: Path, folder: Path, change: Change | None = None, **config: Any) -> Path:
    """A folder with the model of `bundle` (profile ort); `change` edits its graph, `config` the model's keys."""
    folder.mkdir(parents=True)
    graph = _fuse(bundle)
    if change is not None:
        change(graph)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    onnx.save_model(helper.make_model(graph, opset_imports=imports, ir_version=10), folder / "model.onnx")
    shutil.copy(bundle / "weights.bin", folder / "model.onnx.data")
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (bundle / name).exists():
            shutil.copy(bundle / name, folder / name)
    (folder / "genai_config.json").write_text(json.dumps(_config(bundle, config)))
    return folder


def with_rotary_nodes(graph: onnx.GraphProto) -> None:
    """Rope by nodes of its own that read position_ids, as for providers whose attention does not rotate."""
    nodes = []
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            nodes += _rotated(graph, node)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["B", "S"]))


class BareLoop:
    """Greedy decoding on the folder's own graph: ONNX Runtime, one buffer for past and present, nothing else."""

    def __init__(self, folder: Path, capacity: int = 256) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options, ["CPUExecutionProvider"])
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.cache = {
            value.name: onnxruntime.OrtValue.ortvalue_from_numpy(
                np.zeros((1, value.shape[1], capacity, value.shape[3]), types[value.type])
            )
            for value in self.session.get_inputs()
            if value.name.startswith("past_key_values")
        }

    def logits(self, tokens: list[int], past: int) -> np.ndarray:
        """[S,V] of a pass over `tokens` behind `past` rows."""
        total = past + len(tokens)
        feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, total), np.int64)}
        feeds["position_ids"] = np.arange(past, total)[None]
        binding = self.session.io_binding()
        for name in feeds.keys() & self.inputs:
            binding.bind_cpu_input(name, feeds[name])
        binding.bind_output("logits", "cpu")
        for name, buffer in self.cache.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()[0].astype(np.float32)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens after the prompt, which goes in as one pass."""
        tokens, logits = list(prompt), self.logits(prompt, 0)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(logits[-1].argmax()))
            logits = self.logits(tokens[-1:], len(tokens) - 1)
        return tokens[len(prompt) :]


def _fuse(bundle: Path) -> onnx.GraphProto:
    """One graph out of embed, body and head, with lengths that come from attention_mask."""
    embed, body, head = (
        onnx.load_model(bundle / f"{name}.onnx", load_external_data=False).graph
        for name in ("embed", "body.ort", "head")
    )
    names = {"inputs_embeds": EMBEDDED, "hidden": HIDDEN, **LENGTHS}
    nodes = [*_mask_nodes(), *embed.node, *body.node, *_head_nodes(head)]
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    tensors = {tensor.name: tensor for part in (embed, body, head) for tensor in part.initializer}
    for tensor in tensors.values():
        for item in tensor.external_data:
            item.value = "model.onnx.data" if item.key == "location" else item.value
    ids = [
        helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch_size", axis])
        for name, axis in (("input_ids", "sequence_length"), ("attention_mask", "total_sequence_length"))
    ]
    logits, vocab = head.output[0], head.output[0].type.tensor_type.shape.dim[-1].dim_value
    kind = logits.type.tensor_type.elem_type
    caches = [value for value in body.input if value.name.startswith("past")]
    presents = [value for value in body.output if value.name.startswith("present")]
    outputs = [helper.make_tensor_value_info("logits", kind, ["batch_size", "sequence_length", vocab]), *presents]
    return helper.make_graph(nodes, "main_graph", [*ids, *caches], outputs, list(tensors.values()))


def _mask_nodes() -> list[onnx.NodeProto]:
    one = numpy_helper.from_array(np.array(1, np.int64), "value")
    ones = numpy_helper.from_array(np.array([1], np.int64), "value")
    return [
        helper.make_node("Constant", [], ["/model/constants/INT64/[1]"], value=ones),
        helper.make_node("ReduceSum", ["attention_mask", "/model/constants/INT64/[1]"], [f"{MASKED}/sum"], keepdims=0),
        helper.make_node("Sub", [f"{MASKED}/sum", "/model/constants/INT64/[1]"], [f"{MASKED}/Sub/output_0"]),
        helper.make_node("Cast", [f"{MASKED}/Sub/output_0"], ["seqlens_k"], to=onnx.TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], [f"{MASKED}/Shape/output_0"]),
        helper.make_node("Constant", [], ["/model/constants/INT64/1"], value=one),
        helper.make_node("Gather", [f"{MASKED}/Shape/output_0", "/model/constants/INT64/1"], [f"{MASKED}/width"]),
        helper.make_node("Cast", [f"{MASKED}/width"], ["total_sequence_length"], to=onnx.TensorProto.INT32),
    ]


def _head_nodes(head: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The head over every row: no choice of rows, and a MatMul where ours has a Gemm."""
    nodes = []
    for node in head.node[1:]:
        node.input[0] = "hidden" if node.input[0] == "rows_wanted" else node.input[0]
        if node.op_type == "Gemm":
            nodes.append(helper.make_node("Transpose", [node.input[1]], ["/lm_head/Transpose"], perm=[1, 0]))
            node = helper.make_node(
                "MatMul", ["hidden", "/lm_head/Transpose"], list(node.output), name="/lm_head/MatMul"
            )
        nodes.append(node)
    return nodes


def _rotated(graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """What goes before an attention node that is made to rotate no more."""
    numbers = {item.name: item for item in node.attribute}
    heads, kv_heads = numbers["num_heads"].i, numbers["kv_num_heads"].i
    tables = {tensor.name: tensor for tensor in graph.initializer}
    size = 2 * tables[node.input[7]].dims[1]
    packed, split, cos, sin = node.input[0], f"{node.name}.sizes", node.input[7], node.input[8]
    sizes = np.array([heads * size, kv_heads * size, kv_heads * size], np.int64)
    graph.initializer.append(numpy_helper.from_array(sizes, split))
    query, key, value = (f"{node.name}.{part}" for part in "qkv")
    turn = [
        helper.make_node(
            "RotaryEmbedding",
            [part, "position_ids", cos, sin],
            [f"{part}.turned"],
            domain="com.microsoft",
            name=f"{part}/RotaryEmbedding",
        )
        for part in (query, key)
    ]
    node.input[:] = [f"{query}.turned", f"{key}.turned", value, *node.input[3:7]]
    numbers["do_rotary"].i = 0
    return [helper.make_node("Split", [packed, split], [query, key, value], axis=-1), *turn]


def _config(bundle: Path, changes: dict[str, Any]) -> dict[str, Any]:
    facts, generation = load_manifest(bundle).model, load_manifest(bundle).generation
    decoder = {
        "filename": "model.onnx",
        "head_size": facts.head_dim,
        "hidden_size": facts.hidden_size,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": facts.heads,
        "num_hidden_layers": facts.layers,
        "num_key_value_heads": facts.kv_heads,
    }
    model = {
        "bos_token_id": 1,
        "context_length": facts.max_positions,
        "decoder": decoder,
        "eos_token_id": list(generation.eos_token_ids),
        "type": facts.architecture,
        "vocab_size": facts.vocab_size,
    }
    search = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "past_present_share_buffer": True}
    return {"model": {**model, **changes}, "search": search}
