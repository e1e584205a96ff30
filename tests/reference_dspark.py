"""DSpark's heads in plain torch, beside DFlash's reference. Knows no code of ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MarkovReference:
    """The heads of a draft, tensors under their published names; which are there says what kinds they are."""

    tensors: Mapping[str, Tensor]

    def correction(self, hidden: Tensor, before: int) -> Tensor:
        """What is added to the logits [Vd] of a row with hidden state [H] behind token `before`."""
        code = self.tensors["markov_head.markov_w1.weight"].float()[before]
        gate = self.tensors.get("markov_head.gate_proj.weight")
        if gate is not None:
            score = gate.float() @ torch.cat([hidden, code]) + self.tensors["markov_head.gate_proj.bias"].float()
            code = torch.sigmoid(score) * code
        return self.tensors["markov_head.markov_w2.weight"].float() @ code

    def confidence(self, hidden: Tensor, before: int) -> float:
        """How likely the token of the row is kept if those before it are."""
        weight = self.tensors["confidence_head.proj.weight"].float()[0]
        code = self.tensors["markov_head.markov_w1.weight"].float()[before]
        features = torch.cat([hidden, code]) if len(weight) > len(hidden) else hidden
        bias = self.tensors.get("confidence_head.proj.bias", torch.zeros(1)).float()
        return float(torch.sigmoid(weight @ features + bias[0]))

    def corrected(self, hidden: Tensor, logits: Tensor, anchor: int, drafted: Sequence[int]) -> Tensor:
        """Logits [n,Vd] of rows with hidden states [n,H], behind the anchor and each of the drafted tokens."""
        before = [anchor, *drafted][: len(logits)]
        return torch.stack([logits[row] + self.correction(hidden[row], token) for row, token in enumerate(before)])

    def chances(self, hidden: Tensor, anchor: int, drafted: Sequence[int]) -> list[float]:
        """The chance that all tokens up to each row are kept."""
        kept, found = 1.0, []
        for row, token in enumerate([anchor, *drafted][: len(hidden)]):
            kept *= self.confidence(hidden[row], token)
            found.append(kept)
        return found
