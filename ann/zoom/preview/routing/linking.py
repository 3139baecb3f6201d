"""The links of a graph over centroids: near ones by the MRNG rule, and a path to every list from the first.

Candidates come from lists of like centroids, and then from walks over the links chosen among these. Both are searched
by one thread or by many with the same result.
"""

from typing import TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.links import links_as_rows, prune_links, with_reverse
from memhier.ann.threads import one_thread
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.routing.list_graph import DEGREE, LAYER, NONE, ListGraph

__all__ = ["first_of_copies", "link_lists"]

_NEAR = 48  # candidates for the links of a list
_VISITED = 8  # lists of like centroids that are searched
_ROUNDS = 8
_PER_GROUP = 40
_BLOCK = 1024
_HOSTS = 8  # lists near one out of reach that may take a link to it
_SIGHT = 32

Floats: TypeAlias = npt.NDArray[np.float32]
Halves: TypeAlias = npt.NDArray[np.float16]
Ints: TypeAlias = npt.NDArray[np.int64]
Links: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]


def link_lists(centroids: Halves, degree: int = DEGREE) -> Links:
    """Return the links of lists with these centroids, int32 ``[lists, degree]``; see
    :class:`memhier.ann.zoom.preview.routing.list_graph.ListGraph`.

    Parameters
    ----------
    centroids
        float16 ``[lists, d]``.
    """
    first = first_of_copies(centroids)
    nodes = np.flatnonzero(first == np.arange(len(first)))
    rows = centroids[nodes].astype(np.float32)
    near = _link_layers(rows, degree)
    links = np.full((len(centroids), degree), NONE, np.int32)
    links[nodes] = np.where(near >= 0, nodes[near], NONE)
    _chain_copies(links, first)
    _connect(links, centroids)
    return links


def first_of_copies(centroids: Halves) -> Ints:
    """Return for each list the first with the same centroid."""
    rows = np.ascontiguousarray(centroids)
    raw = rows.view(np.dtype((np.void, rows[0].nbytes)))[:, 0]
    _, first, group = np.unique(raw, return_index=True, return_inverse=True)
    return np.asarray(first[group], np.int64)


def _chain_copies(links: Links, first: Ints) -> None:
    """Let each list name the next of its centroid, in its last place."""
    order = np.argsort(first, kind="stable")
    before, after = order[:-1], order[1:]
    same = first[before] == first[after]
    links[before[same], -1] = NONE - 1 - after[same]


def _link_layers(rows: Floats, degree: int) -> Ints:
    """Return links between rows that all differ, int64 ``[n, degree]``, -1 for none.

    Some of the rows give up to half of their places to links between each other, and so on among these. A walk crosses
    by them between clusters, as by the upper layers of HNSW.
    """
    links = _link_near(rows, degree)
    some = np.arange(0, len(rows), LAYER)
    if len(some) > 1 and degree > 1:
        far = _link_layers(rows[some], degree // 2)
        near = degree - far.shape[1]
        for each, others in zip(some.tolist(), np.where(far >= 0, some[far], NONE).tolist(), strict=True):
            own = links[each].tolist()
            row = dict.fromkeys(own[:near] + others + own[near:])
            row.pop(NONE, None)
            links[each] = (list(row) + [NONE] * degree)[:degree]
    return links


def _link_near(rows: Floats, degree: int) -> Ints:
    """Return the links between near rows that all differ, int64 ``[n, degree]``, -1 for none."""
    count = len(rows)
    lists = min(count, int(2 * count**0.5))
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(rows.shape[1]), rows.shape[1], lists)
    index.own_fields, index.cp.niter, index.nprobe = False, _ROUNDS, _VISITED
    index.cp.min_points_per_centroid = 1
    with one_thread():
        index.train(rows[:: max(1, count // (_PER_GROUP * lists))])
    index.add(rows)
    links = np.empty((count, degree), np.uint32)
    for start in range(0, count, _BLOCK):
        pause()
        some = np.arange(start, min(start + _BLOCK, count))
        near = index.search(rows[some], min(_NEAR + 1, count))[1]
        links[some] = prune_links(rows, some, near, degree)
    return links_as_rows(with_reverse(links, rows, np.arange(count)))


def _connect(links: Links, centroids: Halves) -> None:
    """Lead to every list that is out of reach from a near one within reach, in place.

    The links by which a search from the seeds first reached the lists stay, so that all remain within reach. The graph
    has more places than these take.
    """
    graph = ListGraph(centroids, links)
    copies = graph.copies()
    missing = np.flatnonzero(~(graph.reached() | copies))
    if not len(missing):
        return
    reached, needed = np.zeros(len(links), np.bool_), np.zeros(links.shape, np.bool_)
    reached[graph.seeds] = True
    _spread(links, graph.seeds, reached, needed)
    rows = centroids[missing].astype(np.float32)
    hosts = graph.walk(rows, _HOSTS, _SIGHT)
    apart = np.square(rows - centroids[hosts[:, 0]].astype(np.float32)).sum(axis=1)
    for place in np.argsort(apart, kind="stable").tolist():
        pause()
        if reached[missing[place]]:
            continue
        near = hosts[place]
        near = near[(near >= 0) & ~copies[near]]
        if not _take(links, needed, near, missing[place]):
            free = np.flatnonzero(reached & ~copies)
            away = np.square(centroids[free].astype(np.float32) - rows[place]).sum(axis=1)
            _take(links, needed, free[np.argsort(away, kind="stable")], missing[place])
        reached[missing[place]] = True
        _spread(links, missing[place : place + 1], reached, needed)


def _take(links: Links, needed: Flags, hosts: Ints, one: np.int64) -> bool:
    """Let the first of the hosts with a place that is not needed lead to a list; return False where there is none."""
    for host in hosts.tolist():
        places = np.flatnonzero(~needed[host] & (links[host] >= NONE))
        if len(places):
            empty = places[links[host, places] == NONE]
            place = empty[0] if len(empty) else places[-1]
            links[host, place], needed[host, place] = one, True
            return True
    return False


def _spread(links: Links, front: Ints | Links, reached: Flags, needed: Flags) -> None:
    """Reach all lists that those of `front` lead to, and note the link by which each was first reached."""
    while len(front):
        others = links[front]
        rows, places = np.nonzero(others >= 0)
        targets = others[rows, places]
        fresh = np.flatnonzero(~reached[targets])
        following, first = np.unique(targets[fresh], return_index=True)
        needed[front[rows[fresh[first]]], places[fresh[first]]] = True
        reached[following] = True
        front = following
