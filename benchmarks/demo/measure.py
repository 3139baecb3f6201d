"""What the demo measures: does the index find what exact search finds, and what does a query cost?"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.demo.corpus import Corpus
from memhier.benchmarks.exact import recall_at_k

__all__ = ["Cost", "Setting", "Truth", "cheapest", "choose_queries", "measure_costs", "share_found", "swept_settings"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

K = 10
WORDS_MIN = 5  # shorter sentences ("Return the value.") fit many functions
QUERIES = 2000
SWEPT = 200  # of them at each setting of the sweep
RECALL_WANTED = 0.99


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
        ``[q, 10]``: what exact search finds.
    """

    rows: Ints
    queries: Floats
    ids: Ints
    distances: Floats


@dataclass(frozen=True, slots=True)
class Cost:
    """A setting of the index, how well it does, and what a query costs when queries come one at a time.

    Attributes
    ----------
    nprobe, candidates
        Lists scanned and full vectors read for a query.
    recall
        Recall@10 against exact search, ties counted by distance.
    found
        Share of queries that find their own function in the first 10.
    p50_ms, p99_ms
        Latency of a query, milliseconds.
    reads, pages
        I/Os and 4 KiB pages read from SSD for a query, on average.
    """

    nprobe: int
    candidates: int
    recall: float
    found: float
    p50_ms: float
    p99_ms: float
    reads: float
    pages: float


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


class Setting(NamedTuple):
    """Lists scanned and full vectors read for a query; None for the index's own choice."""

    nprobe: int | None = None
    candidates: int | None = None


def measure_costs(
    index: ZoomIndex,
    truth: Truth,
    settings: Sequence[Setting],
    queries: int = QUERIES,
    done: Callable[[], object] = lambda: None,
) -> list[Cost]:
    """Search for the first `queries` queries one at a time, with each setting, and return how well each does.

    The settings take turns query by query, so that a neighbour's burst of work hits all of them alike. They are at
    different queries at any time, so that none reads what another has just brought into a device's cache. `done` is
    called after each search.
    """
    queries = min(queries, len(truth.queries))
    tallies = [_Tally(queries) for _ in settings]
    for turn in range(queries):
        for i, (setting, tally) in enumerate(zip(settings, tallies, strict=True)):
            row = (turn + i * queries // len(settings)) % queries
            tally.search(index, truth.queries[row], row, setting)
            done()
    return [tally.cost(truth) for tally in tallies]


class _Tally:
    """What one setting found and what it cost."""

    def __init__(self, queries: int) -> None:
        self._ids = np.empty((queries, K), np.int64)
        self._distances = np.empty((queries, K), np.float32)
        self._seconds = np.empty(queries)
        self._reads = self._pages = self._nprobe = self._candidates = 0

    def search(self, index: ZoomIndex, query: Floats, row: int, setting: Setting) -> None:
        start = time.perf_counter()
        result = index.search(query, K, nprobe=setting.nprobe, candidates=setting.candidates)
        self._seconds[row] = time.perf_counter() - start
        self._ids[row], self._distances[row] = result.ids, result.distances
        self._reads += result.stats["reads"]
        self._pages += result.stats["pages"]
        self._nprobe, self._candidates = result.stats["nprobe"], result.stats["candidates"]

    def cost(self, truth: Truth) -> Cost:
        queries = len(self._seconds)
        p50, p99 = np.percentile(self._seconds, [50, 99]) * 1000
        return Cost(
            nprobe=self._nprobe,
            candidates=self._candidates,
            recall=recall_at_k(self._distances, truth.distances[:queries]),
            found=share_found(truth.rows[:queries], self._ids),
            p50_ms=float(p50),
            p99_ms=float(p99),
            reads=self._reads / queries,
            pages=self._pages / queries,
        )


def swept_settings(index: ZoomIndex) -> list[Setting]:
    """Return the settings of the sweep: few to all lists scanned, candidates from k up."""
    lists = index.stats()["lists"]
    probes = sorted({max(1, round(lists * share)) for share in (1 / 8, 1 / 2, 1)})
    counts = [count for count in (10, 20, 50, 100, 200, 400) if count <= len(index)]
    return [Setting(nprobe, count) for nprobe in probes for count in counts]


def cheapest(costs: Sequence[Cost], recall: float = RECALL_WANTED) -> Cost:
    """Return the setting that reads least among those that reach `recall`, or else the one with the best.

    Compared by what is read and scanned, not by the clock, so that a noisy machine chooses the same.
    """
    enough = [cost for cost in costs if cost.recall >= recall]
    if not enough:
        return max(costs, key=lambda cost: cost.recall)
    return min(enough, key=lambda cost: (cost.candidates, cost.nprobe))
