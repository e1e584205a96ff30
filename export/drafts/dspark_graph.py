"""What DSpark adds to DFlash's graph: the graph that corrects a row's logits by the token before it.

After DeepSeek's DSpark ("DeepSpec"). A token has a code, W1[token]; the correction is W2 code. Gated, each entry of
the code is weighed by sigmoid(G [row, code] + b) before. How likely the row's token is kept is
sigmoid(w [row, code] + b), of the code as it is.
"""

import numpy as np

from ..layers import Scope, float32, linear
from ..quantize import BLOCK
from ..tensors import Projection
from .base import CONFIDENCE, MARKOV, DraftConfig, MarkovHead


def markov_graph(config: DraftConfig, scope: Scope) -> None:
    """hidden [1,H], previous [1] -> bias float32 [1,V], and confidence float32 [1] where the draft is confident."""
    graph, markov = scope.graph, config.markov
    assert markov is not None
    code = _code(scope, markov.rank)  # [1,R]
    weighed = _gated(scope, markov.rank, code) if markov.gated else code
    rows = config.draft_vocab_size or config.model.vocab_size
    bias = linear(scope, weighed, _projection("table", f"{MARKOV}.markov_w2", rows, markov.rank))
    graph.output("bias", float32(scope, bias))
    if markov.confident:
        graph.output("confidence", _confidence(scope, markov, code))


def _code(scope: Scope, rank: int) -> str:
    """The code [1,R] of the token before; at "int4" kept like an embedding table, if its rows are of whole blocks."""
    graph, name = scope.graph, f"{MARKOV}.markov_w1"
    table = _projection("table", name, scope.config.vocab_size, rank)
    ids = graph.input("previous")
    if scope.plan.precision != "int4" or rank % BLOCK:
        weight = graph.stored(f"{name}.weight", scope.tensors.table(name, scope.config.vocab_size, rank))
        return graph.op("Gather", [weight, ids], name, {"axis": 0})
    row = graph.op("Unsqueeze", [ids, graph.constant("axis.0", np.array([0], np.int64))], "previous.row")  # [1,1]
    codes = scope.profile.gather_blocks(graph, row, scope.tensors.blocks(table, scope.plan.head_bits), name)
    flat = graph.constant("one_code", np.array([1, rank], np.int64))
    return graph.op("Reshape", [codes, flat], f"{name}.flat")


def _gated(scope: Scope, rank: int, code: str) -> str:
    graph, name = scope.graph, f"{MARKOV}.gate_proj"
    both = graph.op("Concat", [graph.input("hidden"), code], f"{name}.input", {"axis": 1})  # [1,H+R]
    gate = linear(scope, both, _projection("qkv", name, rank, scope.config.hidden_size + rank, bias=True))
    return graph.op("Mul", [graph.op("Sigmoid", [gate], f"{name}.sigmoid"), code], f"{name}.code")


def _confidence(scope: Scope, markov: MarkovHead, code: str) -> str:
    """[1]. One row of weights, so it is never quantised, and computed in float32."""
    graph, width = scope.graph, scope.config.hidden_size
    features = float32(scope, graph.input("hidden"))
    if markov.confidence_reads_code:
        width += markov.rank
        features = graph.op("Concat", [features, float32(scope, code)], f"{CONFIDENCE}.input", {"axis": 1})
    projection = _projection("table", CONFIDENCE, 1, width)
    weight = float32(scope, graph.stored(f"{CONFIDENCE}.weight", scope.tensors.dense(projection)))
    score = graph.op("MatMul", [features, weight], CONFIDENCE)  # [1,1]
    if markov.confidence_bias:
        bias = float32(scope, graph.stored(f"{CONFIDENCE}.bias", scope.tensors.bias(projection)))
        score = graph.op("Add", [score, bias], f"{CONFIDENCE}.sum")
    flat = graph.op("Squeeze", [score, graph.constant("axis.1", np.array([1], np.int64))], f"{CONFIDENCE}.flat")
    return graph.op("Sigmoid", [flat], f"{CONFIDENCE}.sigmoid")


def _projection(part: str, name: str, rows: int, columns: int, bias: bool = False) -> Projection:
    return Projection(part, name, (name,), (rows,), columns, bias)
