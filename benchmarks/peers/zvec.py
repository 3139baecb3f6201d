"""zvec's DiskANN index: a Vamana graph with full vectors on SSD, product-quantised codes in DRAM."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer

__all__ = ["Peer"]

_INSERT_ROWS = 1000  # zvec takes no more documents in one call than 1,024.
_LEAST_MB = 101  # It takes no smaller limit on its memory.


class Peer(SearchPeer):
    """A collection of documents that are nothing but a float32 vector."""

    name = "zvec"
    package = "zvec"
    install = ("zvec",)
    io = "buffered"
    headroom = 512 * 2**20
    traps = (
        "its default metric is the inner product: set to L2",
        "the graph is built by optimize(), not by insert()",
        "query() returns documents at a cost; query_internal_ids() on a collection opened read-only does not",
        "maps its files by default: enable_mmap=False; its reads still fill the page cache, so pages beyond the "
        "budget are given back after each query",
        "takes no limit on its memory under 101 MB, and keeps nodes it has read up to that: shown as over the budget",
        "threads follow the machine unless init() is told",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"max_degree": 64, "list_size": 100, "code_bytes": 32}
    efforts = tuple({"list_size": size} for size in (10, 15, 20, 30, 40, 60, 80, 120, 200, 300, 500))

    def load(self) -> None:
        """Import zvec."""
        self._library = import_module("zvec")

    def _begin(self, **limits: int) -> None:
        self._library.init(query_threads=1, optimize_threads=1, log_level=self._library.LogLevel.ERROR, **limits)

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Insert every vector as a document, and build the graph."""
        zvec = self._library
        self._begin()
        index = zvec.DiskAnnIndexParam(
            metric_type=zvec.MetricType.L2,
            max_degree=parameters["max_degree"],
            list_size=parameters["list_size"],
            pq_chunk_num=parameters["code_bytes"],
        )
        field = zvec.VectorSchema("vector", zvec.DataType.VECTOR_FP32, vectors.shape[1], index)
        schema = zvec.CollectionSchema("vectors", vectors=field)
        collection = zvec.create_and_open(str(folder / "collection"), schema, zvec.CollectionOption(enable_mmap=False))
        for start in range(0, len(vectors), _INSERT_ROWS):
            block = np.asarray(vectors[start : start + _INSERT_ROWS], np.float32)
            documents = [zvec.Doc(str(start + row), vectors={"vector": vector}) for row, vector in enumerate(block)]
            failed = [status for status in collection.insert(documents) if not status.ok()]
            if failed:
                raise RuntimeError(f"zvec did not take {len(failed)} of {len(block)} vectors: {failed[0]}")
        collection.optimize(zvec.OptimizeOption(concurrency=1))
        collection.flush()
        collection.close()

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Open read-only, and see that internal ids are row numbers."""
        self._begin(memory_limit_mb=max(_LEAST_MB, dram_bytes >> 20))
        option = self._library.CollectionOption(read_only=True, enable_mmap=False)
        self._collection = self._library.open(str(folder / "collection"), option)
        count = self._collection.stats.doc_count
        probe = np.array([0, count // 2, count - 1])
        if [int(name) for name in self._collection.resolve_internal_ids(probe)] != probe.tolist():
            raise RuntimeError("zvec numbers its documents in another way than they were inserted")

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search the graph with a list of `list_size` candidates."""
        parameter = self._library.DiskAnnQueryParam(list_size=max(int(effort["list_size"]), k))
        query = self._library.Query("vector", vector=queries[0], param=parameter)
        ids: Matrix = self._collection.query_internal_ids(query, topk=k)[None]
        return ids

    def held_bytes(self) -> int:
        """Return 0: the resident set tells."""
        return 0
