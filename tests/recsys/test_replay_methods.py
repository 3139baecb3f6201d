"""The seven methods learn, with swaps and without; exemplars are those that the papers choose."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.recsys.replay import (
    Batch,
    CarouselBuffer,
    Field,
    GateSwap,
    LossSwap,
    RandomSwap,
    StoredSamples,
    SwapPolicy,
)
from memhier.recsys.replay.methods import METHODS, DERPlusPlus, TinyER
from memhier.recsys.replay.methods.exemplars import herding, rainbow

CLASSES = 6


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU())
        self.head = nn.Linear(32, CLASSES)

    def features(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


def prepare(images: Tensor) -> Tensor:
    return images.float().div(128).sub(1)[:, None]


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images of six classes that a small net can tell."""
    centres = np.random.default_rng(0).uniform(40, 210, (CLASSES, 6, 6))
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % CLASSES)
    images = np.clip(centres[labels] + random.normal(0, 35, (count, 6, 6)), 0, 255)
    return torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels)


@pytest.mark.long
@pytest.mark.parametrize("swap", [None, RandomSwap(0.5), GateSwap(0.5), LossSwap(0.5)], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_tasks_and_keeps_the_first(tmp_path: Path, name: str, swap: SwapPolicy | None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind: Any = METHODS[name]
    images, labels = blobs(900, seed=1)
    test, truth = blobs(300, seed=2)
    with CarouselBuffer(tmp_path / "b", memory=36, schema=kind.schema((6, 6), CLASSES), admit=kind.admit, swap=swap,
                        seed=1) as buffer:  # fmt: skip
        learner = kind(Small, buffer, prepare, classes=CLASSES, rate=0.1, batch=10, epochs=2, decays=True, seed=1)
        if name == "GDumb":
            learner.steps = 150
        for task in ((0, 1), (2, 3), (4, 5)):
            some = torch.isin(labels, torch.tensor(task))
            learner.learn_task(images[some], labels[some])
        if isinstance(learner, TinyER):
            said = learner.predict_in_task(prepare(test), truth)
        else:
            said = learner.predict(prepare(test))
        right = (said == truth).float()
        assert right.mean() > 0.75
        # The first classes are not forgotten: without replay these are never right.
        assert right[truth < 2].mean() > 0.5
        stats = buffer.stats()
        held_out = 12 if name == "BiC" else 0
        assert stats["storage_samples"] == 900 - held_out
        assert (stats["swapped"] > 20) == (swap is not None)


@pytest.mark.parametrize("swap", [RandomSwap(1.0), GateSwap(1.0), LossSwap(1.0)], ids=str)
def test_der_swaps_both_of_its_batches(tmp_path: Path, swap: RandomSwap) -> None:
    images, labels = blobs(200, seed=1)
    schema = DERPlusPlus.schema((6, 6), CLASSES)
    with CarouselBuffer(tmp_path / "b", memory=100, schema=schema, swap=swap, delay=0) as buffer:
        learner = DERPlusPlus(Small, buffer, prepare, classes=CLASSES, batch=20)
        learner.learn_task(images, labels)
        drawn: list[int] = []

        def sample(count: int) -> Batch:
            batch = CarouselBuffer.sample(buffer, count)
            drawn.extend(batch.slots.tolist())
            return batch

        before = buffer.stats()["swapped"]
        with mock.patch.object(buffer, "sample", sample):
            learner.step(images[:20], labels[:20], keeps=False)
        assert len(drawn) == 40
        assert buffer.stats()["swapped"] - before == len(set(drawn))


def test_der_can_refresh_logits(tmp_path: Path) -> None:
    images, labels = blobs(200, seed=1)
    with CarouselBuffer(tmp_path / "b", memory=30, schema=DERPlusPlus.schema((6, 6), CLASSES)) as buffer:
        learner = DERPlusPlus(Small, buffer, prepare, classes=CLASSES)
        learner.learn_task(images, labels)
        before = {id: row.copy() for id, row in stored_logits(buffer, tmp_path / "b").items()}
        learner.refreshes = True
        learner.step(images[:32], labels[:32], keeps=False)
        buffer.checkpoint()
        changed = [
            id for id, row in stored_logits(buffer, tmp_path / "b").items() if not np.array_equal(row, before[id])
        ]
        assert 0 < len(changed) <= 30


@pytest.mark.parametrize(("name", "passes"), [("ER", 0), ("TinyER", 0), ("DER++", 3)])
def test_logits_come_from_the_last_pass(tmp_path: Path, name: str, passes: int) -> None:
    images, labels = blobs(100, seed=1)
    kind = METHODS[name]
    with CarouselBuffer(tmp_path / "b", memory=30, schema=kind.schema((6, 6), CLASSES), admit=kind.admit) as buffer:
        learner = kind(Small, buffer, prepare, classes=CLASSES, batch=20, epochs=4)
        arrivals = []

        def descend(loss: Tensor) -> None:
            arrivals.append(buffer.stats()["arrivals"])

        with mock.patch.object(learner, "descend", descend):
            learner.learn_task(images, labels)
        # A batch comes after its step.
        assert arrivals == [0] * 5 * passes + [0, 20, 40, 60, 80] + [100] * 5 * (3 - passes)


def stored_logits(buffer: CarouselBuffer, place: Path) -> dict[int, np.ndarray]:
    buffer.checkpoint()
    with StoredSamples(place) as stored:
        everything = stored.read(np.arange(len(stored)))
    return dict(zip(everything.ids.tolist(), everything["logits"], strict=True))


def test_herding_equals_its_definition() -> None:
    features = torch.from_numpy(np.random.default_rng(3).normal(size=(40, 5))).float()
    taken: list[int] = []
    for _ in range(9):
        means = {i: features[[*taken, i]].mean(0) for i in range(40) if i not in taken}
        taken.append(min(means, key=lambda i: float((means[i] - features.mean(0)).norm())))
    assert herding(features, 9).tolist() == taken
    assert sorted(herding(features[:3], 9).tolist()) == [0, 1, 2]


def test_rainbow_takes_all_degrees_of_uncertainty() -> None:
    labels = torch.zeros(10, dtype=torch.int64)
    views = iter([torch.arange(10) >= limit for limit in (2, 4, 6, 8)])
    chosen = rainbow(lambda: next(views).long(), labels, 5)
    assert chosen.tolist() == [0, 2, 4, 6, 9]


def test_held_samples_are_in_memory_and_classes_stay(tmp_path: Path) -> None:
    schema = {"x": "int64", "logit": Field("float32", mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=12, schema=schema, admit="class_balanced", seed=0) as buffer:
        ids = np.arange(90)
        buffer.add({"x": ids, "logit": ids.astype(np.float32)}, labels=ids % 3)
        buffer.feedback(buffer.sample(4))
        batch = buffer.sample(12)
        buffer.refresh(batch, {"logit": -batch.ids.astype(np.float32)})
        refreshed = set(batch.ids.tolist())
        wanted = [0, 3, 6, 1, 4, 1000]
        came = buffer.hold(wanted)
        inside = buffer.reader().read(buffer.occupied())
        assert came == len(set(wanted[:5]) - refreshed)
        assert set(wanted[:5]) <= set(inside.ids.tolist())
        assert np.bincount(inside.labels).tolist() == [4, 4, 4]
        assert (inside["x"] == inside.ids).all()
        # More than the class has slots: as many come as fit.
        assert buffer.hold(np.arange(2, 90, 3)) <= 4
        assert buffer.hold([]) == 0
        for id, value in zip(
            *(buffer.reader().read(buffer.occupied()).data[name] for name in ("x", "logit")), strict=True
        ):
            assert value == (-id if id in refreshed else id)
        # Samples that left memory took their new logits along.
        buffer.checkpoint()
        with StoredSamples(tmp_path / "b") as stored:
            columns = stored.read(ids)
        left = [id for id in refreshed if id not in buffer.reader().read(buffer.occupied()).ids]
        assert left
        assert all(columns["logit"][id] == -id for id in left)
