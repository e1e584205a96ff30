"""Proposes what followed the last time the text ended like this: lookup in the committed tokens, no model.

The index is a suffix automaton (Blumer et al. 1985), built online: after each token it knows the longest
suffix of the text that occurred before, at an amortised constant cost per token, whatever its length. Each
state also keeps where its strings ended last, so that among the longest matches the most recent one is
continued.
"""

from collections.abc import Sequence

from .base import DraftContext, Proposal, TokenReader

_ROOT = 0
_MARKED = 64  # states whose last end is kept current; only inside a long periodic run is the chain longer


class NgramDrafter(TokenReader):
    """Continues the most recent of the longest earlier occurrences of the end of the text.

    min_match: shortest match, in tokens, worth a proposal.
    """

    name = "ngram"
    free = True
    passes = 0
    ort_ns = 0

    def __init__(self, min_match: int = 2) -> None:
        if min_match < 1:
            raise ValueError(f"min_match must be at least 1, not {min_match}")
        self._min_match = min_match
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._tokens: list[int] = []
        self._index = _SuffixAutomaton()

    def observe(self, committed: Sequence[int]) -> None:
        """Index the tokens that were not there at the last call."""
        fresh = committed[len(self._tokens) :]
        self._tokens += fresh
        for token in fresh:
            self._index.append(token)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens. They are indexed again: text is rarely taken back."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot rewind to {length}: {len(self._tokens)} tokens were observed")
        if length < len(self._tokens):
            kept = self._tokens[:length]
            self.reset()
            self.observe(kept)

    def propose(self, committed: Sequence[int], k: int, context: DraftContext | None = None) -> Proposal:
        """Propose k tokens with certainty, or none when no match is long enough.

        A match that reaches the end of the text makes it periodic; the copy then goes on into itself.
        """
        self.observe(committed)
        length = self._index.match_length
        if k < 1 or length < self._min_match:
            return Proposal()
        start = self._index.match_end + 1
        source = self._tokens[start : start + k]
        repeats = -(-k // len(source))
        return Proposal(tuple((source * repeats)[:k]), match_length=length)


class _SuffixAutomaton:
    """All substrings of the tokens appended so far, and the longest suffix that ended earlier as well.

    States are numbers; state s stands for the strings that end at one set of positions, the longest of them
    of `_lengths[s]` tokens. A state's link leads to its longest suffix that ends at more positions.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]
        self._ends = [-1]  # where the strings of a state ended last
        self._last = _ROOT
        self.match_length = 0
        self.match_end = -1  # index of the last token of the most recent earlier occurrence

    def append(self, token: int) -> None:
        """Add one token."""
        position = self._lengths[self._last]
        state = self._add_state({}, position + 1, position)
        parent = self._last
        while parent >= 0 and token not in self._next[parent]:
            self._next[parent][token] = state
            parent = self._links[parent]
        match = _ROOT if parent < 0 else self._exact_target(parent, token)
        self._links[state] = match
        self._last = state
        self.match_length = self._lengths[match]
        self.match_end = self._ends[match]
        self._mark(match, position)

    def _add_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._links.append(_ROOT)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._links) - 1

    def _exact_target(self, parent: int, token: int) -> int:
        """The state of (longest string of `parent`) + token, split off from a longer one when needed."""
        target = self._next[parent][token]
        length = self._lengths[parent] + 1
        if self._lengths[target] == length:
            return target
        split = self._add_state(dict(self._next[target]), length, self._ends[target])
        self._links[split] = self._links[target]
        self._links[target] = split
        while parent >= 0 and self._next[parent].get(token) == target:
            self._next[parent][token] = split
            parent = self._links[parent]
        return split

    def _mark(self, state: int, position: int) -> None:
        for _ in range(_MARKED):
            if state == _ROOT:
                return
            self._ends[state] = position
            state = self._links[state]
