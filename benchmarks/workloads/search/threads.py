"""Many threads on one index: how much of the device they use, and whether DRAM stays under the budget.

``python -m memhier.benchmarks.workloads.search.threads --threads 8 --seconds 60`` searches a generated set whose
vectors fill a page each, and prints pages a second beside what as many threads read at random from the same file with
nothing else to do, and the memory of the process.
"""

import resource
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import click
import faiss
import numpy as np
import numpy.typing as npt
from rich.console import Console

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.machine import describe_machine
from memhier.benchmarks.workloads.options import FOLDER, json_option
from memhier.io.reader import PAGE_BYTES, Reader

__all__ = ["Busy", "main", "measure", "record"]

_BATCH = 32
_ROUNDS = 5

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Busy:
    """What threads did to one index.

    Attributes
    ----------
    queries_per_s, pages_per_s
        Of all threads together; medians over rounds, as all that is timed.
    device_pages_per_s
        Random pages of the same file, read by as many threads with nothing else to do. By turns with the searches: a
        device may give more to who comes after a pause.
    share
        Pages of searches in those of the device, of a round.
    budget_bytes, counted_bytes, private_bytes
        DRAM given; what the index says it held at most; by how much the private memory of the process grew.
    """

    queries_per_s: float
    pages_per_s: float
    device_pages_per_s: float
    share: float
    budget_bytes: int
    counted_bytes: int
    private_bytes: int


def measure(folder: Path, count: int, dimension: int, dram: int, threads: int, seconds: float) -> Busy:
    """Return what `threads` threads that search for `seconds` in all make of an index and of the device."""
    data = mixed(count, dimension, 0)
    ZoomIndex.build(folder / "index", data.blocks(8192), dram=dram).close()
    queries = data.queries(4096)
    rows = max((folder / "index" / "segments").glob("p0-rows*"), key=lambda path: path.stat().st_size)
    rounds, peak, counted = [], 0, 0
    with Reader() as reader:
        handle, pages = reader.add(rows), rows.stat().st_size // PAGE_BYTES
        room = np.zeros((threads, 10 * _BATCH, PAGE_BYTES), np.uint8)
        _device(reader, handle, pages, room, seconds / 100)  # what it holds is not the index's
        before = _private_bytes()
        with ZoomIndex.open(folder / "index") as index:
            for _ in range(_ROUNDS):
                per_s, held, private = _search(index, queries, threads, seconds / _ROUNDS)
                peak, counted = max(peak, private - before), max(counted, held)
                rounds.append((*per_s, _device(reader, handle, pages, room, seconds / _ROUNDS)))
    queries_s, pages_s, device = np.median(rounds, axis=0).tolist()
    share = float(np.median([pages / possible for _, pages, possible in rounds]))
    return Busy(queries_s, pages_s, device, share, dram, counted, peak)


def _search(
    index: ZoomIndex, queries: npt.NDArray[np.float32], threads: int, seconds: float
) -> tuple[Floats, int, int]:
    """Return queries and pages a second of threads that search, and the most memory, counted and private."""
    peak, counted = [0], [0]
    done = np.zeros((threads, 2), np.int64)
    start = time.perf_counter()

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        while time.perf_counter() - start < seconds:
            found = index.search(queries[random.integers(0, len(queries), _BATCH)], 10, recall=0.95)
            done[number] += _BATCH, found.stats["pages"]

    def watch() -> None:
        while time.perf_counter() - start < seconds:
            peak[0] = max(peak[0], _private_bytes())
            counted[0] = max(counted[0], index.memory_bytes)
            time.sleep(0.05)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    _run([*workers, threading.Thread(target=watch)])
    return done.sum(axis=0) / (time.perf_counter() - start), counted[0], peak[0]


def _device(reader: Reader, handle: int, pages: int, room: npt.NDArray[np.uint8], seconds: float) -> float:
    """Return random pages a second of a file, by a thread for each part of the room, as many as searches read."""
    done = np.zeros(len(room), np.int64)
    start = time.perf_counter()

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        out = room[number]
        while time.perf_counter() - start < seconds:
            reader.read(handle, random.integers(0, pages, len(out)) * PAGE_BYTES, PAGE_BYTES, out)
            done[number] += len(out)

    _run([threading.Thread(target=work, args=(number,)) for number in range(len(room))])
    return float(done.sum() / (time.perf_counter() - start))


def _run(workers: list[threading.Thread]) -> None:
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@click.command(help=__doc__)
@click.option("--vectors", default=100_000, show_default=True)
@click.option("--dimension", default=960, show_default=True)
@click.option("--dram", default=48 << 20, show_default=True, help="Bytes.")
@click.option("--threads", default=8, show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
@click.option("--dir", "place", type=FOLDER, help="Where to build; a temporary folder otherwise.")
@json_option
def main(
    vectors: int, dimension: int, dram: int, threads: int, seconds: float, place: Path | None, out: Path | None
) -> None:
    """Print what was measured."""
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        busy = measure(Path(folder), vectors, dimension, dram, threads, seconds)
    console = Console()
    console.print(f"{threads} threads, {vectors:,} x {dimension} float32; {describe_machine()}")
    console.print(f"{busy.queries_per_s:,.0f} queries/s, {busy.pages_per_s:,.0f} pages/s")
    console.print(f"{busy.share:.2f} of the {busy.device_pages_per_s:,.0f} pages/s of the device")
    console.print(f"DRAM: budget {busy.budget_bytes / 2**20:.1f} MiB, counted {busy.counted_bytes / 2**20:.1f}, "
                  f"the process grew by {busy.private_bytes / 2**20:.1f}")  # fmt: skip
    if out is not None:
        record(busy).write(out, results=asdict(busy))


def record(busy: Busy) -> Record:
    """Return what can be held against another run."""
    return Record(
        [
            Figure.of("queries", busy.queries_per_s, "a second", "more", clock=True),
            Figure.of("pages", busy.pages_per_s, "4 KiB reads a second", "more", clock=True),
            Figure.of("of the device's pages", busy.share, "share", "more", clock=True),
            Figure.of("counted DRAM", busy.counted_bytes / busy.budget_bytes, "of the budget", "less"),
            Figure.of("private memory", busy.private_bytes / busy.budget_bytes, "of the budget", "less"),
        ]
    )


if __name__ == "__main__":
    main()
