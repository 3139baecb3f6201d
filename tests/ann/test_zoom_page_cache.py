"""Pages held in the DRAM that codes leave: the same answers as without them, and fewer reads."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann import ZoomIndex
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.storage.layout import IndexSizes, plan_layout
from memhier.errors import CorruptionError
from memhier.io.page_file import PAGE_BYTES

WORK = ("reads", "pages", "bytes")
COUNT, AXES = 3000, 32


def _vectors(count: int, seed: int, dtype: str = "float32", axes: int = AXES) -> Any:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(40, axes))
    found = 20 * (centres[random.integers(0, len(centres), count)] + 0.5 * random.normal(size=(count, axes)))
    return np.clip(found, 0, 255).astype(dtype) if dtype == "uint8" else found.astype(dtype)


def _build(path: Path, vectors: Any, dram: int = 8 << 20, **options: Any) -> Path:
    ZoomIndex.build(path, vectors, dram=dram, **options).close()
    return path


def _pages(index: ZoomIndex) -> int:
    """Return the pages of the files that a search reads."""
    return sum(path.stat().st_size for path in (index.path / "segments").glob("p*-rows.*")) // PAGE_BYTES


def _same(cold: ZoomIndex, held: ZoomIndex, queries: Any, **options: Any) -> tuple[int, int]:
    """Search both ways, and return the pages that each reads; everything else is the same."""
    for query in (queries, queries[0]):
        one, other = cold.search(query, **options), held.search(query, **options)
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.distances, other.distances)
        assert other.stats["pages"] <= one.stats["pages"]
        assert {k: v for k, v in one.stats.items() if k not in WORK} == {
            k: v for k, v in other.stats.items() if k not in WORK
        }
    return one.stats["pages"], other.stats["pages"]


@pytest.mark.parametrize(
    ("dtype", "metric", "axes"),
    [
        ("float32", "l2", 32), ("float16", "ip", 32), ("uint8", "l2", 32), ("int8", "cosine", 32),
        ("float32", "cosine", 300),
    ],
)  # fmt: skip
def test_answers_do_not_depend_on_the_pages_held(tmp_path: Path, dtype: str, metric: Metric, axes: int) -> None:
    vectors, queries = _vectors(1500, 1, dtype, axes), _vectors(20, 2, dtype, axes)
    path = _build(tmp_path / "index", vectors, metric=metric)
    with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
        assert held.stats()["pool_bytes"] > 0 == cold.stats()["pool_bytes"]
        for recall in (0.8, 0.99, 1.0):
            for _ in range(2):
                read, again = _same(cold, held, queries, k=7, recall=recall)
            assert read > 0 == again
        assert held.stats()["pool_hits"] > 0 == cold.stats()["pool_hits"]
        assert held.memory_bytes <= held.stats()["planned_bytes"] <= held.stats()["dram"]


def test_once_every_page_was_read_a_search_reads_nothing(tmp_path: Path) -> None:
    names = [f"vector {number}" for number in range(COUNT)]
    path = _build(tmp_path / "index", _vectors(COUNT, 1), ids=names)
    with ZoomIndex.open(path) as index:
        for _ in index.blocks():
            pass
        before = index.stats()
        assert before["pool_pages"] >= _pages(index)
        result = index.search(_vectors(100, 2), 10, recall=0.95)
        index.range_search(_vectors(1, 3)[0], 1000.0)
        after = index.stats()
        assert [after[name] for name in WORK] == [before[name] for name in WORK]
        assert result.stats["pages"] == 0 < result.stats["page_requests"]
        assert after["pool_hits"] > before["pool_hits"]


@pytest.mark.parametrize("more", [0.0, 0.2])
def test_a_small_pool_serves_some_reads_within_the_budget(tmp_path: Path, more: float) -> None:
    vectors = _vectors(20_000, 1, axes=64)
    dram = int((0.8 + more) * vectors.nbytes)
    path = _build(tmp_path / "index", vectors, dram)
    with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
        room = held.stats()["pool_bytes"] // PAGE_BYTES
        assert 20_000 // 16 // 64 < room < 20_000 // 16
        for seed in range(4):
            _same(cold, held, _vectors(30, seed, axes=64), k=10)
        stats = held.stats()
        assert stats["pool_hits"] > 0
        assert 0 < stats["pool_pages"] <= room
        assert stats["pages"] < cold.stats()["pages"]
        assert held.memory_bytes <= stats["planned_bytes"] <= dram


@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning")
def test_limits_count_the_pages_of_a_cold_search(tmp_path: Path) -> None:
    path, queries = _build(tmp_path / "index", _vectors(COUNT, 1)), _vectors(20, 2)
    with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
        held.search(queries, 10)
        for most in (1, 2, 5):
            _same(cold, held, queries, k=10, recall=0.99, max_reads=most)


def test_filters_and_fields_find_the_same(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    attributes = {"price": random.random(COUNT), "kind": [f"k{number % 5}" for number in range(COUNT)]}
    documents = {"text": [f"text {number}" for number in range(COUNT)]}
    path = _build(tmp_path / "index", _vectors(COUNT, 1), attributes=attributes, documents=documents)
    with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
        for where in ("price < 0.3", "kind == 'k2' and price > 0.9", "price < 0.002"):
            for _ in range(2):
                _same(cold, held, _vectors(10, 2), k=5, where=where)
        one, other = (index.search(_vectors(3, 2), 5, fields=True) for index in (cold, held))
        assert {name: column.tolist() for name, column in one.fields.items()} == {
            name: column.tolist() for name, column in other.fields.items()
        }


@pytest.mark.long
@pytest.mark.skipif(backend.core is None, reason="builds many indexes: minutes without the compiled core")
def test_codes_on_ssd_and_their_pages(tmp_path: Path) -> None:
    vectors = _vectors(20_000, 1, axes=64)
    path, dram = tmp_path / "index", 0
    for dram in range(150_000, 4_000_000, 30_000):
        try:
            _build(path, vectors, dram)
        except ValueError:
            continue
        with ZoomIndex.open(path) as index:
            if index.stats()["pool_bytes"]:
                break
        shutil.rmtree(path)
    with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
        assert held.stats()["codes"] == "ssd"
        for seed in range(3):
            _same(cold, held, _vectors(10, seed, axes=64), k=10)
        assert held.stats()["pool_hits"] > 0
        assert held.stats()["pages"] < cold.stats()["pages"]
        assert held.memory_bytes <= held.stats()["planned_bytes"] <= dram


def _life(index: ZoomIndex, check: Callable[[], object]) -> None:
    """Change an index in every way."""
    random = np.random.default_rng(5)
    for step in range(4):
        index.add(_vectors(300, 10 + step))
        check()
        index.remove(random.choice(500, 50, replace=False) + 500 * step)
        index.update(np.arange(20) + 2500, _vectors(20, 20 + step))
        check()
        index.commit(compact=False)
        check()
    index.compact()
    check()
    index.add(_vectors(10, 30))
    index.commit()
    check()


def test_an_index_lives_on_with_pages_held(tmp_path: Path) -> None:
    path = _build(tmp_path / "held", _vectors(COUNT, 1), grow_to=6000)
    shutil.copytree(path, tmp_path / "cold")
    found: dict[bool, list[Any]] = {True: [], False: []}
    for pool, name in ((True, "held"), (False, "cold")):
        with ZoomIndex.open(tmp_path / name, writable=True, pool=pool) as index:

            def check(index: ZoomIndex = index, pool: bool = pool) -> None:
                for seed in range(3):
                    result = index.search(_vectors(10, seed), 8)
                    found[pool].append((result.ids, result.distances))
                assert index.memory_bytes <= index.stats()["planned_bytes"] <= index.stats()["dram"]

            check()
            _life(index, check)
            stats = index.stats()
            assert (stats["pool_hits"] > 0) == pool
            # Those of parts that are gone have left.
            assert stats["pool_pages"] <= sum(
                path.stat().st_size // PAGE_BYTES for path in (index.path / "segments").glob("p*")
            )
            assert index.check() == []
        with ZoomIndex.open(tmp_path / name, pool=pool) as index:
            found[pool].append((index.search(_vectors(10, 0), 8).ids, np.zeros(0)))
    for (ids, near), (other_ids, other_near) in zip(found[True], found[False], strict=True):
        np.testing.assert_array_equal(ids, other_ids)
        np.testing.assert_array_equal(near, other_near)


def test_a_full_index_takes_the_dram_of_pages_for_vectors(tmp_path: Path) -> None:
    vectors = _vectors(4000, 1, axes=64)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="1MiB", grow_to=8000) as index:
        held = index.stats()["pool_bytes"]
        assert held > 0
        for step in range(2):
            index.add(_vectors(1000, 40 + step, axes=64))
            index.search(vectors[:20], 10)
            assert index.memory_bytes <= index.stats()["planned_bytes"] <= index.stats()["dram"]
            index.commit(compact=False)
            assert index.memory_bytes <= index.stats()["planned_bytes"] <= index.stats()["dram"]
        assert index.stats()["pool_bytes"] < held


def test_a_reader_that_follows_a_writer_forgets_the_pages_of_old_parts(tmp_path: Path) -> None:
    path = _build(tmp_path / "index", _vectors(COUNT, 1), grow_to=6000)
    with ZoomIndex.open(path, writable=True) as writer, ZoomIndex.open(path) as reader:
        for step in range(3):
            reader.search(_vectors(50, 2), 10)
            writer.add(_vectors(200, 60 + step))
            writer.commit(compact=step == 1)
            assert reader.refresh()
            with ZoomIndex.open(path, pool=False) as cold:
                _same(cold, reader, _vectors(20, 3), k=5)
            assert reader.memory_bytes <= reader.stats()["dram"]


def test_tuning_finds_the_same_with_pages_held(tmp_path: Path) -> None:
    path, queries = _build(tmp_path / "index", _vectors(COUNT, 1)), _vectors(100, 2)
    with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
        held.search(queries, 10)
        for index in (cold, held):
            index.tune(queries)
        _same(cold, held, _vectors(20, 3), k=10)
        assert held.memory_bytes <= held.stats()["planned_bytes"] <= held.stats()["dram"]


def test_threads_search_beside_changes(tmp_path: Path) -> None:
    path = _build(tmp_path / "index", _vectors(COUNT, 1), grow_to=6000)
    queries, failures = _vectors(16, 2), list[str]()
    with ZoomIndex.open(path, pool=False) as cold:
        wanted = cold.search(queries, 5, allow=np.arange(COUNT)).distances
    stop = threading.Event()
    with ZoomIndex.open(path, writable=True) as index:

        def work() -> None:
            while not stop.is_set():
                if not np.array_equal(index.search(queries, 5, allow=np.arange(COUNT)).distances, wanted):
                    failures.append("other distances")

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(6):
            index.add(_vectors(200, 80 + step))
            index.commit(compact=False)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_damage_is_found_when_a_page_enters(tmp_path: Path) -> None:
    path = _build(tmp_path / "index", _vectors(COUNT, 1))
    (file,) = (path / "segments").glob("p0-rows.*")
    contents = bytearray(file.read_bytes())
    for page in range(0, len(contents), PAGE_BYTES):
        contents[page + 11] ^= 1
    file.write_bytes(contents)
    with ZoomIndex.open(path) as index:
        for _ in range(2):
            with pytest.raises(CorruptionError):
                index.search(_vectors(1, 2), 3)
        assert index.stats()["pool_pages"] == 0


@given(
    count=st.sampled_from([1, 2, 1000, 100_000, 3_000_000]),
    dimension=st.sampled_from([1, 64, 300, 1536]),
    per_vector=st.floats(1, 4000),
    item=st.sampled_from([1, 2, 4]),
    growing=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_codes_come_before_pages_and_both_within_the_budget(
    count: int, dimension: int, per_vector: float, item: int, growing: bool
) -> None:
    row_bytes = item * dimension
    sizes = IndexSizes(count, dimension, "l2", "rabitq", row_bytes, 4, 200_000, growing=growing)
    dram = int(count * per_vector) + (2 << 20)
    try:
        layout, richer = plan_layout(sizes, dram), plan_layout(sizes, 2 * dram)
    except ValueError:
        return
    assert layout.memory_bytes <= dram
    assert richer.memory_bytes <= 2 * dram
    if not layout.on_ssd:
        assert richer.code_bytes >= layout.code_bytes
        assert richer.pool_pages >= layout.pool_pages or richer.code_bytes > layout.code_bytes
    plenty = plan_layout(sizes, dram + 20 * (count * (row_bytes + dimension) + (64 << 20)))
    assert plenty.pool_pages >= count * row_bytes // PAGE_BYTES


@pytest.mark.parametrize(
    ("count", "dimension", "metric", "step"),
    [(194_222, 128, "l2", 2), (194_222, 128, "ip", 2), (100_000, 200, "l2", 1), (100_000, 960, "l2", 2)],
)
def test_longer_codes_take_no_greater_share_of_the_lists_than_they_grow_by(
    count: int, dimension: int, metric: Metric, step: int
) -> None:
    """From 128 axes on, a code of whole blocks of 16 axes grows by two bytes: an odd one would stay unused."""
    sizes, planned, fewer = IndexSizes(count, dimension, metric, "rabitq", 4 * dimension, 4, 200_000), set(), 0
    for dram in np.linspace(dimension / 4, dimension / 2 + 80, 300) * count:
        layout = plan_layout(sizes, int(dram), on_ssd=False)
        wanted = min(each for each in (count // 100, count // 200, count // 400) if each >= layout.lists)
        assert (wanted - layout.lists) / wanted <= min(1 / 16, step / layout.code_bytes)
        planned.add(layout.code_bytes)
        fewer += layout.lists < wanted
    assert {size % 2 for size in planned if size < dimension // 2} == ({0} if step == 2 else {0, 1})
    assert fewer or dimension > 200  # shares of long codes are less than a list
