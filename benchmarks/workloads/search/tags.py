"""Searches filtered by tags, as in the filter track of big-ann-benchmarks 2023: each query asks for one or two tags.

``python -m memhier.benchmarks.workloads.search.tags`` gives SIFT vectors some eleven tags each, of a vocabulary whose
frequencies fall as 1 / rank; a third of the tags goes with the place of a vector. Queries ask for tags that some vector
holds, each for its own: one at a time, and all in one call, as the track does. The peer is the track's baseline: faiss
IVF with all vectors in DRAM, and an inverted index of tags in DRAM that makes the bitmap of each query; its ``nprobe``
grows until it finds as much. All begin a round anew, so no filter is met twice.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click
import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload
from memhier.benchmarks.workloads.search.recall import READS

__all__ = ["main"]

K = 10
MEAN = 10.8  # tags of a vector, as in the track's YFCC set
_PLACES, _OF_PLACE = 64, 1 / 3
_FINER = 6  # the share of its lists that the peer adds at a time, at most
MEASURES = (
    Measure("recall", "recall@10", "share", "more"),
    Measure("cpu_ms", "CPU", "ms a query", clock=True),
    Measure("p99_ms", "99th percentile", "ms", clock=True),
    Measure("pages", "pages of vectors", READS),
    Measure("dram", "DRAM", "bytes"),
)

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Answer: TypeAlias = Callable[[range], tuple[list[Ints], int]]


def draw_tags(vectors: Floats, vocabulary: int, seed: int) -> list[Ints]:
    """Return the tags of each vector, ascending."""
    random = np.random.default_rng(seed)
    odds = np.cumsum(1 / np.arange(1, vocabulary + 1))
    places = faiss.knn(vectors, vectors[random.integers(len(vectors), size=_PLACES)], 1)[1][:, 0]
    lengths = np.clip(random.poisson(MEAN, len(vectors)), 1, 3 * int(MEAN))
    tags = np.searchsorted(odds, odds[-1] * random.random(int(lengths.sum())))
    of = np.repeat(np.arange(len(vectors)), lengths)
    local = random.random(len(tags)) < _OF_PLACE
    tags[local] = (tags[local] % 97 + 97 * places[of[local]]) % vocabulary
    return [np.unique(each) for each in np.split(tags, np.cumsum(lengths)[:-1])]


class Baseline:
    """faiss IVF over all vectors in DRAM, and for each tag the vectors that have it."""

    def __init__(self, vectors: Floats, tags: list[Ints]) -> None:
        count, dimension = vectors.shape
        lists = max(1, int(4 * np.sqrt(count)))
        self._index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dimension), dimension, lists)
        self._index.train(vectors[: 64 * lists])
        self._index.add(vectors)
        every = np.concatenate(tags)
        self._rows = np.repeat(np.arange(count), [len(each) for each in tags])[np.argsort(every, kind="stable")]
        self._ends = np.cumsum(np.bincount(every))
        self.nprobe: int = 1
        self.dram: int = vectors.nbytes + self._rows.nbytes + self._ends.nbytes

    def rows_of(self, tag: int) -> Ints:
        """Return the vectors that have a tag, ascending."""
        return self._rows[self._ends[tag - 1] if tag else 0 : self._ends[tag]]

    def search(self, query: Floats, wanted: Ints) -> Ints:
        """Return the nearest that have all tags."""
        rows = self.rows_of(wanted[0])
        for tag in wanted[1:]:
            rows = np.intersect1d(rows, self.rows_of(tag), assume_unique=True)
        bits = np.zeros(-(-self._index.ntotal // 8), np.uint8)
        np.bitwise_or.at(bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
        chosen = faiss.IDSelectorBitmap(bits)
        parameters = faiss.SearchParametersIVF(sel=chosen, nprobe=self.nprobe)
        found: Ints = self._index.search(query[None], K, params=parameters)[1][0]
        return found


def measured(answer: Answer, truth: list[Ints], batch: int = 1) -> Row:
    """Return recall, processor time, latency and pages of all queries, `batch` in a call."""
    every, pages, seconds = list[Ints](), 0, []
    cpu, count = time.process_time(), len(truth)
    for start in range(0, count, batch):
        started = time.perf_counter()
        found, read = answer(range(start, min(start + batch, count)))
        seconds.append(time.perf_counter() - started)
        every += found
        pages += read
    cpu = time.process_time() - cpu
    hits = sum(
        len(np.intersect1d(found, exact)) / max(1, len(exact)) for found, exact in zip(every, truth, strict=True)
    )
    return {"recall": hits / count, "cpu_ms": 1e3 * cpu / count, "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
            "pages": pages / count}  # fmt: skip


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--count", default=0, help="Vectors; 0 takes all.")
@click.option("--queries", "asked", default=500, show_default=True)
@click.option("--vocabulary", default=20_000, show_default=True, help="Different tags.")
@click.option("--share", default=1.0, show_default=True, help="DRAM of memhier as a share of the vectors.")
@click.option("--recall", "recalls", multiple=True, default=(0.9, 0.95), show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(
    scratch: Path, data: str, count: int, asked: int, vocabulary: int, share: float, recalls: tuple[float, ...],
    rounds: int,
) -> Outcome:  # fmt: skip
    """Measure searches filtered by tags."""
    case = load_search_set(data)
    vectors, queries = case.base[: count or None], case.queries[:asked].astype(np.float32)
    floats, random = vectors.astype(np.float32), np.random.default_rng(1)
    tags = draw_tags(floats, vocabulary, 0)
    peer = Baseline(floats, tags)
    wanted, truth = list[Ints](), list[Ints]()
    for number in range(len(queries)):
        of = tags[random.integers(len(tags))]
        wanted.append(random.choice(of, min(len(of), 1 + number % 2), replace=False))
        rows = peer.rows_of(wanted[-1][0])
        for tag in wanted[-1][1:]:
            rows = np.intersect1d(rows, peer.rows_of(tag), assume_unique=True)
        near = faiss.knn(queries[number][None], floats[rows], min(K, len(rows)))[1][0]
        truth.append(rows[near])
    path, lists = scratch / "index", [each.tolist() for each in tags]
    ZoomIndex.build(path, vectors, attributes={"tags": lists}, dram=int(share * vectors.nbytes)).close()

    def of_peer(numbers: range) -> tuple[list[Ints], int]:
        return [peer.search(queries[number], wanted[number]) for number in numbers], 0

    rows_made: list[Row] = []
    for declared in recalls:
        every: dict[str, list[Row]] = {"memhier": [], "memhier, batch": [], "faiss": []}
        for _ in range(rounds):
            for system, batch in ("memhier", 1), ("memhier, batch", len(queries)):
                with ZoomIndex.open(path) as index:

                    def ours(
                        numbers: range, index: ZoomIndex = index, declared: float = declared
                    ) -> tuple[list[Ints], int]:
                        asked = [" and ".join(f"tags contains {tag}" for tag in wanted[each]) for each in numbers]
                        found = index.search(queries[numbers.start : numbers.stop], K, recall=declared, where=asked)
                        return list(found.ids), int(found.stats["pages"])

                    row = measured(ours, truth, batch)
                    every[system].append(row | {"dram": index.stats()["planned_bytes"]})
            goal = min(declared, every["memhier"][-1]["recall"])
            while (row := measured(of_peer, truth))["recall"] < goal and peer.nprobe < len(vectors):
                peer.nprobe += 1 + peer.nprobe // _FINER
            every["faiss"].append(row | {"dram": peer.dram})
        for system, made in every.items():
            medians: dict[str, Any] = {name: float(np.median([row[name] for row in made])) for name in made[0]}
            rows_made.append({"declared": declared, "system": system} | medians)
    shown = rows_table("filters by tags", rows_made)
    figures = figures_of(rows_made, MEASURES, "{title}, {system}, {declared} declared")
    return Outcome(Record(figures), [shown], {"results": rows_made})


if __name__ == "__main__":
    main()
