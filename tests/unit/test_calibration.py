"""Calibration: what is timed and in which order, what a budget allows, and what is remembered of it."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.calibration import Calibration, calibrate, draft_curve, load_or_calibrate, measure
from oxidize.runtime.calibration_store import measurement_key
from oxidize.runtime.costs import CostCurve
from oxidize.runtime.drafters.draft_model import DraftModel
from oxidize.runtime.machine import Machine, describe_machine
from oxidize.runtime.meters import PassMeter
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

OPTIONS = RuntimeOptions(threads=1)
MACHINE = Machine("a cpu", 4, 8 << 30, ("gpu one", "gpu two"), "1.32.0")


@dataclass
class SlowCache:
    lengths: list[int] = field(default_factory=lambda: [0])
    capacity: int = 256

    def advance(self, slot: int, rows: int) -> None:
        self.lengths[slot] += rows

    def rewind_to(self, slot: int, length: int) -> None:
        assert length <= self.lengths[slot]
        self.lengths[slot] = length


class SlowModel:
    """A target that only takes time, on a clock of its own."""

    def __init__(self, step_ms: float, row_ms: float = 0.0, context: int = 4096, first_ms: float = 0.0) -> None:
        self.step_ms, self.row_ms, self.context, self.first_ms = step_ms, row_ms, context, first_ms
        self.cache, self.token_count = SlowCache(), 5
        self.now = 100.0
        self.noise: Callable[[], float] = lambda: 0.0
        self.passes: list[tuple[int, int]] = []  # width, rows behind

    def clock(self) -> float:
        return self.now

    def forward(self, requests: list[Rows]) -> list[Any]:
        (request,) = requests
        width = len(request.tokens)
        assert request.wanted == width and max(request.tokens) < self.token_count
        assert self.cache.lengths[0] + width <= min(self.context, self.cache.capacity)
        self.now += 1e-3 * (self.true_ms(width) + (0 if self.passes else self.first_ms) + self.noise())
        self.passes.append((width, self.cache.lengths[0]))
        self.cache.lengths[0] += width
        return []

    def true_ms(self, width: int) -> float:
        return self.step_ms + self.row_ms * (width - 1)

    def calibrate(self, budget_s: float) -> Calibration:
        model: Any = self
        return calibrate(model, (), budget_s, self.clock)

    def widths(self) -> Counter[int]:
        return Counter(width for width, _ in self.passes)


def test_every_pass_is_taken_back_and_sees_the_same_context() -> None:
    model = SlowModel(7.0, 2.0)
    found = model.calibrate(0.4)
    assert model.cache.lengths == [0]
    assert {behind for _, behind in model.passes} == {found.context} == {200}


def test_true_times_are_found_whatever_the_first_pass_pays() -> None:
    model = SlowModel(7.0, 2.0, first_ms=900.0)
    target = model.calibrate(0.4).target
    assert model.now - 100.0 < 0.9 + 0.45
    assert {1, 2, 4, 8} <= {count for count, _ in target.points}
    assert all(ms == pytest.approx(model.true_ms(count)) for count, ms in target.points)


def test_noise_that_comes_and_goes_leaves_no_trace() -> None:
    model, random = SlowModel(7.0, 2.0), np.random.default_rng(0)
    model.noise = lambda: 30.0 * random.random() if random.random() < 0.4 else 0.0
    found = model.calibrate(5.0)
    assert all(ms == pytest.approx(model.true_ms(count), rel=0.02) for count, ms in found.target.points)


def test_waiting_for_a_core_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oxidize.runtime.machine._THREADS", tmp_path)
    model = SlowModel(7.0)
    stat = tmp_path / "1/schedstat"
    stat.parent.mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "2/schedstat").touch()

    def tick() -> float:
        passes = len(model.passes)
        stat.write_text(f"{1000 + 75 * passes} {5000 + 25 * passes} 9\n")
        return 0.0

    model.noise = tick
    tick()
    assert model.calibrate(0.4).waited == pytest.approx(0.25, abs=0.01)
    monkeypatch.setattr("oxidize.runtime.machine._THREADS", tmp_path / "missing")
    assert model.calibrate(0.4).waited == 0.0


@pytest.mark.parametrize(("step", "row", "limit"), [(7.0, 2.0, 0.4), (90.0, 30.0, 2.0), (400.0, 130.0, 5.0)])
def test_the_silent_calibration_is_short(step: float, row: float, limit: float) -> None:
    model = SlowModel(step, row)
    model.calibrate(0.35)
    assert model.now - 100.0 <= limit


def test_a_small_budget_still_times_each_base_width_more_than_once() -> None:
    model = SlowModel(90.0, 30.0)
    model.calibrate(0.0)
    assert model.widths() == {1: 4, 2: 3, 4: 3, 8: 2}


def test_a_large_budget_buys_further_widths_and_even_rounds() -> None:
    model = SlowModel(7.0, 2.0)
    model.calibrate(5.0)
    counts = model.widths()
    assert set(counts) == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_fast_model_does_not_use_up_its_budget() -> None:
    model = SlowModel(0.2)
    model.calibrate(60.0)
    assert model.now - 100.0 < 1.0


def test_widths_take_turns() -> None:
    model = SlowModel(7.0, 2.0)
    model.calibrate(0.0)
    assert [width for width, _ in model.passes] == [1, *(8, 4, 2, 1), *(1, 2, 4, 8), *(1, 2, 4, 8)]


@pytest.mark.parametrize("context", [1, 2, 5, 33, 240])
def test_a_short_context_limits_the_widths(context: int) -> None:
    model = SlowModel(7.0, 2.0, context=context)
    found = model.calibrate(1.0)
    assert max(model.widths()) <= context
    assert found.context <= context


def test_what_a_slot_holds_stays() -> None:
    model = SlowModel(7.0, 2.0)
    model.cache.lengths = [90]
    model.calibrate(0.4)
    assert model.cache.lengths == [90]
    assert {behind for _, behind in model.passes} == {256 - 32}


def test_a_failing_pass_leaves_the_cache_as_it_was() -> None:
    model = SlowModel(7.0)
    model.noise = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.calibrate(0.4)
    assert model.cache.lengths == [0]


def test_target_and_drafts_share_one_budget() -> None:
    target, draft = SlowModel(7.0, 2.0), SlowModel(2.0, 0.5)
    shared: Any = lambda: target.now + draft.now  # noqa: E731
    models: list[Any] = [target, draft]
    meters = [PassMeter(models[0], True, shared), PassMeter(models[1], False, shared)]
    effort = measure(meters, 0.4, shared)
    assert 0.3 < effort.seconds <= 0.45
    assert set(draft.widths()) == {1, 2}
    assert meters[1].result(effort, 0.4).curve().points == ((1, pytest.approx(2.0)), (2, pytest.approx(2.5)))


def test_a_draft_of_k_is_k_passes_the_first_of_two_rows() -> None:
    curve = draft_curve(CostCurve(((1, 3.0), (2, 4.0))))
    assert [curve.at(k) for k in (1, 2, 3, 9)] == pytest.approx([4, 7, 10, 28])


# On real bundles.


@pytest.fixture
def make_target(tiny_bundle: Callable[..., Path]) -> Callable[..., Target]:
    def make(variant: str = "llama2", profile: str = "ort", seed: int = 0, **options: int) -> Target:
        return Target(open_bundle(tiny_bundle(variant, "fp32", (profile,), seed)), OPTIONS, **options)

    return make


def logits(target: Target, tokens: list[int]) -> np.ndarray:
    return target.forward([Rows(0, tokens, len(tokens))])[0].copy()


@pytest.mark.parametrize("profile", ["ort", "std"])
@pytest.mark.parametrize("options", [{}, {"floor": 2}, {"slots": 2}])
def test_a_calibrated_target_is_as_good_as_new(make_target, profile: str, options: dict[str, int]) -> None:
    target, fresh = make_target(profile=profile, **options), make_target(profile=profile, **options)
    calibrate(target, (), 0.05)
    assert target.cache.lengths[0] == 0 and target.held(0) == []
    assert target.cache.capacity == fresh.cache.capacity
    assert np.array_equal(logits(target, [5, 6, 7, 8]), logits(fresh, [5, 6, 7, 8]))
    assert target.held(0) == [5, 6, 7, 8]


def test_a_text_goes_on_after_a_calibration(make_target) -> None:
    target, fresh = make_target(floor=2), make_target(floor=2)
    for each in (target, fresh):
        logits(each, [5, 6, 7])
    calibrate(target, (), 0.05)
    assert target.held(0) == [5, 6, 7]
    assert np.array_equal(logits(target, [8, 9]), logits(fresh, [8, 9]))


def test_the_second_time_nothing_is_run(make_target, tmp_path: Path) -> None:
    first = load_or_calibrate(make_target(), (), OPTIONS, tmp_path, 0.05)
    target = make_target()
    assert load_or_calibrate(target, (), OPTIONS, tmp_path, 0.05) == first
    assert target.passes == 0
    assert first.target.points[0][0] == 1 and first.measured_at.endswith("+00:00")


def test_a_smaller_budget_is_content_and_a_larger_measures_again(make_target, tmp_path: Path) -> None:
    load_or_calibrate(make_target(), (), OPTIONS, tmp_path, 0.05)
    smaller, larger, after = make_target(), make_target(), make_target()
    load_or_calibrate(smaller, (), OPTIONS, tmp_path, 0.01)
    load_or_calibrate(larger, (), OPTIONS, tmp_path, 0.1)
    load_or_calibrate(after, (), OPTIONS, tmp_path, 0.1)
    assert (smaller.passes, after.passes) == (0, 0) and larger.passes > 0


def test_refreshing_measures_again(make_target, tmp_path: Path) -> None:
    load_or_calibrate(make_target(), (), OPTIONS, tmp_path, 0.05)
    target = make_target()
    found = load_or_calibrate(target, (), OPTIONS, tmp_path, 0.05, refresh=True)
    assert target.passes > 0
    assert load_or_calibrate(make_target(), (), OPTIONS, tmp_path, 0.05) == found


def test_only_what_is_missing_is_measured(make_target, tmp_path: Path) -> None:
    alone = load_or_calibrate(make_target(), (), OPTIONS, tmp_path, 0.05)
    target, draft = make_target(), make_target(seed=1)
    both = load_or_calibrate(target, [DraftModel(draft, name="small")], OPTIONS, tmp_path, 0.05)
    assert target.passes == 0 and draft.passes > 0
    assert both.target == alone.target and list(both.drafts) == ["small"]
    again = make_target(seed=1)
    renamed = load_or_calibrate(make_target(), [DraftModel(again, name="other name")], OPTIONS, tmp_path, 0.05)
    assert renamed.drafts == {"other name": both.drafts["small"]}
    assert again.passes == 0


def test_without_a_folder_nothing_is_kept(make_target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        target = make_target()
        load_or_calibrate(target, (), OPTIONS, None, 0.05)
        assert target.passes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(make_target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_or_calibrate(make_target(), (), OPTIONS, tmp_path / "file", 0.05).target.at(1) > 0


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        raw = json.loads(text)
        change(raw)
        return json.dumps(raw)

    return edit


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1]",
    "another format": _edit(lambda raw: raw.update(format=2)),
    "an unknown key": _edit(lambda raw: raw.update(more=1)),
    "of another machine": _edit(lambda raw: raw["key"].update(cpu="another")),
    "no moment": _edit(lambda raw: raw["measurement"].update(measured_at="today")),
    "no time zone": _edit(lambda raw: raw["measurement"].update(measured_at="2026-01-01T00:00:00")),
    "no widths": _edit(lambda raw: raw["measurement"].update(rows=[], ms=[])),
    "one time too few": _edit(lambda raw: raw["measurement"]["ms"].pop()),
    "no single row": _edit(lambda raw: [raw["measurement"][name].pop(0) for name in ("rows", "ms")]),
    "falling": _edit(lambda raw: raw["measurement"]["ms"].reverse()),
    "free": _edit(lambda raw: raw["measurement"].update(rows=[1], ms=[0.0])),
    "text for a time": _edit(lambda raw: raw["measurement"].update(ms=["1"])),
    "huge": _edit(lambda raw: raw["measurement"].update(ms=[10**400])),
    "infinite": lambda text: text.replace('"budget_s": 0.05', '"budget_s": Infinity'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_replaced(make_target, tmp_path: Path, damage: Callable[[str], str]) -> None:
    def calibrated() -> int:
        target = make_target()
        load_or_calibrate(target, (), OPTIONS, tmp_path, 0.05)
        return target.passes

    calibrated()
    (path,) = (tmp_path / "calibration").iterdir()
    whole = path.read_text(encoding="utf-8")
    assert damage(whole) != whole
    path.write_text(damage(whole), encoding="utf-8")
    assert calibrated() > 0
    assert calibrated() == 0
    assert [each.name for each in (tmp_path / "calibration").iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("waited", "hours", "used"), [(0.1, 9000, True), (0.9, 0.5, True), (0.9, 2, False), (0.9, -2, False)]
)
def test_what_a_busy_machine_measured_is_soon_forgotten(
    make_target, tmp_path: Path, waited: float, hours: float, used: bool
) -> None:
    load_or_calibrate(make_target(), (), OPTIONS, tmp_path, 0.05)
    (path,) = (tmp_path / "calibration").iterdir()
    moment = datetime.now(UTC) - timedelta(hours=hours)
    edit = _edit(lambda raw: raw["measurement"].update(waited=waited, measured_at=moment.isoformat()))
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    target = make_target()
    load_or_calibrate(target, (), OPTIONS, tmp_path, 0.05)
    assert (target.passes == 0) == used


def test_every_circumstance_has_a_key_of_its_own(make_target, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()

    def key(model: Target = target, use: str = "target", machine: Machine = MACHINE, **options: Any) -> str:
        runtime = replace(OPTIONS, **options)
        return json.dumps(measurement_key(model, use, runtime, machine))

    keys = [
        key(),
        key(make_target(seed=1)),
        key(make_target(profile="std")),
        key(make_target(floor=2)),
        key(make_target(slots=2)),
        key(use="draft"),
        key(spin="off"),
        key(threads=2),
        key(provider_options={"a": "b"}),
        key(machine=replace(MACHINE, cpu="another")),
        key(machine=replace(MACHINE, cores=5)),
        key(machine=replace(MACHINE, onnxruntime="1.33.0")),
    ]
    whole = target.bundle.manifest
    target.bundle = replace(target.bundle, manifest=replace(whole, precision="fp16"))
    keys.append(key())
    target.provider = "cuda"
    keys += [key(), key(machine=replace(MACHINE, gpus=("gpu one",))), key(device_id=1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    keys.append(key())
    target.provider = "tensorrt"
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_what_cannot_matter_is_not_in_the_key(make_target) -> None:
    target = make_target()
    same = replace(MACHINE, memory=1, gpus=())
    assert measurement_key(target, "target", OPTIONS, MACHINE) == measurement_key(target, "target", OPTIONS, same)
    by_cores = measurement_key(target, "target", replace(OPTIONS, threads=0), MACHINE)
    assert by_cores == measurement_key(target, "target", replace(OPTIONS, threads=MACHINE.cores), MACHINE)


def test_the_machine_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = tmp_path / "gpus/0000:01:00.0/information", tmp_path / "cpuinfo"
    gpu.parent.mkdir(parents=True)
    gpu.write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    cpu.write_text("processor\t: 0\nmodel name\t: Some  CPU\nmodel name\t: Other\n")
    monkeypatch.setattr("oxidize.runtime.machine._GPU_FACTS", tmp_path / "gpus")
    monkeypatch.setattr("oxidize.runtime.machine._CPU_FACTS", cpu)
    found = describe_machine()
    assert (found.cpu, found.gpus) == ("Some CPU", ("NVIDIA H200",))
    assert found.cores >= 1 and found.onnxruntime.count(".") >= 1
    monkeypatch.setattr("oxidize.runtime.machine._CPU_FACTS", tmp_path / "missing")
    assert describe_machine().cpu
