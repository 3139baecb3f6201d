"""A DLRM on Criteo's log: losses and tables by hash, in memory and through budgets, windows and numbers of threads."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.benchmarks.datasets import criteo_dac
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.policies import Belady
from memhier.recsys import SGD, Adagrad, Adam, EmbeddingBagCollection, EmbeddingBagConfig, lookahead

torch.sparse.check_sparse_tensor_invariants.disable()

DIM, BATCH, STEPS = 8, 64, 8
RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD(lr=0.05), lambda weights: torch.optim.SGD(weights, lr=0.05)),
    "adagrad": (Adagrad(lr=0.05), lambda weights: torch.optim.Adagrad(weights, lr=0.05)),
    "adam": (Adam(lr=0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def train(batches: Any, tables: int, look: Callable[[Tensor], Tensor], step: Callable[[], None]) -> list[Tensor]:
    torch.manual_seed(0)
    net = DLRM(tables, DIM)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for ids, labels in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(net(torch.zeros(len(ids), 13), look(ids)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step()
        losses.append(loss.detach())
    return losses


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def of_torch(batches: Any, weights: list[Tensor], make: Any, pooling: Any) -> str:
    bags = [nn.EmbeddingBag(*some.shape, mode=pooling, sparse=True, _weight=some) for some in weights]
    optimizer = make([bag.weight for bag in bags])

    def look(ids: Tensor) -> Tensor:
        return torch.cat([bag(column[:, None]) for bag, column in zip(bags, ids.t(), strict=True)], 1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = train(batches, len(weights), look, step)
    return digest([*losses, *(bag.weight for bag in bags)])


@pytest.mark.long
@pytest.mark.parametrize(("rule", "pooling"), [("sgd", "sum"), ("adagrad", "mean"), ("adam", "sum")])
def test_training_on_a_log_has_the_bits_of_torch(
    tmp_path: Path, data: Callable[[str], Path], threads: Callable[[int], None], rule: str, pooling: Any
) -> None:
    data("criteo-dac80k")
    ids, labels, sizes = criteo_dac()
    cut = range(0, BATCH * STEPS, BATCH)
    batches = [(torch.from_numpy(ids[at : at + BATCH]), torch.from_numpy(labels[at : at + BATCH])) for at in cut]
    configs = [
        EmbeddingBagConfig(name=f"t{table}", num_embeddings=rows, embedding_dim=DIM, pooling=pooling)
        for table, rows in enumerate(sizes)
    ]
    spec, make = RULES[rule]
    expected: dict[int, str] = {}
    for number, (share, window, count) in enumerate(((1.0, 0, 1), (0.1, 1, 2), (0.01, 50, 1))):
        threads(count)
        with EmbeddingBagCollection(
            configs, optimizer=spec, dram="256MiB", path=tmp_path / str(number), policy=Belady(int(share * sum(sizes)))
        ) as mine:
            # The dense part, which is torch's on both sides, has other bits with another number of threads.
            if count not in expected:
                weights = [mine.initial_weights(np.arange(rows), table) for table, rows in enumerate(sizes)]
                expected[count] = of_torch(batches, weights, make, pooling)
            ahead = lookahead(batches, mine, ids=lambda batch: batch[0], window=window)
            losses = train(ahead, len(sizes), lambda ids, mine=mine: mine(ids).values(), lambda: None)  # type: ignore[misc]
            tables = [mine.weights(np.arange(rows), table) for table, rows in enumerate(sizes)]
            assert digest([*losses, *tables]) == expected[count]
            stats = mine.stats()
            assert (stats["evictions"] > 0) == (share == 0.01)
