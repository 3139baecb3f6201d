"""An index in a backup: searched in place it answers as it does here, with warm pages and without, and so do copies."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import memhier.remote.place
from memhier import Store
from memhier.ann import ZoomIndex
from memhier.ann.decoder import LogitIndex
from memhier.benchmarks.simulated_store import Bucket, simulated

URL = "simulated://bucket/index"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)
    with simulated("bucket") as bucket:
        yield bucket


def assert_same(index: ZoomIndex, other: ZoomIndex, queries: np.ndarray, **options: object) -> None:
    found, expected = index.search(queries, 10, **options), other.search(queries, 10, **options)  # type: ignore[arg-type]
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.distances, expected.distances)
    assert found.stats["page_requests"] == expected.stats["page_requests"]


@pytest.mark.parametrize(("dimension", "dtype"), [(96, "float32"), (64, "float16"), (1200, "uint8")])
def test_search_in_place_equals_search_here(tmp_path: Path, bucket: Bucket, dimension: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    vectors = (random.normal(size=(3000, dimension)) * 20 + 100).astype(dtype)
    queries = random.normal(size=(20, dimension)) * 20 + 100
    attributes = {"color": random.choice(["red", "green"], 3000), "price": random.integers(0, 100, 3000)}
    ids = [f"name-{number}" for number in range(3000)] if dtype == "float16" else None
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB", attributes=attributes, ids=ids) as here:
        assert here.push(URL).moved_bytes > vectors.nbytes
        with ZoomIndex.open(URL, cache=tmp_path / "cache") as far:
            for options in ({}, {"where": "color == 'red' and price < 30"}, {"recall": 1.0}):
                assert_same(far, here, queries, **options)
            warm = bucket.requests
            assert_same(far, here, queries)
            assert bucket.requests == warm
            wanted = [here.search(queries[0], 1).ids[0]]
            assert np.array_equal(far.reconstruct(wanted), here.reconstruct(wanted))
            with pytest.raises(OSError, match="only read in place"):
                far.add(vectors[:1])
            # The cache holds the pages of the last backup; a change moves little, and is seen by those that open it.
            added = here.add(vectors[:50] + 1, ids=None if ids is None else [f"new-{number}" for number in range(50)])
            here.remove(added[:10])
            here.commit()
            moved = here.push(URL)
            assert moved.moved_bytes < moved.nbytes / 3
            assert len(far) == 3000
        with ZoomIndex.open(URL, cache=tmp_path / "cache", cache_bytes="1MiB") as far:
            assert len(far) == 3040
            assert_same(far, here, queries)
        ZoomIndex.pull(URL, tmp_path / "copy")
        with ZoomIndex.open(tmp_path / "copy", writable=True) as copy:
            assert copy.check() == []
            assert_same(copy, here, queries)
            copy.remove(wanted)
            copy.commit()
            assert copy.push(URL).generation == moved.generation + 1


def test_documents_in_place_equal_those_here(tmp_path: Path, bucket: Bucket) -> None:
    vectors = np.random.default_rng(0).normal(size=(2500, 24)).astype("float32")
    documents = {
        "text": [f"text {number} " * (number % 40) for number in range(2500)],
        "long": [None if number % 500 else "x" * 9000 for number in range(2500)],
    }
    with ZoomIndex.build(tmp_path / "index", vectors, documents=documents, dram="4MiB") as here:
        here.add(vectors[:3] + 0.1, documents=[{"text": "waits"}, {}, {"new": [1, {"a": None}]}])
        here.commit()
        here.update([7, 2501], vectors[:2], documents={"long": ["y" * 5000, None]})
        here.commit()
        here.push(URL)
        with ZoomIndex.open(URL, cache=tmp_path / "cache", cache_bytes="128KiB") as far:
            for _ in range(2):
                found = far.search(vectors[::10], 8, recall=1, fields=True).rows()
                assert found == here.search(vectors[::10], 8, recall=1, fields=True).rows()
            every = np.arange(2503)
            assert {name: column.tolist() for name, column in far.fetch(every).items()} == {
                name: column.tolist() for name, column in here.fetch(every).items()
            }


def test_an_index_is_built_in_a_folder_and_pushed_to_another(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vectors = np.random.default_rng(0).normal(size=(500, 8)).astype("float32")
    with pytest.raises(ValueError, match="build it in a folder"):
        ZoomIndex.build(URL, vectors, dram="4MiB")
    assert [*tmp_path.iterdir()] == []
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        for push in (index.push, index.save_to):
            with pytest.raises(ValueError, match="in the store itself"):
                push(f"file://{index.path}")
        assert index.check() == []
        index.push(f"file://{tmp_path}/far")
    with pytest.raises(ValueError, match="open it by its URL"):
        ZoomIndex.open(tmp_path / "far")


def test_an_empty_index(tmp_path: Path, bucket: Bucket) -> None:
    with ZoomIndex.build(tmp_path / "index", np.zeros((0, 8), "float32"), dram="4MiB", grow_to=1000) as here:
        here.save_to(URL)
    with ZoomIndex.open(URL, cache=tmp_path / "cache") as far:
        assert far.search(np.zeros(8), 3).ids.tolist() == [-1, -1, -1]


def test_a_decoder(tmp_path: Path, bucket: Bucket) -> None:
    random = np.random.default_rng(0)
    weight = random.normal(size=(8_000, 64)).astype("float32")
    hidden = random.normal(size=(300, 64)).astype("float32")
    here = LogitIndex.build(weight, contexts=hidden, k=5)
    here.save(URL)
    for dram in (None, here.memory_bytes + (3 << 20)):
        with_rows = LogitIndex.open(URL, dram=dram, cache=tmp_path / "cache")
        assert np.array_equal(with_rows.topk(hidden[:20], 5).indices, here.topk(hidden[:20], 5).indices)
        with_rows.close()


def test_changes_of_an_index_at_a_url_are_refused_with_the_way(tmp_path: Path, bucket: Bucket) -> None:
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype("float32")
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as here:
        here.push(URL)
    with ZoomIndex.open(URL, cache=tmp_path / "cache") as far:
        changes: list[Callable[[], object]] = [
            lambda: far.add(vectors[:1]),
            lambda: far.remove([1]),
            lambda: far.update([1], vectors[:1]),
            far.commit, far.compact, lambda: far.prepare(1), far.publish, far.withdraw,
        ]  # fmt: skip
        for change in changes:
            with pytest.raises(OSError, match="only read in place; pull it into a folder") as caught:
                change()
            assert (caught.value.errno, caught.value.filename) == (errno.EROFS, URL)
    with (
        Store.open(URL, "zoom-index", cache=tmp_path / "cache") as store,
        pytest.raises(OSError, match="pull it") as caught,
    ):
        store.begin()
    assert caught.value.filename == URL
    with Store.open(tmp_path / "index", "zoom-index") as store, pytest.raises(OSError, match="pass writable=True"):
        store.begin()


def test_a_reader_in_place_follows_new_backups(tmp_path: Path, bucket: Bucket) -> None:
    vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype("float32")
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB", grow_to=9000) as here:
        here.push(URL)
        with ZoomIndex.open(URL, cache=tmp_path / "cache") as far:
            for turn in range(3):
                here.add(vectors[:100] + turn + 1)
                here.commit(compact=turn == 2)
                assert not far.refresh()
                here.push(URL)
                assert far.refresh()
                assert not far.refresh()
                assert len(far) == len(here) == 2100 + 100 * turn
                assert_same(far, here, vectors[:20])
