"""ZoomIndex on real vectors: recall against DRAM, pages and latency, cold.

``python -m memhier.benchmarks.workloads.zoom_recall --share 0.15`` prints a table and, with ``--json``, writes it.
Every query is asked on its own from a freshly opened index; with direct I/O no page comes from the page cache.
"""

import json
import resource
import tempfile
import time
from pathlib import Path

import click
import faiss
import numpy as np
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.machine import describe_machine

__all__ = ["main", "measure"]

K = 10


def measure(name: str, share: float, folder: Path, queries: int) -> dict[str, object]:
    """Build an index of one data set within `share` of its raw bytes of DRAM, and search it one query at a time."""
    data = load_search_set(name)
    asked = data.queries[:queries].astype(np.float32)
    true = exact_neighbours(data.base, asked, K)[1]
    started, cpu = time.perf_counter(), _cpu_seconds()
    ZoomIndex.build(folder / name, data.base, dram=int(share * data.base.nbytes)).close()
    build, build_cpu = time.perf_counter() - started, _cpu_seconds() - cpu
    found, seconds, pages, reads = [], [], 0, 0
    with ZoomIndex.open(folder / name) as index:
        cpu = _cpu_seconds()
        for query in asked:
            started = time.perf_counter()
            result = index.search(query, K)
            seconds.append(time.perf_counter() - started)
            found.append(result.distances)
            pages += result.stats["pages"]
            reads += result.stats["reads"]
        cpu = _cpu_seconds() - cpu
        stats = index.stats()
    return {
        "data": name,
        "vectors": stats["vectors"],
        "dimension": stats["dimension"],
        "dtype": stats["dtype"],
        "raw_bytes": stats["vector_bytes"],
        "dram_bytes": stats["memory_bytes"],
        "dram_share": stats["memory_bytes"] / stats["vector_bytes"],
        "file_share": stats["file_bytes"] / stats["vector_bytes"],
        "lists": stats["lists"],
        "code_bytes": stats["code_bytes"],
        "nprobe": stats["nprobe"],
        "candidates": stats["candidates"],
        "queries": len(asked),
        "recall": recall_at_k(np.stack(found), true),
        "pages_per_query": pages / len(asked),
        "reads_per_query": reads / len(asked),
        "p50_ms": float(np.percentile(seconds, 50) * 1e3),
        "p99_ms": float(np.percentile(seconds, 99) * 1e3),
        "cpu_ms": cpu / len(asked) * 1e3,
        "build_s": build,
        "build_cpu_s": build_cpu,
        "engine": stats["engine"],
        "direct": stats["direct"],
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@click.command()
@click.option("--data", "names", multiple=True, default=("fashion-mnist", "sift-imagenet200k"), show_default=True)
@click.option("--share", default=0.15, show_default=True, help="DRAM as a share of the raw vectors.")
@click.option("--queries", default=1000, show_default=True)
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to build; a temporary folder otherwise.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(names: tuple[str, ...], share: float, queries: int, folder: Path | None, out: Path | None) -> None:
    """Measure ZoomIndex on real data sets."""
    faiss.omp_set_num_threads(1)
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name in names:
            try:
                results.append(measure(name, share, Path(scratch), queries))
            except FileNotFoundError as error:
                Console(stderr=True).print(f"skipped: {error}")
    if not results:
        raise click.ClickException("nothing was measured")
    table = Table(title=f"ZoomIndex, k = {K}, one query at a time, cold")
    table.add_column("")
    for result in results:
        table.add_column(str(result["data"]), justify="right")
    for field in list(results[0])[1:]:
        table.add_row(field, *(_cell(result[field]) for result in results))
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=2))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
