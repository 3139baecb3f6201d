"""Slab against a plain array; rows seen from other processes; reads that meet a write."""

import gc
import mmap
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import slab as slab_module
from memhier.errors import ClosedError, FormatError
from memhier.slab import Slab

FIELDS = np.dtype([("weight", "<f4", (5,)), ("state", "<f4"), ("step", "<u2")])
ROWS = [("<f4", (64,)), ("u1", (97,)), ("<f8", ()), ("<i2", (3, 5)), (FIELDS, ()), (FIELDS, (2,)), ("S3", (1,))]
linux_only = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared slabs need Linux")


def random_rows(seed: int, count: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    size = count * int(np.prod(shape)) * dtype.itemsize
    rows: np.ndarray[Any, Any] = np.random.default_rng(seed).integers(1, 100, size, np.uint8).view(dtype)
    return rows.reshape(count, *shape)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ROWS),
    st.sampled_from([1, 3, 97]),
    st.booleans() if hasattr(os, "memfd_create") else st.just(False),
    st.lists(st.lists(st.integers(0, 96), max_size=30), max_size=4),
)
def test_equals_a_plain_array(
    row: tuple[Any, tuple[int, ...]], slots: int, shared: bool, batches: list[list[int]]
) -> None:
    dtype, shape = row
    plain = np.zeros((slots, *shape), dtype)
    with Slab(slots, dtype, shape, shared=shared) as slab:
        for number, batch in enumerate(batches):
            index = np.array(batch, np.int64) % slots
            rows = random_rows(number, len(index), dtype, shape)
            slab.scatter(index, rows)
            for i, at in enumerate(index):
                plain[at] = rows[i]
            assert slab.rows.tobytes() == plain.tobytes()
            gathered = slab.gather(index)
            assert gathered.dtype == plain.dtype
            assert gathered.shape == (len(index), *shape)
            assert gathered.tobytes() == plain[index].tobytes()


def test_any_shape_and_layout_of_arguments() -> None:
    slab = Slab(97, np.int16, (3,))
    rows = random_rows(0, 2 * 24, np.int16, (3,)).reshape(12, 4, 3)[::2].transpose(1, 0, 2)
    slots = np.arange(48, dtype=np.uint8).reshape(6, 8)[:, ::2].T
    slab.scatter(slots, rows)
    assert (slab.gather(slots) == rows).all()
    assert (slab.rows[slots.astype(int)] == rows).all()
    assert slab.gather(5).shape == (3,)
    assert slab.gather([]).shape == (0, 3)
    assert slab.gather(np.empty((2, 0), int)).shape == (2, 0, 3)
    out = np.empty((4, 6, 3), np.int16)
    assert slab.gather(slots, out=out) is out
    assert (out == rows).all()


def test_memory_is_page_aligned_and_counted() -> None:
    page = mmap.PAGESIZE
    for slots, width in ((1, 1), (1024, 4), (1025, 4), (97, 999)):
        slab = Slab(slots, np.uint8, width)
        expected = page + -(-4 * slots // page) * page + -(-slots * width // page) * page
        assert slab.memory_bytes == expected == Slab.bytes_for(slots, np.uint8, width)
        assert slab.rows.ctypes.data % page == 0
        assert slab.row_bytes == width
        slab.close()
        assert slab.memory_bytes == 0


@pytest.mark.parametrize("slots", [[0, -1], [0, 10], [0, 2**62], np.array([0, 2**63], np.uint64), [0.0, 1.0], ["a"]])
def test_bad_slots_change_nothing(slots: Any) -> None:
    slab = Slab(10, np.float32, 2)
    slab.scatter(np.arange(10), np.ones((10, 2), np.float32))
    generations = slab.generations(np.arange(10))
    for call in (
        slab.gather,
        slab.gather_versioned,
        slab.generations,
        lambda s: slab.scatter(s, np.zeros((2, 2), "f4")),
    ):
        with pytest.raises((ValueError, TypeError), match="slots"):
            call(slots)
    assert (slab.rows == 1).all()
    assert (slab.generations(np.arange(10)) == generations).all()


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (np.zeros((2, 2)), TypeError, "float32, got float64"),
        (np.zeros((2, 3), np.float32), ValueError, r"\(2, 2\), got \(2, 3\)"),
        (np.zeros(2, np.float32), ValueError, r"\(2, 2\), got \(2,\)"),
        (np.zeros((1, 2), np.float32), ValueError, r"\(2, 2\), got \(1, 2\)"),
    ],
)
def test_unfit_rows(rows: Any, error: type[Exception], words: str) -> None:
    slab = Slab(10, np.float32, 2)
    with pytest.raises(error, match=words):
        slab.scatter([1, 2], rows)
    assert not slab.generations([1, 2]).any()


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.empty((2, 2)), TypeError),
        ([[0, 0], [0, 0]], TypeError),
        (np.empty((2, 3), np.float32), ValueError),
        (np.empty((2, 4), np.float32)[:, ::2], ValueError),
        (np.broadcast_to(np.float32(0), (2, 2)), ValueError),
    ],
)
def test_unfit_out(out: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="out: expected"):
        Slab(10, np.float32, 2).gather([1, 2], out=out)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, "f4"), ValueError, "slots=0"),
        ((2.0, "f4"), TypeError, r"slots=2\.0"),
        ((2, "O"), ValueError, "dtype=object"),
        ((2, "S0"), ValueError, "dtype="),
        ((2, "f4", (3, 0)), ValueError, r"shape=\(3, 0\)"),
        ((2, "f4", -1), ValueError, "shape=-1"),
        ((2, "f4", 1.5), ValueError, r"shape=1\.5"),
        ((2, ("f4", 3)), ValueError, "shape of a row as shape"),
    ],
)
def test_unfit_arguments(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Slab(*arguments)
    with pytest.raises(error, match=words):
        Slab.bytes_for(*arguments)


def test_rows_cannot_be_written_in_place() -> None:
    slab = Slab(3, np.float32, 2)
    with pytest.raises(ValueError, match="read-only"):
        slab.rows[0] = 1


def test_closed() -> None:
    slab = Slab(3, np.float32, 2)
    kept = slab.rows
    slab.close()
    slab.close()
    for call in (
        slab.gather,
        slab.gather_versioned,
        slab.generations,
        lambda s: slab.scatter(s, np.zeros((1, 2), "f4")),
    ):
        with pytest.raises(ClosedError):
            call([0])
    with pytest.raises(ClosedError):
        _ = slab.rows
    assert (kept == 0).all()


def test_generations_count_writes() -> None:
    slab = Slab(5, np.uint8)
    slab.scatter([1, 3, 1], np.zeros(3, np.uint8))
    slab.scatter([3], np.zeros(1, np.uint8))
    assert slab.generations(np.arange(5)).tolist() == [0, 2, 0, 4, 0]
    slab._generations[3] = 2**32 - 2
    slab.scatter([3], np.zeros(1, np.uint8))
    assert slab.generations(3) == 0


def test_a_row_written_while_read_is_reported() -> None:
    slab = Slab(4, np.uint8, 3)
    ones = np.ones((1, 3), np.uint8)
    _, versions = slab.gather_versioned([2, 1])
    assert versions.tolist() == [0, 0]
    slab.scatter([1], ones)
    fences: list[Any] = []

    def write_at_first_fence() -> None:
        fences.append(None)
        if len(fences) == 1:
            slab.scatter([1], ones)

    with mock.patch.object(slab_module, "_fence", write_at_first_fence):
        _, versions = slab.gather_versioned([2, 1, 3])
    assert (versions % 2).tolist() == [0, 1, 0]
    rows, versions = slab.gather_versioned([2, 1])
    assert versions.tolist() == [0, 4]
    assert (rows[1] == 1).all()


def test_a_row_read_while_written_is_reported() -> None:
    slab = Slab(4, np.uint8, 3)
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(slab.generations([1, 2]).tolist())

    with mock.patch.object(slab_module, "_fence", look):
        slab.scatter([1], np.ones((1, 3), np.uint8))
    assert seen == [[1, 0], [1, 0]]
    assert slab.generations(1) == 2


def test_a_write_that_broke_off_leaves_the_row_marked_until_it_is_written_again() -> None:
    slab = Slab(4, np.uint8, 3)
    with mock.patch.object(slab_module, "_fence", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        slab.scatter([1], np.ones((1, 3), np.uint8))
    assert slab.generations(1) % 2 == 1
    slab.scatter([1], np.ones((1, 3), np.uint8))
    assert slab.generations(1) % 2 == 0


def test_threads_that_write_the_same_rows() -> None:
    """Rows are written whole: each ends as one writer's, with as many generations as writes."""
    slab = Slab(16, np.int64, 100)

    def work(which: int) -> None:
        for _ in range(50):
            slab.scatter(np.arange(16), np.full((16, 100), which))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (slab.rows == slab.rows[:, :1]).all()
    assert slab.generations(np.arange(16)).tolist() == [2 * 50 * 4] * 16


def test_a_private_slab_does_not_pickle() -> None:
    with pytest.raises(TypeError, match="shared=True"):
        pickle.dumps(Slab(3, np.float32))


@linux_only
def test_attached_slab_reads_and_cannot_write() -> None:
    slab = Slab(97, FIELDS, (2,), shared=True)
    slab.scatter(np.arange(97), random_rows(0, 97, FIELDS, (2,)))
    assert slab.name is not None
    for other in (Slab.attach(slab.name), pickle.loads(pickle.dumps(slab))):
        assert (other.slots, other.dtype, other.shape, other.name) == (97, FIELDS, (2,), slab.name)
        assert other.memory_bytes == 0
        assert other.rows.tobytes() == slab.rows.tobytes()
        with pytest.raises(PermissionError, match="only its owner writes"):
            other.scatter([1], random_rows(1, 1, FIELDS, (2,)))
        slab.scatter([5], random_rows(2, 1, FIELDS, (2,)))
        rows, versions = other.gather_versioned([5])
        assert rows.tobytes() == random_rows(2, 1, FIELDS, (2,)).tobytes()
        assert versions[0] == slab.generations(5)
    kept = Slab.attach(slab.name)
    slab.close()
    assert kept.gather([5]).tobytes() == rows.tobytes()


@linux_only
def test_names_that_lead_nowhere() -> None:
    slab = Slab(3, np.float32, shared=True)
    name = str(slab.name)
    prefix, inode = name.rsplit(":", 1)
    with pytest.raises(FileNotFoundError, match="closed"):
        Slab.attach(f"{prefix}:{int(inode) + 1}")
    slab.close()
    with pytest.raises(FileNotFoundError) as caught:
        Slab.attach(name)
    assert caught.value.filename.startswith(f"/proc/{os.getpid()}/fd/")
    for bad in ("", "memhier-slab:1:2", "/etc/passwd", f"x{name}", None):
        with pytest.raises(ValueError, match="expected the name of a shared slab"):
            Slab.attach(bad)  # type: ignore[arg-type]


@linux_only
def test_another_layout_is_refused() -> None:
    with mock.patch("memhier._slab_memory._MAGIC", b"mhslab00"):
        slab = Slab(3, np.float32, shared=True)
    with pytest.raises(FormatError, match="mhslab00"):
        Slab.attach(str(slab.name))


@linux_only
def test_files_are_closed() -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with Slab(3, np.float32, shared=True) as slab:
            attached = Slab.attach(str(slab.name))
        attached.close()
        forgotten = Slab(3, np.float32, shared=True)
        del forgotten, slab, attached
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


WORKER = """
import multiprocessing, os, sys
import numpy as np
from memhier.slab import Slab

def read(slab, name, results):
    other = Slab.attach(name)
    same = other.rows.tobytes() == slab.rows.tobytes()
    try:
        slab.scatter([0], np.zeros((1, 5), np.int32))
        refused = False
    except PermissionError:
        refused = True
    results.put((bool(same), refused, slab.gather([7]).tolist()))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    slab = Slab(97, np.int32, 5, shared=True)
    slab.scatter(np.arange(97), np.arange(97 * 5, dtype=np.int32).reshape(97, 5))
    results = context.Queue()
    workers = [context.Process(target=read, args=(slab, slab.name, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    print([results.get(timeout=60) for _ in workers])
    for worker in workers:
        worker.join()
    print([worker.exitcode for worker in workers])
"""


def run(script: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@linux_only
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_read(tmp_path: Path, method: str) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKER)
    done = run(script, method)
    assert done.stderr == ""
    row = list(range(35, 40))
    assert done.stdout.splitlines() == [str([(True, True, [row])] * 2), "[0, 0]"]


PRIVATE = """
import os
import numpy as np
from memhier.slab import Slab
slab = Slab(3, np.int32, 2)
slab.scatter([0], np.array([[1, 2]], np.int32))
child = os.fork()
if child == 0:
    slab.scatter([0], np.array([[8, 9]], np.int32))
    os._exit(int(slab.gather([0])[0, 1]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), slab.gather([0]).tolist())
"""


def test_a_forked_child_has_its_own_private_rows(tmp_path: Path) -> None:
    script = tmp_path / "private.py"
    script.write_text(PRIVATE)
    done = run(script)
    assert (done.stdout, done.stderr) == ("9 [[1, 2]]\n", "")


KILLED = """
import os, sys, time
import numpy as np
from memhier.slab import Slab
slab = Slab(1000, np.int32, 100, shared=True)
slab.scatter([3], np.full((1, 100), 7, np.int32))
print(slab.name, flush=True)
time.sleep(100)
"""


@linux_only
def test_a_killed_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        attached = Slab.attach(name)
        owner.kill()
    assert (attached.gather([3]) == 7).all()
    with pytest.raises(FileNotFoundError):
        Slab.attach(name)


TORN = """
import os, sys
import numpy as np
from memhier.slab import Slab
slab = Slab.attach(sys.argv[1])
out = np.empty((8, 4096), np.int64)
whole = torn = 0
while whole < 2000:
    rows, versions = slab.gather_versioned(np.arange(8), out=out)
    good = versions % 2 == 0
    # Write number n fills a row with n, and leaves generation 2 n.
    assert (rows[good] == versions[good, None] // 2).all()
    whole += good.sum()
    torn += (~good).sum()
print("whole")
"""


@linux_only
def test_a_reader_beside_a_writer_never_takes_a_mixture_for_a_row(tmp_path: Path) -> None:
    script = tmp_path / "torn.py"
    script.write_text(TORN)
    slab = Slab(8, np.int64, 4096, shared=True)
    with subprocess.Popen([sys.executable, str(script), str(slab.name)], stdout=subprocess.PIPE, text=True) as reader:
        number = 0  # one row after the other, each filled with how often it was written
        while reader.poll() is None:
            number += 1
            slab.scatter([number % 8], np.full((1, 4096), 1 + number // 8 - (number % 8 == 0)))
        assert reader.stdout is not None
        assert reader.stdout.read() == "whole\n"
