"""Writes past the page cache: the same bytes as through it, from buffers that rest while they are written."""

import errno
import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from memhier.files import Buffer, MemoryFiles, RealFiles, read_file
from memhier.store.store import Store


class SlowFiles(RealFiles):
    """Writes of direct files take a while, as on a slow device, and read their buffer at the end of it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def open(self, path, mode):  # type: ignore[no-untyped-def]
        file = super().open(path, mode)
        if mode == "d":
            pwrite = file.pwrite

            def slowly(data: Buffer, offset: int) -> None:
                self.threads.add(threading.get_ident())
                time.sleep(0.02)
                pwrite(data, offset)

            file.pwrite = slowly  # type: ignore[method-assign]
        return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"  # on a disk: tmpfs may have no direct writes


@pytest.mark.parametrize("size", [0, 1, 4096, 2**20, 3 * 2**20 + 97])
def test_the_same_bytes(root: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    files = SlowFiles()
    with Store.create(root, "test", files=files) as store:
        with store.begin() as tx:
            writer = tx.segment("data", direct=True)
            for start in range(0, size, 700_001):
                writer.append(data[start : start + 700_001])
            assert writer.memory_bytes < 3 * 2**20 + 2**16
            length, checksums = writer.flush()
            assert length == size // 4096 * 4096 == 4096 * len(checksums)
            assert read_file(files, str(writer.path)) == data[:length]
            tx.commit()
        assert store.read_segment("data").tobytes() == data
        assert store.check() == []
    assert threading.get_ident() not in files.threads


def test_a_failed_write_aborts(root: Path) -> None:
    class Full(SlowFiles):
        def open(self, path, mode):  # type: ignore[no-untyped-def]
            file = super().open(path, mode)
            if mode == "d":

                def fail(data: Buffer, offset: int) -> None:
                    raise OSError(errno.ENOSPC, "full", path)

                file.pwrite = fail
            return file

    with Store.create(root, "test", files=Full()) as store:
        writer = store.begin().segment("data", direct=True)
        with pytest.raises(OSError, match="full"):
            writer.append(bytes(4 * 2**20))
        assert list((root / "segments").iterdir()) == []
        with store.begin() as tx:
            tx.segment("data").append(b"after")
            tx.commit()
        assert store.read_segment("data").tobytes() == b"after"


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
