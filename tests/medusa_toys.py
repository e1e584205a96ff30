"""Medusa heads small enough for a toy target: written as published, exported, and recomputed in torch from its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from checkpoints import write_hf_checkpoint
from draft_checkpoints_medusa import MedusaReference, MedusaVariant, medusa_tensors, write_medusa
from toy_drafts import HIDDEN, ToyTarget

from oxidize.export.drafts.base import write_draft_graphs
from oxidize.export.drafts.medusa import read_medusa
from oxidize.export.drafts.medusa_graph import medusa_graphs
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.drafters.blocks import RowByRow
from oxidize.runtime.drafters.heads import OwnHead, TargetHead
from oxidize.runtime.drafters.medusa import Medusa, Scored
from oxidize.runtime.session import GraphSession, RuntimeOptions

HEADS = 4


def toy_forms(vocabulary: int, truncated: int) -> dict[str, MedusaVariant]:
    """Heads with matrices of their own, scored by the target, and over a part of the vocabulary."""
    plain = MedusaVariant("reference", heads=HEADS, hidden=HIDDEN, vocab=vocabulary)
    return {
        "own": plain,
        "target": replace(plain, output="target"),
        "map": replace(plain, layout="vllm", biased=False, truncated=truncated),
    }


@dataclass(frozen=True)
class ToyHeads:
    """Exported heads: the graph's session, the ids of a truncated vocabulary, and the reference."""

    session: GraphSession
    ids: np.ndarray
    reference: MedusaReference

    def drafter(self, target: ToyTarget) -> Medusa:
        """One that has seen nothing."""
        scored = self.reference.variant.output == "target"
        head = TargetHead(target) if scored else OwnHead(Scored(), self.ids, target.token_count)
        return Medusa("medusa", self.session, RowByRow(head))

    def logits(self, target: ToyTarget, committed: Sequence[int]) -> np.ndarray:
        """[heads,V], from the row before the anchor."""
        (row,) = target.rows_of(committed[:-1], len(committed) - 2).hidden
        return self.reference.logits(torch.from_numpy(row)).numpy()


def export_toy_heads(folder: Path, variant: MedusaVariant, seed: int = 1) -> ToyHeads:
    """Write heads into `folder`, export them for a target of their sizes, and open them."""
    config = open_source(str(write_hf_checkpoint(folder / "target", "llama2"))).config
    config = replace(config, hidden_size=variant.hidden, vocab_size=variant.vocab)
    tensors = medusa_tensors(variant, seed)
    draft = read_medusa(write_medusa(folder / "heads", variant, tensors=tensors), config)
    out = folder / "out"
    out.mkdir()
    (entry,) = write_draft_graphs(draft, medusa_graphs(draft.config, "float32"), ExportPlan("fp32"), out)
    options = RuntimeOptions(provider="cpu", threads=1)
    session = GraphSession(out / entry.file, entry.contract, "cpu", options, light=True)
    head = torch.from_numpy(ToyTarget(variant.vocab).head.T.copy())
    ids = np.arange(variant.vocab) if draft.d2t is None else draft.d2t
    return ToyHeads(session, ids, MedusaReference(variant, tensors, head))
