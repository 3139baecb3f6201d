"""DRAM stays within the budget while many threads search, and the page cache does not grow by what they read."""

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex, ZoomIndex
from memhier.budget import parse_bytes
from memhier.errors import BudgetError

ALLOWED_BEYOND = parse_bytes("32MiB")

# How a child process begins: everything is imported.
PRELUDE = """
import json, resource, sys, threading, time
from pathlib import Path
import faiss
import numpy as np
from memhier.ann import ZoomIndex

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

threading.stack_size(256 * 1024)
faiss.omp_set_num_threads(1)
"""

# What a child process does: everything is imported, and the libraries' threads and arenas exist, before its limit is
# set. It then opens the index, and eight threads search it in single queries and batches.
CHILD = (
    PRELUDE
    + """
path, dram, allowed, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
queries = np.load(path + ".npy")
np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)
Path("/proc/self/clear_refs").write_text("5")
before, data = field("VmRSS"), field("VmData")
resource.setrlimit(resource.RLIMIT_DATA, (data + dram + allowed, data + dram + allowed))
held, failures, searches = [], [], []
with ZoomIndex.open(path) as index:
    end = time.monotonic() + seconds
    def work(number):
        try:
            at = number
            while time.monotonic() < end or at == number:
                some = queries[at % 900 : at % 900 + (1 if at % 3 else 60)]
                index.search(some, 10, recall=(0.9, 0.99, 1.0)[at % 7 % 3])
                index.range_search(some[:2], 30.0)
                held.append(index.memory_bytes)
                searches.append(1)
                at += 8
        except BaseException as error:
            failures.append(repr(error))
            raise
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {"held": max(held), "failures": failures, "searches": len(searches)}
    print(json.dumps({"peak": field("VmHWM") - before, **found}))
"""
)


# The same while eight threads search with filters, and one changes the index.
CHANGING = (
    PRELUDE
    + """
path, dram, allowed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
more = np.load(path + ".npy")
np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)
index = ZoomIndex.open(path, writable=True)
index.search(more[:8], 10, where="price < 0.1")
index.close()
Path("/proc/self/clear_refs").write_text("5")
before, data = field("VmRSS"), field("VmData")
resource.setrlimit(resource.RLIMIT_DATA, (data + dram + allowed, data + dram + allowed))
held, failures, searches, over = [], [], [], threading.Event()
with ZoomIndex.open(path, writable=True) as index:
    count = len(index)
    def guarded(work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(repr(error))
    def search(number):
        at = number
        while not over.is_set():
            where = f"price < {(at % 50 + 1) / 50} and not kind in (1, 2, 3) and word == 'a'"
            index.search(more[at % 900 : at % 900 + 1 + 20 * (at % 3 == 0)], 10, where=where)
            searches.append(1)
            held.append(index.memory_bytes)
            at += 8
    def change():
        step = count // 100
        for number in range(rounds):
            part = slice(number * step, number * step + step)
            values = {"price": np.linspace(0, 1, step), "kind": np.arange(step) % 9, "word": ["a", "b"] * (step // 2)}
            index.remove(np.arange(number * step, number * step + step // 2))
            index.update(np.arange(number * step + step // 2, number * step + step), more[part][: step - step // 2])
            index.add(more[part], attributes=values)
            index.commit(compact=False)
            held.append(index.memory_bytes)
    threads = [threading.Thread(target=guarded, args=(search, number)) for number in range(8)]
    for thread in threads:
        thread.start()
    guarded(change)
    over.set()
    for thread in threads:
        thread.join()
    found = {"held": max(held), "failures": failures, "searches": len(searches), "parts": index.stats()["parts"]}
    print(json.dumps({"peak": field("VmHWM") - before, **found}))
"""
)


def can_reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def make_vectors(count, dimension, seed=0):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(100, dimension)) * 2
    return (centres[random.integers(0, 100, count)] + random.normal(size=(count, dimension))).astype(np.float32)


@pytest.mark.long
@pytest.mark.skipif(not can_reset_peak(), reason="the kernel lets nobody reset a process's peak memory here")
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_peak_stays_within_the_budget_while_eight_threads_search(tmp_path, seconds):
    budget = parse_bytes("10MiB")
    path = tmp_path / "index"
    vectors = make_vectors(30_000, 64)
    np.save(str(path) + ".npy", vectors[::30] + np.float32(0.1))
    ZoomIndex.build(path, vectors, dram=budget).close()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(budget), str(ALLOWED_BEYOND), str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["failures"] == []
    assert found["searches"] >= 8
    assert found["held"] <= budget
    assert found["peak"] <= budget + ALLOWED_BEYOND
    assert found["peak"] > budget // 4  # a budget that is not used would be no proof


@pytest.mark.long
@pytest.mark.skipif(not can_reset_peak(), reason="the kernel lets nobody reset a process's peak memory here")
@pytest.mark.parametrize("rounds", [12, pytest.param(28, marks=pytest.mark.slow)])
def test_peak_stays_within_the_budget_while_eight_threads_filter_and_one_changes(tmp_path, rounds):
    count, budget, allowed = 50_000, parse_bytes("4MiB"), parse_bytes("12MiB")
    path, random = tmp_path / "index", np.random.default_rng(1)
    np.save(str(path) + ".npy", make_vectors(count // 2, 64, seed=1))
    attributes = {
        "price": random.random(count),
        "kind": random.integers(0, 100, count),
        "word": np.array(["a", "b"])[random.integers(0, 2, count)],
    }
    vectors = make_vectors(count, 64)
    ZoomIndex.build(path, vectors, dram=budget, attributes=attributes, grow_to=int(1.5 * count)).close()
    child = subprocess.run(
        [sys.executable, "-c", CHANGING, str(path), str(budget), str(allowed), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["failures"] == []
    assert found["searches"] >= 8
    assert found["held"] <= budget
    assert found["peak"] <= budget + allowed


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:calibration found")
@pytest.mark.parametrize(("metric", "dimension"), [("l2", 3), ("ip", 100), ("cosine", 100), ("l2", 1100)])
def test_memory_is_within_the_budget_after_build_and_use(tmp_path, metric, dimension):
    vectors = make_vectors(3000, dimension)
    budget = parse_bytes("6MiB")
    with ZoomIndex.build(tmp_path / "index", vectors, metric=metric, dram=budget) as index:
        assert index.memory_bytes <= budget
        index.search(vectors[:200], 10)
        index.search(vectors[:3], 300, recall=1)
        index.range_search(vectors[:50], 1.0)
        index.tune(vectors[:300])
        assert index.memory_bytes <= budget


def resident_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
    ):
        there = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        status = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(view)), there)
        if status:
            pytest.skip(f"no mincore here: {os.strerror(ctypes.get_errno())}")
        return sum(flag & 1 for flag in there)


def test_searches_leave_the_page_cache_alone(tmp_path):
    vectors = make_vectors(6000, 96)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="6MiB") as index:
        if not index.stats()["direct"]:
            pytest.skip("no direct I/O on this file system")
        (rows,) = (tmp_path / "index" / "segments").glob("p0-rows.*")
        os.sync()
        with rows.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = resident_pages(rows)
        for start in range(0, 6000, 300):
            index.search(vectors[start : start + 300], 10)
        assert index.stats()["pages"] > 400
        assert resident_pages(rows) <= before


@pytest.mark.long
@pytest.mark.parametrize("count", [97, 1000])
def test_more_than_a_sufficient_budget_suffices_and_tuning_keeps_it(tmp_path, count):
    """A rotation never crowds the codes out, and hot pages leave room for what searches take."""
    vectors = np.random.default_rng(count).normal(size=(count, 256)).astype(np.float32)
    for number, dram in enumerate([620_000, 650_000, 700_000, 800_000, 900_000]):
        with ZoomIndex.build(tmp_path / str(number), vectors, metric="cosine", dram=dram) as index:
            index.search(vectors[:64], 10)
            index.tune(vectors[np.arange(256) % 70])
            index.search(vectors[:64], 10, recall=1.0)
            assert index.memory_bytes <= dram


@pytest.mark.parametrize("dimension", [16, 100])
def test_spare_memory_lets_more_searches_run_at_a_time(tmp_path, dimension):
    vectors = np.random.default_rng(0).normal(size=(2000, dimension)).astype(np.float32)
    searches = []
    for number, dram in enumerate([2 << 20, 4 << 20, 8 << 20]):
        with ZoomIndex.build(tmp_path / str(number), vectors, dram=dram) as index:
            stats = index.stats()
            assert stats["planned_bytes"] <= dram
            searches.append(stats["searches"])
        with ZoomIndex.build(tmp_path / f"{number}-growing", vectors, dram=dram, grow_to=2001) as index:
            room = dram - index.stats()["planned_bytes"]
            assert room >= dram - stats["planned_bytes"]  # is left for the vectors to come
    assert 1 < searches[0] < searches[1] <= searches[2] == 8


@pytest.mark.parametrize("kind", [ZoomIndex, MultiVectorIndex])
def test_reads_beside_those_of_searches_take_no_more_memory(tmp_path, kind):
    """Vectors are read, and others are tuned for, without a turn, but with the buffers of searches."""
    count, shape = 4000 if kind is ZoomIndex else 1000, (16,) if kind is ZoomIndex else (4, 16)
    vectors = np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32)
    with pytest.raises(BudgetError) as refused:
        kind.build(tmp_path / "refused", vectors, dram="64KiB")
    dram = int(1.1 * int(re.search(r"\((\d+) bytes\)", str(refused.value))[1]))
    with kind.build(tmp_path / "index", vectors, dram=dram) as index, ThreadPoolExecutor(5) as threads:
        tuning = threads.submit(index.tune, vectors[:128])
        for reading in [threads.submit(index.reconstruct, np.arange(count)) for _ in range(200)]:
            reading.result()
        tuning.result()
        assert index.memory_bytes <= index.stats()["planned_bytes"] <= dram
