"""Rows lent in place, rows passed by, and tables whose keys are known to lie in a range."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError, ClosedError
from memhier.io.reader import Reader
from memhier.log.index import LogIndex
from memhier.log.row_log import RowLog
from memhier.policies import LRU, Belady
from memhier.store.store import Store
from memhier.table.loans import Loan
from memhier.table.tiered import Tiered
from memhier.table.writer import WriteQueue

ROWS, WIDTH = 60, 3
Make = Callable[..., Tiered]


def initial(keys: Any) -> Any:
    return np.repeat(keys[:, None], WIDTH, axis=1).astype(np.float32) / 7


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened: list[Tiered] = []

    def open_tier(slots: int = 8, **options: Any) -> Tiered:
        options = {"rows": ROWS, "dram": "64MiB", "policy": LRU(slots), "initial": initial, "key_space": ROWS} | options
        opened.append(Tiered(tmp_path / "table", "rows", np.float32, WIDTH, **options))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()


def test_rows_fetched_ahead_are_lent_without_a_search(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make()
    keys = np.array([7, 3, 9])
    tickets = [tier.prefetch(keys), tier.prefetch(keys[:2])]
    with monkeypatch.context() as during:
        during.setattr(SlotMap, "unique_find", None)
        loan = tier.lend(keys, ticket=tickets[0])
    assert np.array_equal(loan.rows[loan.slots], initial(keys))
    # The other ticket still holds its rows, and the loan all of them.
    assert (len(tickets[0]), len(tickets[1]), tier.stats()["accesses"]) == (0, 2, 5)
    with loan.changing() as rows:
        rows[loan.slots] += 1
    tier.gather(np.arange(10, 15))
    with pytest.raises(BudgetError):
        tier.gather(np.arange(10, 16))
    loan.release()
    tickets[1].release()
    tier.gather(np.arange(10, 18))
    assert np.array_equal(tier.gather(keys), initial(keys) + 1)


@pytest.mark.parametrize("other", [[3, 7], [7, 4], [7], [7, 7], [[7, 3]]])
def test_a_ticket_of_other_rows_does_no_harm(make: Make, other: Any) -> None:
    tier = make()
    ticket = tier.prefetch([7, 3])
    with tier.lend(other, ticket=ticket) as loan:
        assert np.array_equal(loan.rows[loan.slots], initial(np.array(other).reshape(-1)).reshape(*loan.slots.shape, 3))
    ticket.release()
    with tier.lend([7, 3], ticket=ticket) as loan:
        assert np.array_equal(loan.rows[loan.slots], initial(np.array([7, 3])))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_tier_changed_in_place_equals_a_dict(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    truth = initial(np.arange(ROWS))
    path = tmp_path_factory.mktemp("loans") / "table"
    batches = data.draw(st.lists(st.lists(st.integers(0, ROWS - 1), min_size=0, max_size=12), max_size=12))
    with Tiered(
        path, "rows", np.float32, WIDTH, rows=ROWS, dram="64MiB", policy=LRU(12), initial=initial, key_space=ROWS
    ) as tier:
        for number, batch in enumerate(batches):
            keys = np.array(batch, np.int64)
            with tier.lend(keys) as loan:
                assert np.array_equal(loan.rows[loan.slots], truth[keys])
                with loan.changing() as rows:
                    rows[loan.slots] = truth[keys] * 2 + number
            truth[keys] = truth[keys] * 2 + number
            probe = np.array(data.draw(st.lists(st.integers(0, ROWS - 1), max_size=40)), np.int64)
            before = tier.stats()
            assert np.array_equal(tier.gather(probe, keep=False), truth[probe])
            after = tier.stats()
            assert all(after[name] == before[name] for name in ("accesses", "evictions", "resident"))
        tier.checkpoint()
        assert np.array_equal(tier.gather(np.arange(ROWS), keep=False), truth)
    with Tiered(path, "rows", np.float32, WIDTH, rows=ROWS, dram="64MiB", initial=initial, key_space=ROWS) as tier:
        assert np.array_equal(tier.gather(np.arange(ROWS)), truth)


def test_lent_rows_stay_where_they_are(make: Make) -> None:
    tier = make(slots=6)
    loan = tier.lend([1, 2, 1])
    assert loan.slots.shape == (3,)
    assert loan.slots[0] == loan.slots[2]
    for keys in range(10, 50, 4):
        tier.gather(np.arange(keys, keys + 4))
    assert np.array_equal(loan.rows[loan.slots], initial(np.array([1, 2, 1])))
    with pytest.raises(BudgetError, match="pinned or held"):
        tier.gather(np.arange(10, 15))
    loan.release()
    loan.release()
    assert loan.released
    tier.gather(np.arange(10, 15))
    with pytest.raises(ValueError, match="released"):
        loan.changing()


def test_two_loans_of_a_row_hold_it_until_both_are_released(make: Make) -> None:
    tier = make(slots=2)
    first, second = tier.lend([1]), tier.lend([1])
    first.release()
    with pytest.raises(BudgetError):
        tier.gather([2, 3])
    second.release()
    tier.gather([2, 3])


def test_a_shared_loan_holds_its_rows_by_itself(make: Make) -> None:
    tier = make(slots=2)
    first = tier.lend([1])
    second = first.share()
    first.release()
    with pytest.raises(BudgetError):
        tier.gather([2, 3])
    second.release()
    tier.gather([2, 3])
    with pytest.raises(ValueError, match="released"):
        second.share()


def test_sharing_waits_for_no_call_of_the_tier(make: Make) -> None:
    tier = make(slots=2)
    first = tier.lend([1])
    with first.changing() as rows:  # a call that is under way
        second, third = first.share(), first.share()
        first.release()
        second.release()
        rows[third.slots] = 7
    with pytest.raises(BudgetError):
        tier.gather([2, 3])
    third.release()
    tier.gather([2, 3])


def test_a_closed_tier_shares_nothing(make: Make) -> None:
    tier = make(slots=2)
    loan = tier.lend([1])
    tier.close()
    with pytest.raises(ClosedError):
        loan.share()
    loan.release()


def test_a_loan_takes_the_rows_of_a_ticket(make: Make) -> None:
    tier = make(slots=4)
    ticket = tier.prefetch([1, 2, 3])
    loan = tier.lend([1, 2])
    assert len(ticket) == 1
    assert tier.stats()["accesses"] == 3
    loan.release()
    ticket.release()


def test_rows_lent_again_are_no_further_access(make: Make) -> None:
    policy = Belady(6)
    tier = make(policy=policy)
    for batch in ([1, 2, 3], [3, 4], [5]):
        policy.announce(np.array(batch))
    first = tier.lend([1, 2, 3])
    ticket = tier.prefetch([3, 4])
    accesses = tier.stats()["accesses"]
    again = tier.lend([3, 1], again=True)
    assert tier.stats()["accesses"] == accesses
    assert len(ticket) == 2  # its rows wait for the batch that it is for
    first.release()
    with pytest.raises(ValueError, match="2 is not pinned"):
        tier.lend([1, 2], again=True)
    second = tier.lend([3, 4])
    third = tier.lend([5])
    for loan in (again, second, third):
        loan.release()


def test_an_error_in_a_change_leaves_the_rows_usable(make: Make) -> None:
    tier = make(slots=4)
    loan = tier.lend([5])
    changing = loan.changing()
    rows = changing.__enter__()
    rows[loan.slots] = 9
    assert not changing.__exit__(RuntimeError, RuntimeError("mine"), None)
    loan.release()
    tier.gather(np.arange(10, 14))
    assert tier.gather([5]).tolist() == [[9, 9, 9]]


def test_a_change_keeps_other_calls_out_until_it_ends(make: Make) -> None:
    tier = make(slots=4)
    loan = tier.lend([5])
    seen: list[float] = []
    with loan.changing() as rows:
        other = threading.Thread(target=lambda: seen.append(float(tier.gather([5])[0, 0])))
        other.start()
        other.join(0.05)
        assert not seen
        rows[loan.slots] = 4
    other.join()
    assert seen == [4.0]
    loan.release()


def test_a_loan_outlives_its_tier_harmlessly(make: Make) -> None:
    tier = make()
    loan = tier.lend([1])
    tier.close()
    loan.release()


def test_more_rows_may_pass_by_than_there_are_slots(make: Make) -> None:
    tier = make(slots=2)
    tier.scatter([3, 4], np.ones((2, WIDTH), np.float32))
    truth = initial(np.arange(ROWS))
    truth[3:5] = 1
    out = np.empty((ROWS, WIDTH), np.float32)
    assert tier.gather(np.arange(ROWS), out, keep=False) is out
    assert np.array_equal(out, truth)


@pytest.mark.parametrize("slots", [2, 40])
def test_keys_beyond_the_key_space_are_refused_however_they_are_mapped(make: Make, slots: int) -> None:
    tier = make(slots=slots)
    for key in (-1, ROWS):
        with pytest.raises(ValueError, match="key_space"):
            tier.gather([key])
        with pytest.raises(ValueError, match="key_space"):
            tier.lend([key])


def test_a_log_of_known_keys_takes_eight_bytes_each(tmp_path: Path) -> None:
    assert LogIndex.bytes_for(1000, 1000) == 8000
    assert LogIndex.bytes_for(10, 10**9) == SlotMap.bytes_for(10, batch=2**16) + 24 * 10
    with Store.create(tmp_path / "s", kind="t") as store, Reader() as reader:
        rows = np.arange(500, dtype="<u4").view(np.uint8).reshape(-1, 4)
        with RowLog(store, "table", 4, reader, 500, key_space=500) as log:
            direct = log.memory_bytes
            log.append(np.arange(0, 500, 2), rows[::2])
            log.append([4, 4], rows[[7, 9]])
            log.delete([8, 8, 9])
            assert len(log) == 249
            assert log.contains([4, 5, 8, -1, 500]).tolist() == [True, False, False, False, False]
            assert sorted(np.concatenate(list(log.keys()))) == [key for key in range(0, 500, 2) if key != 8]
            with pytest.raises(ValueError, match="key_space"):
                log.append([500], rows[:1])
            log.compact(1.0)
            log.commit()
        with RowLog(store, "table", 4, reader, 500) as log:
            assert log.memory_bytes - direct > SlotMap.bytes_for(500, batch=2**16) - 1024
            found, there = log.read([4, 8, 10])
            assert found.view("<u4").ravel().tolist() == [9, 0, 10]
            assert there.tolist() == [True, False, True]


def test_idle_keys_are_those_that_no_announced_batch_needs() -> None:
    policy = Belady(4)
    policy.access([1, 2, 3])
    assert policy.idle == 3
    policy.announce([2, 5])
    assert policy.idle == 2
    policy.withdraw()
    assert policy.idle == 3


def test_withdrawn_batches_are_as_if_never_announced() -> None:
    told, plain = Belady(4), Belady(4)
    rng = np.random.default_rng(0)
    for _ in range(200):
        for batch in rng.integers(0, 12, (int(rng.integers(0, 4)), 3)):
            told.announce(batch)
        told.withdraw()
        assert told.pending == 0
        keys = rng.integers(0, 12, 2)
        assert np.array_equal(told.access(keys).evicted, plain.access(keys).evicted)


def test_a_checkpoint_beside_calls_has_the_moment_it_was_started(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make(slots=8)
    tier.scatter(np.arange(20) % 8, np.full((20, WIDTH), 1, np.float32))
    entered, go_on = threading.Event(), threading.Event()
    commit, put, queues = RowLog.commit, WriteQueue.put, set[WriteQueue]()

    def slow(log: RowLog, values: Any) -> int:
        entered.set()
        assert go_on.wait(30)
        return commit(log, values)

    def noted(queue: WriteQueue, *args: Any, **options: Any) -> None:
        queues.add(queue)
        put(queue, *args, **options)

    monkeypatch.setattr(RowLog, "commit", slow)
    monkeypatch.setattr(WriteQueue, "put", noted)
    future = tier.start_checkpoint({"step": b"1"})
    assert entered.wait(30)
    # Changes that leave DRAM meanwhile, and come back.
    for start in (0, 8, 16):
        tier.scatter(np.arange(start, start + 8), np.full((8, WIDTH), 2, np.float32))
    assert (tier.gather(np.arange(8)) == 2).all()
    assert not future.done()
    # The queue would hand these to the log now, did they not have to wait.
    assert tier.stats()["queued"] == 24
    queues.pop().drain()
    go_on.set()
    assert future.result(30) == 1
    monkeypatch.undo()
    tier.close()
    again = make(slots=8)
    expected = initial(np.arange(24))
    expected[:8] = 1
    assert np.array_equal(again.gather(np.arange(24), keep=False), expected)
    again.scatter([1], np.full((1, WIDTH), 3, np.float32))
    first, second = again.start_checkpoint(), again.start_checkpoint()
    assert (first.result(30), second.result(30)) == (2, 3)


def test_a_checkpoint_that_fails_beside_calls_ends_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make(slots=8)
    tier.scatter([1], np.ones((1, WIDTH), np.float32))

    def fails(log: RowLog, values: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowLog, "commit", fails)
    with pytest.raises(OSError, match="No space"):
        tier.start_checkpoint().result(30)
    with pytest.raises(ClosedError, match="checkpoint failed"):
        tier.gather([1])


class Forgotten:
    """Releases a loan when the garbage collector runs."""

    def __init__(self, loan: Loan) -> None:
        self.loan = loan
        self.itself = self

    def __del__(self) -> None:
        self.loan.release()


@pytest.mark.long
def test_a_loan_may_be_collected_in_the_middle_of_a_call(make: Make) -> None:
    def collecting(keys: Any) -> Any:
        gc.collect()
        return initial(keys)

    tier = make(slots=2, initial=collecting)
    Forgotten(tier.lend([1]))
    assert np.array_equal(tier.gather([2]), initial(np.array([2])))
    tier.gather([3, 4])


@pytest.mark.parametrize("fixed", [False, True])
def test_a_ticket_knows_keys_again_that_cannot_have_changed(
    make: Make, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = make(), np.array([5, 1, 3])
    keys.flags.writeable = not fixed
    ticket = tier.prefetch(keys)
    if not fixed:
        keys[:] = [2, 1, 3]  # the ticket holds other rows
    with monkeypatch.context() as during:
        if fixed:
            during.setattr(SlotMap, "keys_of", None)
        loan = tier.lend(keys, ticket=ticket)
    assert np.array_equal(loan.rows[loan.slots], initial(keys))
    loan.release()
    ticket.release()
    ticket = tier.prefetch(keys)
    tier.gather(keys[:1])  # the ticket has let go of it
    tier.gather(np.arange(10, 16))
    with tier.lend(keys, ticket=ticket) as loan:
        assert np.array_equal(loan.rows[loan.slots], initial(keys))
