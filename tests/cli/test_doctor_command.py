"""`oxidize doctor`: the tables, the advice that follows from costs, and what a second call knows already."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neural_bundles import BLOCK, DRAFTS, write_neural_bundle

from oxidize.cli import doctor, main
from oxidize.cli.advice import Diagnosis, advise, as_dict, compare, report
from oxidize.runtime.calibration import Calibration
from oxidize.runtime.costs import CostCurve
from oxidize.runtime.machine import Machine

STEEP = CostCurve(((1, 10.0), (2, 25.0), (8, 160.0)))  # a row costs more than a plain step
INT4 = CostCurve(((1, 10.0), (2, 12.7), (4, 17.3), (8, 32.0), (16, 58.0)))
FP32 = CostCurve(((1, 32.0), (2, 39.0), (4, 41.0), (8, 52.0), (16, 63.0)))
MACHINE = Machine("Some CPU", 4, 16 << 30, (), "1.32.0")
PROVIDERS = {"cpu": "", "cuda": "this build has none"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_BUDGET_S", 0.02)
    monkeypatch.setitem(main.COMMANDS, "doctor", "Measure what passes and drafts cost here.")


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def fail(*_: object) -> float:
        raise AssertionError("measured again")

    return lambda: monkeypatch.setattr("oxidize.runtime.calibration.measure", fail)


def diagnosis(target: CostCurve, waited: float = 0.0, name: str = "some/bundle", **drafts: CostCurve) -> Diagnosis:
    known = Calibration(target, drafts, "2026-01-01T00:00:00+00:00", 4.9, 200, waited)
    return Diagnosis(name, "int4", "cpu", 2, "auto", False, known)


def rows_of(text: str, start: str) -> list[list[str]]:
    """The cells of the table whose first line begins with a word, head left out."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:1] == [start])
    last = next(i for i in range(first, len(lines)) if not lines[i])
    return [line.split() for line in lines[first + 1 : last]]


def test_without_a_bundle_it_describes_the_machine(oxidize: Callable[..., Any]) -> None:
    result = oxidize("doctor")
    assert (result.code, result.err) == (0, "")
    for word in ("machine", "ONNX Runtime", "cores", "gpu", "cpu        usable", "cuda", "tensorrt"):
        assert word in result.out
    assert "bundle" not in result.out
    raw = json.loads(oxidize("doctor", "--json").out)
    assert raw["bundles"] == [] and raw["machine"]["cores"] >= 1 and raw["providers"]["cpu"] is True


def test_the_table_of_a_real_bundle(oxidize: Callable[..., Any], tiny_bundle: Callable[..., Path]) -> None:
    result = oxidize("doctor", tiny_bundle("llama2"), "--threads", "1", "--spin", "off")
    assert (result.code, result.err) == (0, "")
    assert "options    cpu, 1 threads, spin off\n" in result.out
    rows = rows_of(result.out, "k")
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "7", "11", "15"]
    assert all(float(ms) > 0 and float(steps) >= 1 for _, ms, steps, *_ in rows)
    assert "\nadvice     " in result.out


def test_json_is_one_line_with_the_same_figures(oxidize: Callable[..., Any], tiny_bundle: Callable[..., Path]) -> None:
    arguments = ("doctor", tiny_bundle("llama2"), "--draft-model", tiny_bundle("llama2", seed=1), "--threads", "1")
    result = oxidize(*arguments, "--json")
    assert result.code == 0 and result.out.count("\n") == 1
    (raw,) = json.loads(result.out)["bundles"]
    assert set(raw["drafters"]) == {"lookup", "bundle"}
    assert raw["step_ms"] == raw["pass_ms"]["1"] == pytest.approx(1e3 / raw["tokens_per_second"], rel=0.1)
    assert raw["exact"] is False and raw["threads"] == 1 and raw["advice"]
    for drafter in raw["drafters"].values():
        assert list(drafter["break_even"]) == ["1", "2", "3", "4", "5", "7", "11", "15"]
        assert all(value is None or 0 <= value <= 1 for value in drafter["break_even"].values())
    text = oxidize(*arguments).out
    assert f"{raw['measured_at']} in" in text
    assert float(rows_of(text, "k")[0][1]) == pytest.approx(raw["pass_ms"]["2"], abs=0.06)


def test_what_was_measured_is_used_again_until_refreshed(
    oxidize: Callable[..., Any], tiny_bundle: Callable[..., Path], no_measuring: Callable[[], None]
) -> None:
    bundle = tiny_bundle("llama2")
    first = oxidize("doctor", bundle, "--json")
    exact = oxidize("doctor", bundle, "--exact", "--json")
    kept = Path(os.environ["XDG_CACHE_HOME"], "oxidize/calibration")
    assert len(list(kept.iterdir())) == 2
    no_measuring()
    assert oxidize("doctor", bundle, "--json").out == first.out
    assert json.loads(exact.out)["bundles"][0]["exact"] is True
    for options in (["--refresh"], ["--threads", "3"], ["--spin", "off"]):
        with pytest.raises(AssertionError, match="measured again"):
            oxidize("doctor", bundle, *options)


def test_drafts_inside_a_bundle_are_measured(oxidize: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    assert oxidize("export", checkpoint, "-o", tmp_path / "out", "--draft-model", checkpoint, "--no-eval").code == 0
    (raw,) = json.loads(oxidize("doctor", tmp_path / "out", "--json").out)["bundles"]
    assert set(raw["drafters"]) == {"lookup", checkpoint.name}


def test_drafts_that_read_the_target_are_measured(oxidize: Callable[..., Any], tmp_path: Path) -> None:
    bundle = write_neural_bundle(tmp_path)
    (raw,) = json.loads(oxidize("doctor", bundle, "--threads", "1", "--json").out)["bundles"]
    assert list(raw["drafters"]) == ["lookup", *DRAFTS]
    most = {name: drafter["most_k"] for name, drafter in raw["drafters"].items()}
    assert most == {"lookup": 15, "dflash": BLOCK - 1, "eagle3": 15, "mtp": 15}
    for name in DRAFTS:
        drafter = raw["drafters"][name]
        passes, draft = raw["pass_ms"], drafter["draft_ms"]
        assert drafter["round_ms"]["1"] == pytest.approx(passes["2"] + draft["1"], abs=0.002)
        assert f"draft {name} " in " ".join(raw["advice"]) or "no draft pays" in raw["advice"][0]
    assert list(raw["drafters"]["dflash"]["round_ms"]) == ["1", "2", "3", "4", "5", "7"]
    text = oxidize("doctor", bundle, "--threads", "1").out
    assert [row[4] for row in rows_of(text, "k")][-2:] == ["-", "-"]
    for name in DRAFTS:
        assert f"best k with {name}" in text and f"{name} pays from" in text


def test_a_draft_that_run_refuses_is_measured_all_the_same(oxidize: Callable[..., Any], tmp_path: Path) -> None:
    bundle = write_neural_bundle(tmp_path)
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    manifest["drafts"][0]["neural"]["mismatch"] = "made for another target"
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (raw,) = json.loads(oxidize("doctor", bundle, "--threads", "1", "--json").out)["bundles"]
    assert list(raw["drafters"]) == ["lookup", *DRAFTS]


def test_several_bundles_are_compared(oxidize: Callable[..., Any], tiny_bundle: Callable[..., Path]) -> None:
    result = oxidize("doctor", tiny_bundle("llama2"), tiny_bundle("llama2", "int4"))
    assert result.code == 0
    assert result.out.count("\nbundle     ") == 2 and result.out.count("machine    ") == 1
    assert "\ntogether   fastest without drafts: " in result.out


def test_errors(oxidize: Callable[..., Any], tiny_bundle: Callable[..., Path], bundle: Any, tmp_path: Path) -> None:
    oxidize("doctor", tmp_path).assert_error(4, "is not a bundle")
    oxidize("doctor", bundle, "--provider-option", "x").assert_error(2, "KEY=VALUE")
    oxidize("doctor", bundle, "--draft-model", tmp_path).assert_error(4, "is not a bundle")
    oxidize("doctor", bundle, "--provider", "cuda").assert_error(1, "cuda")
    bundle.edit(lambda raw: raw["tokenizer"].update(vocab_sha256="0" * 64))
    oxidize("doctor", tiny_bundle("llama2"), "--draft-model", bundle).assert_error(2, "vocabulary")


def test_an_altered_bundle_is_refused(oxidize: Callable[..., Any], bundle: Any) -> None:
    path = bundle.folder / "weights.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    oxidize("doctor", bundle).assert_error(4, "altered")


# The advice, from made-up costs.


def test_rows_dearer_than_steps_advise_plain_decoding() -> None:
    assert advise(diagnosis(STEEP)) == ["plain decoding is the best here: no draft pays, use --no-spec"]
    assert [cells[3] for cells in rows_of("\n".join(report(MACHINE, {}, [diagnosis(STEEP)])), "k")] == ["never"] * 8


def test_break_evens_of_one_row_are_what_it_adds() -> None:
    rows = rows_of("\n".join(report(MACHINE, PROVIDERS, [diagnosis(INT4)])), "k")
    assert rows[0] == ["1", "12.7", "1.27", "0.27"]
    evens = [float(cells[3]) for cells in rows]
    assert evens == sorted(evens) and evens[-1] > 0.8


def test_each_drafter_has_its_sentence() -> None:
    cheap, dear = CostCurve(((1, 2.0), (2, 4.0))), CostCurve(((1, 40.0), (2, 80.0)))
    lookup, first, second = advise(diagnosis(FP32, cheap=cheap, dear=dear))
    assert lookup.startswith("lookup pays from acceptance 0.2")
    assert first.startswith("draft cheap (2.0 ms for its first token) pays from acceptance 0.2")
    assert (
        second
        == "draft dear (40.0 ms for its first token) never pays here: its tokens cost as much as the steps they save"
    )


def test_a_block_is_never_advised_beyond_its_end() -> None:
    flat = CostCurve(((1, 20.0), (15, 20.0)))
    block = replace(diagnosis(FP32, block=flat, other=flat), most={"block": 7})
    assert (block.choice(0.9, "block")[0], block.choice(0.9, "other")[0]) == (7, 15)
    assert max(block.break_evens("block")) == 7 and max(block.break_evens("other")) == 15
    rows = rows_of("\n".join(report(MACHINE, PROVIDERS, [block])), "k")
    assert [cells[0] for cells in rows if cells[4] == "-"] == ["11", "15"]
    assert "k = 7" in advise(block)[1]


def test_the_best_k_grows_with_acceptance() -> None:
    drafter = as_dict(MACHINE, PROVIDERS, [diagnosis(FP32)])["bundles"][0]["drafters"]["lookup"]
    best = list(drafter["best_k"].values())
    assert best == sorted(best) and best[0] >= 1 and best[-1] == 15


def test_a_comparison_names_the_fastest_of_each_kind() -> None:
    slow_but_flat = CostCurve(((1, 14.0), (2, 14.1), (16, 15.0)))
    plain, best = compare([diagnosis(INT4, name="a"), diagnosis(slow_but_flat, name="b")])
    assert plain.startswith("fastest without drafts: a (100 tokens/s); in text that repeats: b (")
    assert best.startswith("best k when half of the draft tokens are kept: a k = 1 (1.18x); b k = ")


def test_a_busy_machine_is_mentioned() -> None:
    assert not any("busy" in line for line in report(MACHINE, PROVIDERS, [diagnosis(INT4, 0.02)]))
    assert any("busy" in line for line in report(MACHINE, PROVIDERS, [diagnosis(INT4, 0.5)]))


def test_names_cannot_steer_the_terminal() -> None:
    hostile = diagnosis(FP32, name="a\x1b[2Jb", **{"c\x1b]0;d": CostCurve(((1, 1.0),))})
    assert all(line.isprintable() for line in report(MACHINE, PROVIDERS, [hostile, hostile]))


def test_lines_fit_a_terminal() -> None:
    lines = report(MACHINE, PROVIDERS, [diagnosis(FP32, draft=CostCurve(((1, 4.0),))), diagnosis(INT4)])
    assert max(map(len, lines)) <= 111


def test_many_drafters_have_several_tables() -> None:
    """Each in one of them, none wider than the text; a column too wide for any has one of its own."""
    names = [f"drafter-number-{number}" for number in range(9)]
    costs = {name: CostCurve(((1, 1.0 + number), (4, 2.0 + number))) for number, name in enumerate(names)}
    wide = "n" * 120
    for drafts in (costs, {**costs, wide: INT4}):
        found = replace(diagnosis(INT4), calibration=replace(diagnosis(INT4).calibration, drafts=drafts))
        lines = report(MACHINE, PROVIDERS, [found])
        heads = [index for index, line in enumerate(lines) if line.split()[:1] == ["k"]]
        columns = [cell for index in heads for cell in lines[index].split() if cell in found.drafts]
        assert columns == list(found.drafts) and len(heads) > 2
        for index in heads:
            table = lines[index : index + 9]
            assert table[0].split()[:5] == ["k", "verify", "ms", "plain", "steps"] and not lines[index - 1]
            assert [row.split()[0] for row in table[1:]] == ["1", "2", "3", "4", "5", "7", "11", "15"]
            assert len({len(row) for row in table}) == 1
            assert len(table[0]) <= 100 or table[0].split()[5:] == [wide, "pays", "from"]
    few = report(MACHINE, PROVIDERS, [diagnosis(INT4, one=INT4, two=INT4)])
    assert sum(line.split()[:1] == ["k"] for line in few) == 1
