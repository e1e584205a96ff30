"""Drafts of every kind over the standard profile, as on a GPU, and what of a pass the host reads for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from draft_texts import COUNT, KINDS, assert_texts_are_plain, open_target_and_drafts, write_bundle_of_all_kinds

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.rows import RowBuffers, Rows
from oxidize.runtime.session import Device, RuntimeOptions, Tensor
from oxidize.runtime.target import Target

LONG = [3 + 7 * index % 200 for index in range(70)]  # a wide pass, in a buffer of a power of two


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of_all_kinds(tmp_path_factory.mktemp("all"))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as a device has them: the host reads copies of whole buffers."""
    make = RowBuffers.of

    def elsewhere(self: RowBuffers, rows: int) -> Tensor:
        tensor = make(self, rows)
        tensor.host = None
        return tensor

    monkeypatch.setattr(RowBuffers, "of", elsewhere)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_plain(bundle: Path, kind: str, k: int, copied: None) -> None:
    target, (drafter,) = open_target_and_drafts(bundle, "cpu", (kind,))
    assert_texts_are_plain(target, drafter, k)


class Reads:
    """What the host reads of every pass of a target: the name of an output, and how many rows."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[int, list[tuple[str, int]]]] = []  # rows of the pass, reads
        self._target, self._forward, self._read = target, target.forward, Tensor.read
        monkeypatch.setattr(target, "forward", self.forward)
        monkeypatch.setattr(Tensor, "read", lambda tensor: self.read(tensor))

    def forward(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        self.passes.append((max(len(requests[0].tokens), self._target.floor), []))
        return self._forward(requests)

    def read(self, tensor: Tensor) -> np.ndarray:
        for name, buffers in self._target._buffers.items():
            if any(tensor is made for made in buffers._made.values()):
                self.passes[-1][1].append((name, tensor.shape[0]))
        return self._read(tensor)


@pytest.mark.parametrize(
    ("kinds", "read"),
    [
        (("eagle3",), {"taps"}),
        (("mtp",), {"hidden"}),
        (("medusa",), {"hidden"}),
        (("dflash", "eagle3", "dspark"), {"taps"}),
        (("dflash", "mtp", "eagle3", "medusa"), {"hidden", "taps"}),
        (("ngram",), set()),
    ],
)
def test_a_pass_is_read_once_and_no_more_than_drafts_ask_for(
    bundle: Path, kinds: tuple[str, ...], read: set[str], copied: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafters = open_target_and_drafts(bundle, "cpu", kinds)
    reads = Reads(target, monkeypatch)
    decoder = SpeculativeDecoder(target, drafters, SpeculativeConfig(3, COUNT, 0.0, adaptive=False))
    decoder.generate(LONG)
    assert len(reads.passes) > 8
    for index, (rows, found) in enumerate(reads.passes):
        assert sorted(found) == [(name, 128 if index == 0 else rows) for name in sorted(read)]


@pytest.mark.parametrize("copies", [False, True])
def test_rows_of_a_pass_are_those_of_its_requests(tiny_bundle, request: pytest.FixtureRequest, copies: bool) -> None:
    """Two slots of different width, behind a wide pass, in the target's own type; each request gets its own rows."""
    if copies:
        request.getfixturevalue("copied")
    bundle = open_bundle(tiny_bundle("qwen3", "fp16", ("std",)))
    target, alone = (Target(bundle, RuntimeOptions("cpu", 1), slots) for slots in (2, 1))
    target.prefill(1, LONG)
    target.cache.rewind_to(1, 0)
    target.forward([Rows(1, LONG[:5], 1), Rows(0, LONG[5:8], 1)])
    for index, tokens in enumerate((LONG[:5], LONG[5:8])):
        alone.cache.rewind_to(0, 0)
        alone.forward([Rows(0, tokens, 1)])
        found, expected = target.rows(index), alone.rows(0)
        assert found.hidden.dtype == np.float16
        assert found.hidden.shape == (len(tokens), bundle.manifest.model.hidden_size)
        np.testing.assert_allclose(found.hidden, expected.hidden, atol=1e-2)
        assert found.taps is None


def test_buffers_of_narrow_passes_fit_to_the_row_and_wide_ones_are_few() -> None:
    buffers = RowBuffers(3, "float32", Device("cpu"))
    assert all(buffers.of(rows).shape == (rows, 3) for rows in range(1, 34))
    assert len({id(buffers.of(rows)) for rows in range(34, 513)}) == 4
    assert buffers.of(7) is buffers.of(7)
