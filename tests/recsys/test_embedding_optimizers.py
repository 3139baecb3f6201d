"""Collections with an optimizer for each table, against one optimizer of torch for each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memhier.errors import CorruptionError, FormatError
from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    RowWiseAdagrad,
    ShardedEmbeddingBagCollection,
    TableReader,
    lookahead,
)
from memhier.store.store import Store

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIMS = {"user": 200, "item": 300, "shop": 7}, {"user": 4, "item": 7, "shop": 3}
Make = Callable[[list[Any]], torch.optim.Optimizer]
RULES: dict[str, dict[str, tuple[Any, Make]]] = {
    "kinds": {
        "user": (SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
        "item": (Adagrad(lr=0.1, lr_decay=0.1), lambda weights: torch.optim.Adagrad(weights, lr=0.1, lr_decay=0.1)),
        "shop": (Adam(lr=0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
    },
    "rates": {
        "user": (Adagrad(lr=0.1), lambda weights: torch.optim.Adagrad(weights, lr=0.1)),
        "item": (Adagrad(lr=0.01, eps=1e-3), lambda weights: torch.optim.Adagrad(weights, lr=0.01, eps=1e-3)),
        "shop": (
            Adagrad(lr=0.5, initial_accumulator_value=0.2),
            lambda weights: torch.optim.Adagrad(weights, lr=0.5, initial_accumulator_value=0.2),
        ),
    },
    "descents": {
        "user": (SGD(lr=0.3), lambda weights: torch.optim.SGD(weights, lr=0.3)),
        "item": (SGD(lr=0.01), lambda weights: torch.optim.SGD(weights, lr=0.01)),
        "shop": (SGD(lr=1.0), lambda weights: torch.optim.SGD(weights, lr=1.0)),
    },
}


def make(path: Path, rules: str | Any, **options: Any) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIMS[name]) for name, rows in ROWS.items()
    ]
    given = {name: rule for name, (rule, _) in RULES[rules].items()} if isinstance(rules, str) else rules
    options = {"policy": Belady(120), **options}
    return EmbeddingBagCollection(configs, optimizer=given, dram="64MiB", path=path, **options)


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy((rows * rng.random((12, 3)) ** 2).astype(np.int64)) for name, rows in ROWS.items()}


class Theirs:
    """torch's modules, each with its optimizer and a schedule."""

    def __init__(self, mine: Any, rules: str) -> None:
        self.bags = [
            nn.EmbeddingBag(
                rows, DIMS[name], mode="sum", sparse=True, _weight=mine.initial_weights(np.arange(rows), number)
            )
            for number, (name, rows) in enumerate(ROWS.items())
        ]
        self.optimizers = [made([bag.weight]) for bag, (_, made) in zip(self.bags, RULES[rules].values(), strict=True)]
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in self.optimizers]

    def train(self, batch: dict[str, torch.Tensor]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.cat([bag(ids) for bag, ids in zip(self.bags, batch.values(), strict=True)], 1).sin().sum().backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()

    def assert_bits(self, mine: Any) -> None:
        for number, bag in enumerate(self.bags):
            assert torch.equal(mine.weights(np.arange(len(bag.weight)), number), bag.weight.detach())


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("way", ["plain", "ahead", "step"])
def test_each_table_has_the_bits_of_its_own_optimizer(tmp_path: Path, rules: str, way: str) -> None:
    update: Any = "step" if way == "step" else "backward"
    with make(tmp_path, rules, update=update) as mine:
        theirs = Theirs(mine, rules)
        schedule = torch.optim.lr_scheduler.StepLR(mine.optimizer, 4, 0.5)
        assert [group["name"] for group in mine.optimizer.param_groups] == [*ROWS]
        batches = [batch_of(seed) for seed in range(6)]
        for batch in lookahead(batches, mine, ids=lambda batch: batch) if way == "ahead" else batches:
            mine(batch).values().sin().sum().backward()
            mine.optimizer.step()
            schedule.step()
            theirs.train(batch)
        theirs.assert_bits(mine)
        assert mine.stats()["evictions"] > 0
        mine.checkpoint({"schedule": schedule.state_dict()})
        rates = [group["lr"] for group in mine.optimizer.param_groups]
    with make(tmp_path, rules, update=update, resume=True) as mine:
        assert [group["lr"] for group in mine.optimizer.param_groups] == rates
        schedule = torch.optim.lr_scheduler.StepLR(mine.optimizer, 4, 0.5)
        schedule.load_state_dict(mine.extra["schedule"])
        for seed in range(6, 10):
            mine(batch_of(seed)).values().sin().sum().backward()
            mine.optimizer.step()
            schedule.step()
            theirs.train(batch_of(seed))
        theirs.assert_bits(mine)
        mine.checkpoint()
        with TableReader(tmp_path, dram="16MiB") as reader:
            for number, bag in enumerate(theirs.bags):
                assert torch.equal(reader.rows(np.arange(len(bag.weight)), number), bag.weight.detach())


def test_two_look_ups_of_a_step_are_one_update_of_each_optimizer(tmp_path: Path) -> None:
    with make(tmp_path, "kinds", policy=Belady(400)) as mine:
        theirs = Theirs(mine, "kinds")
        first, second = batch_of(0), batch_of(1)
        (mine(first).values().sin().sum() + mine(second).values().sin().sum()).backward()
        for optimizer in theirs.optimizers:
            optimizer.zero_grad()
        losses = [
            torch.cat([bag(ids) for bag, ids in zip(theirs.bags, batch.values(), strict=True)], 1).sin().sum()
            for batch in (first, second)
        ]
        torch.stack(losses).sum().backward()
        for optimizer in theirs.optimizers:
            optimizer.step()
        for number, bag in enumerate(theirs.bags):
            torch.testing.assert_close(mine.weights(np.arange(len(bag.weight)), number), bag.weight.detach())
        assert mine.steps == 1


def test_state_is_that_of_each_table(tmp_path: Path) -> None:
    with make(tmp_path, {"user": SGD(), "item": Adam(), "shop": RowWiseAdagrad()}) as mine:
        mine(batch_of(0)).values().sin().sum().backward()
        assert [mine.optimizer_state([0], table).shape[1] for table in range(3)] == [0, 14, 1]
        with pytest.raises(ValueError, match="has 3; give other parameters"):
            mine.optimizer.add_param_group({"params": [torch.zeros(1)]})
        mine.optimizer.param_groups[2]["weight_decay"] = 0.1
        with pytest.raises(ValueError, match=r"param_groups\[2\]\['weight_decay'\]=0.1: RowWiseAdagrad"):
            mine.checkpoint()


def test_sequences_have_optimizers_by_table_as_well(tmp_path: Path) -> None:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=4) for name, rows in (("item", 50), ("shop", 5))
    ]
    with EmbeddingCollection(
        configs, optimizer={"shop": SGD(lr=1.0), "item": Adagrad(lr=0.1)}, dram="32MiB", path=tmp_path
    ) as tables:
        before = tables.weights([1], 1)
        tables({"item": torch.tensor([[2]]), "shop": torch.tensor([[1]])})["shop"].values().sum().backward()
        assert torch.equal(tables.weights([1], 1), before - 1)
        assert torch.equal(tables.weights([2]), tables.initial_weights([2]))


def test_unfit_optimizers_are_refused(tmp_path: Path) -> None:
    for given, message in (
        ({"user": SGD(), "item": SGD()}, r"one for each of \['item', 'shop', 'user'\], got \['item', 'user'\]"),
        ({**dict.fromkeys(ROWS, SGD()), "other": SGD()}, "got .*'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(tmp_path / "none", given)
    with pytest.raises(ValueError, match="state of Adam"):
        make(tmp_path / "none", {**dict.fromkeys(ROWS, SGD()), "item": Adam()}, codec="fp16")
    assert not (tmp_path / "none").exists() or not [*(tmp_path / "none").glob("catalog*")]
    with make(tmp_path / "t", "kinds") as mine:
        mine(batch_of(0)).values().sum().backward()
        mine.checkpoint()
    other_rate = {name: rule for name, (rule, _) in RULES["kinds"].items()} | {"item": Adagrad(lr=0.2, lr_decay=0.1)}
    for given, error, message in (
        ("rates", FormatError, "optimizer="),
        (SGD(lr=0.1), FormatError, "there, expected"),
        (other_rate, ValueError, "began with lr=0.1"),
    ):
        with pytest.raises(error, match=message):
            make(tmp_path / "t", given, resume=True)
    make(tmp_path / "t", "kinds", resume=True).close()


@pytest.mark.parametrize("change", [b'"item": {', b'"lr": 0.1'])
def test_damaged_groups_are_told(tmp_path: Path, change: bytes) -> None:
    with make(tmp_path, "kinds") as mine:
        mine.checkpoint()
    with Store.open(tmp_path, "tiered", writable=True) as store, store.begin() as tx:
        value = store.get("recsys/extra") or b""
        assert change in value
        tx.put("recsys/extra", value.replace(change, change[:1] + b"x" + change[1:]))
        tx.commit()
    with pytest.raises(CorruptionError, match="recsys/extra"):
        make(tmp_path, "kinds", resume=True)


@pytest.mark.usefixtures("one_rank")
def test_tables_over_ranks_take_one_for_all(tmp_path: Path) -> None:
    configs = [EmbeddingBagConfig(name="user", num_embeddings=9, embedding_dim=2)]
    with pytest.raises(TypeError, match="one for all tables"):
        ShardedEmbeddingBagCollection(configs, optimizer={"user": SGD()}, dram="32MiB", path=tmp_path)  # type: ignore[arg-type]


def test_one_table_takes_one_optimizer(tmp_path: Path) -> None:
    with EmbeddingBag(10, 4, optimizer=SGD(lr=0.5), dram="32MiB", path=tmp_path) as bag:
        assert [group["lr"] for group in bag.optimizer.param_groups] == [0.5]
        assert "name" not in bag.optimizer.param_groups[0]
