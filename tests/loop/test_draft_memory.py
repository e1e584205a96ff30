"""What a draft adds to the memory of a running target: its own weights, and no copy of a table it can borrow.

The tables dominate: each is 32 MB of float32, all other weights of target and drafts a few megabytes.
Every measurement is a
process of its own, because a process does not give back all it once had.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from neural_bundles import DRAFTS, write_neural_bundle

HIDDEN, VOCABULARY = 256, 32768
TABLE = HIDDEN * VOCABULARY * 4  # bytes
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ROUNDS = """
import ctypes, gc, sys
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.request import Request
from oxidize.runtime.session import RuntimeOptions

bundle, draft = sys.argv[1:]
engine = Engine.open(bundle, EngineOptions(RuntimeOptions("cpu", threads=1), draft=draft))
request = Request(SpeculativeConfig(7, 8, 0.0, adaptive=False))
for _ in engine.stream(list(range(3, 40)), request):
    pass
assert (engine.stats.draft_tokens > 0) == (draft != "none"), engine.stats
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/status") as lines:
    status = {key: value for key, _, value in (line.partition(":") for line in lines)}
resident, private = (1024 * int(status[key].split()[0]) for key in ("VmRSS", "RssAnon"))
with open("/proc/self/maps") as lines:
    spans = [line.split()[0].split("-") for line in lines if bundle in line]
print(resident, private + sum(int(end, 16) - int(start, 16) for start, end in spans))
"""


def memory(bundle: Path, draft: str) -> np.ndarray:
    """Bytes after a few rounds with this draft: resident; and private or of mapped weights, touched so far or not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ROUNDS, str(bundle), draft]
    found = subprocess.run(command, text=True, capture_output=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    return np.array(found.stdout.split(), np.int64)


def made(folder: Path, own_tables: tuple[str, ...]) -> tuple[Path, np.ndarray]:
    """A bundle, and the memory of its target alone."""
    bundle = write_neural_bundle(folder, HIDDEN, VOCABULARY, own_tables)
    return bundle, memory(bundle, "none")


@pytest.fixture(scope="module")
def lending(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    return made(tmp_path_factory.mktemp("lending"), ())


@pytest.fixture(scope="module")
def owning(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    return made(tmp_path_factory.mktemp("owning"), DRAFTS)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_adds_no_copy_of_a_table(lending: tuple[Path, np.ndarray], draft: str) -> None:
    bundle, alone = lending
    assert alone[1] > 2 * TABLE  # the target's own
    assert (memory(bundle, draft) - alone).max() < TABLE / 2
    assert sum(path.stat().st_size for path in (bundle / "drafts" / draft).iterdir()) < TABLE / 4


@pytest.mark.parametrize(("draft", "copies"), [("dflash", 1), ("eagle3", 1), ("mtp", 2)])
def test_a_copy_would_show(owning: tuple[Path, np.ndarray], draft: str, copies: int) -> None:
    """A draft with an embedding of its own; the MTP head also has a whole head of its own, whose every page is read."""
    bundle, alone = owning
    resident, held = memory(bundle, draft) - alone
    assert held > copies * TABLE
    assert resident > (copies - 1) * TABLE
