"""The buffer as the storage policy of Avalanche's replay, tried with the real library (``make test-plugins``)."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.recsys.replay import CarouselBuffer, GateSwap, LossSwap, RandomSwap, SwapPolicy

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("policy", [RandomSwap(1.0), GateSwap(1.0), LossSwap(1.0), None], ids=str)
def test_avalanche(tmp_path: Path, avalanche: Any, policy: SwapPolicy | None) -> None:
    from memhier.recsys.replay.adapters.avalanche import CarouselExemplars, CarouselPlugin

    scenarios = importlib.import_module("avalanche.benchmarks")
    utils = importlib.import_module("avalanche.benchmarks.utils")
    plugins = importlib.import_module("avalanche.training.plugins")
    random = np.random.default_rng(0)
    labels = torch.from_numpy(np.arange(240) % 6)
    inputs = torch.from_numpy(random.normal(size=(240, 8)).astype(np.float32)) + 2 * torch.eye(8)[labels]
    items = utils.AvalancheDataset(
        [torch.utils.data.TensorDataset(inputs, labels)],
        data_attributes=[utils.DataAttribute(labels.tolist(), "targets")],
    )
    benchmark = scenarios.class_incremental_benchmark({"train": items, "test": items}, num_experiences=3)
    with CarouselBuffer(tmp_path / "b", memory=20, schema={"x": ("float32", 8)}, admit="class_balanced",
                        same_class=True, swap=policy, seed=0) as buffer:  # fmt: skip
        exemplars = CarouselExemplars(buffer)
        model = torch.nn.Linear(8, 6)
        strategy = importlib.import_module("avalanche.training.supervised").Naive(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=8, train_epochs=2,
            plugins=[plugins.ReplayPlugin(mem_size=20, storage_policy=exemplars), CarouselPlugin(exemplars)],
            evaluator=None,
        )  # fmt: skip
        for experience in benchmark.train_stream:
            strategy.train(experience, num_workers=0)
            assert len(exemplars.buffer) == 20  # reads of memory meanwhile do not hide those of the loader
        assert buffer.stats()["storage_samples"] == 240
        assert (buffer.stats()["swapped"] > 20) == (policy is not None)
        assert buffer.step > 20
        assert len(exemplars.buffer) == 20
        for index in range(2000):  # reads of memory without training
            exemplars.buffer[index % 20]
        assert len(exemplars.take_used()) == 20
        with pytest.raises(ValueError, match="num_workers=1"):
            strategy.train(benchmark.train_stream[0], num_workers=1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of six classes, and their labels."""
    labels = torch.from_numpy(np.arange(240) % 6)
    return torch.randn(240, 8, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(8)[labels], labels


def stream(avalanche: Any, inputs: torch.Tensor, labels: Any, tasks: bool = False) -> Any:
    """Return three experiences of two classes each, with task labels where that is asked for."""
    scenarios = importlib.import_module("avalanche.benchmarks")
    utils = importlib.import_module("avalanche.benchmarks.utils")
    items = utils.AvalancheDataset(
        [[*zip(inputs, labels, strict=True)]], data_attributes=[utils.DataAttribute([*map(int, labels)], "targets")]
    )
    benchmark = scenarios.class_incremental_benchmark({"train": items, "test": items}, num_experiences=3)
    return scenarios.task_incremental_benchmark(benchmark) if tasks else benchmark


def trainer(buffer: CarouselBuffer, *more: Any, **options: Any) -> Any:
    """Return a strategy that replays a buffer, and its storage policy."""
    from memhier.recsys.replay.adapters.avalanche import CarouselExemplars, CarouselPlugin

    plugins = importlib.import_module("avalanche.training.plugins")
    exemplars = CarouselExemplars(buffer)
    model = torch.nn.Linear(8, 6)
    replay = plugins.ReplayPlugin(mem_size=buffer.capacity, storage_policy=exemplars, **options)
    strategy = importlib.import_module("avalanche.training.supervised").Naive(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=8, train_epochs=2,
        plugins=[replay, CarouselPlugin(exemplars), *more], evaluator=None,
    )  # fmt: skip
    return strategy, exemplars


@pytest.mark.parametrize("balanced", [False, True])
def test_task_labels_are_replayed(tmp_path: Path, avalanche: Any, balanced: bool) -> None:
    labels = torch.arange(240) % 6
    benchmark = stream(avalanche, torch.randn(240, 8), labels, tasks=True)
    task_of = {
        int(label): number
        for number, experience in enumerate(benchmark.train_stream)
        for label in set(experience.dataset.targets)
    }
    seen: list[tuple[int, int]] = []
    base = importlib.import_module("avalanche.training.plugins").SupervisedPlugin

    class Look(base):  # type: ignore[misc, valid-type]
        def after_training_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
            seen.extend(zip(strategy.mb_y.tolist(), strategy.mb_task_id.tolist(), strict=True))

    schema = {"x": ("float32", 8), "task": "int64"}
    with CarouselBuffer(
        tmp_path / "b", memory=24, schema=schema, admit="class_balanced", same_class=True, swap=RandomSwap(1.0)
    ) as buffer:
        strategy, exemplars = trainer(buffer, Look(), task_balanced_dataloader=balanced)
        for number, experience in enumerate(benchmark.train_stream):
            seen.clear()
            strategy.train(experience, num_workers=0)
            assert {task for _, task in seen} == set(range(number + 1))
            assert all(task == task_of[label] for label, task in seen)
        assert buffer.stats()["swapped"] > 20
        assert sorted(exemplars.buffer.targets_task_labels.uniques) == [0, 1, 2]


def test_entries_that_have_no_field_are_named(tmp_path: Path, avalanche: Any) -> None:
    benchmark = stream(avalanche, torch.randn(60, 8), torch.arange(60) % 6, tasks=True)
    with CarouselBuffer(
        tmp_path / "b", memory=12, schema={"x": ("float32", 8)}, admit="class_balanced", same_class=True
    ) as buffer:
        strategy, _ = trainer(buffer)
        with pytest.raises(ValueError, match=r"have 3 entries.*'task': 'int64' for a task label"):
            strategy.train(benchmark.train_stream[0], num_workers=0)
        assert buffer.stats()["storage_samples"] == 0


def test_casts_that_lose_values_raise(tmp_path: Path, avalanche: Any) -> None:
    labels = torch.arange(60) % 6
    with CarouselBuffer(
        tmp_path / "b", memory=12, schema={"x": ("uint8", 8)}, admit="class_balanced", same_class=True
    ) as buffer:
        strategy, exemplars = trainer(buffer)
        with pytest.raises(ValueError, match=r"entry 0 of the stream's items: float32 values do not fit .* uint8"):
            strategy.train(stream(avalanche, torch.rand(60, 8), labels).train_stream[0], num_workers=0)
        assert buffer.stats()["storage_samples"] == 0
        whole = torch.randint(0, 256, (60, 8)).float()
        strategy.train(stream(avalanche, whole, labels).train_stream[0], num_workers=0)
        shown = torch.stack([exemplars.buffer[index][0] for index in range(12)]).float()
        assert all((whole == one).all(1).any() for one in shown)


def test_swaps_over_classes_are_refused(tmp_path: Path, avalanche: Any) -> None:
    from memhier.recsys.replay.adapters.avalanche import CarouselExemplars

    for number, (options, fits) in enumerate([
        ({}, False), ({"same_class": True}, True), ({"admit": "class_balanced"}, False),
        ({"admit": "class_balanced", "same_class": True}, True), ({"swap": None}, True),
    ]):  # fmt: skip
        options: Any
        with CarouselBuffer(tmp_path / f"{number}", memory=4, schema={"x": "float32"}, **options) as buffer:
            if fits:
                CarouselExemplars(buffer)
            else:
                with pytest.raises(ValueError, match="same_class=True"):
                    CarouselExemplars(buffer)


@pytest.mark.parametrize("policy", [GateSwap(1.0), LossSwap(1.0)], ids=str)
def test_memory_may_be_looked_at_between_experiences(tmp_path: Path, avalanche: Any, policy: SwapPolicy) -> None:
    items = stream(avalanche, *samples())
    with CarouselBuffer(tmp_path / "b", memory=20, schema={"x": ("float32", 8)}, admit="class_balanced",
                        same_class=True, swap=policy) as buffer:  # fmt: skip
        strategy, exemplars = trainer(buffer)
        for experience in items.train_stream:
            strategy.train(experience, num_workers=0)
            assert sum(len(labels) for _, labels, *_ in torch.utils.data.DataLoader(exemplars.buffer)) == 20
        assert buffer.stats()["storage_samples"] == 240


@pytest.mark.parametrize("as_tensors", [True, False])
@pytest.mark.parametrize("tasks", [True, False])
def test_a_run_goes_on_with_an_opened_buffer(tmp_path: Path, avalanche: Any, tasks: bool, as_tensors: bool) -> None:
    inputs, labels = samples()
    items = stream(avalanche, inputs, labels if as_tensors else labels.tolist(), tasks)
    schema = {"x": ("float32", 8), "task": "int64"} if tasks else {"x": ("float32", 8)}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema, admit="class_balanced", same_class=True) as buffer:
        trainer(buffer)[0].train(items.train_stream[0], num_workers=0)
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        strategy, _ = trainer(buffer)
        for experience in items.train_stream[1:]:
            strategy.train(experience, num_workers=0)
        assert buffer.stats()["storage_samples"] == 240
        assert buffer.stats()["swapped"] > 20
