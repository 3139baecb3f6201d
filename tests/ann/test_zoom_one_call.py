"""A search in one call of the native core gives the results of one in steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import backend
from memhier.ann import ZoomIndex
from memhier.ann.zoom.search.search import Search
from memhier.ann.zoom.storage import layout

pytestmark = pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"k": 1, "recall": 0.9}, {"k": 10}, {"k": 10, "recall": 1}, {"k": 50, "recall": 0.95, "max_reads": 3},
    {"k": 10, "nprobe": 2}, {"k": 10, "radius": 20.0}, {"k": 10, "radius": 20.0, "recall": 1},
    {"k": 10, "deny": [1, 2, 3]}, {"k": 10, "where": "tags contains 0"},
    {"k": 10, "recall": 0.9, "where": "price < 0.6"},
    {"k": 5, "where": "tags contains all (1, 3)", "max_reads": 4}, {"k": 10, "where": "price < 0.01"},
    {"k": 3, "recall": 1, "where": "tags contains 2 and price < 0.5"}, {"k": 10, "where": "tags contains 99"},
)  # fmt: skip


def vectors(dtype: str, dimension: int) -> Any:
    rng, count = np.random.default_rng(dimension), 1500 if dimension < 1000 else 300
    values = np.abs(rng.normal(size=(count, dimension)) * (20 if dtype == "uint8" else 1))
    values[5], values[7] = values[6], 0
    return values.astype(dtype)


@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning", "ignore:calibration found:UserWarning")
@pytest.mark.parametrize("metric", ["l2", "cosine", "ip"])
@pytest.mark.parametrize(
    ("dtype", "dimension"),
    [("float32", 24), ("uint8", 130), ("float16", 3), pytest.param("float32", 1030, marks=pytest.mark.long)],
)
def test_one_call_finds_as_steps_do(
    metric: Any, dtype: str, dimension: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = vectors(dtype, dimension)
    queries = np.concatenate([base[9:30].astype(np.float32), np.ones((1, dimension), np.float32)])
    with ZoomIndex.build(
        tmp_path / "index", base, attributes=attributes_of(len(base)), metric=metric, dram="24MiB"
    ) as index:
        for change in range(2):
            if change:
                index.remove(np.arange(0, len(base), 3))
            check_one_call(index, queries, monkeypatch)


def attributes_of(count: int) -> dict[str, Any]:
    """Return a price and tags for each vector."""
    rng = np.random.default_rng(0)
    return {"price": rng.random(count), "tags": [rng.integers(0, 5, rng.integers(0, 4)).tolist() for _ in range(count)]}


def check_one_call(index: ZoomIndex, queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare searches in one call with searches in steps."""
    for options in OPTIONS:
        found = index.search(queries, **options)
        with monkeypatch.context() as patch:
            patch.setattr(Search, "compiled", lambda search, effort: None)
            steps = index.search(queries, **options)
        np.testing.assert_array_equal(found.ids, steps.ids)
        np.testing.assert_array_equal(found.distances, steps.distances)
        pool = ("reads", "pages", "bytes")  # which depend on the pages held, and on the queries of a wave
        assert {n: v for n, v in found.stats.items() if n not in pool} == {
            n: v for n, v in steps.stats.items() if n not in pool
        }
        alone = index.search(queries[3], **options)
        np.testing.assert_array_equal(alone.ids, found.ids[3])


@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning", "ignore:calibration found:UserWarning")
@pytest.mark.parametrize(
    ("metric", "dtype", "dimension"),
    [("l2", "float32", 24), ("ip", "uint8", 130), pytest.param("cosine", "float16", 3, marks=pytest.mark.long)],
)
def test_one_call_finds_as_steps_do_with_codes_on_ssd(
    metric: Any, dtype: str, dimension: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = vectors(dtype, dimension)
    queries = np.concatenate([base[9:30].astype(np.float32), np.ones((1, dimension), np.float32)])
    ids = np.arange(len(base)) + (2**40 if metric == "ip" else 0)
    monkeypatch.setattr(layout, "_fair_bytes", lambda padded: 1000)
    with ZoomIndex.build(
        tmp_path / "index", base, ids=ids, metric=metric, dram="1MiB", attributes=attributes_of(len(base))
    ) as index:
        assert index.stats()["codes"] == "ssd"
        check_one_call(index, queries, monkeypatch)
        index.remove(ids[::3])
        more = (base[:40] / 2).astype(dtype)
        index.add(more, ids=ids[:40] + len(base), attributes=attributes_of(len(more)))
        index.commit()
        check_one_call(index, queries, monkeypatch)


def test_a_query_that_overflows_is_named(tmp_path: Path) -> None:
    with (
        ZoomIndex.build(tmp_path / "index", vectors("float32", 24), dram="8MiB") as index,
        pytest.raises(ValueError, match="queries row 1 is too large"),
    ):
        index.search(np.array([[1.0] * 24, [1e30] * 24], np.float32), 3)
