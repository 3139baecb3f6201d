"""Store: only committed contents are there, and errors at the border change nothing."""

import gc
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.errors import ClosedError, CorruptionError, FormatError, LockedError
from memhier.files import RealFiles
from memhier.io.reader import Reader
from memhier.store import contents as store_contents
from memhier.store.catalog_tree import CatalogTree
from memhier.store.store import SegmentWriter, Store

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


def test_first_commits(root: Path) -> None:
    with Store.create(root, KIND) as store:
        assert (store.generation, store.kind, store.path) == (0, KIND, root)
        assert commit(store, {"a": b"1", "empty": b""}, codes=b"x" * 97, none=b"") == 1
        assert commit(store, {"a": b"2", "b": bytes(100_000)}) == 2
        with store.begin() as tx:
            tx.delete("b")
            tx.drop("codes")
            assert tx.commit() == 3
        expected = ({"a": b"2", "empty": b""}, {"none": b""})
        assert contents(store) == expected
    with Store.open(root, KIND) as store:
        assert store.generation == 3
        assert contents(store) == expected
        assert store.get("b") is None
        assert store.check() == []
    assert sorted(os.listdir(root)) == ["catalog", "catalog.sum", "lock", "segments", "tmp"]
    assert os.listdir(root / "segments") == ["none.00000001.seg"]


def test_not_committed_is_not_there(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store, {"a": b"1"})
        with store.begin() as tx:
            tx.put("a", b"2")
            writer = tx.segment("codes")
            writer.append(b"x" * 10)
            with pytest.raises(LockedError, match="another transaction"):
                store.begin()
        with pytest.raises(ClosedError):
            writer.append(b"x")
        for call in (tx.commit, lambda: tx.put("a", b""), lambda: tx.segment("s"), lambda: tx.drop("s")):
            with pytest.raises(ClosedError):
                call()
        assert os.listdir(root / "segments") == []
        with pytest.raises(ZeroDivisionError), store.begin() as tx:
            tx.segment("codes").append(b"x" * (1 // 0))
        assert commit(store, codes=b"later") == 2
    with Store.open(root, KIND) as store:
        assert contents(store) == ({"a": b"1"}, {"codes": b"later"})


def test_segment_offsets_sizes_and_checksums(root: Path) -> None:
    sizes = [0, 1, 3, 97, 4096, 5000, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 7]
    rng = np.random.default_rng(1)
    pieces = [rng.integers(0, 256, size, np.uint8) for size in rng.permutation(sizes)]
    whole = np.concatenate(pieces)
    with Store.create(root, KIND) as store, store.begin() as tx:
        writer = tx.segment("s")
        ends = np.cumsum([0, *map(len, pieces)])
        assert [writer.append(piece) for piece in pieces] == ends[:-1].tolist()
        assert writer.length == ends[-1]
        assert tx.memory_bytes < 2 * 2**20, "written bytes must not stay in DRAM"
        tx.commit()
        info = store.segments()["s"]
        assert (info.payload, info.length) == (len(whole), -(-len(whole) // 4096) * 4096)
        assert info.path.read_bytes() == whole.tobytes() + bytes(info.length - len(whole)), "zeros fill the last page"
    with Store.open(root, KIND) as store, Reader() as reader:
        assert np.array_equal(store.read_segment("s"), whole)
        handle = store.attach("s", reader)
        offsets = rng.integers(0, len(whole) - 97, 50)
        assert np.array_equal(reader.read(handle, offsets, 97), whole[offsets[:, None] + np.arange(97)])
        info = store.segments()["s"]
        assert info.checksums is not None
        assert store.memory_bytes == info.checksums.nbytes == 4 * info.length // 4096
    with Store.open(root, KIND, verify="off") as store:
        assert np.array_equal(store.read_segment("s"), whole)
        assert store.memory_bytes == 0
        assert store.check() == []


def test_appends_take_any_contiguous_buffer(root: Path) -> None:
    with Store.create(root, KIND) as store, store.begin() as tx:
        writer = tx.segment("s")
        matrix = np.arange(12, dtype=np.float16).reshape(3, 4)
        for data in (matrix, bytearray(b"ab"), memoryview(b"cd"), np.zeros((0, 4)), matrix[1:]):
            writer.append(data)
        with pytest.raises(ValueError, match="C-contiguous"):
            writer.append(matrix[:, ::2])
        with pytest.raises(TypeError):
            writer.append("text")
        tx.commit()
        assert store.read_segment("s").tobytes() == matrix.tobytes() + b"abcd" + matrix[1:].tobytes()


def test_checksums_over_many_catalog_entries(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_contents, "CHUNK_PAGES", 4)
    data = np.random.default_rng(2).integers(0, 256, 97 * 4096, np.uint8)
    with Store.create(root, KIND) as store:
        commit(store, s=data.tobytes())
        commit(store, s=data[: 13 * 4096].tobytes(), t=b"")
    with Store.open(root, KIND) as store:
        assert contents(store)[1] == {"s": data[: 13 * 4096].tobytes(), "t": b""}
        # 4 entries for the checksums, and one each for 2 segments, the header and the transaction's number.
        with lmdb.open(str(root / "catalog"), readonly=True, lock=False) as environment:
            assert environment.stat()["entries"] == 4 + 2 + 1 + 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.binary(min_size=1, max_size=60), st.integers(0, 12_000) | st.none(), max_size=60),
        min_size=1,
        max_size=4,
    )
)
def test_the_walk_sees_the_same_as_lmdb(transactions: list[dict[bytes, int | None]]) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        for changes in transactions:
            with lmdb.open(folder, map_size=2**30, lock=False) as environment, environment.begin(write=True) as tx:
                for key, size in changes.items():
                    if size is None:
                        tx.delete(key)
                    else:
                        tx.put(key, key[:1] * size)
        with lmdb.open(folder, lock=False) as environment, environment.begin() as tx:
            expected = list(tx.cursor())
            number = environment.info()["last_txnid"]
        with RealFiles().open(f"{folder}/data.mdb", "r") as file:
            tree = CatalogTree(file)
            meta = tree.read_meta(number)
            assert meta.transaction == number
            assert list(tree.walk(meta)) == expected


def test_many_values_make_a_deep_tree(root: Path) -> None:
    values = {f"{number:0200d}": struct.pack("<I", number) * (number % 97) for number in range(3000)}
    with Store.create(root, KIND) as store:
        commit(store, values)
    with Store.open(root, KIND) as store:
        assert contents(store)[0] == values
        assert store.memory_bytes == sum(len(key) + len(value) for key, value in values.items())


def test_kinds_and_paths(root: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        Store.open(root, KIND)
    assert missing.value.filename == str(root)
    with pytest.raises(FileNotFoundError):
        Store.create(root / "deeper", KIND)
    root.mkdir()
    for path in (root, Path(__file__)):
        with pytest.raises(FormatError, match="not a memhier store"):
            Store.open(path, KIND)
        with pytest.raises(FormatError, match="not a memhier store"):
            Store.open(path, KIND, writable=True)
    assert os.listdir(root) == []
    with pytest.raises(FileExistsError):
        Store.create(Path(__file__), KIND)
    with Store.create(root, KIND) as store, pytest.raises(FormatError, match="unfinished"):
        Store.open(root, KIND)
    with pytest.raises(FormatError, match="unfinished"):
        Store.open(root, KIND, writable=True)
    with Store.create(root, KIND) as store:
        commit(store)
    with pytest.raises(FormatError, match="'test', expected 'other'"):
        Store.open(root, "other")
    with pytest.raises(FileExistsError):
        Store.create(root, KIND)
    with pytest.raises(ValueError, match="verify='never'"):
        Store.open(root, KIND, verify="never")  # type: ignore[arg-type]
    for wrong, error in (("", ValueError), ("k" * 101, ValueError), (7, TypeError)):
        with pytest.raises(error, match="kind="):
            Store.open(root, wrong)  # type: ignore[arg-type]


def test_create_takes_over_only_unfinished_stores(root: Path) -> None:
    store = Store.create(root, "abandoned")
    with store.begin() as tx:
        tx.segment("s").append(b"x")
        (root / "tmp" / "part").write_bytes(b"x")
        shutil.copytree(root, root.parent / "crashed")  # as it would be found after a kill
    store.close()
    with Store.create(root.parent / "crashed", KIND) as store:
        assert os.listdir(store.path / "segments") == os.listdir(store.path / "tmp") == []
        commit(store, {"a": b"1"})
    with Store.open(root.parent / "crashed", KIND) as store:
        assert contents(store) == ({"a": b"1"}, {})
    # Somebody's directory that happens to have our names, or a store that lost its guard or more.
    for number, names in enumerate((["tmp/x"], ["lock", "tmp/x"], ["segments/a.seg"], ["notes.txt"])):
        foreign = root.parent / f"foreign{number}"
        for name in names:
            (foreign / name).parent.mkdir(parents=True, exist_ok=True)
            (foreign / name).write_bytes(b"")
        with pytest.raises(FileExistsError) as error:
            Store.create(foreign, KIND)
        assert error.value.filename == str(foreign)
        assert all((foreign / name).exists() for name in names)
    damaged = root.parent / "crashed"
    for name in ("catalog.sum", "catalog/data.mdb"):
        with open(damaged / name, "r+b") as file:
            file.write(b"damage")
        with pytest.raises(FileExistsError):
            Store.create(damaged, KIND)


def test_bad_arguments_change_nothing(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store, {"a": b"1"}, s=b"s")
        for size in (0, 4095, 5000, 2 << 20):
            with pytest.raises(ValueError, match=f"buffer_bytes={size}"):
                store.begin(size)
        with store.begin() as tx:
            for name in ("", "a/b", "..", "a.b", "n" * 101, "ä"):
                with pytest.raises(ValueError, match="name="):
                    tx.segment(name)
            for key in ("", "k" * 401, "ä" * 201):
                with pytest.raises(ValueError, match="key="):
                    tx.put(key, b"")
            with pytest.raises(TypeError, match="key="):
                tx.put(b"k", b"")  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                tx.put("k", "text")
            with pytest.raises(ValueError, match=r"16,777,217 bytes.*segment"):
                tx.put("k", bytes(2**24 + 1))
            with pytest.raises(KeyError, match="missing"):
                tx.delete("missing")
            with pytest.raises(KeyError, match="missing"):
                tx.drop("missing")
            tx.drop("s")
            with pytest.raises(KeyError, match="'s'"):
                tx.drop("s")
            tx.segment("t")
            with pytest.raises(ValueError, match="'t'"):
                tx.segment("t")
            tx.put("k", np.arange(3, dtype=np.int32))
            tx.commit()
        assert contents(store) == ({"a": b"1", "k": np.arange(3, dtype=np.int32).tobytes()}, {"t": b""})
        with pytest.raises(KeyError, match="no such segment"):
            store.read_segment("s")
    for call in (store.begin, store.keys, store.segments, store.check, lambda: store.get("a")):
        with pytest.raises(ClosedError):
            call()
    store.close()


def test_damage_is_found_when_asked_for(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store, s=bytes(3 * 4096), t=b"t" * 4096)
    path = root / "segments" / "s.00000001.seg"
    with open(path, "r+b") as file:
        file.seek(2 * 4096 + 97)
        file.write(b"\1")
    with Store.open(root, KIND) as store, Reader() as reader:
        assert store.read_segment("t").tobytes() == b"t" * 4096
        with pytest.raises(CorruptionError, match=r"s\.00000001\.seg: page 2"):
            store.read_segment("s")
        handle = store.attach("s", reader)
        assert reader.read(handle, [4096], 1).tolist() == [[0]]
        with pytest.raises(CorruptionError, match=r"s\.00000001\.seg"):
            reader.read(handle, [2 * 4096], 1)
        assert [(finding.path, finding.harmless) for finding in store.check()] == [(str(path), False)]
        assert "page 2" in str(store.check()[0])
    with pytest.raises(CorruptionError, match="page 2"):
        Store.open(root, KIND, verify="open")
    with Store.open(root, KIND, verify="off") as store, Reader() as reader:
        assert store.read_segment("s")[2 * 4096 + 97] == 1
        assert reader.read(store.attach("s", reader), [2 * 4096 + 97], 1).tolist() == [[1]]
        assert [finding.harmless for finding in store.check()] == [False]
    path.unlink()
    with pytest.raises(CorruptionError, match=r"s\.00000001\.seg: missing"):
        Store.open(root, KIND)
    with pytest.raises(CorruptionError, match=r"s\.00000001\.seg: missing"):
        Store.open(root, KIND, writable=True)


def test_leftovers_are_reported_and_go_with_the_next_writer(root: Path) -> None:
    with Store.create(root, KIND) as store:
        commit(store, s=b"s" * 97)
    path = root / "segments" / "s.00000001.seg"
    with open(path, "ab") as file:
        file.write(b"tail")
    for name in ("segments/s.00000002.seg", "tmp/part", "catalog.sum.new"):
        (root / name).write_bytes(b"left by a crash")
    with Store.open(root, KIND, verify="open") as store:
        found = {os.path.relpath(finding.path, root): finding for finding in store.check()}
        assert sorted(found) == ["catalog.sum.new", "segments/s.00000001.seg", "segments/s.00000002.seg", "tmp/part"]
        assert all(finding.harmless for finding in found.values())
        assert "4 bytes past" in str(found["segments/s.00000001.seg"])
        assert contents(store)[1] == {"s": b"s" * 97}
    with Store.open(root, KIND, writable=True) as store:
        assert os.listdir(root / "tmp") == []
        assert os.listdir(root / "segments") == ["s.00000001.seg"]
        assert commit(store, s=b"again") == 2
        assert store.check() == []


def test_the_catalog_does_not_grow_with_commits(root: Path) -> None:
    with Store.create(root, KIND) as store:
        sizes = []
        for number in range(100):
            commit(store, {"large": os.urandom(50_000), f"key{number % 7}": b"v"}, s=bytes(4096 * (number % 5)))
            sizes.append((root / "catalog" / "data.mdb").stat().st_size)
        assert max(sizes[50:]) == max(sizes[:20]) < 8 * 50_000


def test_memory_can_be_asked_for_while_another_thread_begins_a_segment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.create(root, KIND) as store, store.begin() as tx:

        def memory_bytes(_: SegmentWriter) -> int:
            if "b" not in tx.written:
                tx.segment("b")
                tx.put("c", b"")
            return 5

        tx.segment("a")
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "memory_bytes", property(memory_bytes))
            assert store.memory_bytes >= 5
        assert (tx.written, tx.changed) == (["a", "b"], ["c"])


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_buffers_go_with_their_transaction(root: Path, end: str, request: pytest.FixtureRequest) -> None:
    gc.disable()  # beside torch's many objects Python hardly ever looks for cycles
    request.addfinalizer(gc.enable)
    with Store.create(root, KIND) as store:
        tx = store.begin()
        tx.segment("s").append(bytes(2**20 - 1))
        writer = weakref.ref(tx.segment("t"))
        assert writer() is not None
        getattr(tx, end)()
        assert (tx.memory_bytes, writer()) == (0, None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(4000, 40_000), st.integers(1 << 20, 3 << 20)), max_size=12),
    st.sampled_from([4096, 8192, 3 * 4096, 1 << 20]),
    st.integers(0, 20),
)
def test_no_more_waits_than_is_allowed(sizes: list[int], buffer_bytes: int, flushed: int) -> None:
    random = np.random.default_rng(len(sizes))
    pieces = [random.integers(0, 256, size, np.uint8) for size in sizes]
    with (
        tempfile.TemporaryDirectory(dir=FAST) as folder,
        Store.create(Path(folder) / "store", KIND) as store,
        store.begin(buffer_bytes) as tx,
    ):
        segment = tx.segment("all")
        written, least = 0, segment.memory_bytes
        for number, piece in enumerate(pieces):
            assert segment.append(piece) == written
            written += len(piece)
            waiting = segment.memory_bytes - least + min(buffer_bytes, 1 << 14)
            assert waiting <= min(buffer_bytes, 2 * written + (1 << 14)) + 8 * (written >> 12)
            if number == flushed:
                assert segment.flush()[0] == written // 4096 * 4096
        tx.commit()
        assert store.read_segment("all").tobytes() == b"".join(piece.tobytes() for piece in pieces)
