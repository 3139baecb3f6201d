"""Faults under the page reader: damaged and cut files, failing and short reads, signals, forks."""

import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from memhier import backend
from memhier.errors import ClosedError, CorruptionError
from memhier.io.kernels import crc32c_pages
from memhier.io.reader import ENGINES, PAGE_BYTES, Reader

SIZE = 60 * PAGE_BYTES + 777
OFFSETS = np.arange(0, SIZE - 900, 613)


def open_reader(engine: str, direct: bool | None = None, depth: int = 32) -> Reader:
    """Open a reader, or skip the test where this machine or backend does not have the engine."""
    if engine != "python" and backend.core is None:
        pytest.skip("needs the compiled core")
    try:
        return Reader(engine, depth, direct)
    except OSError as error:
        pytest.skip(f"no {engine} here: {error}")


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(11).bytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "pages.bin"
    path.write_bytes(content)
    return path


def checksums_of(content: bytes) -> np.ndarray:
    return crc32c_pages(content + bytes(-len(content) % PAGE_BYTES))


def check_rows(reader: Reader, handle: int, content: bytes) -> None:
    rows = reader.read(handle, OFFSETS, 900)
    assert all(row.tobytes() == content[at : at + 900] for row, at in zip(rows, OFFSETS.tolist(), strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page", [0, 33, SIZE // PAGE_BYTES])
def test_a_flipped_bit_is_found(engine: str, page: int, path: Path, content: bytes) -> None:
    at = page * PAGE_BYTES + 700
    damaged = bytearray(content)
    damaged[at] ^= 4
    path.write_bytes(damaged)
    with open_reader(engine) as reader:
        sums = checksums_of(content)
        handle = reader.add(path, checksums=sums)
        found = int(checksums_of(bytes(damaged))[page])
        words = rf"pages\.bin: page {page} .*0x{found:08x}, committed 0x{int(sums[page]):08x}"
        for _ in range(30):  # a fault gives every buffer back
            with pytest.raises(CorruptionError, match=words):
                reader.read(handle, OFFSETS, 900)
        elsewhere = [offset for offset in range(0, SIZE - 4096, 4096) if abs(offset - at) > 2 * 4096]
        rows = reader.read(handle, elsewhere, 4096)
        assert all(row.tobytes() == content[o : o + 4096] for row, o in zip(rows, elsewhere, strict=True))
        path.write_bytes(content)
        check_rows(reader, handle, content)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("size", [0, 100, 4096, 20_000, SIZE - 1])
def test_a_file_cut_short_is_found(engine: str, direct: bool | None, size: int, path: Path, content: bytes) -> None:
    with open_reader(engine, direct) as reader:
        handle = reader.add(path)
        os.truncate(path, size)
        with pytest.raises(CorruptionError, match=rf"pages\.bin: the file ends at byte {size:,}, but {SIZE:,}"):
            reader.read(handle, [SIZE - 1000], 1000)
        with pytest.raises(CorruptionError, match="cut short"):
            reader.read(handle, np.append(OFFSETS, SIZE - 900), 900)
        whole = size // PAGE_BYTES * PAGE_BYTES  # the pages before are still what they were
        if whole:
            assert reader.read(handle, [whole - 900], 900).tobytes() == content[whole - 900 : whole]
        path.write_bytes(content)
        check_rows(reader, handle, content)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [None, False])
def test_a_failed_read_names_error_and_file(
    engine: str, direct: bool | None, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_file = [], os.open

    def noted(*arguments: Any) -> int:
        opened.append(open_file(*arguments))
        return opened[-1]

    with open_reader(engine, direct) as reader:
        good = reader.add(path)
        monkeypatch.setattr(os, "open", noted)
        bad = reader.add(path)
        monkeypatch.undo()
        folder = os.open(path.parent, os.O_RDONLY)
        os.dup2(folder, opened[-1])  # reading from a folder fails
        os.close(folder)
        files = np.where(np.arange(len(OFFSETS)) % 7, good, bad).astype(np.int32)
        for _ in range(3):
            with pytest.raises(OSError, match=r"pages\.bin") as failed:
                reader.read(files, OFFSETS, 900)
            assert failed.value.errno in (errno.EISDIR, errno.EINVAL)
            assert failed.value.filename == str(path)
        check_rows(reader, good, content)


SHIM = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
// Every read is interrupted, refused or cut to an odd length, by turns.
static unsigned turn;
extern "C" unsigned shim_turns() { return turn; }
extern "C" ssize_t preadv(int fd, const iovec* parts, int count, off_t offset) {
  const unsigned now = __atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED);
  static const auto real = reinterpret_cast<ssize_t (*)(int, const iovec*, int, off_t)>(dlsym(RTLD_NEXT, "preadv"));
  if (now % 5 == 1) { errno = EINTR; return -1; }
  if (now % 5 == 2) { errno = EAGAIN; return -1; }
  iovec part = parts[0];
  part.iov_len = now % 5 == 3 && !getenv("SHIM_DIRECT") ? 1 + part.iov_len / 3 : (part.iov_len + 1) / 2;
  if (getenv("SHIM_DIRECT")) part.iov_len = (part.iov_len + 511) / 512 * 512;
  (void)count;
  return real(fd, &part, 1, offset);
}
extern "C" ssize_t preadv64(int fd, const iovec* parts, int count, off_t offset) {
  return preadv(fd, parts, count, offset);
}
"""
READ_UNDER_SHIM = """
import ctypes, sys, numpy as np
from memhier.io.reader import Reader
from memhier.io.kernels import crc32c_pages
path, direct = sys.argv[1], sys.argv[2] == "direct"
content = open(path, "rb").read()
with Reader("threads", 8, direct) as reader:
    handle = reader.add(path, checksums=crc32c_pages(content + bytes(-len(content) % 4096)))
    for length in (1, 900, 4096, 100_000, len(content)):
        offsets = np.arange(0, len(content) - length + 1, max(1, (len(content) - length) // 50))
        rows = reader.read(handle, offsets, length)
        assert all(row.tobytes() == content[at : at + length] for row, at in zip(rows, offsets.tolist()))
    assert ctypes.CDLL(None).shim_turns() > 2 * reader.stats()["reads"]
"""


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ and LD_PRELOAD")
def test_short_interrupted_and_refused_reads_are_resumed(path: Path, tmp_path: Path) -> None:
    source, shim = tmp_path / "shim.cpp", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    with open_reader("threads") as reader:
        reader.add(path)
        modes = ["direct", "buffered"] if reader.stats()["direct"] else ["buffered"]
    for mode in modes:
        preloaded = ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(shim)])  # a sanitizer comes first
        environment = {**os.environ, "LD_PRELOAD": preloaded, "MEMHIER_IO": ""}
        # Direct reads can only be cut at blocks.
        environment |= {"SHIM_DIRECT": "1"} if mode == "direct" else {}
        command = [sys.executable, "-c", READ_UNDER_SHIM, str(path), mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
        assert done.returncode == 0, done.stderr


def test_python_resumes_short_reads(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    for direct in (None, False):
        with Reader("python", direct=direct) as reader:
            handle = reader.add(path)
            unit = 512 if reader.stats()["direct"] else 100
            with monkeypatch.context() as patched:
                patched.setattr(os, "preadv", lambda fd, parts, at, unit=unit: real(fd, [parts[0][:unit]], at))
                check_rows(reader, handle, content)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_storm_of_signals(engine: str, path: Path, content: bytes) -> None:
    caught = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught += 1

    former = signal.signal(signal.SIGALRM, count)
    try:
        with open_reader(engine) as reader:
            handle = reader.add(path, checksums=checksums_of(content))
            signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
            while caught < 100:
                check_rows(reader, handle, content)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


class Stop(Exception):
    """The exception that the signal handler below raises."""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_ends_a_long_batch(engine: str, path: Path, content: bytes) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    former = signal.signal(signal.SIGALRM, stop)
    offsets = np.random.default_rng(5).integers(0, SIZE - 8, 2_000_000)
    out = np.zeros((len(offsets), 8), np.uint8)
    try:
        # One read at a time, so that Python's one thread is there before the signal: threading's start() breaks on one.
        with open_reader(engine, depth=1) as reader:
            handle = reader.add(path)
            check_rows(reader, handle, content)

            def read_and_be_interrupted() -> None:
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                reader.read(handle, offsets, 8, out)

            with pytest.raises(Stop):
                read_and_be_interrupted()
            assert not out[-1].any()  # it did not run to its end
            check_rows(reader, handle, content)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("startable", [0, 1])
def test_threads_that_cannot_be_started_are_done_without(
    startable: int, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def start_few(thread: threading.Thread) -> None:
        if len(started) == startable:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with open_reader("python") as reader:
        handle = reader.add(path, checksums=checksums_of(content))
        monkeypatch.setattr(threading.Thread, "start", start_few)
        check_rows(reader, handle, content)
        monkeypatch.undo()
        check_rows(reader, handle, content)


@pytest.mark.parametrize("error", [RuntimeError("cannot schedule"), Stop()])
def test_why_a_batch_ended_is_not_mistaken_for_a_close(
    error: Exception, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that another thread closes says so; a signal that comes at that time is still the signal."""
    with open_reader("python") as reader:
        handle = reader.add(path)

        def submit(*_: object) -> None:
            closing = threading.Thread(target=reader.close)
            closing.start()
            closing.join()
            raise error

        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
        with pytest.raises(Stop if isinstance(error, Stop) else ClosedError):
            check_rows(reader, handle, content)


def in_child(work: object) -> int:
    """Run a function in a forked child and return its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # newer Pythons warn of forks beside threads: that is the test
        child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs must not hang the suite
        code = 1
        try:
            work()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_reads_on_its_own(engine: str, path: Path, content: bytes) -> None:
    stopping = threading.Event()
    failures: list[BaseException] = []
    with open_reader(engine) as reader:
        handle = reader.add(path, checksums=checksums_of(content))
        check_rows(reader, handle, content)

        def keep_busy() -> None:
            try:
                while not stopping.is_set():
                    check_rows(reader, handle, content)
            except BaseException as error:
                failures.append(error)

        def child() -> None:
            assert reader.engine == engine
            check_rows(reader, handle, content)
            other = reader.add(path)
            assert in_child(lambda: check_rows(reader, other, content)) == 0
            reader.close()
            reader.close()

        threads = [threading.Thread(target=keep_busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            # A child that never reads, one that does and has a child, and one that only closes.
            assert [in_child(lambda: reader.memory_bytes), in_child(child), in_child(reader.close)] == [0, 0, 0]
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert not failures
        check_rows(reader, handle, content)


def test_files_in_memory(content: bytes) -> None:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm here")
    path = folder / f"memhier-test-{os.getpid()}"
    path.write_bytes(content)
    try:
        for engine in ENGINES if backend.core is not None else ("python",):
            with open_reader(engine) as reader:
                check_rows(reader, reader.add(path, checksums=checksums_of(content)), content)
    finally:
        path.unlink()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("refused_at", ["open", "read"])
def test_a_file_system_without_direct_reads(
    engine: str, refused_at: str, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_open(name: str, flags: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "no direct I/O", name)
        return real_open(name, flags)

    def refuse_read(fd: int, parts: list[mmap.mmap], offset: int) -> int:
        raise OSError(errno.EINVAL, "no direct I/O")

    with monkeypatch.context() as patched:
        patched.setattr(
            os, "open" if refused_at == "open" else "preadv", refuse_open if refused_at == "open" else refuse_read
        )
        with open_reader(engine, direct=True) as reader, pytest.raises(OSError, match="no direct I/O") as refused:
            reader.add(path)
        assert refused.value.filename == str(path)
        with open_reader(engine) as reader:
            handle = reader.add(path, checksums=checksums_of(content))
            patched.undo()
            assert reader.stats()["direct"] is False
            assert reader.stats()["buffered_files"] == 1
            # On aio this is a batch for two engines: direct reads, and threads for the file that would block them.
            both = np.where(np.arange(len(OFFSETS)) % 2, handle, reader.add(path)).astype(np.int32)
            assert reader.stats()["buffered_files"] in (1, 2)
            rows = reader.read(both, OFFSETS, 900)
            assert all(row.tobytes() == content[at : at + 900] for row, at in zip(rows, OFFSETS.tolist(), strict=True))
