"""Turns are handed on whatever strikes, to any number of threads."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.search.searcher import Turns

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


def test_no_signal_keeps_a_turn() -> None:
    turns, struck = Turns(1), 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        while True:
            with turns.next():
                pass

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while struck < INTERRUPTS:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + struck * 1e-7)
                work()
            except KeyboardInterrupt:
                struck += 1
            assert not turns.next().locked(), f"interrupt {struck} kept a turn"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
