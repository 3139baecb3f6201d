"""memhier itself, through the same interface as its peers."""

from importlib import import_module
from pathlib import Path
from typing import Any

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer

__all__ = ["Peer"]


class Peer(SearchPeer):
    """ZoomIndex: an effort's names are the arguments of its `search`."""

    name = "memhier"
    package = "memhier"
    install = ("memhier",)
    io = "direct"
    dtypes = ("float32", "float16", "int8", "uint8")
    batch = True
    traps = ("MEMHIER_IO forces an engine: the one in use stands in stats()",)
    efforts = tuple({"recall": recall} for recall in (0.8, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999))

    def load(self) -> None:
        """Import memhier.ann, and keep faiss to one thread."""
        import_module("faiss").omp_set_num_threads(1)
        self._library = import_module("memhier.ann").ZoomIndex

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Build for the budget; `parameters` are further arguments of `build`."""
        self._library.build(folder / "index", vectors, dram=dram_bytes, **parameters).close()

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Open the index: its budget was set when it was built."""
        self._index = self._library.open(folder / "index")

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search with the effort's arguments."""
        ids: Matrix = self._index.search(queries, k, **effort).ids
        return ids

    def held_bytes(self) -> int:
        """Return the memory that the index reports."""
        return int(self._index.memory_bytes)
