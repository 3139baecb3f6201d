"""Routing of queries to their nearest lists: by comparing all centroids while they are few, by an HNSW graph of many.

Zoom (arXiv 1809.04067) reaches its centroids through HNSW, which makes very many affordable. Up to some twelve thousand
a comparison with all is faster, exact, and takes no DRAM for links, 150 bytes a list. Beyond, the graph keeps every
link that it has room for, as faiss's default pruning left up to half of the lists of some text vectors out of reach. A
few lists stay out of reach, and so do lists around one centroid, which all link to each other: these strays are
compared one by one.
"""

from contextlib import nullcontext
from typing import Any, Self, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.threads import one_thread
from memhier.errors import CorruptionError

__all__ = ["EXACT_LISTS", "Router", "find_strays", "router_bytes_per_list", "routing_cost"]

EXACT_LISTS = 12288
_FOUND_COST, _WALK_COST = 10, 100  # cost of one more list, in codes scanned, when all are compared and by the graph
NEIGHBOURS = 16  # M of HNSW: a node has up to 2 M links on the ground level
_EF_CONSTRUCTION = 80
_QUERIES_FOR_THREADS = 64
_WALKED = 4  # times the lists: the square of the sight of a walk that still pays

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def router_bytes_per_list(padded: int, lists: int) -> int:
    """Return the DRAM bytes of one list: fp16 centroid, start of the list, and beyond 12,288 lists its graph links.

    The links include the room to note a stray.
    """
    links = 4 * (2 * NEIGHBOURS + 2) + 8 + 4 + 4 if lists > EXACT_LISTS else 0
    return 2 * padded + 8 + links


def routing_cost(lists: int, nprobe: float, *, sight: float | None = None) -> float:
    """Return the cost of finding `nprobe` of so many lists, in codes scanned; by a graph with `sight` nodes in sight.

    `sight` is None where no graph is walked, or where there are no copies of a centroid to see past.
    """
    wide = max(2 * nprobe, 32) if sight is None else sight
    if lists <= EXACT_LISTS or wide**2 > _WALKED * lists:
        return lists + _FOUND_COST * nprobe
    return (_WALK_COST + wide / 4) * wide / 2


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
        strays = np.empty(0, np.int64) if self._graph is None else find_strays(self._graph)
        # Strays of one centroid stand together.
        rows = self.centroids[strays].view(np.dtype((np.void, 2 * index.d)))[:, 0]
        _, group, sizes = np.unique(rows, return_inverse=True, return_counts=True)
        self._strays = strays[np.argsort(group, kind="stable")].astype(np.int32)
        self._groups: Ints = np.concatenate([[0], np.cumsum(sizes)])
        self._copies = 0 if self._graph is None else _most_alike(self.centroids) - 1

    @classmethod
    def build(cls, centroids: Floats) -> Self:
        """Return a router over float32 centroids ``[lists, d]``; independent of the number of threads."""
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
        with one_thread():  # the timing of several threads would decide on the links
            index.add(centroids)
        return cls(index)

    @classmethod
    def load(cls, data: npt.NDArray[np.uint8], lists: int, padded: int, path: object) -> Self:
        """Return the router from the bytes of :meth:`save`, checked against the catalog at `path`."""
        try:
            index = faiss.deserialize_index(data)
        except (RuntimeError, MemoryError) as error:
            raise CorruptionError(f"{path}: the router cannot be read: {error}") from error
        if index.ntotal != lists or index.d != padded:
            raise CorruptionError(
                f"{path}: the router holds {index.ntotal} lists of dimension {index.d}: expected {lists} of {padded}"
            )
        # faiss checks none of its numbers.
        is_graph = lists > EXACT_LISTS
        if type(index) is not (faiss.IndexHNSWSQ if is_graph else faiss.IndexScalarQuantizer):
            raise CorruptionError(f"{path}: the router is a faiss {type(index).__name__}")
        storage = faiss.downcast_index(index.storage) if is_graph else index
        if (
            not isinstance(storage, faiss.IndexScalarQuantizer)
            or (storage.ntotal, storage.d, storage.codes.size()) != (lists, padded, 2 * padded * lists)
            or storage.sq.qtype != faiss.ScalarQuantizer.QT_fp16
            or (storage.sq.d, storage.sq.code_size, storage.metric_type) != (padded, 2 * padded, faiss.METRIC_L2)
            or index.metric_type != faiss.METRIC_L2
            or (is_graph and not _links_are_sound(index.hnsw, lists))
        ):
            raise CorruptionError(f"{path}: the router is not one of {lists} centroids in half precision")
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
        return int(links) + self.centroids.nbytes + self._strays.nbytes + self._groups.nbytes

    def cost(self, nprobe: int) -> float:
        """Return the cost of finding so many lists, in codes scanned."""
        return routing_cost(len(self.centroids), nprobe, sight=self._sight(nprobe))

    def _sight(self, nprobe: int) -> int:
        # Lists of one centroid link to each other alone: a walk with room for no others would end among them.
        return max(2 * nprobe, 32) + self._copies

    def _compares_all(self, nprobe: int) -> bool:
        # A walk takes longer with more nodes in sight: at some number a comparison with all is faster.
        return self._graph is None or self._sight(nprobe) ** 2 > _WALKED * len(self.centroids)

    def route(self, queries: Floats, nprobe: int, *, in_order: bool = False, among: Ints | None = None) -> Ints:
        """Return the `nprobe` lists nearest to each query, int64 ``[q, p]``; -1 stands where the graph found fewer.

        They are ordered by distance; a request for all lists is ordered only with `in_order`.

        Parameters
        ----------
        among
            int64 ``[m]``: the lists that count, ascending; None for all. Others are found as well where a walk of the
            graph is faster, unless `nprobe` takes all that count.
        """
        lists = len(self.centroids) if among is None else len(among)
        nprobe = min(nprobe, lists)
        if nprobe == lists and not in_order:
            every = np.arange(lists, dtype=np.int64) if among is None else among
            return np.broadcast_to(every, (len(queries), lists)).copy()
        if among is not None and (nprobe == lists or routing_cost(0, nprobe) + lists < self.cost(nprobe)):
            return self._nearest_among(queries, nprobe, among)
        parameters = None if self._graph is None else faiss.SearchParametersHNSW(efSearch=self._sight(nprobe))
        if backend.core is not None and self._compares_all(nprobe):
            nearest = np.empty((len(queries), nprobe), np.int64)
            backend.core.nearest_rows(queries=queries, rows=self.centroids.view(np.uint16), nearest=nearest)
            return nearest
        with one_thread() if len(queries) < _QUERIES_FOR_THREADS else nullcontext():
            near, probes = self._index.search(queries, nprobe, params=parameters)
        if len(self._strays):
            self._put_strays(queries, near, probes)
        return np.asarray(probes)

    def _nearest_among(self, queries: Floats, nprobe: int, among: Ints) -> Ints:
        """Return the `nprobe` lists of `among` nearest to each query, compared with all of these."""
        nearest = np.empty((len(queries), nprobe), np.int64)
        if backend.core is not None:
            backend.core.nearest_rows(
                queries=queries, rows=self.centroids.view(np.uint16), nearest=nearest, among=among
            )
            return nearest
        for query, row in zip(queries, nearest, strict=True):
            away = np.square(self.centroids[among].astype(np.float32) - query).sum(axis=1)
            row[:] = among[np.argsort(away, kind="stable")[:nprobe]]
        return nearest

    def _put_strays(self, queries: Floats, near: Floats, probes: Ints) -> None:
        """Put in the lists that the graph does not reach, where they are nearer than those found."""
        centroids = self.centroids[self._strays[self._groups[:-1]]].astype(np.float32)
        away = faiss.pairwise_distances(queries, centroids)
        for row in np.flatnonzero((away < near[:, -1:]).any(axis=1)).tolist():
            groups = np.flatnonzero(away[row] < near[row, -1])
            strays = np.concatenate([self._strays[self._groups[each] : self._groups[each + 1]] for each in groups])
            apart = np.repeat(away[row, groups], np.diff(self._groups)[groups])
            fresh = ~np.isin(strays, probes[row])  # the walk reaches some of them from an upper level
            lists = np.concatenate([probes[row], strays[fresh]])
            order = np.argsort(np.concatenate([near[row], apart[fresh]]), kind="stable")
            probes[row] = lists[order[: probes.shape[1]]]


def _most_alike(centroids: npt.NDArray[np.float16]) -> int:
    """Return the most lists around one centroid."""
    rows = centroids.view(np.dtype((np.void, centroids[0].nbytes)))[:, 0]
    return int(np.unique(rows, return_counts=True)[1].max())


def _links_are_sound(graph: Any, lists: int) -> bool:
    """Whether every number in a graph of so many nodes is within its bounds."""
    links, levels = faiss.vector_to_array(graph.neighbors), faiss.vector_to_array(graph.levels)
    offsets = faiss.vector_to_array(graph.offsets).astype(np.int64)
    below = faiss.vector_to_array(graph.cum_nneighbor_per_level).astype(np.int64)  # links of a node up to each level
    if (
        (len(levels), len(offsets)) != (lists, lists + 1)
        or len(below) < 2
        or (np.diff(below) < 0).any()
        or below[0] != 0
        or not (levels.min() >= 1 and levels.max() < len(below))
        or offsets[0] != 0
        or offsets[-1] != len(links)
        or not np.array_equal(np.diff(offsets), below[levels])
        or links.min(initial=-1) < -1
        or links.max(initial=-1) >= lists
        or not 0 <= graph.entry_point < lists
        or not graph.max_level + 1 == levels.max() == levels[graph.entry_point]
    ):
        return False
    for level in range(1, graph.max_level + 1):
        nodes = np.flatnonzero(levels > level)
        of_level = links[offsets[nodes][:, None] + np.arange(below[level], below[level + 1])]
        if (levels[of_level[of_level >= 0]] <= level).any():
            return False
    return True


def find_strays(graph: Any) -> Ints:
    """Return the nodes of the ground level that no walk from the entry point reaches."""
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
