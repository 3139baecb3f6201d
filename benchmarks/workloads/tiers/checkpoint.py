"""What a checkpoint costs: megabytes a second, and how much it takes from the work beside it.

``python -m memhier.benchmarks.workloads.tiers.checkpoint --dir /path/on/the/device`` prints a table and, with
``--json``, writes it. A training loop in one thread computes and updates skewed random rows of a table; the loop beside
a checkpoint and the same loop alone take turns, so that a drift of the machine favours neither:

- full: every block is saved;
- incremental: only what a number of steps changed.

The same steps beside another process that saves as much, with nothing shared but the machine, tell what of it is the
machine's: processors, memory and device.

Rates stand beside a plain copy of the same bytes to a file by direct writes of 1 MiB and ``fdatasync``, in the same
round. The loop's cost is given twice: wall time of its steps, and processor time that the saving thread took.
"""

import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.budget import parse_bytes
from memhier.files import RealFiles
from memhier.io.reader import Reader
from memhier.store.store import Store
from memhier.table.checkpoint import Checkpoint, CheckpointWriter, read_checkpoint

__all__ = ["main", "measure"]

ROW_BYTES = 256
BATCH = 4096
WRITE_BYTES = 2**20
ELSEWHERE_STEPS = 100


def measure(folder: Path, size: int, rounds: int, share: float, passes: int, spare: str, seed: int) -> dict[str, Any]:
    """Run all rounds in a folder on the device; returns every figure of each."""
    table = np.random.default_rng(seed).random((size // ROW_BYTES, ROW_BYTES // 4), np.float32)
    results = []
    with (
        Reader() as reader,
        Store.create(folder / "store", kind="checkpoint-benchmark") as store,
        CheckpointWriter(store, "table", table, reader, spare=spare) as writer,
    ):
        for turn in range(rounds):
            rng = np.random.default_rng([seed, turn])
            result: dict[str, float] = {"plain_mb_s": _plain_write(folder / "plain", table)}
            for kind in ("full", "incremental"):
                everything = np.arange(len(table))
                part = everything if kind == "full" else everything[: int(share * len(table))]
                with writer.changing(part):
                    table[part] += 1
                result |= {f"{kind}_{name}": value for name, value in _beside(writer, table, part, rng, passes).items()}
            with _saving_elsewhere(folder / f"elsewhere{turn}", size):
                steps = _steps(writer, table, np.arange(len(table)), rng, passes, None, ELSEWHERE_STEPS)
            result["full_step_elsewhere_us"] = float(np.mean(steps)) * 1e6
            writer.write()
            results.append(result)
        assert np.array_equal(read_checkpoint(store, "table", reader).view(np.float32), table)
        memory = writer.memory_bytes
    return {"bytes": size, "share": share, "memory_bytes": memory, "rounds": results}


def _beside(
    writer: CheckpointWriter, table: NDArray[np.float32], part: NDArray[np.int64], rng: Any, passes: int
) -> dict[str, float]:
    """Save once with nothing beside, then by turns: steps alone, and steps while the same blocks are saved again."""
    idle = writer.write()
    with writer.changing(part):
        table[part] *= 0.5
    cpu = time.process_time() - time.thread_time()
    saving = writer.start()
    steps = _steps(writer, table, part, rng, passes, saving)
    saved = saving.result()
    other_cpu = time.process_time() - time.thread_time() - cpu
    alone = _steps(writer, table, part, rng, passes, None, len(steps))
    writer.write()
    return {
        "mb_s": idle.bytes / idle.seconds / 1e6,
        "beside_mb_s": saved.bytes / saved.seconds / 1e6,
        "mb": saved.bytes / 1e6,
        "step_alone_us": float(np.mean(alone)) * 1e6,
        "step_beside_us": float(np.mean(steps)) * 1e6,
        "step_beside_max_us": float(np.max(steps)) * 1e6,
        "slower_by": float(np.mean(steps) / np.mean(alone)) - 1,
        "cpu_ms_per_100mb": other_cpu * 1e3 / (saved.bytes / 1e8),
    }


def _steps(
    writer: CheckpointWriter,
    table: NDArray[np.float32],
    part: NDArray[np.int64],
    rng: Any,
    passes: int,
    until: Future[Checkpoint] | None,
    count: int = 0,
) -> list[float]:
    """Return the seconds of each step, until a checkpoint is saved or for a number of steps."""
    layer = np.zeros(2**18, np.float32)  # no matrices: their threads would be counted with the saving one
    out = np.empty_like(layer)
    took: list[float] = []
    while (until is not None and not until.done()) or len(took) < max(count, 1):
        # A fifth of the rows take two thirds of the updates.
        rows = part[(len(part) * rng.random(BATCH) ** 4).astype(np.int64)]
        begun = time.perf_counter()
        for _ in range(passes):
            np.exp(layer, out)
        gradient = np.tanh(table[rows])
        with writer.changing(rows) if until is not None else nullcontext():
            table[rows] -= 0.01 * gradient
        took.append(time.perf_counter() - begun)
    if until is None:
        with writer.changing(part):
            pass  # the steps alone changed rows unannounced: that is what they are compared with
    return took


@contextmanager
def _saving_elsewhere(folder: Path, size: int) -> Iterator[None]:
    """Have another process save full images, one after the other, until the end of the context."""
    spawning = multiprocessing.get_context("spawn")  # a fork would share the table's pages, and each step copy some
    saving, over = spawning.Event(), spawning.Event()
    process = spawning.Process(target=_save_until, args=(str(folder), size, saving, over))
    process.start()
    try:
        if not saving.wait(120):
            raise RuntimeError(f"the other process did not begin to save; it ended with {process.exitcode}")
        yield
    finally:
        over.set()
        process.join()


def _save_until(folder: str, size: int, saving: Any, over: Any) -> None:
    table = np.zeros((size // ROW_BYTES, ROW_BYTES // 4), np.float32)
    with (
        Reader() as reader,
        Store.create(folder, kind="checkpoint-benchmark") as store,
        CheckpointWriter(store, "table", table, reader) as writer,
    ):
        while not over.is_set():
            with writer.changing(np.arange(len(table))):
                table += 1
            image = writer.start()
            saving.set()
            image.result()


def _plain_write(path: Path, table: NDArray[np.float32]) -> float:
    """Return megabytes a second of a direct copy to a new file, which is removed."""
    source = table.reshape(-1).view(np.uint8)
    buffer = np.frombuffer(mmap.mmap(-1, WRITE_BYTES), np.uint8)
    begun = time.perf_counter()
    with RealFiles().open(str(path), "d") as file:
        for start in range(0, len(source) // WRITE_BYTES * WRITE_BYTES, WRITE_BYTES):
            buffer[:] = source[start : start + WRITE_BYTES]
            file.append(buffer.data)
        file.fdatasync()
    took = time.perf_counter() - begun
    os.remove(path)
    return len(source) / took / 1e6


def show(result: dict[str, Any]) -> Table:
    """Lay the medians out as a table."""
    rounds = result["rounds"]
    table = Table(title=f"Checkpoints of {result['bytes'] / 1e6:,.0f} MB: medians of {len(rounds)} rounds, by turns")
    for column in ("", "full", f"{result['share']:.0%} changed"):
        table.add_column(column, justify="left" if not column else "right")

    def median(name: str) -> float:
        return float(np.median([each[name] for each in rounds]))

    names = {
        "mb": ("saved, MB", 1),
        "mb_s": ("alone, MB/s", 1),
        "beside_mb_s": ("beside the loop, MB/s", 1),
        "step_alone_us": ("a step without it, us", 1),
        "step_beside_us": ("a step beside it, us", 1),
        "step_elsewhere_us": ("a step beside another process that saves, us", 1),
        "step_beside_max_us": ("longest step beside it, us", 1),
        "slower_by": ("steps slower by, %", 100),
        "cpu_ms_per_100mb": ("processor time of saving 100 MB, ms", 1),
    }
    for field, (name, scale) in names.items():
        cells = [f"{kind}_{field}" for kind in ("full", "incremental")]
        table.add_row(name, *(f"{median(cell) * scale:,.1f}" if cell in rounds[0] else "" for cell in cells))
    table.add_row("plain direct writes and fdatasync, MB/s", f"{median('plain_mb_s'):,.1f}", "")
    return table


def record(result: dict[str, Any]) -> Record:
    """Return rates and costs as figures, rates as bars."""
    each = result["rounds"]
    figures, bars = [], [Bar.of("plain direct writes and fdatasync", [one["plain_mb_s"] for one in each])]
    figures.append(Figure.of(bars[0].name, [one["plain_mb_s"] for one in each], "MB/s", "neither", clock=True))
    for kind in ("full", "incremental"):
        for field, name in (("mb_s", "alone"), ("beside_mb_s", "beside the loop")):
            rates = [one[f"{kind}_{field}"] for one in each]
            figures.append(Figure.of(f"{kind}, {name}", rates, "MB/s", "more", clock=True))
            bars.append(Bar.of(f"{kind}, {name}", rates))
        slower = [1 + one[f"{kind}_slower_by"] for one in each]
        figures.append(Figure.of(f"{kind}, a step beside it", slower, "times a step without it", "less", clock=True))
        cpu = [one[f"{kind}_cpu_ms_per_100mb"] for one in each]
        figures.append(Figure.of(f"{kind}, processor time of saving 100 MB", cpu, "ms", "less"))
    return Record(figures, bars=[Bars("Saving", "MB/s", bars)])


@click.command()
@folder_option
@click.option("--size", default="256MiB", show_default=True, help="Of the table.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--share", default=0.1, show_default=True, help="Of the table that changes before an incremental one.")
@click.option("--passes", default=4, show_default=True, help="Exponentials of 262,144 numbers in a step.")
@click.option("--spare", default="64MiB", show_default=True, help="DRAM for rows that change while they are saved.")
@click.option("--seed", default=0, show_default=True)
@json_option
def main(
    folder: Path | None, size: str, rounds: int, share: float, passes: int, spare: str, seed: int, out: Path | None
) -> None:
    """Measure checkpoints beside a training loop."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        result = measure(Path(scratch), parse_bytes(size, "size"), rounds, share, passes, spare, seed)
    Console(width=110).print(show(result))
    if out is not None:
        record(result).write(out, **result)


if __name__ == "__main__":
    main()
