"""Small indexes of a sample, with codes and lists like those of the large index: the work of searches and of builds."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.construction.build import BuildOptions, write_index
from memhier.ann.zoom.index import ZoomIndex
from memhier.ann.zoom.preview.routing.router import EXACT_LISTS, Router
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.storage.catalog import KIND
from memhier.ann.zoom.storage.layout import IndexLayout
from memhier.store.store import Store

__all__ = ["Asked", "PhaseClock", "SmallIndex", "linking_seconds", "measure_small"]

_ROUNDS = 3  # of each query, whose middle processor time counts
_TRIED = 64  # queries that tell the cost of a code and of a page
_PAUSES_S = (0.5e-3, 2e-3, 8e-3)  # before a query that finds its thread asleep
_MORE = 16  # times k: candidates of searches that read many pages

Floats: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """The searches to measure: queries ``[q, d]``, their `k` and declared recall."""

    queries: Matrix
    k: int
    recall: float
    metric: Metric
    seed: int


@dataclass(frozen=True, slots=True)
class SmallIndex:
    """The measured work of one small index.

    Attributes
    ----------
    vectors, layout
        Number of vectors, and the layout that the index was built with.
    probed, scanned, candidates, pages
        float64 [q]: lists and codes scanned, vectors that the bounds left, and pages read for each query.
    cpu_s
        float64 [q]: processor seconds of each query, asked alone.
    code_s, page_s
        Processor seconds of one code scanned, and of one page read and ranked.
    waking
        Seconds of a pause, and those that a query after it takes longer than one asked after another, in the median.
    phases
        Processor seconds of each phase of the build.
    """

    vectors: int
    layout: IndexLayout
    probed: Floats
    scanned: Floats
    candidates: Floats
    pages: Floats
    cpu_s: Floats
    code_s: float
    page_s: float
    waking: tuple[tuple[float, float], ...]
    phases: dict[str, float]


class PhaseClock:
    """Stands in for a progress bar and notes the processor seconds of each phase of a build."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._phase, self._since = "train", time.process_time()

    def set_description(self, phase: str) -> None:
        """End the phase under way and begin another."""
        now = time.process_time()
        self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def update(self, vectors: int) -> None:
        """Hear of vectors done."""


def measure_small(vectors: Matrix, asked: Asked, layout: IndexLayout, dram: int, path: Path) -> SmallIndex:
    """Build an index of vectors ``[n, d]`` in the new folder `path`, and search it.

    Parameters
    ----------
    layout
        Of the large index, with as many lists as give lists of the same length.
    dram
        The budget of the large index: it decides the buffers of a search.
    """
    clock = PhaseClock()
    options = BuildOptions(asked.metric, layout.coding, dram, 0, asked.seed, False, layout, clock)
    with Store.create(path, kind=KIND) as store:
        write_index(store, vectors, None, None, None, options)
    clock.set_description("end")
    with ZoomIndex.open(path, pool=False) as index:  # reads are counted as those of pages that DRAM does not hold
        index.search(asked.queries[:16], asked.k, recall=asked.recall)  # first touches of codes and files
        rows = _searches(index, asked.queries, asked.k, recall=asked.recall)
        unit_costs = _unit_costs(index, asked)
        waking = ((0.0, 0.0), *((pause, _wake_seconds(index, asked, pause)) for pause in _PAUSES_S))
    probed, scanned, candidates, pages, cpu_s = rows.T
    return SmallIndex(
        len(vectors), layout, probed, scanned, candidates, pages, cpu_s, *unit_costs, waking, clock.phases
    )  # fmt: skip


def linking_seconds(layout: IndexLayout) -> float:
    """Return the processor seconds to link one list of a layout into the graph over its lists; 0 without a graph.

    The smallest graph that there is, over random centroids, is built and timed; a walk lengthens as log(lists).
    """
    if layout.lists <= EXACT_LISTS:
        return 0.0
    least = EXACT_LISTS + 1
    centroids = np.random.default_rng(0).standard_normal((least, layout.padded), np.float32)
    before = time.process_time()
    Router.build(centroids)
    return float((time.process_time() - before) / least * np.log(layout.lists) / np.log(least))


def _searches(index: ZoomIndex, queries: Matrix, k: int, **effort: Any) -> Floats:
    """Return lists, codes, candidates, pages and processor seconds of each query, float64 [q, 5]."""
    rows = []
    for query in queries:
        spent = []
        for _ in range(_ROUNDS):
            before = time.thread_time()
            stats = index.search(query, k, **effort).stats
            spent.append(time.thread_time() - before)
        work = [stats[name] for name in ("probed", "scanned", "candidates", "page_requests")]
        rows.append([*work, float(np.median(spent))])
    return np.array(rows, np.float64)


def _unit_costs(index: ZoomIndex, asked: Asked) -> tuple[float, float]:
    """Return the seconds of a code and of a page: differences of searches that differ in nothing else."""
    some, k, lists = asked.queries[:_TRIED], asked.k, index.stats()["lists"]
    few, all_lists, more = (
        np.median(_searches(index, some, k, nprobe=nprobe, candidates=candidates), axis=0)
        for nprobe, candidates in ((1, k), (lists, k), (lists, _MORE * k))
    )
    code_s = (all_lists[4] - few[4]) / max(1.0, all_lists[1] - few[1])
    page_s = (more[4] - all_lists[4]) / max(1.0, more[3] - all_lists[3])
    return max(0.0, float(code_s)), max(0.0, float(page_s))


def _wake_seconds(index: ZoomIndex, asked: Asked, pause: float) -> float:
    """Return how much longer a query takes that comes to an idle thread after a pause than one asked after another."""
    some = asked.queries[:_TRIED]
    paused, alone = np.zeros(len(some)), np.zeros(len(some))
    with ThreadPoolExecutor(1) as thread:
        for number, query in enumerate(some):
            due = time.perf_counter() + pause
            time.sleep(pause)
            thread.submit(index.search, query, asked.k, recall=asked.recall).result()
            paused[number] = time.perf_counter() - due
    for number, query in enumerate(some):
        began = time.perf_counter()
        index.search(query, asked.k, recall=asked.recall)
        alone[number] = time.perf_counter() - began
    return max(0.0, float(np.median(paused - alone)))
