"""The speculative loop: propose, verify, accept, commit. Only `_commit` changes shared state.

Between rounds the target's cache holds everything committed but the last token, the anchor; during prefill it holds
less, and a round's pass then begins with the part of the prompt still missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from .acceptance import Acceptance, accept_match, accept_reject
from .cache import KVCache
from .drafters.base import DraftContext, Drafter, Proposal
from .errors import OxidizeError
from .noise import NoiseKey
from .policy import Policy, State
from .sampling import Law, SamplingParams, law_of
from .stats import SpeculativeStats, StateChange
from .target import PREFILL_CHUNK, Rows

_NOTHING = Proposal()


class TargetModel(Protocol):
    """What the loop needs of a target; `Target` is the real one."""

    cache: KVCache
    floor: int
    context: int
    passes: int

    def forward(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        """Append tokens, return logits [wanted, V] per request."""
        ...

    def held(self, slot: int) -> list[int]:
        """The tokens behind what the slot's cache holds."""
        ...


@dataclass(slots=True)
class Generation:
    """One text being generated in one slot. `committed` is the authoritative token list, prompt included."""

    slot: int
    committed: list[int]
    params: SamplingParams
    max_new_tokens: int
    eos: frozenset[int]
    policy: Policy
    drafter: Drafter | None = None
    strict: bool = False
    choice: int = 0
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    finish_reason: str | None = None
    prompt_length: int = 0

    def __post_init__(self) -> None:
        self.prompt_length = self.stats.prompt_tokens = len(self.committed)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.committed) - self.prompt_length

    @property
    def context(self) -> DraftContext:
        """What a drafter may know besides the committed tokens."""
        return DraftContext(self.params, NoiseKey(self.params.seed, self.choice), self.stats.rounds, self.strict)


@dataclass(frozen=True, slots=True)
class Emission:
    """What one round gave one sequence: its tokens, how many of them were drafted, and whether it is done."""

    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sequence's part of a round: the tokens to append, the verified proposal and the one left unused."""

    sequence: Generation
    tail: tuple[int, ...]
    proposal: Proposal
    unused: Proposal


def prefill(target: TargetModel, sequence: Generation, chunk: int = PREFILL_CHUNK) -> None:
    """Read the prompt into the cache but for its last chunk, which the first round's pass carries."""
    missing = sequence.committed[target.cache.lengths[sequence.slot] :]
    keep = (len(missing) - 1) % chunk + 1
    for start in range(0, len(missing) - keep, chunk):
        target.forward([Rows(sequence.slot, missing[start : start + chunk], 0)])
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
    for turn, rows in zip(turns, logits, strict=True):
        if len(turns) == 1:
            turn.sequence.policy.cost.observe(max(len(rows), len(turn.tail)), elapsed_ms)
        emissions.append(_commit(target, turn, _accept(turn, rows)))
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
        self._stats, self._sequence = sequence.stats, sequence
        self._ort = getattr(target, "ort_ns", dict)
        self._begin, self._base = perf_counter_ns(), dict(self._ort())
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
        drafter = self._sequence.drafter
        return drafter.ort_ns if drafter is not None else 0


def _propose(target: TargetModel, sequence: Generation) -> _Turn:
    cached = target.cache.lengths[sequence.slot]
    tail = tuple(sequence.committed[cached:])
    room = min(
        sequence.max_new_tokens - sequence.generated - 1,
        target.context - len(sequence.committed) - 1,
    )
    offered = _offer(sequence, room)
    policy, context = sequence.policy, offered.match_length
    k = policy.choose(len(offered.tokens), context) if offered.tokens else 0
    if len(tail) == 1 and room > 0:
        k = max(k, min(target.floor - 1, len(offered.tokens)))  # the spare row of exact mode is free to use
    return _Turn(sequence, tail, _first(offered, k), offered)


def _first(proposal: Proposal, k: int) -> Proposal:
    laws = proposal.laws[:k] if proposal.laws is not None else None
    return Proposal(proposal.tokens[:k], laws, proposal.match_length)


def _offer(sequence: Generation, room: int) -> Proposal:
    drafter = sequence.drafter
    wanted = sequence.policy.wanted(max(room, 0)) if drafter is not None else 0
    if drafter is None or wanted == 0:
        return _NOTHING
    start = perf_counter_ns()
    offered = drafter.propose(sequence.committed, wanted, sequence.context)
    if sequence.stats.rounds:  # the first proposal also pays for reading the prompt
        sequence.policy.record_draft_cost(len(offered.tokens), (perf_counter_ns() - start) / 1e6)
    return offered


def _rows(turn: _Turn) -> Rows:
    k = len(turn.proposal.tokens)
    return Rows(turn.sequence.slot, turn.tail + turn.proposal.tokens, k + 1)


def _accept(turn: _Turn, logits: np.ndarray) -> Acceptance:
    """Apply the acceptance rule to logits [k+1, V]."""
    sequence, position = turn.sequence, len(turn.sequence.committed)
    key = NoiseKey(sequence.params.seed, sequence.choice)
    best = logits.argmax(axis=1).tolist()  # [k+1]; NaN wins an argmax, so this also finds NaN
    if any(value != value for value in map(logits.item, range(len(best)), best)):
        raise OxidizeError("the target produced NaN logits: the model overflowed; export it with a wider precision")

    def law_at(row: int) -> Law:
        if sequence.params.greedy:
            return Law.one_hot(best[row])
        return law_of(logits[row], sequence.params, best[row])

    # A proposal without a law is certain, and for those the match rule accepts just as often as the reject rule, and
    # keeps the text a function of the seed alone.
    if sequence.strict or turn.proposal.laws is None:
        return accept_match(turn.proposal, law_at, key, position)
    return accept_reject(turn.proposal, law_at, key, position)


def _commit(target: TargetModel, turn: _Turn, acceptance: Acceptance) -> Emission:
    sequence, proposal = turn.sequence, turn.proposal
    emitted = _cut(sequence, (*proposal.tokens[: acceptance.accepted], acceptance.token))
    sequence.committed.extend(emitted)
    target.cache.rewind_to(sequence.slot, len(sequence.committed) - 1)
    _record(turn, acceptance, emitted)
    if sequence.drafter is not None:
        sequence.drafter.observe(sequence.committed)
    if sequence.finish_reason is not None:
        sequence.policy.finish(sequence.finish_reason)
    _note_state(sequence)
    return Emission(emitted, min(acceptance.accepted, len(emitted)), sequence.finish_reason)


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
        stats.count_proposal(len(proposal.tokens), acceptance.accepted)
        sequence.policy.record(len(proposal.tokens), acceptance.accepted, proposal.match_length)
    elif turn.unused.tokens:
        sequence.policy.record_unused(turn.unused.tokens[0] == emitted[0], turn.unused.match_length)


def _note_state(sequence: Generation) -> None:
    changes, policy = sequence.stats.state_changes, sequence.policy
    if not changes or changes[-1].state != policy.state:
        changes.append(StateChange(sequence.generated, policy.state.value, policy.reason))
