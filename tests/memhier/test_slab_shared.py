"""Slabs that other processes read: attaching, workers, owners that end, rows that are written meanwhile."""

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from memhier.cache.slab import Slab
from memhier.errors import FormatError

FIELDS = np.dtype([("weight", "<f4", (5,)), ("step", "<u2")])
linux_only = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared slabs need Linux")


def random_rows(seed: int, count: int) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = np.random.default_rng(seed).integers(1, 100, 44 * count, np.uint8).view(FIELDS)
    return rows.reshape(count, 2)


@linux_only
def test_attached_slab_reads_and_cannot_write() -> None:
    slab = Slab(97, FIELDS, (2,), shared=True)
    slab.scatter(np.arange(97), random_rows(0, 97))
    assert slab.name is not None
    for other in (Slab.attach(slab.name), pickle.loads(pickle.dumps(slab))):
        assert (other.slots, other.dtype, other.shape, other.name) == (97, FIELDS, (2,), slab.name)
        assert other.memory_bytes == 0
        assert other.rows.tobytes() == slab.rows.tobytes()
        with pytest.raises(PermissionError, match="only its owner writes"):
            other.scatter([1], random_rows(1, 1))
        with pytest.raises(PermissionError, match="only its owner writes"), other.writing([1]):
            pass
        slab.scatter([5], random_rows(2, 1))
        rows, versions = other.gather_versioned([5])
        assert rows.tobytes() == random_rows(2, 1).tobytes()
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
    with mock.patch("memhier.cache.slab_memory._MAGIC", b"mhslab00"):
        slab = Slab(3, np.float32, shared=True)
    with pytest.raises(FormatError, match="mhslab00"):
        Slab.attach(str(slab.name))


@pytest.mark.long
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
from memhier.cache.slab import Slab

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
    print([results.get(timeout=800) for _ in workers])
    for worker in workers:
        worker.join()
    print([worker.exitcode for worker in workers])
"""


def run(script: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)


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
from memhier.cache.slab import Slab
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
from memhier.cache.slab import Slab
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
from memhier.cache.slab import Slab
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
