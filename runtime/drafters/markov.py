"""From the rows of a finished block to a proposal: each row corrected by the token before it, as DSpark does.

The head scores all rows at once. Then, row by row, a graph turns the token just drawn into a correction of the next
row's logits, and says how likely that row's token is kept if those before it are.

After DeepSeek's DSpark ("DeepSpec"), where this is the Markov head and the confidence head.
"""

from collections.abc import Sequence

import numpy as np

from ..sampling import Law
from ..session import Device, GraphSession, Tensor
from .base import DraftContext, Proposal
from .blocks import Block
from .heads import Head

# A row is worth its place while what it saves, its chance of being kept times a plain step, is more than what it costs:
# some hundredths of a step on a GPU, a tenth and more with int4 on a CPU. How many rows pay on average is the policy's
# to find out; this bound only cuts off what is next to hopeless in this very round. It is low, because the head was
# trained on other texts and temperatures than those it is asked about.
LEAST_KEPT = 0.1
_CPU = Device("cpu")


class MarkovReader:
    """Draws row after row, each from its corrected logits; it stops where the draft itself expects no more."""

    def __init__(self, head: Head, session: GraphSession, least_kept: float = LEAST_KEPT) -> None:
        """session: of role "markov".

        least_kept: it stops where the chance that all tokens up to a row are kept is lower; 0: never.
        """
        self._head, self._session, self._least_kept = head, session, least_kept
        hidden = session.contract.inputs[0]
        self._width = int(hidden.shape[-1])
        self._outputs = {
            spec.name: Tensor(tuple(int(size) for size in spec.shape), spec.dtype, _CPU)
            for spec in session.contract.outputs
        }
        self._previous = Tensor((1,), "int64", _CPU)
        self._row = np.empty(self._outputs["bias"].shape[1], np.float32)
        self._binding = session.binding()
        self._binding.bind_input("previous", self._previous, (1,))
        for name, tensor in self._outputs.items():
            self._binding.bind_output(name, tensor, tensor.shape)

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in the graph that corrects rows."""
        return self._session.elapsed_ns

    def propose(self, block: Block, committed: Sequence[int], context: DraftContext) -> Proposal:
        """Up to `block.k` tokens, at least one.

        Whether it ends before a row is settled by the row's hidden state and tokens that are drawn and stay, so a
        token is never dropped for what it is, and the laws are those the tokens were drawn from.
        """
        tokens: list[int] = []
        laws: list[Law] = []
        kept = 1.0  # the chance that all tokens up to this row are
        for index, logits in enumerate(self._head.logits(block.outputs, block.first, block.k)):
            before = tokens[-1] if tokens else committed[-1]
            kept *= self._look(block.outputs["hidden"], block.first + index, before)
            if tokens and kept < self._least_kept:
                break
            laws.append(self._head.law(self._corrected(logits), tokens, context))
            tokens.append(context.draw(laws[-1], len(committed) + len(tokens)))
        return Proposal(tuple(tokens), tuple(laws))

    def _look(self, hidden: Tensor, row: int, before: int) -> float:
        """Run the graph for a row behind token `before`: how likely its token is kept, 1 if the draft does not say."""
        self._previous.write(before)
        self._binding.bind_input("hidden", hidden, (1, self._width), row * self._width)
        self._session.run(self._binding)
        return float(self._outputs["confidence"].read()[0]) if "confidence" in self._outputs else 1.0

    def _corrected(self, logits: np.ndarray) -> np.ndarray:
        """Logits [n] of a row plus the first n corrections: the rest are of padding. Valid until the next row."""
        count = len(logits)
        return np.add(logits, self._outputs["bias"].read()[0, :count], out=self._row[:count])
