"""A tier goes on after errors: failed reads, exceptions of the caller's functions, interrupts, damage."""

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError, ClosedError, CorruptionError
from memhier.log.row_log import RowLog
from memhier.policies import LRU, Belady
from memhier.table.loader import LOADING, Job, Loader
from memhier.table.sizes import Sizes
from memhier.table.tiered import Tiered
from memhier.table.writer import WriteQueue

DIM = 1024


def numbered(keys: Any, dim: int = DIM) -> NDArray[np.float32]:
    return np.repeat(np.asarray(keys)[..., None], dim, axis=-1).astype(np.float32)


def fill(tier: Tiered, keys: range) -> None:
    for key in keys:
        tier.scatter([key], numbered([key]))
    tier.checkpoint()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tiered]:
    """A table of 40 rows of a page each, all of them on SSD, and 4 slots."""
    with Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=LRU(4)) as table:
        fill(table, range(40))
        yield table


@pytest.fixture
def row_by_row(tmp_path: Path) -> Iterator[Tiered]:
    """The same table, which reads row by row."""
    divided = Sizes.__init__

    def divide(sizes: Sizes, *arguments: Any) -> None:
        divided(sizes, *arguments)
        sizes.staged = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "__init__", divide)
        table = Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=LRU(4))
    with table:
        fill(table, range(40))
        yield table


class Broken:
    """Stands in for a log's read: fails while `fails` says so, and can be held back at its beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read = RowLog.read
        self.fails: Callable[[list[int]], bool] = lambda keys: True
        self.entered = threading.Semaphore(0)
        self.gate: threading.Semaphore | None = None

        def read(log: RowLog, keys: Any, out: Any) -> Any:
            return self.read(log, keys, out)

        monkeypatch.setattr(RowLog, "read", read)

    def read(self, log: RowLog, keys: Any, out: Any) -> Any:
        if self.gate is not None and threading.current_thread().name == "memhier-load":
            self.entered.release()
            self.gate.acquire()
        if self.fails(keys.tolist()):
            raise OSError(errno.EIO, "Input/output error", "some/file")
        return self._read(log, keys, out=out)


@pytest.mark.parametrize("call", ["gather", "prefetch"])
def test_a_batch_announced_to_belady_can_be_asked_for_again(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failed call was its access: the next one must not count as another, which was not announced."""
    batches = [[10, 11], [12, 10], [11, 13]]
    faulty = [False]

    def initial(keys: NDArray[np.int64]) -> NDArray[np.float32]:
        if faulty[0]:
            raise ZeroDivisionError
        return numbered(keys)

    counts = []
    for faulty[0] in (False, True):
        policy = Belady(3)
        with Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=policy, initial=initial) as tier:
            for batch in batches:
                policy.announce(batch)
            for batch in batches:
                if faulty[0]:
                    with pytest.raises(ZeroDivisionError):
                        getattr(tier, call)(batch)
                    faulty[0] = False
                ticket = tier.prefetch(batch) if call == "prefetch" else None
                assert tier.gather(batch)[:, 0].tolist() == batch
                del ticket
                faulty[0] = len(counts) == 1 and batch != batches[-1]
            counts.append(tier.stats())
    for name in ("accesses", "hits", "misses", "evictions"):
        assert counts[0][name] == counts[1][name]


def test_a_failed_batch_that_is_not_asked_for_again_counts_as_accessed(
    tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    accesses = tier.stats()["accesses"]
    broken = Broken(monkeypatch)
    with pytest.raises(OSError, match="Input/output"):
        tier.gather([10, 11])
    broken.fails = lambda keys: False
    tier.gather([10])
    tier.gather([10, 11])
    assert tier.stats()["accesses"] == accesses + 2 + 1 + 2


def test_the_same_batch_after_one_that_succeeded_counts_again(tier: Tiered) -> None:
    accesses = tier.stats()["accesses"]
    tier.scatter([10, 11], numbered([10, 11]))  # brings both in
    tier.gather([10, 11])
    for _ in range(2):
        tier.prefetch([12, 13])
    tier.pin([20, 21])
    tier.gather([20, 21])
    assert tier.stats()["accesses"] == accesses + 6 * 2


def test_a_late_failure_leaves_later_tickets_alone(row_by_row: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot was read, freed and promised to another row, before the rest of the first ticket's rows failed."""
    tier = row_by_row
    broken = Broken(monkeypatch)
    broken.fails = lambda keys: keys == [11]
    broken.gate = threading.Semaphore(0)
    first = tier.prefetch([10, 11])
    broken.entered.acquire()
    broken.gate.release()
    broken.entered.acquire()  # 10 is there, 11 waits
    slot = first.slots[0]
    first.release()
    tier.scatter([1, 2], numbered([1, 2]))
    second = tier.prefetch([20])  # takes the slot of 10
    assert second.slots == [slot]
    broken.gate.release()
    broken.entered.acquire()  # 11 has failed, 20 waits
    assert not second.done
    with pytest.raises(OSError, match="a prefetch failed"):
        tier.gather([1])
    threading.Timer(0.1, broken.gate.release).start()
    tier.scatter([20], numbered([-20]))
    second.wait()
    assert tier.gather([20])[0, 0] == -20


def test_an_interrupt_while_a_slot_is_waited_for_mixes_no_rows_up(
    tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch)
    broken.fails = lambda keys: False
    broken.gate = threading.Semaphore(0)
    tier.pin([38, 39, 37])
    ticket = tier.prefetch([10])
    broken.entered.acquire()
    ticket.release()
    settle = Loader.settle

    def interrupted(loader: Loader, slots: Any) -> None:
        if (loader.states[slots] == LOADING).any():
            raise KeyboardInterrupt
        settle(loader, slots)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.gather([20])  # needs the slot that is being read
    broken.gate.release()
    ticket.wait()
    broken.gate = None
    assert tier.gather([20])[0, 0] == 20
    assert tier.gather([10])[0, 0] == 10


def test_a_ticket_for_rows_of_a_failed_older_one_fails_too(tier: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(monkeypatch)
    broken.gate = threading.Semaphore(0)
    first = tier.prefetch([10])
    broken.entered.acquire()
    second = tier.prefetch([10])
    broken.gate.release()
    for ticket in (first, second):
        with pytest.raises(OSError, match="Input/output"):
            ticket.wait()
    broken.fails, broken.gate = (lambda keys: False), None
    assert tier.gather([10])[0, 0] == 10


def test_damage_in_an_old_part_prevents_no_checkpoint(tier: Tiered, tmp_path: Path) -> None:
    damaged = max((tmp_path / "s").glob("segments/*.seg"), key=lambda segment: segment.stat().st_size)
    raw = np.fromfile(damaged, np.uint8)
    raw[35 * 4096] ^= 1
    raw.tofile(damaged)
    for key in range(30):  # most of the part is dead now: it is to be rewritten
        tier.scatter([key], numbered([-key]))
    tier.checkpoint()
    tier.scatter([0], numbered([77]))
    tier.checkpoint()
    tier.close()
    with Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=LRU(4)) as again:
        assert again.gather([0, 1, 34, 36])[:, 0].tolist() == [77, -1, 34, 36]
        with pytest.raises(CorruptionError):
            again.gather([35])


def test_a_callback_into_the_tier_raises_and_does_not_hang(tmp_path: Path) -> None:
    def initial(keys: NDArray[np.int64]) -> NDArray[np.float32]:
        return tier.gather(keys)

    with Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=LRU(4), initial=initial) as tier:
        with pytest.raises(RuntimeError, match="initial must not use the tier"):
            tier.gather([1])
        with pytest.raises(RuntimeError, match="initial must not use the tier"):
            tier.gather([1])


@pytest.mark.long
def test_a_closed_tier_holds_nothing(tmp_path: Path) -> None:
    large = (Slab, RowLog, WriteQueue, Loader, SlotMap)
    before = [each for each in gc.get_objects() if type(each) in large]  # by other tests
    tier = Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=LRU(4))
    ticket = tier.prefetch([1])
    assert tier.memory_bytes > 0
    made = [each for each in gc.get_objects() if type(each) in large and not any(each is other for other in before)]
    parts = [weakref.ref(each) for each in made]
    del made
    assert {type(part()) for part in parts} == set(large)
    tier.close()
    assert [part() for part in parts] == [None] * len(parts)
    assert tier.memory_bytes == 0
    with pytest.raises(ClosedError, match="the tier is closed"):
        tier.stats()
    ticket.release()


def test_rows_a_ticket_was_for_are_counted_once_it_is_done(tier: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    before, submit, jobs = tier.memory_bytes, Loader.submit, list[Job]()

    def note(loader: Loader, job: Job, slots: Any) -> None:
        jobs.append(job)
        submit(loader, job, slots)

    monkeypatch.setattr(Loader, "submit", note)
    ticket = tier.prefetch([10, 11, 12])
    ticket.wait()
    assert tier.memory_bytes - before < 1000
    assert [len(job.keys) + len(job.slots) for job in jobs] == [0]


def test_more_keys_than_a_batch_are_not_unpinned_at_once(tmp_path: Path) -> None:
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=50, batch=2, policy=LRU(8)) as tier:
        tier.pin([1, 2])
        tier.pin([3, 4])
        before = tier.memory_bytes
        with pytest.raises(BudgetError, match="batch=2"):
            tier.unpin([1, 2, 3, 4])
        assert tier.memory_bytes == before
        tier.unpin([1, 2])
        tier.unpin([3, 4])


def test_an_interrupt_while_the_write_queue_is_waited_for_loses_nothing(
    tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    tier.scatter([1, 2, 3, 4], numbered([-1, -2, -3, -4]))
    with monkeypatch.context() as patch:
        patch.setattr(WriteQueue, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.gather([20])  # instead of 1
    assert tier.gather([1, 21])[:, 0].tolist() == [-1, 21]
    assert len(tier.policy) == tier.stats()["resident"] == 4
    assert tier.gather([20, 2, 3, 4])[:, 0].tolist() == [20, -2, -3, -4]


def test_keys_that_came_in_by_an_interrupted_call_are_new_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=4, policy=LRU(2)) as tier:
        for key in (1, 2, 3):
            tier.scatter([key], numbered([key], 4))
        with monkeypatch.context() as patch:
            patch.setattr(WriteQueue, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tier.gather([9])  # gets the slot of a row that was written
        tier.scatter([9], numbered([9], 4))
        with pytest.raises(BudgetError, match="1 of them are new beside 4"):
            tier.scatter([10], numbered([10], 4))
        tier.checkpoint()


def test_a_flush_finds_changed_rows_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memhier.table.writer._FLUSH_SLOTS", 3)
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(10)) as tier:
        tier.scatter(range(10), numbered(np.arange(10), 4))
        tier.checkpoint()
        assert tier.stats()["writes"] == 10
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(10)) as tier:
        assert tier.gather(range(10))[:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("policy", [LRU, Belady])
def test_counts_do_not_depend_on_how_fast_the_ssd_is(
    tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 30, 6) for _ in range(120)]
    seen, queues = [], set[WriteQueue]()
    read, append, put = RowLog.read, RowLog.append, WriteQueue.put

    def late(call: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.0005)
        return call(*args, **options)

    def noted(queue: WriteQueue, *args: Any, **options: Any) -> None:
        queues.add(queue)
        put(queue, *args, **options)

    monkeypatch.setattr(WriteQueue, "put", noted)
    for slow in (False, True):
        with Tiered(tmp_path / f"{slow}", "t", np.float32, 8, rows=30, policy=policy(14)) as tier:
            queues.clear()
            if slow:
                monkeypatch.setattr(RowLog, "read", lambda *args, **options: late(read, *args, **options))
                monkeypatch.setattr(RowLog, "append", lambda *args, **options: late(append, *args, **options))
            rows = []
            for turn, batch in enumerate(batches):
                ticket = tier.prefetch(batch)
                rows.append(tier.gather(batch))
                tier.scatter(batch[:3], numbered(batch[:3] + turn, 8))
                ticket.release()
                if not slow and turn % 7 == 0:
                    for queue in queues:
                        queue.drain()
            stats = tier.stats()
            names = ("accesses", "hits", "misses", "evictions", "writes", "first_touches", "resident")
            counts = [stats[name] for name in names] + [stats["queue_hits"] + stats["refetches"]]
            seen.append((np.concatenate(rows).tolist(), counts))
    assert seen[0] == seen[1]
    assert seen[0][1][4] > 0
    assert seen[0][1][7] > 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_it_has_not(tier: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(monkeypatch)
    broken.gate = threading.Semaphore(0)
    ticket = tier.prefetch([10])
    broken.entered.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        code = 1
        try:
            with pytest.raises(ClosedError, match=f"belongs to process {os.getppid()}"):
                ticket.wait()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    broken.gate.release()
