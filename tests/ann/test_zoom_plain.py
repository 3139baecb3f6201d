"""Searches of one query without filter, limit or field find what all other ways to search find."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memhier.ann import ZoomIndex

COUNT, DIMENSION = 3000, 24


def points(seed: int, count: int = COUNT, dimension: int = DIMENSION) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(30, dimension)) * 4
    made = centres[random.integers(0, 30, count)] + random.normal(size=(count, dimension))
    return made.astype(np.float32)


def check_equal(index: ZoomIndex, queries: npt.NDArray[Any], k: int, recall: float | None) -> None:
    """Assert that each query alone has the result of the batch, and that of a limit that ends nothing."""
    batch = index.search(queries, k, recall=recall)
    for number, query in enumerate(queries):
        found = index.search(query, k, recall=recall)
        limited = index.search(query, k, recall=recall, max_reads=10**9)
        for other in (limited.ids, batch.ids[number]):
            np.testing.assert_array_equal(found.ids, other)
        for other in (limited.distances, batch.distances[number]):
            np.testing.assert_array_equal(found.distances, other)
        assert found.stats == limited.stats
        assert found.fields == {}


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("dram", ["1MiB", "4MiB"])
def test_a_query_alone_finds_what_a_batch_and_a_limited_search_find(tmp_path: Path, metric: str, dram: str) -> None:
    ZoomIndex.build(tmp_path / "index", points(1), metric=metric, dram=dram).close()
    with ZoomIndex.open(tmp_path / "index", pool=False) as index:  # so that all searches read
        for k, recall in ((1, 0.8), (10, None), (10, 0.9), (30, 0.95)):
            check_equal(index, points(2, 12), k, recall)


def test_rows_that_straddle_pages_and_codes_on_ssd(tmp_path: Path) -> None:
    ZoomIndex.build(tmp_path / "wide", points(1, 600, 1500), dram="4MiB").close()
    with ZoomIndex.open(tmp_path / "wide", pool=False) as index:
        check_equal(index, points(2, 5, 1500), 10, 0.9)
    ZoomIndex.build(tmp_path / "ssd", points(1, 40_000, 8), dram=600 << 10).close()
    with ZoomIndex.open(tmp_path / "ssd", pool=False) as index:
        assert index.stats()["codes"] == "ssd"
        check_equal(index, points(2, 8, 8), 10, 0.9)


def test_changes_count_at_once(tmp_path: Path) -> None:
    query = points(2, 1)[0]
    with ZoomIndex.build(tmp_path / "index", points(1), dram="4MiB") as built:
        before = built.search(query, 5)
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        np.testing.assert_array_equal(index.search(query, 5).ids, before.ids)
        index.add(query[None], ids=[COUNT])
        assert index.search(query, 5).ids[0] == COUNT
        index.commit()
        assert index.search(query, 5).ids.tolist() == [COUNT, *before.ids[:4].tolist()]
        index.remove([COUNT])
        np.testing.assert_array_equal(index.search(query, 5).ids, before.ids)


def test_more_copies_than_there_is_room_for(tmp_path: Path) -> None:
    vectors = np.repeat(points(1, 3), 2000, axis=0)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="2MiB") as index:
        for k, recall in ((1, 0.9), (10, 0.99), (600, 0.9), (10, 1.0)):
            batch = index.search(vectors[::2000], k, recall=recall)
            for number, query in enumerate(vectors[::2000]):
                np.testing.assert_array_equal(index.search(query, k, recall=recall).ids, batch.ids[number])


def test_errors_tell_of_the_query(tmp_path: Path) -> None:
    with ZoomIndex.build(tmp_path / "index", points(1), metric="l2", dram="4MiB") as index:
        index.search(points(2, 1)[0], 10)
        with pytest.raises(ValueError, match="queries row 0"):
            index.search(np.full(DIMENSION, 3e38, np.float32), 10)
        with pytest.raises(ValueError, match="queries row 0 holds NaN"):
            index.search(np.full(DIMENSION, np.nan), 10)


def test_numbers_of_any_kind_and_more_efforts_than_are_kept(tmp_path: Path) -> None:
    query = points(2, 1)[0]
    with ZoomIndex.build(tmp_path / "index", points(1), dram="4MiB") as index:
        expected = index.search(query, 10, recall=0.9).ids.tolist()
        assert index.search(query, np.array(10), recall=np.float64(0.9)).ids.tolist() == expected
        for k in range(1, 100):
            index.search(query, k, recall=0.9)
        assert index.search(query, 10, recall=0.9).ids.tolist() == expected
