"""`oxidize run`: what goes to stdout, what to stderr, and what every wrong argument answers."""

import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STATS_LINE = r"prompt \d+ tok \d+ tok/s \| generated 5 tok [\d.]+ tok/s \| .*ttft [\d.]+ s\n"
TOP_KEYS = ["text", "token_ids", "finish_reason", "stats"]
STATS_KEYS = {
    *("prompt_tokens", "cached_tokens", "generated_tokens", "rounds", "target_forward_passes"),
    *("draft_forward_passes", "draft_tokens", "accepted_draft_tokens", "fallback_tokens", "acceptance_rate"),
    *(
        "estimated_speedup",
        "tokens_per_target_pass",
        "accepted_per_position",
        "by_drafter",
        "state_changes",
        "prefill_ms",
    ),
    *("decode_ms", "ttft_ms", "tokens_per_second", "ort_ms", "host_ms", "measured_speedup", "drafter"),
    *("acceptance_rule", "provider", "precision"),
}


@pytest.fixture
def tiny(tiny_bundle: Callable[..., Path]) -> Path:
    """A bundle that is only read."""
    return tiny_bundle("llama2")


def _type_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_text_goes_to_stdout_and_the_rest_to_stderr(oxidize, tiny: Path) -> None:
    result = oxidize("run", tiny, "hello", "-n", 5)
    assert result.code == 0
    assert len(result.out.strip()) > 1 and result.out.endswith("\n")
    assert re.fullmatch(STATS_LINE, result.err), result.err


def test_json_is_one_line_with_exactly_these_keys(oxidize, tiny: Path) -> None:
    result = oxidize("run", tiny, "--prompt", "hello", "-n", 5, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1 and result.out.endswith("}\n")
    answer = json.loads(result.out)
    assert list(answer) == TOP_KEYS
    assert set(answer["stats"]) == STATS_KEYS
    assert set(answer["stats"]["ort_ms"]) == {"embed", "body", "head", "draft"}
    assert answer["finish_reason"] == "length" and len(answer["token_ids"]) == 5
    assert answer["stats"]["generated_tokens"] == 5 and answer["stats"]["prompt_tokens"] > 5
    assert (answer["stats"]["provider"], answer["stats"]["precision"]) == ("cpu", "fp32")
    text = oxidize("run", tiny, "--prompt", "hello", "-n", 5).out
    assert text == answer["text"] + "\n"


def test_the_prompt_may_come_from_three_places(oxidize, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: object) -> str:
        result = oxidize("run", tiny, *arguments, "-n", 4, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)["text"]

    expected = ask("héllo")
    assert ask("--prompt", "héllo") == expected
    for arguments in (["-"], []):
        _type_in(monkeypatch, "héllo".encode())
        assert ask(*arguments) == expected
    assert ask("--prompt", "-") != expected  # an option is taken as it is


def test_raw_and_chat_prompts_differ(oxidize, tiny: Path) -> None:
    def prompt_tokens(*arguments: object) -> int:
        return json.loads(oxidize("run", tiny, "hello", "-n", 1, "--json", *arguments).out)["stats"]["prompt_tokens"]

    assert prompt_tokens("--raw") < prompt_tokens("--chat") == prompt_tokens()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-spec"],
        ["--draft-model", "none"],
        ["--draft-tokens", 0],
        ["--draft-tokens", 1],
        ["--draft-tokens", 32, "--strict"],
        ["--threads", 1, "--spin", "off", "--provider", "cpu"],
    ],
)
def test_speculation_does_not_change_the_answer(oxidize, tiny: Path, arguments: list[object]) -> None:
    def answer(*more: object) -> list[int]:
        result = oxidize("run", tiny, "ab ab ab ab", "-n", 40, "--exact", "--json", *more)
        assert result.code == 0, result.err
        return json.loads(result.out)["token_ids"]

    assert answer(*arguments) == answer()


def test_a_draft_bundle_can_be_given(oxidize, tiny: Path, tiny_bundle: Callable[..., Path]) -> None:
    result = oxidize("run", tiny, "hello", "-n", 9, "--json", "--draft-model", tiny_bundle("llama2"))
    stats = json.loads(result.out)["stats"]
    assert stats["drafter"] == tiny_bundle("llama2").name


def test_sampling_depends_on_the_seed_alone(oxidize, tiny: Path) -> None:
    def answer(seed: int) -> str:
        return oxidize("run", tiny, "hello", "-n", 20, "--temperature", 1.5, "--seed", seed).out

    assert answer(1) == answer(1) != answer(2)


def test_a_stop_string_ends_the_answer_before_itself(oxidize, tiny: Path) -> None:
    whole = json.loads(oxidize("run", tiny, "hello", "-n", 12, "--json").out)["text"]
    stop = whole[3:5]
    cut = json.loads(oxidize("run", tiny, "hello", "-n", 12, "--json", "--stop", stop).out)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole[: whole.index(stop)]


def test_more_drafts_than_room_is_no_error(oxidize, tiny: Path) -> None:
    result = oxidize("run", tiny, "ab ab ab ab", "-n", 2, "--draft-tokens", 32, "--json")
    assert len(json.loads(result.out)["token_ids"]) <= 2


def test_the_answer_ends_where_the_context_does(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    oxidize("export", checkpoint, "-o", tmp_path / "short", "--context", 40, "--precision", "fp32", "--no-eval")
    for exact in ([], ["--exact"]):
        result = oxidize("run", tmp_path / "short", "hello", "--raw", "-n", 100, "--json", *exact)
        answer = json.loads(result.out)
        stats = answer["stats"]
        assert answer["finish_reason"] == "length"
        assert stats["prompt_tokens"] + stats["generated_tokens"] == 40 - len(exact)
    oxidize("run", tmp_path / "short", "hello " * 50).assert_error(
        2, "tokens and the model's context 40", "shorten the prompt"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], ["the prompt is empty", "give at least one character"]),
        (["--prompt", ""], ["the prompt is empty"]),
        (["a", "--prompt", "b"], ["given twice", "give it once"]),
        (["a", "b"], ["unexpected extra argument (b); see `oxidize run --help`"]),
        (["a", "-n", "0"], ["'--max-tokens'", "0 is not in the range", "see `oxidize run --help`"]),
        (["a", "--threads", "x"], ["'--threads'", "'x' is not a valid integer", "see `oxidize run --help`"]),
        (["a", "--frob"], ["No such option", "see `oxidize run --help`"]),
        (["a", "--provider", "tpu"], ["'tpu' is not one of 'auto', 'cpu', 'cuda', 'tensorrt'"]),
        (["a", "--spin", "1"], ["'1' is not one of"]),
        (["a", "--draft-tokens", "x"], ["--draft-tokens must be auto or a number from 0 to 32, not 'x'"]),
        (["a", "--draft-tokens", "-1"], ["--draft-tokens must be auto or a number from 0 to 32, not '-1'"]),
        (["a", "--draft-tokens", "²"], ["not '²'"]),
        (["a", "--draft-tokens", "9" * 5000], ["--draft-tokens must be"]),
        (["a", "--draft-tokens", "33"], ["--draft-tokens must be auto or a number from 0 to 32, not '33'"]),
        (["a", "--draft-model", "nowhere"], ["no draft called 'nowhere'", "known here: none, ngram"]),
        (["a", "--temperature", "-1"], ["temperature must be", "not -1"]),
        (["a", "--temperature", "nan"], ["temperature must be", "not nan"]),
        (["a", "--temperature", "1", "--top-p", "2"], ["top_p must be"]),
        (["a", "--temperature", "1", "--min-p", "-1"], ["min_p must be"]),
        (["a", "--temperature", "1", "--top-k", "-1"], ["top_k must be"]),
        (["a", "--seed", str(1 << 70)], ["seed must"]),
        (["a", "--stop", ""], ["a stop string is empty"]),
        (["x" * 3000], ["the prompt has", "tokens and the model's context 512", "shorten the prompt"]),
    ],
)
def test_wrong_arguments_are_usage_errors(oxidize, tiny: Path, arguments: list[str], words: list[str]) -> None:
    oxidize("run", tiny, *arguments).assert_error(2, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], ["No such command 'frobnicate'", "see `oxidize --help`"]),
        (["--frob"], ["No such option", "see `oxidize --help`"]),
        (["run"], ["Missing argument 'BUNDLE'", "see `oxidize run --help`"]),
        (["inspect"], ["Missing argument 'BUNDLE'", "see `oxidize inspect --help`"]),
        (["export"], ["Missing", "see `oxidize export --help`"]),
    ],
)
def test_wrong_commands_are_usage_errors(oxidize, arguments: list[str], words: list[str]) -> None:
    oxidize(*arguments).assert_error(2, *words)


def test_stdin_must_be_utf8(oxidize, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _type_in(monkeypatch, b"caf\xe9")
    oxidize("run", tiny, "-").assert_error(2, "stdin is not UTF-8 text (byte 3)", "iconv")
    _type_in(monkeypatch, b"")
    oxidize("run", tiny).assert_error(2, "the prompt is empty")


def test_without_a_prompt_it_does_not_wait_for_one(oxidize, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    oxidize("run", tiny).assert_error(2, "no prompt: give one as an argument, with --prompt, or on stdin")
    _type_in(monkeypatch, b"never read")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    oxidize("run", tiny).assert_error(2, "no prompt")


def test_a_draft_needs_the_targets_vocabulary(oxidize, tiny: Path, bundle) -> None:
    bundle.edit(lambda raw: raw["tokenizer"].update(vocab_sha256="0" * 64))
    oxidize("run", tiny, "hello", "--draft-model", bundle).assert_error(
        2, "the draft's vocabulary (", "is not the target's (300 tokens", "--draft-model none"
    )


def test_a_provider_that_is_not_there_is_named(oxidize, tiny: Path) -> None:
    from oxidize.runtime.session import load_ort

    if "CUDAExecutionProvider" in load_ort().get_available_providers():
        pytest.skip("this ONNX Runtime build has CUDA")
    for provider in ("cuda", "tensorrt"):
        oxidize("run", tiny, "hello", "--provider", provider).assert_error(
            1, f"has no {provider} provider", "pip install 'oxidize-ort[gpu]'", "--provider cpu"
        )


def test_an_interrupt_while_onnx_runtime_loads_is_an_interrupt(
    oxidize, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extension modules turn a Ctrl-C during their import into an ImportError."""
    original = importlib.import_module

    def load(name: str, package: str | None = None) -> Any:
        if name == "onnxruntime":
            raise ImportError("initialization failed") from KeyboardInterrupt()
        return original(name, package)

    monkeypatch.setattr(importlib, "import_module", load)
    result = oxidize("run", tiny, "hello")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_without_onnx_runtime_the_install_line_is_shown(oxidize, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    oxidize("run", tiny, "hello").assert_error(
        1, "ONNX Runtime is not installed", "`pip install 'oxidize-ort[cpu]'`", "`pip install 'oxidize-ort[gpu]'`"
    )
