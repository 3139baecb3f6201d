"""An index whose vectors are replaced: recall, reads and lists beside those of an index built anew.

``python -m memhier.benchmarks.workloads.search.life`` replaces half of the vectors by others that have drifted away, in
ten steps with a commit each, and compacts. Each of three moments is measured: after the steps, after compacting, and in
an index of the same vectors built anew. The program also adds 600 vectors to 20,000 at a time with a commit each, and
shows how long these commits take beside their median (``--count 0 --made-only`` does that alone). ``--until-renewed``
continues until a commit has taken over an index that a thread made anew meanwhile.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, skip, workload
from memhier.benchmarks.workloads.search.recall import READS, Ask, measure
from memhier.benchmarks.workloads.search.sets import SearchCase

__all__ = ["main"]

K = 10
DECLARED = 0.95
STEPS = 10
MEASURES = (
    Measure("recall", "recall@10", "share", "more"),
    Measure("requests", "pages", READS),
    Measure("longest", "longest list", "times the mean"),
    Measure("seconds", "time", "s", clock=True),
    Measure("memory_bytes", "DRAM", "bytes"),
)
_PATIENCE = 8  # times as many commits, after which no renewal is waited for
_SAMPLED = 2000  # vectors whose lists are measured

Floats: TypeAlias = npt.NDArray[np.float32]
Vectors: TypeAlias = npt.NDArray[Any]


def replaced(name: str, first: Vectors, second: Vectors, queries: Floats, share: float, folder: Path) -> Iterator[Row]:
    """Build an index of `first`, replace half of it by `second` step by step, and yield a row for each moment."""
    dram, grow_to = int(share * first.nbytes), int(1.6 * len(first))
    gone = np.random.default_rng(1).permutation(len(first))[: len(second)]
    left = np.concatenate([np.delete(first, gone, axis=0), second])
    ask = Ask.of(SearchCase(left, queries), K, queries)

    def look(moment: str, index: ZoomIndex, seconds: float) -> Row:
        stats = index.stats()
        counts = {column: stats[column] for column in ("lists", "parts", "memory_bytes", "file_bytes")}
        row = {"data": name, "moment": moment} | measure(index, [ask], DECLARED, K, batch=True)
        return row | counts | {"longest": longest_list(index, left), "seconds": seconds}

    def replace(index: ZoomIndex) -> None:
        for old, new in zip(np.array_split(gone, STEPS), np.array_split(second, STEPS), strict=True):
            index.remove(old)
            index.add(new)
            index.commit()

    with ZoomIndex.build(folder / f"{name}-lived", first, dram=dram, grow_to=grow_to) as index:
        yield look("half replaced", index, _seconds(lambda: replace(index)))
        yield look("compacted", index, _seconds(index.compact))
    path = folder / f"{name}-anew"
    seconds = _seconds(lambda: ZoomIndex.build(path, left, dram=dram, grow_to=grow_to).close())
    with ZoomIndex.open(path) as index:
        yield look("built anew", index, seconds)


def longest_list(index: ZoomIndex, vectors: Vectors) -> float:
    """Return the longest list beside the mean, among the nearest lists of a sample of the vectors."""
    sample = vectors[:: max(1, len(vectors) // _SAMPLED)].astype(np.float32)
    scanned = [index.search(vector, 1, nprobe=1, candidates=1).stats["scanned"] for vector in sample]
    return float(max(scanned)) * float(index.stats()["lists"]) / len(vectors)


def _seconds(change: Callable[[], object]) -> float:
    started = time.perf_counter()
    change()
    return time.perf_counter() - started


def commits(count: int, least: int, folder: Path, *, until_renewed: bool) -> Row:
    """Add three hundredths of `count` vectors and commit, `least` times or more until the index is made anew."""
    rows, most = 3 * count // 100, least * (_PATIENCE if until_renewed else 1)
    source = mixed(count + most * rows, 96, seed=1)
    vectors, queries = source.array(), source.queries(300)
    passed: list[float] = []
    taking_over: list[float] = []
    worked, recalls = [], []
    dram = int(0.4 * vectors.nbytes)
    with ZoomIndex.build(folder / "committed", vectors[:count], dram=dram, grow_to=len(vectors)) as index:
        while len(passed) < least or (len(passed) < most and not taking_over):
            index.add(vectors[len(index) : len(index) + rows])
            made_for = index.stats()["trained_vectors"]
            cpu = time.thread_time()
            passed.append(_seconds(index.commit))
            worked.append(time.thread_time() - cpu)
            if index.stats()["trained_vectors"] != made_for:
                taking_over.append(passed[-1])
            if len(passed) % 6 == 0 or len(passed) >= least:
                ask = Ask.of(SearchCase(vectors[: len(index)], queries), K, queries)
                recalls.append(measure(index, [ask], DECLARED, K, batch=True)["recall"])
    median = float(np.median(passed))
    return {
        "commits": len(passed), "rows": rows, "median_ms": 1e3 * median, "longest": max(passed) / median,
        "longest_cpu": max(worked) / float(np.median(worked)),
        "taking_over": max(taking_over, default=0.0) / median, "recall": min(recalls), "renewed": len(taking_over),
    }  # fmt: skip


def _generated(count: int) -> tuple[Floats, Floats, Floats]:
    """Return vectors, half as many from other clusters that overlap with the first, and queries for both."""
    old, new = mixed(count, 96, seed=1), mixed(count // 2, 96, seed=2)
    drift = 0.5 * old.array()[: count // 2]  # half-way between the two distributions
    queries = np.concatenate([old.queries(500), 0.5 * new.queries(500) + 0.5 * old.queries(1000)[500:]])
    return old.array(), 0.5 * new.array() + drift, queries


def _real(name: str) -> tuple[Vectors, Vectors, Floats]:
    """Return two thirds of the vectors, the third that lies farthest out in one direction, and queries."""
    data = load_search_set(name)
    centred = data.base.astype(np.float32) - data.base.mean(axis=0)
    direction = np.linalg.svd(centred[:5000], full_matrices=False)[2][0]
    order = np.argsort(centred @ direction, kind="stable")
    third = len(order) // 3
    return data.base[np.sort(order[:-third])], data.base[np.sort(order[-third:])], data.queries.astype(np.float32)


@workload
@click.option("--count", default=100_000, show_default=True, help="Vectors of the generated set.")
@click.option("--data", "names", multiple=True, default=("sift-imagenet200k",), show_default=True)
@click.option("--made-only", is_flag=True, help="Only the generated set.")
@click.option("--commits", "least", default=36, show_default=True, help="Commits of three hundredths of some vectors.")
@click.option("--committed", default=20_000, show_default=True, help="Vectors of the index before these commits.")
@click.option("--until-renewed", is_flag=True, help="More such commits, until one takes over an index made anew.")
@click.option("--share", default=0.4, show_default=True, help="DRAM as a share of the raw vectors.")
def main(
    scratch: Path, count: int, names: tuple[str, ...], made_only: bool, least: int, committed: int,
    until_renewed: bool, share: float,
) -> Outcome:  # fmt: skip
    """Measure an index whose vectors are replaced."""
    rows: list[Row] = []
    figures: list[Figure] = []
    if count:
        rows += replaced("mixed", *_generated(count), share, scratch)
    tables = []
    if least:
        times = commits(committed, least, scratch, until_renewed=until_renewed)
        tables.append(rows_table("commits", [times]))
        figures += [
            Figure.of("longest commit", times["longest"], "times the median", "less", clock=True),
            Figure.of("longest commit, CPU", times["longest_cpu"], "times the median", "less", clock=True),
            Figure.of("commit that takes over", times["taking_over"], "times the median", "less", clock=True),
            Figure.of("recall@10, between commits", times["recall"], "share", "more"),
        ]
    for name in () if made_only else names:
        try:
            rows += replaced(name, *_real(name), share, scratch)
        except FileNotFoundError as error:
            skip(error)
    figures += figures_of(rows, MEASURES, "{title}, {data}, {moment}")
    return Outcome(Record(figures), tables, {"results": rows})


if __name__ == "__main__":
    main()
