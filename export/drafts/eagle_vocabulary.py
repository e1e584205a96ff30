"""EAGLE-3's reduced vocabulary: the target id of each id of the draft's own head, checked from all sides."""

import numpy as np

from oxidize.runtime.errors import CheckpointError

from .base import DraftConfig
from .strict import OTHER_DRAFT, REMEDY


def absolute_ids(offsets: np.ndarray) -> np.ndarray:
    """Target ids from the `d2t` of Hugging Face checkpoints, which is what to add to each draft id: int64 [Vd]."""
    return np.arange(len(offsets), dtype=np.int64) + offsets


def check_vocabulary(
    config: DraftConfig, ids: np.ndarray | None, mask: np.ndarray | None, where: str
) -> np.ndarray | None:
    """The target ids int64 [Vd] of a head of its own; None where draft and target ids are the same.

    ids: the table, already absolute, if there is one; mask: `t2d`, bool [V], which target ids the draft can score.
    """
    rows, vocabulary = config.draft_vocab_size, config.model.vocab_size
    if mask is not None and mask.shape != (vocabulary,):
        raise CheckpointError(f"{where}: t2d has shape {list(mask.shape)}, expected [{vocabulary}]; {OTHER_DRAFT}")
    if rows is None:
        if ids is not None and not _identical(ids, vocabulary):
            raise CheckpointError(
                f"{where}: there is a d2t of {len(ids)} ids but no lm_head.weight they belong to; fetch the draft again"
            )
        return None
    if ids is None:
        if rows != vocabulary:
            raise CheckpointError(
                f"{where}: the head scores {rows} of {vocabulary} ids, and no d2t says which; fetch the draft again"
            )
        return None
    _check_ids(ids, rows, vocabulary, where)
    if mask is not None:
        _check_mask(ids, mask, where)
    return None if _identical(ids, vocabulary) else ids


def _check_ids(ids: np.ndarray, rows: int, vocabulary: int, where: str) -> None:
    if ids.shape != (rows,):
        raise CheckpointError(
            f"{where}: d2t has shape {list(ids.shape)}, expected [{rows}], the rows of lm_head.weight; {REMEDY}"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        first = int(outside[0])
        raise CheckpointError(
            f"{where}: d2t sends draft id {first} to {int(ids[first])}, the target has the ids 0 to {vocabulary - 1}; "
            f"{OTHER_DRAFT}"
        )
    distinct = len(np.unique(ids))
    if distinct != rows:
        raise CheckpointError(
            f"{where}: d2t sends {rows} draft ids to {distinct} target ids; the file is damaged, fetch the draft again"
        )


def _check_mask(ids: np.ndarray, mask: np.ndarray, where: str) -> None:
    reached = np.zeros(len(mask), bool)
    reached[ids] = True
    differing = int((reached != mask).sum())
    if differing:
        raise CheckpointError(
            f"{where}: t2d and d2t disagree on {differing} of {len(mask)} target ids; the file is damaged, fetch the "
            "draft again"
        )


def _identical(ids: np.ndarray, vocabulary: int) -> bool:
    return len(ids) == vocabulary and bool((ids == np.arange(vocabulary)).all())
