"""Queries that are unlike the vectors: the recall declared and found untuned, after an audit, and after ``tune``.

``python -m memhier.benchmarks.workloads.search.ood`` makes sets as of texts that look for pictures: both sides come
from the same hidden points by maps of their own, a query with more noise and a shift, so that it lies far from all
vectors and its neighbours far from each other (the out-of-distribution track of big-ann-benchmarks 2023, its
Text2Image). Real logs give users against items. Queries are asked one at a time. ``untuned`` is the index as built;
``audited`` after it saw ``--audited`` queries of the same kind and checked each; ``tuned`` after ``tune`` of these.
Recall is that of other queries.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.ann.zoom.preview.space import Metric
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, skip, workload
from memhier.benchmarks.workloads.search.recall import READS
from memhier.benchmarks.workloads.search.sets import LOGS, log_factors
from memhier.errors import BudgetError

__all__ = ["OodCase", "main", "pictures_and_texts"]

K = 10
_HIDDEN, _KINDS = 40, 200
MEASURES = (
    Measure("recall", "recall@10", "share", "neither"),
    Measure("pages", "pages, those that DRAM holds included", READS),
    Measure("cpu_ms", "CPU", "ms a query", clock=True),
)

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OodCase:
    """Vectors ``[n, d]``, queries to learn from and queries to ask, float32."""

    base: Floats
    seen: Floats
    asked: Floats
    metric: Metric


def pictures_and_texts(count: int, queries: int, dimension: int, noise: float, seed: int) -> tuple[Floats, Floats]:
    """Return `count` vectors and `queries` queries of length one that come from the same hidden points.

    Parameters
    ----------
    noise
        Length of a query's own part, in lengths of the part that it shares with the vectors.
    """
    random = np.random.default_rng(seed)
    kinds = random.normal(size=(_KINDS, _HIDDEN))
    weights = random.dirichlet(np.full(_KINDS, 0.3))

    def hidden(rows: int) -> npt.NDArray[np.float64]:
        return kinds[random.choice(_KINDS, rows, p=weights)] + 0.8 * random.normal(size=(rows, _HIDDEN))

    shared = random.normal(size=(_HIDDEN, dimension)) / np.sqrt(np.arange(1, _HIDDEN + 1))[:, None]
    own = random.normal(size=(_HIDDEN, dimension)) / np.sqrt(np.arange(1, _HIDDEN + 1))[:, None]
    shift = random.normal(size=dimension)
    base = hidden(count) @ shared
    points = hidden(queries)
    asked = points @ shared + noise * (points @ own)
    length = float(np.linalg.norm(base, axis=1).mean())
    base += 0.3 * length / np.sqrt(dimension) * random.normal(size=base.shape)
    asked += noise * length / np.sqrt(dimension) * (random.normal(size=asked.shape) + shift)
    return _unit(base), _unit(asked)


def _unit(points: npt.NDArray[np.float64]) -> Floats:
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True), np.float32)


def case_of(name: str, count: int, asked: int, audited: int) -> OodCase:
    """Return a case: ``text-NOISE``, compared by inner product, or one of the real logs."""
    if name in LOGS:
        factors = log_factors(name)
        users = factors.users[np.random.default_rng(0).permutation(len(factors.users))[: asked + audited]]
        return OodCase(factors.items[: count or None], users[asked:], users[:asked], "ip")
    base, queries = pictures_and_texts(count, asked + audited, 200, float(name.removeprefix("text-")), 0)
    return OodCase(base, queries[asked:], queries[:asked], "ip")


def measured(index: ZoomIndex, case: OodCase, true: Floats, recall: float) -> Row:
    """Return recall, pages and processor time of the queries asked."""
    pages, found = 0, np.empty_like(true)
    cpu = time.process_time()
    for number, query in enumerate(case.asked):
        result = index.search(query, K, recall=recall)
        found[number] = result.distances
        pages += int(result.stats["page_requests"]) + int(result.stats["hot_pages"])
    cpu = time.process_time() - cpu
    count = len(case.asked)
    return {"recall": recall_at_k(found, true), "pages": pages / count, "cpu_ms": 1e3 * cpu / count}


def build_with_room(path: Path, case: OodCase, dram: int) -> None:
    """Build an index with so much DRAM, or a little more, that it leaves room for an audit."""
    while True:
        ZoomIndex.build(path, case.base, metric=case.metric, dram=dram).close()
        try:
            return ZoomIndex.open(path, writable=True, audit=1.0).close()
        except BudgetError:
            shutil.rmtree(path)
            dram += dram // 50


def audit(path: Path, case: OodCase, recall: float) -> dict[str, Any]:
    """Ask all queries of a case that are to be learned from, wait until each was checked; return the audit's state."""
    with ZoomIndex.open(path, writable=True, audit=1.0) as index:
        for query in case.seen:
            index.search(query, K, recall=recall)
            while index.stats()["audit"]["waiting"]:  # where many wait, some are dropped
                time.sleep(0.001)
        state: dict[str, Any] = index.stats()["audit"]
        return state


@workload
@click.option("--data", multiple=True, default=("text-0.5", "text-1", *LOGS), show_default=True)
@click.option("--count", default=50_000, show_default=True, help="Vectors of a made set; of a log at most.")
@click.option("--queries", "asked", default=500, show_default=True)
@click.option("--audited", default=1050, show_default=True)
@click.option("--recall", "recalls", multiple=True, default=(0.9, 0.95), show_default=True)
@click.option("--share", default=0.17, show_default=True, help="DRAM as a share of the vectors.")
def main(
    scratch: Path, data: tuple[str, ...], count: int, asked: int, audited: int, recalls: tuple[float, ...],
    share: float,
) -> Outcome:  # fmt: skip
    """Measure queries that are unlike the vectors."""
    rows, lines = list[Row](), list[str]()
    for name in data:
        try:
            case = case_of(name, count, asked, audited)
        except FileNotFoundError as error:
            skip(error)
            continue
        true = exact_neighbours(case.base, case.asked, K, case.metric)[1]
        for recall in recalls:
            path = scratch / f"{name}-{recall}"
            build_with_room(path, case, max(2 << 20, int(share * case.base.nbytes)))
            made = dict[str, Row]()
            with ZoomIndex.open(path) as index:
                made["untuned"] = measured(index, case, true, recall)
                index.tune(case.seen)
                made["tuned"] = measured(index, case, true, recall)
            state = audit(path, case, recall)
            with ZoomIndex.open(path) as index:
                made["audited"] = measured(index, case, true, recall)
            rows += [{"data": name, "declared": recall, "state": each} | made[each] for each in made]
            lines.append(
                f"{name}, {recall}: {state['audited']} queries checked, {state['dropped']} dropped, "
                f"tuned {state['retuned']} times"
            )
    figures = figures_of(rows, MEASURES, "{title}, {data}, {state}, {declared} declared")
    return Outcome(Record(figures), [*lines, rows_table("queries unlike the vectors", rows)], {"results": rows})


if __name__ == "__main__":
    main()
