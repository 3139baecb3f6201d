"""The time of a checkpoint of a large buffer.

``python -m memhier.benchmarks.workloads.replay.checkpoint --dir /path/on/the/device`` fills storage first. Then a few
training steps, with new samples and swaps, go between any two checkpoints, as in training. A checkpoint writes the
changes since the last one, and every sync waits for the device.
"""

import time
from pathlib import Path

import click
import numpy as np

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.recsys.replay import CarouselBuffer, RandomSwap

__all__ = ["main"]

BLOCK = 5000
BATCH = 32


@workload
@click.option("--stored", default=1_000_000, show_default=True, help="Samples in storage; 3 GB at 32 pixels.")
@click.option("--side", default=32, show_default=True, help="Of the images.")
@click.option("--steps", default=20, show_default=True, help="Between two checkpoints.")
@click.option("--rounds", default=25, show_default=True)
def main(scratch: Path, stored: int, side: int, steps: int, rounds: int) -> Outcome:
    """Measure the time of a checkpoint."""
    random = np.random.default_rng(0)
    schema = {"image": ("uint8", (side, side, 3))}
    clock, processor = [], []
    with CarouselBuffer(scratch / "b", memory=BLOCK, schema=schema, swap=RandomSwap(0.5)) as buffer:
        block = random.integers(0, 256, (BLOCK, side, side, 3), np.uint8)
        for start in range(0, stored, BLOCK):
            count = min(BLOCK, stored - start)
            buffer.add({"image": block[:count]}, labels=random.integers(0, 10, count))
            if start % (20 * BLOCK) == 0:
                buffer.checkpoint()
        buffer.checkpoint()
        for _ in range(rounds):
            for _ in range(steps):
                buffer.feedback(buffer.sample(BATCH))
                buffer.add({"image": block[:BATCH]}, labels=random.integers(0, 10, BATCH))
            start_s, own = time.perf_counter(), time.process_time()
            buffer.checkpoint()
            clock.append(1e3 * (time.perf_counter() - start_s))
            processor.append(1e3 * (time.process_time() - own))
    name = f"a checkpoint of {stored:,} samples"
    figures = [
        Figure.of(name, clock, "ms", "less", clock=True),
        Figure.of(f"{name}, processor time", processor, "ms", "less", clock=True),
    ]
    return Outcome(Record(figures))


if __name__ == "__main__":
    main()
