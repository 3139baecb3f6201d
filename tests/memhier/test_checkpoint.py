"""Checkpoints: the image of one moment, whatever changes while it is saved; old or new after any crash."""

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.errors import ClosedError, CorruptionError, FormatError, LockedError
from memhier.files import Fault, FaultyFiles, File, Mode, RealFiles, SimulatedCrash
from memhier.io.reader import Reader
from memhier.store.store import Store
from memhier.table import checkpoint as checkpoint_module
from memhier.table.checkpoint import CheckpointWriter, read_checkpoint
from memhier.table.checkpoint_blocks import BlockTracker

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROWS = 97


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


def table(seed: int, width: int = 700, rows: int = ROWS) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)


class Gate:
    """Lets the saving thread append batches one by one."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.tickets = threading.Semaphore(0)
        self.append = writer._log.append
        writer._log.append = self._append  # type: ignore[method-assign]

    def _append(self, keys: Any, rows: NDArray[np.uint8]) -> None:
        assert self.tickets.acquire(timeout=800)
        self.append(keys, rows)

    def open(self, batches: int) -> None:
        for _ in range(batches):
            self.tickets.release()


ROW_SETS = st.lists(st.integers(0, ROWS - 1), max_size=12)


@settings(max_examples=40, deadline=None)
@given(
    width=st.sampled_from([1, 3, 700, 4096, 5001]),
    block=st.sampled_from([1, 4096, 9000, 70_000]),
    images=st.lists(st.tuples(ROW_SETS, st.lists(st.tuples(st.integers(0, 3), ROW_SETS), max_size=4)), max_size=4),
)
def test_an_image_is_that_of_its_moment(
    reader: Reader, width: int, block: int, images: list[tuple[list[int], list[tuple[int, list[int]]]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=FAST) as folder:
        patch.setattr(checkpoint_module, "_BATCH_BYTES", 2 * block)
        rows, seed = table(0, width), 0
        with (
            Store.create(Path(folder) / "s", KIND) as store,
            CheckpointWriter(store, "t", rows, reader, block_bytes=block, spare="2MiB") as writer,
        ):
            assert writer.write().blocks == len(writer._tracker)
            gate = Gate(writer)
            for before, during in images:
                seed += 1
                with writer.changing(before):
                    rows[before] = table(seed, width)[before]
                moment = rows.copy()
                saving = writer.start({"seed": b"%d" % seed})
                for batches, changed in during:
                    gate.open(batches)
                    seed += 1
                    with writer.changing(changed):
                        rows[changed] = table(seed, width)[changed]
                gate.open(200)
                saving.result(30)
                gate.tickets = threading.Semaphore(0)
                assert np.array_equal(read_checkpoint(store, "t", reader), moment)


def test_only_what_changed_is_saved(root: Path, reader: Reader) -> None:
    rows = table(0, 4096)
    with (
        Store.create(root, KIND) as store,
        CheckpointWriter(store, "t", rows, reader, block_bytes="8KiB") as writer,
    ):
        assert (writer.write().blocks, writer.write().blocks) == (49, 0)
        with writer.changing([[5, 4], [96, 5]]):
            rows[[4, 5, 96]] = 1
        saved = writer.write()
        assert (saved.blocks, saved.bytes) == (2, 16384)
        assert np.array_equal(read_checkpoint(store, "t", reader), rows)
        for turn in range(30):
            with writer.changing(np.arange(50)):
                rows[:50] = turn
            writer.write()
            assert sum(info.length for info in store.segments().values()) < 2.6 * rows.nbytes
        assert np.array_equal(read_checkpoint(store, "t", reader), rows)


def test_a_slab_is_saved_and_filled_again(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store, Slab(1000, np.float32, 6) as slab:
        slab.scatter(np.arange(1000), np.arange(6000, dtype=np.float32).reshape(1000, 6))
        with CheckpointWriter(store, "slab", slab.rows, reader) as writer:
            writer.write({"step": b"7"})
        filled = np.empty((1000, 6), np.float32)
        assert read_checkpoint(store, "slab", reader, filled) is filled
        assert np.array_equal(filled, slab.rows)
        assert store.get("step") == b"7"
        with CheckpointWriter(store, "slab", filled, reader, clean=True) as writer:
            assert writer.write().blocks == 0


def test_changes_beside_saves_with_few_spares(root: Path, reader: Reader) -> None:
    """A thread keeps all rows equal; every image has equal rows. One spare: it often waits for the saving thread."""
    rows = np.zeros((200, 1024), np.int32)
    over = threading.Event()
    with (
        Store.create(root, KIND) as store,
        CheckpointWriter(store, "t", rows, reader, block_bytes="8KiB", spare=1) as writer,
    ):

        def change() -> None:
            everything = np.arange(200)
            while not over.is_set():
                with writer.changing(everything):
                    for part in range(0, 200, 10):
                        rows[part : part + 10] += 1
                time.sleep(0)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            images: list[int] = []
            while len(images) < 15 or images[-1] == images[0]:
                writer.write()
                image = read_checkpoint(store, "t", reader).view(np.int32)
                assert (image == image[0, 0]).all()
                images.append(int(image[0, 0]))
        finally:
            over.set()
            thread.join()
        assert images == sorted(images)


@pytest.mark.parametrize("block_rows", [1, 10, 97])
def test_rows_that_are_changing_while_their_block_is_copied(block_rows: int) -> None:
    """What the copy holds of them is the moment of the image, and their spares are given back."""
    rows = table(0)
    moment = rows.copy()
    tracker = BlockTracker(rows, block_rows, ROWS, False)
    changed = np.arange(0, ROWS, 3).repeat(2)
    blocks = tracker.capture()
    assert blocks == -(-ROWS // block_rows)
    out = np.empty((4, 700 * block_rows), np.uint8)
    image = np.empty((blocks, 700 * block_rows), np.uint8)
    with tracker.changing(changed):
        rows[changed] += 1  # and the change is not over when the blocks are copied
        while len(numbers := tracker.take(out)):
            image[numbers] = out[: len(numbers)]
    image = image.reshape(-1, 700)
    assert np.array_equal(image[:ROWS], moment)
    assert not image[ROWS:].any()
    assert not np.array_equal(rows, moment)
    assert len(tracker._slots) == 0
    assert tracker.capture() == len(np.unique(changed // block_rows)), "the changes are for the next image"


def test_an_image_waits_for_the_end_of_a_change(root: Path, reader: Reader) -> None:
    rows = np.zeros((ROWS, 700), np.uint8)
    with Store.create(root, KIND) as store, CheckpointWriter(store, "t", rows, reader) as writer:
        writer.write()
        saving = threading.Thread(target=writer.write)
        with writer.changing([0, ROWS - 1]):
            rows[0] = 1
            saving.start()
            saving.join(0.1)
            with writer.changing([1]):
                rows[[1, ROWS - 1]] = 1
        saving.join()
        assert np.array_equal(read_checkpoint(store, "t", reader), rows)


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_at_every_call(root: Path, reader: Reader, fault: Fault) -> None:
    old = table(1)
    new = old.copy()
    new[[3, 50]] = table(2)[[3, 50]]

    def work(path: Path, files: FaultyFiles) -> None:
        rows = old.copy()
        with (
            Store.open(path, KIND, writable=True, files=files) as store,
            CheckpointWriter(store, "t", rows, reader, block_bytes=4096, clean=True) as writer,
        ):
            with writer.changing([3, 50]):
                rows[:] = new
            writer.write()

    with Store.create(root, KIND) as store, CheckpointWriter(store, "t", old, reader, block_bytes=4096) as writer:
        writer.write()
    counting = FaultyFiles(RealFiles())
    shutil.copytree(root, root.parent / "counted")
    work(root.parent / "counted", counting)
    seen = set()
    for call in range(1, len(counting.calls) + 1):
        path = root.parent / f"copy{call}"
        shutil.copytree(root, path)
        done = False
        with suppress(OSError, SimulatedCrash):
            work(path, FaultyFiles(RealFiles(), call, fault))
            done = True
        with Store.open(path, KIND, verify="open") as store:
            image = read_checkpoint(store, "t", reader)
        found = "new" if np.array_equal(image, new) else "old" if np.array_equal(image, old) else "a mix"
        assert found == "new" if done else found in ("old", "new"), counting.calls[call - 1]
        seen.add((done, found))
        shutil.rmtree(path)
    assert (False, "old") in seen


def test_what_could_not_be_saved_is_saved_next_time(root: Path, reader: Reader) -> None:
    rows = table(0)
    with Store.create(root, KIND) as store:
        with CheckpointWriter(store, "t", rows, reader, block_bytes=4096) as writer:
            writer.write()
            with writer.changing([1]):
                rows[1] = 9
            with store.begin(), pytest.raises(LockedError, match="another transaction"):
                writer.write()
            assert writer.write().blocks == 1
        assert np.array_equal(read_checkpoint(store, "t", reader), rows)


def test_after_a_full_disk_the_next_image_is_saved(root: Path, reader: Reader) -> None:
    """A failed write leaves the store as it was: nothing needs to be opened again."""
    rows = table(0)

    class Full(RealFiles):
        full = False

        def open(self, path: str, mode: Mode) -> File:
            file = super().open(path, mode)
            if mode == "d":
                pwrite = file.pwrite
                file.pwrite = lambda *data: self.fail(path) if self.full else pwrite(*data)  # type: ignore[method-assign]
            return file

        def fail(self, path: str) -> None:
            raise OSError(errno.ENOSPC, "full", path)

    files = Full()
    with (
        Store.create(root, KIND, files=files) as store,
        CheckpointWriter(store, "t", rows, reader, block_bytes=4096) as writer,
    ):
        writer.write()
        with writer.changing([1, 90]):
            rows[[1, 90]] = 9
        files.full = True
        for _ in range(2):
            with pytest.raises(OSError, match="full"):
                writer.write()
        files.full = False
        assert writer.write({"step": b"2"}).blocks == 2
        assert np.array_equal(read_checkpoint(store, "t", reader), rows)
        assert (store.generation, store.get("step"), store.check()) == (2, b"2", [])
        open_files = reader.stats()["files"]
        writer.write()
        assert reader.stats()["files"] == open_files


def test_a_failed_commit_asks_to_open_the_store_again(root: Path, reader: Reader) -> None:
    rows = table(0)

    class Failing(RealFiles):
        failing = False

        def rename(self, old: str, new: str) -> None:
            if self.failing:
                raise OSError(errno.EIO, "broken", new)
            super().rename(old, new)

    files = Failing()
    with Store.create(root, KIND, files=files) as store, CheckpointWriter(store, "t", rows, reader) as writer:
        writer.write()
        with writer.changing([1]):
            rows[1] = 9
        files.failing = True
        with pytest.raises(OSError, match="broken"):
            writer.write()
        files.failing = False
        with pytest.raises(ClosedError, match=r"a commit failed \(.*broken.*reopen"):
            writer.write()
    with Store.open(root, KIND, writable=True) as store, CheckpointWriter(store, "t", rows, reader) as writer:
        writer.write()
        assert np.array_equal(read_checkpoint(store, "t", reader), rows)


def test_what_is_refused(root: Path, reader: Reader) -> None:
    rows = table(0)
    with Store.create(root, KIND) as store:
        for unfit, error in (
            (rows[:, :5], ValueError),
            (rows[:0], ValueError),
            (np.array(3), ValueError),
            (np.array([None]), TypeError),
            ([[1]], TypeError),
        ):
            with pytest.raises(error, match="rows: expected"):
                CheckpointWriter(store, "t", unfit, reader)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="clean=True"):
            CheckpointWriter(store, "t", rows, reader, clean=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_module, "RowLog", None)  # nothing may have been opened when it is refused
            for spare, error in (("much", ValueError), (0, ValueError), (1.5, TypeError)):
                with pytest.raises(error, match="spare="):
                    CheckpointWriter(store, "t", rows, reader, spare=spare)  # type: ignore[arg-type]
        with CheckpointWriter(store, "t", rows, reader, block_bytes=4096) as writer:
            gate = Gate(writer)
            saving = writer.start()
            with pytest.raises(LockedError, match="still being saved"):
                writer.start()
            gate.open(100)
            saving.result(30)
            with writer.changing([0]), pytest.raises(RuntimeError, match="inside of this thread's own change"):
                writer.start()
            for changed in ([ROWS], [-1]):
                with pytest.raises(ValueError, match="a row, 0 to 96"):
                    writer.changing(changed)
            with writer.changing([1]):
                rows[1] = 8
            for values, error in (
                ({"log/t": b""}, ValueError),
                ({"checkpoint/t": b""}, ValueError),
                ({"a": "b"}, TypeError),
                ({"": b""}, ValueError),
                ({"k" * 401: b""}, ValueError),
                ({3: b""}, TypeError),
                ({"a": bytes(2**24 + 1)}, ValueError),
            ):
                with pytest.raises(error, match=r"value|key="):
                    writer.start(values)  # type: ignore[arg-type]
            assert writer.write().blocks == 1, "no image was taken, and the log is as it was"
        with pytest.raises(ClosedError):
            writer.start()
        with pytest.raises(
            FormatError, match="97 rows of 700 bytes in blocks of 5, expected 97 of 700 in blocks of 11"
        ):
            CheckpointWriter(store, "t", rows, reader, block_bytes=8192)
        with pytest.raises(FormatError, match="no checkpoint named 'x'"):
            read_checkpoint(store, "x", reader)
        for out in (np.empty(5, np.uint8), np.empty((ROWS, 1400), np.uint8)[:, ::2]):
            with pytest.raises(ValueError, match="out: expected"):
                read_checkpoint(store, "t", reader, out)
        path = store.segments()["t-0"].path
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(CorruptionError):
            read_checkpoint(store, "t", reader)


def test_memory_is_counted(root: Path, reader: Reader) -> None:
    rows = np.zeros((2**14, 1024), np.uint8)
    with Store.create(root, KIND) as store, CheckpointWriter(store, "t", rows, reader, spare="1MiB") as writer:
        idle = writer.memory_bytes
        assert 3 * 2**20 < idle < 6 * 2**20
        writer.write()
        assert writer.memory_bytes == idle
