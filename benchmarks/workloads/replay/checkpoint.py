"""How long a checkpoint of a large buffer takes.

``python -m memhier.benchmarks.workloads.replay.checkpoint --dir /path/on/the/device`` prints figures, ``--json`` writes
them.

Storage is filled first. Then a few training steps, with samples coming in and swaps, go between any two checkpoints, as
they would in training: what a checkpoint writes is what came since the last one, and every sync waits for the device.
"""

import tempfile
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.recsys.replay import CarouselBuffer, RandomSwap

__all__ = ["main", "measure"]

BLOCK = 5000
BATCH = 32


def measure(folder: Path | None, stored: int, side: int, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of every checkpoint, by the clock and of the processor."""
    random = np.random.default_rng(0)
    schema = {"image": ("uint8", (side, side, 3))}
    clock, processor = [], []
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        CarouselBuffer(Path(scratch) / "b", memory=BLOCK, schema=schema, swap=RandomSwap(0.5)) as buffer,
    ):
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
    return clock, processor


@click.command()
@folder_option
@click.option("--stored", default=1_000_000, show_default=True, help="Samples in storage; 3 GB at 32 pixels.")
@click.option("--side", default=32, show_default=True, help="Of the images.")
@click.option("--steps", default=20, show_default=True, help="Between two checkpoints.")
@click.option("--rounds", default=25, show_default=True)
@json_option
def main(folder: Path | None, stored: int, side: int, steps: int, rounds: int, out: Path | None) -> None:
    """Measure how long a checkpoint takes."""
    clock, processor = measure(folder, stored, side, steps, rounds)
    Console(width=100).print(
        f"{stored:,} samples of {side} px, {steps} steps between checkpoints: {np.median(clock):.1f} ms a checkpoint "
        f"(median of {rounds}; {min(clock):.1f} to {max(clock):.1f}), {np.median(processor):.1f} ms of the processor"
    )
    if out is not None:
        name = f"a checkpoint of {stored:,} samples"
        figures = [
            Figure.of(name, clock, "ms", "less", clock=True),
            Figure.of(f"{name}, processor time", processor, "ms", "less", clock=True),
        ]
        Record(figures).write(out)


if __name__ == "__main__":
    main()
