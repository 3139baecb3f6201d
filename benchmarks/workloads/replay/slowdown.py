"""The time that swapping adds to a training step: steps of one training, with swaps and without, by turns.

``python -m memhier.benchmarks.workloads.replay.slowdown --dir /path/on/the/device`` trains a small convolutional
network on a batch of the stream and one of memory. Ways take turns in blocks of a few steps, in a new random order each
round, so neighbours on the machine disturb all of them; each block begins with steps that do not count. The figures say
how much more a way takes than no swaps, the median over rounds: of the median step by the clock, of the processor time
of the training thread, and of the whole process, with the thread that reads. Neighbours disturb the last two less:
trust those on a busy machine. "Waiting" swaps read while training waits; "a file per sample" reads files as CarM's code
does, and waits.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from memhier.benchmarks.bench.figures import Figure, Paper, Record
from memhier.benchmarks.workloads.harness import Outcome, bars_of, workload
from memhier.recsys.replay import Batch, CarouselBuffer, RandomSwap

__all__ = ["main"]

BATCH = 32
WARM = 2
BASE = "no swaps"
MEASURES = {
    "clock": "a step is longer by", "thread": "the training thread computes longer by",
    "process": "the process computes longer by",
}  # fmt: skip


class Trainer:
    """A training step: half a batch of the stream, half of memory."""

    def __init__(self, side: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for width in (24, 48, 96):
            stride = 1 if side < 64 else 2
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.model: torch.nn.Sequential = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        random = np.random.default_rng(1)
        self.stream: torch.Tensor = torch.from_numpy(random.integers(0, 256, (BATCH, side, side, 3), np.uint8))
        self.stream_labels: torch.Tensor = torch.from_numpy(random.integers(0, 10, BATCH))

    def step(self, batch: Batch) -> None:
        """Learn from the stream's batch and one of memory."""
        images = torch.cat([self.stream, torch.from_numpy(batch["image"])]).permute(0, 3, 1, 2).float().div_(255)
        labels = torch.cat([self.stream_labels, torch.from_numpy(batch.labels)])
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def make_ways(
    folder: Path, side: int, stored: int, memory: int, held: ExitStack
) -> tuple[dict[str, Callable[[], None]], dict[str, CarouselBuffer]]:
    """Return a training step for each way, and the buffers of those that have one."""
    trainer = Trainer(side)
    buffers = {
        BASE: _buffer(folder, 0, side, stored, memory, None, 1, held),
        "20 % swapped": _buffer(folder, 1, side, stored, memory, 0.2, 1, held),
        "100 % swapped": _buffer(folder, 2, side, stored, memory, 1.0, 1, held),
        "100 %, waiting": _buffer(folder, 3, side, stored, memory, 1.0, 0, held),
    }
    ways = {name: _way(trainer, buffer) for name, buffer in buffers.items()}
    ways["100 %, a file per sample"] = _file_way(folder, trainer, side, memory)
    return ways, buffers


def _buffer(
    folder: Path, number: int, side: int, stored: int, memory: int, ratio: float | None, delay: int, held: ExitStack
) -> CarouselBuffer:
    random = np.random.default_rng(0)
    swap = None if ratio is None else RandomSwap(ratio)
    schema = {"image": ("uint8", (side, side, 3))}
    buffer = CarouselBuffer(folder / f"{number}", memory=memory, schema=schema, swap=swap, delay=delay)
    held.callback(buffer.close)
    for start in range(0, stored, 500):
        count = min(500, stored - start)
        buffer.add(
            {"image": random.integers(0, 256, (count, side, side, 3), np.uint8)}, labels=random.integers(0, 10, count)
        )
    buffer.checkpoint()
    return buffer


def _way(trainer: Trainer, buffer: CarouselBuffer) -> Callable[[], None]:
    batch = buffer.empty(BATCH)

    def step() -> None:
        buffer.sample(BATCH, batch)
        trainer.step(batch)
        buffer.feedback(batch)

    return step


def _file_way(folder: Path, trainer: Trainer, side: int, memory: int) -> Callable[[], None]:
    """One file per sample, read past the page cache as far as the system can be asked to."""
    random = np.random.default_rng(2)
    files = folder / "files"
    files.mkdir()
    count, size = 1000, side * side * 3
    for index in range(count):
        random.integers(0, 256, size, np.uint8).tofile(files / f"{index}")
    rows = random.integers(0, 256, (memory, side, side, 3), np.uint8)
    labels = random.integers(0, 10, memory)

    def step() -> None:
        slots = random.choice(memory, BATCH, replace=False)
        trainer.step(Batch({"image": rows[slots]}, labels[slots], labels[slots], slots))
        for slot, index in zip(slots.tolist(), random.integers(0, count, BATCH).tolist(), strict=True):
            handle = os.open(files / f"{index}", os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            rows[slot] = np.frombuffer(os.read(handle, size), np.uint8).reshape(rows.shape[1:])
            os.close(handle)

    return step


def measure(folder: Path, side: int, stored: int, memory: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return for each way the seconds of a step in every round, by measure, and the waits of its buffer."""
    order = np.random.default_rng(3)
    folder.mkdir()
    with ExitStack() as held:
        ways, buffers = make_ways(folder, side, stored, memory, held)
        times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in MEASURES} for name in ways}
        for _ in range(rounds):
            for name in order.permutation(list(ways)).tolist():
                for kind, seconds in _timed(ways[name], steps).items():
                    times[name][kind].append(seconds)
        waits = {
            name: {key: buffer.stats()[key] for key in ("step", "swapped", "stalls", "stall_s", "read_s")}
            for name, buffer in buffers.items()
        }
    return {"times": times, "waits": waits}


def _timed(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Return the seconds of a step: the median by the clock, and the mean processor time of thread and process."""
    for _ in range(WARM):
        step()
    clock = []
    thread, process = time.thread_time(), time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        clock.append(time.perf_counter() - start)
    return {
        "clock": float(np.median(clock)),
        "thread": (time.thread_time() - thread) / steps,
        "process": (time.process_time() - process) / steps,
    }


def longer(times: dict[str, dict[str, list[float]]], name: str, kind: str) -> list[float]:
    """Return by how many % a step of a way takes more than without swaps, for every round."""
    return [100 * (way / base - 1) for way, base in zip(times[name][kind], times[BASE][kind], strict=True)]


def stalled(result: dict[str, Any], name: str) -> float:
    """Return the share of the time that steps of a way waited for swaps, in %."""
    wait = result["waits"].get(name)
    if wait is None:
        return 0.0
    step = float(np.mean(result["times"][name]["clock"]))
    return 100 * float(wait["stall_s"]) / max(1, int(wait["step"])) / step


def record(found: dict[int, Any]) -> Record:
    """Return the extra time of steps as figures and bars."""
    figures, bars = [], []
    for side, result in found.items():
        times = result["times"]
        names = [name for name in times if name != BASE]
        for name in names:
            for kind, words in MEASURES.items():
                paper: Paper = "CarM" if kind == "clock" else ""
                more = longer(times, name, kind)
                figures.append(Figure.of(f"{side} px, {name}: {words}", more, "%", "less", clock=True, paper=paper))
            title = f"{side} px, {name}: share of the time that steps waited for swaps"
            figures.append(Figure.of(title, stalled(result, name), "%", "less", clock=True))
        steps = [1e3 * seconds for seconds in times[BASE]["clock"]]
        figures.append(Figure.of(f"{side} px, {BASE}: a step", steps, "ms", "less", clock=True))
        title = f"How much longer a step takes with swaps, images of {side} x {side}"
        bars.append(bars_of(title, "%", {name: longer(times, name, "clock") for name in names}))
    return Record(figures, bars=bars, scale="a small network on one CPU thread; CarM: ResNets on a GPU")


@workload
@click.option("--sides", default="32,224", show_default=True, help="Of the images.")
@click.option("--stored", default=8000, show_default=True, help="Samples in storage; a quarter of them at 224.")
@click.option("--memory", default=500, show_default=True)
@click.option("--rounds", default=11, show_default=True)
@click.option("--steps", default=6, show_default=True, help="In a block.")
def main(scratch: Path, sides: str, stored: int, memory: int, rounds: int, steps: int) -> Outcome:
    """Measure the time that swaps add to training steps."""
    found = {
        side: measure(scratch / f"{side}", side, stored if side < 100 else stored // 4, memory, rounds, steps)
        for side in map(int, sides.split(","))
    }
    return Outcome(record(found), details={"results": {str(side): result for side, result in found.items()}})


if __name__ == "__main__":
    main()
