"""usearch with its file mapped (`view`): a graph with full vectors that the page cache pages in."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, row_blocks

__all__ = ["Peer"]


class Peer(SearchPeer):
    """HNSW over float32, or over float16 where the vectors are uint8, which it holds exactly."""

    name = "usearch"
    package = "usearch"
    install = ("usearch",)
    io = "mapped"
    dtypes = ("float32", "uint8")
    batch = True
    traps = (
        "its i8 type expects data in the unit range and is lossy: never used",
        "a mapped index has no cap of its own: pages beyond the budget are given back after each query",
        "a hop reads ahead as far as the device is set to, 128 KiB to 8 MiB: swept with that and without",
        "without a value for threads it uses all cores",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"connectivity": 16, "expansion_add": 128}
    efforts = tuple({"expansion": expansion} for expansion in (16, 32, 64, 128, 256, 512))

    def load(self) -> None:
        """Import usearch."""
        self._library = import_module("usearch.index").Index

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Add with one thread and save."""
        kind = "f16" if vectors.dtype == np.uint8 else "f32"
        index = self._library(ndim=vectors.shape[1], metric="l2sq", dtype=kind, **parameters)
        at = 0
        for block in row_blocks(vectors):
            index.add(np.arange(at, at + len(block)), np.asarray(block, np.float32), threads=1)
            at += len(block)
        index.save(str(folder / "index.usearch"))

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Map the file."""
        self._index = self._library.restore(str(folder / "index.usearch"), view=True)
        if self._index is None:
            raise OSError(f"usearch cannot map {folder / 'index.usearch'}")

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search with a candidate list of `expansion`."""
        self._index.expansion_search = max(int(effort["expansion"]), k)
        found = self._index.search(np.asarray(queries, np.float32), k, threads=1).keys
        ids: Matrix = np.asarray(found).astype(np.int64).reshape(len(queries), -1)
        return ids

    def held_bytes(self) -> int:
        """Return 0: the kernel decides how much of a mapped file is in DRAM, and that is charged as it is found."""
        return 0
