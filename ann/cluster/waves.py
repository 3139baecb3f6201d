"""A search over shards: the nearest shard first, then those that may hold neighbours as near as the k-th it found."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.given import Columns, filled, joined
from memhier.ann.cluster.group import MISSING, Call, ShardGroup
from memhier.ann.cluster.open_shards import OpenShards
from memhier.ann.cluster.routing import gaps
from memhier.ann.zoom import RangeResult, SearchResult
from memhier.ann.zoom.calibration.calibration import RECALLS
from memhier.callers import user_stacklevel
from memhier.errors import RecallWarning

__all__ = ["Wanted", "range_shards", "search_shards"]

_ROUTED = 0.5  # the most of the loss allowed that shards not asked may cause; searches of shards have the rest
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
    max_reads
        The most pages read for one query, in all shards; None for any number.
    """

    k: int
    recall: float
    fields: tuple[str, ...]
    filtered: bool
    options: Mapping[str, Any]
    max_reads: int | None = None


class _Hits:
    """The nearest found so far of each query, and the shards that did not answer, bool ``[shards]``."""

    def __init__(self, count: int, k: int, shards: int, text: bool, fields: Sequence[str]) -> None:
        self.lost: Bools = np.zeros(shards, np.bool_)
        self.ids: npt.NDArray[Any] = np.full((count, k), None if text else -1, object if text else np.int64)
        self.distances: Floats = np.full((count, k), np.inf, np.float32)
        self.fields: Columns = {}
        self.stats: dict[str, Any] = {}
        self.kept: float = 1.0  # the least recall that a shard kept
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
        self.kept = min(self.kept, found.stats["recall"])
        _sum_up(self.stats, found.stats)


def _sum_up(total: dict[str, Any], stats: Mapping[str, Any]) -> None:
    """Add the numbers of a shard to those of all."""
    for name, value in stats.items():
        if name not in _SKIPPED and isinstance(value, int):
            known = total.get(name, 0)
            total[name] = max(known, value) if name in _MOST else known + value


def search_shards(shards: OpenShards, queries: Floats, wanted: Wanted) -> tuple[SearchResult, Bools]:
    """Return the nearest of each query ``[q, d]``, and which shards did not answer, bool ``[shards]``.

    The first wave asks the nearest shard of each query for `k` neighbours. The second asks the shards whose gap is
    within the limit, for neighbours nearer than the k-th found. Both are one call to each shard.
    """
    count, k = len(queries), wanted.k
    group, cells, text = shards.group, shards.about.cells, shards.about.id_kind == "str"
    remoteness = cells.remoteness(queries)
    hits = _Hits(count, k, remoteness.shape[1], text, wanted.fields)
    limit, kept = shards.about.routing.limit(k, _routed(wanted.recall), any_k=wanted.filtered)
    everywhere = bool(np.isinf(limit)) or remoteness.shape[1] == 1
    options = {**wanted.options, "recall": wanted.recall if everywhere else wanted.recall + (1 - kept)}
    asked = np.zeros(remoteness.shape, bool)
    pages = first = wanted.max_reads
    if everywhere:  # all shards matter
        asked[:] = np.isfinite(remoteness)
    else:
        asked[np.arange(count), remoteness.argmin(axis=1)] = True
        first = None if pages is None else (pages + 1) // 2
    asked, all_asked = _afforded(asked, remoteness, first)
    _wave(group, asked, queries, wanted, _with_pages(options, asked, first), hits)
    kth = hits.distances[:, -1] if count else np.empty(0, np.float32)
    with np.errstate(invalid="ignore"):
        following = gaps(remoteness, cells.squared(kth, queries)) <= limit
    following &= np.isfinite(remoteness) & ~asked
    rest = None if pages is None or first is None else pages - first
    following, all_following = _afforded(following, remoteness, rest)
    if following.any():
        _wave(group, following, queries, wanted, _with_pages(options, following, rest), hits, kth)
    asked |= following
    hits.stats |= {
        "queries": count, "recall": wanted.recall, "shard_requests": int(asked.sum()),
        "asked_shards": np.flatnonzero(asked.any(axis=0)).tolist(), "lost_shards": np.flatnonzero(hits.lost).tolist(),
    }  # fmt: skip
    if hits.kept < options["recall"] - 1e-9 or not (all_asked and all_following):
        hits.stats["recall"] = min(wanted.recall, hits.kept) if all_asked and all_following else 0.0
        warnings.warn(
            f"recall={wanted.recall}: max_reads={pages} or deadline_ms={wanted.options['deadline_ms']} keep the search "
            f"from it; a recall of {hits.stats['recall']:.3f} is known to be kept",
            RecallWarning,
            stacklevel=user_stacklevel(),
        )
    return SearchResult(hits.ids, hits.distances, hits.stats, hits.fields), hits.lost


def _routed(recall: float) -> float:
    """Return the recall that the choice of shards has to keep, so that its loss and that of their searches add up.

    Shards are left a recall that is calibrated: for one between two levels they would take the effort of the higher.
    """
    most = recall + _ROUTED * (1 - recall)
    level = max((each for each in RECALLS if recall < each <= most + 1e-9), default=most)
    return 1 - (level - recall)


def range_shards(shards: OpenShards, queries: Floats, radius: float, wanted: Wanted) -> tuple[RangeResult, Bools]:
    """Return the vectors within a radius of each query, and which shards did not answer. All shards are asked."""
    group, text = shards.group, shards.about.id_kind == "str"
    arguments = (queries, radius, wanted.fields, {**wanted.options, "recall": wanted.recall})
    answers = group.ask([Call(shard, "range_search", arguments) for shard in range(group.shards)])
    lost = np.array([answer is MISSING for answer in answers])
    found: list[RangeResult] = [answer for answer in answers if answer is not MISSING]
    rows = np.concatenate([
        np.empty(0, np.int64), *(np.repeat(np.arange(len(queries)), np.diff(each.offsets)) for each in found)
    ])  # fmt: skip
    ids = np.concatenate([np.empty(0, object if text else np.int64), *(each.ids for each in found)])
    distances = np.concatenate([np.empty(0, np.float32), *(each.distances for each in found)])
    order = np.lexsort((distances, rows) if text else (ids, distances, rows))
    offsets = np.zeros(len(queries) + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=len(queries)), out=offsets[1:])
    columns = [filled(each.fields, wanted.fields, each.ids.shape) for each in found]
    fields = {name: joined([each[name] for each in columns])[order] for name in wanted.fields} if found else {}
    stats: dict[str, Any] = {}
    for each in found:
        _sum_up(stats, each.stats)
    stats |= {
        "queries": len(queries), "recall": wanted.recall, "shard_requests": len(queries) * group.shards,
        "lost_shards": np.flatnonzero(lost).tolist(),
    }  # fmt: skip
    return RangeResult(offsets, ids[order], distances[order], stats, fields), lost


def _afforded(asked: Bools, remoteness: Floats, pages: int | None) -> tuple[Bools, bool]:
    """Leave the nearest shards of each query, as many as there are pages; return whether these are all."""
    if pages is None:
        return asked, True
    ranks = np.argsort(np.argsort(np.where(asked, remoteness, np.inf), axis=1, kind="stable"), axis=1)
    left = asked & (ranks < pages)
    return left, bool((left == asked).all())


def _with_pages(options: Mapping[str, Any], asked: Bools, pages: int | None) -> Mapping[str, Any]:
    """Return the options of the searches of shards that share the pages of a query."""
    if pages is None or not asked.any():
        return options
    return {**options, "max_reads": pages // int(asked.sum(axis=1).max())}


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
