"""A full disk, a broken one, a crash at every write and a damaged catalog: a transition buffer loses nothing saved."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import ClosedError, CorruptionError, FormatError, MemhierError
from memhier.files import Fault, FaultyFiles, File, Files, Mode, RealFiles, SimulatedCrash
from memhier.recsys.replay.transitions import NStep, Prioritised, TransitionBuffer
from memhier.recsys.replay.transitions.described import KIND, META
from memhier.store.segments import FullError
from memhier.store.store import Store

SCHEMA: dict[str, Any] = {"number": "int64", "pixels": ("uint8", 300), "reward": "float32", "done": "bool"}
SETTINGS: dict[str, Any] = {
    "capacity": 900, "schema": SCHEMA, "dram": "640KiB", "draw": Prioritised(), "runs": NStep(3), "batch": 4, "seed": 1,
}  # fmt: skip


class HastyFiles(RealFiles):
    """Does not wait for the disk: no power fails here, and hundreds of lives take their time."""

    def open(self, path: str, mode: Mode) -> File:
        file = super().open(path, mode)
        file.fdatasync = lambda: None  # type: ignore[method-assign]
        return file

    def sync_directory(self, path: str) -> None:
        return


def transitions(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {
        "number": numbers,
        "pixels": np.broadcast_to((numbers % 251).astype(np.uint8)[:, None], (count, 300)),
        "reward": np.ones(count, np.float32),
        "done": numbers % 50 == 49,
    }


def step(buffer: TransitionBuffer, count: int = 130) -> list[int]:
    buffer.add(transitions(buffer.added, count))
    batch = buffer.sample()
    assert (batch["pixels"] == (batch["number"] % 251)[:, None]).all()
    buffer.update_priorities(batch.numbers, batch.numbers % 5)
    return [int(number) for number in batch.numbers]


def live(place: Path, files: Files, told: list[list[list[int]]]) -> None:
    """Make a buffer, use it, and note after each checkpoint the batches since the one before."""
    with TransitionBuffer(place, **SETTINGS, files=files) as buffer:
        told.append([])
        for _ in range(4):
            batches = [step(buffer) for _ in range(4)]
            buffer.checkpoint()
            told.append(batches)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "first"), [(Fault.ENOSPC, 1), (Fault.EIO, 2), (Fault.SHORT_WRITE, 3), (Fault.CRASH, 4)]
)
def test_nothing_saved_is_lost(fast_path: Path, fault: Fault, first: int) -> None:
    files, expected = FaultyFiles(HastyFiles()), list[list[list[int]]]()
    live(fast_path / "whole", files, expected)
    told = 0
    # Together the four kinds of fault meet every call.
    for number in range(first, len(files.calls) + 1, 4):
        place, saved = fast_path / f"{number}", list[list[list[int]]]()
        failure: BaseException | None = None
        try:
            live(place, FaultyFiles(HastyFiles(), number, fault), saved)
        except (OSError, SimulatedCrash) as error:
            told += 1
            failure = error
        if isinstance(failure, OSError):
            assert failure.errno == (errno.EIO if fault is Fault.EIO else errno.ENOSPC), number
        assert saved == expected[: len(saved)]
        try:
            buffer = TransitionBuffer.open(place, dram="640KiB")
        except (FileNotFoundError, FormatError):
            assert not saved, number
            live(place, HastyFiles(), saved)
            assert saved == expected
            continue
        with buffer:
            # A commit whose last step failed may be there or not.
            done = buffer.added // 520
            assert buffer.added % 520 == 0
            assert done in (len(saved) - 1, len(saved)), number
            if done < 4:
                assert [step(buffer) for _ in range(4)] == expected[done + 1]
    assert told > len(files.calls) // 12, "most calls are not allowed to fail unnoticed"


def test_a_full_disk_costs_nothing(tmp_path: Path) -> None:
    """Each call that finds no room changes nothing, and may be made again."""
    full = FaultyFiles(HastyFiles())
    with TransitionBuffer(tmp_path / "b", **SETTINGS, files=full) as buffer:
        expected = TransitionBuffer(tmp_path / "whole", **SETTINGS)
        refused = 0
        for turn in range(60):
            full.fault = Fault.ENOSPC
            full.fail_at = len(full.calls) + 1 + turn % 3
            before = buffer.added
            for _ in range(4):
                try:
                    buffer.add(transitions(buffer.added, before + 40 - buffer.added))
                    if turn % 7 == 6:
                        buffer.checkpoint()
                    break
                except FullError:
                    refused += 1
            full.fail_at = 0
            assert buffer.added == before + 40
            expected.add(transitions(before, 40))
            one, other = buffer.sample(), expected.sample()
            assert np.array_equal(one.numbers, other.numbers)
            assert all(np.array_equal(one[name], other[name]) for name in SCHEMA)
        expected.close()
        assert refused > 5


def test_a_broken_disk_ends_the_buffer_in_words(tmp_path: Path) -> None:
    files = FaultyFiles(HastyFiles())
    with TransitionBuffer(tmp_path / "b", **SETTINGS, files=files) as buffer:
        step(buffer)
        buffer.checkpoint()
        files.fault = Fault.EIO
        files.fail_at = len(files.calls) + 3
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            buffer.add(transitions(130, 1000))
        files.fail_at = 0
        with pytest.raises(ClosedError, match="open it again"):
            buffer.sample()
    with TransitionBuffer.open(tmp_path / "b", dram="640KiB") as buffer:
        assert buffer.added == 130


def test_a_flipped_byte_is_told(tmp_path: Path) -> None:
    with TransitionBuffer(tmp_path / "b", **SETTINGS) as buffer:
        for _ in range(6):
            step(buffer)
        buffer.checkpoint()
    for path in (tmp_path / "b" / "segments").glob("rows-0*"):
        data = bytearray(path.read_bytes())
        data[5_000] ^= 1
        path.write_bytes(data)
    with (
        TransitionBuffer.open(tmp_path / "b", dram="640KiB") as buffer,
        pytest.raises(CorruptionError, match="rows-0"),
    ):
        [buffer.sample() for _ in range(300)]


def test_a_damaged_transition_costs_the_batches_that_draw_it(tmp_path: Path) -> None:
    with TransitionBuffer(tmp_path / "b", **SETTINGS | {"capacity": 3000}) as buffer:
        for _ in range(8):  # as many small parts as the next call joins
            buffer.add(transitions(buffer.added, 10))
            buffer.checkpoint()
    (damaged,) = (tmp_path / "b" / "segments").glob("rows-0*")
    data = bytearray(damaged.read_bytes())
    data[1_000] ^= 1
    damaged.write_bytes(data)
    told, found = 0, []
    for _ in range(3):
        with TransitionBuffer.open(tmp_path / "b", dram="640KiB") as buffer:
            for _ in range(12):
                try:
                    batch = buffer.sample()
                except CorruptionError as error:
                    assert damaged.name in str(error)  # noqa: PT017
                    told += 1
                else:
                    assert (batch["pixels"] == (batch["number"] % 251)[:, None]).all()
                    found.append(tuple(batch.numbers))
                buffer.add(transitions(buffer.added, 5))
                buffer.checkpoint()
    assert told
    assert len(set(found)) == len(found) >= 10
    with TransitionBuffer.open(tmp_path / "b", dram="640KiB") as buffer:
        assert buffer.added == 8 * 10 + 36 * 5
        assert buffer.stats()["stored"] == buffer.added


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 99), ("version", "1"), ("capacity", 0), ("capacity", 2**40), ("fields", []),
        ("fields", [["a", "O", []]]), ("fields", [["a", "<i8", [-1]]]), ("draw", {"kind": "x"}), ("draw", 3),
        ("draw", {"kind": "prioritised", "alpha": -1, "beta": 0.4, "epsilon": 1e-6}), ("runs", {"kind": "nstep"}),
        ("runs", {"kind": "slices", "length": 10**12, "padded": True}), ("stop", 10**15), ("stop", 1),
        ("parts", []), ("parts", [[0, 5]]), ("parts", [[0, 260], [270, 5]]), ("waiting", [10**9]), ("waiting", [3]),
        ("ends", ["nothing"]), ("uniforms", -1), ("largest", "x"), ("open_steps", None),
    ],
)  # fmt: skip
def test_a_description_is_not_believed(tmp_path: Path, name: str, value: Any) -> None:
    with TransitionBuffer(tmp_path / "b", **SETTINGS) as buffer:
        step(buffer)
        step(buffer)
        buffer.checkpoint()
    with Store.open(tmp_path / "b", KIND, writable=True) as store, store.begin() as tx:
        meta = json.loads(store.get(META) or b"")
        tx.put(META, json.dumps(meta | {name: value}).encode())
        tx.commit()
    with pytest.raises((MemhierError, ValueError)) as refused:
        TransitionBuffer.open(tmp_path / "b", dram="640KiB").close()
    assert isinstance(refused.value, CorruptionError | FormatError), refused.value


LEARNER = """
import sys, time
import numpy as np
sys.path.insert(0, sys.argv[2])
from test_replay_transitions_faults import SETTINGS, step
from memhier.recsys.replay.transitions import TransitionBuffer

place = sys.argv[1]
with TransitionBuffer.open(place, dram="640KiB") as buffer:
    for _ in range(10_000):
        print(buffer.added, step(buffer), flush=True)
        if buffer.added % 390 == 0:
            buffer.checkpoint()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
def test_killed_at_any_time_it_goes_on(tmp_path: Path) -> None:
    TransitionBuffer(tmp_path / "b", **SETTINGS).close()
    told: dict[str, str] = {}
    for kill in range(6):
        command = [sys.executable, "-c", LEARNER, str(tmp_path / "b"), str(Path(__file__).parent)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(7 + 5 * kill):
            number, _, batch = child.stdout.readline().partition(" ")
            # The same batch whenever the same step is taken again.
            assert told.setdefault(number, batch) == batch
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert len(told) > 30


MEMORY = """
import sys, tempfile
import numpy as np
from memhier.recsys.replay.transitions import Prioritised, NStep, TransitionBuffer

def private():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def batch(first, count):
    numbers = np.arange(first, first + count)
    return {"number": numbers, "x": np.ones((count, 1000), np.float32), "reward": np.ones(count, np.float32),
            "done": numbers % 50 == 49}

schema = {"number": "int64", "x": ("float32", 1000), "reward": "float32", "done": "bool"}

def use(place, capacity, dram, turns):
    with TransitionBuffer(place, capacity=capacity, schema=schema, dram=dram, draw=Prioritised(), runs=NStep(3)) as b:
        most = 0
        for turn in range(turns):
            b.add(batch(b.added, 50))
            for _ in range(3):
                found = b.sample()
                b.update_priorities(found.numbers, np.ones(32))
            if turn % 40 == 39:
                b.checkpoint()
            most = max(most, private())
        return most

use(sys.argv[1] + "/warm", 3000, "4MiB", 60)
before = private()
budget = 48 * 2**20
most = use(sys.argv[1] + "/b", 120_000, budget, 440)
print((most - before) / budget)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_private_memory_is_within_the_budget(tmp_path: Path) -> None:
    """Some ten times as many bytes of transitions as the budget: room for 120,000 of 4 KB in 48 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert float(done.stdout) < 1.05
