"""Stores that are not this library's own, with right checksums: refused by name, never believed.

Each thing that is decoded is changed in turn; see `hostile_stores.py`. The quick test makes one change of many.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_stores.py")
# Of how many changes the quick test makes one.
KINDS = {
    "store": 15, "table": 25, "index": 60, "index-of-texts": 60, "index-of-fields": 120, "replay": 40,
    "replay-of-quotas": 80, "replay-of-weights": 80,
    "bag": 60, "bag-of-adagrad": 60, "bag-of-adam": 60, "bag-to-read": 60, "decoder": 60,
}  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits address space as Linux does")


def run(kind: str, folder: Path, every: int) -> int:
    """Return how many changes were made, all of them refused as they should be, or harmless."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), kind, str(folder), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    *told, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, done.stderr[-2000:]
    assert last.startswith("done ")
    assert told == []
    return int(last.removeprefix("done "))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_some_changes_of_what_is_stored(kind: str, tmp_path: Path) -> None:
    assert run(kind, tmp_path, KINDS[kind]) > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_of_what_is_stored(kind: str, tmp_path: Path) -> None:
    assert run(kind, tmp_path, 1) > 300  # of a table, which has the fewest, 342
