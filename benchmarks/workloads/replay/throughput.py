"""The processor time of a replay buffer's calls: adding samples, and drawing them while a share is swapped.

``python -m memhier.benchmarks.workloads.replay.throughput --dir /path/on/the/device`` adds one sample and 64 of them,
as images of 3 KB and as transitions; adds 64 under class-balanced admission and as a reservoir, with many classes; and
draws batches of images from memory while no sample, half or all of each batch are swapped. cpprb and TorchRL, which
hold everything in DRAM, run the same calls where they are installed. Ways take turns, round after round. All figures
are processor time of the whole process, kernel and threads that read included, so neighbours disturb them little.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.harness import Outcome, by_turns, skip, workload
from memhier.recsys.replay import CarouselBuffer, RandomSwap, Schema

__all__ = ["main"]

IMAGE = {"image": ("uint8", (32, 32, 3))}
TRANSITION = {
    "obs": ("float32", (4,)), "act": "int64", "rew": "float32", "next_obs": ("float32", (4,)), "done": "bool",
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {"image of 3 KB": IMAGE, "transition": TRANSITION}
MEMORY = 1000
BLOCK = 1000

Call = Callable[[], object]
Samples = dict[str, NDArray[Any]]


def samples(schema: Mapping[str, Any], count: int) -> Samples:
    """Return random values of every field."""
    random = np.random.default_rng(count)
    columns = Schema(schema).columns.items()
    return {name: random.integers(0, 2, (count, *column.shape)).astype(column.dtype) for name, column in columns}


def cost(call: Call, repeats: int) -> Callable[[], float]:
    """Return a function that measures the microseconds of processor time of one call."""

    def measured() -> float:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return 1e6 * (time.process_time() - start) / repeats

    return measured


class Ways:
    """Makes the calls to be measured, with buffers that live until the end of a run.

    Parameters
    ----------
    folder
        Of the buffers.
    stored
        Samples in each buffer.
    held
        Closes the buffers.
    """

    def __init__(self, folder: Path, stored: int, held: ExitStack) -> None:
        self._folder = folder
        self._stored = stored
        self._held = held
        self._random = np.random.default_rng(0)

    def _buffer(self, schema: Mapping[str, Any], classes: int, **options: Any) -> CarouselBuffer:
        """Return a buffer that is full, and has seen half as many samples again."""
        path = self._folder / f"{len(list(self._folder.iterdir()))}"
        buffer = self._held.enter_context(CarouselBuffer(path, memory=MEMORY, schema=schema, **options))
        block = samples(schema, BLOCK)
        for _ in range(0, self._stored + self._stored // 2, BLOCK):
            buffer.add(block, labels=self._random.integers(0, classes, BLOCK))
        buffer.checkpoint()
        return buffer

    def add(self, schema: Mapping[str, Any], count: int, classes: int, admit: str) -> Call:
        """Return a call that adds `count` samples to a buffer with a limit."""
        buffer = self._buffer(schema, classes, storage=self._stored, admit=admit)
        some, labels = samples(schema, count), self._random.integers(0, classes, (512, count))
        calls = 0

        def call() -> None:
            nonlocal calls
            calls += 1
            buffer.add(some, labels=labels[calls % 512])

        return call

    def draw(self, count: int, ratio: float) -> Call:
        """Return a call that makes one step of `count` images, a share of which is swapped."""
        buffer = self._buffer(IMAGE, 10, swap=RandomSwap(ratio) if ratio else None)
        batch = buffer.empty(count)

        def call() -> None:
            buffer.sample(count, batch)
            buffer.feedback(batch)

        return call


def cpprb_ways(stored: int) -> dict[str, Call]:
    """Return the calls of cpprb."""
    cpprb = importlib.import_module("cpprb")
    ways: dict[str, Call] = {}
    for title, schema in SCHEMAS.items():
        columns = Schema(schema).columns.items()
        fields = {name: {"shape": column.shape or 1, "dtype": column.dtype} for name, column in columns}
        for count in (1, 64):
            buffer, some = cpprb.ReplayBuffer(stored, fields), samples(schema, count)
            one = {name: values[0] for name, values in some.items()} if count == 1 else some
            ways[f"add {count}, {title}, cpprb"] = partial(buffer.add, **one)
    buffer = cpprb.ReplayBuffer(stored, {"image": {"shape": (32, 32, 3), "dtype": np.uint8}})
    buffer.add(**samples(IMAGE, stored))
    ways["draw 32, cpprb"] = partial(buffer.sample, 32)
    ways["draw 256, cpprb"] = partial(buffer.sample, 256)
    return ways


def torchrl_ways(stored: int) -> dict[str, Call]:
    """Return the calls of TorchRL."""
    torch, data = importlib.import_module("torch"), importlib.import_module("torchrl.data")
    tensordict = importlib.import_module("tensordict")

    def made(schema: Mapping[str, Any], count: int) -> Any:
        tensors = {name: torch.from_numpy(values) for name, values in samples(schema, count).items()}
        return tensordict.TensorDict(tensors, [count])

    ways: dict[str, Call] = {}
    for title, schema in SCHEMAS.items():
        for count in (1, 64):
            buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(stored), batch_size=32)
            buffer.extend(made(schema, 64))
            some = made(schema, count)
            one = some[0] if count == 1 else some
            add = buffer.add if count == 1 else buffer.extend
            ways[f"add {count}, {title}, TorchRL"] = partial(add, one)
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(stored), batch_size=32)
    buffer.extend(made(IMAGE, stored))
    ways["draw 32, TorchRL"] = partial(buffer.sample, 32)
    ways["draw 256, TorchRL"] = partial(buffer.sample, 256)
    return ways


def all_ways(folder: Path, stored: int, classes: int, held: ExitStack) -> dict[str, Call]:
    """Return every call by name."""
    make = Ways(folder, stored, held)
    ways: dict[str, Call] = {}
    for title, schema in SCHEMAS.items():
        for count in (1, 64):
            ways[f"add {count}, {title}"] = make.add(schema, count, 10, "reservoir")
    for admit in ("reservoir", "class_balanced"):
        ways[f"add 64, {classes} classes, {admit}"] = make.add(IMAGE, 64, classes, admit)
    for count in (32, 256):
        for ratio in (0.0, 0.5, 1.0):
            ways[f"draw {count}, {100 * ratio:g} % swapped"] = make.draw(count, ratio)
    for name, peer in (("cpprb", cpprb_ways), ("torchrl", torchrl_ways)):
        try:
            ways |= peer(stored)
        except ImportError as error:
            skip(f"{name}: {error}")
    return ways


def record(costs: dict[str, list[float]], classes: int) -> Record:
    """Return the processor time of each call, and the samples that a second of it draws."""
    figures = []
    for name, rounds in costs.items():
        kind, count = name.split(",")[0].split()
        if kind == "draw":
            drawn = [1e3 * int(count) / us for us in rounds]
            figures.append(Figure.of(name, drawn, "thousand samples a CPU second", "more"))
        else:
            figures.append(Figure.of(name, rounds, "us of CPU", "less"))
    balanced, reservoir = (costs[f"add 64, {classes} classes, {name}"] for name in ("class_balanced", "reservoir"))
    ratios = [own / other for own, other in zip(balanced, reservoir, strict=True)]
    figures.append(Figure.of(f"class-balanced over reservoir, {classes} classes", ratios, "times", "less"))
    return Record(figures)


@workload
@click.option("--stored", default=20_000, show_default=True, help="Samples in each buffer.")
@click.option("--classes", default=1000, show_default=True, help="Of the class-balanced buffer.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--repeats", default=300, show_default=True, help="Calls of a way in a round.")
def main(scratch: Path, stored: int, classes: int, rounds: int, repeats: int) -> Outcome:
    """Measure the processor time of adding and drawing."""
    with ExitStack() as held:
        ways = all_ways(scratch, stored, classes, held)
        for call in ways.values():
            call()
        costs = by_turns({name: cost(call, repeats) for name, call in ways.items()}, rounds)
    return Outcome(record(costs, classes))


if __name__ == "__main__":
    main()
