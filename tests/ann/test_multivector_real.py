"""MultiVectorIndex on real data with a tenth of its bytes of DRAM: the overlap with exact MaxSim."""

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.benchmarks.workloads.tokens.token_sets import token_set


@pytest.mark.long
@pytest.mark.parametrize(("name", "dimension"), [("words", 128), ("patches", 64)])
def test_the_ten_best_with_little_dram(tmp_path, name, dimension):
    try:
        case = token_set(name, dimension, 4000, 30)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    # A small set needs more than a tenth, beside its buffers, for codes that are as long as those of a large one.
    dram = case.tokens.nbytes // 10 + (2560 << 10)
    tokens, starts = case.tokens.astype(np.float32), np.concatenate([[0], np.cumsum(case.lengths)])
    with MultiVectorIndex.build(tmp_path / "index", case.tokens, lengths=case.lengths, dram=dram) as index:
        assert index.stats()["planned_bytes"] <= dram
        shares = []
        for query in case.queries:
            exact = np.maximum.reduceat(tokens @ query.T, starts[:-1], axis=0).sum(axis=1)
            kth = np.sort(exact)[-10]
            shares.append(np.mean(exact[index.search(query, 10).ids] >= kth - 1e-4 * abs(kth)))
        assert np.mean(shares) >= 0.97
