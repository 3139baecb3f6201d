"""An index whose vectors are replaced: recall, reads and lists beside those of an index built anew.

``python -m memhier.benchmarks.workloads.search.life`` replaces half of the vectors, the new ones drifted away from the
old, in ten steps with a commit each, then compacts. Recall is measured after each of the three: replacing, compacting,
and building an index of the same vectors. It also adds 600 vectors to 20,000 at a time, with a commit each, and tells
how long these commits took, beside their median (``--count 0 --made-only`` does that alone). With ``--until-renewed``
it goes on until one of them has taken over the index that a thread made anew meanwhile.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
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
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.workloads.options import folder_option, json_option

__all__ = ["Lived", "main", "measure", "record"]

K = 10
STEPS = 10
_PATIENCE = 8  # times as many commits, after which no renewal is waited for


@dataclass(frozen=True, slots=True)
class Lived:
    """An index at one moment of its life.

    Attributes
    ----------
    data, moment
        Which vectors, and when.
    recall
        Recall@10 where 0.95 is declared.
    pages, scanned
        Pages read and codes compared for a query, on average.
    lists, longest
        Lists, and the longest of them beside the mean.
    parts
        Parts that are searched.
    seconds
        What it took to get there: the replacing, the compacting, or the building.
    memory_bytes, file_bytes
        DRAM, and space on SSD.
    """

    data: str
    moment: str
    recall: float
    pages: float
    scanned: float
    lists: int
    longest: float
    parts: int
    seconds: float
    memory_bytes: int
    file_bytes: int


def measure(
    name: str,
    first: npt.NDArray[np.generic],
    second: npt.NDArray[np.generic],
    queries: npt.NDArray[np.float32],
    share: float,
    folder: Path,
) -> list[Lived]:
    """Build an index of `first`, replace half of it by `second` step by step, and return what became of it."""
    dram = int(share * first.nbytes)
    gone = np.random.default_rng(1).permutation(len(first))[: len(second)]
    left = np.concatenate([np.delete(first, gone, axis=0), second])
    true = exact_neighbours(left, queries, K)[1]

    def moment(what: str, index: ZoomIndex, change: Callable[[], object]) -> Lived:
        started = time.perf_counter()
        change()
        return _look(name, what, index, queries, true, time.perf_counter() - started)

    def replace() -> None:
        for old, new in zip(np.array_split(gone, STEPS), np.array_split(second, STEPS), strict=True):
            index.remove(old)
            index.add(new)
            index.commit()

    with ZoomIndex.build(folder / f"{name}-lived", first, dram=dram, grow_to=int(1.6 * len(first))) as index:
        rows = [moment("half replaced", index, replace), moment("compacted", index, index.compact)]
    started = time.perf_counter()
    with ZoomIndex.build(folder / f"{name}-anew", left, dram=dram, grow_to=int(1.6 * len(first))) as index:
        seconds = time.perf_counter() - started
        return [*rows, _look(name, "built anew", index, queries, true, seconds)]


@dataclass(frozen=True, slots=True)
class Commits:
    """Commits of a few vectors each, to an index that is made anew meanwhile.

    Attributes
    ----------
    count, rows
        How many, and the vectors that each of them wrote.
    median_ms, longest_ms
        Of a commit.
    longest, longest_cpu
        Times the median: of the time that passed, and of the processor's, of the thread that commits alone.
    taking_over
        Times the median: the longest commit that took over an index made anew; 0 where none did.
    recall
        The lowest recall@10 after any sixth commit, and the last, where 0.95 is declared.
    renewed
        How often the index was made anew meanwhile.
    """

    count: int
    rows: int
    median_ms: float
    longest_ms: float
    longest: float
    longest_cpu: float
    taking_over: float
    recall: float
    renewed: int


def commit_times(count: int, commits: int, folder: Path, *, until_renewed: bool = False) -> Commits:
    """Add three hundredths of `count` vectors at a time, and commit: so often, or more until it is made anew."""
    rows, most = 3 * count // 100, commits * (_PATIENCE if until_renewed else 1)
    source = mixed(count + most * rows, 96, seed=1)
    vectors, queries = source.array(), source.queries(300)
    passed: list[float] = []
    taking_over: list[float] = []
    worked, recalls = [], []
    dram = int(0.4 * vectors.nbytes)
    with ZoomIndex.build(folder / "committed", vectors[:count], dram=dram, grow_to=len(vectors)) as index:
        while len(passed) < commits or (len(passed) < most and not taking_over):
            index.add(vectors[len(index) : len(index) + rows])
            made_for = index.stats()["calibrated_vectors"]
            started, cpu = time.perf_counter(), time.thread_time()
            index.commit()
            passed.append(time.perf_counter() - started)
            worked.append(time.thread_time() - cpu)
            if index.stats()["calibrated_vectors"] != made_for:
                taking_over.append(passed[-1])
            if len(passed) % 6 == 0 or len(passed) >= commits:
                true = exact_neighbours(vectors[: len(index)], queries, K)[1]
                recalls.append(recall_at_k(index.search(queries, K, recall=0.95).distances, true))
    median, cpu_median = float(np.median(passed)), float(np.median(worked))
    return Commits(
        len(passed), rows, 1e3 * median, 1e3 * max(passed), max(passed) / median, max(worked) / cpu_median,
        max(taking_over, default=0.0) / median, min(recalls), len(taking_over),
    )  # fmt: skip


def _look(
    name: str,
    moment: str,
    index: ZoomIndex,
    queries: npt.NDArray[np.float32],
    true: npt.NDArray[np.float32],
    seconds: float,
) -> Lived:
    found = index.search(queries, K, recall=0.95)
    stats = index.stats()
    return Lived(
        name, moment, recall_at_k(found.distances, true), found.stats["page_requests"] / len(queries),
        found.stats["scanned"] / len(queries), stats["lists"], stats["longest_list"], stats["parts"],
        seconds, stats["memory_bytes"], stats["file_bytes"],
    )  # fmt: skip


def _generated(count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return vectors, half as many from other clusters that overlap with the first, and queries for both."""
    old, new = mixed(count, 96, seed=1), mixed(count // 2, 96, seed=2)
    drift = 0.5 * old.array()[: count // 2]  # half-way between the two distributions
    queries = np.concatenate([old.queries(500), 0.5 * new.queries(500) + 0.5 * old.queries(1000)[500:]])
    return old.array(), 0.5 * new.array() + drift, queries


def _real(name: str) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.float32]]:
    """Return two thirds of the vectors, the third that lies farthest out in one direction, and queries."""
    data = load_search_set(name)
    centred = data.base.astype(np.float32) - data.base.mean(axis=0)
    direction = np.linalg.svd(centred[:5000], full_matrices=False)[2][0]
    order = np.argsort(centred @ direction, kind="stable")
    third = len(order) // 3
    return data.base[np.sort(order[:-third])], data.base[np.sort(order[-third:])], data.queries.astype(np.float32)


@click.command()
@click.option("--count", default=100_000, show_default=True, help="Vectors of the generated set.")
@click.option("--data", "names", multiple=True, default=("sift-imagenet200k",), show_default=True)
@click.option("--made-only", is_flag=True, help="Only the generated set.")
@click.option("--commits", default=36, show_default=True, help="Commits of three hundredths of some vectors.")
@click.option("--committed", default=20_000, show_default=True, help="Vectors that there are before these commits.")
@click.option("--until-renewed", is_flag=True, help="More such commits, until one takes over an index made anew.")
@click.option("--share", default=0.4, show_default=True, help="DRAM as a share of the raw vectors.")
@folder_option
@json_option
def main(
    count: int,
    names: tuple[str, ...],
    made_only: bool,
    commits: int,
    committed: int,
    until_renewed: bool,
    share: float,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure an index whose vectors are replaced."""
    faiss.omp_set_num_threads(1)
    rows: list[Lived] = []
    times: Commits | None = None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if count:
            rows += measure("mixed", *_generated(count), share, Path(scratch))
        if commits:
            times = commit_times(committed, commits, Path(scratch), until_renewed=until_renewed)
        for name in () if made_only else names:
            try:
                rows += measure(name, *_real(name), share, Path(scratch))
            except FileNotFoundError as error:
                Console(stderr=True).print(f"skipped: {error}")
    if rows:
        _show(rows)
    if times is not None:
        Console(width=160).print(
            f"{times.count} commits of {times.rows} vectors: median {times.median_ms:.0f} ms, longest "
            f"{times.longest:.1f} times that ({times.longest_cpu:.1f} times the median CPU time); recall@10 at least "
            f"{times.recall:.3f} of 0.95 declared; made anew {times.renewed} times meanwhile, and taken over in "
            f"{times.taking_over:.1f} times the median"
        )
    if out is not None:
        record(rows, times).write(out, results=[asdict(row) for row in rows])


def _show(rows: Sequence[Lived]) -> None:
    table = Table(title=f"ZoomIndex in use, k = {K}, recall 0.95 declared")
    for number, column in enumerate(asdict(rows[0])):
        table.add_column(column, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console(width=160).print(table)


def record(rows: Sequence[Lived], times: Commits | None = None) -> Record:
    """Return what can be held against another run."""
    figures = []
    if times is not None:
        figures += [
            Figure.of("longest commit", times.longest, "times the median", "less", clock=True),
            Figure.of("longest commit, CPU", times.longest_cpu, "times the median", "less", clock=True),
            Figure.of("commit that takes over", times.taking_over, "times the median", "less", clock=True),
            Figure.of("recall@10, between commits", times.recall, "share", "more"),
        ]
    for row in rows:
        at = f"{row.data}, {row.moment}"
        figures += [
            Figure.of(f"recall@10, {at}", row.recall, "share", "more"),
            Figure.of(f"pages, {at}", row.pages, "4 KiB reads a query", "less"),
            Figure.of(f"longest list, {at}", row.longest, "times the mean", "less"),
            Figure.of(f"time, {at}", row.seconds, "s", "less", clock=True),
            Figure.of(f"DRAM, {at}", row.memory_bytes, "bytes", "less"),
        ]
    return Record(figures)


if __name__ == "__main__":
    main()
