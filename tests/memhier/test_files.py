"""The file layers: the real one and that in memory do the same; faults come as ordered; crashes lose unsynced bytes."""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.files import Fault, FaultyFiles, Files, MemoryFiles, RealFiles, SimulatedCrash, read_file


@pytest.fixture(params=["real", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    """A file layer and an empty directory in it."""
    if request.param == "real":
        return RealFiles(), str(tmp_path)
    files = MemoryFiles()
    files.make_directory("/d")
    return files, "/d"


def test_modes(place: tuple[Files, str]) -> None:
    files, root = place
    path = f"{root}/file"
    with pytest.raises(FileNotFoundError) as missing:
        files.open(path, "r")
    assert missing.value.filename == path
    with files.open(path, "x") as file:
        assert [file.append(b"abc"), file.append(memoryview(b"defg"))] == [0, 3]
    with pytest.raises(FileExistsError):
        files.open(path, "x")
    with files.open(path, "a") as file:
        assert file.append(b"h") == 7
        file.pwrite(b"XY", 1)
    assert read_file(files, path) == b"aXYdefgh"
    with files.open(path, "w") as file:
        assert file.size() == 0
        file.pwrite(b"z", 3)
        assert file.append(b"e") == 4
    assert read_file(files, path) == b"\0\0\0ze"
    with pytest.raises(FileNotFoundError):
        files.open(f"{root}/missing/file", "w")


def test_reading_stops_at_the_end(place: tuple[Files, str]) -> None:
    files, root = place
    with files.open(f"{root}/file", "x") as file:
        file.append(bytes(range(97)))
        buffer = bytearray(b"\xff" * 10)
        assert file.read_into(buffer, 90) == 7
        assert bytes(buffer) == bytes(range(90, 97)) + b"\xff" * 3
        assert file.read_into(buffer, 97) == 0
        assert file.read_into(memoryview(buffer)[3:5], 1) == 2
        assert buffer[3:5] == b"\1\2"
        assert file.read_into(bytearray(), 0) == 0


def test_names(place: tuple[Files, str]) -> None:
    files, root = place
    for name in ("b", "a"):
        with files.open(f"{root}/{name}", "x") as file:
            file.append(name.encode())
    files.make_directory(f"{root}/c")
    files.make_directory(f"{root}/c")
    assert files.list(root) == ["a", "b", "c"]
    assert files.list(f"{root}/c") == []
    old = files.open(f"{root}/b", "r")
    files.rename(f"{root}/a", f"{root}/b")
    assert files.list(root) == ["b", "c"]
    assert read_file(files, f"{root}/b") == b"a"
    contents = bytearray(1)
    assert (old.read_into(contents, 0), bytes(contents)) == (1, b"b"), "a replaced file stays readable while it is open"
    old.close()
    files.remove(f"{root}/b")
    assert not files.exists(f"{root}/b")
    assert files.exists(f"{root}/c")
    files.sync_directory(root)
    for call in (lambda: files.remove(f"{root}/b"), lambda: files.rename(f"{root}/b", f"{root}/a")):
        with pytest.raises(FileNotFoundError):
            call()
    with pytest.raises(FileNotFoundError):
        files.list(f"{root}/b")
    with pytest.raises(FileNotFoundError):
        files.sync_directory(f"{root}/b")
    with files.open(f"{root}/a", "x"), pytest.raises(NotADirectoryError):
        files.list(f"{root}/a")


def test_locks(place: tuple[Files, str]) -> None:
    files, root = place
    first = files.open(f"{root}/lock", "a")
    second, third = files.open(f"{root}/lock", "r"), files.open(f"{root}/lock", "r")
    assert second.lock(exclusive=False)
    assert third.lock(exclusive=False)
    assert not first.lock(exclusive=True)
    second.close()
    assert not first.lock(exclusive=True)
    third.close()
    assert first.lock(exclusive=True)
    with files.open(f"{root}/lock", "r") as late:
        assert not late.lock(exclusive=False)
        first.close()
        assert late.lock(exclusive=False)


# Each step: (operation, offset or length, bytes).
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "pwrite", "truncate", "sync", "reopen"]), st.integers(0, 40), st.binary(max_size=30)
    )
)


@settings(max_examples=40, deadline=None)
@given(_STEPS)
def test_real_and_memory_equal_a_bytearray(steps: list[tuple[str, int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory = MemoryFiles()
        places: list[tuple[Files, str]] = [(RealFiles(), f"{folder}/f"), (memory, "/f")]
        opened = [files.open(path, "x") for files, path in places]
        expected = bytearray()
        for operation, number, data in steps:
            if operation == "append":
                assert {file.append(data) for file in opened} == {len(expected)}
                expected += data
            elif operation == "pwrite":
                for file in opened:
                    file.pwrite(data, number)
                if data:
                    expected.extend(bytes(max(0, number + len(data) - len(expected))))
                    expected[number : number + len(data)] = data
            elif operation == "truncate":
                for file in opened:
                    file.truncate(number)
                expected.extend(bytes(max(0, number - len(expected))))
                del expected[number:]
            elif operation == "sync":
                for file in opened:
                    file.fdatasync()
            else:
                for file in opened:
                    file.close()
                opened = [files.open(path, "a") for files, path in places]
            assert {file.size() for file in opened} == {len(expected)}
        for file in opened:
            file.close()
        assert [read_file(files, path) for files, path in places] == [bytes(expected)] * 2


def test_short_calls_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(1000)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: pwrite(fd, view[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:3]], offset))
    with RealFiles().open(str(tmp_path / "file"), "x") as file:
        file.append(data)
    assert (tmp_path / "file").read_bytes() == data
    assert read_file(RealFiles(), str(tmp_path / "file")) == data


def test_direct_files_take_any_write(tmp_path: Path) -> None:
    """A write that the device cannot take directly goes through the page cache, as do all later ones."""
    path = str(tmp_path / "file")
    page = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    page[:] = 7
    with RealFiles().open(path, "d") as file:
        assert file.append(page.data) == 0
        assert file.append(b"odd") == 8192
        file.fdatasync()
    assert read_file(RealFiles(), path) == b"\7" * 8192 + b"odd"
    for files, name in ((RealFiles(), path), (MemoryFiles(), "/file")):
        if isinstance(files, MemoryFiles):
            files.open(name, "d").append(b"1")
        with pytest.raises(FileExistsError):
            files.open(name, "d")


def test_faults_of_a_descriptor_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = str(tmp_path / "file")
    with RealFiles().open(path, "x") as file:
        for name in ("pwrite", "ftruncate", "preadv"):
            monkeypatch.setattr(os, name, refuse)
        calls: list[Callable[[], object]] = [
            lambda: file.append(b"a"),
            lambda: file.truncate(1),
            lambda: file.read_into(bytearray(1), 0),
        ]
        for call in calls:
            with pytest.raises(OSError, match="error") as error:
                call()
            assert (error.value.errno, error.value.filename) == (errno.EIO, path)


def test_a_forked_child_does_not_keep_a_lock(tmp_path: Path) -> None:
    files, path = RealFiles(), str(tmp_path / "lock")
    file = files.open(path, "a")
    assert file.lock(exclusive=True)
    (started, start), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.write(start, b".")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(started, 1)
        with files.open(path, "r") as other:
            assert not other.lock(exclusive=False)
            file.close()
            assert other.lock(exclusive=False)
    finally:
        for end in (started, start, wait, go):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0


def _write_two(files: Files) -> None:
    with files.open("/a", "x") as file:
        file.append(b"1234")
        file.fdatasync()
    files.rename("/a", "/b")
    files.sync_directory("/")


def test_faults_come_at_the_chosen_call() -> None:
    counting = FaultyFiles(MemoryFiles())
    _write_two(counting)
    assert [call.split()[0] for call in counting.calls] == ["open-x", "append", "fdatasync", "rename", "sync_directory"]
    for fault, code in ((Fault.EIO, errno.EIO), (Fault.ENOSPC, errno.ENOSPC), (Fault.SHORT_WRITE, errno.ENOSPC)):
        for n in range(1, 6):
            memory = MemoryFiles()
            faulty = FaultyFiles(memory, n, fault)
            with pytest.raises(OSError, match=os.strerror(code)) as error:
                _write_two(faulty)
            assert error.value.errno == code
            assert error.value.filename in ("/a", "/b", "/")
            if fault is Fault.SHORT_WRITE and n == 2:
                assert read_file(memory, "/a") == b"12"
            faulty.list("/")  # it fails once


def test_after_a_crash_nothing_works_and_locks_are_gone() -> None:
    memory = MemoryFiles()
    faulty = FaultyFiles(memory, 3, Fault.CRASH)
    file = faulty.open("/lock", "a")
    assert file.lock(exclusive=True)
    with pytest.raises(SimulatedCrash):
        faulty.list("/")
    with pytest.raises(SimulatedCrash):
        file.append(b"a")
    with memory.open("/lock", "r") as other:
        assert other.lock(exclusive=True)


def _replace(files: Files, contents: bytes, skip: str) -> None:
    """Replace a file the safe way, but for one step."""
    with files.open("/new", "w") as file:
        for start in range(0, len(contents), 1000):
            file.append(contents[start : start + 1000])
        if skip != "fdatasync":
            file.fdatasync()
    files.rename("/new", "/file")
    if skip != "sync_directory":
        files.sync_directory("/")


def _states(skip: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield the possible contents of the file when the power fails after a replacement."""
    files = MemoryFiles()
    _replace(files, b"o" * 3000, "")
    _replace(files, b"n" * 3000, skip)
    for title, state in files.crashes():
        yield title, read_file(state, "/file") if state.exists("/file") else None


def test_crashes_find_the_missing_step() -> None:
    assert {contents for _, contents in _states("")} == {b"n" * 3000}
    assert {contents for _, contents in _states("sync_directory")} == {b"o" * 3000, b"n" * 3000}
    found = {contents for _, contents in _states("fdatasync")}
    lost, zeros, garbage, torn, reordered = b"", bytes(3000), b"\xa5" * 3000, b"n" * 2000, bytes(1000) + b"n" * 2000
    assert {lost, zeros, garbage, torn, reordered} <= found


def test_a_synced_directory_is_durable_and_nothing_else() -> None:
    files = MemoryFiles()
    files.make_directory("/d")
    files.sync_directory("/")
    with files.open("/d/file", "x") as file:
        file.append(b"abc")
        file.fdatasync()
    assert [state.list("/d") for _, state in files.crashes()] == [[], ["file"]]
    files.sync_directory("/d")
    assert [read_file(state, "/d/file") for _, state in files.crashes()] == [b"abc"]
    files.remove("/d/file")
    assert [state.list("/d") for _, state in files.crashes()] == [["file"], []]
