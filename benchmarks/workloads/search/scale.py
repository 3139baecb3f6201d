"""ZoomIndex at a size: time and memory of the build, files, and the cost of a declared recall.

``python -m memhier.benchmarks.workloads.search.scale --vectors 1000000`` builds from a stream, which it never holds,
and searches held-out queries in one batch, or by ``--single`` one by one. The vectors are clusters of mixed difficulty
(`memhier.benchmarks.generators`), by ``--data "colour patches"`` streamed patches of photographs
(`memhier.benchmarks.patches`), or by ``--data sift-imagenet200k`` those of a set, as float32, which the memory of the
build then includes. Processor time is the process's, less the time to make the vectors. Memory is private: the
system may take files in the page cache back.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.exact import nearest
from memhier.benchmarks.generators import Mixed, mixed
from memhier.benchmarks.patches import PatchStream
from memhier.benchmarks.peers.account import PeakMemory
from memhier.benchmarks.workloads.harness import Measure, Outcome, figures_of, rows_table, workload
from memhier.benchmarks.workloads.search.recall import READS, Ask, measure
from memhier.benchmarks.workloads.search.sets import FAMILIES

__all__ = ["main"]

K = 10
RECALLS = (0.9, 0.95, 0.99)
_BLOCK_ROWS = 65_536
MEASURES = (
    Measure("recall", "recall@10", "share", "neither"),
    Measure("requests", "pages of vectors", READS),
    Measure("pages", "pages in all, each once in a call", READS),
    Measure("reads", "reads of neighbouring pages together", "reads a query"),
    Measure("cpu_ms", "CPU", "ms a query"),
)

Floats: TypeAlias = npt.NDArray[np.float32]


class GivenSet:
    """The `n` vectors of a set as float32, with the methods of generated ones."""

    def __init__(self, name: str, vectors: int, queries: int, seed: int) -> None:
        case = FAMILIES["plain"][1](name, vectors, queries, seed)
        if case.metric != "l2":
            raise click.BadParameter(f"{name!r}: expected a set with Euclidean distances", param_hint="--data")
        self._base, self._queries = case.base.astype(np.float32), case.queries.astype(np.float32)
        self.n = len(self._base)

    def blocks(self) -> Iterator[Floats]:
        """Yield all vectors in order."""
        for start in range(0, len(self._base), _BLOCK_ROWS):
            yield self._base[start : start + _BLOCK_ROWS]

    def queries(self, count: int) -> Floats:
        """Return `count` queries, at most those of the set."""
        return self._queries[:count]


Source: TypeAlias = Mixed | PatchStream | GivenSet
_PATCHES = {"colour patches": False, "white colour patches": True}  # whether they are white


def source_of(data: str | None, vectors: int, dimension: int, queries: int, seed: int) -> Source:
    """Return the vectors that the options name."""
    if data is None:
        return mixed(vectors, dimension, seed)
    if data in _PATCHES:
        return PatchStream(vectors, dimension, seed, _PATCHES[data])
    return GivenSet(data, vectors, queries, seed)


class TimedBlocks:
    """Blocks of vectors, and the processor seconds to make them."""

    def __init__(self, data: Source) -> None:
        self._data, self.seconds = data, 0.0

    def __iter__(self) -> Iterator[Floats]:
        blocks = self._data.blocks()
        while True:
            before = time.process_time()
            block = next(blocks, None)
            self.seconds += time.process_time() - before
            if block is None:
                return
            yield block


def build(data: Source, dram: int, path: Path) -> dict[str, Any]:
    """Build an index of `data` in `dram` bytes; return its cost and its sizes."""
    stream = TimedBlocks(data)
    with PeakMemory() as peak:
        before = time.process_time()
        index = ZoomIndex.build(path, stream, dram=dram)
        spent = time.process_time() - before - stream.seconds
    with index:
        stats = index.stats()
    names = ("vectors", "vector_bytes", "memory_bytes", "file_bytes", "lists", "code_bytes")
    return {"build_cpu_s": spent, "build_bytes": peak.private_bytes} | {name: stats[name] for name in names}


@workload
@click.option("--data", help="A set in place of generated vectors, with a dimension of its own but for patches.")
@click.option("--vectors", default=1_000_000, show_default=True, help="Of a set at most so many.")
@click.option("--dimension", default=128, show_default=True)
@click.option("--bytes", "bytes_per_vector", default=47.0, show_default=True, help="DRAM for each vector, all in all.")
@click.option("--queries", default=500, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--single", is_flag=True, help="A call for each query, in place of one for all.")
@click.option("--recall", "recalls", multiple=True, type=float, default=RECALLS, help="Declared; may be repeated.")
def main(
    scratch: Path, data: str | None, vectors: int, dimension: int, bytes_per_vector: float, queries: int, seed: int,
    single: bool, recalls: tuple[float, ...],
) -> Outcome:  # fmt: skip
    """Build, and search for the queries; the folder takes three times the vectors meanwhile."""
    source = source_of(data, vectors, dimension, queries, seed)
    vectors = source.n
    built = build(source, int(bytes_per_vector * vectors), scratch / "index")
    asked = source.queries(queries)
    asks = [Ask(None, 1.0, asked, *nearest(source.blocks(), asked, K))]
    with ZoomIndex.open(scratch / "index") as index:
        rows = [measure(index, asks, recall, K, batch=not single) for recall in recalls]
    figures = [
        Figure.of("build", built["build_cpu_s"], "CPU s", "less"),
        Figure.of("memory of the build", built["build_bytes"] / built["vector_bytes"], "of the raw vectors", "less"),
        Figure.of("DRAM", built["memory_bytes"] / vectors, "bytes a vector", "less"),
        Figure.of("files", built["file_bytes"] / built["vector_bytes"], "of the raw vectors", "less"),
        *figures_of(rows, MEASURES, "{title}, {declared:g} declared"),
    ]
    shown = [rows_table(f"{vectors:,} x {asked.shape[1]} float32", [built])]
    return Outcome(Record(figures, scale=f"{vectors:,} vectors"), shown, {"results": built | {"points": rows}})


if __name__ == "__main__":
    main()
