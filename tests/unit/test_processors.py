"""Controls against a naive reference over whole prefixes; drafts leave no trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidize.runtime.errors import UsageError
from oxidize.runtime.processors import Controls, Processors

V = 12
EOS = (1, 2)
tokens = st.lists(st.integers(0, V - 1), max_size=12)


def reference(controls, prompt, answer, logits):
    """The definition, one token id at a time."""
    row = logits.astype(np.float64).copy()
    for token, bias in controls.logit_bias:
        row[token] += bias
    for token in range(V):
        count = answer.count(token)
        if token in prompt or count:
            factor = controls.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if count:
            row[token] -= controls.presence_penalty + controls.frequency_penalty * count
    if len(answer) < controls.min_new_tokens:
        row[list(EOS)] = -np.inf
    text = [*prompt, *answer]
    for word in controls.bad_words:
        head = list(word[:-1])
        if not head or text[-len(head) :] == head:
            row[word[-1]] = -np.inf
    return row


CONTROLS = [
    Controls(),
    Controls(repetition_penalty=1.3),
    Controls(repetition_penalty=0.7, presence_penalty=0.5, frequency_penalty=0.25),
    Controls(presence_penalty=-1.0, logit_bias=((3, 5.0), (4, -100.0))),
    Controls(min_new_tokens=5),
    Controls(bad_words=((3,), (4, 5), (6, 7, 8))),
]


@pytest.mark.parametrize("controls", CONTROLS)
@given(prompt=tokens, answer=tokens, drafted=tokens, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_equals_the_definition(controls, prompt, answer, drafted, seed):
    logits = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
    made = Processors(controls, EOS, prompt, V)
    made.commit(answer)
    before = logits.copy()
    row = made.apply(logits, drafted)
    np.testing.assert_allclose(row, reference(controls, prompt, answer + drafted, logits), rtol=1e-5, atol=1e-5)
    assert np.array_equal(logits, before), "the logits given were changed"
    again = made.apply(logits)
    np.testing.assert_allclose(again, reference(controls, prompt, answer, logits), rtol=1e-5, atol=1e-5)


def test_neutral():
    assert Controls().neutral
    assert not Controls(min_new_tokens=1).neutral


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -2.5},
        {"min_new_tokens": -1},
        {"bad_words": ((),)},
        {"logit_bias": tuple((i, 0.0) for i in range(2000))},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": 1e-40},
        {"logit_bias": ((5, 1e39),)},
        {"logit_bias": ((5, float("nan")),)},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
    ],
)
def test_bad_values_are_refused(fields):
    with pytest.raises(UsageError):
        Controls(**fields)


@pytest.mark.parametrize("controls", [Controls(logit_bias=((V, 1.0),)), Controls(bad_words=((-1,),))])
def test_ids_outside_the_vocabulary_are_refused(controls):
    with pytest.raises(UsageError, match="token ids"):
        Processors(controls, EOS, [1], V)


@pytest.mark.parametrize("controls", CONTROLS)
@given(prompt=tokens, answer=tokens, drafted=tokens, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_not_a_bit_depends_on_what_is_drafted_and_what_committed(controls, prompt, answer, drafted, seed):
    logits = np.random.default_rng(seed).normal(0, 3, V).astype(np.float32)
    before, after = (Processors(controls, EOS, prompt, V) for _ in range(2))
    before.commit(answer)
    after.commit(answer + drafted)
    assert np.array_equal(before.apply(logits, drafted), after.apply(logits))
