"""Fair comparisons: the charges, the figures that count, the rows that never mix, and the load of neighbours."""

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memhier.benchmarks.bench.compare import compare_rows
from memhier.benchmarks.bench.markdown import markdown
from memhier.benchmarks.bench.report import write_report
from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import at_recall, curve, search_peers
from memhier.benchmarks.bench.tables import warnings_of
from memhier.benchmarks.machine import Neighbours
from memhier.benchmarks.peers.account import PageCache, Usage

POINT = {
    "recall": 0.96, "recall_id": 0.96, "cpu_ms": 1.0, "mean_ms": 1.0, "p50_ms": 1.0, "p99_ms": 1.0, "pages": 9.0,
    "private_bytes": 10, "cached_bytes": 0, "effort": {"e": 1},
}  # fmt: skip


def search_row(turn: int = 0, settings: str = "new", **changed: float) -> Row:
    return {"task": f"w/quick/p/search/{turn}", "kind": "search", "workload": "w", "size": "quick", "peer": "p",
            "round": turn, "held_bytes": 5, "settings": settings, "rows": [POINT | changed]}  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "rate"),
    [({}, 1000), ({"batch_recall": 0.96}, 4000), ({"batch_recall": 0.958}, 4000), ({"batch_recall": 0.9}, 1000)],
)
def test_a_batch_counts_where_it_finds_as_much(batch: dict[str, float], rate: float) -> None:
    row = search_row(**(batch | {"batch_cpu_ms": 0.25} if batch else {}))
    assert at_recall(curve([row]), 0.95, "qps_core") == (rate, "measured at 0.960")


def test_rounds_of_other_settings_are_left_out() -> None:
    rows = [search_row(0), search_row(1), search_row(2, "old", cpu_ms=50)]
    assert [row["round"] for row in search_peers(rows, "w", "quick")["p"]] == [0, 1]


@pytest.fixture
def cache(tmp_path: Path) -> PageCache:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(os.urandom(2**20 + 100))
    cache = PageCache(tmp_path)
    cache.drop()
    return cache


def read_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def test_pages_over_the_budget_are_given_back_and_no_more_than_needed(cache: PageCache, tmp_path: Path) -> None:
    if cache.resident_bytes():
        pytest.skip("this file system cannot drop its pages")
    read_all(tmp_path)
    whole = cache.resident_bytes()
    assert whole >= 2 * 2**20
    with (tmp_path / "one").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        held = mapped[:]
        cache.shrink(whole * 2)
        assert cache.resident_bytes() == whole
        cache.shrink(2**20)
        assert 2**19 < cache.resident_bytes() <= 2**20 * 3 // 4
        assert mapped[:] == held
        cache.shrink(0)
        assert cache.resident_bytes() == 0
        assert mapped[:] == held


def test_a_map_can_be_read_page_by_page(cache: PageCache, tmp_path: Path) -> None:
    if cache.resident_bytes():
        pytest.skip("this file system cannot drop its pages")
    with (tmp_path / "one").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        cache.read_ahead(False)
        before = Usage.now()
        assert mapped[2**19] >= 0
        read = (Usage.now() - before).read_bytes
        assert cache.resident_bytes() == mmap.PAGESIZE
        assert read in (0, mmap.PAGESIZE)  # none where the kernel counts none
        cache.read_ahead(True)
        assert mapped[2**18] >= 0
        assert cache.resident_bytes() > 2 * mmap.PAGESIZE


def test_neighbours_are_seen_and_own_work_is_not() -> None:
    def burn(seconds: float) -> None:
        started = time.process_time()
        while time.process_time() - started < seconds:
            np.ones(1000).sum()

    with Neighbours() as quiet:
        burn(0.5)
    code = "while True: pass"
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        with Neighbours() as noisy:
            # Until it had some time of a core, however busy the machine is.
            while int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[11]) < 50:
                burn(0.05)
    finally:
        other.kill()
        other.wait()
    assert quiet.cores >= 0
    assert noisy.cores > 0


def test_who_was_disturbed_is_told(tmp_path: Path) -> None:
    calm, loud = search_row(), search_row(1) | {"workload": "loud", "others": 1.5}
    assert warnings_of([calm | {"others": 0.1}]) == []
    machine = {"task": "machine/1", "kind": "machine", "load": 9.0, "others": 0.0, "device": {}}
    assert warnings_of([machine, loud])[0].startswith("Others used this machine during loud: ")
    for text in (write_report([calm, loud], "today"), markdown([calm, loud])):
        assert "during loud: trust CPU seconds" in text


def test_other_machines_and_folders_in_dram_are_told() -> None:
    rows: list[Row] = [
        {"task": f"machine/{n}", "kind": "machine", "load": 0.0, "device": {}, "processor": "p", "cores": cores}
        for n, cores in enumerate((2, 2, 4))
    ]
    assert "several machines" not in write_report(rows[:2], "today")
    assert "several machines" in write_report(rows, "today")
    assert compare_rows(rows[:1], rows[1:2])[0].caption is None
    assert "different machines" in str(compare_rows(rows[:1], rows[2:])[0].caption)
    assert "lies in DRAM" not in markdown(rows)
    assert "lies in DRAM" in markdown([rows[0] | {"device": {"file_system": "tmpfs"}}])


def test_markdown_has_every_figure_under_its_command() -> None:
    build = {
        "task": "w/quick/p/build", "kind": "build", "workload": "w", "size": "quick", "peer": "p", "version": "1|2",
        "cpu_s": 3.0, "peak_private_bytes": 2**20, "file_bytes": 10, "raw_bytes": 10, "dram_bytes": 50, "vectors": 10,
    }  # fmt: skip
    figures = {"figures": [
        {"name": "f", "value": 2.0, "unit": "ms", "better": "less", "least": 1.0, "greatest": 3.0, "clock": True},
    ], "scale": "two cores"}  # fmt: skip
    script = {"task": "s/quick", "kind": "script", "workload": "s", "size": "quick", "figures": figures, "words": "",
              "command": "python -m s", "settings": "", "wall_s": 1.0}  # fmt: skip
    lines = markdown([build, search_row(), script]).splitlines()
    assert "`memhier bench run w --suite quick`" in lines
    assert "| p | 9 | 1 | 1,000 | 1,000 | 1 | 1 |" in lines
    assert "| p | not reached | not reached | not reached | not reached | not reached | not reached |" in lines
    assert "| p | 1\\|2 | 3 | 1 | 1.00 | 5 | 0.5 | 1 | 0 |" in lines
    assert "`memhier bench run s --suite quick`" in lines
    assert "| f | 2 | 1 | 3 | ms | less | clock |" in lines


NOTHING = """
import json, sys
import numpy as np
from memhier.benchmarks.peers import worker
from memhier.benchmarks.peers.base import SearchPeer

class Nothing(SearchPeer):
    io = "direct"
    dtypes = ("float32",)
    def load(self): pass
    def build(self, vectors, folder, dram_bytes, parameters): pass
    def open(self, folder, dram_bytes, parameters): pass
    def search(self, queries, k, effort): return np.zeros((len(queries), k), np.int64)
    def held_bytes(self): return 0

worker.make_peer = lambda name: Nothing()
found = worker.search(json.loads(sys.argv[1]))
print(max(row["private_bytes"] for row in found["rows"]))
"""


def test_a_peer_is_not_charged_for_being_measured(tmp_path: Path) -> None:
    np.save(tmp_path / "queries.npy", np.zeros((30, 8), np.float32))
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "file").write_bytes(bytes(10_000))
    job = {"peer": "nothing", "queries": str(tmp_path / "queries.npy"), "k": 10, "dram_bytes": 10**6, "parameters": {},
           "folder": str(tmp_path / "index"), "efforts": [{"e": 1}, {"e": 2}], "cap_memory": False,
           "ids": str(tmp_path / "ids.npz")}  # fmt: skip
    words = [sys.executable, "-c", NOTHING, json.dumps(job)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 128 * 1024
