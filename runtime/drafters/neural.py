"""Opens a draft that reads the target's rows, as far as it fits the target."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..bundle import Bundle
from ..cache import CacheShape
from ..contracts import GraphContract
from ..ends import Embedder, Scorer
from ..errors import BundleError
from ..manifest import DraftEntry, GraphEntry, NeuralDraft
from ..rows import PassRows
from ..session import GraphSession, RuntimeOptions, check_version
from ..target import Target
from .base import Drafter
from .blocks import BlockReader, RowByRow
from .chain import Chain, Fuse
from .dflash import BlockPlan, DFlash, block_plan
from .heads import Head, OwnHead, TargetHead
from .markov import MarkovReader
from .medusa import Medusa, Scored
from .passes import DraftPasses, MaskRule
from .paths import PathReader
from .pending import PendingRows
from .reader import DraftParts, Pick

_READERS = ("select", "markov")  # roles of graphs that choose among the rows of a block
_AGAIN = "export target and draft together again"


def open_neural(bundle: Bundle, entry: DraftEntry, target: Target, options: RuntimeOptions) -> Drafter:
    """The drafter of an entry of `bundle`; `target`, which is to run, lends it embed and head.

    Raises BundleError where the draft lacks a part, or does not fit the target; the message has both numbers.
    """
    neural, draft = _check_whole(entry)
    contract = draft.contract
    check_fit(entry, contract, target)
    sessions = {
        graph.role: _open(bundle, graph, target, options)
        for graph in entry.graphs
        if graph.role in ("draft", "fuse", "embed", "head")
    }
    head = _head(bundle, entry.name, neural, sessions.get("head"), target)
    if entry.kind == "medusa":
        return Medusa(entry.name, sessions["draft"], RowByRow(head))
    dtype = _dtype_of(contract)
    shape = CacheShape(neural.layers, neural.kv_heads, neural.head_dim, dtype)
    parts = DraftParts(
        name=entry.name,
        passes=DraftPasses(sessions, shape, _mask_rule(entry.kind, neural), neural.max_positions),
        pending=PendingRows(neural.feature_size, dtype),
        pick=row_picker(neural.taps, target.taps),
        embedding=Embedder(sessions["embed"]) if "embed" in sessions else target,
        head=head,
        max_positions=neural.max_positions,
    )
    if entry.kind == "dflash":
        plan = block_plan(entry.name, neural)
        readers = {
            graph.role: _open(bundle, graph, target, options) for graph in entry.graphs if graph.role in _READERS
        }
        return DFlash(parts, plan, _block_reader(readers, plan, parts.head, target), neural.hidden_size)
    return Chain(parts, Fuse(sessions["fuse"]) if "fuse" in sessions else None)


def _block_reader(sessions: Mapping[str, GraphSession], plan: BlockPlan, head: Head, target: Target) -> BlockReader:
    """The reader that the draft's graphs are for; `sessions` by role."""
    if "select" in sessions:
        return PathReader(head, sessions["select"], plan.most, target.token_count)
    if "markov" in sessions:
        return MarkovReader(head, sessions["markov"])
    return RowByRow(head)


def row_picker(wanted: Sequence[int], tapped: Sequence[int]) -> Pick:
    """A function that takes the taps `wanted`, in that order, out of rows that hold those of `tapped`.

    Without any wanted it takes the hidden states. ValueError where one is not tapped.
    """
    if not wanted:
        return lambda rows: (rows.hidden,)
    places = [tuple(tapped).index(tap) for tap in wanted]
    runs = _runs(places)

    def pick(rows: PassRows) -> list[np.ndarray]:
        taps = rows.taps
        assert taps is not None
        width = taps.shape[1] // len(tapped)
        return [taps[:, first * width : end * width] for first, end in runs]

    return pick


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring places as [first, end) each, so that they are copied together."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def check_fit(entry: DraftEntry, contract: GraphContract, target: Target) -> None:
    """BundleError where this draft cannot read this target's rows, embeddings or scores."""
    neural, facts = entry.neural, target.bundle.manifest.model
    assert neural is not None
    missing = [tap for tap in neural.taps if tap not in target.taps]
    _require(
        not missing,
        f"draft {entry.name!r} reads the output of layers {list(neural.taps)}, but the target's graphs give those of "
        f"{list(target.taps)}",
    )
    width = max(1, len(neural.taps)) * facts.hidden_size
    _require(
        neural.feature_size == width,
        f"draft {entry.name!r} reads rows of {neural.feature_size} values, but the target's are of {width} "
        f"({max(1, len(neural.taps))} times a hidden size of {facts.hidden_size})",
    )
    lent = neural.draft_vocab_size is None or "embed" not in {graph.role for graph in entry.graphs}
    _require(
        not lent or neural.hidden_size == facts.hidden_size,
        f"draft {entry.name!r} has a hidden size of {neural.hidden_size}, but it uses the embedding or head of a "
        f"target of hidden size {facts.hidden_size}",
    )
    rows = neural.draft_vocab_size or facts.vocab_size
    _require(
        rows <= facts.vocab_size,
        f"draft {entry.name!r} has a vocabulary of {rows}, but the target one of {facts.vocab_size}",
    )
    theirs = target.sessions["body"].contract.outputs[0].dtype
    _require(
        _dtype_of(contract) == theirs,
        f"draft {entry.name!r} computes in {_dtype_of(contract)}, but the target in {theirs}",
    )


def _check_whole(entry: DraftEntry) -> tuple[NeuralDraft, GraphEntry]:
    """The facts and the main graph; BundleError where a part is missing."""
    neural = entry.neural
    graphs = {graph.role: graph for graph in entry.graphs}
    assert neural is not None
    scores = neural.draft_vocab_size is not None and entry.kind != "medusa"  # whose heads are in the draft graph
    needed = {"draft": True, "fuse": _must_fuse(entry.kind, neural), "head": scores}
    for role, wanted in needed.items():
        _require(not wanted or role in graphs, f"draft {entry.name!r} of kind {entry.kind!r} has no {role} graph")
    draft = graphs["draft"]
    slides = any(spec.name == "attn_mask_sliding" for spec in draft.contract.inputs)
    good = not slides or (neural.sliding_window or 0) > 0
    _require(good, f"draft {entry.name!r} has sliding layers, but a window of {neural.sliding_window}")
    _require(entry.kind != "medusa" or neural.block_size > 1, f"draft {entry.name!r} has no Medusa heads")
    return neural, draft


def _must_fuse(kind: str, neural: NeuralDraft) -> bool:
    return kind in ("eagle3", "mtp") and neural.feature_size != neural.hidden_size


def _mask_rule(kind: str, neural: NeuralDraft) -> MaskRule:
    if kind != "dflash":
        return MaskRule(window=neural.sliding_window)
    return MaskRule(neural.causal, neural.sliding_causal, neural.sliding_window)


def _head(bundle: Bundle, name: str, neural: NeuralDraft, own: GraphSession | None, target: Target) -> Head:
    if neural.draft_vocab_size is None:
        return TargetHead(target)
    scorer = Scorer(own, neural.draft_vocab_size) if own is not None else Scored()
    if neural.d2t is None:
        return OwnHead(scorer, np.arange(neural.draft_vocab_size), target.token_count)
    ids = np.frombuffer((bundle.folder / neural.d2t).read_bytes(), "<i8").astype(np.int64)
    _require(
        len(ids) == neural.draft_vocab_size,
        f"draft {name!r} has a vocabulary of {neural.draft_vocab_size}, but its d2t names {len(ids)} tokens",
    )
    return OwnHead(scorer, ids, target.token_count)


def _dtype_of(contract: GraphContract) -> str:
    """The type of the numbers a draft graph computes with."""
    return next(spec.dtype for spec in contract.inputs if spec.name in ("inputs_embeds", "features"))


def _open(bundle: Bundle, graph: GraphEntry, target: Target, options: RuntimeOptions) -> GraphSession:
    check_version(graph.minimum_ort)
    path = bundle.folder / graph.file
    return GraphSession(path, graph.contract, target.provider, options, light=graph.role != "draft")


def _require(good: bool, what: str) -> None:
    if not good:
        raise BundleError(f"{what}; {_AGAIN}")
