"""Folders as optimum writes them for text-generation-with-past: one plain ONNX graph whose cache grows, and configs.

The graph is built here, node by node, after what torch's exporter makes of transformers' decoders; `Model.logits` is
the same model in numpy, without a cache.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from checkpoints import VOCAB, write_tokenizer
from onnx import TensorProto, helper, numpy_helper

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 64, 2, 4, 2, 16, 96, 512
FINAL_NORM = "/model/norm/Mul_1_output_0"
_EPS = 1e-5
_BATCH, _ROWS, _PAST = "batch_size", "sequence_length", "past_sequence_length"
Change = Callable[[onnx.GraphProto], None]


@dataclass(frozen=True)
class Style:
    """In what the graphs of architectures differ.

    positions: "input" (position_ids), "mask" (sum of attention_mask, as OPT's once were) or "cache" (counted from the
    past's shape, as Gemma's). window: rows a layer sees. flat_ids: the lookup gets them as [-1, S] and the head reads a
    reshaped value, as GPT-2's. casts: nodes that change nothing between Concat and present, as GPT-J's. tied: the head
    is the embedding, transposed. external: weights in model.onnx_data. subfolder: where transformers.js looks. fused:
    layers are com.microsoft's MultiHeadAttention, as after ONNX Runtime's optimizer.
    """

    positions: str = "input"
    window: int | None = None
    flat_ids: bool = False
    casts: bool = False
    tied: bool = False
    external: bool = False
    subfolder: bool = False
    fused: bool = False
    dtype: str = "float32"

    @property
    def kv_heads(self) -> int:
        """Fused attention has as many heads of keys as of queries."""
        return HEADS if self.fused else KV_HEADS


STYLES = {
    "plain": Style(),
    "no positions": Style(positions="cache", window=8),
    "positions from the mask": Style(positions="mask", flat_ids=True, casts=True),
    "tied, external": Style(tied=True, external=True, subfolder=True),
    "fused": Style(fused=True),
    "half": Style(dtype="float16"),
}


class Model:
    """Random weights, and logits [S,V] of a text by numpy."""

    def __init__(self, style: Style, seed: int = 0) -> None:
        self.style = style
        shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
        if not style.tied:
            shapes["onnx::MatMul_900"] = (HIDDEN, VOCAB)
        wide, narrow = HEADS * HEAD_DIM, style.kv_heads * HEAD_DIM
        sizes = {"q": (HIDDEN, wide), "k": (HIDDEN, narrow), "v": (HIDDEN, narrow), "o": (wide, HIDDEN)}
        sizes |= {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN), "norm1": (HIDDEN,)}
        for layer in range(LAYERS):
            shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in {**sizes, "norm2": (HIDDEN,)}.items()}
        rng = np.random.default_rng(seed)
        self.weights = {
            name: (rng.normal(0, 0.1, shape) + (len(shape) == 1)).astype(style.dtype) for name, shape in shapes.items()
        }

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Every row of one pass over the whole text, float32."""
        weights = {name: value.astype(np.float32) for name, value in self.weights.items()}
        table = weights["model.embed_tokens.weight"]
        x, rows = table[tokens], np.arange(len(tokens))
        seen = rows[None] <= rows[:, None]
        if self.style.window:
            seen &= rows[None] > rows[:, None] - self.style.window
        for layer in range(LAYERS):
            part = {
                name.rpartition(".")[2]: w for name, w in weights.items() if name.startswith(f"model.layers.{layer}.")
            }
            y = _norm(x, part["norm1"])
            q, k, v = (_heads(y @ part[name]) for name in "qkv")
            q, k = _rotate(q, rows), _rotate(k, rows)
            k, v = (np.repeat(value, HEADS // self.style.kv_heads, 0) for value in (k, v))
            scores = np.where(seen, q @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM), -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = scores / scores.sum(-1, keepdims=True) @ v
            x = x + mixed.swapaxes(0, 1).reshape(len(tokens), -1) @ part["o"]
            y = _norm(x, part["norm2"])
            gate = y @ part["gate"]
            x = x + gate / (1 + np.exp(-gate)) * (y @ part["up"]) @ part["down"]
        head = table.T if self.style.tied else weights["onnx::MatMul_900"]
        return _norm(x, weights["model.norm.weight"]) @ head

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens after the prompt."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS) * weight


def _heads(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1, HEAD_DIM).swapaxes(0, 1)  # [heads,S,D]


def _rotate(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    angles = rows[:, None] * _frequencies()  # [S,D/2]
    cos, sin = (np.concatenate([part, part], -1) for part in (np.cos(angles), np.sin(angles)))
    turned = np.concatenate([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1)
    return x * cos + turned * sin


def _frequencies() -> np.ndarray:
    return (1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)


def write_optimum_folder(
    folder: Path, style: Style = STYLES["plain"], change: Change | None = None, seed: int = 0, **config: Any
) -> Path:
    """A folder with the model of this style and seed; `change` edits its graph, `config` the keys of config.json."""
    place = folder / "onnx" if style.subfolder else folder
    place.mkdir(parents=True)
    graph = _Writer(Model(style, seed)).graph()
    if change is not None:
        change(graph)
    imports = [helper.make_opsetid("", 18), *([helper.make_opsetid("com.microsoft", 1)] if style.fused else [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8, producer_name="pytorch")
    onnx.save_model(model, place / "model.onnx", save_as_external_data=style.external, location="model.onnx_data")
    write_tokenizer(folder)
    described = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCAB,
        "eos_token_id": 2,
        "sliding_window": style.window,
    }
    stated = {key: value for key, value in {**described, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "transformers_version": "4.57.6"})
    )
    return folder


class _Writer:
    """The graph under construction; values are called as torch's exporter calls them."""

    def __init__(self, model: Model) -> None:
        self.style, self.weights = model.style, model.weights
        self.kind = TensorProto.FLOAT16 if self.style.dtype == "float16" else TensorProto.FLOAT
        self.nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], output.removesuffix("_output_0"), **attributes))
        return output

    def value(self, array: Any, name: str) -> str:
        """A constant, as a node."""
        return self.op("Constant", [], f"{name}_output_0", value=numpy_helper.from_array(np.asarray(array), "value"))

    def ints(self, *numbers: int, name: str) -> str:
        return self.value(np.array(numbers, np.int64), name)

    def graph(self) -> onnx.GraphProto:
        x = self._embedded()
        self._mask()
        self._rotary()
        for layer in range(LAYERS):
            x = self._layer(layer, x)
        normed = self._norm(x, "model.norm.weight", "/model/norm")
        if self.style.flat_ids:
            shape = self.op("Shape", [normed], "/model/Shape_9_output_0")
            normed = self.op("Reshape", [normed, shape], "/model/Reshape_9_output_0")
        head = "onnx::MatMul_900"
        if self.style.tied:
            head = self.op(
                "Transpose", ["model.embed_tokens.weight"], "model.embed_tokens.weight_transposed", perm=[1, 0]
            )
        self.op("MatMul", [normed, head], "logits")
        tensors = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        return helper.make_graph(self.nodes, "main_graph", self._inputs(), self._outputs(), tensors)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        named = {"input_ids": [_BATCH, _ROWS], "attention_mask": [_BATCH, f"{_PAST} + {_ROWS}"]}
        if self.style.positions == "input":
            named["position_ids"] = [_BATCH, _ROWS]
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in named.items()]
        return inputs + self._caches("past_key_values", _PAST)

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        logits = helper.make_tensor_value_info("logits", self.kind, [_BATCH, _ROWS, VOCAB])
        return [logits, *self._caches("present", f"{_PAST} + {_ROWS}")]

    def _caches(self, prefix: str, rows: str) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(
                f"{prefix}.{layer}.{part}", self.kind, [_BATCH, self.style.kv_heads, rows, HEAD_DIM]
            )
            for layer in range(LAYERS)
            for part in ("key", "value")
        ]

    def _embedded(self) -> str:
        ids = "input_ids"
        if self.style.flat_ids:
            shape = self.op("Shape", [ids], "/model/Shape_output_0")
            rows = self.op("Gather", [shape, self.value(np.int64(1), "/model/one")], "/model/Gather_output_0")
            rows = self.op("Unsqueeze", [rows, self.ints(0, name="/model/zero")], "/model/Unsqueeze_output_0")
            flat = self.op("Concat", [self.ints(-1, name="/model/any"), rows], "/model/Concat_output_0", axis=0)
            ids = self.op("Reshape", [ids, flat], "/model/Reshape_output_0")
        return self.op("Gather", ["model.embed_tokens.weight", ids], "/model/embed_tokens/Gather_output_0")

    def _mask(self) -> None:
        """/mask [B,1,S,P+S], bool, and /rows [S], the rows' columns: from shapes, the padding from attention_mask."""
        one, zero = self.value(np.int64(1), "/one"), self.value(np.int64(0), "/zero")
        past = self.op("Shape", ["past_key_values.0.key"], "/Shape_1_output_0")
        past = self.op("Gather", [past, self.value(np.int64(2), "/two")], "/past")
        ids = self.op("Shape", ["input_ids"], "/Shape_2_output_0")
        total = self.op("Add", [past, self.op("Gather", [ids, one], "/count")], "/total")
        rows = self.op("Range", [past, total, one], "/rows")
        columns = self.op("Range", [zero, total, one], "/columns")
        rows = self.op("Unsqueeze", [rows, self.ints(1, name="/axis_1")], "/rows_down")
        seen = self.op("LessOrEqual", [columns, rows], "/causal")
        if self.style.window:
            low = self.op("Sub", [rows, self.value(np.int64(self.style.window), "/window")], "/low")
            seen = self.op("And", [seen, self.op("Greater", [columns, low], "/near")], "/band")
        padding = self.op("Cast", ["attention_mask"], "/padding", to=TensorProto.BOOL)
        padding = self.op("Unsqueeze", [padding, self.ints(1, 2, name="/axes")], "/padding_4d")
        self.op("And", [seen, padding], "/mask")

    def _rotary(self) -> None:
        """/cos and /sin [B,1,S,D]."""
        first = self.ints(0, name="/axis_0")
        if self.style.positions == "input":
            positions = "position_ids"
        elif self.style.positions == "cache":
            positions = self.op("Unsqueeze", ["/rows", first], "/cache_position")
        else:
            summed = self.op("CumSum", ["attention_mask", self.value(np.int64(1), "/along")], "/CumSum_output_0")
            summed = self.op("Sub", [summed, self.value(np.int64(1), "/start")], "/Sub_output_0")
            begin = self.op("Unsqueeze", ["/past", first], "/begin")
            ends = [self.ints(2**63 - 1, name="/end"), self.ints(1, name="/along_1")]
            positions = self.op("Slice", [summed, begin, *ends], "/Slice_output_0")
        angles = self.op("Cast", [positions], "/positions", to=TensorProto.FLOAT)
        angles = self.op("Unsqueeze", [angles, self.ints(1, 3, name="/axes_13")], "/positions_4d")
        angles = self.op("Mul", [angles, self.value(_frequencies(), "/inv_freq")], "/freqs")
        angles = self.op("Concat", [angles, angles], "/emb", axis=-1)
        for kind in ("Cos", "Sin"):
            self.op("Cast", [self.op(kind, [angles], f"/{kind}_output_0")], f"/{kind.lower()}", to=self.kind)

    def _layer(self, layer: int, x: str) -> str:
        where, tensors = f"/model/layers.{layer}", f"model.layers.{layer}"
        y = self._norm(x, f"{tensors}.norm1", f"{where}/input_layernorm")
        query, key, value = (self._split(y, f"{tensors}.{part}", f"{where}/self_attn/{part}") for part in "qkv")
        query, key = self._turn(query, f"{where}/self_attn/q"), self._turn(key, f"{where}/self_attn/k")
        if self.style.fused:
            mixed = self._attend_fused(layer, f"{where}/self_attn", query, key, value)
        else:
            key, value = self._grow(layer, "key", key), self._grow(layer, "value", value)
            mixed = self._attend(f"{where}/self_attn", query, key, value)
        x = self.op("Add", [x, self.op("MatMul", [mixed, f"{tensors}.o"], f"{where}/o_proj")], f"{where}/Add_output_0")
        y = self._norm(x, f"{tensors}.norm2", f"{where}/post_attention_layernorm")
        gate, up = (self.op("MatMul", [y, f"{tensors}.{part}"], f"{where}/mlp/{part}") for part in ("gate", "up"))
        gate = self.op("Mul", [gate, self.op("Sigmoid", [gate], f"{where}/mlp/Sigmoid")], f"{where}/mlp/silu")
        down = self.op("Mul", [gate, up], f"{where}/mlp/Mul_output_0")
        down = self.op("MatMul", [down, f"{tensors}.down"], f"{where}/mlp/down_proj/MatMul_output_0")
        return self.op("Add", [x, down], f"{where}/Add_1_output_0")

    def _norm(self, x: str, weight: str, where: str) -> str:
        """In float32, as transformers does."""
        x = self.op("Cast", [x], f"{where}/Cast_output_0", to=TensorProto.FLOAT)
        squares = self.op("Pow", [x, self.value(np.float32(2), f"{where}/Constant")], f"{where}/Pow_output_0")
        mean = self.op("ReduceMean", [squares, self.ints(-1, name=f"{where}/axis")], f"{where}/ReduceMean_output_0")
        mean = self.op("Add", [mean, self.value(np.float32(_EPS), f"{where}/eps")], f"{where}/Add_output_0")
        x = self.op("Div", [x, self.op("Sqrt", [mean], f"{where}/Sqrt_output_0")], f"{where}/Div_output_0")
        x = self.op("Cast", [x], f"{where}/Cast_1_output_0", to=self.kind)
        return self.op("Mul", [weight, x], f"{where}/Mul_1_output_0")

    def _split(self, y: str, weight: str, where: str) -> str:
        """[B,S,heads*D] as [B,heads,S,D]."""
        y = self.op("MatMul", [y, weight], f"{where}_proj/MatMul_output_0")
        y = self.op("Reshape", [y, self.ints(0, 0, -1, HEAD_DIM, name=f"{where}/shape")], f"{where}/Reshape_output_0")
        return self.op("Transpose", [y], f"{where}/Transpose_output_0", perm=[0, 2, 1, 3])

    def _turn(self, x: str, where: str) -> str:
        half, axis = self.ints(HEAD_DIM // 2, name=f"{where}/half"), self.ints(3, name=f"{where}/axis")
        start, end = self.ints(0, name=f"{where}/start"), self.ints(2**63 - 1, name=f"{where}/end")
        low = self.op("Slice", [x, start, half, axis], f"{where}/Slice_output_0")
        high = self.op("Neg", [self.op("Slice", [x, half, end, axis], f"{where}/Slice_1_output_0")], f"{where}/Neg")
        turned = self.op("Concat", [high, low], f"{where}/Concat_output_0", axis=-1)
        kept = self.op("Mul", [x, "/cos"], f"{where}/Mul_output_0")
        return self.op("Add", [kept, self.op("Mul", [turned, "/sin"], f"{where}/Mul_2")], f"{where}/Add_output_0")

    def _grow(self, layer: int, part: str, new: str) -> str:
        """Past and new rows; the next nodes read the same value that is given back."""
        present, past = f"present.{layer}.{part}", f"past_key_values.{layer}.{part}"
        if not self.style.casts:
            return self.op("Concat", [past, new], present, axis=-2)
        whole = self.op("Concat", [past, new], f"/model/layers.{layer}/{part}/Concat_output_0", axis=-2)
        self.op("Cast", [whole], present, to=self.kind)
        return whole

    def _attend(self, where: str, query: str, key: str, value: str) -> str:
        key, value = self._repeat(key, f"{where}/k_rep"), self._repeat(value, f"{where}/v_rep")
        key = self.op("Transpose", [key], f"{where}/Transpose_3_output_0", perm=[0, 1, 3, 2])
        scale = self.value(np.array(HEAD_DIM**-0.5, self.style.dtype), f"{where}/scale")
        scores = self.op("Mul", [self.op("MatMul", [query, key], f"{where}/MatMul_output_0"), scale], f"{where}/scaled")
        lowest = self.value(np.array(np.finfo(self.style.dtype).min, self.style.dtype), f"{where}/lowest")
        scores = self.op("Where", ["/mask", scores, lowest], f"{where}/Where_output_0")
        scores = self.op("Softmax", [scores], f"{where}/Softmax_output_0", axis=-1)
        mixed = self.op("MatMul", [scores, value], f"{where}/MatMul_1_output_0")
        return self._merge(mixed, where)

    def _attend_fused(self, layer: int, where: str, query: str, key: str, value: str) -> str:
        """One node that attends and keeps the cache."""
        parts = zip("qkv", (query, key, value), strict=True)
        merged = [self._merge(x, f"{where}/{part}_rows") for part, x in parts]
        shown = [self.value(np.array(x, self.style.dtype), f"{where}/{name}") for name, x in (("yes", 0), ("no", -1e4))]
        bias = self.op("Where", ["/mask", *shown], f"{where}/bias")
        past, present = (
            [f"{kind}.{layer}.{part}" for part in ("key", "value")] for kind in ("past_key_values", "present")
        )
        self.nodes.append(
            helper.make_node(
                "MultiHeadAttention",
                [*merged, "", "", bias, *past],
                [f"{where}/out", *present],
                f"{where}/MultiHeadAttention",
                domain="com.microsoft",
                num_heads=HEADS,
            )
        )
        return f"{where}/out"

    def _merge(self, x: str, where: str) -> str:
        """[B,heads,S,D] as [B,S,heads*D]."""
        x = self.op("Transpose", [x], f"{where}/Transpose_output_0", perm=[0, 2, 1, 3])
        return self.op("Reshape", [x, self.ints(0, 0, -1, name=f"{where}/flat")], f"{where}/Reshape_output_0")

    def _repeat(self, x: str, where: str) -> str:
        """Every head of keys or values for its group of queries."""
        group = HEADS // KV_HEADS
        x = self.op("Unsqueeze", [x, self.ints(2, name=f"{where}/axis")], f"{where}/Unsqueeze_output_0")
        x = self.op("Tile", [x, self.ints(1, 1, group, 1, 1, name=f"{where}/times")], f"{where}/Tile_output_0")
        shape = self.value(np.array([0, HEADS, -1, HEAD_DIM], np.int64), f"{where}/shape")
        return self.op("Reshape", [x, shape], f"{where}/Reshape_output_0")
