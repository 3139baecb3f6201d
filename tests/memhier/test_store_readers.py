"""Store: readers beside a writer, in other processes and in forked children, and without permission to write."""

import errno
import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from memhier.errors import ClosedError, LockedError, MemhierError
from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
# Where a sync costs nothing, hundreds of commits fit into a test.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


def commit(store: Store, values: dict[str, bytes] | None = None, **segments: bytes) -> int:
    with store.begin() as tx:
        for key, value in (values or {}).items():
            tx.put(key, value)
        for name, contents in segments.items():
            tx.segment(name).append(contents)
        return tx.commit()


def contents(store: Store) -> tuple[dict[str, bytes | None], dict[str, bytes]]:
    values = {key: store.get(key) for key in store.keys()}  # noqa: SIM118
    return values, {name: store.read_segment(name).tobytes() for name in store.segments()}


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child and return the status it ended with."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_reader_keeps_its_generation(root: Path) -> None:
    with Store.create(root, KIND) as writer, Reader() as reader:
        commit(writer, {"n": b"1"}, s=b"1" * 5000)
        old = Store.open(root, KIND)
        commit(writer, {"n": b"2"}, s=b"2" * 5000)
        assert sorted(os.listdir(root / "segments")) == ["s.00000001.seg", "s.00000002.seg"]
        assert [finding.harmless for finding in old.check()] == [True]
        handle = old.attach("s", reader)
        with writer.begin() as tx:
            tx.drop("s")
            tx.commit()
        assert contents(old) == ({"n": b"1"}, {"s": b"1" * 5000})
        assert os.listdir(root / "segments") == ["s.00000001.seg"]
        old.close()
        with Store.open(root, KIND) as new:
            assert (new.generation, contents(new)) == (3, ({"n": b"2"}, {}))
        commit(writer)
        assert os.listdir(root / "segments") == [], "the next commit removes files that the last reader let go"
        assert reader.read(handle, [4990], 10).tobytes() == b"1" * 10, "a file that is open outlives its name"


def test_a_reader_beside_a_busy_writer(root: Path) -> None:
    """Every snapshot is whole: the number, the value and the segment are of one commit."""
    store = Store.create(root, KIND)
    commit(store, {"n": b"0"}, s=b"0")
    store.close()
    stop, stopped = os.pipe()

    def write() -> None:
        os.close(stopped)
        os.set_blocking(stop, False)
        with Store.open(root, KIND, writable=True) as store:
            while True:
                number = str(store.generation).encode()
                commit(store, {"n": number, "pad": number * 3000}, s=number * 5000)
                try:
                    if os.read(stop, 1) == b"":
                        return
                except BlockingIOError:
                    continue

    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            os._exit(0)
    os.close(stop)
    seen = set()
    while len(seen) < 100:
        with Store.open(root, KIND, verify="open") as reader:
            number = str(reader.generation - 1).encode()
            assert reader.get("n") == number
            assert reader.read_segment("s").tobytes() in (number * 5000, b"0")
            seen.add(reader.generation)
    os.close(stopped)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_files_stay_until_readers_in_other_processes_have_gone(root: Path, end: str) -> None:
    """Three readers, of a generation each; every one reads all of its own after the writer has gone on."""
    names = {1: {"s.00000001.seg", "t.00000001.seg"}, 2: {"s.00000002.seg", "t.00000001.seg"}, 3: {"s.00000003.seg"}}
    (opened, tell), readers = os.pipe(), []

    def read(generation: int, go: int) -> None:
        with Store.open(root, KIND) as store:
            os.write(tell, b".")
            for turn in os.read(go, 1):
                assert turn == ord("r")
                assert store.generation == generation
                assert contents(store)[1]["s"] == b"%d" % generation * 5000
                assert not [finding for finding in store.check() if not finding.harmless]
            os.write(tell, b".")
            os.read(go, 1)

    with Store.create(root, KIND) as writer:
        commit(writer, s=b"1" * 5000, t=b"t")
        for generation in (1, 2, 3):
            wait, go = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(go)
                try:
                    read(generation, wait)
                except BaseException:
                    os._exit(1)
                os._exit(0)
            os.close(wait)
            readers.append((child, go))
            assert os.read(opened, 1) == b"."
            with writer.begin() as tx:
                tx.segment("s").append(b"%d" % (generation + 1) * 5000)
                if generation == 2:
                    tx.drop("t")
                tx.commit()
        for generation in (1, 2, 3):
            held = set().union(*(names[left] for left in range(generation, 4)))
            assert set(os.listdir(root / "segments")) == held | {writer.segments()["s"].path.name}
            child, go = readers[generation - 1]
            os.write(go, b"r")
            assert os.read(opened, 1) == b"."
            if end == "is killed":
                os.kill(child, signal.SIGKILL)
            else:
                os.write(go, b".")
            os.close(go)
            assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL)
            commit(writer)
        assert os.listdir(root / "segments") == [writer.segments()["s"].path.name]
    os.close(opened)
    os.close(tell)


def test_one_writer(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store)
        with pytest.raises(LockedError, match=f"process {os.getpid()} has it open for writing") as error:
            Store.open(root, KIND, writable=True)
        assert isinstance(error.value, BlockingIOError)
        assert isinstance(error.value, MemhierError)
        with Store.open(root, KIND) as reader, pytest.raises(OSError, match="writable=True") as refused:
            reader.begin()
        assert refused.value.errno == errno.EROFS
    with Store.open(root, KIND, writable=True) as store:
        commit(store)


def test_a_forked_child_reads_and_does_not_write(root: Path) -> None:
    with Store.create(root, KIND) as writer:
        commit(writer, {"a": b"1"}, s=b"s" * 5000)
        reader = Store.open(root, KIND)
        tx = writer.begin()
        tx.segment("t").append(b"t")

        def child() -> None:
            assert contents(reader) == ({"a": b"1"}, {"s": b"s" * 5000})
            with Store.open(root, KIND) as own:
                assert contents(own) == contents(reader)
            for call in (writer.begin, tx.commit):
                with pytest.raises(ClosedError, match="fork"):
                    call()
            writer.close()

        assert in_child(child) == 0
        with pytest.raises(LockedError):
            Store.open(root, KIND, writable=True)
        assert tx.commit() == 2, "the child must not end its parent's transaction"
        reader.close()
    with Store.open(root, KIND, verify="open") as store:
        assert sorted(store.segments()) == ["s", "t"]


def test_a_forked_child_writes_nothing_into_its_parents_segments(root: Path) -> None:
    """The files are open in the child too, and so are the buffers that wait to be written."""
    data = os.urandom(3 * 2**20)
    with Store.create(root, KIND) as writer, writer.begin() as tx:
        segment = tx.segment("s")
        segment.append(data[: 2**20 + 5])

        def child() -> None:
            for call in (lambda: segment.append(bytes(2**22)), segment.flush, lambda: tx.segment("t")):
                with pytest.raises(ClosedError, match="fork"):
                    call()
            tx.abort()
            writer.close()

        assert in_child(child) == 0
        segment.append(data[2**20 + 5 :])
        tx.commit()
        assert writer.read_segment("s").tobytes() == data
        assert os.listdir(root / "segments") == ["s.00000001.seg"]


def test_a_forked_child_reads_a_log_and_does_not_change_it(root: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (300, 4096), np.uint8)
    with Store.create(root, KIND) as writer, Reader() as reader, RowLog(writer, "t", 4096, reader, 600) as log:
        log.append(np.arange(100), rows[:100])
        log.commit()
        log.append(np.arange(100, 200), rows[100:200])

        def child() -> None:
            for call in (lambda: log.append([1], rows[:1]), lambda: log.delete([1]), log.commit, log.compact):
                with pytest.raises(ClosedError, match="fork"):
                    call()
            assert np.array_equal(log.read(np.arange(200))[0], rows[:200])
            log.close()

        assert in_child(child) == 0
        log.append(np.arange(200, 300), rows[200:])
        log.commit()
        assert np.array_equal(log.read(np.arange(300))[0], rows)
        assert writer.check() == []


def test_the_lock_goes_with_the_writer_and_not_with_its_children(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store)
    (started, start), (wait, go) = os.pipe(), os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(go)
        Store.open(root, KIND, writable=True)
        if os.fork() == 0:
            os.write(start, b".")
            os.read(wait, 1)
        os._exit(0)
    os.waitpid(writer, 0)
    os.read(started, 1)
    Store.open(root, KIND, writable=True).close()
    for end in (started, start, wait, go):
        os.close(end)


def test_a_read_only_directory(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store, {"a": b"1"}, s=b"s" * 97)
    paths = [root.parent, root, *root.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def read() -> None:
        if os.geteuid() == 0:
            # Permissions do not stop root.
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with Store.open(root, KIND, verify="open") as store, Reader() as reader:
            assert contents(store) == ({"a": b"1"}, {"s": b"s" * 97})
            assert reader.read(store.attach("s", reader), [0], 97).tobytes() == b"s" * 97
            assert store.check() == []
        for call in (lambda: Store.open(root, KIND, writable=True), lambda: Store.create(root.parent / "new", KIND)):
            with pytest.raises(PermissionError) as error:
                call()
            assert str(error.value.filename).startswith(str(root.parent))

    try:
        before = {path: path.stat().st_mtime_ns for path in paths}
        assert in_child(read) == 0
        assert before == {path: path.stat().st_mtime_ns for path in paths}
    finally:
        for path in paths:
            path.chmod(stat.S_IRWXU)
