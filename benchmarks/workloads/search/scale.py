"""ZoomIndex at a size: build time and memory, files, and what a declared recall takes, on generated vectors.

``python -m memhier.benchmarks.workloads.search.scale --vectors 1000000`` builds from a stream, which is never held, and
searches held-out queries one batch. The vectors are clusters of mixed difficulty (`memhier.benchmarks.generators`). CPU
time is the process's, without what making the vectors took; memory is private (RssAnon), as files in the page cache are
the system's to take back.
"""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import faiss
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.generators import Mixed, mixed
from memhier.benchmarks.machine import describe_machine
from memhier.benchmarks.workloads.options import FOLDER, json_option
from memhier.budget import parse_bytes

__all__ = ["Point", "Scale", "main", "measure", "record"]

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


@dataclass(frozen=True, slots=True)
class Point:
    """One declared recall.

    Attributes
    ----------
    declared, recall
        Recall@10 as declared and as measured.
    pages, ranked, scanned
        Pages read, full vectors compared and codes compared for a query, on average.
    rounds
        Rounds of reads, of the query that took the most.
    cpu_ms
        CPU time of a query, on average.
    """

    declared: float
    recall: float
    pages: float
    ranked: float
    scanned: float
    rounds: int
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Scale:
    """An index of a size.

    Attributes
    ----------
    vectors, raw_bytes
        How many, and what they take.
    build_cpu_s, build_bytes
        CPU seconds, and the most private memory.
    held_bytes, file_bytes
        DRAM of the open index, and space on SSD.
    lists, code_bytes
        Inverted lists, and bytes of a code.
    points
        What searching takes.
    """

    vectors: int
    raw_bytes: int
    build_cpu_s: float
    build_bytes: int
    held_bytes: int
    file_bytes: int
    lists: int
    code_bytes: int
    points: list[Point]


def measure(data: Mixed, wanted: npt.NDArray[np.float32], dram: int, folder: Path) -> Scale:
    """Build an index of `data` in `dram` bytes under `folder`, and search it for `wanted` in one batch."""
    stream = _Timed(data)
    with _Watch() as watch:
        before = time.process_time()
        index = ZoomIndex.build(folder / "index", stream, dram=dram)
        spent = time.process_time() - before - stream.seconds
    with index:
        stats = index.stats()
        truth = _truth(data, wanted)
        return Scale(
            len(index), stats["vector_bytes"], spent, watch.peak, stats["memory_bytes"], stats["file_bytes"],
            stats["lists"], stats["code_bytes"], [_search(index, wanted, truth, recall) for recall in RECALLS],
        )  # fmt: skip


def _search(index: ZoomIndex, queries: npt.NDArray[np.float32], truth: npt.NDArray[np.int64], recall: float) -> Point:
    count = len(queries)
    before = time.process_time()
    found = index.search(queries, K, recall=recall)
    spent = 1e3 * (time.process_time() - before) / count
    hits = sum(len(set(a) & set(b)) for a, b in zip(found.ids.tolist(), truth.tolist(), strict=True))
    stats = found.stats
    pages, ranked, scanned = (stats[name] / count for name in ("page_requests", "ranked", "scanned"))
    return Point(recall, hits / truth.size, pages, ranked, scanned, stats["rounds"], spent)


@click.command(help=__doc__)
@click.option("--vectors", default=1_000_000, show_default=True)
@click.option("--dimension", default=128, show_default=True)
@click.option("--bytes", "bytes_per_vector", default=47.0, show_default=True, help="DRAM for each vector, all in all.")
@click.option("--queries", default=500, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--dir", "place", type=FOLDER, help="Takes three times the vectors while it runs.")
@json_option
def main(
    vectors: int,
    dimension: int,
    bytes_per_vector: float,
    queries: int,
    seed: int,
    place: Path | None,
    out: Path | None,
) -> None:
    """Print what was measured."""
    faiss.omp_set_num_threads(1)
    data = mixed(vectors, dimension, seed)
    dram = parse_bytes(int(bytes_per_vector * vectors), "dram")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        scale = measure(data, data.queries(queries), dram, Path(folder))
    console, raw = Console(width=120), scale.raw_bytes
    console.print(f"{vectors:,} x {dimension} float32; {describe_machine()}")
    build, held = scale.build_bytes, scale.held_bytes
    console.print(f"build: {scale.build_cpu_s:,.0f} CPU s, at most {build / 2**20:,.0f} MiB ({build / raw:.2f} of raw)")
    console.print(f"open: {held / 2**20:,.1f} MiB, {held / vectors:.1f} bytes a vector; {scale.lists:,} lists")
    console.print(f"codes of {scale.code_bytes} bytes; files {scale.file_bytes / raw:.3f} of raw")
    console.print(_table(scale.points))
    if out is not None:
        record(scale).write(out, results=asdict(scale))


def record(scale: Scale) -> Record:
    """Return what can be held against another run."""
    figures = [
        Figure.of("build", scale.build_cpu_s, "CPU s", "less"),
        Figure.of("memory of the build", scale.build_bytes / scale.raw_bytes, "of the raw vectors", "less"),
        Figure.of("DRAM", scale.held_bytes / scale.vectors, "bytes a vector", "less"),
        Figure.of("files", scale.file_bytes / scale.raw_bytes, "of the raw vectors", "less"),
    ]
    for point in scale.points:
        at = f"{point.declared:g} declared"
        figures += [
            Figure.of(f"recall@10, {at}", point.recall, "share", "neither"),
            Figure.of(f"pages, {at}", point.pages, "4 KiB reads a query", "less"),
            Figure.of(f"CPU, {at}", point.cpu_ms, "ms a query", "less"),
        ]
    return Record(figures, scale=f"{scale.vectors:,} vectors")


def _table(points: Sequence[Point]) -> Table:
    table = Table(title="10 neighbours")
    for heading in ("declared", "measured", "pages read", "ranked", "codes scanned", "rounds, most", "CPU ms"):
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            f"{point.declared}", f"{point.recall:.4f}", f"{point.pages:.1f}", f"{point.ranked:.1f}",
            f"{point.scanned:,.0f}", f"{point.rounds}", f"{point.cpu_ms:.3f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
