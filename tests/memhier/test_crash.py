"""A commit under crashes and faults: afterwards there is the old generation or the new one, never a mix.

Power cuts are enumerated in memory; faults come at every call in turn.
"""

import errno
import itertools
import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.files import (
    Buffer,
    Fault,
    FaultyFiles,
    File,
    FileBase,
    Files,
    MemoryFiles,
    Mode,
    RealFiles,
    SimulatedCrash,
    read_file,
)
from memhier.store.contents import PAGE_BYTES
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
State = tuple[int, dict[str, bytes | None], dict[str, bytes]]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


def state(store: Store) -> State:
    values = {key: store.get(key) for key in store.keys()}  # noqa: SIM118
    return store.generation, values, {name: store.read_segment(name).tobytes() for name in store.segments()}


def first(store: Store) -> None:
    with store.begin() as tx:
        tx.put("changed", b"1")
        tx.put("deleted", b"1" * 5000)
        tx.segment("kept").append(b"k" * 97)
        tx.segment("replaced").append(b"1" * 9000)
        tx.segment("dropped").append(b"d")
        tx.commit()


def second(store: Store) -> None:
    with store.begin() as tx:
        tx.put("changed", b"2" * 9000)
        tx.put("added", b"2")
        tx.delete("deleted")
        tx.segment("replaced").append(b"2" * 5000)
        tx.segment("added").append(b"2" * (2**20 + 4097))
        tx.drop("dropped")
        tx.commit()


BEFORE: State = (
    1,
    {"changed": b"1", "deleted": b"1" * 5000},
    {"kept": b"k" * 97, "replaced": b"1" * 9000, "dropped": b"d"},
)
AFTER: State = (
    2,
    {"changed": b"2" * 9000, "added": b"2"},
    {"kept": b"k" * 97, "replaced": b"2" * 5000, "added": b"2" * (2**20 + 4097)},
)


class Tee:
    """Works on disk and repeats every change in memory, LMDB's own included; calls `after` after each."""

    def __init__(self, folder: Path, memory: MemoryFiles) -> None:
        self.real, self.memory, self.folder = RealFiles(), memory, str(folder)
        self.after: Callable[[str], None] = lambda _: None

    def place(self, path: str) -> str:
        return path.removeprefix(self.folder) or "/"

    def notice_lmdb(self) -> None:
        for data in Path(self.folder).glob("*/catalog/data.mdb"):
            contents, path = data.read_bytes(), self.place(str(data))
            if not self.memory.exists(path) or read_file(self.memory, path) != contents:
                with self.memory.open(path, "w") as file:
                    file.append(contents)
                    file.fdatasync()  # LMDB's commit is durable; its directory entry is ours to sync

    def done(self, title: str) -> None:
        self.notice_lmdb()
        self.after(title)

    def open(self, path: str, mode: Mode) -> File:
        file = TeeFile(self, self.real.open(path, mode), self.memory.open(self.place(path), mode))
        self.done(f"open-{mode} {path}")
        return file

    def rename(self, old: str, new: str) -> None:
        self.real.rename(old, new)
        self.memory.rename(self.place(old), self.place(new))
        self.done(f"rename {new}")

    def remove(self, path: str) -> None:
        self.real.remove(path)
        self.memory.remove(self.place(path))
        self.done(f"remove {path}")

    def list(self, path: str) -> list[str]:
        assert self.real.list(path) == self.memory.list(self.place(path))
        return self.real.list(path)

    def exists(self, path: str) -> bool:
        return self.real.exists(path)

    def stamp(self, path: str) -> tuple[int, ...]:
        return self.real.stamp(path)

    def make_directory(self, path: str) -> None:
        self.real.make_directory(path)
        self.memory.make_directory(self.place(path))
        self.done(f"make_directory {path}")

    def sync_directory(self, path: str) -> None:
        self.notice_lmdb()
        self.memory.sync_directory(self.place(path))
        self.done(f"sync_directory {path}")

    def clock(self) -> float:
        return self.real.clock()


class TeeFile(FileBase):
    def __init__(self, tee: Tee, real: File, memory: File) -> None:
        self.tee, self.real, self.memory, self.path = tee, real, memory, real.path

    def size(self) -> int:
        return self.real.size()

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> int:
        return self.real.read_into(buffer, offset)

    def append(self, data: Buffer) -> int:
        self.memory.append(data)
        offset = self.real.append(data)
        self.tee.done(f"append {self.path}")
        return offset

    def pwrite(self, data: Buffer, offset: int) -> None:
        self.real.pwrite(data, offset)
        self.memory.pwrite(data, offset)
        self.tee.done(f"pwrite {self.path}")

    def truncate(self, length: int) -> None:
        self.real.truncate(length)
        self.memory.truncate(length)
        self.tee.done(f"truncate {self.path}")

    def fdatasync(self) -> None:
        self.memory.fdatasync()
        self.tee.done(f"fdatasync {self.path}")

    def lock(self, *, exclusive: bool) -> bool:
        assert self.memory.lock(exclusive=exclusive)
        return self.real.lock(exclusive=exclusive)

    def close(self) -> None:
        self.real.close()
        self.memory.close()


def found_in(files: Files) -> State:
    with Store.open("/store", KIND, verify="open", files=files) as store:
        return state(store)


def test_every_power_cut_leaves_the_old_or_the_new(root: Path) -> None:
    memory = MemoryFiles()
    tee = Tee(root.parent, memory)
    with Store.create(root, KIND, files=tee) as store:
        first(store)
        allowed = [BEFORE]
        seen: list[int] = []

        def cut(title: str) -> None:
            for how, files in memory.crashes():
                found = found_in(files)
                assert found in allowed, f"after {title}: {how}"
                seen.append(found[0])

        cut("the first commit")
        allowed.append(AFTER)
        tee.after = cut
        second(store)
        allowed.remove(BEFORE)
        cut("the second commit")
        assert set(seen) == {1, 2}
        assert len(seen) > 200


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.EIO])
def test_a_store_that_could_not_be_made_can_be_made_again(root: Path, fault: Fault) -> None:
    def make(files: Files, path: Path) -> None:
        with Store.create(path, KIND, files=files) as store:
            first(store)

    counting = FaultyFiles(RealFiles())
    make(counting, root)
    for call, name in enumerate(counting.calls, 1):
        path = root.parent / f"new{call}"
        made = outcome(lambda path=path, call=call: make(FaultyFiles(RealFiles(), call, fault), path)) is None
        try:
            with Store.open(path, KIND) as store:
                assert state(store) == BEFORE, name
        except (FileNotFoundError, FormatError):
            assert not made, name
            make(RealFiles(), path)
        with Store.open(path, KIND, verify="open") as store:
            assert state(store) == BEFORE


def test_power_cuts_inside_lmdb(root: Path) -> None:
    """LMDB syncs its pages before it writes the root: until then any of them may be lost, and afterwards none."""
    with Store.create(root, KIND) as store:
        first(store)
    data, guard = root / "catalog" / "data.mdb", root / "catalog.sum"
    old, old_guard = data.read_bytes(), guard.read_bytes()
    with Store.open(root, KIND, writable=True) as store, Store.open(root, KIND):  # the reader keeps the old segments
        second(store)
    new = data.read_bytes()
    old += bytes(len(new) - len(old))
    changed = [page for page in range(len(new) // 4096) if new[page * 4096 :][:4096] != old[page * 4096 :][:4096]]
    roots, pages = [page for page in changed if page < 2], [page for page in changed if page >= 2]
    assert len(roots) == 1
    guard.write_bytes(old_guard)
    rng = random.Random(3)
    for kept in [[], pages, *(rng.sample(pages, rng.randint(1, len(pages))) for _ in range(30)), pages + roots]:
        image = bytearray(old)
        for page in kept:
            image[page * 4096 : (page + 1) * 4096] = new[page * 4096 : (page + 1) * 4096]
        data.write_bytes(image)
        with Store.open(root, KIND, verify="open") as store:
            assert state(store) == BEFORE, "readers go by the guard"
        copy = root.parent / "copy"
        shutil.copytree(root, copy)
        complete = len(kept) > len(pages)
        with Store.open(copy, KIND, writable=True, verify="open") as store:
            assert state(store) == (AFTER if complete else BEFORE), "the next writer publishes LMDB's last commit"
            if not complete:
                second(store)
        with Store.open(copy, KIND, verify="open") as store:
            assert state(store) == AFTER
        shutil.rmtree(copy)


def outcome(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except (OSError, SimulatedCrash) as error:
        return error
    return None


def run_with(files: Files, root: Path) -> None:
    with Store.open(root, KIND, writable=True, files=files) as store:
        second(store)


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_at_every_call(root: Path, fault: Fault) -> None:
    with Store.create(root, KIND) as store:
        first(store)
    counting = FaultyFiles(RealFiles())
    shutil.copytree(root, root.parent / "counted")
    run_with(counting, root.parent / "counted")
    assert {"append", "fdatasync", "rename", "sync_directory", "remove"} <= {call.split()[0] for call in counting.calls}
    outcomes = set()
    for call, name in enumerate(counting.calls, 1):
        if fault is Fault.SHORT_WRITE and not name.startswith(("append", "pwrite")):
            continue
        copy = root.parent / f"copy{call}"
        shutil.copytree(root, copy)
        files = FaultyFiles(RealFiles(), call, fault)
        raised = outcome(lambda copy=copy, files=files: run_with(files, copy))
        if isinstance(raised, OSError):
            assert raised.errno == (errno.EIO if fault is Fault.EIO else errno.ENOSPC), name
            assert str(raised.filename).startswith(str(copy))
        else:
            assert raised is None or fault is Fault.CRASH
        committed = raised is None
        with Store.open(copy, KIND, verify="open") as store:
            found = state(store)
            assert found == AFTER if committed else found in (BEFORE, AFTER), name
            assert all(finding.harmless for finding in store.check())
        with Store.open(copy, KIND, writable=True) as store:
            found = state(store)
            outcomes.add((committed, found[0]))
            assert found in (BEFORE, AFTER)
            if found == BEFORE:
                second(store)
            assert store.check() == []
        with Store.open(copy, KIND, verify="open") as store:
            assert state(store) == AFTER
        shutil.rmtree(copy)
    assert outcomes >= {(False, 1), (False, 2)}, "faults before and after LMDB's commit"


def _fail_during(root: Path, operation: str, change: Callable[[Store], None]) -> None:
    """Make the first such operation of `change` fail, and look at the store that it happened to."""
    counting = FaultyFiles(RealFiles())
    shutil.copytree(root, root.parent / "counted")
    with Store.open(root.parent / "counted", KIND, writable=True, files=counting) as store:
        opened = len(counting.calls)
        change(store)
    shutil.rmtree(root.parent / "counted")
    call = next(i for i, name in enumerate(counting.calls) if i >= opened and name.startswith(operation))
    with Store.open(root, KIND, writable=True, files=FaultyFiles(RealFiles(), call + 1, Fault.EIO)) as store:
        with pytest.raises(OSError, match="error"):
            change(store)
        assert state(store) == BEFORE
        if operation == "pwrite":
            change(store)
            assert state(store) == AFTER
        else:
            with pytest.raises(ClosedError, match="reopen"):
                store.begin()


@pytest.mark.parametrize("operation", ["pwrite", "fdatasync", "sync_directory", "rename"])
def test_a_failed_sync_is_not_tried_again(root: Path, operation: str) -> None:
    """A failed write aborts its transaction; a failure inside a commit closes the store for writing."""

    def change(store: Store) -> None:
        with store.begin() as tx:
            # The long segment is written before the commit begins.
            tx.segment("added").append(b"2" * (2**20 + 4097))
            tx.segment("replaced").append(b"2" * 5000)
            for key in ("changed", "added"):
                tx.put(key, AFTER[1][key])
            tx.delete("deleted")
            tx.drop("dropped")
            tx.commit()

    with Store.create(root, KIND) as store:
        first(store)
    _fail_during(root, operation, change)


def _is_late(call: str) -> bool:
    """Whether a call of a commit comes after LMDB's own."""
    return "catalog" in call or (call.startswith("sync_directory") and not call.endswith("/segments"))


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_commit_on_a_full_disk_can_be_repeated(root: Path, fault: Fault) -> None:
    """Until LMDB commits, a full disk changes nothing and the store stays open; after that it must be reopened."""
    with Store.create(root, KIND) as store:
        first(store)
    counting = FaultyFiles(RealFiles())
    shutil.copytree(root, root.parent / "copy0")
    with Store.open(root.parent / "copy0", KIND, writable=True, files=counting) as store:
        opened = len(counting.calls)
        second(store)
    seen = set()
    for call, name in enumerate(counting.calls[opened:], opened + 1):
        copy = root.parent / f"copy{call}"
        shutil.copytree(root, copy)
        with Store.open(copy, KIND, writable=True, files=FaultyFiles(RealFiles(), call, fault)) as store:
            if outcome(lambda store=store: second(store)) is None:  # files that nothing needs may stay
                assert state(store) == AFTER, name
                assert name.startswith(("remove", "list", "lock", "open-r segments")), name
                continue
            assert state(store) == BEFORE, name
            seen.add((name.split()[0], late := _is_late(name)))
            if late:
                with pytest.raises(ClosedError, match="reopen it, without uncommitted changes"):
                    second(store)
                continue
            second(store)
            assert state(store) == AFTER, name
        with Store.open(copy, KIND, verify="open") as store:
            assert state(store) == AFTER, name
            assert store.check() == []
    early = {(each, False) for each in ("open-x", "pwrite", "fdatasync", "sync_directory", "open-w")}
    assert seen >= early | {("append", True), ("rename", True)}


def test_a_copy_without_empty_folders_can_be_changed(root: Path) -> None:
    with Store.create(root, KIND) as store:
        first(store)
    (root / "tmp").rmdir()
    with Store.open(root, KIND, writable=True) as store:
        second(store)
        assert state(store) == AFTER


def test_room_for_the_catalog_is_taken_before_it_changes(root: Path) -> None:
    """The bytes that a commit writes into its catalog and the guard are fewer than those that the disk had before."""
    rng, data, taken = random.Random(5), root / "catalog" / "data.mdb", 0

    class Counting(RealFiles):
        def open(self, path: str, mode: Mode) -> File:
            nonlocal taken
            if path.endswith("tmp/room"):
                taken = 0
                return CountedFile(super().open(path, mode))
            return super().open(path, mode)

    class CountedFile(FileBase):
        def __init__(self, inner: File) -> None:
            self.inner, self.path = inner, inner.path

        def pwrite(self, data: Buffer, offset: int) -> None:
            nonlocal taken
            taken += PAGE_BYTES  # the disk gives whole pages
            assert offset % PAGE_BYTES == 0
            self.inner.pwrite(data, offset)

        def close(self) -> None:
            self.inner.close()

    with Store.create(root, KIND, files=Counting()) as store:
        first(store)
        for _ in range(60):
            before, taken = data.read_bytes(), 0
            with store.begin() as tx:
                for number in {rng.randrange(3000) for _ in range(rng.choice([1, 20, 400]))}:
                    if store.get(f"key{number}") is not None and rng.random() < 0.3:
                        tx.delete(f"key{number}")
                    else:
                        tx.put(f"key{number}", bytes(rng.choice([0, 10, 300, 2030, 4090, 9000])))
                tx.commit()
            after = data.read_bytes()
            pages = range(0, len(after), mmap.PAGESIZE)
            changed = sum(after[at : at + mmap.PAGESIZE] != before[at : at + mmap.PAGESIZE] for at in pages)
            assert changed * mmap.PAGESIZE + (root / "catalog.sum").stat().st_size <= taken


def test_lmdb_that_cannot_write_closes_the_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memhier.store import catalog

    with Store.create(root, KIND) as store:
        first(store)
        # More than a process can map.
        monkeypatch.setattr(catalog, "map_size", lambda *_: 2**60)
        with store.begin() as tx:
            tx.put("large", bytes(20 * 4096))
            with pytest.raises(OSError, match="address space") as error:
                tx.commit()
        assert (error.value.errno, error.value.filename) == (errno.ENOMEM, str(root / "catalog" / "data.mdb"))
        with pytest.raises(ClosedError, match="address space"):
            store.begin()
        assert state(store) == BEFORE
    monkeypatch.undo()
    with Store.open(root, KIND, writable=True) as store:
        second(store)
    with Store.open(root, KIND) as store:
        assert state(store) == AFTER


# Making a store.

VALUE, ROWS = b"v" * 5000, b"r" * 9000


def fill(path: Path, files: Files) -> None:
    with Store.create(path, KIND, files=files) as store, store.begin() as tx:
        tx.put("value", VALUE)
        tx.segment("rows").append(ROWS)
        tx.commit()


def is_whole(path: Path) -> bool:
    """Whether the store is there; there must then be all of it."""
    try:
        with Store.open(path, KIND, verify="open") as store:
            assert (store.get("value"), store.read_segment("rows").tobytes()) == (VALUE, ROWS)
            return True
    except (FileNotFoundError, FormatError):
        return False


def lay_down(files: MemoryFiles, at: str, place: Path) -> None:
    """Write files of memory to disk."""
    place.mkdir()
    for name in files.list(at):
        path = f"{at}/{name}"
        try:
            files.list(path)
        except NotADirectoryError:
            (place / name).write_bytes(read_file(files, path))
        else:
            lay_down(files, path, place / name)


def picture(place: Path) -> tuple[tuple[str, bytes], ...]:
    """Return all that lies at a place."""
    paths = sorted(place.rglob("*"))
    return tuple((str(path.relative_to(place)), path.read_bytes() if path.is_file() else b"") for path in paths)


def cuts(folder: Path, work: Callable[[Files], None]) -> Iterator[tuple[str, Path]]:
    """Yield each state of the path ``store`` that a power cut during the work can leave, on disk, once."""
    memory = MemoryFiles()
    tee = Tee(folder, memory)
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    states: list[tuple[str, Path]] = []
    (folder / "cuts").mkdir()

    def cut(title: str) -> None:
        for how, files in memory.crashes():
            place = folder / "cuts" / str(len(states))
            if files.exists("/store"):
                lay_down(files, "/store", place)
                shown = picture(place)
                if shown not in seen:
                    seen.add(shown)
                    states.append((f"after {title}: {how}", place))
                    continue
                for path in sorted(place.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                place.rmdir()

    tee.after = cut
    work(tee)
    yield from states


def test_a_path_opens_or_can_be_made_again_after_every_power_cut(root: Path) -> None:
    outcomes = []
    for title, place in cuts(root.parent, lambda files: fill(root, files)):
        whole = is_whole(place)
        if whole:
            with pytest.raises(FileExistsError):
                Store.create(place, KIND)
        else:
            try:
                fill(place, RealFiles())
            except (OSError, ValueError) as error:
                pytest.fail(f"{title}: {error}")
        assert is_whole(place), title
        outcomes.append(whole)
    assert outcomes.count(False) > 20
    assert any(outcomes)


def test_a_takeover_survives_power_cuts_as_well(root: Path) -> None:
    """A second attempt removes the files of the first one, and may be cut short like it."""

    def twice(files: Files) -> None:
        Store.create(root, KIND, files=files).close()
        fill(root, files)

    for title, place in cuts(root.parent, twice):
        if not is_whole(place):
            try:
                fill(place, RealFiles())
            except (OSError, ValueError) as error:
                pytest.fail(f"{title}: {error}")
        assert is_whole(place), title


def test_a_first_catalog_of_which_anything_was_lost(root: Path) -> None:
    """LMDB syncs once, at the end of its first transaction: before that each of its pages may be anything."""
    path = root
    Store.create(path, KIND).close()
    data = path / "catalog" / "data.mdb"
    whole = data.read_bytes()
    assert len(whole) == 3 * 4096
    (path / "catalog.sum").unlink()
    pages = [[page, bytes(4096), b"\xa5" * 4096, page[:512] + bytes(3584)] for page in map(whole.__getitem__, parts(3))]
    images = {b"".join(chosen)[:size] for chosen in itertools.product(*pages) for size in (0, 100, 4096, 8192, 12288)}
    for number, image in enumerate(sorted(images)):
        copy = root.parent / f"copy{number}"
        copy.mkdir()
        for name in ("catalog", "segments", "tmp"):
            (copy / name).mkdir()
        (copy / "lock").write_bytes((path / "lock").read_bytes())
        (copy / "catalog" / "data.mdb").write_bytes(image)
        with pytest.raises(FormatError, match="unfinished"):
            Store.open(copy, KIND)
        fill(copy, RealFiles())
        assert is_whole(copy)


def parts(count: int) -> list[slice]:
    return [slice(4096 * i, 4096 * (i + 1)) for i in range(count)]


@pytest.mark.parametrize("lost", ["nothing", "a root", "both roots", "its end"])
def test_a_committed_store_is_never_taken_over(root: Path, lost: str) -> None:
    path = root
    with Store.create(path, KIND) as store, store.begin() as tx:
        tx.put("value", VALUE)
        tx.commit()
    (path / "catalog.sum").unlink()
    data = path / "catalog" / "data.mdb"
    contents = bytearray(data.read_bytes())
    if lost == "its end":
        del contents[3 * 4096 :]
    elif lost != "nothing":
        contents[: 4096 * (2 if lost == "both roots" else 1)] = bytes(4096 * (2 if lost == "both roots" else 1))
    data.write_bytes(contents)
    before = picture(path)
    with pytest.raises(CorruptionError):
        Store.open(path, KIND)
    with pytest.raises((FileExistsError, CorruptionError)):
        Store.create(path, KIND)
    assert [entry for entry in picture(path) if entry[0] != "lock"] == [entry for entry in before if entry[0] != "lock"]


@pytest.mark.parametrize(
    "files",
    [{"lock": b""}, {"lock": b"memhier\n"}, {"lock.memhier-new": b"\xa5" * 8}, {"lock.memhier-new": b"", "lock": b""}],
)
def test_an_unfinished_store_is_taken_over(root: Path, files: dict[str, bytes]) -> None:
    path = root
    path.mkdir()
    for name, contents in files.items():
        (path / name).write_bytes(contents)
    if len(files) == 2:  # an empty lock is ours only alone
        with pytest.raises(FileExistsError):
            fill(path, RealFiles())
        return
    fill(path, RealFiles())
    assert is_whole(path)
    assert "lock.memhier-new" not in os.listdir(path)


@pytest.mark.parametrize("files", [{"lock": b"4711\n"}, {"lock": b"", "tmp": b"x"}, {"segments": b"x"}, {"notes": b""}])
def test_foreign_files_stay(root: Path, files: dict[str, bytes]) -> None:
    path = root
    path.mkdir()
    for name, contents in files.items():
        (path / name).write_bytes(contents)
    before = picture(path)
    with pytest.raises(FileExistsError):
        Store.create(path, KIND)
    assert picture(path) == before


def test_two_makers_do_not_both_hold_a_store(root: Path) -> None:
    path = root
    with Store.create(path, KIND), pytest.raises(BlockingIOError, match="process"):
        Store.create(path, KIND)
