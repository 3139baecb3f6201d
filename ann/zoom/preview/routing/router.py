"""Routing of queries to their nearest lists: by comparing all centroids while they are few, by a graph of many.

Zoom (arXiv 1809.04067) reaches its centroids through a graph, which makes very many affordable. Up to some twelve
thousand a comparison with all is faster, exact, and takes no DRAM for links, 97 bytes a list. Beyond, the links are
those of :mod:`memhier.ann.zoom.preview.routing.linking`, and a walk follows them, unless so many lists are wanted that
a comparison is faster.
"""

from functools import lru_cache
from typing import Any, Self, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.preview.routing.linking import first_of_copies, link_lists
from memhier.ann.zoom.preview.routing.list_graph import DEGREE, ListGraph, link_bytes
from memhier.errors import CorruptionError

__all__ = ["EXACT_LISTS", "WIDER", "Router", "router_bytes_per_list", "routing_cost", "walk_sight"]

EXACT_LISTS = 12288
_EVERY, _COMPARED_CHOSEN, _COMPARED = -2, -1, 0  # ways to lists beside the sight of a walk, as the native core has them
WIDER = 4  # times as many lists, where those before do not suffice
_FOUND_COST = 10  # of one more list that is found, in codes scanned
# Of a walk, and of each list that it goes on from. For 64 lists it takes less in a batch from 16,384 lists on, alone
# from 9,000 on (`python -m memhier.benchmarks.workloads.search.routing`).
_WALK_COST, _STEP_COST = 3000, 40
_COMPARED_VALUES = 1 << 22  # values compared at a time without the compiled core

Floats: TypeAlias = npt.NDArray[np.float32]
Halves: TypeAlias = npt.NDArray[np.float16]
Ints: TypeAlias = npt.NDArray[np.int64]


def router_bytes_per_list(padded: int, lists: int) -> int:
    """Return the DRAM bytes of one list: fp16 centroid, start of the list, and beyond 12,288 lists its graph links."""
    return 2 * padded + 8 + (link_bytes() if lists > EXACT_LISTS else 0)


def routing_cost(lists: int, nprobe: float) -> float:
    """Return the cost of finding `nprobe` of so many lists, in codes scanned."""
    compared = lists + _FOUND_COST * nprobe
    return compared if lists <= EXACT_LISTS else min(compared, _walk_cost(nprobe))


def walk_sight(nprobe: float) -> float:
    """Return the sight of a walk that finds .99 of `nprobe` lists.

    The figures are of ``python -m memhier.benchmarks.workloads.search.routing``.
    """
    return 192 + 0.7 * nprobe


def _walk_cost(nprobe: float) -> float:
    return _WALK_COST + _STEP_COST * walk_sight(nprobe)


class Router:
    """Centroids of inverted lists in half precision, and the search for the nearest.

    Parameters
    ----------
    centroids
        float16 ``[lists, d]``.
    graph
        A graph over them; None to compare all.
    """

    def __init__(self, centroids: Halves, graph: ListGraph | None) -> None:
        self.centroids = centroids
        self._graph = graph
        self._copies: list[Ints] | None = None

    @classmethod
    def build(cls, centroids: Floats) -> Self:
        """Return a router over float32 centroids ``[lists, d]``; independent of the number of threads."""
        halves = centroids.astype(np.float16)
        graph = ListGraph(halves, link_lists(halves)) if len(halves) > EXACT_LISTS else None
        return cls(halves, graph)

    @classmethod
    def load(cls, data: npt.NDArray[np.uint8], lists: int, padded: int, path: object) -> Self:
        """Return the router from the bytes of :meth:`save`, checked against the catalog at `path`.

        It reads the faiss serialisation of earlier versions as well, and then links the lists anew.
        """
        links_end = 4 * DEGREE * lists if lists > EXACT_LISTS else 0
        if len(data) != links_end + 2 * padded * lists:
            return cls.build(_centroids_of_faiss(data, lists, padded, path))
        centroids = data[links_end:].view(np.float16).reshape(lists, padded)
        if not links_end:
            return cls(centroids, None)
        links = data[:links_end].view(np.int32).reshape(lists, DEGREE)
        fault = ListGraph.fault(centroids, links)
        if fault is not None:
            raise CorruptionError(f"{path}: the router is broken: {fault}")
        return cls(centroids, ListGraph(centroids, links))

    def save(self) -> npt.NDArray[np.uint8]:
        """Return the router as bytes: the links, if there are any, and the centroids."""
        parts: list[npt.NDArray[Any]] = [self.centroids] if self._graph is None else [self._graph.links, self.centroids]
        return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        copies = sum([each.nbytes for each in self._copies or ()])
        return self.centroids.nbytes + copies + (0 if self._graph is None else self._graph.memory_bytes)

    def copies(self, axes: int) -> list[Ints]:
        """Return the lists of each centroid that several have, ascending; the first `axes` coordinates count.

        `axes` is the same at each call.
        """
        if self._copies is None:
            sums = np.einsum("ij->i", self.centroids[:, :axes], dtype=np.float64)
            order = np.argsort(sums, kind="stable")
            alike = np.split(order, np.flatnonzero(np.diff(sums[order])) + 1)
            some = [each for each in alike if len(each) > 1]
            firsts = [first_of_copies(self.centroids[each, :axes]) for each in some]
            groups = [
                each[firsts == first] for each, firsts in zip(some, firsts, strict=True) for first in np.unique(firsts)
            ]
            self._copies = [group for group in groups if len(group) > 1]
        return self._copies

    def cost(self, nprobe: int) -> float:
        """Return the cost of finding so many lists, in codes scanned."""
        return routing_cost(len(self.centroids), nprobe)

    def route(self, queries: Floats, nprobe: int, *, in_order: bool = False, among: Ints | None = None) -> Ints:
        """Return the `nprobe` lists nearest to each query, int64 ``[q, p]``; -1 stands where the graph found fewer.

        They are ordered by distance; a request for all lists is ordered only with `in_order`.

        Parameters
        ----------
        among
            int64 ``[m]``: the lists that count, ascending; None for all. Others are found as well where a walk of the
            graph is faster, unless `nprobe` takes all that count.
        """
        chosen = None if among is None else len(among)
        ((wanted, way), *_) = self.routes(nprobe, in_order=in_order, chosen=chosen).tolist()
        if way == _EVERY:
            all_lists = np.arange(wanted, dtype=np.int64) if among is None else among
            return np.broadcast_to(all_lists, (len(queries), wanted)).copy()
        if way <= _COMPARED:
            return self._nearest(queries, wanted, among if way == _COMPARED_CHOSEN else None)
        assert self._graph is not None
        return self._graph.walk(queries, wanted, way)

    def routes(self, nprobe: int, *, in_order: bool, chosen: int | None) -> Ints:
        """Return the numbers of lists that a query is routed to, each where those before do not suffice.

        Of each also the way to them, int64 ``[s, 2]``: -2 for all that count, in the order of their numbers; -1 for a
        comparison with these, 0 with all; above zero, the sight of a walk. `chosen` lists count; None for all. The
        other parameters are those of :meth:`route`.
        """
        return _routes(len(self.centroids), self._graph is not None, chosen, nprobe, in_order)

    @property
    def compiled(self) -> Any:
        """The ways to lists as the native core takes them."""
        core, graph = backend.core, self._graph
        assert core is not None
        return core.ListRouting(
            links=None if graph is None else graph.links, seeds=None if graph is None else graph.seeds
        )

    def _nearest(self, queries: Floats, nprobe: int, among: Ints | None) -> Ints:
        """Return the `nprobe` lists of `among`, or of all, nearest to each query, compared with all of these."""
        nearest = np.empty((len(queries), nprobe), np.int64)
        if backend.core is not None:
            backend.core.nearest_rows(
                queries=queries, rows=self.centroids.view(np.uint16), nearest=nearest, among=among
            )
            return nearest
        lists = np.arange(len(self.centroids)) if among is None else among
        centroids = self.centroids[lists].astype(np.float32)
        step = max(1, _COMPARED_VALUES // max(1, centroids.size))
        for start in range(0, len(queries), step):
            away = np.square(queries[start : start + step, None] - centroids).sum(axis=2)
            nearest[start : start + step] = lists[np.argsort(away, axis=1, kind="stable")[:, :nprobe]]
        return nearest


@lru_cache(maxsize=256)
def _routes(every: int, has_graph: bool, chosen: int | None, nprobe: int, in_order: bool) -> Ints:
    """Return the routes of :meth:`Router.routes` through `every` list, of which `chosen` count; None for all."""
    lists = every if chosen is None else chosen
    routes: list[tuple[int, int]] = []
    while not routes or routes[-1][0] < lists:
        wanted = min(WIDER * max(1, routes[-1][0]) if routes else nprobe, lists)
        compared_few = chosen is not None and routing_cost(0, wanted) + lists < routing_cost(every, wanted)
        if wanted == lists and not in_order:
            way = _EVERY
        elif chosen is not None and (wanted == lists or compared_few):
            way = _COMPARED_CHOSEN
        elif not has_graph or _walk_cost(wanted) >= every + _FOUND_COST * wanted:
            way = _COMPARED
        else:
            way = int(walk_sight(wanted))
        routes.append((wanted, way))
    found = np.array(routes, np.int64)
    found.flags.writeable = False
    return found


def _centroids_of_faiss(data: npt.NDArray[np.uint8], lists: int, padded: int, path: object) -> Floats:
    """Return the centroids of a router of an earlier version: faiss's fp16 scalar quantiser, or HNSW over one."""
    try:
        index = faiss.deserialize_index(data)
    except (RuntimeError, MemoryError) as error:
        raise CorruptionError(f"{path}: the router cannot be read: {error}") from error
    storage = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSWSQ) else index
    if (
        type(storage) is not faiss.IndexScalarQuantizer
        or (storage.ntotal, storage.d, storage.codes.size()) != (lists, padded, 2 * padded * lists)
        or storage.sq.qtype != faiss.ScalarQuantizer.QT_fp16
    ):
        raise CorruptionError(f"{path}: the router is not one of {lists} centroids in half precision")
    raw: npt.NDArray[np.uint8] = faiss.vector_to_array(storage.codes)
    return raw.view(np.float16).reshape(lists, padded).astype(np.float32)
