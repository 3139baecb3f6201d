"""Intel's Scalable Vector Search: a Vamana graph over float16 or LVQ-compressed vectors, all in DRAM."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer, row_blocks

__all__ = ["Peer"]

_LVQ_BITS = {"lvq8": (8, 0), "lvq4x4": (4, 4), "lvq4x8": (4, 8)}


class Peer(SearchPeer):
    """Vamana in DRAM; `kind` is the format of its vectors."""

    name = "svs"
    package = "scalable-vs"
    install = ("scalable-vs>=0.5",)
    io = "none"
    batch = True
    traps = (
        "LVQ runs on Intel's processors alone: elsewhere it ends with these words, and only float16 is compared",
        "installed as scalable-vs, imported as svs",
        "alpha has no default that prunes: 1.2 for L2, as its manual says",
        "LVQ compresses from a file, not from an array: the vectors are written beside the index and removed",
        "the graph takes 4 bytes a link beside the vectors; no cap is set on its DRAM: a reference only",
    )
    build_parameters: ClassVar[dict[str, Any]] = {"kind": "float16", "degree": 32, "window": 128}
    efforts = tuple({"window": window} for window in (10, 15, 20, 30, 40, 60, 100, 200, 400))

    def load(self) -> None:
        """Import svs."""
        self._library = import_module("svs")

    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Build with one thread and save graph and vectors."""
        svs, kind = self._library, parameters["kind"]
        limits = svs.VamanaBuildParameters(
            alpha=1.2, graph_max_degree=parameters["degree"], window_size=parameters["window"]
        )
        source: Any
        if kind == "float16":
            source = np.concatenate([block.astype(np.float16) for block in row_blocks(vectors)])
        else:
            svs.write_vecs(np.asarray(vectors), str(folder / "whole.fvecs"))
            primary, residual = _LVQ_BITS[kind]
            loader = svs.VectorDataLoader(str(folder / "whole.fvecs"), svs.DataType.float32, vectors.shape[1])
            source = svs.LVQLoader(loader, primary=primary, residual=residual)
        index = svs.Vamana.build(limits, source, svs.DistanceType.L2, num_threads=1)
        index.save(*(str(folder / part) for part in ("config", "graph", kind)))
        (folder / "whole.fvecs").unlink(missing_ok=True)

    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Load graph and vectors; the name of the vectors' folder is their format."""
        svs = self._library
        kind = next(path.name for path in folder.iterdir() if path.name not in ("config", "graph"))
        vectors = svs.VectorDataLoader(str(folder / kind), svs.DataType.float16)
        if kind != "float16":
            primary, residual = _LVQ_BITS[kind]
            vectors = svs.LVQLoader(vectors, primary=primary, residual=residual).reload_from(str(folder / kind))
        self._index = svs.Vamana(
            str(folder / "config"), svs.GraphLoader(str(folder / "graph")), vectors, svs.DistanceType.L2, num_threads=1
        )
        self._bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Search with a buffer of `window` candidates."""
        self._index.search_window_size = max(int(effort["window"]), k)
        ids: Matrix = self._index.search(queries, k)[0].astype(np.int64)
        return ids

    def held_bytes(self) -> int:
        """Return the size of the files, all of which are in DRAM."""
        return self._bytes
