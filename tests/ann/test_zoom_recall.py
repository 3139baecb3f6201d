"""Recall on real vectors within 15 % of their bytes, read cold with direct I/O."""

import pytest

from memhier.ann import ZoomIndex
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k


@pytest.mark.parametrize("name", ["fashion-mnist", "sift-imagenet200k"])
def test_recall_on_real_data(tmp_path, name):
    try:
        data = load_search_set(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    queries = data.queries[:300]
    with ZoomIndex.build(tmp_path / "index", data.base, dram=int(0.15 * data.base.nbytes)) as index:
        result = index.search(queries, 10)
        assert index.memory_bytes < 0.15 * data.base.nbytes
        true = exact_neighbours(data.base, queries, 10)[1]
        assert recall_at_k(result.distances, true) >= 0.95
        assert result.stats["reads"] > 0
