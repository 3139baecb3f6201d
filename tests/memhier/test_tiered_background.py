"""The threads of a tier: tickets, the write queue's bound, errors in the background, sharing and forks."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.errors import BudgetError, ClosedError, CorruptionError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.log.row_log import RowLog
from memhier.policies import LRU
from memhier.store.store import Store
from memhier.table.loans import Ticket
from memhier.table.tiered import KIND, Tiered
from memhier.table.writer import WriteQueue

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def numbered(keys: Any, dim: int = 1024) -> NDArray[np.float32]:
    return np.repeat(np.asarray(keys)[..., None], dim, axis=-1).astype(np.float32)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tiered]:
    """A table of 40 rows of a page each, all of them on SSD and 4 slots."""
    with Tiered(tmp_path / "s", "t", np.float32, 1024, rows=50, policy=LRU(4)) as table:
        for key in range(40):
            table.scatter([key], numbered([key]))
        table.checkpoint()
        table.gather([0, 1, 2, 3])
        yield table


def flip(path: Path) -> None:
    """Change every page of the largest segment; a second time, change it back."""
    file = max(path.glob("segments/*.seg"), key=lambda segment: segment.stat().st_size)
    raw = np.fromfile(file, np.uint8)
    raw[::512] ^= 1
    raw.tofile(file)


def until_done(ticket: Ticket) -> None:
    """Wait for a ticket; do not raise its error."""
    while not ticket.done:
        time.sleep(0.001)


class SlowLog:
    """Stands in for a log: appends wait until they are let through."""

    def __init__(self, row_bytes: int) -> None:
        self.rows: dict[int, bytes] = {}
        self.row_bytes = row_bytes
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.failure: BaseException | None = None

    def append(self, keys: Ints, rows: Bytes) -> None:
        self.entered.release()
        self.gate.acquire()
        if self.failure is not None:
            raise self.failure
        self.rows.update(zip(keys.tolist(), map(bytes, rows), strict=True))


def row(value: int, count: int = 1) -> Bytes:
    return np.full((count, 8), value, np.uint8)


def test_a_ticket_holds_its_rows_until_they_are_gathered(tier: Tiered) -> None:
    with tier.prefetch([10, 11, 12]) as ticket:
        ticket.wait()
        assert ticket.done
        assert len(ticket) == 3
        reads = tier.stats()["reads"]
        for key in (20, 21):  # one slot is left for these
            tier.gather([key])
        with pytest.raises(BudgetError):
            tier.gather([20, 21])
        assert tier.gather([12, 10])[:, 0].tolist() == [12, 10]
        assert len(ticket) == 1
        assert tier.stats()["reads"] == reads + 2
        tier.gather([20, 21, 22])  # 11 is still held
        assert tier.gather([11])[0, 0] == 11
        assert len(ticket) == 0
        assert tier.stats()["misses"] == 40 + 4 + 3 + 2 + 2


def test_the_older_of_two_tickets_lets_go(tier: Tiered) -> None:
    first, second = tier.prefetch([10, 11]), tier.prefetch([11, 12])
    tier.gather([11])
    assert (len(first), len(second)) == (1, 2)
    first.release()
    first.release()
    tier.gather([11])
    assert (len(first), len(second)) == (0, 1)
    tier.gather([1, 2, 3])
    with pytest.raises(BudgetError):
        tier.gather([1, 2, 3, 4])
    second.release()
    tier.gather([1, 2, 3, 4])


def test_tickets_are_bounded(tier: Tiered) -> None:
    tickets = [tier.prefetch([1, 2]) for _ in range(4)]
    with pytest.raises(BudgetError, match=r"2 rows beside 4 open tickets for 8 rows; .* 1024 tickets and 8 rows"):
        tier.prefetch([1, 2])
    tickets[0].release()
    tickets[0] = tier.prefetch([1, 2])


def test_forgotten_tickets_hold_nothing(tier: Tiered) -> None:
    for _ in range(30):
        tier.prefetch([1, 2, 3])  # and nothing keeps it
    assert tier.gather([10, 11, 12, 13])[:, 0].tolist() == [10, 11, 12, 13]  # all slots there are
    ticket = tier.prefetch([20])
    assert tier.gather([20, 21])[:, 0].tolist() == [20, 21]
    del ticket  # of which nothing is left to go back
    with tier.pin([20, 21, 22, 23]):
        pass


def test_a_write_to_a_row_on_its_way_in_wins(tier: Tiered) -> None:
    for key in range(10, 40):
        ticket = tier.prefetch([key])
        tier.scatter([key], numbered([-key]))
        assert tier.gather([key])[0, 0] == -key
        ticket.release()


def test_pins_count_and_hold(tier: Tiered) -> None:
    first, second = tier.pin([1, 1, 2]), tier.pin([2, 3])
    tier.gather([20])
    tier.gather([21])
    with pytest.raises(BudgetError, match="2 distinct rows beside 3 that are pinned"):
        tier.gather([20, 21])
    second.release()
    second.release()
    tier.gather([20, 21])
    tier.unpin([1])
    with pytest.raises(ValueError, match="keys: 1 is not pinned"):
        first.release()
    tier.unpin([2])
    tier.gather([20, 21, 22, 23])


def test_damage_raises_until_it_is_undone(tier: Tiered, tmp_path: Path) -> None:
    flip(tmp_path / "s")
    for _ in range(2):
        with pytest.raises(CorruptionError, match="page"):
            tier.gather([1, 10])
        with pytest.raises(CorruptionError, match="page"):
            tier.pin([11])
    assert tier.gather([1])[0, 0] == 1
    flip(tmp_path / "s")
    assert tier.gather([1, 10, 11])[:, 0].tolist() == [1, 10, 11]


def test_a_failed_prefetch_raises_once(tier: Tiered, tmp_path: Path) -> None:
    flip(tmp_path / "s")
    with pytest.raises(CorruptionError, match="page"):
        tier.prefetch([10, 11]).wait()
    assert tier.gather([3])[0, 0] == 3  # the ticket has told
    until_done(tier.prefetch([11, 12]))
    with pytest.raises(CorruptionError, match=r"a prefetch failed: .*page") as caught:
        tier.gather([3])
    assert isinstance(caught.value.__cause__, CorruptionError)
    flip(tmp_path / "s")
    assert tier.gather([10, 11, 12])[:, 0].tolist() == [10, 11, 12]


def test_other_faults_of_a_prefetch_keep_their_kind(tier: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", "some/file")

    monkeypatch.setattr(RowLog, "read", broken)
    until_done(tier.prefetch([10]))
    with pytest.raises(OSError, match="a prefetch failed") as caught:
        tier.flush()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "some/file")
    monkeypatch.undo()
    assert tier.gather([10])[0, 0] == 10


@pytest.mark.long
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_failed_write_closes_the_tier_and_keeps_the_checkpoint(fast_path: Path, fault: Fault) -> None:
    """Each call of the file layer after the opening of the store fails in turn. If only room was missing, the calls
    are made again and nothing is lost.
    """
    with Tiered(fast_path / "s", "t", np.float32, 1024, rows=700, policy=LRU(4)) as tier:
        tier.scatter([1, 2, 3], numbered([1, 2, 3]))
        tier.checkpoint()
    with Store.open(fast_path / "s", KIND, writable=True, files=(files := FaultyFiles(RealFiles()))):
        opening = len(files.calls)
    for call in range(opening + 1, opening + 200):
        files, place = FaultyFiles(RealFiles(), call, fault), fast_path / str(call)
        shutil.copytree(fast_path / "s", place)
        with Store.open(place, KIND, writable=True, files=files) as store:
            write_until_it_fails(store, fault)
        with Tiered(place, "t", np.float32, 1024, rows=700, policy=LRU(4)) as tier:
            assert tier.gather([1, 2, 3])[:, 0].tolist() in ([1, 2, 3], [-1, 2, 3])
        if len(files.calls) < call:
            return
    pytest.fail("the writes never came to an end")


def write_until_it_fails(store: Store, fault: Fault) -> None:
    """Write more than all buffers hold and checkpoint; check which calls work after that failed."""
    with Tiered(store, "t", np.float32, 1024, rows=700, dram="8MiB", policy=LRU(4)) as tier:
        try:
            tier.scatter([1], numbered([-1]))
            for start in range(10, 700, 4):
                keys = np.arange(start, min(start + 4, 700))
                tier.scatter(keys, numbered(keys))
            tier.checkpoint()
        except (OSError, ClosedError) as error:
            if fault is not Fault.EIO and isinstance(error, OSError) and not is_closed(tier):
                tier.checkpoint()
                assert tier.gather([1])[0, 0] == -1
                return
            for call in (lambda: tier.gather([1]), tier.flush, tier.checkpoint):
                with pytest.raises(ClosedError, match="reopen") as caught:
                    call()
                assert isinstance(caught.value.__cause__, OSError | ClosedError)


def is_closed(tier: Tiered) -> bool:
    """Whether a tier takes no more calls."""
    try:
        tier.flush()
    except ClosedError:
        return True
    return False


def test_a_full_queue_waits_and_serves_its_rows() -> None:
    log = SlowLog(8)
    queue = WriteQueue(log, 4, 8)  # type: ignore[arg-type]
    queue.put(np.arange(4), row(1, 4))
    log.entered.acquire()  # one row is being appended
    blocked = threading.Thread(target=queue.put, args=(np.array([9, 10]), row(2, 2)))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    out = np.zeros((4, 8), np.uint8)
    assert queue.take(np.array([3, 7, 0]), out).tolist() == [True, False, True]
    assert out[:3, 0].tolist() == [1, 1, 0]
    queue.put(np.array([0]), row(5))  # overwrites the row on its way: needs no room, and must be appended again
    for _ in range(20):
        log.gate.release()
    blocked.join()
    queue.drain()
    assert len(queue) == 0
    assert {key: value[0] for key, value in log.rows.items()} == {0: 5, 1: 1, 2: 1, 3: 1, 9: 2, 10: 2}
    assert queue.stall_s > 0
    queue.close()


def test_a_failed_append_wakes_waiting_threads() -> None:
    log = SlowLog(8)
    log.failure = OSError(errno.ENOSPC, "No space left on device", "some/file")
    queue = WriteQueue(log, 2, 8)  # type: ignore[arg-type]
    queue.put(np.arange(2), row(1, 2))
    log.entered.acquire()
    errors: list[BaseException | None] = []

    def wait(call: Callable[[], None]) -> None:
        with pytest.raises(ClosedError, match="No space left") as caught:
            call()
        errors.append(caught.value.__cause__)

    calls: list[Callable[[], None]] = [queue.drain, lambda: queue.put(np.arange(5, 8), row(2, 3))]
    waiting = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in waiting:
        thread.start()
    log.gate.release()
    for thread in waiting:
        thread.join()
    assert errors == [log.failure] * 2
    with pytest.raises(ClosedError):
        queue.check()
    queue.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True), max_size=20), st.integers(1, 5))
def test_the_log_ends_up_with_the_newest(puts: list[list[int]], size: int) -> None:
    log = SlowLog(8)
    for _ in range(1000):
        log.gate.release()
    queue = WriteQueue(log, size, 8)  # type: ignore[arg-type]
    newest: dict[int, int] = {}
    for value, keys in enumerate(puts):
        queue.put(np.array(keys), row(value, len(keys)))
        newest.update(dict.fromkeys(keys, value))
        assert len(queue) <= size
    queue.drain()
    queue.close()
    assert {key: value[0] for key, value in log.rows.items()} == newest


def test_threads_share_a_tier(tmp_path: Path) -> None:
    """Each thread has keys of its own, and all share the slots: a thread reads the rows that it wrote."""
    with Tiered(tmp_path / "s", "t", np.float32, 16, rows=400, policy=LRU(48)) as tier:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            values = np.zeros(100)
            try:
                for turn in range(60):
                    mine = rng.integers(0, 100, 8)
                    keys = number * 100 + mine
                    if turn % 3 == 0:
                        ticket = tier.prefetch(keys)
                    assert tier.gather(keys)[:, 0].tolist() == values[mine].tolist()
                    values[mine] = turn
                    tier.scatter(keys, numbered(np.full(8, turn), 16))
                    ticket.release()
                    if turn % 20 == number:
                        tier.checkpoint()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_to_open_a_tier_of_its_own(tier: Tiered) -> None:
    ticket, pin = tier.prefetch([10]), tier.pin([11])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (
                lambda: tier.gather([1]),
                tier.flush,
                tier.checkpoint,
                lambda: tier.scatter([1], numbered([1])),
            ):
                with pytest.raises(ClosedError, match=f"belongs to process {os.getppid()}"):
                    call()
            ticket.release()
            pin.release()
            tier.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.gather([10, 11])[:, 0].tolist() == [10, 11]


def test_closing_ends_prefetches_under_way(tier: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    read, join = RowLog.read, threading.Thread.join
    began, ending = threading.Event(), threading.Event()

    def read_until_closed(*args: Any, **options: Any) -> Any:
        began.set()
        ending.wait()
        return read(*args, **options)

    def join_loader(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "memhier-load":
            ending.set()
        join(thread, timeout)

    monkeypatch.setattr(RowLog, "read", read_until_closed)
    monkeypatch.setattr(threading.Thread, "join", join_loader)
    first, second = tier.prefetch([10, 11]), tier.prefetch([12, 13])
    began.wait()
    tier.close()
    first.wait()
    with pytest.raises(ClosedError, match="closed before"):
        second.wait()


def test_a_slot_whose_ticket_was_released_is_not_filled_with_the_row_it_no_longer_holds(
    tier: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    read = RowLog.read

    def held_back(log: RowLog, keys: Any, out: Any) -> Any:
        if threading.current_thread().name == "memhier-load":
            entered.set()
            gate.wait()
        return read(log, keys, out=out)

    monkeypatch.setattr(RowLog, "read", held_back)
    ticket = tier.prefetch([10, 11, 12, 13])
    entered.wait()
    ticket.release()
    threading.Timer(0.2, gate.set).start()
    for key in range(20, 24):  # takes the slots of rows that are still being read
        tier.scatter([key], numbered([key + 100]))
    gate.wait()
    ticket.wait()
    np.testing.assert_array_equal(tier.gather(range(20, 24)), numbered(np.arange(120, 124)))


def test_bad_values_of_a_checkpoint_change_nothing(tier: Tiered) -> None:
    tier.scatter([1], numbered([77]))
    for values, error in (({"step": 5}, TypeError), ({"": b""}, ValueError), ({"log/t": b""}, ValueError)):
        with pytest.raises(error):
            tier.checkpoint(values)  # type: ignore[arg-type]
    tier.checkpoint({"step": b"5"})
    np.testing.assert_array_equal(tier.gather([1]), numbered([77]))
