"""A process of limited address space (``ulimit -v``): the map of the catalog takes no more than a commit needs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from memhier.store import catalog
from memhier.store.store import Store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the address space in use")

_HEAD = """
import errno, resource, sys
from pathlib import Path
import lmdb
import numpy as np
from memhier import Tiered
from memhier.store.store import Store

def limit(more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

place = Path(sys.argv[1])
"""


def run(place: Path, script: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(_HEAD) + textwrap.dedent(script), str(place)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stores_are_written_within_a_limit(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        limit(2**28)
        with Store.create(place / "store", kind="test") as store:
            for number in range(4):
                with store.begin() as tx:
                    for key in range(200):
                        tx.put(f"{key}-{number}", bytes([number]) * (key * 97))
                    tx.segment(f"rows-{number}").append(bytes(2**22))
                    tx.commit()
        with Store.open(place / "store", kind="test", verify="open") as store:
            print(store.generation, len(store.keys()), store.get("199-3") == b"\\3" * (199 * 97))
        with Tiered(place / "table", "t", np.float32, 8, rows=10_000, dram="12MiB") as table:
            table.scatter(np.arange(1_000), np.ones((1_000, 8), np.float32))
            table.checkpoint()
        with Tiered(place / "table", "t", np.float32, 8, rows=10_000, dram="12MiB") as table:
            print(table.gather([999]).tolist())
        """,
    )
    assert output.splitlines() == ["4 800 True", str([[1.0] * 8])]


def test_the_error_names_a_limit_that_is_too_small_for_a_commit(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        store = Store.create(place / "store", kind="test")
        tx = store.begin()
        for key in range(4):
            tx.put(str(key), bytes(2**24))
        limit(2**20)
        try:
            tx.commit()
        except OSError as error:
            print(error.errno == errno.ENOMEM, error.filename, error)
        """,
    )
    assert output.startswith(f"True {tmp_path / 'store' / 'catalog' / 'data.mdb'} ")
    assert "ulimit -v" in output


def test_the_map_grows_until_a_commit_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "map_size", lambda *_: 16 * 4096)
    values = {str(key): bytes([key]) * size for key, size in enumerate([0, 1, 4095, 4096, 100_000, 2**20, 17])}
    with Store.create(tmp_path / "store", kind="test") as store:
        for keys in (range(7), range(3, 5), range(7)):
            with store.begin() as tx:
                for key in keys:
                    tx.put(str(key), values[str(key)])
                tx.commit()
    with Store.open(tmp_path / "store", kind="test", writable=True) as store:
        assert {key: store.get(key) for key in store.keys()} == values  # noqa: SIM118
        assert store.check() == []
