"""Collapsing into huge pages moves memory and changes none of it."""

import sys
import threading

import numpy as np
import pytest

from oxidize.runtime import memory


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_content_survives():
    arrays = [np.random.default_rng(seed).random(1 << 20) for seed in range(6)]  # 8 MB each
    copies = [array.copy() for array in arrays]
    memory.collapse_in_background()
    for thread in threading.enumerate():
        if thread.name == "oxidize-pages":
            thread.join(60)
            assert not thread.is_alive()
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_ranges_are_whole_huge_pages_and_hold_large_arrays():
    array = np.zeros(64 << 20, np.uint8)
    array[::4096] = 1
    address = array.ctypes.data
    ranges = list(memory._anonymous_ranges())
    assert all(low % (2 << 20) == 0 == high % (2 << 20) and low < high for low, high in ranges)
    assert any(low <= address + (4 << 20) < high for low, high in ranges)
