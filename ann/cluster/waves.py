"""A search over shards: the nearest shard first, then those that may hold neighbours as near as the k-th it found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.given import Columns, filled, joined
from memhier.ann.cluster.group import MISSING, Call, ShardGroup
from memhier.ann.cluster.routing import Routing, gaps
from memhier.ann.zoom import SearchResult

__all__ = ["Wanted", "search_shards"]

_ROUTED = 0.5  # share of the loss allowed that shards not asked may cause; searches of shards have the rest
_MOST = ("rounds",)  # numbers of which the largest counts, not the sum
_SKIPPED = ("recall", "queries", "calibrated", "escalated", "stopped")

Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wishes of a search.

    Attributes
    ----------
    k, recall
        As in :meth:`ZoomIndex.search`.
    fields
        Names of the fields to return.
    filtered
        Whether a filter hides vectors, so that the k-th neighbour is farther than those measured.
    options
        Further options of the searches of shards.
    """

    k: int
    recall: float
    fields: tuple[str, ...]
    filtered: bool
    options: Mapping[str, Any]


class _Hits:
    """The nearest found so far of each query, and the shards that did not answer, bool ``[shards]``."""

    def __init__(self, count: int, k: int, shards: int, text: bool, fields: Sequence[str]) -> None:
        self.lost: Bools = np.zeros(shards, np.bool_)
        self.ids: npt.NDArray[Any] = np.full((count, k), None if text else -1, object if text else np.int64)
        self.distances: Floats = np.full((count, k), np.inf, np.float32)
        self.fields: Columns = {}
        self.stats: dict[str, Any] = {}
        self._k, self._names = k, fields

    def merge(self, rows: npt.NDArray[np.int64], found: SearchResult) -> None:
        """Take in the hits of a shard for some queries."""
        ids = np.hstack([self.ids[rows], found.ids])
        distances = np.hstack([self.distances[rows], found.distances])
        # Strings stand in the order in which shards give them; missing vectors have an infinite distance.
        keys = (distances,) if ids.dtype == object else (ids, distances)
        order = np.lexsort(keys, axis=1)[:, : self._k]
        for name, column in filled(found.fields, self._names, found.ids.shape).items():
            if name not in self.fields:
                self.fields[name] = _nulls(column, self.ids.shape)
            both = joined([self.fields[name][rows].T, column.T]).T
            self.fields[name][rows] = np.take_along_axis(both, order, 1)
        self.ids[rows] = np.take_along_axis(ids, order, 1)
        self.distances[rows] = np.take_along_axis(distances, order, 1)
        for name, value in found.stats.items():
            if name not in _SKIPPED and isinstance(value, int):
                known = self.stats.get(name, 0)
                self.stats[name] = max(known, value) if name in _MOST else known + value


def search_shards(
    group: ShardGroup, cells: Cells, routing: Routing, queries: Floats, wanted: Wanted, *, text: bool
) -> tuple[SearchResult, Bools]:
    """Return the nearest of each query ``[q, d]``, and which shards did not answer, bool ``[shards]``.

    The first wave asks the nearest shard of each query for `k` neighbours. The second asks the shards whose gap is
    within the limit, for neighbours nearer than the k-th found. Both are one call to each shard.
    """
    count, k = len(queries), wanted.k
    remoteness = cells.remoteness(queries)
    hits = _Hits(count, k, remoteness.shape[1], text, wanted.fields)
    loss = 1 - wanted.recall
    limit = routing.limit(k, 1 - _ROUTED * loss, any_k=wanted.filtered)
    options = {**wanted.options, "recall": 1 - (1 - _ROUTED) * loss}
    asked = np.zeros(remoteness.shape, bool)
    if np.isinf(limit):  # all shards matter
        asked[:] = np.isfinite(remoteness)
    else:
        asked[np.arange(count), remoteness.argmin(axis=1)] = True
    _wave(group, asked, queries, wanted, options, hits)
    kth = hits.distances[:, -1] if count else np.empty(0, np.float32)
    with np.errstate(invalid="ignore"):
        following = gaps(remoteness, cells.squared(kth, queries)) <= limit
    following &= np.isfinite(remoteness) & ~asked
    if following.any():
        _wave(group, following, queries, wanted, options, hits, kth)
    hits.stats |= {
        "queries": count, "recall": wanted.recall, "shard_requests": int((asked | following).sum()),
        "lost_shards": np.flatnonzero(hits.lost).tolist(),
    }  # fmt: skip
    return SearchResult(hits.ids, hits.distances, hits.stats, hits.fields), hits.lost


def _wave(
    group: ShardGroup, asked: Bools, queries: Floats, wanted: Wanted, options: Mapping[str, Any], hits: _Hits,
    kth: Floats | None = None,
) -> None:  # fmt: skip
    """Ask shards for their queries, ``[q, shards]``, all at a time."""
    shards = np.flatnonzero(asked.any(axis=0)).tolist()
    rows = [np.flatnonzero(asked[:, shard]) for shard in shards]
    calls = []
    for shard, mine in zip(shards, rows, strict=True):
        radius = None if (known := options["radius"]) is None else known[mine]
        if kth is not None:
            radius = kth[mine] if radius is None else np.minimum(kth[mine], radius)
        arguments = (queries[mine], wanted.k, wanted.fields, {**options, "radius": radius})
        calls.append(Call(shard, "search", arguments))
    for shard, mine, found in zip(shards, rows, group.ask(calls), strict=True):
        if found is MISSING:
            hits.lost[shard] = True
        else:
            hits.merge(mine, found)


def _nulls(column: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return nulls of the type of a column of fields."""
    if np.ma.isMaskedArray(column):
        return np.ma.MaskedArray(np.zeros(shape, column.dtype), True)
    null = {"f": np.nan, "M": np.datetime64("NaT", "us")}.get(column.dtype.kind)
    return np.full(shape, null, column.dtype)
