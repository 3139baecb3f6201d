"""A full disk, a broken one and a crash at every write of a buffer's life: nothing that was saved is lost."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import CorruptionError, FormatError
from memhier.files import Fault, FaultyFiles, File, Files, Mode, RealFiles, SimulatedCrash
from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap

SCHEMA: dict[str, Any] = {
    "image": ("uint8", (3, 5)),
    "text": Field("uint8", (None,), longest=9),
    "logits": Field("float32", (2,), mutable=True),
}


class HastyFiles(RealFiles):
    """Does not wait for the disk: no power fails here, and hundreds of lives take their time."""

    def open(self, path: str, mode: Mode) -> File:
        file = super().open(path, mode)
        file.fdatasync = lambda: None  # type: ignore[method-assign]
        return file

    def sync_directory(self, path: str) -> None:
        return


def samples(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {
        "image": np.repeat(numbers.astype(np.uint8), 15).reshape(count, 3, 5),
        "text": [b"memhier!!"[: number % 10] for number in numbers],
        "logits": np.stack([numbers, -numbers], axis=1).astype(np.float32),
    }


def state(buffer: CarouselBuffer) -> list[Any]:
    """Return the state that a checkpoint has to bring back."""
    memory = buffer.reader().read(buffer.occupied())
    columns = [values.tolist() for values in memory.data.values()]
    figures = buffer.stats()
    return [figures[name] for name in ("step", "storage_samples", "arrivals", "memory_slots")] + [
        memory.slots.tolist(), memory.ids.tolist(), memory.labels.tolist(), *columns,
    ]  # fmt: skip


def live(place: Path, files: Files, saved: list[list[Any]]) -> None:
    """Make a buffer, use all of it that writes, and note the state of every checkpoint."""
    with CarouselBuffer(place, memory=8, schema=SCHEMA, swap=RandomSwap(1.0), seed=3, files=files) as buffer:
        saved.append(state(buffer))
        for turn in range(2):
            buffer.add(samples(20 * turn, 20), labels=np.arange(20) % 3)
            for _ in range(2):
                batch = buffer.sample(4)
                buffer.feedback(batch, update={"logits": np.full((4, 2), turn, np.float32)})
            buffer.checkpoint()
            saved.append(state(buffer))
        buffer.forget({"label": 1})
        saved.append(state(buffer))
        buffer.resize(memory=5)
        buffer.checkpoint()
        saved.append(state(buffer))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Any]], int]:
    """The states of the checkpoints of an undisturbed life, and its number of calls of the file layer."""
    files, saved = FaultyFiles(HastyFiles()), list[list[Any]]()
    live(tmp_path_factory.mktemp("whole") / "b", files, saved)
    return saved, len(files.calls)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "first"), [(Fault.ENOSPC, 1), (Fault.EIO, 2), (Fault.SHORT_WRITE, 3), (Fault.CRASH, 4)]
)
def test_nothing_saved_is_lost(fast_path: Path, whole: tuple[list[list[Any]], int], fault: Fault, first: int) -> None:
    expected, calls = whole
    told = 0
    # Together the four kinds of fault meet every call.
    for number in range(first, calls + 1, 4):
        place, saved = fast_path / f"{number}", list[list[Any]]()
        failure = None
        try:
            live(place, FaultyFiles(HastyFiles(), number, fault), saved)
        except (OSError, SimulatedCrash, CorruptionError) as error:
            failure = error
            told += 1
        if isinstance(failure, CorruptionError):
            assert "still there" in str(failure), "forgotten bytes whose file could not be removed"
        elif isinstance(failure, OSError):
            assert failure.errno == (errno.EIO if fault is Fault.EIO else errno.ENOSPC), number
        assert saved == expected[: len(saved)]
        try:
            buffer = CarouselBuffer.open(place)
        except (FileNotFoundError, FormatError):
            assert not saved, number
            # A buffer that was never finished is in no one's way.
            live(place, HastyFiles(), saved)
            assert saved == expected
            continue
        with buffer:
            # A commit whose last step failed may be there or not.
            assert state(buffer) in expected[max(0, len(saved) - 1) : len(saved) + 1], number
            assert buffer.check() == []
            buffer.add(samples(100, 3), labels=[0, 1, 2])
            buffer.feedback(buffer.sample(2))
            buffer.checkpoint()
    assert told > calls // 12, "most calls are not allowed to fail unnoticed"
