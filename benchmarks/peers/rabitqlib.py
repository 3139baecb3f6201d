"""RaBitQ by its authors: inverted lists of codes of 1 to 9 bits an axis, all in DRAM, ranked by the codes alone."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, list_count

__all__ = ["Peer"]


class Peer(SearchPeer):
    """IVF whose answers are estimates: the recall of codes alone, without a read."""

    name = "rabitqlib"
    package = "rabitqlib"
    install = ("rabitqlib>=0.7",)
    io = "none"
    batch = True
    traps = (
        "holds codes in DRAM and no vectors: recall ends where the codes' bits do, whatever is probed; 32 bits keep "
        "the vectors, in DRAM too",
        "a code of b bits an axis takes b x d / 8 + 44 bytes a vector with its factors and id: more than byte data",
        "takes float32 alone, all of it in one call: the build holds the vectors",
        "its clusters are told to end with an Exact assignment of every vector",
        "high_accuracy=False is its faster estimate, lower in recall from 4 bits up; True is asked for",
        "no cap is set on its DRAM: a reference only",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"lists_per_sqrt_n": 4, "bits": 7}
    efforts = tuple({"nprobe": nprobe} for nprobe in (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def load(self) -> None:
        """Import rabitqlib."""
        self._library = import_module("rabitqlib")

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Cluster with one thread, encode, and save."""
        count, d = vectors.shape
        lists = list_count(count, parameters["lists_per_sqrt_n"])
        whole = np.ascontiguousarray(vectors, np.float32)
        exact = self._library.FinalAssignmentMode.Exact
        clusters = self._library.RaBitQKMeans(d, lists, num_threads=1, final_assignment=exact)
        clusters.train(whole)
        index = self._library.IvfIndex(d, count, lists, parameters["bits"], "l2")
        index.build(whole, clusters.centroids, clusters.assignments, num_threads=1)
        index.save(str(folder / "index.rabitq"))

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Load the file."""
        path = folder / "index.rabitq"
        self._index = self._library.IvfIndex.load(str(path))
        self._bytes = path.stat().st_size

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Scan `nprobe` lists."""
        nprobe = min(int(effort["nprobe"]), self._index.num_clusters)
        ids: Matrix = self._index.search(queries, k, nprobe, high_accuracy=True, num_threads=1)[0].astype(np.int64)
        return ids

    def held_bytes(self) -> int:
        """Return the size of the file, all of which is in DRAM."""
        return self._bytes
