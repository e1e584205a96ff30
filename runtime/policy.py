"""Decides each round which drafter proposes how many tokens, and when to stop. Knows costs and outcomes, not models."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .costs import CostCurve
from .estimates import PassCost, expected_kept, prior_cost
from .probing import HOPE, Ledger, Track

__all__ = ["HOPE", "Offer", "PassCost", "Plan", "Policy", "PolicyConfig", "Source", "State", "prior_cost"]

_RELIEF = 0.97  # a computed draft in use is given up when it decodes at less than this speed of plain decoding
_CLEARLY = 0.75  # ... or when its acceptance is under this share of the floor
_PATIENCE = 16  # rounds with offers of which none was worth verifying
_WINDOW_ROUNDS, _WINDOW_TOKENS = 32, 24  # of the rate that counts when k is fixed


class State(StrEnum):
    """Where a sequence stands."""

    PREFILL = "prefill"
    SPECULATING = "speculating"
    FALLBACK = "fallback"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter as the policy sees it.

    free: proposing costs next to nothing; what it proposes is at hand when `plan` is called, as an Offer.
    draft: calibrated milliseconds of proposing k tokens, if it costs something and that is known.
    hope: the chance that its first token is kept, as earlier texts may have taught (see `Policy.hopes`).
    most: tokens it can propose at most, where that is bounded.
    """

    name: str
    free: bool
    draft: CostCurve | None = None
    hope: float = HOPE
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a free source has at hand this round: tokens, and the context that vouches for them (0: no lookup)."""

    source: str
    available: int
    match_length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who drafts how many tokens this round; None and 0 for a plain round."""

    source: str | None
    k: int


_PLAIN = Plan(None, 0)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Bounds of the policy. `adaptive` false drafts `max_k` tokens every round while speculating."""

    max_k: int
    min_acceptance_rate: float
    adaptive: bool = True


@dataclass(frozen=True, slots=True)
class _Choice:
    """A source with the chances of its next tokens, the k to draft and the speed relative to plain decoding."""

    track: Track
    chances: list[float]
    match_length: int
    k: int
    speed: float

    @property
    def rate(self) -> float:
        """Expected share of the k tokens that is kept."""
        return expected_kept(self.chances[: self.k]) / self.k


class Policy:
    """Chooses source and k for one sequence, and moves it between Speculating and Fallback.

    Every round takes what decodes fastest, E(k) / (T(1 + k) + D(k)) tokens per millisecond, over all sources and k, no
    draft included: T is the target's pass, D the drafter's time, E(k) = 1 + c1 + c1 c2 + ... with the chances c that a
    token is kept once those before it were. Fallback is the state in which nothing is worth it.

    A source whose first token is kept less often than `min_acceptance_rate` is not asked, whatever the costs say. The
    rate compared is the recent chance of a single draft token, which is accepted / proposed at k = 1: tokens behind a
    rejected one were never judged, so a long draft on a fast machine is no reason to fall back. A source in use is
    dropped when it is clearly under the floor, and comes back when it is over it. With `adaptive` false the rate is
    accepted / proposed over the last rounds.

    Offers are judged in every round, used or not, so those come back by themselves. The others are probed with a short
    draft. What drafting saves and loses against plain decoding is booked, in plain steps: in a row all of it may lose
    12 and probes 2 of these, a round that could lose more is not played, and each token gives 1/64 back. So if costs
    are as known, the time is at most that of plain decoding times 1 + 1/64, plus 12 steps, whatever the text does:
    under 2 % from 3,000 tokens on. Text that is hopeless from its beginning costs what a few rounds and the probes
    lose. A failed probe of one token loses p = (T(2) + D(1)) / T(1) - 1 steps, which 64 p tokens give back, so probes
    need never be further apart than max(40, 64 p) tokens; where the text has turned predictable, those of 1, 2 and 4
    tokens convince, after 10 tokens. Hence Fallback ends within 64 tokens, and both bounds hold together, where p is
    at most 0.84. A dearer drafter, or one that reads long for what it missed, is probed more rarely: the first bound
    goes before the second.
    """

    def __init__(self, config: PolicyConfig, cost: PassCost, sources: Sequence[Source]) -> None:
        self.config, self.cost = config, cost
        self.state = State.PREFILL
        self.reason = ""
        self._tracks = {
            source.name: Track(
                source.name, source.free, source.draft, min(config.max_k, source.most or config.max_k), source.hope
            )
            for source in sources
        }
        self._computed = [track for track in self._tracks.values() if not track.free]
        self._ledger = Ledger()
        self._probing = False
        self._patience = _PATIENCE if len(self._computed) < len(self._tracks) else 1
        self._rounds = self._tokens = self._idle = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW_ROUNDS)

    def start(self) -> None:
        """The prompt is in the cache: begin to speculate, or to decode plainly when drafting is off."""
        if self.config.max_k > 0 and self._tracks:
            self._enter(State.SPECULATING, "prompt is read")
        else:
            self._enter(State.FALLBACK, "no drafter")

    def finish(self, reason: str) -> None:
        """The sequence is complete."""
        self._enter(State.DONE, reason)

    def hopes(self) -> dict[str, float]:
        """By name of those whose drafts cost something, what the next text should begin with as `Source.hope`."""
        return {track.name: track.next_hope() for track in self._computed}

    def plan(self, room: int, offers: Sequence[Offer]) -> Plan:
        """Who drafts how many tokens in the round that begins now, at most `room`."""
        self._rounds += 1
        self._tokens += 1
        self._probing = False
        self._ledger.book(1, 1.0, probing=False)
        most = min(self.config.max_k, room)
        if most <= 0 or not self._tracks:
            return _PLAIN
        best = self._best(most, offers) if self.config.adaptive else self._first(most, offers)
        if best is None:
            return self._nothing(most, offers)
        if self.state is State.FALLBACK:
            self._enter(State.SPECULATING, _why_speculate(best))
        self._idle = 0
        best.track.in_use = True
        return self._ask(self._rival(best.track), best.k)

    def record(self, source: str, proposed: int, accepted: int, match_length: int) -> None:
        """Outcome of a round that verified `proposed` tokens of `source` and kept the first `accepted`."""
        track, passes = self._tracks[source], self.cost.table(proposed + 1)
        self._tokens += accepted
        self._ledger.book(accepted, passes[-1] / passes[0] - 1, self._probing)
        track.estimate(match_length).record(proposed, accepted, match_length)
        if self._probing:
            run = track.follow(proposed, accepted, self._tokens, self.cost)
            if run:
                self._return(track, run)
        if not self.config.adaptive:
            self._watch(proposed, accepted)

    def leave_out(self, source: str) -> None:
        """Ask this source no more."""
        track = self._tracks.pop(source)
        self._computed = [each for each in self._computed if each is not track]

    def record_unused(self, source: str, agreed: int | bool, match_length: int) -> None:
        """Whether the first token of an offer that was not verified is what the target then said."""
        self._tracks[source].estimate(match_length).record(1, int(agreed > 0), match_length)

    def record_draft_cost(self, source: str, tokens: int, milliseconds: float) -> None:
        """Time `source` took to propose `tokens` tokens; the first time it also read the prompt, which is no loss.

        A source that had none is left alone for a while, longer each time in a row.
        """
        track, lost = self._tracks[source], milliseconds
        if track.pause is None and tokens:
            lost = min(lost, track.cost.table_or_guess(tokens, self.cost)[-1])
        if self.cost.known:
            self._ledger.book(0, lost / self.cost.estimate(1), self._probing)
        if tokens:
            track.took(tokens, milliseconds, self.cost)
        else:
            track.rest(self._tokens)

    def _best(self, most: int, offers: Sequence[Offer], floor: bool = True, risk: bool = True) -> _Choice | None:
        """What decodes fastest, or None when that is a plain round.

        Without `floor` also sources of too low an acceptance, without `risk` also rounds that could lose too much.
        """
        passes = self.cost.table(most + 1)
        limit = passes[0] * (1 + self._ledger.risk) if risk else math.inf
        best = None
        for track, chances, match_length in self._able(most, offers):
            if floor and chances[0] < self.config.min_acceptance_rate * (_CLEARLY if track.in_use else 1.0):
                continue
            drafts = None if track.free else track.cost.table_or_guess(len(chances), self.cost)
            k, rate = _fastest(chances, passes, drafts, limit)
            speed = rate * passes[0]
            enough = _RELIEF if track.in_use and not track.free else 1.0
            if speed > enough and (best is None or speed > best.speed):
                best = _Choice(track, chances, match_length, k, speed)
        return best

    def _first(self, most: int, offers: Sequence[Offer]) -> _Choice | None:
        """The first source that can propose, with all it has; in Fallback one that is likely over the floor."""
        for track, chances, match_length in self._able(most, offers):
            choice = _Choice(track, chances, match_length, len(chances), 1.0)
            if self.state is State.SPECULATING or choice.rate >= self.config.min_acceptance_rate:
                return choice
        return None

    def _able(self, most: int, offers: Sequence[Offer]) -> Iterator[tuple[Track, list[float], int]]:
        """The sources that can propose now, with the chances of their tokens and the match length behind them."""
        at_hand = {offer.source: offer for offer in offers if offer.available > 0}
        for name, track in self._tracks.items():
            offer = at_hand.get(name)
            if offer is not None:
                count, length = min(most, offer.available), offer.match_length
                yield track, track.estimate(length).chances(count, length), length
            elif not track.free and not track.resting(self._tokens):
                yield track, track.by_position.chances(most), 0

    def _nothing(self, most: int, offers: Sequence[Offer]) -> Plan:
        """A plain round, or a probe; the end of speculation if there has been nothing for long enough."""
        self._idle += bool(offers or self._computed)
        if self.state is State.SPECULATING and self._idle >= self._patience:
            self._enter(State.FALLBACK, self._why_fall_back(most, offers))
        for track in self._computed:
            if track.in_use:
                track.give_up(self._tokens)
        for track in self._computed:
            if track.resting(self._tokens):
                continue
            k = track.probe(min(most, track.most), self._tokens, self._ledger, self.cost)
            if k:
                self._probing = True
                return self._ask(track, k)
        return _PLAIN

    def _why_fall_back(self, most: int, offers: Sequence[Offer]) -> str:
        if self._best(most, offers, risk=False) is not None:
            return "drafts have lost as much time as they may"
        ignored = self._best(most, offers, floor=False, risk=False)
        if ignored is not None:
            rate, low = ignored.chances[0], self.config.min_acceptance_rate
            return f"acceptance {rate:.2f} of recent draft tokens is under {low:.2f}"
        return "drafts cost more than they save"

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._idle = 0
        self._recent.clear()

    def _return(self, track: Track, run: int) -> None:
        """Probes have shown that the text turned predictable; speculate if that pays."""
        if not self.config.adaptive or self._best(self.config.max_k, ()) is not None:
            track.in_use = True
            if self.state is State.FALLBACK:
                self._enter(State.SPECULATING, f"{track.name}: {run} draft tokens in a row were kept")

    def _ask(self, track: Track, k: int) -> Plan:
        track.ask(self._rounds, self._tokens)
        return Plan(track.name, k)

    def _rival(self, chosen: Track) -> Track:
        """The chosen source, or once in a while another one that could be better, so that its estimate stays fresh."""
        if chosen.free or not self.config.adaptive:
            return chosen
        return next((track for track in self._computed if self._is_neglected(track)), chosen)

    def _is_neglected(self, track: Track) -> bool:
        return track.neglected(self._rounds) and not track.resting(self._tokens)

    def _watch(self, proposed: int, accepted: int) -> None:
        """With a fixed k, the rate over the recent rounds decides."""
        self._recent.append((proposed, accepted))
        judged = sum(entry[0] for entry in self._recent)
        rate, low = sum(entry[1] for entry in self._recent) / judged, self.config.min_acceptance_rate
        if self.state is State.SPECULATING and judged >= _WINDOW_TOKENS and rate < low:
            self._enter(State.FALLBACK, f"acceptance {rate:.2f} of the last {judged} draft tokens is under {low:.2f}")


def _fastest(
    chances: Sequence[float], passes: Sequence[float], drafts: Sequence[float] | None, limit: float
) -> tuple[int, float]:
    """The k with the most expected tokens per millisecond among those that cost at most `limit`, and these tokens."""
    best, best_rate, expected, product = 0, 0.0, 1.0, 1.0
    for k, chance in enumerate(chances, 1):
        product *= chance
        expected += product
        cost = passes[k] if drafts is None else passes[k] + drafts[k - 1]
        if cost <= limit and expected > best_rate * cost:
            best, best_rate = k, expected / cost
    return best, best_rate


def _why_speculate(choice: _Choice) -> str:
    backing = f" behind a match of {choice.match_length}" if choice.match_length else ""
    return f"{choice.track.name} pays: {choice.k} draft tokens at acceptance {choice.chances[0]:.2f}{backing}"
