"""Checks that a manifest's parts agree: facts in range, and every graph's contract the one that the facts demand.

Standard library only.
"""

from reprlib import repr as brief
from typing import TYPE_CHECKING

from .contracts import (
    PROFILES,
    BodyShape,
    DraftShape,
    GraphContract,
    body_contract,
    draft_contract,
    embed_contract,
    fuse_contract,
    head_contract,
    markov_contract,
    select_contract,
)
from .errors import BundleError

if TYPE_CHECKING:
    from .manifest import DraftEntry, GraphEntry, Manifest, ModelFacts, NeuralDraft

_COUNTS = (
    "layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab_size",
    "token_count",
    "max_positions",
)
_ACTIVATIONS = ("float32", "float16")
_NEURAL_KINDS = ("dflash", "eagle3", "mtp", "medusa")
_DRAFT_CONTRACTS = {
    "draft": draft_contract,
    "fuse": fuse_contract,
    "select": select_contract,
    "markov": markov_contract,
}


def check_facts(facts: "ModelFacts") -> None:
    """Counts are positive, and there are no more tokens than rows of the vocabulary."""
    for name in _COUNTS:
        value = getattr(facts, name)
        if not 1 <= value < 1 << 31:
            raise BundleError(f"manifest.model.{name} must be a positive number, not {value}; export the bundle again")
    if facts.token_count > facts.vocab_size:
        raise BundleError(
            f"manifest.model has {facts.token_count} tokens in a vocabulary of {facts.vocab_size}; "
            "export the bundle again"
        )


def check_graphs(manifest: "Manifest") -> None:
    """Buffers are sized after the facts and filled by the graphs, so both must say the same."""
    for graph in manifest.graphs:
        if graph.contract != _expected_contract(manifest, graph):
            raise BundleError(
                f"the contract of graph {brief(graph.file)} is not that of a {brief(graph.role)} graph "
                f"(profile {brief(graph.profile)}) of this model; export the bundle again"
            )
    kinds = {(graph.role, graph.profile, graph.ragged) for graph in manifest.graphs}
    if len(kinds) < len(manifest.graphs) or len({_activations(graph) for graph in manifest.graphs}) > 1:
        raise BundleError(
            "the manifest's graphs contradict each other: two of one kind, or of different types; "
            "export the bundle again"
        )


def _expected_contract(manifest: "Manifest", graph: "GraphEntry") -> GraphContract | None:
    """The contract that role and profile demand for this model; None when there can be none."""
    facts, dtype = manifest.model, _activations(graph)
    if graph.profile not in PROFILES or dtype not in _ACTIVATIONS:
        return None
    if graph.role == "embed":
        return embed_contract(facts.hidden_size, dtype)
    if graph.role == "head":
        return head_contract(facts.hidden_size, facts.vocab_size, dtype)
    names = {spec.name for spec in graph.contract.inputs}
    sliding = "attn_mask_sliding" in names
    if graph.role != "body" or len(names) < facts.layers or (sliding and facts.sliding_window is None):
        return None
    shape = BodyShape(facts.hidden_size, facts.layers, facts.kv_heads, facts.head_dim, dtype, manifest.taps, sliding)
    return body_contract(shape, graph.profile, graph.ragged)


def check_draft(manifest: "Manifest", draft: "DraftEntry") -> None:
    """A draft that reads the target's rows: facts in range, graphs of the contracts these facts demand."""
    neural = draft.neural
    if (draft.kind == "model") != (neural is None) or draft.kind not in ("model", *_NEURAL_KINDS):
        raise BundleError(f"draft {brief(draft.name)} of kind {brief(draft.kind)} cannot be read; update oxidize")
    if neural is None:
        return
    cache = (neural.layers, neural.kv_heads, neural.head_dim)
    counts = (neural.hidden_size, neural.feature_size, neural.max_positions, neural.block_size)
    counts += cache if draft.kind != "medusa" else ()
    vocabulary = manifest.model.vocab_size
    good = all(1 <= count < 1 << 31 for count in counts)
    good = good and (neural.choices is None or 1 <= neural.choices <= vocabulary)
    good = good and all(0 <= tap < manifest.model.layers for tap in neural.taps)
    good = good and (neural.mask_token_id is None or 0 <= neural.mask_token_id < vocabulary)
    if not good:
        raise BundleError(f"the facts of draft {brief(draft.name)} are out of range; export the bundle again")
    _check_roles(draft, neural)
    for graph in draft.graphs:
        if graph.contract != _expected_draft_contract(draft.kind, neural, vocabulary, graph):
            raise BundleError(
                f"the contract of graph {brief(graph.file)} is not that of a {brief(graph.role)} graph of draft "
                f"{brief(draft.name)}; export the bundle again"
            )


def _check_roles(draft: "DraftEntry", neural: "NeuralDraft") -> None:
    """What corrects the rows of a block is there once, and with the facts it needs."""
    roles = {graph.role for graph in draft.graphs}
    selects = "select" in roles
    if {"select", "markov"} <= roles or ("markov" in roles and draft.kind != "dflash"):
        raise BundleError(
            f"draft {brief(draft.name)} of kind {brief(draft.kind)} has graphs {brief(sorted(roles))}; a markov graph "
            "belongs to a dflash draft without a select graph; export the bundle again"
        )
    if selects != (neural.choices is not None) or (selects and draft.kind != "dflash"):
        raise BundleError(
            f"draft {brief(draft.name)} of kind {brief(draft.kind)} has {neural.choices or 'no'} choices per row and "
            f"{'a' if selects else 'no'} select graph; both go together, in a dflash draft; export the bundle again"
        )


def _expected_draft_contract(
    kind: str, neural: "NeuralDraft", vocabulary: int, graph: "GraphEntry"
) -> GraphContract | None:
    inputs = {spec.name: spec for spec in graph.contract.inputs}
    outputs = {spec.name for spec in graph.contract.outputs}
    specs = (*graph.contract.inputs, *graph.contract.outputs)
    dtype = next((spec.dtype for spec in specs if spec.dtype in _ACTIVATIONS), "")
    if not dtype or (graph.role == "draft" and len(inputs) < neural.layers):
        return None
    if graph.role == "embed":
        return embed_contract(neural.hidden_size, dtype)
    if graph.role == "head":
        return head_contract(neural.hidden_size, neural.draft_vocab_size or 0, dtype)
    if graph.role not in _DRAFT_CONTRACTS or (graph.role == "select") > (neural.choices is not None):
        return None
    shape = DraftShape(
        kind=kind,
        hidden_size=neural.hidden_size,
        layers=neural.layers,
        kv_heads=neural.kv_heads,
        head_dim=neural.head_dim,
        feature_size=neural.feature_size,
        vocab_size=vocabulary,
        draft_vocab_size=neural.draft_vocab_size,
        sliding="attn_mask_sliding" in inputs,
        heads=neural.block_size - 1,
        choices=neural.choices,
        confident="confidence" in outputs,
        dtype=dtype,
    )
    return _DRAFT_CONTRACTS[graph.role](shape)


def _activations(graph: "GraphEntry") -> str:
    """The type of the hidden states the graph takes or gives."""
    types = {spec.name: spec.dtype for spec in (*graph.contract.inputs, *graph.contract.outputs)}
    return types.get("hidden", types.get("inputs_embeds", ""))
