"""The page reader against fio's io_uring engine: the same file, the same minute, uniformly random 4 KiB direct reads.

``python -m memhier.benchmarks.workloads.tiers.reader_vs_fio --dir /path/on/the/device`` measures two things, each in
pairs of neighbouring runs, since a shared device changes from minute to minute:

- sustained: reads per second with 128 in flight;
- a call: the time of 100 scattered reads in one call. fio submits 100, waits for all and starts again
  (``iodepth=100``, ``iodepth_batch=100``, ``iodepth_batch_complete_min=100``; strace confirms it). Its time for 100 is
  run time over batches, a mean, so the ratio compares means.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.harness import Outcome, Row, bars_of, rows_table, workload
from memhier.budget import parse_bytes
from memhier.io.kernels import crc32c_pages
from memhier.io.reader import PAGE_BYTES, Reader

__all__ = ["main"]

DEPTH = 128
CALL_READS = 100
SUSTAINED_READS = 8192  # per call, so that the ends of a call, when the queue is not full, count for little
BLOCK_BYTES = 16 << 20


def measure(path: Path, rounds: int, seconds: float, engine: str | None, checksums: bool, seed: int) -> dict[str, Any]:
    """Run fio and the reader by turns on a file; returns every round of both."""
    size = path.stat().st_size
    sums = np.concatenate([crc32c_pages(block) for block in _blocks(path)]) if checksums else None
    with Reader(engine, DEPTH, direct=True) as reader:
        handle = reader.add(path, checksums=sums)
        pairs = []
        for turn in range(rounds):
            rng = np.random.default_rng([seed, turn])
            sides: list[tuple[str, Callable[[], dict[str, float]]]] = [
                ("fio", partial(_fio, path, seconds, seed + turn)),
                ("memhier", partial(_reader, reader, handle, size, seconds, rng)),
            ]
            # The first side changes with every round, so that a drift of the device favours neither.
            pairs.append({name: run() for name, run in (sides if turn % 2 == 0 else sides[::-1])})
        return {"engine": reader.engine, "file_bytes": size, "checksums": checksums, "rounds": pairs}


def _fio(path: Path, seconds: float, seed: int) -> dict[str, float]:
    sustained = _run_fio(path, seconds, seed, f"--iodepth={DEPTH}")
    batched = [f"--{name}={CALL_READS}" for name in ("iodepth", "iodepth_batch", "iodepth_batch_complete_min")]
    call = _run_fio(path, seconds, seed + 1, *batched, f"--iodepth_batch_complete_max={CALL_READS}")
    latency = sustained["read"]["clat_ns"]["percentile"]
    cpu = sustained["usr_cpu"] + sustained["sys_cpu"]
    return {
        "iops": sustained["read"]["iops"],
        "p50_us": latency["50.000000"] / 1e3,
        "p99_us": latency["99.000000"] / 1e3,
        "cpu_us": cpu * 1e4 / sustained["read"]["iops"],
        "call_mean_us": CALL_READS * 1e6 / call["read"]["iops"],
    }


def _run_fio(path: Path, seconds: float, seed: int, *options: str) -> dict[str, Any]:
    command = [
        "fio", "--name=reads", f"--filename={path}", "--ioengine=io_uring", "--direct=1", "--rw=randread", "--bs=4k",
        "--norandommap", f"--randseed={seed}", "--time_based", f"--runtime={seconds}", "--output-format=json", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job


def _reader(reader: Reader, handle: int, size: int, seconds: float, rng: np.random.Generator) -> dict[str, float]:
    latency = np.empty(SUSTAINED_READS, np.float32)
    latencies: list[NDArray[np.float32]] = []
    cpu = time.process_time()
    sustained = _calls(reader, handle, size, seconds, rng, SUSTAINED_READS, latency, latencies)
    cpu = time.process_time() - cpu
    calls = _calls(reader, handle, size, seconds, rng, CALL_READS, None, [])
    every = np.concatenate(latencies)
    return {
        "iops": SUSTAINED_READS * len(sustained) / sum(sustained),
        "p50_us": float(np.percentile(every, 50) * 1e6),
        "p99_us": float(np.percentile(every, 99) * 1e6),
        "cpu_us": cpu * 1e6 / len(every),
        "call_mean_us": float(np.mean(calls) * 1e6),
        "call_p50_us": float(np.percentile(calls, 50) * 1e6),
        "call_p99_us": float(np.percentile(calls, 99) * 1e6),
    }


def _calls(
    reader: Reader,
    handle: int,
    size: int,
    seconds: float,
    rng: np.random.Generator,
    reads: int,
    latency: NDArray[np.float32] | None,
    latencies: list[NDArray[np.float32]],
) -> list[float]:
    """Return the seconds of each call, offsets and copies of latencies not counted."""
    out = reader.read(handle, np.zeros(reads, np.int64), PAGE_BYTES)
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        offsets = rng.integers(0, size // PAGE_BYTES, reads) * PAGE_BYTES
        started = time.perf_counter()
        reader.read(handle, offsets, PAGE_BYTES, out, latency)
        took.append(time.perf_counter() - started)
        if latency is not None:
            latencies.append(latency.copy())
    return took


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _write_random_file(path: Path, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, size, BLOCK_BYTES):
            file.write(rng.bytes(min(BLOCK_BYTES, size - start)))
        file.flush()
        os.fsync(file.fileno())


def record(rounds: list[dict[str, dict[str, float]]]) -> Record:
    """Return the ratios to fio, round by round, and the reader's own times as figures; reads a second as bars."""
    sides = {side: [pair[side] for pair in rounds] for side in ("fio", "memhier")}

    def ratios(field: str) -> list[float]:
        return [pair["memhier"][field] / pair["fio"][field] for pair in rounds]

    figures = [
        Figure.of(f"{DEPTH} in flight, reads a second", ratios("iops"), "times fio", "more", clock=True),
        Figure.of(f"{CALL_READS} at once, time", ratios("call_mean_us"), "times fio", "less", clock=True),
        Figure.of("processor time of a read", [each["cpu_us"] for each in sides["memhier"]], "us", "less"),
    ]
    rates = {side: [each["iops"] for each in some] for side, some in sides.items()}
    return Record(figures, bars=[bars_of(f"4 KiB random direct reads, {DEPTH} in flight", "reads a second", rates)])


@workload
@click.option("--size", default="2GiB", show_default=True, help="Of the file of random bytes to read.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="For each of the four runs of a round.")
@click.option("--engine", help="The reader's engine; the best one here by default.")
@click.option("--checksums/--no-checksums", default=False, help="Let the reader check each page, which fio does not.")
@click.option("--seed", default=0, show_default=True)
def main(
    scratch: Path, size: str, rounds: int, seconds: float, engine: str | None, checksums: bool, seed: int
) -> Outcome:
    """Compare the page reader with fio."""
    if shutil.which("fio") is None:
        raise click.ClickException(
            "fio is not installed (Debian: apt-get install fio); there is nothing to compare with"
        )
    path = scratch / "random.bin"
    _write_random_file(path, parse_bytes(size, "size"), seed)
    result = measure(path, rounds, seconds, engine, checksums, seed)
    rows: list[Row] = [{"side": side} | pair[side] for pair in result["rounds"] for side in ("memhier", "fio")]
    return Outcome(record(result["rounds"]), [rows_table(f"every round, engine {result['engine']}", rows)], result)


if __name__ == "__main__":
    main()
