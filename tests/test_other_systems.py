"""The import and the basic paths where the system lacks calls of Linux: macOS and Windows, imitated.

Each runs in a child that loses modules, functions and flags before it imports memhier. It cannot show how those systems
themselves behave. The replay buffer needs a memory file, which only Linux has.
"""

import subprocess
import sys
from pathlib import Path

import pytest

LOSE = """
import mmap, os, sys
import lmdb, numpy, faiss, tqdm, signal, subprocess, tempfile, multiprocessing, concurrent.futures.thread, ctypes
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
for name in {modules!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in {calls!r}:
    if hasattr(os, name): delattr(os, name)
for name in {flags!r}:
    if hasattr(mmap, name): delattr(mmap, name)
"""
LOCKS = """
import types
held = {}
close = os.close
def closing(fd):
    if held.get(os.fstat(fd.__index__()).st_ino) == fd.__index__(): del held[os.fstat(fd.__index__()).st_ino]
    close(fd)
def locking(fd, mode, count):
    place = os.fstat(fd).st_ino
    assert os.lseek(fd, 0, os.SEEK_CUR) > os.fstat(fd).st_size
    if place in held: raise PermissionError(13, "locked")
    held[place] = fd
os.close = closing
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
"""
USE = """
from pathlib import Path
import numpy as np
import memhier, memhier.ann, memhier.recsys, memhier.backend
assert memhier.backend.name == "python"
place = Path(sys.argv[1])
with memhier.Store.create(place / "store", kind="test") as store:
    with store.begin() as tx:
        tx.put("key", b"value"); tx.segment("s").append(np.arange(9000, dtype=np.uint8).view(np.uint8)); tx.commit()
    try: memhier.Store.open(place / "store", kind="test", writable=True)
    except memhier.LockedError: pass
    else: raise AssertionError("two writers")
with memhier.Store.open(place / "store", kind="test") as store:
    assert store.get("key") == b"value"
    with memhier.Reader() as reader:
        handle = store.attach("s", reader)
        assert reader.read(handle, [0, 4094, 8999], 1).ravel().tolist() == [0, 4094 % 256, 8999 % 256]
with memhier.Tiered(place / "tier", "rows", np.float32, 4, rows=20000, dram="9MiB", batch=1000) as tier:
    keys = np.arange(20000)
    for start in range(0, 20000, 1000):
        tier.scatter(keys[start:start + 1000], np.repeat(keys[start:start + 1000, None], 4, 1).astype("f4"))
    tier.checkpoint()
    assert tier.gather([3, 19999]).tolist() == [[3.0] * 4, [19999.0] * 4]
vectors = np.random.default_rng(0).normal(size=(500, 8)).astype("f4")
with memhier.ann.ZoomIndex.build(place / "index", vectors, dram="4MiB") as index:
    assert index.search(vectors[7], 1).ids.tolist() == [7]
    index.remove([7]); index.commit()
    assert index.search(vectors[7], 1).ids.tolist() != [7]
    assert index.check() == []
print("done")
"""
MAC = {
    "modules": (),
    "calls": ("O_DIRECT", "fdatasync", "posix_fadvise", "posix_fallocate", "memfd_create", "sched_getaffinity"),
    "flags": ("MADV_HUGEPAGE",),
}
WINDOWS = {
    "modules": ("fcntl", "resource", "termios", "pwd", "grp"),
    "calls": (*MAC["calls"], "fork", "register_at_fork", "preadv", "pread", "pwrite", "pwritev", "O_CLOEXEC",
              "O_DIRECTORY", "getloadavg", "sysconf", "statvfs", "getuid", "killpg", "posix_spawn", "uname"),
    "flags": (*MAC["flags"], "MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_ANON", "MAP_SHARED", "PROT_READ", "PROT_WRITE"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("system", ["mac", "windows"])
def test_basic_paths_need_no_call_of_linux(system: str, tmp_path: Path) -> None:
    lost = MAC if system == "mac" else WINDOWS
    code = LOSE.format(**lost) + (LOCKS if system == "windows" else "") + USE
    environment = {"MEMHIER_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_the_command_imports_without_modules_of_unix() -> None:
    modules = ("memhier.benchmarks.cli.index.command", "memhier.benchmarks.cli.replay.command",
               "memhier.benchmarks.cli.demo.command", "memhier.benchmarks.cli.simulate",
               "memhier.benchmarks.cli.probe", "memhier.benchmarks.cli.doctor.command")  # fmt: skip
    code = LOSE.format(modules=WINDOWS["modules"], calls=("register_at_fork",), flags=())
    code += "".join(f"import {name}\n" for name in modules) + "print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
