"""Filters of falling selectivity: recall stays, and what a query costs falls with them.

``python -m memhier.benchmarks.workloads.zoom_filters`` prints a table for a data set of real vectors with a made-up
price, uniform and independent of the vectors. Recall is against exact search among the vectors that the filter leaves.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import faiss
import numpy as np
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import SEARCH_SETS, load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.machine import describe_machine
from memhier.benchmarks.workloads.options import json_option

__all__ = ["Filtered", "main", "measure", "record"]

K = 10
SHARES = (1.0, 0.5, 0.05, 0.005)


@dataclass(frozen=True, slots=True)
class Filtered:
    """One filter.

    Attributes
    ----------
    share
        Of the vectors that it leaves.
    declared, recall
        Recall@10.
    scanned, pages
        Codes compared and pages read for a query, on average.
    cpu_ms
        CPU time of a query, on average.
    """

    share: float
    declared: float
    recall: float
    scanned: float
    pages: float
    cpu_ms: float


def measure(name: str, dram_share: float, declared: float, folder: Path, queries: int) -> list[Filtered]:
    """Return what each filter costs on a data set, with an index in `dram_share` of the raw bytes."""
    data = load_search_set(name)
    price = np.random.default_rng(0).random(len(data.base))
    wanted = data.queries[:queries].astype(np.float32)
    rows = []
    dram = int(dram_share * data.base.nbytes)
    with ZoomIndex.build(folder / "index", data.base, dram=dram, attributes={"price": price}) as index:
        for share in SHARES:
            where = None if share == 1 else f"price < {share}"
            kept = np.flatnonzero(price < share)
            _, true = exact_neighbours(data.base[kept], wanted, K)
            index.search(wanted[:1], K, where=where)  # the bitmap is made once
            before = time.process_time()
            found = index.search(wanted, K, recall=declared, where=where)
            spent = time.process_time() - before
            scanned, pages = found.stats["scanned"] / len(wanted), found.stats["page_requests"] / len(wanted)
            recall = recall_at_k(found.distances, true)
            rows.append(Filtered(share, declared, recall, scanned, pages, 1e3 * spent / len(wanted)))
    return rows


@click.command(help=__doc__)
@click.option("--data", type=click.Choice(sorted(SEARCH_SETS)), default="sift-imagenet200k", show_default=True)
@click.option("--share", default=0.5, show_default=True, help="DRAM, of the raw vectors.")
@click.option("--recall", default=0.95, show_default=True, help="Declared.")
@click.option("--queries", default=1000, show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path), help="Where to build; a temporary folder otherwise.")
@json_option
def main(data: str, share: float, recall: float, queries: int, place: Path | None, out: Path | None) -> None:
    """Print the table."""
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        rows = measure(data, share, recall, Path(folder), queries)
    table = Table(title=f"{data}, recall {recall} declared; {describe_machine()}", title_style="")
    for heading in ("vectors left", "recall@10", "codes scanned", "pages read", "CPU ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = f"{row.share:.1%}", f"{row.recall:.4f}", f"{row.scanned:,.0f}", f"{row.pages:.1f}", f"{row.cpu_ms:.3f}"
        table.add_row(*cells)
    Console().print(table)
    if out is not None:
        record(data, rows).write(out, results=[asdict(row) for row in rows])


def record(data: str, rows: Sequence[Filtered]) -> Record:
    """Return what can be held against another run."""
    figures = []
    for row in rows:
        at = f"{data}, {row.share:.1%} left"
        figures += [
            Figure.of(f"recall@10, {at}", row.recall, "share", "neither"),
            Figure.of(f"codes, {at}", row.scanned, "compared a query", "less"),
            Figure.of(f"pages, {at}", row.pages, "4 KiB reads a query", "less"),
            Figure.of(f"CPU, {at}", row.cpu_ms, "ms a query", "less"),
        ]
    return Record(figures)


if __name__ == "__main__":
    main()
