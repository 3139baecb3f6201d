"""Exact search, and recall against it."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

__all__ = ["distances_of", "exact_neighbours", "id_recall", "nearest", "recall_at_k"]

Matrix: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]

_BLOCK_ROWS = 65536


def exact_neighbours(base: Matrix, queries: Matrix, k: int, metric: str = "l2") -> tuple[npt.NDArray[np.int64], Floats]:
    """Return row numbers and distances of the true neighbours, ``[q, k]``, comparing every vector in blocks.

    Distances are those of :class:`memhier.ann.SearchResult`.
    """
    return nearest(
        (base[start : start + _BLOCK_ROWS] for start in range(0, len(base), _BLOCK_ROWS)), queries, k, metric
    )


def nearest(
    blocks: Iterable[Matrix], queries: Matrix, k: int, metric: str = "l2"
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the same for vectors in blocks."""
    matrix = _prepare(queries, metric)
    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    sign = np.float32(1 if metric == "l2" else -1)
    best = np.full((len(matrix), k), np.inf, np.float32)
    rows = np.full((len(matrix), k), -1, np.int64)
    start = 0
    for raw in blocks:
        block = _prepare(raw, metric)
        near, found = faiss.knn(matrix, block, min(k, len(block)), metric=kind)
        near, found = np.hstack([best, sign * near]), np.hstack([rows, found + start])
        order = np.argsort(near, axis=1, kind="stable")[:, :k]
        best, rows = np.take_along_axis(near, order, 1), np.take_along_axis(found, order, 1)
        start += len(block)
    return rows, best + np.float32(1) if metric == "cosine" else best


def recall_at_k(found: Floats, true: Floats, tolerance: float = 1e-5) -> float:
    """Return the share of answers as near as the true k-th neighbour, so that ties count.

    Parameters
    ----------
    found, true
        Distances ``[q, k]``, nearest first.
    tolerance
        Relative to the k-th distance, for the rounding of float32.
    """
    limit = true[:, -1:] + tolerance * np.maximum(np.abs(true[:, -1:]), 1.0)
    return float((found <= limit).mean())


def id_recall(found: npt.NDArray[np.int64], true: npt.NDArray[np.int64]) -> float:
    """Return the share of the true neighbours ``[q, k]`` that are among the answers ``[q, k]``: ties do not count."""
    hits = sum(len(set(some.tolist()) & set(all_.tolist())) for some, all_ in zip(found, true, strict=True))
    return hits / max(1, true.size)


def distances_of(base: Matrix, queries: Matrix, ids: npt.NDArray[np.int64]) -> Floats:
    """Return squared distances ``[q, k]`` of answers given by row number, nearest first.

    A row that is no row (-1), or that a query was given twice, is infinitely far.
    """
    out = np.full(ids.shape, np.inf, np.float32)
    for row, (query, found) in enumerate(zip(queries, ids, strict=True)):
        known = np.unique(found[(found >= 0) & (found < len(base))])
        apart = base[known].astype(np.float32) - query.astype(np.float32)
        out[row, : len(known)] = np.sort((apart * apart).sum(axis=1))
    return out


def _prepare(block: Matrix, metric: str) -> Floats:
    out: Floats = np.array(block, dtype=np.float32, order="C")
    if metric == "cosine":
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        out /= np.where(norms > 0, norms, np.float32(1))
    return out
