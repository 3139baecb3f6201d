"""One table on real logs: two features and two look-ups a step, with torch's bits in memory and through budgets."""

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier.benchmarks.cli.traces import read_blocks
from memhier.benchmarks.datasets import criteo_dac, gowalla
from memhier.benchmarks.workloads.decode.language.text import brown_lines, wikitext_lines
from memhier.policies import Belady
from memhier.recsys import Embedding, lookahead, read_lightgcn
from tests.recsys.rules import RULES

torch.sparse.check_sparse_tensor_invariants.disable()

DIM, BATCH, STEPS = 8, 128, 12
Pairs = NDArray[np.int64]


def successive(keys: Any) -> Pairs:
    """Return each key with the one after it."""
    return np.lib.stride_tricks.sliding_window_view(np.asarray(keys), 2)


def words_of(lines: list[str]) -> Pairs:
    return successive([*islice(chain.from_iterable(map(str.split, lines)), BATCH * STEPS + 1)])


LOGS: dict[str, Callable[[Path], Any]] = {
    "criteo-dac80k": lambda _: criteo_dac()[0][:, :2],
    "gowalla": lambda _: np.random.default_rng(0).permutation(gowalla()[0]),
    "ml-1m": lambda folder: torch.cat([*read_lightgcn(folder / "train.txt.xz")]).numpy(),
    "cache-traces": lambda folder: successive(next(read_blocks(folder / "scarab_scarab-recs.trace.xz"))),
    "brown": lambda folder: words_of(brown_lines(folder / "brown.zip")),
    "wikitext-2": lambda folder: words_of(wikitext_lines(folder / "valid.txt.xz")),
}


def train(batches: Any, table: nn.Module, step: Callable[[], None]) -> list[bytes]:
    losses = []
    for pairs in batches:
        first, second = (table(ids) for ids in pairs.unbind(1))
        loss = nn.functional.softplus(-(first * second).sum(1)).mean()
        loss.backward()
        step()
        losses.append(loss.detach().numpy().tobytes())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("rule", [*RULES])
@pytest.mark.parametrize("log", [*LOGS])
def test_training_on_a_log_has_the_bits_of_torch(
    tmp_path: Path, data: Callable[[str], Path], log: str, rule: str
) -> None:
    pairs = np.asarray(LOGS[log](data(log)))[: BATCH * STEPS]
    # Both features share the rows, by their own numbers where they mean different things.
    ids = np.unique(pairs, return_inverse=True)[1].reshape(pairs.shape)
    rows = int(ids.max()) + 1
    batches = [*torch.from_numpy(ids).split(BATCH)]
    most = max(len(batch.unique()) for batch in batches)
    spec, make = RULES[rule]

    def two(batch: Tensor) -> list[Tensor]:
        return [*batch.unbind(1)]

    for number, slots in enumerate((rows, min(rows, most + most // 8))):
        policy = Belady(slots)
        with Embedding(rows, DIM, optimizer=spec, dram="64MiB", path=tmp_path / str(number), policy=policy) as mine:
            theirs = nn.Embedding(rows, DIM, sparse=True, _weight=mine.weights(np.arange(rows)))
            optimizer = make(theirs.parameters())

            def step(optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            found = train(lookahead(batches, mine, ids=two), mine, lambda: None)
            assert found == train(batches, theirs, step)
            assert torch.equal(mine.weights(np.arange(rows)), theirs.weight)
            assert slots == rows or mine.stats()["evictions"] > 0
