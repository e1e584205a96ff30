"""Mistakes that drafters can be made to make, each of which has to show in what is accepted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from oxidize.runtime.drafters.chain import Chain
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.rows import PassRows
from oxidize.runtime.session import Tensor


class Watcher(Protocol):
    """A drafter that is shown the target's rows."""

    def watch(self, start: int, rows: PassRows) -> None: ...


def read_the_row_before(drafter: Watcher) -> None:
    """Show it, at each position, the hidden state of the one before."""
    watch, seen = drafter.watch, np.zeros((512, 64), np.float32)

    def watch_late(start: int, rows: PassRows) -> None:
        end = start + len(rows.hidden)
        seen[start + 1 : end + 1] = rows.hidden
        watch(start, PassRows(seen[start:end], None))

    drafter.watch = watch_late


def read_before_the_norm(drafter: Watcher, weight: np.ndarray) -> None:
    """Show it hidden states [n,H] as they were before the final norm with this weight [H], apart from their length."""
    watch = drafter.watch
    drafter.watch = lambda start, rows: watch(start, PassRows(rows.hidden / weight, None))


class _Unshifted:
    """Gives committed rows the embedding of their own token, in place of the token that follows."""

    def __init__(self, drafter: RowReader) -> None:
        self._drafter, self._embedding = drafter, drafter._parts.embedding

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        text, start = self._drafter._tokens, self._drafter._pending.position
        committed = text[start + 1 : start + 1 + len(ids)] == ids
        return self._embedding.embed_tokens(text[start : start + len(ids)] if committed else ids)


def unshift_embeddings(drafter: RowReader) -> None:
    assert isinstance(drafter, Chain)
    drafter._parts = replace(drafter._parts, embedding=_Unshifted(drafter))
