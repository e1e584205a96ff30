"""From the rows of a finished block to a proposal: a path through the likeliest tokens of each row, as DFlash 2 does.

A graph names K tokens per row and scores each of them after each of the row before. The path starts at the anchor, and
every token is drawn from the law of the scores behind the one drawn before it. So neighbours fit each other although
the rows were computed at once.

After z-lab's DFlash 2 drafts, where this is the candidate selector.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..rows import FEW
from ..sampling import Law
from ..session import Binding, Device, GraphSession, Tensor
from .base import DraftContext, Proposal
from .blocks import Block
from .heads import UNHEARD_OF, Head, law_among

_CPU = Device("cpu")


class PathReader:
    """Walks from token to token through a block; tensors are made once, bindings once per number of rows.

    Logits are taken to the host and given back from there, on a device too: heads leave them on the host, where some
    have to be spread over the target's ids first. A round's are k rows, a few megabytes at most.
    """

    def __init__(self, head: Head, session: GraphSession, rows: int, token_count: int) -> None:
        """session: of role "select". rows: the most that are asked for. Ids from `token_count` on are padding."""
        self._head, self._session, self._token_count = head, session, token_count
        specs = {spec.name: spec for spec in (*session.contract.inputs, *session.contract.outputs)}
        sizes = {name: tuple(size for size in spec.shape if isinstance(size, int)) for name, spec in specs.items()}
        self._width = sizes["hidden"][0]
        self._logits, self._tokens, self._scores = (
            Tensor((rows, *sizes[name]), specs[name].dtype, _CPU) for name in ("logits", "tokens", "scores")
        )
        self._logits.write(UNHEARD_OF)  # and so it stays where the head has no logit
        self._anchor = Tensor((1,), "int64", _CPU)
        self._row = np.full(token_count, UNHEARD_OF, np.float32)
        self._bound: dict[tuple[int, int, int], Binding] = {}

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in the graph that scores neighbours."""
        return self._session.elapsed_ns

    def propose(self, block: Block, committed: Sequence[int], context: DraftContext) -> Proposal:
        """Up to `block.k` tokens; it ends behind a token that a grammar insisted on and no row names."""
        tokens: list[int] = []
        laws: list[Law] = []
        before = 0  # which of the tokens of the row before was drawn; in row 0 all scores are of the anchor
        for ids, order, scores in self._rows(block, committed[-1]):
            count = int(ids.searchsorted(self._token_count))
            if count == 0:
                break
            law = law_among(ids[:count], scores[before, order[:count]], self._row, tokens, context)
            token = context.draw(law, len(committed) + len(tokens))
            laws.append(law)
            tokens.append(token)
            place = int(ids.searchsorted(token))
            if place == len(ids) or ids[place] != token:
                break
            before = order[place]
        return Proposal(tuple(tokens), tuple(laws))

    def _rows(self, block: Block, anchor: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each row: its tokens ascending int64 [K], their places in the scores [K], and the scores [K,K]."""
        hidden, k = block.outputs["hidden"], block.k
        self._head.spread(self._head.logits(block.outputs, block.first, k), _host(self._logits))
        self._anchor.write(anchor)
        self._session.run(self._binding(hidden, block.first, k))
        tokens = _host(self._tokens)[:k]
        order = tokens.argsort(axis=1)
        return zip(np.take_along_axis(tokens, order, axis=1), order, _host(self._scores)[:k], strict=True)

    def _binding(self, hidden: Tensor, first: int, k: int) -> Binding:
        """Rows `first`, `first` + 1, ... of hidden [S,H] stay where they are."""
        key = (hidden.pointer, first, k)
        if key not in self._bound:
            if len(self._bound) >= FEW:
                self._bound.clear()
            self._bound[key] = self._bind(hidden, first, k)
        return self._bound[key]

    def _bind(self, hidden: Tensor, first: int, k: int) -> Binding:
        binding = self._session.binding()
        binding.bind_input("hidden", hidden, (k, self._width), first * self._width)
        binding.bind_input("logits", self._logits, (k, *self._logits.shape[1:]))
        binding.bind_input("anchor", self._anchor, (1,))
        binding.bind_output("tokens", self._tokens, (k, *self._tokens.shape[1:]))
        binding.bind_output("scores", self._scores, (k, *self._scores.shape[1:]))
        return binding


def _host(tensor: Tensor) -> np.ndarray:
    assert tensor.host is not None
    return tensor.host
