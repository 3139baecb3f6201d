"""Store.copy: the same generation at another place, whole or unfinished, beside a writer that goes on."""

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.files import Fault, FaultyFiles, RealFiles, SimulatedCrash
from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
State = tuple[int, dict[str, bytes | None], dict[str, bytes]]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


def commit(store: Store, number: int) -> None:
    with store.begin() as tx:
        tx.put("number", b"%d" % number)
        tx.segment("data").append(np.random.default_rng(number).bytes(97 * number))
        tx.segment(f"part{number % 3}").append(b"%d" % number)
        if number == 1:
            tx.segment("empty")
            tx.segment("long").append(bytes(5 * 2**20 + 1))
        tx.commit()


def state(path: Path) -> State:
    with Store.open(path, KIND, verify="open") as store:
        assert [str(finding) for finding in store.check() if not finding.harmless] == []
        values = {key: store.get(key) for key in store.keys()}  # noqa: SIM118
        return store.generation, values, {name: store.read_segment(name).tobytes() for name in store.segments()}


def test_a_copy_is_the_same_and_lives_on_its_own(root: Path) -> None:
    with Store.create(root, KIND) as store:
        with pytest.raises(FormatError, match="unfinished store"):
            store.copy(root.with_name("copy"))
        commit(store, 1)
        commit(store, 2)
        store.copy(root.with_name("copy"))
        assert state(root.with_name("copy")) == state(root)
        with pytest.raises(FileExistsError):
            store.copy(root.with_name("copy"))
        with Store.open(root.with_name("copy"), KIND, writable=True) as other:
            assert other.check() == []
            commit(other, 3)
        commit(store, 3)
        assert state(root.with_name("copy")) == state(root)


@pytest.mark.parametrize("verify", ["read", "off"])
def test_a_reader_copies_its_generation(root: Path, verify: str) -> None:
    with Store.create(root, KIND) as store:
        commit(store, 1)
        before = state(root)
        with Store.open(root, KIND, verify=verify) as reader:  # type: ignore[arg-type]
            commit(store, 2)
            reader.copy(root.with_name("copy"))
        assert state(root.with_name("copy")) == (before if verify == "read" else state(root))


def test_copies_while_a_writer_goes_on(root: Path) -> None:
    over = threading.Event()
    with Store.create(root, KIND) as store:
        commit(store, 1)

        def write() -> None:
            number = 1
            while not over.is_set():
                number += 1
                commit(store, number)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for turn in range(8):
                path = root.with_name(f"copy{turn}")
                with Store.open(root, KIND) as reader:
                    reader.copy(path)
                generation, values, segments = state(path)
                assert values == {"number": b"%d" % generation}
                assert segments["data"] == np.random.default_rng(generation).bytes(97 * generation)
        finally:
            over.set()
            thread.join()


def test_copies_of_a_log_while_it_is_compacted(root: Path) -> None:
    """Every copy is one commit of the log, whole: parts come and go while they are copied."""
    over, failures = threading.Event(), []
    keys = np.arange(50)

    def rows(version: int) -> NDArray[np.uint8]:
        """Return the log as of a version: each key's row is of the last version that changed it."""
        newest = version - (version - keys) % 7
        return np.repeat(np.where(newest < 1, 0, newest)[:, None], 500, 1).view(np.uint8)

    with Store.create(root, KIND) as store, Reader() as reader:
        log = RowLog(store, "t", 4000, reader, 50, compact_below=0.8)
        log.append(keys, rows(0))
        assert log.commit() == 1

        def write() -> None:
            version = 0
            try:
                while not over.is_set():
                    version += 1
                    changed = keys[(version - keys) % 7 == 0]
                    log.append(changed, rows(version)[changed])
                    if version % 3 == 0:
                        log.compact(1)
                    log.commit({"version": b"%d" % version})
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            seen = set()
            for turn in range(10):
                path = root.with_name(f"copy{turn}")
                store.copy(path)
                with Store.open(path, KIND, verify="open") as copy, RowLog(copy, "t", 4000, reader, 50) as copied:
                    assert copy.check() == []
                    assert copy.generation == int(copy.get("version") or b"0") + 1
                    assert np.array_equal(copied.read(keys)[0], rows(copy.generation - 1))
                    assert copied.stats()["live_bytes"] == 50 * 4000
                    seen.add(copy.generation)
        finally:
            over.set()
            thread.join()
        assert failures == []
        assert len(seen) > 3
        log.close()


def test_damage_is_not_copied(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store, 1)
        path = store.segments()["long"].path
        contents = bytearray(path.read_bytes())
        contents[4096 * 1100] ^= 1
        path.write_bytes(contents)
        with pytest.raises(CorruptionError, match="page 1100"):
            store.copy(root.with_name("copy"))
        with pytest.raises(FormatError, match="unfinished"):
            Store.open(root.with_name("copy"), KIND)
        assert os.listdir(root.with_name("copy") / "segments") == []
        contents[4096 * 1100] ^= 1
        path.write_bytes(contents)
        store.copy(root.with_name("copy"))
        assert state(root.with_name("copy")) == state(root)


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_at_every_call(root: Path, fault: Fault) -> None:
    with Store.create(root, KIND) as store:
        commit(store, 2)  # without the long segment
    expected = state(root)

    def copy(files: FaultyFiles, path: Path) -> None:
        with Store.open(root, KIND, files=files) as store:
            store.copy(path)

    counting = FaultyFiles(RealFiles())
    copy(counting, root.with_name("counted"))
    for call, name in enumerate(counting.calls, 1):
        path, done = root.with_name(f"copy{call}"), False
        try:
            copy(FaultyFiles(RealFiles(), call, fault), path)
            done = True
        except (OSError, SimulatedCrash):
            pass
        try:
            assert state(path) == expected, name
        except (FileNotFoundError, FormatError):
            assert not done, name
            copy(FaultyFiles(RealFiles()), path)
            assert state(path) == expected, name
        assert state(root) == expected
