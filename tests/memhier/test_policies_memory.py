"""What policies hold in DRAM: counted, made once, and whole again after a batch that memory cannot hold."""

import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from memhier import backend
from memhier.errors import BudgetError
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy

CORES = ["python"] if backend.core is None else ["native", "python"]
POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "belady": Belady}


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_core(request.param):
        yield request.param


def on_core(name: str) -> Any:
    return mock.patch.object(backend, "core", backend.core if name == "native" else None)


def skewed(count: int, keys: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (keys * np.random.default_rng(seed).random(count) ** 3).astype(np.int64)


def test_what_python_holds_is_counted() -> None:
    parts, later = np.split(skewed(12_000, 20_000), 12), np.split(skewed(12_000, 20_000, seed=1), 12)
    for name, make in POLICIES.items():
        with on_core("python"):
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                policy = make(3_000)
                for part in parts:
                    policy.access(part)
                if isinstance(policy, Belady):
                    for part in later:
                        policy.announce(part)
                held = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
        assert 0.9 * held < policy.memory_bytes < 3 * held, name


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_far_too_large_leaves_no_trace(core: str, name: str) -> None:
    policy = POLICIES[name](100)
    policy.replay(np.arange(100), **({"lookahead": 0} if name == "belady" else {}))
    before = policy.memory_bytes
    with pytest.raises(BudgetError, match="a capacity of 50002 would be enough"):
        policy.access(np.arange(1_000, 51_000), pinned=[5, 6, 2_000, 7_000_000])
    if isinstance(policy, Belady):
        with pytest.raises(BudgetError, match="a capacity of 50000 would be enough"):
            policy.announce(np.arange(1_000, 51_000))
    assert (len(policy), policy.memory_bytes) == (100, before)
    assert policy.access(np.arange(30_000) % 100).hit.all()


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_counted_and_does_not_grow_with_the_trace(core: str, name: str) -> None:
    policy = POLICIES[name](100)
    policy.replay(skewed(20_000, 1_000), **({"lookahead": 500} if name == "belady" else {}))
    before = policy.memory_bytes
    assert before > 100 * 8
    policy.replay(skewed(60_000, 1_000, seed=1), **({"lookahead": 500} if name == "belady" else {}))
    assert policy.memory_bytes <= before * 1.1


@pytest.mark.skipif(backend.core is None, reason="no compiled core")
@pytest.mark.parametrize(("name", "most"), [("lru", 36), ("lfu", 40), ("s3fifo", 82)])
def test_tables_are_made_once(name: str, most: int) -> None:
    """A key takes so many bytes; a batch's keys, which come before victims are chosen, take 16 each beside that."""
    capacity, batch = 20_000, 4_000
    policy = POLICIES[name](capacity)
    made = policy.memory_bytes
    assert made <= most * capacity + 1_000
    keys = np.arange(10 * capacity)
    policy.access(keys[:capacity])
    for part in np.split(keys, len(keys) // batch):
        policy.access(np.concatenate([part, part]))
    # LFU's buckets are few here, as counts are.
    assert policy.memory_bytes <= made + 16 * max(2 * batch, capacity) + 4_096


STARVED = """
import resource
import numpy as np
from memhier.policies import Belady

def data_bytes():
    return int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()

rng = np.random.default_rng(0)
starved, other = Belady(9_000), Belady(9_000)
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (16 << 20), hard))
known, refused = [], 0
while refused < 40:
    batch = rng.integers(0, 10**9, rng.integers(1, 9_000))
    try:
        starved.announce(batch)
        known.append(batch)
    except MemoryError:
        refused += 1
resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
assert len(known) > 5, len(known)
for batch in known + known[::-1] + known:
    other.announce(batch)
for batch in known[::-1] + known:
    starved.announce(batch)
assert starved.pending == other.pending
while starved.pending:
    (keys, ours), (expected, theirs) = starved.advance(), other.advance()
    assert np.array_equal(keys, expected)
    assert all(np.array_equal(mine, its) for mine, its in zip(ours, theirs, strict=True))
"""


@pytest.mark.skipif(backend.core is None, reason="no compiled core")
@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer ends a process without memory")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to know the memory in use")
def test_batches_that_memory_cannot_hold_leave_no_trace() -> None:
    run = subprocess.run([sys.executable, "-c", STARVED], check=False, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr


def test_memory_may_be_asked_for_while_batches_come_and_go() -> None:
    with mock.patch.object(backend, "core", None):
        policy = Belady(50)
    stop = threading.Event()
    found: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            found.append(policy.memory_bytes)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            for number in range(1500):
                for batch in range(3):
                    policy.announce([number + batch, batch])
                policy.access([number, 0])
                policy.withdraw()
            stop.set()
            asking.result(60)
    finally:
        sys.setswitchinterval(before)
    assert min(found) > 0
