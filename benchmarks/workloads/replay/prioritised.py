"""Prioritised replay: processor time of a batch and of its new priorities, in memory and with ten times as much on SSD.

``python -m memhier.benchmarks.workloads.replay.prioritised --dir /path/on/the/device`` fills buffers with transitions
of the shape of MuJoCo's or of Atari's, then draws batches and gives them priorities, way by way in blocks. "All in
DRAM" and "a tenth in DRAM" are one `TransitionBuffer` with two budgets; their batches must be the same, bit for bit.
cpprb keeps everything in DRAM; TorchRL's buffer has its items in memory-mapped files, whose pages the system caches
beyond any budget. Both take part if they are installed (``pip install cpprb torchrl``), in the same process. The thread
to which calls are handed counts, too.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.harness import Outcome, skip, workload
from memhier.recsys.replay.transitions import Prioritised, TransitionBuffer

__all__ = ["main"]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "mujoco-17": ("float32", (17,)),
    "mujoco-376": ("float32", (376,)),
    "atari": ("uint8", (84, 84)),
}
_ADDED = 500
_BLOCK = 20  # batches of a way at a time
_SAME = 20

Step = Callable[[], None]


def transitions(kind: str, first: int, count: int) -> dict[str, Any]:
    """Return transitions of a shape, the same for the same numbers."""
    dtype, shape = SHAPES[kind]
    random = np.random.default_rng(first)
    observations = random.integers(0, 256, (count + 1, *shape), np.uint8).astype(dtype)
    return {
        "obs": observations[:-1],
        "next_obs": observations[1:],
        "act": random.integers(0, 6, count),
        "rew": random.random(count, np.float32),
        "done": (np.arange(first, first + count) % 100 == 99).astype(np.float32),
    }


def tiered(folder: Path, kind: str, capacity: int, dram: int, batch: int, held: ExitStack) -> TransitionBuffer:
    """Return a full buffer of memhier's."""
    dtype, shape = SHAPES[kind]
    schema = {"obs": (dtype, shape), "next_obs": (dtype, shape), "act": "int64", "rew": "float32", "done": "float32"}
    buffer = held.enter_context(
        TransitionBuffer(folder, capacity=capacity, schema=schema, dram=dram, draw=Prioritised(0.6, 0.4), batch=batch)
    )
    for first in range(0, capacity, _ADDED):
        buffer.add(transitions(kind, first, min(_ADDED, capacity - first)))
    return buffer


def tiered_step(buffer: TransitionBuffer) -> Step:
    """Return a step: a batch, and priorities that follow from it."""

    def step() -> None:
        batch = buffer.sample()
        buffer.update_priorities(batch.numbers, np.abs(batch["rew"]))

    return step


def cpprb_step(kind: str, capacity: int, batch: int) -> Step:
    """Return a step of cpprb's buffer, which it fills."""
    dtype, shape = SHAPES[kind]
    observation = {"shape": shape, "dtype": np.dtype(dtype)}
    fields = {"obs": observation, "next_obs": observation, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    buffer = import_module("cpprb").PrioritizedReplayBuffer(capacity, fields, alpha=0.6)
    for first in range(0, capacity, _ADDED):
        buffer.add(**transitions(kind, first, min(_ADDED, capacity - first)))

    def step() -> None:
        found = buffer.sample(batch, beta=0.4)
        buffer.update_priorities(found["indexes"], np.abs(found["rew"][:, 0]))

    return step


def torchrl_step(folder: Path, kind: str, capacity: int, batch: int) -> Step:
    """Return a step of TorchRL's buffer over memory-mapped files, which it fills."""
    torch, data = import_module("torch"), import_module("torchrl.data")
    torch.set_num_threads(1)
    dictionary = import_module("tensordict").TensorDict
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyMemmapStorage(capacity, scratch_dir=str(folder)),
        sampler=data.replay_buffers.PrioritizedSampler(capacity, 0.6, 0.4),
        batch_size=batch,
        priority_key="rew",
    )
    for first in range(0, capacity, _ADDED):
        items = transitions(kind, first, min(_ADDED, capacity - first))
        tensors = {name: torch.from_numpy(values) for name, values in items.items()}
        buffer.extend(dictionary(tensors, [len(items["rew"])]))

    def step() -> None:
        buffer.update_tensordict_priority(buffer.sample())

    return step


def peers(folder: Path, kind: str, capacity: int, batch: int) -> dict[str, Step]:
    """Return the steps of other libraries, where they are installed."""
    ways: dict[str, Step] = {}
    for name, made in (
        ("cpprb, all in DRAM", partial(cpprb_step, kind, capacity, batch)),
        ("TorchRL, memory-mapped", partial(torchrl_step, folder, kind, capacity, batch)),
    ):
        try:
            ways[name] = made()
        except (ImportError, RuntimeError) as error:  # a RuntimeError: TorchRL's compiled part is for another torch
            skip(f"{name}: {error}")
    return ways


def measure(ways: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of processor time of a step of each way, by round."""
    order, told = np.random.default_rng(0), {name: list[float]() for name in ways}
    for _ in range(rounds):
        for name in order.permutation(list(ways)).tolist():
            start = time.process_time()
            for _ in range(_BLOCK):
                ways[name]()
            told[name].append(1e6 * (time.process_time() - start) / _BLOCK)
    return told


def same_batches(one: TransitionBuffer, other: TransitionBuffer) -> bool:
    """Whether two buffers of one seed give the same batches, bit for bit."""
    for _ in range(_SAME):
        pair = one.sample(), other.sample()
        if any(not np.array_equal(pair[0][name], pair[1][name]) for name in pair[0].data):
            return False
        if not np.array_equal(pair[0].numbers, pair[1].numbers) or not np.array_equal(pair[0].weights, pair[1].weights):
            return False
        for buffer, batch in zip((one, other), pair, strict=True):
            buffer.update_priorities(batch.numbers, np.abs(batch["rew"]))
    return True


@workload
@click.option("--kind", default="mujoco-376", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--capacity", default=50_000, show_default=True, type=click.IntRange(1000))
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1))
def main(scratch: Path, kind: str, capacity: int, batch: int, rounds: int) -> Outcome:
    """Measure a step of prioritised replay."""
    dtype, shape = SHAPES[kind]
    raw = capacity * (2 * int(np.prod(shape)) * np.dtype(dtype).itemsize + 16)
    with ExitStack() as held:
        whole = tiered(scratch / "whole", kind, capacity, 2 * raw + 2**25, batch, held)
        tenth = tiered(scratch / "tenth", kind, capacity, raw // 10, batch, held)
        same = same_batches(whole, tenth)
        ways = {"memhier, all in DRAM": tiered_step(whole), "memhier, a tenth in DRAM": tiered_step(tenth)}
        ways |= peers(scratch / "torchrl", kind, capacity, batch)
        told = measure(ways, rounds)
        held_bytes = tenth.memory_bytes
        reads = tenth.stats()
    figures = [
        Figure.of("batches are the same with a tenth in DRAM", int(same), "", "more"),
        Figure.of("bytes of transitions by bytes of DRAM", raw / held_bytes, "times", "more"),
        Figure.of("share of transitions in DRAM", 100 * reads["newest"] / reads["stored"], "%", "more"),
    ]
    figures += [
        Figure.of(f"processor time of a batch and its priorities, {name}", times, "us", "less", clock=True)
        for name, times in told.items()
    ]
    if "cpprb, all in DRAM" in told:
        ratios = np.array(told["cpprb, all in DRAM"]) / np.array(told["memhier, all in DRAM"])
        figures.append(Figure.of("rate by that of cpprb, all in DRAM", ratios, "times", "more", clock=True))
    return Outcome(Record(figures))


if __name__ == "__main__":
    main()
