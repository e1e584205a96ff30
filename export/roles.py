"""The graphs of a bundle: embed, body and head, written over the layer vocabulary."""

import numpy as np

from .layers import Scope, Stream, residual_norm
from .models import decoder_layer
from .tensors import Projection, StoredBlocks

EMBEDDING = "model.embed_tokens"


def embed_graph(scope: Scope) -> None:
    """input_ids -> inputs_embeds: rows of the table, scaled where the model says so."""
    graph, config = scope.graph, scope.config
    ids = graph.input("input_ids")
    if scope.plan.precision == "int4":
        rows = scope.profile.gather_blocks(graph, ids, _blocks(scope, EMBEDDING, config.vocab_size), "embed_tokens")
    else:
        table = scope.tensors.table(EMBEDDING, config.vocab_size, config.hidden_size)
        rows = graph.op("Gather", [graph.stored("embed_tokens.weight", table), ids], "embed_tokens", {"axis": 0})
    if config.embedding_scale != 1.0:
        scale = graph.constant("embedding_scale", np.array(config.embedding_scale, scope.plan.dtype))
        rows = graph.op("Mul", [rows, scale], "embed_scale")
    graph.output("inputs_embeds", rows)


def head_graph(scope: Scope) -> None:
    """hidden, rows -> logits, see `score_rows`; the weights are the embedding's where the model ties them."""
    score_rows(scope, EMBEDDING if scope.config.tie_word_embeddings else "lm_head", scope.config.vocab_size)


def score_rows(scope: Scope, name: str, rows: int) -> None:
    """hidden, rows -> logits: the wanted rows times the table `name` [rows,H], as float32."""
    graph, hidden = scope.graph, scope.config.hidden_size
    wanted = graph.op("Gather", [graph.input("hidden"), graph.input("rows")], "rows_wanted", {"axis": 0})
    if scope.plan.precision == "int4":
        logits = scope.profile.matmul_blocks(graph, wanted, _blocks(scope, name, rows), None, "lm_head")
    else:
        weight = graph.stored("lm_head.weight", scope.tensors.table(name, rows, hidden))
        logits = graph.op("Gemm", [wanted, weight], "lm_head", {"transB": 1})
    if scope.plan.dtype != "float32":
        logits = graph.op("Cast", [logits], "lm_head.float32", {"to": graph.element_type("float32")})
    graph.output("logits", logits)


def body_graph(scope: Scope) -> None:
    """All decoder layers and the final norm; taps are the residual stream after the layers asked for."""
    graph, config = scope.graph, scope.config
    layer = decoder_layer(config.architecture)
    stream, outputs = Stream(graph.input("inputs_embeds")), []  # outputs[i]: the stream after layer i
    for index in range(config.layers):
        x, residual = residual_norm(scope, stream, f"model.layers.{index}.input_layernorm")
        outputs.append(residual)
        stream = layer(scope, index, x, residual)
    hidden, residual = residual_norm(scope, stream, "model.norm")
    outputs = [*outputs[1:], residual]
    graph.output("hidden", hidden)
    if scope.plan.taps:
        graph.output("taps", graph.op("Concat", [outputs[tap] for tap in scope.plan.taps], "taps", {"axis": -1}))


def _blocks(scope: Scope, name: str, rows: int) -> StoredBlocks:
    projection = Projection("table", name, (name,), (rows,), scope.config.hidden_size)
    return scope.tensors.blocks(projection, scope.plan.head_bits)
