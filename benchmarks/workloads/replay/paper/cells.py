"""One cell of the grid: a method learns a stream once. It is kept at every task, so that a killed run goes on there."""

import hashlib
import io
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memhier.benchmarks.datasets import Images
from memhier.benchmarks.workloads.harness import Row
from memhier.benchmarks.workloads.replay.paper.models import MODELS, plain
from memhier.benchmarks.workloads.replay.paper.streams import STREAMS
from memhier.recsys.replay import CarouselBuffer, GateSwap, RandomSwap
from memhier.recsys.replay.methods import METHODS, Learner, TinyER
from memhier.recsys.replay.methods.learner import blocks

__all__ = ["SWAPS", "Cell", "Runs", "Setting", "share_right"]

SWAPS = ("random", "gate", "same class", "any class")
"""Random swaps, the gate's, and random swaps with ``same_class=True`` or a reservoir, whose swaps take any class."""

_LEARNER = "learner"
_ELSEWHERE = ("buffer", "make_model", "prepare")  # attributes of a learner that a kept one does without


@dataclass(frozen=True)
class Setting:
    """The settings that all cells of a table share; `samples` of the training data, all if it is None."""

    data: str
    model: str
    width: int
    half: bool
    epochs: int
    samples: int | None


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes
    ----------
    memory
        Samples in DRAM; None for all.
    ratio
        The share of the samples used that a step swaps; 0 for memory alone.
    storage
        The limit of storage as a multiple of memory; None for no limit.
    swaps
        One of :data:`SWAPS`.
    """

    method: str
    memory: int | None
    ratio: float
    storage: float | None
    swaps: str
    seed: int

    @property
    def way(self) -> str:
        """How the cell's memory changes, in words."""
        if not self.ratio:
            return "all in DRAM" if self.memory is None else "memory only"
        limit = "" if self.storage is None else f", storage {self.storage:g} x memory"
        return f"{self.ratio:.0%} swapped".replace("%", " %") + (
            "" if self.swaps == "random" else f", {self.swaps}"
        ) + limit  # fmt: skip


class Runs:
    """A folder of finished cells, and of the one under way."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._file = folder, folder / "cells.jsonl"
        # A kill may have cut the last line.
        lines = self._file.read_text().split("\n")[:-1] if self._file.exists() else []
        self._done = {line["key"]: line["row"] for line in map(json.loads, lines)}
        if self._file.exists():
            self._file.write_text("".join(line + "\n" for line in lines))

    def __len__(self) -> int:
        return len(self._done)

    def finished(self, setting: Setting, cell: Cell) -> Row | None:
        """Return the row of a cell, None if it has none yet."""
        return self._done.get(_key(setting, cell))

    def make(self, setting: Setting, cell: Cell, images: Images) -> Row:
        """Run a cell, from its last finished task on, and keep its row."""
        key = _key(setting, cell)
        place = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        row = asdict(cell) | {"way": cell.way} | _run(setting, cell, images, place)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": key, "row": row}) + "\n")
        shutil.rmtree(place)
        self._done[key] = row
        return row


def _key(setting: Setting, cell: Cell) -> str:
    return json.dumps(asdict(setting) | asdict(cell))


def _run(setting: Setting, cell: Cell, images: Images, place: Path) -> Row:
    """Learn a stream; return accuracies after the last task and on the way, time and swaps."""
    order = STREAMS[setting.data].order(int(images.train_labels.max()) + 1, cell.seed)
    with _buffer(cell, images, order.size, place) as buffer:
        learner = _learner(setting, cell, buffer, images, order.size)
        shares: list[float] = []
        spent = {"cpu_s": 0.0, "swapped": 0, "stall_s": 0.0}
        if (kept := buffer.value(_LEARNER)) is not None:
            state = torch.load(io.BytesIO(kept), weights_only=False)
            vars(learner).update(state["learner"])
            torch.set_rng_state(state["torch"])
            shares, spent = state["shares"], state["spent"]
        counted = dict.fromkeys(("swapped", "stall_s"), 0)  # the buffer counts from its opening on
        for task in order[len(shares) :]:
            start = time.process_time()
            some = np.flatnonzero(np.isin(images.train_labels, task))
            learner.learn_task(torch.from_numpy(images.train[some]), torch.from_numpy(images.train_labels[some]))
            spent["cpu_s"] += time.process_time() - start
            shares.append(share_right(learner, images))
            stats = buffer.stats()
            for name, before in counted.items():
                spent[name] += stats[name] - before
                counted[name] = stats[name]
            own = {name: value for name, value in vars(learner).items() if name not in _ELSEWHERE}
            with io.BytesIO() as file:
                torch.save({"learner": own, "torch": torch.get_rng_state(), "shares": shares, "spent": spent}, file)
                buffer.checkpoint({_LEARNER: file.getvalue()})
        return {"final": shares[-1], "incremental": float(np.mean(shares)), **spent}


def _buffer(cell: Cell, images: Images, classes: int, place: Path) -> CarouselBuffer:
    """Open the buffer of a cell under way, or make it."""
    if place.exists():
        buffer = CarouselBuffer.open(place)
        if buffer.value(_LEARNER) is not None:
            return buffer
        buffer.close()
        shutil.rmtree(place)
    kind = METHODS[cell.method]
    memory = len(images.train) if cell.memory is None else cell.memory
    swap = (GateSwap if cell.swaps == "gate" else RandomSwap)(cell.ratio) if cell.ratio else None
    return CarouselBuffer(
        place, memory=memory, storage=None if cell.storage is None else int(cell.storage * memory),
        schema=kind.schema(images.train.shape[1:], classes), seed=cell.seed, swap=swap,
        admit="reservoir" if cell.swaps == "any class" else kind.admit,
        same_class=True if cell.swaps == "same class" else None,
    )  # fmt: skip


def _learner(setting: Setting, cell: Cell, buffer: CarouselBuffer, images: Images, classes: int) -> Learner:
    kind = METHODS[cell.method]
    # TinyER is made for batches of ten, one pass.
    tiny = kind is TinyER
    return kind(
        lambda: MODELS[setting.model](images.train.shape[1:], classes, setting.width, setting.half), buffer,
        STREAMS[setting.data].prepare, classes=classes, rate=0.02 if tiny else 0.05, batch=10 if tiny else 32,
        epochs=1 if tiny else setting.epochs, decays=setting.model != "dense", seed=cell.seed,
    )  # fmt: skip


def share_right(learner: Any, images: Images) -> float:
    """Return the share of the test samples of classes seen that a learner gets right."""
    some = np.flatnonzero(np.isin(images.test_labels, learner.seen))
    labels = torch.from_numpy(images.test_labels[some])
    right = 0
    for part in blocks(torch.arange(len(some)), 1000):
        inputs = plain(torch.from_numpy(images.test[some[part.numpy()]]))
        said = learner.predict_in_task(inputs, labels[part]) if isinstance(learner, TinyER) else learner.predict(inputs)
        right += int((said == labels[part]).sum())
    return right / len(some)
