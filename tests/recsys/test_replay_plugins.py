"""The buffer inside other libraries: torch's loader, Avalanche, TorchRL, Mammoth's interface.

Avalanche and TorchRL are tried where they are installed.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memhier.recsys.replay import Batch, CarouselBuffer, Field, GateSwap, LossSwap, RandomSwap, SwapPolicy
from memhier.recsys.replay._adapters import UsedSlots
from memhier.recsys.replay.loader import ReplayBatchSampler, ReplayDataset, beside
from memhier.recsys.replay.mammoth import MammothBuffer

KEPT: list[Any] = []  # operators live as long as the library that defines them
LOADER_NOISE = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def filled(place: Path, **options: Any) -> CarouselBuffer:
    schema = {"image": ("uint8", (4, 4, 3))}
    buffer = CarouselBuffer(place, **{"memory": 30, "schema": schema, "swap": RandomSwap(1.0), "seed": 2, **options})
    numbers = np.arange(100)
    images = np.repeat(numbers.astype(np.uint8), 48).reshape(100, 4, 4, 3)
    buffer.add({"image": images}, labels=numbers % 5)
    return buffer


def sums(batch: Batch) -> tuple[list[int], list[int]]:
    return batch.ids.tolist(), batch["image"].reshape(len(batch), -1).astype(np.int64).sum(1).tolist()


def as_it_is(batch: Any) -> Any:
    return batch


@LOADER_NOISE
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_any_number_of_workers_sees_the_same_batches(tmp_path: Path, context: str) -> None:
    runs = []
    for workers in (0, 2):
        with filled(tmp_path / f"{workers}") as buffer:
            sampler = ReplayBatchSampler(buffer, 6, steps=10, ahead=4)
            loader = torch.utils.data.DataLoader(
                ReplayDataset(sums), batch_sampler=sampler, num_workers=workers, collate_fn=as_it_is,
                multiprocessing_context=context if workers else None,
            )  # fmt: skip
            run = []
            for ids, totals in loader:
                assert totals == [48 * id for id in ids]
                run.append(ids)
                buffer.feedback(np.unique(np.array(buffer.occupied()[:6])))
            runs.append(run)
            assert len(run) == len(sampler) == 10
    assert runs[0] == runs[1]


def test_a_loader_that_reads_too_far_ahead_is_told(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        batches = iter(ReplayBatchSampler(buffer, 6, steps=10, ahead=1))
        next(batches)
        next(batches)
        with pytest.raises(ValueError, match="ahead=1"):
            next(batches)
        with pytest.raises(TypeError, match="batch_sampler"):
            ReplayDataset()[0]


def test_memory_beside_a_stream(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        pairs = []
        for new, old in beside(range(3), buffer, 4):
            pairs.append((new, len(old)))
            buffer.feedback(old)
        assert pairs == [(0, 4), (1, 4), (2, 4)]


def mammoth(place: Path) -> MammothBuffer:
    schema = {"examples": ("float32", (3, 4)), "logits": Field("float32", (5,), mutable=True), "task_labels": "int64"}
    return MammothBuffer(CarouselBuffer(place, memory=20, schema=schema, swap=RandomSwap(1.0), seed=1))


def test_mammoths_interface(tmp_path: Path) -> None:
    buffer = mammoth(tmp_path / "b")
    assert buffer.is_empty()
    for start in range(0, 60, 10):
        numbers = torch.arange(start, start + 10)
        examples = numbers[:, None, None].float().expand(10, 3, 4)
        logits = numbers[:, None].float().expand(10, 5)
        buffer.add_data(examples, labels=numbers % 4, logits=logits, task_labels=numbers % 4 // 2)
        buffer.get_data(5)
    assert buffer.is_full()
    assert len(buffer) == buffer.buffer_size == 20
    assert buffer.num_seen_examples == 60
    assert buffer.used_attributes == ["examples", "labels", "logits", "task_labels"]
    index, examples, labels, logits, tasks = buffer.get_data(8, return_index=True)
    assert examples.shape == (8, 3, 4)
    assert (labels == examples[:, 0, 0] % 4).all()
    assert (logits[:, 2] == examples[:, 1, 1]).all()
    assert (tasks == labels // 2).all()
    assert (buffer.get_data_by_index(index)[0] == examples).all()
    plain, moved, *_ = buffer.get_data(4, transform=lambda one: one + 1, return_not_aug=True)
    assert (moved == plain + 1).all()
    assert (buffer.get_data(20, mask_task_out=0, cpt=2)[1] >= 2).all()
    assert (buffer.get_data(20, mask_task_out=1)[3] == 0).all()
    balanced = buffer.get_balanced_data(8)[1]
    assert torch.bincount(balanced, minlength=4).max() <= 2
    two = torch.bincount(buffer.get_balanced_data(6, n_classes=2)[1])
    assert sorted(two[two > 0].tolist()) in ([3, 3], [2, 4], [1, 5])
    items = [*buffer]
    assert [len(items), *items[3][0].shape] == [20, 3, 4]
    for name, values in zip(buffer.used_attributes, zip(*items, strict=True), strict=True):
        assert torch.equal(torch.stack(values), getattr(buffer, name))
    assert torch.equal(buffer[torch.tensor([4, 2])][0], buffer.examples[[4, 2]])
    assert buffer.examples.shape == (20, 3, 4)
    assert buffer.labels.shape == (20,)
    with pytest.raises(AttributeError):
        buffer.true_labels  # noqa: B018
    assert sum(len(batch[0]) for batch in buffer.get_dataloader(batch_size=7)) == 20
    assert buffer.serialize()["step"] == 6
    buffer.empty()
    assert buffer.is_empty()
    assert buffer.num_seen_examples == 0
    buffer.carousel.close()


def test_mammoth_refuses_what_needs_scores(tmp_path: Path) -> None:
    schema = {"examples": ("float32", 3)}
    with (
        CarouselBuffer(tmp_path / "b", memory=4, schema=schema, swap=GateSwap(0.5)) as buffer,
        pytest.raises(ValueError, match="GateSwap"),
    ):
        MammothBuffer(buffer)


@given(sizes=st.lists(st.integers(0, 9), max_size=30), most=st.integers(1, 20))
def test_slots_that_nobody_takes_are_dropped(sizes: list[int], most: int) -> None:
    used, every = UsedSlots(), np.arange(sum(sizes))
    for part in np.split(every, np.cumsum(sizes)[:-1]) if sizes else []:
        used.add(part, most)
        assert len(used) < most + max(sizes)
    dropped, taken = used.dropped, used.take()
    assert [dropped, used.dropped] == [len(every) - len(taken), 0]
    assert taken.tolist() == every[len(every) - len(taken) :].tolist()
    assert len(taken) >= min(most, len(every))
    assert len(used) == len(used.take()) == 0


def test_mammoth_that_only_draws_holds_no_more(tmp_path: Path) -> None:
    buffer = mammoth(tmp_path / "b")
    numbers = torch.arange(30)
    buffer.add_data(numbers[:, None, None].float().expand(30, 3, 4), labels=numbers % 4,
                    logits=torch.zeros(30, 5), task_labels=numbers)  # fmt: skip
    for _ in range(50):
        buffer.get_data(7)
    assert 20 <= len(buffer._used) < 20 + 7
    buffer.carousel.close()


@pytest.fixture
def torchrl() -> Any:
    if importlib.util.find_spec("torchrl") is None:
        pytest.skip("torchrl is not installed")
    return importlib.import_module("torchrl.data")


@LOADER_NOISE
def test_torchrl(tmp_path: Path, torchrl: Any) -> None:
    from memhier.recsys.replay.torchrl import CarouselStorage, ReservoirWriter

    make = importlib.import_module("tensordict").TensorDict
    schema = {"obs": ("float32", 3), "value": Field("float32", mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema, swap=RandomSwap(1.0)) as buffer:
        storage = CarouselStorage(buffer, label_key="action")
        replay = torchrl.TensorDictReplayBuffer(
            storage=storage, writer=ReservoirWriter(), batch_size=6, collate_fn=as_it_is
        )
        for start in range(0, 100, 10):
            numbers = torch.arange(start, start + 10)
            fields = {"obs": numbers[:, None].float().expand(10, 3), "action": numbers % 3, "value": -torch.ones(10)}
            data = make(fields, batch_size=[10])
            index = replay.extend(data)
            assert index.shape == (10,)
            batch = replay.sample()
            assert (batch["action"] == batch["obs"][:, 0] % 3).all()
            storage.end_step()
        assert len(replay) == 20
        assert buffer.stats()["storage_samples"] == 100
        assert buffer.stats()["swapped"] > 20
        for _ in range(50):
            replay.sample()
        assert 20 <= len(storage._used) < 20 + 6
        last = np.concatenate([*storage._used._batches])
        storage.end_step(update={"value": torch.arange(300.0)})  # of all, of which the last count
        expected = dict(zip(last.tolist(), range(300 - len(last), 300), strict=True))
        found = dict(zip(last.tolist(), buffer.reader().read(last)["value"].tolist(), strict=True))
        assert any(found[slot] == expected[slot] for slot in found)
        assert all(found[slot] in (expected[slot], -1) for slot in found)  # -1: swapped in by this step
        with pytest.raises(TypeError, match="ReservoirWriter"):
            storage.set(0, data)


@pytest.fixture
def avalanche(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Avalanche, with stand-ins for what it imports and does not need here."""
    if importlib.util.find_spec("avalanche") is None:
        pytest.skip("avalanche-lib is not installed")
    if importlib.util.find_spec("wandb") is None:
        wandb = types.ModuleType("wandb")
        wandb.__spec__ = importlib.util.spec_from_loader("wandb", None)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    try:
        library = torch.library.Library("torchvision", "DEF")
        KEPT.append(library)
        for name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
            library.define(name)
    except RuntimeError:
        pass  # torchvision is whole here
    return importlib.import_module("avalanche.training")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", [RandomSwap(1.0), GateSwap(1.0), LossSwap(1.0), None], ids=str)
def test_avalanche(tmp_path: Path, avalanche: Any, policy: SwapPolicy | None) -> None:
    from memhier.recsys.replay.avalanche import CarouselExemplars, CarouselPlugin

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
    with CarouselBuffer(tmp_path / "b", memory=20, schema={"x": ("float32", 8)}, admit="class_balanced", swap=policy,
                        seed=0) as buffer:  # fmt: skip
        exemplars = CarouselExemplars(buffer)
        model = torch.nn.Linear(8, 6)
        strategy = importlib.import_module("avalanche.training.supervised").Naive(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=8, train_epochs=2,
            plugins=[plugins.ReplayPlugin(mem_size=20, storage_policy=exemplars), CarouselPlugin(exemplars)],
            evaluator=None,
        )  # fmt: skip
        for experience in benchmark.train_stream:
            strategy.train(experience, num_workers=0)
            assert len(exemplars.buffer) == 20  # what looks at memory meanwhile does not hide what the loader reads
        assert buffer.stats()["storage_samples"] == 240
        assert (buffer.stats()["swapped"] > 20) == (policy is not None)
        assert buffer.step > 20
        assert len(exemplars.buffer) == 20
        for index in range(2000):  # somebody who looks at memory without training
            exemplars.buffer[index % 20]
        assert len(exemplars.take_used()) == 20
        with pytest.raises(ValueError, match="num_workers=1"):
            strategy.train(benchmark.train_stream[0], num_workers=1)


@pytest.mark.parametrize(("module", "name", "package"), [
    ("avalanche", "CarouselExemplars", "avalanche-lib"), ("avalanche", "CarouselPlugin", "avalanche-lib"),
    ("torchrl", "CarouselStorage", "torchrl"), ("torchrl", "ReservoirWriter", "torchrl"),
])  # fmt: skip
def test_a_package_that_is_missing_is_named(module: str, name: str, package: str) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    kind = getattr(importlib.import_module(f"memhier.recsys.replay.{module}"), name)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        kind(None)
