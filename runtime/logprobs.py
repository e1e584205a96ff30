"""Log probabilities of emitted tokens. Always the target's: those of a drafted token come from the target's row too.

Two laws can be reported. "model": the softmax of the model's logits, before bias, penalties, masks, temperature and
cuts, as OpenAI's API reports it. "law": the law the token was drawn from, after all of them; greedy decoding then
reports 0 for the token taken.
"""

import math
from dataclasses import dataclass

import numpy as np

from .errors import UsageError
from .sampling import Law

MAX_TOP = 20
OF = ("model", "law")


@dataclass(frozen=True, slots=True)
class LogprobsParams:
    """What to report: the `top` likeliest tokens beside the emitted one, of which law."""

    top: int = 0
    of: str = "model"

    def __post_init__(self) -> None:
        if not 0 <= self.top <= MAX_TOP:
            raise UsageError(f"top logprobs must be between 0 and {MAX_TOP}, not {self.top}")
        if self.of not in OF:
            raise UsageError(f"logprobs must be of {' or '.join(OF)}, not {self.of!r}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of an emitted token, and the likeliest (token, log probability) pairs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def model_logprob(logits: np.ndarray, token: int, top: int) -> TokenLogprob:
    """Of the softmax of float32 logits [V]; -inf is the log probability of what is impossible."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= math.log(np.exp(row).sum())
    return TokenLogprob(token, float(row[token]), _best(np.arange(len(row)), row, top))


def law_logprob(law: Law, token: int, top: int) -> TokenLogprob:
    """Of a law; tokens outside it are not among the likeliest."""
    ids = np.arange(len(law.probs)) if law.ids is None else law.ids
    probability = law.prob(token)
    with np.errstate(divide="ignore"):
        logs = np.log(law.probs)
    return TokenLogprob(token, math.log(probability) if probability else -math.inf, _best(ids, logs, top))


def _best(ids: np.ndarray, logs: np.ndarray, top: int) -> tuple[tuple[int, float], ...]:
    """The `top` best, best first and on ties by id; ids ascend."""
    if top == 0:
        return ()
    if top < len(ids):
        bound = np.partition(logs, -top)[-top]
        kept = np.flatnonzero(logs >= bound)
        ids, logs = ids[kept], logs[kept]
    order = np.argsort(-logs, kind="stable")[:top]
    return tuple((int(ids[i]), float(logs[i])) for i in order)
