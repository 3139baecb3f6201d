"""A cut at any length, a flip of any bit, in every kind of file: an error by name or the same contents, never a crash.

Reading is tried in memory, over every byte of the small files. Writers, which let LMDB map the catalog, are tried in a
forked child, so that a signal would be seen.
"""

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.errors import CorruptionError, FormatError
from memhier.files import MemoryFiles, RealFiles
from memhier.store.catalog_tree import CatalogTree
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
GUARD, DATA, SEGMENT = "catalog.sum", "catalog/data.mdb", "segments/s.00000003.seg"


@pytest.fixture(scope="module")
def store_files() -> Iterator[dict[str, bytes]]:
    """The files of a store of three commits, with large and small values, free pages and a segment."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = Path(folder) / "store"
        with Store.create(root, KIND) as store:
            for number in range(3):
                with store.begin() as tx:
                    tx.put("small", b"%d" % number)
                    tx.put("large", b"%d" % number * 5000)
                    tx.segment("s").append(bytes(range(256)) * 20)
                    tx.commit()
        yield {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def found_in(files: MemoryFiles | None, root: str = "/store", writable: bool = False) -> object:
    """Return the contents of a store, or None if it says that it is damaged."""
    try:
        with Store.open(root, KIND, files=files, writable=writable) as store:
            values = {key: store.get(key) for key in store.keys()}  # noqa: SIM118
            return values, {name: store.read_segment(name).tobytes() for name in store.segments()}
    except (CorruptionError, FormatError):
        return None


def in_memory(contents: dict[str, bytes]) -> MemoryFiles:
    files = MemoryFiles()
    for directory in ("/store", "/store/catalog", "/store/segments"):
        files.make_directory(directory)
    for name in (GUARD, DATA, SEGMENT):
        with files.open(f"/store/{name}", "x") as file:
            file.append(contents[name])
    return files


def flip(files: MemoryFiles, name: str, position: int, bit: int) -> None:
    with files.open(f"/store/{name}", "a") as file:
        byte = bytearray(1)
        file.read_into(byte, position)
        file.pwrite(bytes([byte[0] ^ 1 << bit]), position)


def test_every_cut(store_files: dict[str, bytes]) -> None:
    intact = found_in(in_memory(store_files))
    assert intact is not None
    for name in (GUARD, DATA, SEGMENT):
        length = len(store_files[name])
        # One file, cut shorter and shorter.
        files = in_memory(store_files)
        step = 1 if length < 10_000 else 61
        for cut in range(length - 1, -1, -step):
            with files.open(f"/store/{name}", "a") as file:
                file.truncate(cut)
            found = found_in(files)
            # LMDB's last pages may be free ones, which are never read.
            assert found is None or (name == DATA and found == intact), f"{name} cut to {cut}"
        files.remove(f"/store/{name}")
        assert found_in(files) is None


def flips(length: int, stride: int) -> Iterator[tuple[int, int]]:
    rng = random.Random(length)
    for position in range(0, length, stride):
        yield min(position + rng.randrange(stride), length - 1), rng.randrange(8)


def check_flips(store_files: dict[str, bytes], stride: int) -> None:
    files = in_memory(store_files)
    intact = found_in(files)
    harmless = 0
    for name in (GUARD, DATA, SEGMENT):
        for position, bit in flips(len(store_files[name]), 1 if name == GUARD else stride):
            flip(files, name, position, bit)
            found = found_in(files)
            assert found is None or (name == DATA and found == intact), f"{name}: bit {bit} of byte {position}"
            harmless += found is not None
            flip(files, name, position, bit)
    assert found_in(files) == intact
    assert harmless > 0, "free pages are not read"


def test_flips(store_files: dict[str, bytes]) -> None:
    check_flips(store_files, 23)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_flip_in_every_byte(store_files: dict[str, bytes]) -> None:
    check_flips(store_files, 1)


def open_and_write_damaged(root: Path, intact: bytes, stride: int) -> int:
    """Open and commit on damaged catalogs; return how many a writer took for good."""
    expected = found_in(None, str(root))
    kept = {path: path.read_bytes() for path in (root / GUARD, root / DATA)}
    segments = {path: path.read_bytes() for path in (root / "segments").iterdir()}
    rng = random.Random(7)
    cuts = [intact[:length] for length in range(0, len(intact), 509)]
    # All of the two root pages that has a meaning, and a sample of the rest.
    positions = [*range(160), *range(4096, 4256), *range(4256, len(intact), stride)]
    taken = 0
    for damaged in (*cuts, *(_flipped(intact, position, rng.randrange(8)) for position in positions)):
        (root / DATA).write_bytes(damaged)
        found = found_in(None, str(root), writable=True)
        assert found in (None, expected)
        if found is not None:
            taken += 1
            with Store.open(root, KIND, writable=True) as store, store.begin() as tx:
                tx.put("more", b"m" * 9000)
                tx.commit()
            with Store.open(root, KIND, verify="open") as store:
                assert store.get("more") == b"m" * 9000
                assert store.get("small") == b"2"
        for path, contents in {**kept, **segments}.items():
            path.write_bytes(contents)
    return taken


def _flipped(contents: bytes, position: int, bit: int) -> bytes:
    damaged = bytearray(contents)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def on_disk(folder: str, store_files: dict[str, bytes]) -> Path:
    root = Path(folder) / "store"
    for name, contents in store_files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(contents)
    return root


def check_writers(store_files: dict[str, bytes], stride: int) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = on_disk(folder, store_files)
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if open_and_write_damaged(root, store_files[DATA], stride) else 2)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"ended with {status} (negative: a signal)"


def test_writers_on_damaged_catalogs(store_files: dict[str, bytes]) -> None:
    check_writers(store_files, 97)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_writers_on_every_damaged_byte(store_files: dict[str, bytes]) -> None:
    check_writers(store_files, 1)


def test_an_old_root_cannot_pass_for_a_new_one(store_files: dict[str, bytes]) -> None:
    """One bit makes the root of transaction 3 look like that of 5, which would be the commit after the guard's."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = on_disk(folder, store_files)
        data = bytearray(store_files[DATA])
        place = 4096 + 144
        assert (data[144], data[place]) == (4, 3)
        data[place] = 5
        (root / DATA).write_bytes(data)
        with pytest.raises(CorruptionError, match="transaction 5"):
            Store.open(root, KIND, writable=True)
        data[place] = 7
        (root / DATA).write_bytes(data)
        with pytest.raises(CorruptionError, match="transaction 7 follows 4"):
            Store.open(root, KIND, writable=True)


def test_damage_before_the_guard_was_written(store_files: dict[str, bytes]) -> None:
    """The pages of a commit cut off by a crash have no checksums yet, but its values do."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = on_disk(folder, store_files)
        with Store.open(root, KIND, writable=True) as store, store.begin() as tx:
            tx.put("large", b"unmistakable" * 500)
            tx.commit()
        (root / GUARD).write_bytes(store_files[GUARD])
        data = bytearray((root / DATA).read_bytes())
        data[data.index(b"unmistakable") + 999] ^= 1
        (root / DATA).write_bytes(data)
        assert found_in(None, str(root)) == found_in(in_memory(store_files)), "readers still have the commit before"
        with pytest.raises(CorruptionError, match="value of b'value/large'"):
            Store.open(root, KIND, writable=True)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_a_walk_believes_nothing(store_files: dict[str, bytes], seed: int, count: int) -> None:
    """Without checksums, any bytes in the structure of a tree end in an error by name or in some entries."""
    rng = random.Random(seed)
    data = bytearray(store_files[DATA])
    for _ in range(count):
        # Headers, positions of nodes, root pages, and the nodes at the ends of pages.
        page = rng.randrange(len(data) // 4096) * 4096
        position = page + rng.choice([rng.randrange(152), 4095 - rng.randrange(400)])
        data[position] = rng.choice([0, 255, rng.randrange(256)])
    with tempfile.NamedTemporaryFile(dir=FAST) as file:
        file.write(data)
        file.flush()
        with RealFiles().open(file.name, "r") as opened, suppress(CorruptionError, FormatError):
            tree = CatalogTree(opened)
            for key, value in tree.walk(tree.read_meta(4)):
                assert len(key) + len(value) < len(data)


def test_a_walk_allocates_nothing_for_a_wrong_size(store_files: dict[str, bytes]) -> None:
    data, key = bytearray(store_files[DATA]), b"value/large"
    place = data.find(key)
    while place >= 0:
        data[place - 8 : place - 4] = b"\xff" * 4  # a value of 4 GiB
        place = data.find(key, place + 1)
    files = MemoryFiles()
    with files.open("/data", "x") as file:
        file.append(data)
        tree = CatalogTree(file, 4096)
        with pytest.raises(CorruptionError, match="lie past the end"):
            list(tree.walk(tree.read_meta(4)))
