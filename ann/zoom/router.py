"""The way from a query to its nearest lists: all centroids compared while they are few, an HNSW graph over many.

Zoom (arXiv 1809.04067) reaches its centroids through HNSW so that very many are affordable. Up to some twelve thousand
it is faster to compare them all, exact, and takes no DRAM for links: 150 bytes a list. Beyond, the graph keeps every
link it has room for: faiss's default pruning left up to half of the lists of some text vectors out of reach. The few
that still are, every query probes.
"""

from contextlib import nullcontext
from typing import Any, Self, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann._threads import one_thread
from memhier.errors import CorruptionError

__all__ = ["EXACT_LISTS", "Router", "router_bytes_per_list"]

EXACT_LISTS = 12288
NEIGHBOURS = 16  # M of HNSW: a node has up to 2 M links on the ground level
_EF_CONSTRUCTION = 80
_QUERIES_FOR_THREADS = 64

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def router_bytes_per_list(padded: int, lists: int) -> int:
    """Return the DRAM bytes of one list: fp16 centroid, start of the list, and beyond 12,288 lists its graph links."""
    links = 4 * (2 * NEIGHBOURS + 2) + 8 + 4 if lists > EXACT_LISTS else 0
    return 2 * padded + 8 + links


class Router:
    """Centroids of inverted lists in half precision, and the search for the nearest.

    Parameters
    ----------
    index
        faiss's fp16 scalar quantiser, or HNSW over one.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self._graph = index.hnsw if isinstance(index, faiss.IndexHNSW) else None
        storage = index if self._graph is None else faiss.downcast_index(index.storage)
        raw: npt.NDArray[np.uint8] = faiss.rev_swig_ptr(storage.codes.data(), storage.codes.size())
        self.centroids: npt.NDArray[np.float16] = raw.view(np.float16).reshape(index.ntotal, index.d)
        self._strays: Ints = np.empty(0, np.int64) if self._graph is None else _find_strays(self._graph)

    @classmethod
    def build(cls, centroids: Floats) -> Self:
        """Return a router over float32 centroids ``[lists, d]``; the same whatever the number of threads."""
        dimension = centroids.shape[1]
        if len(centroids) <= EXACT_LISTS:
            index = faiss.IndexScalarQuantizer(dimension, faiss.ScalarQuantizer.QT_fp16)
            index.train(centroids)
            index.add(centroids)
            return cls(index)
        index = faiss.IndexHNSWSQ(dimension, faiss.ScalarQuantizer.QT_fp16, NEIGHBOURS)
        index.hnsw.efConstruction = _EF_CONSTRUCTION
        index.keep_max_size_level0 = True
        index.train(centroids)
        with one_thread():  # nodes inserted by several threads link in the order of their timing
            index.add(centroids)
        return cls(index)

    @classmethod
    def load(cls, data: npt.NDArray[np.uint8], lists: int, padded: int) -> Self:
        """Return the router from the bytes of :meth:`save`, checked against what the catalog says."""
        try:
            index = faiss.deserialize_index(data)
        except RuntimeError as error:
            raise CorruptionError(f"the router cannot be read: {error}") from error
        if index.ntotal != lists or index.d != padded:
            raise CorruptionError(
                f"the router holds {index.ntotal} lists of dimension {index.d}: expected {lists} of {padded}"
            )
        return cls(index)

    def save(self) -> npt.NDArray[np.uint8]:
        """Return the router as bytes."""
        data: npt.NDArray[np.uint8] = faiss.serialize_index(self._index)
        return data

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        if self._graph is None:
            return self.centroids.nbytes
        graph = self._graph
        links = 4 * (graph.neighbors.size() + graph.levels.size()) + 8 * graph.offsets.size()
        return int(links) + self.centroids.nbytes + self._strays.nbytes

    def route(self, queries: Floats, nprobe: int) -> Ints:
        """Return the `nprobe` lists nearest to each query, and those that no graph search reaches, int64 ``[q, p]``.

        -1 stands where the graph found fewer.
        """
        lists = len(self.centroids)
        if nprobe >= lists:
            return np.broadcast_to(np.arange(lists, dtype=np.int64), (len(queries), lists)).copy()
        parameters = None if self._graph is None else faiss.SearchParametersHNSW(efSearch=max(2 * nprobe, 32))
        if self._graph is None and backend.core is not None:
            nearest = np.empty((len(queries), nprobe), np.int64)
            backend.core.nearest_rows(queries, self.centroids.view(np.uint16), nearest)
            return nearest
        with one_thread() if len(queries) < _QUERIES_FOR_THREADS else nullcontext():
            probes: Ints = self._index.search(queries, nprobe, params=parameters)[1]
        if not len(self._strays):
            return probes
        strays = np.broadcast_to(self._strays, (len(queries), len(self._strays)))
        # Some are reached after all, from an upper level.
        known = np.stack([np.isin(self._strays, row) for row in probes]) if len(probes) else strays < 0
        return np.hstack([probes, np.where(known, -1, strays)])


def _find_strays(graph: Any) -> Ints:
    """Return the nodes of the ground level that cannot be walked to from the entry point."""
    offsets = faiss.vector_to_array(graph.offsets).astype(np.int64)
    places = offsets[:-1, None] + np.arange(graph.nb_neighbors(0))
    links = faiss.vector_to_array(graph.neighbors)[places]
    reached = np.zeros(len(links), bool)
    front = np.array([graph.entry_point])
    while len(front):
        reached[front] = True
        following = np.unique(links[front])
        front = following[(following >= 0) & ~reached[following]]
    return np.flatnonzero(~reached).astype(np.int64)
