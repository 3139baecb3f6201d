"""LanceDB: IVF with product-quantised (IVF_PQ) or RaBitQ (IVF_RQ) codes, and full vectors in a columnar file."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, row_blocks, sub_quantisers

__all__ = ["Peer"]

_FRAGMENT_ROWS = 2**20  # Lance's own default for the rows of a file; the high half of a row id is the file.


class Peer(SearchPeer):
    """A table of one column of float32 vectors."""

    name = "lancedb"
    package = "lancedb"
    install = ("lancedb",)
    io = "buffered"
    headroom = 512 * 2**20
    traps = (
        "the best refine_factor is not known in advance: swept",
        "the cache of the index has 6 GiB unless told otherwise: set to the budget",
        "reads fill the page cache: pages beyond the budget are given back after each query",
        "a query from Python costs about 2 ms of its own; a batch is run as one query after another inside",
        "product quantisation takes most of the build: k-means over 256 samples a centroid",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"index": "IVF_PQ", "code_bytes": 32, "rows_per_list": 4096}
    efforts = tuple({"nprobes": nprobes, "refine_factor": factor} for factor in (4, 10, 25) for nprobes in (4, 16, 64))

    def load(self) -> None:
        """Import lancedb; its threads are set by the environment."""
        self._library, self._arrow = import_module("lancedb"), import_module("pyarrow")
        self._config = import_module("lancedb.index")

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Write the table in blocks and index it."""
        count, d = vectors.shape
        schema = self._arrow.schema([("vector", self._arrow.list_(self._arrow.float32(), d))])
        table = self._library.connect(str(folder)).create_table("vectors", data=self._batches(vectors), schema=schema)
        lists = max(1, round(count / parameters["rows_per_list"]))
        if parameters["index"] == "IVF_PQ":
            books = sub_quantisers(d, parameters["code_bytes"])
            config = self._config.IvfPq(distance_type="l2", num_partitions=lists, num_sub_vectors=books)
        else:
            bits = max(1, parameters["code_bytes"] * 8 // d)
            config = self._config.IvfRq(distance_type="l2", num_partitions=lists, num_bits=bits)
        table.create_index("vector", config=config)
        last = table.search(np.asarray(vectors[-1], np.float32)).with_row_id(True).bypass_vector_index().limit(1)
        # Identical rows may stand in for each other: the check compares the vectors at a row number.
        found = int(_row_numbers(last.to_arrow()["_rowid"].to_numpy())[0])
        if not np.array_equal(vectors[found], vectors[-1]):
            raise RuntimeError(f"lancedb numbers its rows in another way: {found} is not row {count - 1}")

    def _batches(self, vectors: Matrix) -> Iterator[Any]:
        for block in row_blocks(vectors):
            values = self._arrow.array(np.asarray(block, np.float32).ravel())
            column = self._arrow.FixedSizeListArray.from_arrays(values, vectors.shape[1])
            yield self._arrow.record_batch([column], names=["vector"])

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Open the table with caches of the size of the budget."""
        session = self._library.Session(index_cache_size_bytes=dram_bytes, metadata_cache_size_bytes=dram_bytes // 8)
        self._table = self._library.connect(str(folder), session=session).open_table("vectors")

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Probe `nprobes` lists and re-rank `refine_factor` x k candidates."""
        query = self._table.search(queries[0]).with_row_id(True).select(["_distance"]).limit(k)
        found = query.nprobes(int(effort["nprobes"])).refine_factor(int(effort["refine_factor"])).to_arrow()
        return _row_numbers(found["_rowid"].to_numpy())[None]

    def held_bytes(self) -> int:
        """Return 0: its caches do not tell their size; the resident set does."""
        return 0


def _row_numbers(row_ids: Matrix) -> Matrix:
    ids: Matrix = ((row_ids >> np.uint64(32)) * np.uint64(_FRAGMENT_ROWS) + (row_ids & np.uint64(2**32 - 1))).astype(
        np.int64
    )
    return ids
