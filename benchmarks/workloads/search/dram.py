"""More DRAM than codes take: pages read and CPU of a query by budget, with pages held in DRAM and without.

``python -m memhier.benchmarks.workloads.search.dram`` builds an index for each share of the raw vectors, and for each
length of codes that is given. The DRAM that codes leave holds pages. Vectors of the set are asked for first, and where
there is room for all pages, each is read once. Then queries are asked one at a time, by turns, none of them twice.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from memhier.ann import ZoomIndex
from memhier.ann.zoom.construction.build import BuildOptions, reader_bytes, write_index
from memhier.ann.zoom.storage.catalog import KIND
from memhier.ann.zoom.storage.layout import IndexSizes, plan_layout
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, by_turns, figures_of, rows_table, workload
from memhier.benchmarks.workloads.search.recall import READS, Ask, measure
from memhier.benchmarks.workloads.search.sets import FAMILIES, SearchCase
from memhier.store.store import Store

__all__ = ["main"]

K = 10
_ROUNDS = 5
_BATCH = 64
MEASURES = (
    Measure("recall", "recall@10", "share", "neither"),
    Measure("pages", "pages", READS),
    Measure("cpu_ms", "CPU", "ms a query"),
)
_COLUMNS = ("share", "code_bytes", "pool", "held_share", "declared", "recall", "requests", "pages", "cpu_ms")


def build(case: SearchCase, dram: int, code_bytes: int | None, path: Path) -> None:
    """Build an index, with codes of another length than the planned one where that is given."""
    if code_bytes is None:
        ZoomIndex.build(path, case.base, metric=case.metric, dram=dram).close()
        return
    count, dimension = case.base.shape
    reader = reader_bytes(path.parent, dram)
    sizes = IndexSizes(count, dimension, case.metric, "rabitq", case.base.dtype.itemsize * dimension, 4, reader)
    layout = replace(plan_layout(sizes, dram), code_bytes=code_bytes)
    options = BuildOptions(case.metric, "rabitq", dram, 0, 0, False, layout)
    with Store.create(path, kind=KIND) as store:
        write_index(store, case.base, None, None, None, options)


def rows_of(path: Path, asks: list[Ask], warm: Any, recalls: tuple[float, ...]) -> Iterator[Row]:
    """Yield a row for each recall, without and with pages in DRAM; no query is asked twice of a pool."""
    for declared in recalls:
        with ZoomIndex.open(path, pool=False) as cold, ZoomIndex.open(path) as held:
            _warm(held, warm)
            ways = {name: partial(_next, index, iter(asks), declared) for name, index in (("no", cold), ("yes", held))}
            found = by_turns(ways, len(asks))
            stats = held.stats()
        room = stats["pool_bytes"] / stats["vector_bytes"]
        for pool, each in found.items():
            row = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
            row["cpu_ms"] = float(np.median([one["cpu_ms"] for one in each]))
            facts = {"pool": pool, "code_bytes": stats["code_bytes"]}
            yield facts | {"held_share": min(1.0, room) if pool == "yes" else 0.0} | row


def _next(index: ZoomIndex, asks: Iterator[Ask], declared: float) -> Row:
    return measure(index, [next(asks)], declared, K, batch=False)


def _warm(index: ZoomIndex, vectors: Any) -> None:
    for start in range(0, len(vectors), _BATCH):
        index.search(vectors[start : start + _BATCH], K)
    if index.stats()["pool_bytes"] >= index.stats()["vector_bytes"]:
        for _ in index.blocks():
            pass


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--vectors", default=200_000, show_default=True, help="At most.")
@click.option("--queries", default=500, show_default=True)
@click.option("--warm", default=10_000, show_default=True, help="Vectors of the set that are asked for before.")
@click.option("--share", "shares", multiple=True, type=float, default=(1 / 6, 0.5, 1.0, 1.3), help="Of the raw bytes.")
@click.option("--code-bytes", "lengths", multiple=True, type=int, help="Of a code, in place of the planned length.")
@click.option("--recall", "recalls", multiple=True, type=float, default=(0.95, 0.99), show_default=True)
def main(
    scratch: Path, data: str, vectors: int, queries: int, warm: int, shares: tuple[float, ...],
    lengths: tuple[int, ...], recalls: tuple[float, ...],
) -> Outcome:  # fmt: skip
    """Build and search, budget by budget."""
    case = FAMILIES["plain"][1](data, vectors, queries, 0)
    asks = [Ask.of(case, K, some) for some in np.array_split(case.queries, _ROUNDS)]
    asked = case.base[np.random.default_rng(0).integers(0, len(case.base), warm)]
    rows = list[Row]()
    for share in shares:
        for code_bytes in lengths or (None,):
            path = scratch / f"{share:.3f}-{code_bytes}"
            build(case, int(share * case.base.nbytes), code_bytes, path)
            rows += [{"share": round(share, 3)} | row for row in rows_of(path, asks, asked, recalls)]
            shutil.rmtree(path)
    name = "{title}, {share:g} of the raw bytes, codes of {code_bytes}, pages held: {pool}, {declared:g} declared"
    shown = [{column: row[column] for column in _COLUMNS} for row in rows]
    scale = f"{len(case.base):,} vectors of {data}"
    return Outcome(Record(figures_of(rows, MEASURES, name), scale=scale), [rows_table(scale, shown)], {"results": rows})


if __name__ == "__main__":
    main()
