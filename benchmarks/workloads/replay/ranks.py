"""Replay by several trainers: a step of one buffer, of ranks that share it, and of ranks with a shard each.

``python -m memhier.benchmarks.workloads.replay.ranks --dir /path/on/the/device`` starts the ranks as processes of this
machine. In a step all ranks together add and draw a batch and end the step; then the model's part is a pause. The ways
take turns, in blocks of steps.
"""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import distributed as dist

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.recsys import CarouselBuffer, ShardedBuffer, SharedBuffer

__all__ = ["main"]

SCHEMA = {"image": ("uint8", (32, 32, 3))}
_BLOCK = 20  # steps of a way at a time
_FILL = 4_000
_PATIENCE = 600  # seconds


def rank_steps(rank: int, ranks: int, folder: str, steps: int, batch: int, pause_s: float, results: Any) -> None:
    """Do the steps of a rank; rank 0 puts the milliseconds of each way and the processor time of its steps."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=_PATIENCE))
    random = np.random.default_rng(rank)
    options: Any = {"memory": 1000, "schema": SCHEMA, "seed": 1}
    plain = CarouselBuffer(f"{folder}/plain", **options) if rank == 0 else None
    shared = SharedBuffer(CarouselBuffer(f"{folder}/shared", **options) if rank == 0 else None)
    sharded = ShardedBuffer(f"{folder}/sharded", memory=1000 // ranks, schema=SCHEMA, seed=1)
    images = random.integers(0, 256, (batch, 32, 32, 3), np.uint8)
    ways: dict[str, Callable[[], None]] = {
        f"{ranks} ranks, one buffer": partial(_step, shared, images[: batch // ranks]),
        f"{ranks} ranks, shards": partial(_step, sharded, images[: batch // ranks]),
    }
    ways = {"one trainer": (lambda: None) if plain is None else partial(_step, plain, images)} | ways
    told: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for work in ways.values():
        for _ in range(_FILL // batch):
            work()
    for _ in range(steps // _BLOCK):
        for name, work in ways.items():
            dist.barrier()
            for _ in range(_BLOCK):
                time.sleep(pause_s)
                clock, processor = time.perf_counter(), time.process_time()
                work()
                told[name][0].append(1e3 * (time.perf_counter() - clock))
                told[name][1].append(1e3 * (time.process_time() - processor))
    if rank == 0:
        results.put(told)
    dist.barrier()
    for buffer in (plain, shared, sharded):
        if buffer is not None:
            buffer.close()
    dist.destroy_process_group()


def _step(buffer: Any, images: Any) -> None:
    buffer.add({"image": images})
    buffer.feedback(buffer.sample(len(images)))


@workload
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=400, show_default=True, help="Of each way.")
@click.option("--batch", default=64, show_default=True, help="Samples of all ranks in a step, added and drawn.")
@click.option("--pause-ms", default=20.0, show_default=True, help="The model's part of a step.")
def main(scratch: Path, ranks: int, steps: int, batch: int, pause_ms: float) -> Outcome:
    """Measure the buffer's part of a step."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = ranks, str(scratch), steps, batch, pause_ms / 1e3, results
    running = [context.Process(target=rank_steps, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
    for process in running:
        process.start()
    told = results.get(timeout=_PATIENCE)
    for process in running:
        process.join(_PATIENCE)
    figures = []
    for name, (clock, processor) in told.items():
        half, most = np.percentile(clock, [50, 99])
        part = f"the buffer's part, {name}"
        figures += [
            Figure.of(f"{part}, p50", half, "ms", "less", clock=True),
            Figure.of(f"{part}, p99", most, "ms", "less", clock=True),
            Figure.of(f"{part}, processor of rank 0, p50", np.percentile(processor, 50), "ms", "less", clock=True),
            Figure.of(f"share of the whole step, {name}", 100 * half / (half + pause_ms), "%", "less", clock=True),
        ]
    return Outcome(Record(figures))


if __name__ == "__main__":
    main()
