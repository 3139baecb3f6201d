"""ZoomIndex on real vectors: the recall declared and the recall measured, and what a query costs, cold.

``python -m memhier.benchmarks.workloads.search.recall --share 0.25`` prints a table and, with ``--json``, writes it.
The paper's form, product-quantised codes and a number of candidates that calibration found for the recall, stands
beside codes with bounds in the same DRAM. Every query is asked on its own; with direct I/O no page comes from the page
cache.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import click
import faiss
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.ann.zoom.preview.preview import Coding
from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.datasets import SearchSet, load_search_set
from memhier.benchmarks.exact import exact_neighbours, id_recall, recall_at_k
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.errors import BudgetError

__all__ = ["Measured", "Truth", "main", "measure", "measure_form", "record"]

K = 10
FORMS: dict[str, Coding] = {"bounds": "rabitq", "paper": "pq"}


@dataclass(frozen=True, slots=True)
class Truth:
    """Queries ``[q, d]`` and their exact answers ``[q, 10]``."""

    queries: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]

    @classmethod
    def of(cls, data: SearchSet, queries: int) -> Self:
        """Return the first `queries` of a data set, searched exactly."""
        asked = data.queries[:queries].astype(np.float32)
        return cls(asked, *exact_neighbours(data.base, asked, K))


@dataclass(frozen=True, slots=True)
class Measured:
    """One index searched with one declared recall.

    Attributes
    ----------
    data, form
        Data set, and ``"bounds"`` or ``"paper"``.
    declared, recall, id_recall
        Recall@10 as declared; as measured with ties counted by distance; and by id, where they do not count.
    calibrated
        Whether the index knows what the recall declared takes.
    dram_share, file_share
        DRAM of the open index and its files, as shares of the raw vectors.
    code_bytes
        Of one vector.
    scanned, ranked, pages
        Codes compared, full vectors compared and pages read for a query, on average.
    rounds
        Rounds of reads, one after the other, on average.
    p50_ms, p99_ms, cpu_ms
        Latency of a query, and CPU time on average, milliseconds.
    build_cpu_s
        CPU seconds of the build.
    """

    data: str
    form: str
    declared: float
    recall: float
    id_recall: float
    calibrated: bool
    dram_share: float
    file_share: float
    code_bytes: int
    scanned: float
    ranked: float
    pages: float
    rounds: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    build_cpu_s: float


def measure_form(
    data: SearchSet, truth: Truth, form: str, share: float, folder: Path, recalls: Sequence[float]
) -> list[Measured]:
    """Build an index of one form within `share` of the raw bytes of DRAM, and measure each declared recall."""
    path = folder / f"{data.name}-{form}"
    cpu = time.process_time()
    ZoomIndex.build(path, data.base, preview=FORMS[form], dram=int(share * data.base.nbytes)).close()
    cpu = time.process_time() - cpu
    with ZoomIndex.open(path) as index:
        return [measure(index, truth, recall, data.name, form, cpu) for recall in recalls]


def measure(index: ZoomIndex, truth: Truth, declared: float, data: str, form: str, build_cpu_s: float) -> Measured:
    """Search one query at a time with the recall declared, and return what that found and cost."""
    count, counted = len(truth.queries), ("scanned", "ranked", "pages", "rounds")
    ids, distances = np.empty((count, K), np.int64), np.empty((count, K), np.float32)
    seconds, totals, calibrated = np.empty(count), dict.fromkeys(counted, 0), True
    cpu = time.process_time()
    for row, query in enumerate(truth.queries):
        started = time.perf_counter()
        result = index.search(query, K, recall=declared)
        seconds[row] = time.perf_counter() - started
        ids[row], distances[row] = result.ids, result.distances
        for name in counted:
            totals[name] += result.stats[name]
        calibrated = result.stats["calibrated"]
    cpu = time.process_time() - cpu
    stats = index.stats()
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return Measured(
        data=data,
        form=form,
        declared=declared,
        recall=recall_at_k(distances, truth.distances),
        id_recall=id_recall(ids, truth.ids),
        calibrated=calibrated,
        dram_share=index.memory_bytes / stats["vector_bytes"],
        file_share=stats["file_bytes"] / stats["vector_bytes"],
        code_bytes=stats["code_bytes"],
        **{name: total / count for name, total in totals.items()},
        p50_ms=float(p50),
        p99_ms=float(p99),
        cpu_ms=cpu / count * 1e3,
        build_cpu_s=build_cpu_s,
    )


@click.command()
@click.option("--data", "names", multiple=True, default=("fashion-mnist", "mnist", "sift-imagenet200k"),
              show_default=True)  # fmt: skip
@click.option("--share", default=0.25, show_default=True, help="DRAM as a share of the raw vectors.")
@click.option("--recall", "recalls", multiple=True, default=(0.95, 0.99), show_default=True, help="Declared.")
@click.option("--queries", default=1000, show_default=True)
@click.option("--vectors", type=click.IntRange(1), help="Only the first; all by default.")
@folder_option
@json_option
def main(
    names: tuple[str, ...],
    share: float,
    recalls: tuple[float, ...],
    queries: int,
    vectors: int | None,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure ZoomIndex on real data sets."""
    faiss.omp_set_num_threads(1)
    results: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name in names:
            try:
                data = load_search_set(name)
            except FileNotFoundError as error:
                Console(stderr=True).print(f"skipped: {error}")
                continue
            data = replace(data, base=data.base[:vectors])
            truth = Truth.of(data, queries)
            for form in FORMS:
                try:
                    results += measure_form(data, truth, form, share, Path(scratch), recalls)
                except BudgetError as error:
                    Console(stderr=True).print(f"skipped: {name}, {form}: {error}")
    if not results:
        raise click.ClickException("nothing was measured")
    Console().print(_table(results))
    if out is not None:
        record(results).write(out, results=[asdict(result) for result in results])


def record(results: Sequence[Measured]) -> Record:
    """Return what can be held against another run."""
    figures = []
    for one in results:
        at = f"{one.data}, {one.form}, {one.declared} declared"
        figures += [
            Figure.of(f"recall@10, {at}", one.recall, "share", "neither"),
            Figure.of(f"pages, {at}", one.pages, "4 KiB reads a query", "less"),
            Figure.of(f"CPU, {at}", one.cpu_ms, "ms a query", "less"),
            Figure.of(f"p50, {at}", one.p50_ms, "ms", "less", clock=True),
            Figure.of(f"p99, {at}", one.p99_ms, "ms", "less", clock=True),
        ]
    bars = [Bar.of(f"{one.data}, {one.form}, {one.declared}", one.pages) for one in results]
    return Record(figures, bars=[Bars("pages a query at a declared recall", "4 KiB reads", bars)])


def _table(results: Sequence[Measured]) -> Table:
    table = Table(title=f"ZoomIndex, k = {K}, one query at a time, cold")
    table.add_column("data, codes")
    columns = {
        "declared": "{:g}", "recall": "{:.4f}", "id_recall": "{:.4f}", "dram_share": "{:.1%}", "scanned": "{:,.0f}",
        "ranked": "{:.1f}", "pages": "{:.1f}", "rounds": "{:.1f}", "p50_ms": "{:.2f}", "p99_ms": "{:.2f}",
        "cpu_ms": "{:.2f}",
    }  # fmt: skip
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        cells = (form.format(getattr(result, name)) for name, form in columns.items())
        known = "" if result.calibrated else " (not calibrated)"
        table.add_row(f"{result.data}, {result.form}{known}", *cells)
    return table


if __name__ == "__main__":
    main()
