"""The speculative loop: propose, verify, accept, commit. Only `_commit` changes shared state.

Between rounds the target's cache holds everything committed but the last token, the anchor; during prefill it holds
less, and a round's pass then begins with the part of the prompt still missing.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from .acceptance import Acceptance, accept_match, accept_reject
from .cache import KVCache
from .drafters.base import Proposal
from .errors import OxidizeError
from .generation import Emission, Generation
from .logprobs import LogprobsParams, TokenLogprob, law_logprob, model_logprob
from .policy import Offer, State
from .rows import PassRows, Rows
from .sampling import Law
from .stats import StateChange
from .target import PREFILL_CHUNK

GRAMMAR = "grammar"  # the source of tokens that a grammar forces
_LOG = logging.getLogger("oxidize")
_FORCED = 32  # what a grammar forces is as good as a match this long: only other tokens of the same text can win
_NOTHING = Proposal()


class TargetModel(Protocol):
    """What the loop needs of a target; `Target` is the real one."""

    cache: KVCache
    floor: int
    context: int
    token_count: int
    passes: int

    def forward(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        """Append tokens, return logits [wanted, V] per request."""
        ...

    def held(self, slot: int) -> list[int]:
        """The tokens behind what the slot's cache holds."""
        ...

    def rows(self, index: int) -> PassRows:
        """What the last pass computed for its request number `index`."""
        ...

    def ort_ns(self) -> dict[str, int]:
        """Nanoseconds spent in each session so far, by role."""
        ...


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sequence's part of a round: the tokens to append, the proposal to verify, and what else was on offer."""

    sequence: Generation
    tail: tuple[int, ...]
    source: str
    proposal: Proposal
    unused: dict[str, Proposal]


def prefill(target: TargetModel, sequence: Generation, chunk: int = PREFILL_CHUNK) -> None:
    """Read the prompt into the cache but for its last chunk, which the first round's pass carries."""
    cached = target.cache.lengths[sequence.slot]
    missing = sequence.committed[cached:]
    keep = (len(missing) - 1) % chunk + 1
    for start in range(0, len(missing) - keep, chunk):
        target.forward([Rows(sequence.slot, missing[start : start + chunk], 0)])
        _show(target, 0, sequence, cached + start)
        sequence.stats.target_forward_passes += 1
    sequence.policy.start()
    _note_state(sequence)


def play_round(target: TargetModel, sequences: Sequence[Generation]) -> list[Emission]:
    """One round for every sequence, in one target pass."""
    turns = [_propose(target, sequence) for sequence in sequences]
    start = perf_counter_ns()
    logits = target.forward([_rows(turn) for turn in turns])
    elapsed_ms = (perf_counter_ns() - start) / 1e6
    emissions = []
    for index, turn in enumerate(turns):
        _show(target, index, turn.sequence, len(turn.sequence.committed) - len(turn.tail))
    for turn, rows in zip(turns, logits, strict=True):
        if len(turns) == 1 and len(turn.tail) == 1:
            turn.sequence.policy.cost.observe(len(rows), elapsed_ms)
        emissions.append(_commit(target, turn, rows))
    return emissions


def generate(target: TargetModel, sequence: Generation, chunk: int = PREFILL_CHUNK) -> Iterator[Emission]:
    """Rounds of one sequence until it is done. Stopping early leaves the cache consistent."""
    start = perf_counter_ns()
    prefill(target, sequence, chunk)
    (emission,) = play_round(target, [sequence])
    clock = _Clock(target, sequence, start, len(emission.tokens))
    try:
        yield emission
        while emission.finish_reason is None:
            (emission,) = play_round(target, [sequence])
            yield emission
    finally:
        clock.stop()


class _Clock:
    """Fills in the time fields of the stats; decode time starts when the first round is over."""

    def __init__(self, target: TargetModel, sequence: Generation, start: int, first: int) -> None:
        self._stats, self._sequence, self._drafters = sequence.stats, sequence, sequence.drafters
        self._ort = target.ort_ns
        self._begin, self._base = perf_counter_ns(), self._ort()
        self._stats.prefill_ns = self._begin - start
        self._stats.first_round_tokens = first
        self._draft_base = self._draft_ns()

    def stop(self) -> None:
        self._stats.decode_ns = perf_counter_ns() - self._begin
        for role, value in self._ort().items():
            self._stats.ort_ns[role] = value - self._base[role]
        self._stats.ort_ns["draft"] = self._draft_ns() - self._draft_base
        self._stats.plain_step_ms = self._sequence.policy.cost.plain_ms

    def _draft_ns(self) -> int:
        return sum(drafter.ort_ns for drafter in self._drafters)


def _show(target: TargetModel, index: int, sequence: Generation, start: int) -> None:
    """Let drafters that read the target's rows have those of a pass, whose first token stands at `start`."""
    for drafter in sequence.drafters:
        if drafter.watches:
            drafter.watch(start, target.rows(index))


def _propose(target: TargetModel, sequence: Generation) -> _Turn:
    cached = target.cache.lengths[sequence.slot]
    tail = tuple(sequence.committed[cached:])
    room = min(
        sequence.max_new_tokens - sequence.generated - 1,
        target.context - len(sequence.committed) - 1,
    )
    offers = _offers(sequence, room)
    source, proposal = _choose(sequence, room, offers)
    if not proposal.tokens and len(tail) == 1 and room > 0 and target.floor > 1 and offers:
        source = max(offers, key=lambda name: offers[name].match_length)
        proposal = _first(offers[source], target.floor - 1)  # the spare row of exact mode is free to use
    unused = {name: offer for name, offer in offers.items() if name != source}
    return _Turn(sequence, tail, source, proposal, unused)


def _offers(sequence: Generation, room: int) -> dict[str, Proposal]:
    """What the grammar and the drafters that cost nothing propose, as far as it is legal."""
    most = min(room, sequence.policy.config.max_k)
    if most <= 0:
        return {}
    found = {GRAMMAR: Proposal(sequence.laws.forced()[:most], match_length=_FORCED)}
    for drafter in sequence.drafters:
        if drafter.free:
            offered = drafter.propose(sequence.committed, most, sequence.context)
            legal = _first(offered, sequence.laws.legal(offered.tokens) if offered.tokens else 0)
            found[drafter.name] = _until_end(legal, sequence.eos)
    return {name: offer for name, offer in found.items() if offer.tokens}


def _choose(sequence: Generation, room: int, offers: dict[str, Proposal]) -> tuple[str, Proposal]:
    """The proposal that the policy picks, made now if it costs something."""
    policy = sequence.policy
    if room <= 0:
        return "", _NOTHING
    plan = policy.plan(room, [Offer(name, len(offer.tokens), offer.match_length) for name, offer in offers.items()])
    if plan.source is None:
        return "", _NOTHING
    if plan.source in offers:
        return plan.source, _first(offers[plan.source], plan.k)
    drafter = next(drafter for drafter in sequence.drafters if drafter.name == plan.source)
    start = perf_counter_ns()
    try:
        proposal = drafter.propose(sequence.committed, plan.k, sequence.context)
    except OxidizeError as error:  # what it drew is dropped with it; the target's noise knows nothing of that
        _LOG.warning("draft %r broke down and is left out of this answer: %s", drafter.name, error)
        sequence.leave_out(drafter)
        return "", _NOTHING
    policy.record_draft_cost(plan.source, len(proposal.tokens), (perf_counter_ns() - start) / 1e6)
    return plan.source, _until_end(proposal, sequence.eos)


def _until_end(proposal: Proposal, eos: frozenset[int]) -> Proposal:
    """Nothing is emitted behind an end token, so nothing is verified there."""
    ends = (index + 1 for index, token in enumerate(proposal.tokens) if token in eos)
    return _first(proposal, next(ends, len(proposal.tokens)))


def _first(proposal: Proposal, k: int) -> Proposal:
    laws = proposal.laws[:k] if proposal.laws is not None else None
    return Proposal(proposal.tokens[:k], laws, proposal.match_length)


def _rows(turn: _Turn) -> Rows:
    k = len(turn.proposal.tokens)
    return Rows(turn.sequence.slot, turn.tail + turn.proposal.tokens, k + 1)


def _accept(turn: _Turn, logits: np.ndarray) -> tuple[Acceptance, list[Law]]:
    """Apply the acceptance rule to logits [k+1, V]; also the laws of the rows that were decided."""
    sequence, position = turn.sequence, len(turn.sequence.committed)
    best = logits.argmax(axis=1).tolist()  # [k+1]; NaN wins an argmax, so this also finds NaN
    if any(value != value for value in map(logits.item, range(len(best)), best)):
        raise OxidizeError("the target produced NaN logits: the model overflowed; export it with a wider precision")
    laws, made = sequence.laws.round(turn.proposal.tokens), []

    def law_at(row: int) -> Law:
        made.append(laws.at(row, logits[row], best[row]))
        return made[-1]

    # A proposal without a law is certain, and for those the match rule accepts just as often as the reject rule, and
    # keeps the text a function of the seed alone. Where the target's law is certain both rules are the same.
    match = sequence.strict or turn.proposal.laws is None or sequence.laws.params.greedy
    rule = accept_match if match else accept_reject
    return rule(turn.proposal, law_at, sequence.key, position), made


def _commit(target: TargetModel, turn: _Turn, logits: np.ndarray) -> Emission:
    sequence, proposal = turn.sequence, turn.proposal
    acceptance, laws = _accept(turn, logits)
    emitted = _cut(sequence, (*proposal.tokens[: acceptance.accepted], acceptance.token))
    logprobs = _logprobs(sequence.logprobs, emitted, logits, laws)
    sequence.laws.commit(emitted)  # first, because a grammar may refuse
    sequence.committed.extend(emitted)
    target.cache.rewind_to(sequence.slot, len(sequence.committed) - 1)
    _record(turn, acceptance, emitted)
    for drafter in sequence.drafters:
        drafter.observe(sequence.committed)
    if sequence.finish_reason is not None:
        sequence.policy.finish(sequence.finish_reason)
    _note_state(sequence)
    kind = acceptance.kind if proposal.tokens else "plain"
    return Emission(emitted, min(acceptance.accepted, len(emitted)), sequence.finish_reason, kind, logprobs)


def _logprobs(
    wanted: LogprobsParams | None, tokens: Sequence[int], logits: np.ndarray, laws: Sequence[Law]
) -> tuple[TokenLogprob, ...] | None:
    if wanted is None:
        return None
    if wanted.of == "model":
        return tuple(model_logprob(row, token, wanted.top) for row, token in zip(logits, tokens, strict=False))
    return tuple(law_logprob(law, token, wanted.top) for law, token in zip(laws, tokens, strict=False))


def _cut(sequence: Generation, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """End the sequence at its first EOS or at its length, wherever in the round that falls."""
    for index, token in enumerate(tokens):
        if token in sequence.eos:
            sequence.finish_reason = "stop"
            return tokens[: index + 1]
        if sequence.generated + index + 1 >= sequence.max_new_tokens:
            sequence.finish_reason = "length"
            return tokens[: index + 1]
    return tokens


def _record(turn: _Turn, acceptance: Acceptance, emitted: tuple[int, ...]) -> None:
    sequence, proposal, stats = turn.sequence, turn.proposal, turn.sequence.stats
    stats.rounds += 1
    stats.target_forward_passes += 1
    stats.generated_tokens += len(emitted)
    if sequence.policy.state is State.FALLBACK:
        stats.fallback_tokens += len(emitted) - min(acceptance.accepted, len(emitted))
    if proposal.tokens:
        stats.count_proposal(turn.source, len(proposal.tokens), acceptance.accepted)
        sequence.policy.record(turn.source, len(proposal.tokens), acceptance.accepted, proposal.match_length)
    for name, offer in turn.unused.items():
        sequence.policy.record_unused(name, offer.tokens[0] == emitted[0], offer.match_length)


def _note_state(sequence: Generation) -> None:
    changes, policy = sequence.stats.state_changes, sequence.policy
    if not changes or changes[-1].state != policy.state:
        changes.append(StateChange(sequence.generated, policy.state.value, policy.reason))
