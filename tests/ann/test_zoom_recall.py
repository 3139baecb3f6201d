"""Recall on real vectors within half of their bytes, read cold with direct I/O."""

import pytest

from memhier.ann import ZoomIndex
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "count", "coding"),
    [
        ("sift-imagenet200k", 30_000, "rabitq"),
        pytest.param("sift-imagenet200k", 200_000, "rabitq", marks=pytest.mark.slow),
        pytest.param("sift-imagenet200k", 200_000, "pq", marks=pytest.mark.slow),
        pytest.param("fashion-mnist", 60_000, "rabitq", marks=pytest.mark.slow),
        pytest.param("fashion-mnist", 60_000, "pq", marks=pytest.mark.slow),
    ],
)
def test_recall_on_real_data(tmp_path, name, count, coding):
    try:
        data = load_search_set(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    base, queries = data.base[:count], data.queries[:300]
    dram = int(0.5 * base.nbytes) + (1 << 20)  # for buffers, which take a good part of so little
    with ZoomIndex.build(tmp_path / "index", base, dram=dram, preview=coding) as index:
        result = index.search(queries, 10)
        assert index.memory_bytes <= dram
        true = exact_neighbours(base, queries, 10)[1]
        assert recall_at_k(result.distances, true) >= 0.97
        assert 0 < result.stats["page_requests"] < 100 * len(queries)
