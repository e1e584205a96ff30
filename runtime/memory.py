"""Asks Linux to move large anonymous memory, weights above all, into huge pages. Best effort: failure changes nothing.

A decode step walks all weights once; in 4 KB pages most of that walk misses the TLB, and how the pages happen to lie
makes one process up to a quarter slower than the next. MADV_COLLAPSE (Linux 6.1) gathers them in place.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

_HUGE = 2 << 20
_MADV_COLLAPSE = 25
_SLICE = 16 << 20  # bytes a call moves; other threads may fault pages in between
_MAY_RUN = Event()  # one for the process, as its memory is
_MAY_RUN.set()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collapsing stands still meanwhile, for whoever takes times; a call under way still ends."""
    _MAY_RUN.clear()
    try:
        yield
    finally:
        _MAY_RUN.set()


def collapse_in_background() -> None:
    """Start collapsing and return at once; the thread ends by itself (about 3 s a gigabyte) or with the process."""
    if sys.platform == "linux":
        Thread(target=_collapse, name="oxidize-pages", daemon=True).start()


def _collapse() -> None:
    try:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in list(_anonymous_ranges()):
            for at in range(start, end, _SLICE):
                _MAY_RUN.wait()
                madvise(at, min(_SLICE, end - at), _MADV_COLLAPSE)
    except (OSError, AttributeError, ValueError):
        return


def _anonymous_ranges() -> Iterator[tuple[int, int]]:
    """Writable private memory that no file backs, cut to whole huge pages."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, mode, _, _, inode, *name = line.split()
            if mode != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
                continue
            low, high = (int(part, 16) for part in span.split("-"))
            low, high = -(-low // _HUGE) * _HUGE, high // _HUGE * _HUGE
            if low < high:
                yield low, high
