"""A sharded index beside a single one: recall, shards asked, pages, and the time of Ray beside the work.

``python -m memhier.benchmarks.workloads.search.shards`` builds both from the same vectors with the same DRAM, and asks
them by turns. A call of an actor that gives its queries back shows the share of Ray.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload
from memhier.benchmarks.workloads.search.recall import READS

__all__ = ["main"]

K = 10
LEVELS = (0.9, 0.95, 0.99)
BATCHES = (1, 16, 256)
ASKED = (
    Measure("recall", "recall@10", "share", "more"),
    Measure("asked", "shards asked", "a query"),
    Measure("pages", "pages", READS),
)
TIMED = (
    Measure("ms", "time of a call", "ms", clock=True),
    Measure("single_ms", "the same of one index", "ms", clock=True),
    Measure("ray_ms", "a call of Ray that gives the queries back", "ms", clock=True),
    Measure("ratio", "queries a second, of those of one index", "times", "more", clock=True),
)
RATES = (
    Measure("rate", "queries of a batch of 256 each, sharded", "a second", "more", clock=True),
    Measure("share", "the same, of those of one index", "times", "more", clock=True),
)
CLIENTS = (1, 2, 4)
TURNS = 5  # of each, by turns

Vectors: TypeAlias = npt.NDArray[Any]


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--count", default=100_000, show_default=True, help="Vectors.")
@click.option("--queries", "asked", default=1000, show_default=True)
@click.option("--shards", default="1,2,4,8", show_default=True, help="Numbers of shards.")
@click.option("--dram", default="12MiB", show_default=True, help="Of each index.")
def main(scratch: Path, data: str, count: int, asked: int, shards: str, dram: str) -> Outcome:
    """Compare sharded indexes with a single one."""
    from memhier.ann.cluster import ShardedIndex

    case = load_search_set(data)
    vectors, queries = case.base[:count], np.asarray(case.queries[:asked], np.float32)
    _, truth = exact_neighbours(vectors, queries, K)
    found: list[Row] = []
    timed: list[Row] = []
    rates: list[Row] = []
    with ZoomIndex.build(scratch / "single", vectors, dram=dram) as one:
        exact = one.search(queries[:200], K, recall=1.0)
        found += [{"shards": "none", **_quality(one, queries, truth, level)} for level in LEVELS]
        for number in map(int, shards.split(",")):
            place = scratch / f"shards{number}"
            with ShardedIndex.build(place, vectors, shards=number, dram=dram) as sharded:
                whole = sharded.search(queries[:200], K, recall=1.0)
                if not np.array_equal(whole.ids, exact.ids):
                    raise AssertionError(f"{number} shards: ids differ where everything is probed")
                found += [{"shards": str(number), **_quality(sharded, queries, truth, level)} for level in LEVELS]
                timed += [
                    {"shards": number, "batch": batch, **_times(one, sharded, queries, batch)} for batch in BATCHES
                ]
                for clients in CLIENTS:
                    rates += _rates(one, sharded, queries, number, clients)
    figures = figures_of(found, ASKED, "{title}, {shards} shards, {level} declared")
    figures += figures_of(timed, TIMED, "{title}, {shards} shards, {batch} at a time")
    figures += figures_of(rates, RATES, "{title}, {shards} shards, {clients} threads ask")
    tables = [rows_table("recall and shards asked", found), rows_table("times at recall .95", timed)]
    tables.append(rows_table("queries a second at recall .95", rates))
    return Outcome(Record(figures), tables, {"recall": found, "times": timed, "rates": rates})


class _Echo:
    def back(self, block: Vectors) -> Vectors:
        return block


def _quality(index: Any, queries: Vectors, truth: Vectors, level: float) -> Row:
    result = index.search(queries, K, recall=level)
    return {
        "level": level, "recall": recall_at_k(result.distances, truth),
        "asked": result.stats.get("shard_requests", len(queries)) / len(queries),
        "pages": result.stats["page_requests"] / len(queries),
    }  # fmt: skip


def _times(one: ZoomIndex, sharded: Any, queries: Vectors, batch: int) -> Row:
    """Return the median milliseconds of a call, by turns with one index, and of a call that does nothing."""
    import ray

    echo: Any = ray.remote(_Echo).options(num_cpus=0).remote()
    took: dict[str, list[float]] = {"ms": [], "single_ms": [], "ray_ms": []}
    for start in range(0, min(len(queries), 40 * batch), batch):
        block = queries[start : start + batch]
        for name, call in (
            ("ms", lambda block=block: sharded.search(block, K, recall=0.95)),
            ("single_ms", lambda block=block: one.search(block, K, recall=0.95)),
            ("ray_ms", lambda block=block: ray.get(echo.back.remote(block))),
        ):
            began = time.perf_counter()
            call()
            took[name].append(1e3 * (time.perf_counter() - began))
    ray.kill(echo)
    median = {name: float(np.median(values)) for name, values in took.items()}
    return median | {"ratio": median["single_ms"] / median["ms"]}


def _rates(one: ZoomIndex, sharded: Any, queries: Vectors, shards: int, clients: int) -> list[Row]:
    """Return the queries that threads are answered in a second, by turns with one index."""
    blocks = [queries[start : start + BATCHES[-1]] for start in range(0, len(queries), BATCHES[-1])]

    def rate(index: Any) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            done = list(
                threads.map(lambda block: index.search(block, K, recall=0.95).stats["queries"], blocks * clients)
            )
        return float(sum(done) / (time.perf_counter() - began))

    rows = []
    for _ in range(TURNS):
        plain, found = rate(one), rate(sharded)
        rows.append({"shards": shards, "clients": clients, "rate": found, "share": found / plain})
    return rows


if __name__ == "__main__":
    main()
