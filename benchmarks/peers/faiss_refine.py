"""faiss with product-quantised codes in DRAM and the full vectors mapped for re-ranking (IndexRefineFlat)."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, list_count, row_blocks, sub_quantisers

__all__ = ["Peer"]


class Peer(SearchPeer):
    """IVF over 4-bit fast-scan codes; the nearest of them are compared exactly."""

    name = "faiss_refine"
    package = "faiss-cpu"
    install = ("faiss-cpu>=1.12",)
    io = "mapped"
    batch = True
    traps = (
        "IO_FLAG_MMAP copies the vectors into DRAM after all; IO_FLAG_MMAP_IFC really maps them",
        "but then it maps codes, too, which the budget's dropping of pages would make it read again",
        "the vectors are float32 even where the data are bytes",
        "a fault reads ahead as far as the device is set to: swept with that and without",
        "OpenMP with one query costs tens of milliseconds: one thread",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"lists_per_sqrt_n": 4, "code_bytes": 32}
    efforts = tuple(
        {"nprobe": nprobe, "k_factor": factor} for factor in (4, 16) for nprobe in (1, 2, 4, 8, 16, 32, 64, 128)
    )

    def load(self) -> None:
        """Import faiss and keep it to one thread."""
        self._faiss = import_module("faiss")
        self._faiss.omp_set_num_threads(1)

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Build in DRAM, which this index does not do without, and save."""
        count, d = vectors.shape
        lists = list_count(count, parameters["lists_per_sqrt_n"])
        index = self._faiss.index_factory(
            d, f"IVF{lists},PQ{sub_quantisers(d, 2 * parameters['code_bytes'])}x4fs,RFlat"
        )
        taken = np.random.default_rng(0).choice(count, min(count, max(64 * lists, 65_536)), replace=False)
        index.train(np.asarray(vectors[np.sort(taken)], np.float32))
        for block in row_blocks(vectors):
            index.add(np.asarray(block, np.float32))
        self._faiss.write_index(index, str(folder / "index.faiss"))

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Map the file."""
        self._index = self._faiss.read_index(str(folder / "index.faiss"), self._faiss.IO_FLAG_MMAP_IFC)
        self._lists = self._faiss.extract_index_ivf(self._faiss.downcast_index(self._index.base_index))
        self._bytes: int = self._lists.nlist * 4 * self._index.d

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Scan `nprobe` lists and re-rank `k_factor` x k candidates."""
        self._lists.nprobe, self._index.k_factor = int(effort["nprobe"]), float(effort["k_factor"])
        ids: Matrix = self._index.search(np.asarray(queries, np.float32), k)[1]
        return ids

    def held_bytes(self) -> int:
        """Return the centroids; codes are mapped, and charged as they are found in the page cache."""
        return self._bytes
