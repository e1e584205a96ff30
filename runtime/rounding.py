"""How far the logits of one text differ with the passes it is read in: the numeric noise of a bundle on a machine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from .target import Rows, Target

TEXT = 132  # tokens read in each way; two more than the widest block below, and even
SCORED = 8  # rows scored at the end of a pass: the rest of a pass is rounded like its neighbours
# Beside narrow passes, those one row longer than the blocks in which kernels take the rows of a wide pass.
WIDTHS = ((1,), (3,), (5,), (8,), (2, 3, 9, 17), (33,), (65,), (129,))
_REFERENCE = (2,)
LIKELY = 8  # tokens of a row that may come to compete

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The logits of a text read in passes of these widths, against those of the same text read two rows at a time.

    rows: how many were compared; differing: how many of them are not equal bit for bit. largest, rms: of the absolute
    differences of single logits. margin: the largest change of the gap between two of a row's `LIKELY` tokens.
    """

    widths: tuple[int, ...]
    rows: int
    differing: int
    largest: float
    rms: float
    margin: float


def measure_rounding(target: Target, tokens: Sequence[int], progress: Progress) -> tuple[Deviation, ...]:
    """Read `TEXT` tokens (fewer if the context is short) in slot 0, in passes of several widths.

    The text is `tokens` [n>=1], repeated if it is too short.
    A target with a floor of one is measured as it is; with a floor of two the result shows whether the floor holds.
    """
    tokens = list(islice(cycle(tokens), min(TEXT, target.context)))
    reference = np.empty((len(tokens), target.token_count), np.float32)  # [n,V]
    for start, logits in _score(target, tokens, _REFERENCE):
        reference[start : start + len(logits)] = logits
    found = []
    for widths in (*WIDTHS, (len(tokens),)):
        progress(f"reading in passes of {describe(widths)}")
        found.append(_compare(target, tokens, widths, reference))
    return tuple(found)


def describe(widths: Sequence[int]) -> str:
    """For people: "3 rows", "2, 3, 9, 17 rows"."""
    return f"{', '.join(map(str, widths))} row{'' if tuple(widths) == (1,) else 's'}"


def cut(count: int, widths: Sequence[int]) -> list[int]:
    """Widths of the passes that read `count` rows: these in turn; a last row alone joins the pass before it."""
    passes: list[int] = []
    for width in cycle(widths):
        if count == 0:
            return passes
        passes.append(min(width, count))
        count -= passes[-1]
        if count == 1 and tuple(widths) != (1,):
            passes[-1], count = passes[-1] + 1, 0
    raise ValueError("no widths were given")


def _score(target: Target, tokens: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(index of the first scored row, logits [n<=SCORED,V]) for every pass."""
    target.cache.rewind_to(0, 0)
    end = 0
    for width in cut(len(tokens), widths):
        wanted, end = min(width, SCORED), end + width
        (logits,) = target.forward([Rows(0, tokens[end - width : end], wanted)])
        yield end - wanted, logits


def _compare(target: Target, tokens: Sequence[int], widths: tuple[int, ...], reference: np.ndarray) -> Deviation:
    rows = differing = 0
    largest = squares = margin = 0.0
    for start, logits in _score(target, tokens, widths):
        expected = reference[start : start + len(logits)]
        margin = max(margin, *(margin_shift(old, new) for old, new in zip(expected, logits, strict=True)))
        apart = np.abs(logits - expected)
        by_row = apart.max(axis=1)
        rows, differing = rows + len(logits), differing + int((by_row > 0).sum())
        largest = max(largest, float(by_row.max()))
        squares += float((apart * apart).sum(dtype=np.float64))
    return Deviation(widths, rows, differing, largest, (squares / (rows * reference.shape[1])) ** 0.5, margin)


def margin_shift(before: np.ndarray, after: np.ndarray, *tokens: int) -> float:
    """The largest change of the gap between two of the likeliest tokens of `before` [V], or of these `tokens`."""
    likely = np.argpartition(before, -min(LIKELY, len(before)))[-LIKELY:]
    shift = (after - before)[[*likely, *tokens]]
    return float(shift.max() - shift.min())
