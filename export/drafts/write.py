"""Puts a draft that reads the target's rows into a bundle: graphs, weights, ids of its vocabulary, and its entry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from oxidize.runtime.manifest import DraftEntry, GraphEntry, Provenance

from ..plan import ExportPlan
from ..provenance import provenance_of
from ..tensors import Progress
from .base import DraftCheckpoint, DraftConfig, DraftGraph, neural_facts, write_draft_graphs
from .dflash_graph import dflash_graphs
from .eagle_graph import eagle_graphs
from .medusa_graph import medusa_graphs
from .mtp_graph import mtp_graphs

_D2T_NAME = "d2t.bin"
_GRAPHS: dict[str, Callable[[DraftConfig, str], Sequence[DraftGraph]]] = {
    "dflash": dflash_graphs,
    "eagle3": eagle_graphs,
    "mtp": mtp_graphs,
    "medusa": medusa_graphs,
}


@dataclass(frozen=True, slots=True)
class NeuralSource:
    """A draft to put into the bundle under a name of its own."""

    name: str
    draft: DraftCheckpoint
    plan: ExportPlan


def write_neural(source: NeuralSource, bundle: Path, folder: str, progress: Progress | None) -> DraftEntry:
    """Write the draft into the existing folder `bundle`/`folder` and return its manifest entry."""
    config, plan = source.draft.config, source.plan
    graphs = _GRAPHS[config.kind](config, plan.dtype)
    entries = write_draft_graphs(source.draft, graphs, plan, bundle / folder, progress)
    d2t = None
    if source.draft.d2t is not None:
        d2t = f"{folder}/{_D2T_NAME}"
        (bundle / d2t).write_bytes(source.draft.d2t.astype(np.dtype("<i8")).tobytes())
    placed = tuple(_placed(entry, folder) for entry in entries)
    facts = replace(neural_facts(config, plan, d2t), mismatch=source.draft.mismatch)
    return DraftEntry(source.name, config.kind, folder, facts, placed, _provenance(source.draft))


def _provenance(draft: DraftCheckpoint) -> Provenance | None:
    """Of the draft's own files; None where they are the target's."""
    return provenance_of(draft.name, draft.revision, draft.files) if draft.files else None


def _placed(entry: GraphEntry, folder: str) -> GraphEntry:
    """The entry with paths from the bundle's folder."""
    return replace(entry, file=f"{folder}/{entry.file}", data=tuple(f"{folder}/{name}" for name in entry.data))
