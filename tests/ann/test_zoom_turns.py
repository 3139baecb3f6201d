"""Turns are handed on whatever strikes, to any number of threads."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from memhier import backend
from memhier.ann import ZoomIndex
from memhier.ann.zoom.search.search import Search
from memhier.ann.zoom.search.turns import Turns
from memhier.shield import ShieldedContext

INTERRUPTS = 1500


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize(("threads", "count"), [(16, 2), (16, 1), (3, 5)])
def test_more_threads_than_turns_all_come_to_their_end(threads: int, count: int) -> None:
    turns, inside, most, made = Turns(count), [0], [0], [0] * threads
    guard = threading.Lock()

    def work(number: int) -> None:
        for _ in range(500):
            with turns.next():
                with guard:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0)
                made[number] += 1
                with guard:
                    inside[0] -= 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert made == [500] * threads
    assert 1 <= most[0] <= count


def test_searches_of_many_threads_share_few_turns(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    found = [0] * 16

    def work(number: int) -> None:
        for row in range(number, number + 120):
            found[number] += index.search(vectors[row], 1, recall=1).ids[0] == row

    with ZoomIndex.build(tmp_path / "index", vectors, dram="1MiB") as index:  # room for one search at a time
        workers = [threading.Thread(target=work, args=(number,)) for number in range(len(found))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert found == [120] * 16


@pytest.mark.parametrize(("count", "lent"), [(1, 0), (2, 0), (3, 1), (8, 3), (9, 4), (30, 4)])
def test_turns_lent_leave_as_many_to_others(count: int, lent: int) -> None:
    turns = Turns(count)
    with turns.next(), turns.lent() as taken, ExitStack() as others:
        assert taken == lent
        for _ in range(count - 1 - lent):
            turn = turns.next()
            assert not turn.locked()
            others.enter_context(turn)
        assert turns.busy
        with turns.lent() as more:
            assert more == 0
    assert all_free(turns, count)


def test_threads_wait_for_turns_that_are_lent_and_get_them() -> None:
    turns = Turns(8)
    with turns.next(), ExitStack() as others:
        with turns.lent() as lent:
            for _ in range(7 - lent):
                others.enter_context(turns.next())
            assert not turns.awaited
            wanted = [turns.next() for _ in range(lent)]
            assert turns.awaited
        assert not turns.awaited
        assert len({*wanted}) == lent
        assert not any(turn.locked() for turn in wanted)
        with turns.lent() as lent:
            assert lent == 0
        with turns.lent() as lent:  # nobody took them
            assert lent == 1
    assert all_free(turns, 8)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_turns_are_spare_as_far_as_one_is_lent(count: int) -> None:
    turns = Turns(count)
    with turns.next():
        with turns.lent() as lent:
            pass
        assert turns.spare == (lent > 0)


def all_free(turns: Turns, count: int) -> bool:
    with ExitStack() as taken:
        for _ in range(count):
            for _ in range(10_000):  # a thread gives back those that an interrupt left
                if not turns.next().locked():
                    break
                time.sleep(1e-3)
            else:
                return False
            taken.enter_context(turns.next())
    return True


def test_batches_find_the_same_in_lent_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    vectors, queries = random.normal(size=(5000, 16)).astype(np.float32), random.normal(size=(90, 16))
    with ZoomIndex.build(tmp_path / "index", vectors, dram="16MiB") as index:
        lent = index.search(queries, 100, recall=0.9)
        results = dict[int, Any]()
        workers = [
            threading.Thread(target=lambda n=n: results.update({n: index.search(queries, 100, recall=0.9)}))
            for n in range(12)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        monkeypatch.setattr(Turns, "lent", lambda _: nullcontext(0))
        own = index.search(queries, 100, recall=0.9)
        for found in (own, *results.values()):
            assert np.array_equal(found.ids, lent.ids)
            assert np.array_equal(found.distances, lent.distances)
    assert len(results) == len(workers)
    assert own.stats["page_requests"] == lent.stats["page_requests"]


def test_a_batch_gets_rooms_after_its_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    vectors, queries = random.normal(size=(5000, 16)).astype(np.float32), random.normal(size=(90, 16))
    with ZoomIndex.build(tmp_path / "index", vectors, dram="16MiB") as index:
        expected, calls = index.search(queries, 100, recall=0.9), 0

        def lent(_: Turns) -> nullcontext[int]:
            nonlocal calls
            calls += 1
            return nullcontext(0 if calls == 1 else 100)

        monkeypatch.setattr(Turns, "lent", lent)
        found = index.search(queries, 100, recall=0.9)
    assert calls > 1
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.distances, expected.distances)


@pytest.mark.parametrize(("where", "k"), [("number < 3", 5), ("number < 70", 10), ("number < 2500", 10)])
def test_a_batch_takes_few_calls_and_seldom_asks_for_rooms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, k: int
) -> None:
    """Few axes, whose bounds tell little, and a small budget: each query had the room of all candidates."""
    random, calls, asked, lend = np.random.default_rng(0), [], [], Turns.lent
    vectors, queries = random.normal(size=(5000, 16)).astype(np.float32), random.normal(size=(800, 16))
    find = Search.find

    def counted(search: Search, states: list[Any], requests: list[Any], some: Any, *rest: Any) -> Any:
        calls.append(len(some))
        return find(search, states, requests, some, *rest)

    def lent(turns: Turns) -> Any:
        asked.append(turns)
        return lend(turns)

    attributes = {"number": np.arange(5000)}
    with ZoomIndex.build(tmp_path / "index", vectors, dram="1.5MiB", attributes=attributes) as index:
        monkeypatch.setattr(Search, "find", counted)
        monkeypatch.setattr(Turns, "lent", lent)
        found = index.search(queries, k, where=where, recall=0.9)
        some = [*range(0, 800, 97)]
        alone = np.vstack([index.search(queries[row], k, where=where, recall=0.9).ids for row in some])
    if backend.core is not None:
        assert max(calls) >= 16
        assert len(asked) <= len(calls) // 8
    assert np.array_equal(alone, found.ids[some])


@pytest.mark.parametrize("count", [1, 3])
def test_no_signal_keeps_a_turn(count: int) -> None:
    turns, struck = Turns(count), 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        while True:
            with turns.next(), nullcontext() if count == 1 else ShieldedContext(turns.lent):
                pass

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while struck < INTERRUPTS:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + struck * 1e-7)
                work()
            except KeyboardInterrupt:
                struck += 1
            assert all_free(turns, count), f"interrupt {struck} kept a turn"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
