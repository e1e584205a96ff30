"""How much drafting may lose, and when a drafter that did not pay is tried again. All losses are in plain steps."""

from .costs import CostCurve
from .estimates import ByContext, ByPosition, DraftCost, PassCost, expected_kept

_INCOME = 1 / 64  # what every token gives back to both allowances
_START, _RISK = 12.0, 32.0  # what all drafting together may lose: at first, and after it has earned more
_TRIAL = 2.0  # what probes may lose
_FIRST_GAP, _SHORT_GAP, _LONG_GAP = 10, 4, 40  # tokens between probes: at first, and the bounds of the last
_RIVAL_GAP = 128  # rounds between the probes of a source while another one is in use
_LONGEST_PROBE = 8
_LONGEST_REST = 64
_OUTLIER = 16.0  # the most that one booking may lose: beyond, the machine was asleep
_PACE = 1.5  # probes follow each other so slowly that so many times their expected loss is given back between them
_SAME_PRICE = 1.1  # a longer probe is preferred where it costs at most so many times what one token costs
_CONVINCED = 6  # tokens kept in a row by probes that outweigh all that was known before
HOPE, _SURE = 0.7, 0.9  # chance of a computed token before anything was seen; of a forced or convincing one


class Ledger:
    """Books what drafting saved and lost against plain decoding. Gains beyond the limits are not banked.

    risk: what drafting may lose now; a round that could lose more is not played. trial: the same for probes.
    """

    def __init__(self) -> None:
        self.risk, self.trial = _START, _TRIAL

    def book(self, tokens: int, steps: float, probing: bool) -> None:
        """Count `tokens` that came for `steps` plain steps, in a round that was a probe or not."""
        saved, income = max(tokens - steps, -_OUTLIER), tokens * _INCOME
        self.risk = min(_RISK, self.risk + saved + income)
        self.trial = min(_TRIAL, self.trial + (saved if probing else 0.0) + income)


class Track:
    """What is known of one source: its cost, its acceptance, and, if its drafts cost something, when to probe it.

    most: tokens it is asked for at most. hope: the chance of its first token that a source whose drafts cost something
    begins with.
    """

    def __init__(self, name: str, free: bool, draft: CostCurve | None, most: int, hope: float = HOPE) -> None:
        self.name, self.free, self.most = name, free, most
        self.cost = DraftCost(draft)
        self.by_position = ByPosition(_SURE if free else hope, most)
        self.by_context = ByContext()
        self.pause: int | None = None  # rounds between the last two times it was asked; None before the second
        self.in_use = False  # it was chosen, and not given up since
        self._run = 0  # draft tokens in a row that probes kept
        self._asked: int | None = None
        self._last, self._gap, self._due, self._step = 0, _FIRST_GAP, _FIRST_GAP, 0
        self._rest, self._rested = 1, 0  # tokens to leave it alone for when it has nothing; until where it is
        self._missed = 0  # tokens generated between the last two times it was asked
        self._reading = (0.0, 0.0)  # milliseconds to read one of them, as found the last two times

    def estimate(self, match_length: int) -> ByPosition | ByContext:
        """The estimate for lookups, or the one for all other proposals."""
        return self.by_context if match_length else self.by_position

    def next_hope(self) -> float:
        """What to hope for in the next text: half of what this one taught, because texts differ."""
        return (HOPE + self.by_position.chances(1)[0]) / 2

    def ask(self, round_: int, tokens: int) -> None:
        """Note that it is asked in this round, when so many tokens have been generated."""
        self.pause = None if self._asked is None else round_ - self._asked
        self._missed = tokens - self._last
        self._asked, self._last = round_, tokens

    def rest(self, tokens: int) -> None:
        """It had nothing to propose when so many tokens had been generated: a draft may be at its end for good."""
        self._rested, self._rest = tokens + self._rest, min(2 * self._rest, _LONGEST_REST)

    def resting(self, tokens: int) -> bool:
        """Whether it is to be left alone."""
        return tokens < self._rested

    def took(self, tokens: int, milliseconds: float, target: PassCost) -> None:
        """Learn from the time a proposal of `tokens` took.

        After a pause it also read what it had missed: such a time is believed only where it is lower than expected,
        and what it is higher is the price of reading.
        """
        self._rest = 1
        if self.pause == 1:
            self.cost.observe(tokens, milliseconds)
        elif target.known:
            excess = milliseconds - self.cost.table_or_guess(tokens, target)[-1]
            if excess < 0:
                self.cost.observe(tokens, milliseconds)
            if self.pause is not None:
                self._reading = (self._reading[1], max(excess, 0.0) / max(self._missed, 1))

    def give_up(self, tokens: int) -> None:
        """It does not pay any more: begin to probe."""
        self.in_use = False
        self._gap, self._due = _FIRST_GAP, tokens + _FIRST_GAP
        self._step, self._run = 0, 0

    def neglected(self, round_: int) -> bool:
        """Whether another source has been in use for so long that this one should be tried."""
        return round_ - (self._asked or 0) >= _RIVAL_GAP

    def probe(self, most: int, tokens: int, ledger: Ledger, target: PassCost) -> int:
        """How many tokens to probe with in this round: 0 while it is too soon, or a failure could not be borne.

        1, 2, 4, ... as long as all are kept, and as many more as cost next to nothing.
        """
        since = tokens - self._last
        reading = min(self._reading) * since / target.estimate(1)
        price = self._price(1, target) + reading
        if tokens < self._due or price > ledger.risk or price > max(ledger.trial, since * _INCOME):
            return 0
        self._due = tokens + self._gap
        k = self._length(min(most, _LONGEST_PROBE), target)
        return k if self._price(k, target) + reading <= ledger.risk else 1

    def follow(self, proposed: int, accepted: int, tokens: int, target: PassCost) -> int:
        """Take in the outcome of a probe; how many tokens were kept in a row if that is convincing, else 0.

        After a probe that kept a token the next comes at once, after any other later and later. When they convince,
        the text has turned predictable, and what was known before is forgotten.
        """
        kept_all = accepted == proposed
        self._step, self._run = (self._step + 1, self._run + accepted) if kept_all else (0, 0)
        if accepted == 0:
            k = self._length(min(self.most, _LONGEST_PROBE), target)
            loss = self._price(k, target) - expected_kept(self.by_position.chances(k))
            self._gap = min(2 * self._gap, int(min(max(_PACE * loss / _INCOME, _SHORT_GAP), _LONG_GAP)))
        self._due = tokens + (0 if accepted else self._gap)
        if self._run < _CONVINCED:
            return 0
        run, self._run = self._run, 0
        self.by_position = ByPosition(_SURE, self.most)
        return run

    def _length(self, most: int, target: PassCost) -> int:
        k, limit = min(2**self._step, most), _SAME_PRICE * (1 + self._price(1, target)) - 1
        while k < most and self._price(k + 1, target) <= limit:
            k += 1
        return k

    def _price(self, k: int, target: PassCost) -> float:
        """What a draft of k tokens loses when none is kept."""
        passes = target.table(k + 1)
        return (passes[k] + self.cost.table_or_guess(k, target)[-1]) / passes[0] - 1
