"""Centroids of the inverted lists: k-means, in two levels where one costs too much, without overlong lists.

One level costs ``s * lists * d`` per round for a sample of ``s``; the second splits each of ``sqrt(lists)`` coarse
clusters into its share of lists, which costs ``2 * s * sqrt(lists) * d``. The longest lists are divided again: SPANN
(Chen et al., NeurIPS 2021) balances its lists for the same reason, that a search pays most for the longest. A list
that no division makes shorter, as of copies of one vector, is dealt into several lists around one centroid.
"""

import heapq
from collections.abc import Iterator
from typing import TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.pauses import pause

__all__ = [
    "LONGEST",
    "Assigner",
    "apportion",
    "assigning_work",
    "deal_out",
    "pieces_of",
    "sizes_of",
    "train_centroids",
    "training_rows",
    "training_work",
]

_FLAT_LISTS = 512
_EXACT_ASSIGN = 2048
_GROUPS_VISITED = 6
_ROUNDS = 10
_DIVIDED = 8  # one list in eight comes from dividing the longest
_ROWS_PER_CENTROID = 48
_SAMPLE_BYTES = 256 << 20
LONGEST = 4  # times the mean: the most rows of a list
_LOOKED_AT = 4  # candidates for each list that is given up
_PIECE = 1 << 18  # vectors
_SEEDS = 2**31 - 1  # the limit of faiss; a divided cluster adds its number to the seed of the index

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def training_rows(lists: int, dimension: int, least: int) -> int:
    """Return how many vectors to sample: enough for the lists, at least `least`, in at most 256 MiB of float32."""
    affordable = _SAMPLE_BYTES // (4 * dimension)
    return max(lists, min(max(_ROWS_PER_CENTROID * lists, least), affordable))


def training_work(lists: int, sample: int) -> float:
    """Return how often :func:`train_centroids` compares a vector with a centroid, for so many lists and vectors."""
    if lists >= sample:
        return float(sample)
    first = lists - lists // _DIVIDED
    return float(_ROUNDS * sample * (first if first <= _FLAT_LISTS else 2 * first**0.5))


def assigning_work(lists: int) -> float:
    """Return the number of centroids that an :class:`Assigner` compares one vector with."""
    return float(lists) if lists <= _EXACT_ASSIGN else (1 + _GROUPS_VISITED) * lists**0.5


def train_centroids(sample: Floats, lists: int, seed: int) -> Floats:
    """Train centroids float32 ``[lists, d]`` for vectors like those of `sample`; independent of the number of threads.

    Parameters
    ----------
    sample
        float32 ``[s, d]``.
    lists
        Number of centroids; at most ``s`` of them differ.
    seed
        Fixes every random choice.
    """
    if lists >= len(sample):
        return _kmeans(sample, lists, seed)
    first = lists - lists // _DIVIDED
    if first <= _FLAT_LISTS:
        centroids = _kmeans(sample, first, seed)
        clusters = _members(_nearest(sample, centroids), len(centroids))
    else:
        centroids, clusters = _two_levels(sample, first, seed)
    return _divide_longest(sample, centroids, clusters, lists, seed)


def _two_levels(sample: Floats, lists: int, seed: int) -> tuple[Floats, list[Ints]]:
    """Return k-means centroids and the rows of the sample that each has."""
    coarse = _kmeans(sample, int(lists**0.5), seed)
    groups = _members(_nearest(sample, coarse), len(coarse))
    shares = apportion(np.array([len(rows) for rows in groups]), lists)
    centroids, clusters = [], []
    for number, (rows, share) in enumerate(zip(groups, shares.tolist(), strict=True)):
        if share:
            some = sample[rows]
            fine = _kmeans(some, share, seed + number)
            centroids.append(fine)
            clusters += [rows[each] for each in _members(_nearest(some, fine), share)]
    return np.concatenate(centroids), clusters


def _divide_longest(sample: Floats, centroids: Floats, clusters: list[Ints], lists: int, seed: int) -> Floats:
    """Return `lists` centroids: the longest of `clusters` is divided into two, over and over."""
    kept = list(centroids)
    longest = [(-len(rows), number) for number, rows in enumerate(clusters) if len(rows) > 1]
    heapq.heapify(longest)
    while longest and len(kept) < lists:
        _, number = heapq.heappop(longest)
        rows = clusters[number]
        halves = _kmeans(sample[rows], 2, seed + number)
        near = _nearest(sample[rows], halves)
        clusters[number] = rows[near == 0]
        clusters.append(rows[near == 1])
        kept[number] = halves[0]
        kept.append(halves[1])
        for each in (number, len(kept) - 1):
            # Copies of one vector stay together, however often they are divided.
            if 1 < len(clusters[each]) < len(rows):
                heapq.heappush(longest, (-len(clusters[each]), each))
    return np.stack(kept)[np.arange(lists) % len(kept)]


def deal_out(lists: npt.NDArray[np.int32], centroids: Floats) -> npt.NDArray[np.bool_]:
    """Make no list longer than four times the mean (rounded up), in place; return which lists have another centroid.

    A longer list is dealt, in the order of its vectors, into the fewest lists that may hold it, all of one centroid.
    It takes lists of at most twice the mean whose own vectors lose least by going to the nearest list with room.

    Parameters
    ----------
    lists
        int32 ``[n]``: the list of each vector.
    centroids
        float32 ``[lists, d]``.

    Notes
    -----
    There always is room. Let the overlong lists of ``L`` hold a share ``s`` of the vectors: they become fewer than
    ``s L / 2`` lists. Fewer than ``(1 - s) L / 2`` of the others have more than twice the mean, so there are enough to
    give up. The lists that stay hold at most the mean on average; with one that is given up they hold at most three
    times the mean.
    """
    count = len(centroids)
    most = -(-LONGEST * len(lists) // count)
    sizes = sizes_of(lists, count)
    long = np.flatnonzero(sizes > most)
    changed = np.zeros(count, np.bool_)
    if not len(long):
        return changed
    pieces = -(-sizes[long] // most)
    room = np.where(sizes > most, -1, most - sizes)
    free = _cheapest(centroids, sizes, np.flatnonzero(sizes <= 2 * len(lists) / count), int((pieces - 1).sum()))
    room[free] = -1
    number, norms = np.arange(count), np.einsum("ij,ij->i", centroids, centroids)
    for each in free[sizes[free] > 0].tolist():
        away = norms - 2 * np.einsum("ij,j->i", centroids, centroids[each])  # BLAS's sums may depend on its threads
        nearest = int(np.where(room >= sizes[each], away, np.inf).argmin())
        room[nearest] -= sizes[each]
        number[each] = nearest
    is_long = sizes > most
    found = [np.empty(0, np.int64)]
    for part in pieces_of(len(lists)):
        lists[part] = number[lists[part]]
        found.append(part.start + np.flatnonzero(is_long[lists[part]]))
    rows = np.concatenate(found)
    rows = rows[np.argsort(lists[rows], kind="stable")]
    for each, share in zip(long.tolist(), pieces.tolist(), strict=True):
        taken, free = free[: share - 1], free[share - 1 :]
        own, rows = rows[: sizes[each]], rows[sizes[each] :]
        # The first vectors go to the list of the lowest number: a search takes it first among equally far centroids.
        lists[own] = np.sort(np.append(taken, each))[np.arange(len(own)) * share // len(own)]
        centroids[taken], changed[taken] = centroids[each], True
    return changed


def sizes_of(lists: npt.NDArray[np.int32], count: int) -> Ints:
    """Return the number of vectors of each of `count` lists, from the list of each vector."""
    sizes = np.zeros(count, np.int64)
    for part in pieces_of(len(lists)):
        sizes += np.bincount(lists[part], minlength=count)
    return sizes


def pieces_of(count: int) -> Iterator[slice]:
    """Yield slices of some hundred thousand, which together are `count` long: copies of all would take much DRAM."""
    for start in range(0, count, _PIECE):
        yield slice(start, min(start + _PIECE, count))


def _cheapest(centroids: Floats, sizes: Ints, lists: Ints, count: int) -> Ints:
    """Return `count` of the given lists, with few vectors near another centroid, the fewest vectors first."""
    lists = lists[np.argsort(sizes[lists], kind="stable")][: _LOOKED_AT * count]
    # The first centroid found is the own one, or a copy.
    cost = sizes[lists] * faiss.knn(centroids[lists], centroids, 2)[0][:, 1]
    chosen = lists[np.argsort(cost, kind="stable")[:count]]
    return chosen[np.argsort(sizes[chosen], kind="stable")]


def _members(numbers: Ints, count: int) -> list[Ints]:
    """Return the rows of each number below `count`, ascending."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.cumsum(np.bincount(numbers, minlength=count))[:-1])


def _nearest(sample: Floats, centroids: Floats) -> Ints:
    index = faiss.IndexFlatL2(sample.shape[1])
    index.add(centroids)
    found: Ints = index.search(sample, 1)[1][:, 0]
    return found


def apportion(sizes: Ints, lists: int) -> Ints:
    """Share `lists` out in proportion to `sizes`, exactly, at most one for each member."""
    exact = sizes * (lists / sizes.sum())
    shares: Ints = np.minimum(np.floor(exact).astype(np.int64), sizes)
    for cluster in np.argsort(shares - exact, kind="stable")[: lists - int(shares.sum())]:
        shares[cluster] += 1
    return shares


def _distinct(sample: Floats, most: int) -> Floats | None:
    """Return the distinct vectors of a sample; None if there are more than `most`."""
    rows = np.ascontiguousarray(sample).view(np.dtype((np.void, sample[0].nbytes)))[:, 0]
    step, first = 2 * most + _FLAT_LISTS, np.empty(0, np.int64)
    for start in range(0, len(rows), step):  # mostly a few rows show that there are many
        some = np.append(first, np.arange(start, min(start + step, len(rows))))
        first = some[np.unique(rows[some], return_index=True)[1]]
        if len(first) > most:
            return None
    return sample[np.sort(first)]


def _kmeans(sample: Floats, clusters: int, seed: int) -> Floats:
    pause()
    if clusters >= len(sample):
        return sample[np.resize(np.arange(len(sample)), clusters)]
    few = _distinct(sample, clusters)
    if few is not None:  # to make as many centroids, k-means would move them off their vectors
        return few[np.resize(np.arange(len(few)), clusters)]
    trainer = faiss.Kmeans(
        sample.shape[1], clusters, niter=_ROUNDS, seed=seed % _SEEDS, min_points_per_centroid=1,
        max_points_per_centroid=_ROWS_PER_CENTROID,
    )  # fmt: skip
    trainer.train(sample)
    return np.asarray(trainer.centroids, dtype=np.float32)


class Assigner:
    """Finds the nearest of many centroids for many vectors at a time, by matrix products.

    It compares a vector with all of up to 2,048 centroids. More centroids are grouped, and a vector is compared with
    those of the nearest groups: some four times faster than a graph, and as often right.

    Parameters
    ----------
    centroids
        float32 ``[lists, d]``.
    seed
        Fixes the groups.
    """

    def __init__(self, centroids: Floats, seed: int) -> None:
        self._centroids = centroids
        self._groups: list[Ints] = []
        if len(centroids) <= _EXACT_ASSIGN:
            return
        coarse = _kmeans(centroids, int(len(centroids) ** 0.5), seed)
        # Copies of one centroid leave groups empty; these would only take the place of others.
        used, member = np.unique(_nearest(centroids, coarse), return_inverse=True)
        self._coarse = coarse[used]
        self._groups = _members(member, len(used))

    def assign(self, vectors: Floats) -> npt.NDArray[np.int32]:
        """Return the list of each vector, int32 ``[n]``."""
        if not self._groups:
            return _nearest(vectors, self._centroids).astype(np.int32)
        index = faiss.IndexFlatL2(vectors.shape[1])
        index.add(self._coarse)
        visited = index.search(vectors, min(_GROUPS_VISITED, len(self._groups)))[1]
        best = np.full(len(vectors), np.inf, np.float32)
        lists = np.zeros(len(vectors), np.int32)
        for number, group in enumerate(self._groups):
            rows = np.flatnonzero((visited == number).any(axis=1))
            if not len(rows):
                continue
            near, place = faiss.knn(vectors[rows], self._centroids[group], 1)
            better = near[:, 0] < best[rows]
            best[rows[better]] = near[better, 0]
            lists[rows[better]] = group[place[better, 0]]
        return lists
