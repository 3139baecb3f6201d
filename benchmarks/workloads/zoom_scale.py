"""ZoomIndex at a size: build time and memory, files, and what a declared recall takes, on generated vectors.

``python -m memhier.benchmarks.workloads.zoom_scale --vectors 1000000`` builds from a stream, which is never held, and
searches held-out queries one batch. The vectors are clusters of mixed difficulty (`memhier.benchmarks.generators`). CPU
time is the process's, without what making the vectors took; memory is private (RssAnon), as files in the page cache are
the system's to take back.
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import faiss
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.benchmarks.generators import Mixed, mixed
from memhier.benchmarks.machine import describe_machine
from memhier.budget import parse_bytes

__all__ = ["main"]

K = 10
RECALLS = (0.9, 0.95, 0.99)
_BLOCK_ROWS = 65_536


class _Watch:
    """The highest private memory of this process while it is open, in bytes."""

    def __enter__(self) -> "_Watch":
        self.peak, self._open = 0, True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()

    def _run(self) -> None:
        while self._open:
            status = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, 1024 * int(status.split("RssAnon:")[1].split()[0]))
            time.sleep(0.02)


class _Timed:
    """Blocks of vectors, and the CPU seconds that making them took."""

    def __init__(self, data: Mixed) -> None:
        self._data, self.seconds = data, 0.0

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        blocks = iter(self._data.blocks(_BLOCK_ROWS))
        while True:
            before = time.process_time()
            block = next(blocks, None)
            self.seconds += time.process_time() - before
            if block is None:
                return
            yield block


def _truth(data: Mixed, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    near = np.full((len(queries), K), np.inf, np.float32)
    rows = np.full((len(queries), K), -1, np.int64)
    start = 0
    for block in data.blocks(_BLOCK_ROWS):
        more, found = faiss.knn(queries, block, K)
        near, rows = np.hstack([near, more]), np.hstack([rows, found + start])
        order = np.argsort(near, axis=1, kind="stable")[:, :K]
        near, rows = np.take_along_axis(near, order, 1), np.take_along_axis(rows, order, 1)
        start += len(block)
    return rows


@click.command(help=__doc__)
@click.option("--vectors", default=1_000_000, show_default=True)
@click.option("--dimension", default=128, show_default=True)
@click.option("--bytes", "bytes_per_vector", default=47.0, show_default=True, help="DRAM for each vector, all in all.")
@click.option("--queries", default=500, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", default=".", show_default=True, help="Takes three times the vectors while it runs.")
def main(vectors: int, dimension: int, bytes_per_vector: float, queries: int, seed: int, folder: str) -> None:
    """Print what was measured."""
    faiss.omp_set_num_threads(1)
    console = Console(width=120)
    data = mixed(vectors, dimension, seed)
    wanted = data.queries(queries)
    dram = parse_bytes(int(bytes_per_vector * vectors), "dram")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        stream = _Timed(data)
        with _Watch() as watch:
            before = time.process_time()
            index = ZoomIndex.build(Path(place) / "index", stream, dram=dram)
            spent = time.process_time() - before - stream.seconds
        with index:
            stats = index.stats()
            raw = stats["vector_bytes"]
            console.print(f"{vectors:,} x {dimension} float32; {describe_machine()}")
            console.print(
                f"build: {spent:,.0f} CPU s, at most {watch.peak / 2**20:,.0f} MiB ({watch.peak / raw:.2f} of raw)"
            )
            held = stats["memory_bytes"]
            console.print(
                f"open: {held / 2**20:,.1f} MiB, {held / vectors:.1f} bytes a vector; {stats['lists']:,} lists"
            )
            console.print(f"codes of {stats['code_bytes']} bytes; files {stats['file_bytes'] / raw:.3f} of raw")
            truth = _truth(data, wanted)
            console.print(_search(index, wanted, truth))


def _search(index: ZoomIndex, queries: npt.NDArray[np.float32], truth: npt.NDArray[np.int64]) -> Table:
    table = Table(title="10 neighbours")
    for heading in ("declared", "measured", "pages read", "ranked", "codes scanned", "rounds, most", "CPU ms"):
        table.add_column(heading, justify="right")
    count = len(queries)
    for recall in RECALLS:
        before = time.process_time()
        found = index.search(queries, K, recall=recall)
        spent = 1e3 * (time.process_time() - before) / count
        hits = sum(len(set(a) & set(b)) for a, b in zip(found.ids.tolist(), truth.tolist(), strict=True))
        stats = found.stats
        table.add_row(
            f"{recall}", f"{hits / truth.size:.4f}", f"{stats['page_requests'] / count:.1f}",
            f"{stats['ranked'] / count:.1f}", f"{stats['scanned'] / count:,.0f}", f"{stats['rounds']}", f"{spent:.3f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
