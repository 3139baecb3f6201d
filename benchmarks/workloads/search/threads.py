"""Many threads on one index: their share of the device, and whether DRAM stays under the budget.

``python -m memhier.benchmarks.workloads.search.threads --threads 8 --seconds 60`` searches a generated set whose
vectors fill a page each. Rounds of searches and of plain random reads take turns: as many threads read as many pages of
the same file, with nothing else to do. A device may give more after a pause, so neither side has one alone.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.peers.account import memory_now
from memhier.benchmarks.workloads.harness import Outcome, by_turns, workload
from memhier.io.reader import PAGE_BYTES, Reader

__all__ = ["main"]

_BATCH = 32
_ROUNDS = 5

Rates: TypeAlias = npt.NDArray[np.float64]
Work: TypeAlias = Callable[[int, np.random.Generator], tuple[int, ...]]


def rates(work: Work, threads: int, seconds: float, watch: Callable[[], object] = lambda: None) -> Rates:
    """Let each thread repeat `work`; return the sums of its counts a second. `watch` is called 20 times a second."""
    done: list[list[tuple[int, ...]]] = [[] for _ in range(threads)]
    start = time.perf_counter()

    def run(number: int) -> None:
        random = np.random.default_rng(number)
        while time.perf_counter() - start < seconds:
            done[number].append(work(number, random))

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    while time.perf_counter() - start < seconds:
        watch()
        time.sleep(0.05)
    for worker in workers:
        worker.join()
    sums: Rates = np.sum([np.sum(each, axis=0) for each in done], axis=0) / (time.perf_counter() - start)
    return sums


@workload
@click.option("--vectors", default=100_000, show_default=True)
@click.option("--dimension", default=960, show_default=True)
@click.option("--dram", default=48 << 20, show_default=True, help="Bytes.")
@click.option("--threads", default=8, show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
def main(scratch: Path, vectors: int, dimension: int, dram: int, threads: int, seconds: float) -> Outcome:
    """Search and read by turns."""
    data = mixed(vectors, dimension, 0)
    ZoomIndex.build(scratch / "index", data.blocks(8192), dram=dram).close()
    queries = data.queries(4096)
    file = max((scratch / "index" / "segments").glob("p0-rows*"), key=lambda path: path.stat().st_size)
    room = np.zeros((threads, 10 * _BATCH, PAGE_BYTES), np.uint8)
    with Reader() as reader:
        handle, pages = reader.add(file), file.stat().st_size // PAGE_BYTES

        def read(number: int, random: np.random.Generator) -> tuple[int, ...]:
            out = room[number]
            reader.read(handle, random.integers(0, pages, len(out)) * PAGE_BYTES, PAGE_BYTES, out)
            return (len(out),)

        rates(read, threads, seconds / 100)  # the plain reader's own memory is not the index's
        before, private, counted = memory_now(), [0], [0]
        with ZoomIndex.open(scratch / "index", pool=False) as index:

            def search(number: int, random: np.random.Generator) -> tuple[int, ...]:
                found = index.search(queries[random.integers(0, len(queries), _BATCH)], 10, recall=0.95)
                return _BATCH, found.stats["pages"]

            def watch() -> None:
                private.append(memory_now() - before)
                counted.append(index.memory_bytes)

            each = seconds / _ROUNDS
            ways = {
                "search": lambda: rates(search, threads, each, watch),
                "device": lambda: rates(read, threads, each),
            }
            found = by_turns(ways, _ROUNDS)
    asked, done = np.array(found["search"]).T
    device = np.array(found["device"])[:, 0]
    figures = [
        Figure.of("queries", asked, "a second", "more", clock=True),
        Figure.of("pages", done, "4 KiB reads a second", "more", clock=True),
        Figure.of("of the device's pages", done / device, "share", "more", clock=True),
        Figure.of("pages of the device", device, "4 KiB reads a second", "neither", clock=True),
        Figure.of("counted DRAM", max(counted) / dram, "of the budget", "less"),
        Figure.of("private memory", max(private) / dram, "of the budget", "less"),
    ]
    return Outcome(Record(figures))


if __name__ == "__main__":
    main()
