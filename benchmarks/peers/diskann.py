"""DiskANN (Vamana graph on SSD, product-quantised codes in DRAM) through diskannpy."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, write_bin

__all__ = ["Peer"]

_LEFT_BY_BUILD = ("ann_vectors.bin", "ann_mem.index.data", "ann_mem.index")
_SCRATCH_BYTES = 2**20


class Peer(SearchPeer):
    """A disk index with full vectors in its nodes; DRAM that codes leave over holds nodes near the entry point."""

    name = "diskann"
    package = "diskannpy"
    install = ("diskannpy==0.7.0", "numpy==1.25.*")
    io = "direct"
    dtypes = ("float32", "uint8", "int8")
    batch = True
    headroom = 256 * 2**20
    traps = (
        "the bytes of a code follow from search_memory_maximum alone: it is set to code_bytes x vectors",
        "wheels are pinned to numpy 1.25: an environment of its own",
        "the build leaves two copies of the vectors beside the index; they are removed and not counted",
        "no counter of reads: /proc/self/io counts its direct reads",
        "the best beam_width depends on the device: 1 reads least, 4 waits least; both are swept",
        "filling its cache of nodes with one context (num_threads=1) never ends: two are made, one thread searches",
        "cosine does not work on disk; the environment must allow O_DIRECT and Linux AIO",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"R": 64, "L": 100, "code_bytes": 32, "threads": 1}
    efforts = tuple(
        {"complexity": complexity, "beam_width": beam}
        for beam in (1, 4)
        for complexity in (10, 15, 20, 30, 40, 60, 100, 200, 400)
    )

    def load(self) -> None:
        """Import diskannpy."""
        self._library = import_module("diskannpy")

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Build in one piece: an index that fits the build's DRAM is not merged from shards."""
        source = folder / "ann_vectors.bin"
        write_bin(vectors, source)
        self._library.build_disk_index(
            data=str(source),
            distance_metric="l2",
            index_directory=str(folder),
            complexity=parameters["L"],
            graph_degree=parameters["R"],
            # Half a byte a vector more, since the quotient is rounded down.
            search_memory_maximum=(parameters["code_bytes"] + 0.5) * len(vectors) / 2**30,
            build_memory_maximum=64.0,
            num_threads=parameters["threads"],
            pq_disk_bytes=0,
            vector_dtype=vectors.dtype.type,
            index_prefix="ann",
        )
        for name in _LEFT_BY_BUILD:
            (folder / name).unlink(missing_ok=True)

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Load the codes, and cache as many nodes as the budget has left."""
        count, code_bytes = np.fromfile(folder / "ann_pq_compressed.bin", np.uint32, 2).tolist()
        self._codes = int(count * code_bytes) + (folder / "ann_pq_pivots.bin").stat().st_size
        # A cached node was found to take twice its bytes on disk, and the scratch of a search a mebibyte.
        self._node_bytes = 2 * ((folder / "ann_disk.index").stat().st_size // count)
        cached = max(0, dram_bytes - self._codes - _SCRATCH_BYTES) // self._node_bytes
        self._cached = int(parameters.get("nodes_to_cache", min(cached, count // 10)))
        self._index = self._library.StaticDiskIndex(
            index_directory=str(folder),
            # Contexts, not threads that run: filling the cache takes one while another is out, and waits for ever.
            num_threads=2,
            num_nodes_to_cache=self._cached,
            cache_mechanism=2 if self._cached else 0,
            index_prefix="ann",
        )

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search the graph with a list of `complexity` candidates, `beam_width` nodes read at a time."""
        complexity, beam = max(int(effort["complexity"]), k), int(effort["beam_width"])
        if len(queries) == 1:
            found = self._index.search(queries[0], k, complexity, beam).identifiers[None]
        else:
            found = self._index.batch_search(queries, k, complexity, 1, beam).identifiers
        ids: Matrix = np.asarray(found, np.int64)
        return ids

    def held_bytes(self) -> int:
        """Return codes, pivots, scratch and cached nodes."""
        return int(self._codes + _SCRATCH_BYTES + self._cached * self._node_bytes)
