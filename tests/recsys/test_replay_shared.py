"""Memory that other processes and threads read while it is swapped."""

import multiprocessing
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import ClosedError, CorruptionError
from memhier.recsys.replay import CarouselBuffer, MemoryReader, RandomSwap


def filled(place: Path) -> CarouselBuffer:
    buffer = CarouselBuffer(place, memory=20, schema={"x": ("int64", 3)}, seed=3)
    buffer.add({"x": np.arange(180).reshape(60, 3)}, labels=np.arange(60) % 4)
    return buffer


def _read_until(reader: MemoryReader, began: Any, stop: Any, results: Any) -> None:
    reads = torn = 0
    slots = np.arange(len(reader))
    began.release()
    while not stop.is_set():
        batch = reader.read(slots)
        values = batch["image"].reshape(len(slots), -1)
        torn += int((values != values[:, :1]).any(1).sum() + (values[:, 0] != batch.ids % 256).sum())
        reads += len(slots)
    results.put((reads, torn))


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_read_is_ever_torn(tmp_path: Path, context: str) -> None:
    method = multiprocessing.get_context(context)
    schema = {"image": ("uint8", (64, 64, 3))}
    with CarouselBuffer(tmp_path / "b", memory=8, schema=schema, swap=RandomSwap(1.0), delay=0) as buffer:
        ids = np.arange(200)
        buffer.add({"image": np.repeat(ids.astype(np.uint8), 64 * 64 * 3).reshape(200, 64, 64, 3)})
        began, stop, results = method.Semaphore(0), method.Event(), method.Queue()
        arguments = (buffer.reader(), began, stop, results)
        *workers, doomed = [method.Process(target=_read_until, args=arguments) for _ in range(3)]
        for process in (*workers, doomed):
            process.start()
        for _ in range(3):
            began.acquire()
        for _ in range(400):
            buffer.feedback(buffer.sample(8))
        # A reader that dies while it reads harms no other.
        doomed.kill()
        doomed.join()
        for _ in range(400):
            buffer.feedback(buffer.sample(8))
        stop.set()
        found = [results.get(timeout=800) for _ in workers]
        for worker in workers:
            worker.join()
        assert all(reads > 0 for reads, _ in found)
        assert sum(torn for _, torn in found) == 0
        assert buffer.stats()["swapped"] > 100
        assert doomed.exitcode == -signal.SIGKILL


def test_a_slot_left_half_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memhier.recsys.replay.placement.memory._ATTEMPTS", 10)
    with filled(tmp_path / "b") as buffer:
        reader = buffer.reader()
        _, slab = reader.__getstate__()
        with pytest.raises(RuntimeError), slab.writing([3]):
            raise RuntimeError
        with pytest.raises(CorruptionError, match="half written"):
            reader.read([3])
        assert len(reader.read([2])) == 1


def test_a_forked_child_may_read_but_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path / "b") as buffer:
        outcome: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)  # as it looks to a child
            with pytest.raises(ClosedError, match=r"buffer\.reader\(\)"):
                buffer.feedback([0])
        thread = threading.Thread(target=lambda: outcome.append(buffer.reader().read([0, 1]).ids))
        thread.start()
        thread.join()
        assert len(outcome[0]) == 2


def test_a_writer_that_takes_its_time_is_waited_for(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        began = threading.Event()
        _, slab = buffer.reader().__getstate__()

        def write() -> None:
            with slab.writing([3]):
                began.set()
                time.sleep(0.7)

        thread = threading.Thread(target=write)
        thread.start()
        began.wait()
        assert len(buffer.reader().read([3])) == 1
        thread.join()
