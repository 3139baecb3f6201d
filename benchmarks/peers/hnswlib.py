"""hnswlib: a graph with full vectors, all in DRAM; the reference for speed where memory is no limit."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, row_blocks

__all__ = ["Peer"]


class Peer(SearchPeer):
    """HNSW over float32."""

    name = "hnswlib"
    package = "hnswlib"
    install = ("hnswlib",)
    io = "none"
    batch = True
    traps = (
        "holds vectors and graph in DRAM: beyond any budget smaller than the data, so no cap is set; a reference only",
        "insertion depends on the order of rows when several threads build: one thread here",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"M": 16, "ef_construction": 200}
    efforts = tuple({"ef": ef} for ef in (10, 20, 40, 80, 160, 320, 640))

    def load(self) -> None:
        """Import hnswlib."""
        self._library = import_module("hnswlib")

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Insert with one thread, seed 100, hnswlib's own default."""
        index = self._library.Index(space="l2", dim=vectors.shape[1])
        index.init_index(len(vectors), M=parameters["M"], ef_construction=parameters["ef_construction"])
        at = 0
        for block in row_blocks(vectors):
            index.add_items(block, np.arange(at, at + len(block)), num_threads=1)
            at += len(block)
        index.save_index(str(folder / f"{vectors.shape[1]}.hnsw"))

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Load the file; its name holds the dimension, which the file does not."""
        path = next(folder.glob("*.hnsw"))
        self._index = self._library.Index(space="l2", dim=int(path.stem))
        self._index.load_index(str(path))
        self._bytes = path.stat().st_size

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search with a candidate list of `ef`."""
        self._index.set_ef(max(int(effort["ef"]), k))
        ids: Matrix = self._index.knn_query(queries, k, num_threads=1)[0].astype(np.int64)
        return ids

    def held_bytes(self) -> int:
        """Return the size of the file, all of which is in DRAM."""
        return self._bytes
