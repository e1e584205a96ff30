"""DFlash 2 in the manifest: the number of choices and the graph that makes them go together, in every respect."""

import json
from dataclasses import replace
from typing import Any

import pytest

from oxidize.runtime.contracts import (
    BodyShape,
    DraftShape,
    GraphContract,
    body_contract,
    draft_contract,
    embed_contract,
    head_contract,
    markov_contract,
    select_contract,
)
from oxidize.runtime.errors import BundleError
from oxidize.runtime.manifest import (
    DraftEntry,
    FileEntry,
    GenerationDefaults,
    GraphEntry,
    Manifest,
    ModelFacts,
    NeuralDraft,
    Provenance,
    TokenizerFiles,
    parse_manifest,
)

HIDDEN, VOCAB, CHOICES = 8, 20, 3
SHAPE = DraftShape("dflash", HIDDEN, 1, 1, 4, 2 * HIDDEN, VOCAB, choices=CHOICES)
FACTS = NeuralDraft(
    layers=1,
    kv_heads=1,
    head_dim=4,
    hidden_size=HIDDEN,
    feature_size=2 * HIDDEN,
    taps=(0, 1),
    tap_convention="output of layer i",
    max_positions=64,
    block_size=4,
    mask_token_id=3,
    choices=CHOICES,
)


def entry(contract: GraphContract) -> GraphEntry:
    return GraphEntry(contract.role, "ort", False, f"{contract.role}.onnx", (), 24, "fp32", "1.31", contract)


DRAFT, SELECT = entry(draft_contract(SHAPE)), entry(select_contract(SHAPE))


def manifest(
    neural: NeuralDraft = FACTS, graphs: tuple[GraphEntry, ...] = (DRAFT, SELECT), kind: str = "dflash"
) -> Any:
    """A decoded manifest with this draft."""
    target = (
        entry(embed_contract(HIDDEN)),
        entry(body_contract(BodyShape(HIDDEN, 2, 1, 4, taps=(0, 1)), "ort")),
        entry(head_contract(HIDDEN, VOCAB)),
    )
    names = ["tokenizer.json", *(graph.file for graph in (*target, *graphs))]
    made = Manifest(
        schema_version=1,
        precision="fp32",
        provenance=Provenance("tool", "source", None, {}),
        model=ModelFacts("llama", 2, HIDDEN, 2, 1, 4, VOCAB, 19, 64, None, 10000.0),
        tokenizer=TokenizerFiles("tokenizer.json", None, None, None, "11"),
        generation=GenerationDefaults(()),
        graphs=target,
        files={name: FileEntry(1, "00") for name in names},
        drafts=(DraftEntry("d", kind, "drafts/d", neural, graphs),),
        taps=(0, 1),
    )
    return json.loads(made.dumps())


def test_choices_and_their_graph_are_read_back() -> None:
    (draft,) = parse_manifest(manifest()).drafts
    assert draft.neural == FACTS and [graph.role for graph in draft.graphs] == ["draft", "select"]
    plain = replace(FACTS, choices=None)
    assert parse_manifest(manifest(plain, (DRAFT,))).drafts[0].neural == plain


@pytest.mark.parametrize(
    ("choices", "graphs", "message"),
    [
        (CHOICES, (DRAFT,), "has 3 choices per row and no select graph"),
        (None, (DRAFT, SELECT), "has no choices per row and a select graph"),
        (0, (DRAFT, SELECT), "out of range"),
        (VOCAB + 1, (DRAFT, SELECT), "out of range"),
        (CHOICES + 1, (DRAFT, SELECT), "contract of graph 'select.onnx' is not that of a 'select' graph"),
    ],
)
def test_one_without_the_other_is_refused(choices: int | None, graphs: tuple[GraphEntry, ...], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        parse_manifest(manifest(replace(FACTS, choices=choices), graphs))


def test_only_blocks_have_paths() -> None:
    graphs = (entry(draft_contract(replace(SHAPE, kind="eagle3"))), SELECT)
    with pytest.raises(BundleError, match=r"'eagle3' has 3 choices per row and a select graph; .* in a dflash draft"):
        parse_manifest(manifest(replace(FACTS, block_size=1), graphs, "eagle3"))


@pytest.mark.parametrize("width", ["hidden_size", "vocab_size"])
def test_a_select_graph_of_other_widths_is_refused(width: str) -> None:
    other = entry(select_contract(replace(SHAPE, **{width: 12})))
    with pytest.raises(BundleError, match=r"contract of graph 'select\.onnx'"):
        parse_manifest(manifest(graphs=(DRAFT, other)))


def test_a_markov_graph_and_a_select_graph_exclude_each_other() -> None:
    markov = entry(markov_contract(SHAPE))
    with pytest.raises(BundleError, match="markov graph belongs to a dflash draft without a select graph"):
        parse_manifest(manifest(graphs=(DRAFT, SELECT, markov)))
    assert parse_manifest(manifest(replace(FACTS, choices=None), (DRAFT, markov))).drafts[0].graphs[1] == markov
