"""The cost of the fields that come back with hits: pages, reads and CPU of a query, with and without them.

``python -m memhier.benchmarks.workloads.search.fields`` indexes SIFT vectors with a document and an attribute each, and
asks its queries one at a time, cold, then in one batch. Documents have one length, or differ by a quarter.
"""

import time
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload
from memhier.benchmarks.workloads.search.recall import READS

__all__ = ["main"]

K = 10
MEASURES = (
    Measure("pages", "pages of vectors", READS),
    Measure("payload_pages", "pages of fields", READS),
    Measure("payload_reads", "I/Os of fields", "a query"),
    Measure("cpu_ms", "CPU", "ms a query", clock=True),
)

Vectors: TypeAlias = npt.NDArray[Any]


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Vectors.")
@click.option("--queries", "asked", default=500, show_default=True)
@click.option("--size", default=200, show_default=True, help="Bytes of a document.")
def main(scratch: Path, data: str, count: int, asked: int, size: int) -> Outcome:
    """Measure searches with and without fields."""
    case = load_search_set(data)
    rows: list[Row] = []
    vectors, queries = case.base[:count], case.queries[:asked]
    random = np.random.default_rng(0)
    for lengths, sizes in (
        ("equal", np.full(count, size)),
        ("differing", random.integers(3 * size // 4, 5 * size // 4 + 1, count)),
    ):
        texts = [f"{row:012}".ljust(length, "x") for row, length in enumerate(sizes.tolist())]
        attributes, dram = {"price": random.random(count)}, int(0.8 * vectors.nbytes)
        with ZoomIndex.build(
            scratch / lengths, vectors, documents={"text": texts}, attributes=attributes, dram=dram
        ) as index:
            for name, fields in (("none", None), ("text", ["text"]), ("price", ["price"]), ("all", True)):
                rows += [
                    {"lengths": lengths, "fields": name, "batch": batch} | _ask(index, queries, batch, fields)
                    for batch in (1, len(queries))
                ]
    figures = figures_of(rows, MEASURES, "{title}, {lengths} lengths, fields {fields}, {batch} at a time")
    return Outcome(Record(figures), [rows_table("fields", rows)], {"results": rows})


def _ask(index: ZoomIndex, queries: Vectors, batch: int, fields: list[str] | bool | None) -> Row:
    """Return the pages, I/Os and CPU milliseconds of a query."""
    counted = ("pages", "payload_pages", "payload_reads")
    sums, cpu = dict.fromkeys(counted, 0), 0.0
    index.search(queries[:batch], K, fields=fields)
    for start in range(0, len(queries), batch):
        started = time.process_time()
        stats = index.search(queries[start : start + batch], K, fields=fields).stats
        cpu += time.process_time() - started
        for name in counted:
            sums[name] += stats[name]
    return {name: total / len(queries) for name, total in sums.items()} | {"cpu_ms": 1e3 * cpu / len(queries)}


if __name__ == "__main__":
    main()
