"""The scan of product-quantised codes in inverted lists, compiled or in NumPy."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend

__all__ = ["CODES_PER_BOOK", "ProductLists", "pq_scan"]

CODES_PER_BOOK = 256  # one byte selects a sub-centroid

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProductLists:
    """Product-quantised codes in list order, and the sub-centroids that they stand for.

    Attributes
    ----------
    centroids
        float16 ``[lists, d]``; a code describes the residual to its list's centroid.
    starts
        int64 ``[lists + 1]``: list ``l`` holds the codes ``starts[l]`` to ``starts[l + 1]``.
    codes
        uint8 ``[n, m]``.
    codebook
        float32 ``[m, width, 256]`` with ``m * width == d``: sub-centroids, transposed.
    """

    centroids: npt.NDArray[np.float16]
    starts: Ints
    codes: npt.NDArray[np.uint8]
    codebook: Floats


def pq_scan(
    queries: Floats, probes: Ints, lists: ProductLists, k: int, *, inner: bool = False
) -> tuple[Ints, Floats, int]:
    """Return the `k` codes nearest to each query among the probed lists, by asymmetric distance.

    Source: Jégou, Douze and Schmid, *Product Quantization for Nearest Neighbor Search*, 2011.

    Parameters
    ----------
    queries
        float32 ``[q, d]``.
    probes
        int64 ``[q, p]``: the lists each query visits, -1 for none.
    k
        Candidates kept per query.
    inner
        Whether distances are ``-2 <q, x>``, and not squared ones.

    Returns
    -------
    positions, distances, scanned
        int64 and float32 ``[q, k]``, nearest first, ties by position, padded with -1 at infinite distance; and the
        number of codes scanned. Work is ``O(p * 256 * d + scanned * m)`` per query.
    """
    positions = np.empty((len(queries), k), np.int64)
    distances = np.empty((len(queries), k), np.float32)
    if (core := backend.core) is not None:
        compiled = core.ProductLists(
            centroids=lists.centroids.view(np.uint16), starts=lists.starts, codes=lists.codes, codebook=lists.codebook
        )
        scanned = core.pq_scan(
            queries=queries, probes=probes, lists=compiled, inner=inner, positions=positions, distances=distances
        )
        return positions, distances, scanned
    total = 0
    for query, visited, row, row_distances in zip(queries, probes, positions, distances, strict=True):
        total += _scan_one(query, visited[visited >= 0], lists, inner, row, row_distances)
    return positions, distances, total


def _scan_one(query: Floats, probes: Ints, lists: ProductLists, inner: bool, positions: Ints, distances: Floats) -> int:
    centroids, starts, codes, codebook = lists.centroids, lists.starts, lists.codes, lists.codebook
    subvectors, width, _ = codebook.shape
    columns = np.arange(subvectors)
    found: list[Ints] = [np.empty(0, np.int64)]
    found_distances: list[Floats] = [np.empty(0, np.float32)]
    for number in probes:
        start, stop = int(starts[number]), int(starts[number + 1])
        if inner:
            base = np.float32(-2) * (query @ centroids[number].astype(np.float32))
            table = -2 * (query.reshape(subvectors, width, 1) * codebook).sum(axis=1, dtype=np.float32)
        else:
            base = np.float32(0)
            residual = (query - centroids[number]).reshape(subvectors, width, 1)
            table = np.square(residual - codebook).sum(axis=1, dtype=np.float32)
        found.append(np.arange(start, stop))
        found_distances.append(base + table[columns, codes[start:stop]].sum(axis=1, dtype=np.float32))
    where, distance = np.concatenate(found), np.concatenate(found_distances)
    order = np.lexsort((where, distance))[: len(positions)]
    positions[:], distances[:] = -1, np.inf
    positions[: len(order)], distances[: len(order)] = where[order], distance[order]
    return len(where)
