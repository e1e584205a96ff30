"""Ctrl-C, SIGTERM and closed pipes, against real processes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# Every round takes its time and says so on stderr.
SLOW_ROUNDS = """
import sys, time
from oxidize.runtime import loop
play = loop.play_round
def slow(*arguments):
    result = play(*arguments)
    print("round", file=sys.stderr, flush=True)
    time.sleep(SECONDS)
    return result
loop.play_round = slow
"""
STUCK_ROUND = SLOW_ROUNDS.replace("SECONDS", "0 if arguments[1][0].stats.rounds == 1 else 60")
SLOW_PREFILL = """
import sys, time
from oxidize.runtime import loop
def slow(*arguments):
    print("prefill", file=sys.stderr, flush=True)
    time.sleep(60)
loop.prefill = slow
"""
SLOW_WEIGHTS = """
import sys, time
from oxidize.export.store import TensorStore
put = TensorStore.put
def slow(self, *arguments):
    result = put(self, *arguments)
    print("tensor", file=sys.stderr, flush=True)
    time.sleep(0.3)
    return result
TensorStore.put = slow
"""
SLOW_OPENING = """
import sys, time
from oxidize.runtime import bundle
def slow(*arguments):
    print("hashing", file=sys.stderr, flush=True)
    time.sleep(60)
bundle.verify_hashes = slow
"""


@pytest.fixture
def tiny(tiny_bundle: Callable[..., Path]) -> Path:
    """A bundle that is only read."""
    return tiny_bundle("llama2")


def _await_line(process: "subprocess.Popen[str]", word: str, count: int = 1) -> None:
    assert process.stderr is not None
    while count:
        line = process.stderr.readline()
        assert line, "the process ended early"
        count -= word in line


def _end(process: "subprocess.Popen[str]") -> tuple[str, list[str]]:
    """stdout, and the lines of stderr that the tests did not ask for."""
    out, err = process.communicate(timeout=20)
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return out, [line for line in err.splitlines() if line not in ("round", "tensor", "prefill", "hashing")]


def test_the_first_interrupt_ends_the_answer_cleanly(child, tiny: Path) -> None:
    process = child(SLOW_ROUNDS.replace("SECONDS", "0.1"), "run", tiny, "hello", "-n", 250)
    _await_line(process, "round", 3)
    process.send_signal(signal.SIGINT)
    out, (line,) = _end(process)
    assert process.returncode == 0
    assert out.endswith("\n") and len(out) > 2
    assert line.startswith("prompt ") and " | generated " in line


def test_an_interrupted_answer_says_so_in_json(child, tiny: Path) -> None:
    process = child(SLOW_ROUNDS.replace("SECONDS", "0.1"), "run", tiny, "hello", "-n", 250, "--json")
    _await_line(process, "round", 3)
    process.send_signal(signal.SIGINT)
    out, rest = _end(process)
    assert (process.returncode, rest, out.count("\n")) == (0, [], 1)
    answer = json.loads(out)
    assert answer["finish_reason"] == "interrupt"
    assert 3 <= len(answer["token_ids"]) == answer["stats"]["generated_tokens"] < 250


def test_the_second_interrupt_stops_at_once(child, tiny: Path) -> None:
    process = child(STUCK_ROUND, "run", tiny, "hello")
    _await_line(process, "round", 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, rest = _end(process)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert [line for line in rest if line] == ["interrupted"]


@pytest.mark.parametrize(("code", "word"), [(SLOW_PREFILL, "prefill"), (SLOW_OPENING, "hashing")])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_interrupt_before_the_first_token_stops_at_once(
    child, tiny: Path, code: str, word: str, more: list[str]
) -> None:
    process = child(code, "run", tiny, "hello", *more)
    _await_line(process, word)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, rest = _end(process)
    assert time.monotonic() - start < 10
    assert (process.returncode, out) == (130, "")
    assert [line for line in rest if line] == ["interrupted"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_export_leaves_nothing(child, checkpoint: Path, tmp_path: Path, number: int, code: int) -> None:
    process = child(SLOW_WEIGHTS, "export", checkpoint, "-o", tmp_path / "out")
    _await_line(process, "tensor", 2)
    assert [path.name for path in tmp_path.iterdir()] == [f".out.partial-{process.pid}"]
    process.send_signal(number)
    out, _ = _end(process)
    assert (process.returncode, out) == (code, "")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_replacement_keeps_the_old_bundle(child, oxidize, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert oxidize("export", checkpoint, "-o", out, "--no-eval").code == 0
    process = child(SLOW_WEIGHTS, "export", checkpoint, "-o", out, "--force", "--precision", "fp32")
    _await_line(process, "tensor", 2)
    process.send_signal(signal.SIGINT)
    _end(process)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "int4" in oxidize("inspect", out).out


@pytest.mark.parametrize("command", [["run", "TINY", "hello", "-n", "250"], ["inspect", "TINY"], ["--help"]])
def test_a_reader_that_goes_away_is_no_news(child, tiny: Path, command: list[str]) -> None:
    """As in `oxidize ... | head -c 1`, and with nobody reading from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    process = child("", *[str(tiny) if part == "TINY" else part for part in command], stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=20)
    assert err == "" and process.returncode in (0, 1)


def test_characters_the_terminal_lacks_do_not_matter(child, tiny: Path) -> None:
    latin = {"PYTHONIOENCODING": "latin-1"}
    process = child("", "run", tiny, "hello", "-n", "60", env=latin, encoding="latin-1")
    out, rest = _end(process)
    assert process.returncode == 0 and "?" in out and len(rest) == 1


def test_the_export_extra_may_be_missing(child, checkpoint: Path, tmp_path: Path) -> None:
    process = child(
        "import sys; sys.modules['onnx_ir'] = sys.modules['onnx'] = None", "export", checkpoint, "-o", tmp_path / "x"
    )
    out, rest = _end(process)
    assert (process.returncode, out) == (1, "")
    assert len(rest) == 1 and rest[0].startswith("error: onnx")
    assert rest[0].endswith("is not installed; run `pip install 'oxidize-ort[export]'`")
