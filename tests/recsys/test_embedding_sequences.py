"""EmbeddingCollection: sequences of every shape, against one torch.nn.Embedding for each table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Jagged,
    TableReader,
    lookahead,
)

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

CONFIGS = [
    EmbeddingConfig(name="items", num_embeddings=300, embedding_dim=6, feature_names=["seen", "bought", "shown"]),
    EmbeddingConfig(name="shop", num_embeddings=3, embedding_dim=4),
    EmbeddingConfig(name="users", num_embeddings=50, embedding_dim=3, feature_names=["user"]),
]
TABLE_OF = {"seen": 0, "bought": 0, "shown": 0, "shop": 1, "user": 2}
RULES: dict[str, Any] = {
    "sgd": (SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (Adagrad(lr=0.1, lr_decay=0.01), lambda weights: torch.optim.Adagrad(weights, lr=0.1, lr_decay=0.01)),
    "adam": (Adam(lr=0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
}
Batch = dict[str, tuple[Tensor, Tensor]]


def batch_of(seed: int, samples: int = 5) -> Batch:
    rng, made = np.random.default_rng(seed), {}
    for name, table in TABLE_OF.items():
        lengths = rng.integers(0, 6, samples) * (rng.random() < 0.9)
        rows = CONFIGS[table].num_embeddings
        ids = (rows * rng.random(lengths.sum()) ** 2).astype(np.int64)
        made[name] = (torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths))
    return made


def used(seed: int) -> list[str]:
    """Return the features that a step's loss has, at least one."""
    names = [name for number, name in enumerate(TABLE_OF) if (seed >> number) % 2 or seed % 3]
    return names or ["bought"]


def make(path: Path, rule: Any = None, slots: int = 130, **options: Any) -> EmbeddingCollection:
    return EmbeddingCollection(CONFIGS, optimizer=rule, dram="64MiB", path=path, policy=Belady(slots), **options)


def copies(mine: EmbeddingCollection) -> list[nn.Embedding]:
    return [
        nn.Embedding(
            config.num_embeddings, config.embedding_dim, sparse=True,
            _weight=mine.initial_weights(np.arange(config.num_embeddings), number),
        )
        for number, config in enumerate(CONFIGS)
    ]  # fmt: skip


def look_up(theirs: list[nn.Embedding], batch: Batch, names: list[str]) -> dict[str, Tensor]:
    """Return the rows of features by one look-up for each table, of those that the loss has."""
    found: dict[str, Tensor] = {}
    for number, module in enumerate(theirs):
        mine = [name for name in names if TABLE_OF[name] == number]
        if mine:
            counts = [len(batch[name][0]) for name in mine]
            rows = module(torch.cat([batch[name][0] for name in mine]))
            found |= dict(zip(mine, torch.split(rows, counts), strict=True))
    return found


def loss_of(rows: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.stack([(rows[name] * (place + 1)).sin().sum() for place, name in enumerate(names)]).sum()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["plain", "ahead", "step"])
def test_sequences_have_the_bits_of_torch(tmp_path: Path, rule: str, way: str) -> None:
    ours, make_theirs = RULES[rule]
    with make(tmp_path, ours, update="step" if way == "step" else "backward") as mine:
        theirs = copies(mine)
        optimizer = make_theirs([module.weight for module in theirs])
        batches = [batch_of(seed) for seed in range(14)]
        loop = lookahead(batches, mine, ids=lambda batch: batch) if way == "ahead" else batches
        for seed, batch in enumerate(loop):
            names = used(seed)
            found = mine(batch)
            assert list(found) == list(TABLE_OF)
            expected = look_up(theirs, batch, list(TABLE_OF))
            assert all(torch.equal(found[name].values(), expected[name]) for name in TABLE_OF)
            loss_of({name: each.values() for name, each in found.items()}, names).backward()
            if way == "step":
                mine.optimizer.step()
            optimizer.zero_grad()
            loss_of(look_up(theirs, batch, names), names).backward()
            optimizer.step()
        for number, module in enumerate(theirs):
            assert torch.equal(mine.weights(np.arange(len(module.weight)), number), module.weight.detach())
        assert mine.stats()["evictions"] > 0


def test_two_look_ups_a_step_add_up(tmp_path: Path) -> None:
    with make(tmp_path, Adagrad(lr=0.1), 400) as mine:
        theirs = copies(mine)
        optimizer = torch.optim.Adagrad([module.weight for module in theirs], lr=0.1)
        for seed in range(0, 8, 2):
            pair = [batch_of(seed), batch_of(seed + 1)]
            names = list(TABLE_OF)
            first, second = (mine(batch) for batch in pair)
            total = [{name: each.values() for name, each in found.items()} for found in (first, second)]
            (loss_of(total[0], names) + 2 * loss_of(total[1], names)).backward()
            optimizer.zero_grad()
            (
                loss_of(look_up(theirs, pair[0], names), names) + 2 * loss_of(look_up(theirs, pair[1], names), names)
            ).backward()
            optimizer.step()
        for number, module in enumerate(theirs):
            torch.testing.assert_close(mine.weights(np.arange(len(module.weight)), number), module.weight.detach())


def test_evaluation_trains_nothing_and_a_reader_serves_it(tmp_path: Path) -> None:
    batch = batch_of(3)
    with make(tmp_path, Adam(lr=0.1)) as mine:
        for seed in range(4):
            loss_of({name: each.values() for name, each in mine(batch_of(seed)).items()}, list(TABLE_OF)).backward()
        mine.checkpoint()
        steps = mine.steps
        found = mine.eval()(batch)
        with pytest.raises(RuntimeError, match="eval"):
            found["seen"].values().sum().backward()
        with torch.no_grad():
            mine.train()(batch)
        assert mine.steps == steps
        with TableReader(tmp_path, dram="16MiB") as reader:
            served = reader.embedding_collection(CONFIGS)(batch)
            assert list(served) == list(found)
            for name, each in found.items():
                assert torch.equal(served[name].values(), each.values())
                assert torch.equal(served[name].lengths(), each.lengths())
    with make(tmp_path, Adam(lr=0.1), resume=True) as mine:
        assert torch.equal(mine(batch)["bought"].values(), found["bought"].values())
        names = [f"embeddings.{config.name}.weight" for config in CONFIGS]
        assert [name for name in mine.state_dict() if name.startswith("embeddings")] == names


def test_a_second_backward_pass_and_a_graph_are_refused(tmp_path: Path) -> None:
    with make(tmp_path, SGD()) as mine:
        loss = mine(batch_of(1))["seen"].values().square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="only once"):
            loss.backward()
        found = mine(batch_of(2))["seen"].values().square().sum()
        with pytest.raises(RuntimeError, match="create_graph"):
            found.backward(create_graph=True)
        mine.requires_grad_(False)
        assert not mine(batch_of(2))["seen"].values().requires_grad


def test_dense_sequences_and_batches_without_ids(tmp_path: Path) -> None:
    with make(tmp_path, SGD()) as mine:
        dense = {name: torch.zeros(2, 3, dtype=torch.int64) for name in TABLE_OF}
        found = mine(dense)
        assert found["user"].to_padded_dense().shape == (2, 3, 3)
        none = mine({name: (ids[:0], offsets[:0]) for name, (ids, offsets) in batch_of(0).items()})
        assert none["shop"].values().shape == (0, 4)
        none["shop"].values().sum().backward()
        with pytest.raises(IndexError, match="'shop'"):
            mine(dense | {"shop": torch.tensor([[3], [0]])})


@pytest.mark.parametrize("length", [None, 0, 2, 9])
def test_padded_sequences_are_those_of_a_loop(length: int | None) -> None:
    lengths = torch.tensor([2, 0, 5, 1])
    values = torch.randn(8, 3, requires_grad=True)
    sequences = Jagged(values, lengths)
    assert sequences.offsets().tolist() == [0, 2, 2, 7, 8]
    parts = sequences.to_dense()
    expected = torch.full((4, 5 if length is None else length, 3), 7.0)
    for row, part in enumerate(parts):
        kept = part[: expected.shape[1]].detach()
        expected[row, : len(kept)] = kept
    padded = sequences.to_padded_dense(length, 7.0)
    assert torch.equal(padded, expected)
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.sum() == sum(min(int(each), expected.shape[1]) for each in lengths) * 3
    assert Jagged(values[:0], lengths[:0]).to_padded_dense().shape == (0, 0, 3)


def test_configurations_of_bags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="without pooling"):
        EmbeddingCollection(
            [EmbeddingBagConfig(name="a", num_embeddings=3, embedding_dim=2)], dram="32MiB", path=tmp_path
        )
