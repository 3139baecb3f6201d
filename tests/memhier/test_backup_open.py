"""Reading a backup in place: pages come on demand, stay within a limit on SSD, and are right whatever happens."""

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memhier.remote.place
from memhier import CorruptionError, Reader, Store
from memhier.benchmarks.simulated_store import Bucket, simulated

URL = "simulated://bucket/store"
EXTENT = 64 * 1024
ENGINES = [None, "python"]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with simulated("bucket") as bucket:
        yield bucket


@pytest.fixture
def contents(tmp_path: Path, bucket: Bucket) -> dict[str, np.ndarray]:
    """Push a store of a few segments and return their bytes."""
    random = np.random.default_rng(0)
    sizes = {"rows": 40 * EXTENT + 5000, "other": 3 * EXTENT, "twin": 3 * EXTENT, "small": 100, "empty": 0}
    found = {name: random.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}
    found["twin"] = found["other"].copy()
    with Store.create(tmp_path / "store", "test") as store:
        with store.begin() as tx:
            for name, contents in found.items():
                tx.segment(name).append(contents)
            tx.put("key", b"value")
            tx.commit()
        store.push(URL)
    return found


def opened(tmp_path: Path, **options: Any) -> Store:
    return Store.open(URL, "test", cache=tmp_path / "cache", **options)


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (folder / "cache").rglob("*.seg"))


def test_whole_segments_and_values(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray]) -> None:
    with opened(tmp_path) as store:
        assert (store.get("key"), store.generation, store.writable) == (b"value", 1, False)
        for name, expected in contents.items():
            assert np.array_equal(store.read_segment(name), expected)
        assert store.memory_bytes > 0
        sent = bucket.sent
        assert store.check() == []
        assert bucket.sent == sent
        store.copy(tmp_path / "copy")
        with pytest.raises(OSError, match="only read in place"):
            store.begin()
    with Store.open(tmp_path / "copy", "test") as copy:
        assert np.array_equal(copy.read_segment("rows"), contents["rows"])
    sent = bucket.sent
    with opened(tmp_path) as store:
        assert np.array_equal(store.read_segment("rows"), contents["rows"])
    assert bucket.sent - sent < EXTENT  # the description alone


@pytest.mark.parametrize("engine", ENGINES)
def test_random_reads_bring_their_extents_once(
    tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray], engine: str | None
) -> None:
    random, before = np.random.default_rng(1), bucket.sent
    with opened(tmp_path) as store, Reader(engine) as reader:
        handles = {store.attach(name, reader): name for name in contents}
        for _ in range(20):
            count, length = int(random.integers(1, 30)), int(random.choice([1, 90, 100]))
            files = random.choice([handle for handle, name in handles.items() if name != "empty"], count)
            offsets = np.array([random.integers(0, len(contents[handles[file]]) - length + 1) for file in files])
            found = reader.read(files.astype(np.int32), offsets, length)
            for row, file, offset in zip(found, files, offsets, strict=True):
                assert np.array_equal(row, contents[handles[file]][offset : offset + length])
        sent, requests = bucket.sent, bucket.requests
        reader.read(next(iter(handles)), offsets[:1] * 0, 100)
        again = reader.read(files.astype(np.int32), offsets, length)
        assert np.array_equal(again, found)
        assert (bucket.sent, bucket.requests) == (sent, requests)
    assert bucket.sent - before < 60 * EXTENT


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_holds_and_bytes_stay_right(
    tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray], engine: str | None
) -> None:
    random = np.random.default_rng(2)
    limit = 8 * EXTENT
    with opened(tmp_path, cache_bytes=limit) as store, Reader(engine) as reader:
        handle = store.attach("rows", reader)
        for _ in range(50):
            offsets = random.integers(0, len(contents["rows"]) - 10, 4)
            for row, offset in zip(reader.read(handle, offsets, 10), offsets, strict=True):
                assert np.array_equal(row, contents["rows"][offset : offset + 10])
            assert used_bytes(tmp_path) <= limit + 8 * EXTENT
        # More than the limit at a time: the call keeps all that it needs.
        offsets = np.arange(40) * EXTENT
        found = reader.read(handle, offsets, 10)
        assert np.array_equal(found, np.stack([contents["rows"][at : at + 10] for at in offsets]))
    with opened(tmp_path, cache_bytes=limit):
        assert used_bytes(tmp_path) <= limit + 8192  # the file system keeps a list of the pieces
    with pytest.raises(ValueError, match="cache_bytes"):
        opened(tmp_path, cache_bytes=1000)


def test_extents_in_use_stay_while_others_go(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray]) -> None:
    with opened(tmp_path, cache_bytes=8 * EXTENT) as store, Reader() as reader:
        handle = store.attach("rows", reader)
        brought = 0
        for at in range(2, 40):
            sent = bucket.sent
            reader.read(handle, [0, EXTENT], 10)
            brought += bucket.sent - sent
            reader.read(handle, [at * EXTENT], 10)
    assert brought <= 6 * EXTENT  # 76 look-ups


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_with_a_small_cache(
    tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray], engine: str | None
) -> None:
    failures: list[BaseException] = []
    with opened(tmp_path, cache_bytes=12 * EXTENT) as store, Reader(engine) as reader:
        handle = store.attach("rows", reader)

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    offsets = random.integers(0, len(contents["rows"]) - 10, 2)
                    for row, offset in zip(reader.read(handle, offsets, 10), offsets, strict=True):
                        assert np.array_equal(row, contents["rows"][offset : offset + 10])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_cache_heals(
    tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray], engine: str | None
) -> None:
    with opened(tmp_path) as store:
        store.read_segment("rows")
    for path in (tmp_path / "cache").rglob("*.seg"):
        path.write_bytes(b"\xff" * path.stat().st_size)  # as a power cut may leave it, with the marks kept
    offsets = np.arange(0, len(contents["rows"]) - 10, 3 * EXTENT)
    with opened(tmp_path) as store, Reader(engine) as reader:
        found = reader.read(store.attach("rows", reader), offsets, 10)
        assert np.array_equal(found, np.stack([contents["rows"][at : at + 10] for at in offsets]))
        assert np.array_equal(store.read_segment("rows"), contents["rows"])


@pytest.mark.parametrize("fault", ["error", "lost answer", "cut short", "flipped byte"])
def test_faults_on_the_way(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray], fault: str) -> None:
    bucket.requests = 0
    bucket.fault = lambda number: fault if number % 3 == 0 else None
    with opened(tmp_path) as store, Reader() as reader:
        found = reader.read(store.attach("rows", reader), [100, 39 * EXTENT], 50)
        assert np.array_equal(found[1], contents["rows"][39 * EXTENT :][:50])
        assert np.array_equal(store.read_segment("other"), contents["other"])
    assert bucket.requests > 6


@pytest.mark.parametrize("engine", ENGINES)
def test_faults_that_last(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray], engine: str | None) -> None:
    with opened(tmp_path) as store, Reader(engine) as reader:
        handle = store.attach("rows", reader)
        for fault, error, said in (
            ("error", OSError, "failed 6 times"),
            ("flipped byte", CorruptionError, "checksums"),
        ):
            bucket.fault = lambda number, fault=fault: fault
            with pytest.raises(error, match=said):
                reader.read(handle, [100], 50)
            with pytest.raises(error, match=said):
                store.read_segment("rows")
        bucket.fault = lambda number: None
        assert np.array_equal(reader.read(handle, [100], 50)[0], contents["rows"][100:150])
        for name in [name for name in bucket.objects if "objects" in name]:
            del bucket.objects[name]
        with pytest.raises(CorruptionError, match="pruned"):
            reader.read(handle, [20 * EXTENT], 50)
        assert np.array_equal(reader.read(handle, [100], 50)[0], contents["rows"][100:150])


def test_generations_share_pages(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray]) -> None:
    with opened(tmp_path) as old:
        old.read_segment("rows")
        with Store.open(tmp_path / "store", "test", writable=True) as store, store.begin() as tx:
            tx.segment("small").append(bytes(10))
            tx.drop("other")
            tx.drop("twin")
            tx.commit()
            store.push(URL)
        sent = bucket.sent
        with opened(tmp_path) as new:
            assert (old.generation, new.generation) == (1, 2)
            assert np.array_equal(new.read_segment("rows"), contents["rows"])
            assert not new.read_segment("small").any()
        assert bucket.sent - sent < EXTENT
        assert np.array_equal(old.read_segment("other"), contents["other"])
    del old, new
    before = len([*(tmp_path / "cache").rglob("*.seg")])
    with opened(tmp_path):
        assert len([*(tmp_path / "cache").rglob("*.seg")]) < before  # none has the old ones open


def read_all(url: str, cache: Path, expected: np.ndarray, seed: int) -> None:
    random = np.random.default_rng(seed)
    with Store.open(url, "test", cache=cache, cache_bytes=10 * EXTENT) as store, Reader() as reader:
        handle = store.attach("rows", reader)
        for _ in range(100):
            offsets = random.integers(0, len(expected) - 10, 3)
            for row, offset in zip(reader.read(handle, offsets, 10), offsets, strict=True):
                assert np.array_equal(row, expected[offset : offset + 10])


def test_processes_share_a_cache_and_die_in_it(tmp_path: Path, contents: dict[str, np.ndarray]) -> None:
    url = f"file://{tmp_path}/far"
    with Store.open(tmp_path / "store", "test") as store:
        store.push(url)
    fork = multiprocessing.get_context("fork")
    arguments = [(url, tmp_path / "cache", contents["rows"], seed) for seed in range(3)]
    processes = [fork.Process(target=read_all, args=each) for each in arguments]
    for process in processes:
        process.start()
    processes[2].kill()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes[:2]] == [0, 0]
    read_all(url, tmp_path / "cache", contents["rows"], 9)


def test_a_forked_child_reads_on(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray]) -> None:
    with opened(tmp_path) as store, Reader() as reader:
        handle = store.attach("rows", reader)
        reader.read(handle, [0], 10)

        def read() -> None:
            assert np.array_equal(reader.read(handle, [9 * EXTENT], 10)[0], contents["rows"][9 * EXTENT :][:10])

        child = multiprocessing.get_context("fork").Process(target=read)
        child.start()
        child.join()
        assert child.exitcode == 0
        read()


def test_threads_end_with_the_store_and_readers_go_on(
    tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray]
) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("memhier-extents")]

    store = opened(tmp_path)
    with Reader() as reader:
        handle = store.attach("rows", reader)
        reader.read(handle, [0, 20 * EXTENT], 10)
        begun = threads()
        assert begun
        store.close()
        for thread in begun:
            thread.join()
        assert np.array_equal(reader.read(handle, [9 * EXTENT], 10)[0], contents["rows"][9 * EXTENT :][:10])


def test_arguments(tmp_path: Path, bucket: Bucket, contents: dict[str, np.ndarray]) -> None:
    for options, said in (({"writable": True}, "pull it"), ({"verify": "off"}, "always checked")):
        with pytest.raises(ValueError, match=said):
            opened(tmp_path, **options)
    with opened(tmp_path, verify="open") as store:
        assert store.generation == 1
    assert not (tmp_path / "cache" / "nothing").exists()
