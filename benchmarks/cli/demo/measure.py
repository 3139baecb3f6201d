"""The measurements of the demo: does the index keep the declared recall, and at what cost of a query?"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.cli.demo.corpus import Corpus
from memhier.benchmarks.exact import recall_at_k

__all__ = ["DECLARED", "RECALLS", "Cost", "Truth", "choose_queries", "measure_costs", "share_found"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

K = 10
WORDS_MIN = 5  # shorter sentences ("Return the value.") fit many functions
QUERIES = 2000
RECALLS = (0.8, 0.9, 0.95, 0.98, 0.99)  # declared, for the picture
DECLARED = 0.95  # for the table


@dataclass(frozen=True, slots=True)
class Truth:
    """Queries and their exact answers.

    Attributes
    ----------
    rows
        int64 ``[q]``: the function that each query was cut from.
    queries
        float32 ``[q, 256]``.
    ids, distances
        ``[q, 10]``: the answers of exact search.
    """

    rows: Ints
    queries: Floats
    ids: Ints
    distances: Floats

    def halves(self) -> tuple[Self, Self]:
        """Return the first half of the queries, to learn from, and the others, to measure with."""
        middle = len(self.rows) // 2
        return self._part(slice(middle)), self._part(slice(middle, None))

    def _part(self, part: slice) -> Self:
        return type(self)(self.rows[part], self.queries[part], self.ids[part], self.distances[part])


@dataclass(frozen=True, slots=True)
class Cost:
    """A declared recall, the recall found, and the cost of a query, asked one at a time.

    Attributes
    ----------
    declared, recall
        Recall@10 as declared, and as measured against exact search, ties counted by distance.
    found
        Share of queries that find their own function in the first 10.
    p50_ms, p99_ms
        Latency of a query, milliseconds.
    reads, pages
        I/Os and 4 KiB pages read from SSD for a query, on average.
    scanned
        Codes compared for a query, on average.
    calibrated
        Whether the index is calibrated for the declared recall.
    """

    declared: float
    recall: float
    found: float
    p50_ms: float
    p99_ms: float
    reads: float
    pages: float
    scanned: float
    calibrated: bool


def choose_queries(corpus: Corpus, seed: int) -> tuple[list[int], list[str]]:
    """Return the rows of up to 2,000 functions, in random order, and their held-out sentences.

    A sentence is eligible when it has five words or more and no other function has the same: a sentence shared by
    many has many right answers.
    """
    hashes = np.array([_hash(listing.sentence) for listing in corpus.listings()], np.uint64)
    _, first, times = np.unique(hashes, return_index=True, return_counts=True)
    once = np.zeros(len(hashes), bool)
    once[first[times == 1]] = True
    long = np.array([len(listing.sentence.split()) >= WORDS_MIN for listing in corpus.listings()], bool)
    eligible = np.flatnonzero(once & long)
    rows = np.random.default_rng(seed).permutation(eligible)[:QUERIES].tolist()
    return rows, [corpus.listing(row).sentence for row in rows]


def _hash(sentence: str) -> int:
    normal = " ".join(sentence.lower().split())
    return int.from_bytes(hashlib.blake2b(normal.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def share_found(rows: Ints, ids: Ints) -> float:
    """Return the share of queries that find their own function among ``ids [q, k]``."""
    return float((ids == rows[:, None]).any(axis=1).mean())


def measure_costs(
    settings: Sequence[tuple[ZoomIndex, float]], truth: Truth, done: Callable[[], object] = lambda: None
) -> list[Cost]:
    """Search for the queries one at a time, in each index with the declared recall, and return the costs.

    The settings take turns query by query, so that a neighbour's burst of work hits all of them alike. They are at
    different queries at any time, so that none reads a page that another has just brought into a device's cache. `done`
    is called after each search.
    """
    queries = len(truth.queries)
    tallies = [_Tally(index, declared, queries) for index, declared in settings]
    for turn in range(queries):
        for i, tally in enumerate(tallies):
            row = (turn + i * queries // len(tallies)) % queries
            tally.search(truth.queries[row], row)
            done()
    return [tally.cost(truth) for tally in tallies]


class _Tally:
    """The answers of one index at one declared recall, and their cost."""

    def __init__(self, index: ZoomIndex, declared: float, queries: int) -> None:
        self._index, self._declared = index, declared
        self._ids = np.empty((queries, K), np.int64)
        self._distances = np.empty((queries, K), np.float32)
        self._seconds = np.empty(queries)
        self._reads = self._pages = self._scanned = 0
        self._calibrated = True

    def search(self, query: Floats, row: int) -> None:
        start = time.perf_counter()
        result = self._index.search(query, K, recall=self._declared)
        self._seconds[row] = time.perf_counter() - start
        self._ids[row], self._distances[row] = result.ids, result.distances
        self._reads += result.stats["reads"]
        self._pages += result.stats["pages"]
        self._scanned += result.stats["scanned"]
        self._calibrated = result.stats["calibrated"]

    def cost(self, truth: Truth) -> Cost:
        queries = len(self._seconds)
        p50, p99 = np.percentile(self._seconds, [50, 99]) * 1000
        return Cost(
            declared=self._declared,
            recall=recall_at_k(self._distances, truth.distances),
            found=share_found(truth.rows, self._ids),
            p50_ms=float(p50),
            p99_ms=float(p99),
            reads=self._reads / queries,
            pages=self._pages / queries,
            scanned=self._scanned / queries,
            calibrated=self._calibrated,
        )
