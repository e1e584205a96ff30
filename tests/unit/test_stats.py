"""The figures derived from the counters, and their two forms."""

import pytest

from oxidize.runtime.stats import EARLY_ROUNDS, ROLES, SourceStats, SpeculativeStats, StateChange

# The machine-readable form is an interface: these keys, in this order.
KEYS = [
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "rounds",
    "target_forward_passes",
    "draft_forward_passes",
    "draft_tokens",
    "accepted_draft_tokens",
    "fallback_tokens",
    "acceptance_rate",
    "estimated_speedup",
    "tokens_per_target_pass",
    "accepted_per_position",
    "by_drafter",
    "state_changes",
    "prefill_ms",
    "decode_ms",
    "ttft_ms",
    "tokens_per_second",
    "ort_ms",
    "host_ms",
    "measured_speedup",
    "drafter",
    "acceptance_rule",
    "provider",
    "precision",
]


def _stats() -> SpeculativeStats:
    stats = SpeculativeStats(
        prompt_tokens=100,
        generated_tokens=21,
        rounds=10,
        target_forward_passes=12,
        fallback_tokens=3,
        prefill_ns=500_000_000,
        decode_ns=2_000_000_000,
        first_round_tokens=1,
        plain_step_ms=150.0,
        drafter="ngram",
        precision="int4",
    )
    stats.count_proposal("ngram", 4, 4)
    stats.count_proposal("ngram", 2, 0)
    stats.count_proposal("mtp", 6, 2)
    stats.ort_ns |= {"embed": 1_000_000, "body": 1_900_000_000}
    stats.state_changes.append(StateChange(0, "speculating", "prompt is read"))
    return stats


def test_nothing_happened_yet() -> None:
    stats = SpeculativeStats()
    assert list(stats.as_dict()) == KEYS
    assert (stats.acceptance_rate, stats.estimated_speedup, stats.tokens_per_target_pass) == (0, 0, 0)
    assert stats.tokens_per_second == 0 and stats.measured_speedup is None
    assert stats.line() == "prompt 0 tok 0 tok/s | generated 0 tok 0.0 tok/s | 0.00 tok/pass | ttft 0.00 s"


def test_the_figures_follow_their_definitions() -> None:
    stats = _stats()
    assert stats.acceptance_rate == 6 / 12
    assert stats.accepted_per_position == [2, 2, 1, 1, 0, 0]
    assert stats.proposed_per_position == [3, 3, 2, 2, 1, 1]
    assert stats.estimated_speedup == (6 + 3) / 12
    assert stats.tokens_per_target_pass == 2.1
    assert stats.tokens_per_second == pytest.approx(10)
    assert stats.measured_speedup == pytest.approx(1.5)
    assert stats.host_ms == pytest.approx(99)


def test_the_machine_readable_form() -> None:
    found = _stats().as_dict()
    assert list(found) == KEYS
    assert list(found["ort_ms"]) == list(ROLES) == ["embed", "body", "head", "draft"]
    assert found["ort_ms"] == {"embed": 1.0, "body": 1900.0, "head": 0.0, "draft": 0.0}
    assert found["state_changes"] == [[0, "speculating", "prompt is read"]]
    assert (found["ttft_ms"], found["decode_ms"], found["tokens_per_second"]) == (500.0, 2000.0, 10.0)
    assert (found["measured_speedup"], found["acceptance_rate"]) == (1.5, 0.5)


def test_the_line_for_people() -> None:
    assert _stats().line() == (
        "prompt 100 tok 200 tok/s | generated 21 tok 10.0 tok/s | drafted 12 accepted 6 (0.50) | "
        "2.10 tok/pass | speedup 1.50x | ttft 0.50 s"
    )


def test_each_drafter_is_counted_apart() -> None:
    found = _stats().as_dict()["by_drafter"]
    assert list(found) == ["ngram", "mtp"]
    assert found["ngram"] == {"rounds": 2, "draft_tokens": 6, "accepted_draft_tokens": 4, "acceptance_rate": 0.6667}
    assert found["mtp"] == {"rounds": 1, "draft_tokens": 6, "accepted_draft_tokens": 2, "acceptance_rate": 0.3333}


def test_the_first_rounds_of_a_drafter_are_known_apart() -> None:
    counts = SourceStats()
    for round_ in range(EARLY_ROUNDS + 4):
        counts.count(3, 1 if round_ < EARLY_ROUNDS else 3)
    assert (counts.early_draft_tokens, counts.early_accepted) == (3 * EARLY_ROUNDS, EARLY_ROUNDS)
    assert (counts.draft_tokens, counts.accepted) == (3 * EARLY_ROUNDS + 12, EARLY_ROUNDS + 12)
