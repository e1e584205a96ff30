"""What a generation cost and gained: counters the loop fills in, and the figures derived from them."""

from dataclasses import dataclass, field
from typing import Any

ROLES = ("embed", "body", "head", "draft")
EARLY_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class StateChange:
    """The decoder moved to `state` when `at` tokens had been generated, because of `reason`."""

    at: int
    state: str
    reason: str


@dataclass(slots=True)
class SourceStats:
    """What one drafter proposed: rounds, draft tokens verified and kept; the same for its first `EARLY_ROUNDS`."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    early_draft_tokens: int = 0
    early_accepted: int = 0

    def count(self, proposed: int, accepted: int) -> None:
        """Add one proposal."""
        if self.rounds < EARLY_ROUNDS:
            self.early_draft_tokens += proposed
            self.early_accepted += accepted
        self.rounds += 1
        self.draft_tokens += proposed
        self.accepted += accepted

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        rate = self.accepted / self.draft_tokens if self.draft_tokens else 0.0
        return {
            "rounds": self.rounds,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted,
            "acceptance_rate": round(rate, 4),
        }


@dataclass(slots=True)
class SpeculativeStats:
    """Counters of one generation. Times are nanoseconds; `decode_*` begin after the first round.

    acceptance_rate and estimated_speedup keep the definitions of the design this project implements; the honest
    figures are tokens_per_target_pass and measured_speedup.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, already in the KV cache
    generated_tokens: int = 0
    rounds: int = 0
    target_forward_passes: int = 0
    draft_forward_passes: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    fallback_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    proposed_per_position: list[int] = field(default_factory=list)
    by_drafter: dict[str, SourceStats] = field(default_factory=dict)
    state_changes: list[StateChange] = field(default_factory=list)
    prefill_ns: int = 0
    decode_ns: int = 0
    first_round_tokens: int = 0
    ort_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    plain_step_ms: float | None = None
    drafter: str = "none"
    acceptance_rule: str = "reject"
    provider: str = "cpu"
    precision: str = ""

    def count_proposal(self, drafter: str, proposed: int, accepted: int) -> None:
        """Add one proposal of `proposed` tokens of which the first `accepted` were kept."""
        self.by_drafter.setdefault(drafter, SourceStats()).count(proposed, accepted)
        self.draft_tokens += proposed
        self.accepted_draft_tokens += accepted
        missing = proposed - len(self.proposed_per_position)
        self.proposed_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for position in range(proposed):
            self.proposed_per_position[position] += 1
            self.accepted_per_position[position] += position < accepted

    def end(self, tokens: int, reason: str) -> None:
        """The answer ended after `tokens` tokens, perhaps before the round that was played last did."""
        if tokens < self.generated_tokens or not self.state_changes or self.state_changes[-1].state != "done":
            self.generated_tokens = tokens
            self.state_changes = [change for change in self.state_changes if change.at < tokens or not change.at]
            self.state_changes.append(StateChange(tokens, "done", reason))

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per proposed draft token."""
        return self.accepted_draft_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def estimated_speedup(self) -> float:
        """(accepted + fallback tokens) / target forward passes."""
        passes = self.target_forward_passes
        return (self.accepted_draft_tokens + self.fallback_tokens) / passes if passes else 0.0

    @property
    def tokens_per_target_pass(self) -> float:
        """Emitted tokens per target pass, prefill passes left out."""
        return self.generated_tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_tokens(self) -> int:
        """Tokens generated after the first round."""
        return self.generated_tokens - self.first_round_tokens

    @property
    def tokens_per_second(self) -> float:
        """Decode speed after the first round."""
        return self.decode_tokens / (self.decode_ns / 1e9) if self.decode_ns else 0.0

    @property
    def host_ms(self) -> float:
        """Decode time spent outside ONNX Runtime."""
        return (self.decode_ns - sum(self.ort_ns.values())) / 1e6

    @property
    def measured_speedup(self) -> float | None:
        """Decode speed relative to this machine's own one-token step; None when no such step was seen."""
        if self.plain_step_ms is None or not self.decode_tokens:
            return None
        return self.tokens_per_second * self.plain_step_ms / 1e3

    def as_dict(self) -> dict[str, Any]:
        """The JSON form of the stats."""
        speedup = self.measured_speedup
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "target_forward_passes": self.target_forward_passes,
            "draft_forward_passes": self.draft_forward_passes,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "fallback_tokens": self.fallback_tokens,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "estimated_speedup": round(self.estimated_speedup, 3),
            "tokens_per_target_pass": round(self.tokens_per_target_pass, 3),
            "accepted_per_position": self.accepted_per_position,
            "by_drafter": {name: found.as_dict() for name, found in self.by_drafter.items()},
            "state_changes": [[change.at, change.state, change.reason] for change in self.state_changes],
            "prefill_ms": round(self.prefill_ns / 1e6, 3),
            "decode_ms": round(self.decode_ns / 1e6, 3),
            "ttft_ms": round(self.prefill_ns / 1e6, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "ort_ms": {role: round(self.ort_ns[role] / 1e6, 3) for role in ROLES},
            "host_ms": round(self.host_ms, 3),
            "measured_speedup": None if speedup is None else round(speedup, 3),
            "drafter": self.drafter,
            "acceptance_rule": self.acceptance_rule,
            "provider": self.provider,
            "precision": self.precision,
        }

    def line(self) -> str:
        """One line for people."""
        seconds, read = self.prefill_ns / 1e9, self.prompt_tokens - self.cached_tokens
        parts = [
            f"prompt {self.prompt_tokens} tok {read / seconds if seconds else 0:.0f} tok/s",
            *([f"cached {self.cached_tokens}"] if self.cached_tokens else []),
            f"generated {self.generated_tokens} tok {self.tokens_per_second:.1f} tok/s",
        ]
        if self.draft_tokens:
            parts.append(
                f"drafted {self.draft_tokens} accepted {self.accepted_draft_tokens} ({self.acceptance_rate:.2f})"
            )
        parts.append(f"{self.tokens_per_target_pass:.2f} tok/pass")
        if self.measured_speedup is not None and self.draft_tokens:
            parts.append(f"speedup {self.measured_speedup:.2f}x")
        parts.append(f"ttft {seconds:.2f} s")
        return " | ".join(parts)
