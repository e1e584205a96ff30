"""Drafts small enough to write down twice: as ONNX graphs that keep the contracts, and in numpy from scratch.

Each has a full and a sliding layer, and positions that matter, so a row read twice, late, at a wrong place or behind a
wrong mask changes the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from fakes import FakeTarget
from onnx import helper, numpy_helper

from oxidize.runtime.cache import CacheShape
from oxidize.runtime.contracts import (
    DraftShape,
    GraphContract,
    draft_contract,
    embed_contract,
    fuse_contract,
    head_contract,
)
from oxidize.runtime.drafters.blocks import RowByRow
from oxidize.runtime.drafters.chain import Chain, Fuse
from oxidize.runtime.drafters.dflash import BlockPlan, DFlash
from oxidize.runtime.drafters.heads import OwnHead, TargetHead
from oxidize.runtime.drafters.neural import row_picker
from oxidize.runtime.drafters.passes import DraftPasses, MaskRule
from oxidize.runtime.drafters.pending import PendingRows
from oxidize.runtime.drafters.reader import DraftParts, RowReader
from oxidize.runtime.ends import Embedder, Scorer
from oxidize.runtime.rows import PassRows, Rows
from oxidize.runtime.session import Device, GraphSession, RuntimeOptions, Tensor

HIDDEN = 8
TAPPED = (1, 3, 5)  # the target's taps
TYPES = {"float32": 1, "int64": 7, "bool": 9}
OPTIONS = RuntimeOptions(provider="cpu", threads=1)


@dataclass(frozen=True)
class Toy:
    """One draft. kind "mtp" reads hidden states, "eagle3" two taps through fuse, "dflash" two taps."""

    kind: str
    block: int = 4
    mask: int = 3
    from_anchor: bool = False
    rule: MaskRule = field(default_factory=MaskRule)
    limit: int = 4096
    ids: tuple[int, ...] | None = None  # of its own vocabulary
    own_embedding: bool = False
    vocabulary: int = 29

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.kind == "mtp" else (5, 1)

    @property
    def width(self) -> int:
        return HIDDEN * max(1, len(self.taps))

    def weights(self) -> dict[str, np.ndarray]:
        return _weights(self)

    def shape(self) -> DraftShape:
        vocabulary = len(self.ids) if self.ids is not None else None
        return DraftShape(self.kind, HIDDEN, 2, 1, HIDDEN, self.width, self.vocabulary, vocabulary, sliding=True)

    # numpy, from scratch

    def context_rows(self, features: np.ndarray, embeds: np.ndarray) -> np.ndarray:
        """The rows [n,H] of committed text before any layer, for a chain from what follows too."""
        weights = self.weights()
        turned = weights["places"][: len(features)]
        if self.kind == "dflash":
            return features @ weights["read"] + turned
        fused = features @ weights["fuse"] if self.kind == "eagle3" else features
        return fused @ weights["read"] + embeds @ weights["token"] + turned

    def naive_block(self, features: np.ndarray, embeds: np.ndarray) -> np.ndarray:
        """DFlash's hidden rows or logits [S,*] behind features [n,F] of the text but its anchor."""
        weights, known = self.weights(), len(features)
        context = self.context_rows(features, embeds)
        places = np.arange(known, known + len(embeds))
        x = embeds + weights["places"][places]
        for layer in range(2):
            rows = np.concatenate([context, x])
            x = x + self._attend(layer, x, rows, places)
        return self._finish(x)

    def naive_chain(self, features: np.ndarray, embeds: np.ndarray, step: Callable[[np.ndarray], np.ndarray]) -> None:
        """Rows of the text, then one at a time of what `step` drafts: it gets a row [*] and returns an embedding."""
        weights, places = self.weights(), np.arange(len(features))
        inputs = self.context_rows(features, embeds)
        while True:
            x = inputs
            for layer in range(2):
                x = x + self._attend(layer, x, x, places)
            embed = step(self._finish(x)[-1])
            if embed is None:
                return
            places = np.arange(len(places) + 1)
            row = x[-1] @ weights["read"] + embed @ weights["token"] + weights["places"][places[-1]]
            inputs = np.concatenate([inputs, row[None]])

    def _attend(self, layer: int, x: np.ndarray, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        weights, columns = self.weights(), np.arange(len(rows))
        q, k, v = x @ weights[f"q{layer}"], rows @ weights[f"k{layer}"], rows @ weights[f"v{layer}"]
        seen = np.ones((len(x), len(rows)), bool)
        if self.rule.sliding_causal if layer else self.rule.causal:
            seen &= columns <= places[:, None]
        if layer:
            seen &= columns > places[:, None] - self.rule.window
        scores = np.where(seen, q @ k.T / np.sqrt(HIDDEN), -np.inf)
        weight = np.exp(scores - scores.max(1, keepdims=True))
        return weight / weight.sum(1, keepdims=True) @ v

    def _finish(self, x: np.ndarray) -> np.ndarray:
        return np.tanh(x) if self.ids is None else np.tanh(x) @ self.weights()["head"].T

    # ONNX

    def write(self, folder: Path) -> dict[str, GraphSession]:
        """The graphs in a folder, and their sessions by role."""
        contracts = {"draft": draft_contract(self.shape())}
        if self.kind == "eagle3":
            contracts["fuse"] = fuse_contract(self.shape())
        if self.own_embedding:
            contracts["embed"] = embed_contract(HIDDEN)
        if self.ids is not None:
            contracts["head"] = head_contract(HIDDEN, len(self.ids))
        sessions = {}
        for role, contract in contracts.items():
            path = folder / f"{role}.onnx"
            onnx.save(_model(contract, getattr(self, f"_{role}_nodes")(), self.weights()), path)
            sessions[role] = GraphSession(path, contract, "cpu", OPTIONS, light=True)
        return sessions

    def _fuse_nodes(self) -> list[onnx.NodeProto]:
        return [helper.make_node("MatMul", ["features", "fuse"], ["fused"])]

    def _embed_nodes(self) -> list[onnx.NodeProto]:
        return [helper.make_node("Gather", ["embed", "input_ids"], ["inputs_embeds"])]

    def _head_nodes(self) -> list[onnx.NodeProto]:
        wanted = helper.make_node("Gather", ["hidden", "rows"], ["wanted"])
        return [wanted, helper.make_node("Gemm", ["wanted", "head"], ["logits"], transB=1)]

    def _draft_nodes(self) -> list[onnx.NodeProto]:
        nodes = []

        def op(kind: str, inputs: Sequence[str], output: str, **attributes) -> str:
            nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
            return output

        def turned(positions: str) -> str:
            return op("Gather", ["places", positions], f"{positions}.turned")  # fails beyond the table's end

        turns = turned("position_ids")
        context = ""
        if self.kind == "dflash":
            read = op("MatMul", ["features", "read"], "features.read")
            context = op("Add", [read, turned("context_positions")], "context")
            x = op("Add", ["inputs_embeds", turns], "x")
        else:
            both = [op("MatMul", ["fused", "read"], "a"), op("MatMul", ["inputs_embeds", "token"], "b")]
            x = op("Add", [op("Add", both, "ab"), turns], "x")
        for layer, mask in enumerate(("attn_mask", "attn_mask_sliding")):
            rows = op("Concat", [context, x], f"rows{layer}", axis=1) if context else x
            kept = []
            for part, name in (("k", "key"), ("v", "value")):
                made = op("MatMul", [rows, f"{part}{layer}"], f"{part}{layer}.made")
                made = op("Unsqueeze", [made, "one"], f"{part}{layer}.head")
                cache = [f"past_key_values.{layer}.{name}", made, "write_indices"]
                kept.append(op("TensorScatter", cache, f"present.{layer}.{name}", axis=2))
            query = op("Unsqueeze", [op("MatMul", [x, f"q{layer}"], f"q{layer}.made"), "one"], f"q{layer}.head")
            mixed = op("Attention", [query, *kept, mask], f"mixed{layer}", scale=HIDDEN**-0.5)
            x = op("Add", [x, op("Squeeze", [mixed, "one"], f"mixed{layer}.flat")], f"x{layer}")
        if self.kind != "dflash":
            op("Identity", [x], "recycled")
        op("Tanh", [x], "hidden")
        return nodes


@cache
def _weights(toy: Toy) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    sizes = {"read": (toy.width if toy.kind == "dflash" else HIDDEN, HIDDEN), "token": (HIDDEN, HIDDEN)}
    sizes |= {f"{part}{layer}": (HIDDEN, HIDDEN) for layer in range(2) for part in "qkv"}
    sizes |= {"fuse": (toy.width, HIDDEN), "head": (len(toy.ids or ()), HIDDEN)}
    sizes |= {"embed": (toy.vocabulary, HIDDEN), "frequencies": (HIDDEN,)}
    made = {name: random.normal(0, 0.6, size).astype(np.float32) for name, size in sizes.items()}
    places = np.sin(np.arange(toy.limit)[:, None] * made.pop("frequencies"))
    return {**made, "places": places.astype(np.float32)}


def _model(contract: GraphContract, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    def values(specs):
        return [helper.make_tensor_value_info(spec.name, TYPES[spec.dtype], spec.shape) for spec in specs]

    used = {name for node in nodes for name in node.input}
    arrays = {**weights, "one": np.array([1])}
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in used]
    graph = helper.make_graph(nodes, contract.role, values(contract.inputs), values(contract.outputs), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model)
    return model


class ToyTarget(FakeTarget):
    """A fake target whose rows depend on every token up to theirs; it embeds and scores for drafts."""

    def __init__(self, vocabulary: int = 29, **options) -> None:
        super().__init__(vocabulary, **options)
        self.taps = TAPPED
        random = np.random.default_rng(9)
        self.table = random.normal(0, 1, (vocabulary, HIDDEN)).astype(np.float32)
        self.head = random.normal(0, 1.5, (HIDDEN, vocabulary)).astype(np.float32)
        self._spans: list[tuple[list[int], int]] = []

    def forward(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        logits = super().forward(requests)
        self._spans = [(self.held(request.slot), len(request.tokens)) for request in requests]
        return logits

    def rows(self, index: int) -> PassRows:
        tokens, count = self._spans[index]
        return self.rows_of(tokens, len(tokens) - count)

    def rows_of(self, tokens: Sequence[int], start: int) -> PassRows:
        """The rows of tokens[start:]."""
        state, hidden, taps = 7, [], []
        for index, token in enumerate(tokens):
            state = (state * 1103515245 + token + 12345) % (1 << 40)
            if index >= start:
                random = np.random.default_rng(state)
                hidden.append(random.normal(0, 1, HIDDEN))
                taps.append(random.normal(0, 1, HIDDEN * len(TAPPED)))
        return PassRows(np.array(hidden, np.float32), np.array(taps, np.float32))

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        tensor = Tensor((1, len(ids), HIDDEN), "float32", Device("cpu"))
        tensor.write(self.table[list(ids)])
        return tensor

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        return hidden.read().reshape(-1, HIDDEN)[first : first + count] @ self.head


def open_toy(toy: Toy, target: ToyTarget, folder: Path) -> RowReader:
    """The drafter of a toy, over graphs written into `folder`."""
    sessions = toy.write(folder)
    parts = DraftParts(
        name=toy.kind,
        passes=DraftPasses(sessions, CacheShape(2, 1, HIDDEN), toy.rule, toy.limit),
        pending=PendingRows(toy.width, "float32"),
        pick=row_picker(toy.taps, target.taps),
        embedding=Embedder(sessions["embed"]) if toy.own_embedding else target,
        head=TargetHead(target) if toy.ids is None else _own_head(toy.ids, sessions["head"], target),
        max_positions=toy.limit,
    )
    if toy.kind == "dflash":
        plan = BlockPlan(toy.block, toy.mask, 0 if toy.from_anchor else 1)
        return DFlash(parts, plan, RowByRow(parts.head), HIDDEN)
    return Chain(parts, Fuse(sessions["fuse"]) if toy.kind == "eagle3" else None)


def _own_head(ids: Sequence[int], session: GraphSession, target: ToyTarget) -> OwnHead:
    return OwnHead(Scorer(session, len(ids)), np.array(ids), target.token_count)


class Naive:
    """What a toy must propose, computed from the whole text each time."""

    def __init__(self, toy: Toy, target: ToyTarget) -> None:
        self.toy, self.target = toy, target
        self.table = toy.weights()["embed"] if toy.own_embedding else target.table

    def features(self, committed: Sequence[int]) -> np.ndarray:
        """[n-1,F] of all tokens but the anchor."""
        rows = self.target.rows_of(committed[:-1], 0)
        if not self.toy.taps:
            return rows.hidden
        parts = [rows.taps[:, TAPPED.index(tap) * HIDDEN :][:, :HIDDEN] for tap in self.toy.taps]
        return np.concatenate(parts, axis=1)

    def law(self, row: np.ndarray) -> np.ndarray:
        """Probabilities [V] at temperature 1."""
        if self.toy.ids is None:
            logits = row @ self.target.head
        else:
            logits = np.full(self.target.token_count, -np.inf)
            logits[list(self.toy.ids)] = row
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return weights / weights.sum()

    def laws(self, committed: Sequence[int], drafted: Sequence[int]) -> list[np.ndarray]:
        """The law before each of the drafted tokens."""
        features = self.features(committed)
        if self.toy.kind == "dflash":
            block = [committed[-1]] + [self.toy.mask] * (self.toy.block - 1)
            rows = self.toy.naive_block(features, self.table[block])
            first = 0 if self.toy.from_anchor else 1
            return [self.law(row) for row in rows[first : first + len(drafted)]]
        laws: list[np.ndarray] = []

        def step(row: np.ndarray) -> np.ndarray | None:
            laws.append(self.law(row))
            return self.table[drafted[len(laws) - 1]] if len(laws) < len(drafted) else None

        self.toy.naive_chain(features, self.table[list(committed[1:])], step)
        return laws
