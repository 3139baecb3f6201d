"""Counts of the gradients that ranks exchange, against sets."""

import numpy as np
import pytest

from memhier.benchmarks.workloads.embedding import ranks as embedding_ranks
from memhier.benchmarks.workloads.embedding.common import samples, table_sizes


@pytest.mark.parametrize("ranks", [2, 3])
def test_classes_of_gradients_are_those_of_sets(ranks: int) -> None:
    scale, batch, steps, window = 0.0001, 12, 4, 3
    found = embedding_ranks.measure(scale, batch, steps, ranks, window)
    bases = np.cumsum([0, *table_sizes(scale)])[:-1]
    stream = [sample.ids.numpy() + bases for sample in samples(table_sizes(scale), batch, steps + window, 0)]
    asked = [[set(part.reshape(-1).tolist()) for part in np.split(ids, ranks)] for ids in stream]
    travel = waited = single = both = 0
    for at in range(steps):
        for rank, part in enumerate(np.split(stream[at], ranks)):
            for row in part.reshape(-1).tolist():
                if row % ranks == rank:
                    continue
                needed = any(row in of_rank for of_rank in asked[at + 1])
                others = [of_rank for step in asked[at : at + window + 1] for of_rank in step[:rank] + step[rank + 1 :]]
                alone = not any(row in of_rank for of_rank in others)
                travel, waited, single, both = travel + 1, waited + needed, single + alone, both + (needed and alone)
    assert 0 < both < single < travel
    expected = {"waited for": waited, "single owner": single, "both": both}
    assert found == {name: count / travel for name, count in expected.items()}
