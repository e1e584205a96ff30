"""The embedding and the head that a draft brought along, as graphs like a target's."""

from functools import partial

from oxidize.runtime.contracts import embed_contract, head_contract

from ..roles import embed_graph, score_rows
from .base import DraftConfig, DraftGraph


def own_ends(config: DraftConfig, dtype: str) -> list[DraftGraph]:
    """ "embed" and "head", as far as the draft has its own; activations of `dtype`."""
    hidden, rows = config.model.hidden_size, config.draft_vocab_size
    graphs = []
    if config.own_embedding:
        graphs.append(DraftGraph(embed_contract(hidden, dtype), embed_graph, "embed.onnx"))
    if rows is not None:
        write = partial(score_rows, name="lm_head", rows=rows)
        graphs.append(DraftGraph(head_contract(hidden, rows, dtype), write, "head.onnx"))
    return graphs
