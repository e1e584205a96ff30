"""The law of whole texts by the chain rule, and a chi-square test of samples against it."""

from collections import Counter

import numpy as np
from scipy.stats import chisquare

SAMPLES = 20_000


def text_law(law_after, length, eos=()):
    """Probability of every token sequence that ends at `length` or with an end token. law_after(tokens) -> Law."""
    done, law = {}, {(): 1.0}
    for _ in range(length):
        step = {}
        for tokens, mass in law.items():
            after = law_after(tokens)
            ids = range(len(after.probs)) if after.ids is None else after.ids.tolist()
            for token, p in zip(ids, after.probs.tolist(), strict=True):
                if p > 0:
                    (done if token in eos else step)[(*tokens, token)] = mass * p
        law = step
    return done | law


def assert_follows(texts, law):
    """Chi-square over the texts that are common enough, the others as one cell."""
    counts = Counter(texts)
    assert set(counts) <= set(law), "a text outside the target's law was produced"
    cells = sorted(law, key=law.get, reverse=True)
    common = [cell for cell in cells if law[cell] * len(texts) >= 8]
    expected = np.array([law[cell] for cell in common]) * len(texts)
    observed = np.array([counts[cell] for cell in common])
    rest = len(texts) - expected.sum()
    if rest >= 8:
        expected, observed = np.append(expected, rest), np.append(observed, len(texts) - observed.sum())
    else:
        expected *= observed.sum() / expected.sum()
    assert chisquare(observed, expected).pvalue > 1e-4
