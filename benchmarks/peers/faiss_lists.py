"""faiss with full vectors in inverted lists on disk (OnDiskInvertedLists), which it maps."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, list_count, row_blocks

__all__ = ["Peer"]


class Peer(SearchPeer):
    """IVF over flat vectors, or over bytes kept as they are; the centroids are in DRAM."""

    name = "faiss_lists"
    package = "faiss-cpu"
    install = ("faiss-cpu",)
    io = "mapped"
    dtypes = ("float32", "uint8")
    batch = True
    traps = (
        "a fault reads ahead as far as the device is set to: swept with that and without",
        "OpenMP with one query costs tens of milliseconds: one thread",
        "its prefetch threads make cold lists slower (faiss issue 5010): set to none",
        "the file of lists is named in the index by its path: opened with IO_FLAG_ONDISK_SAME_DIR",
        "lists grown one batch at a time are copied within the file: written once, from blocks merged on disk",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"lists_per_sqrt_n": 4}
    efforts = tuple({"nprobe": nprobe} for nprobe in (1, 2, 4, 8, 16, 32, 64, 128))

    def load(self) -> None:
        """Import faiss and keep it to one thread."""
        self._faiss = import_module("faiss")
        self._merge = import_module("faiss.contrib.ondisk").merge_ondisk
        self._faiss.omp_set_num_threads(1)

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Train on a sample, write each block's lists to a file, and merge the files into one."""
        faiss, (count, d) = self._faiss, vectors.shape
        lists = list_count(count, parameters["lists_per_sqrt_n"])
        kind = "SQ8" if vectors.dtype == np.uint8 else "Flat"
        index = faiss.index_factory(d, f"IVF{lists},{kind}")
        if kind == "SQ8":
            index = faiss.IndexIVFScalarQuantizer(
                faiss.IndexFlatL2(d), d, lists, faiss.ScalarQuantizer.QT_8bit_direct, faiss.METRIC_L2, False
            )
        taken = np.random.default_rng(0).choice(count, min(count, 64 * lists), replace=False)
        index.train(np.asarray(vectors[np.sort(taken)], np.float32))
        shards, at = [], 0
        faiss.write_index(index, str(folder / "trained"))
        for number, block in enumerate(row_blocks(vectors)):
            shard = faiss.read_index(str(folder / "trained"))
            shard.add_with_ids(np.asarray(block, np.float32), np.arange(at, at + len(block)))
            faiss.write_index(shard, str(folder / f"shard{number}"))
            shards.append(str(folder / f"shard{number}"))
            at += len(block)
        index = faiss.read_index(str(folder / "trained"))
        self._merge(index, shards, str(folder / "lists.ivfdata"))
        faiss.write_index(index, str(folder / "index.faiss"))
        for path in [*shards, str(folder / "trained")]:
            Path(path).unlink()

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Read centroids; the lists stay mapped."""
        self._index = self._faiss.read_index(str(folder / "index.faiss"), self._faiss.IO_FLAG_ONDISK_SAME_DIR)
        lists = self._faiss.downcast_InvertedLists(self._index.invlists)
        lists.prefetch_nthread = 0
        # Per list: offset, size and capacity, beside the centroid.
        self._bytes: int = self._index.nlist * (4 * self._index.d + 24)

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search `nprobe` lists."""
        self._index.nprobe = int(effort["nprobe"])
        ids: Matrix = self._index.search(np.asarray(queries, np.float32), k)[1]
        return ids

    def held_bytes(self) -> int:
        """Return centroids and the table of lists."""
        return self._bytes
