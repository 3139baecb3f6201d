"""Searches of one call whose queries have filters, or lists of ids, of their own: equal ones are evaluated once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.ids.collection import collected, holds_collections, is_collection
from memhier.ann.zoom.search.results import SearchResult

__all__ = ["QueryGroup", "joined", "query_groups"]

_MOST = frozenset({"rounds"})  # of all groups the most counts, and not the sum
_BY_ESCALATION = ("no", "wider", "exact")


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that may find the same vectors.

    Attributes
    ----------
    rows
        int64 ``[n]``: the numbers of the queries.
    where, allow, deny
        As a search of one query takes them; ids out of iterators already.
    """

    rows: npt.NDArray[np.int64]
    where: str | None
    allow: object
    deny: object


def query_groups(
    where: object, allow: object, deny: object, count: int, *, single: bool
) -> list[QueryGroup] | None:  # fmt: skip
    """Return the groups of `count` queries, in the order in which they come; None where all have the same limits.

    A list of None alone is of ids where the query is a `single` one, and of lists for each query of a batch.

    Raises
    ------
    ValueError, TypeError
        For another number of filters or of lists than of queries, or values that are none.
    """
    if where is None and allow is None and deny is None:  # as most calls have it
        return None
    one = where is None or isinstance(where, str)
    most = 0 if single else count
    if not count or (one and not _are_of_each(allow, most) and not _are_of_each(deny, most)):
        return None
    filters: Sequence[Any] = [where] * count if one else _filters(where, count)
    allowed, denied = (
        _lists(ids, name, count) if _are_of_each(ids, most) else [None if ids is None else collected(ids, name)] * count
        for ids, name in ((allow, "allow"), (deny, "deny"))
    )
    found = dict[tuple[object, int, int], list[int]]()
    for number, (text, some, others) in enumerate(zip(filters, allowed, denied, strict=True)):
        found.setdefault((text, id(some), id(others)), []).append(number)
    return [
        QueryGroup(np.array(rows, np.int64), filters[rows[0]], allowed[rows[0]], denied[rows[0]])
        for rows in found.values()
    ]


def _filters(filters: object, count: int) -> list[str | None]:
    """Return a filter, or None, for each of `count` queries."""
    if not isinstance(filters, Sequence | np.ndarray) or isinstance(filters, bytes):
        raise TypeError(f"where={filters!r}: expected text, or a list of text or None, one for each query")
    if len(filters) != count:
        raise ValueError(f"where has {len(filters)} filters for {count} queries: expected one for each, or one text")
    for number, each in enumerate(filters):
        if each is not None and not isinstance(each, str):
            raise TypeError(f'where[{number}]={each!r}: expected text such as "price < 10", or None for no filter')
    return list(filters)


def _are_of_each(ids: object, batch: int) -> bool:
    """Return whether `ids` is a list with the ids, or None, of each query; `batch` counts those of a batch."""
    if holds_collections(ids):
        return True
    return isinstance(ids, list | tuple) and 0 < len(ids) == batch and all(each is None for each in ids)


def _lists(ids: Any, name: str, count: int) -> list[Any]:
    """Return the ids, or None, for each of `count` queries; the same object where the same collection was given."""
    if len(ids) != count:
        raise ValueError(f"{name} has {len(ids)} lists for {count} queries: expected one for each, or one list of ids")
    for number, each in enumerate(ids):
        if each is not None and not is_collection(each):
            raise TypeError(f"{name}[{number}]={each!r}: expected a list of ids, or None for no limit")
    made = {id(each): collected(each, name) for each in ids if each is not None}
    return [made.get(id(each)) for each in ids]


def joined(results: Sequence[tuple[npt.NDArray[np.int64], SearchResult]]) -> SearchResult:
    """Return the results of groups as that of one call; each comes with the numbers of its queries."""
    order = np.argsort(np.concatenate([rows for rows, _ in results]))
    every = [found for _, found in results]
    fields = {name: _joined([found.fields[name] for found in every])[order] for name in every[0].fields}
    ids, distances = _joined([found.ids for found in every]), _joined([found.distances for found in every])
    return SearchResult(ids[order], distances[order], _together([found.stats for found in every]), fields)


def _joined(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if not any(isinstance(column, np.ma.MaskedArray) for column in columns):
        return np.concatenate(columns)
    whole = np.concatenate([np.ma.getdata(column) for column in columns])
    return np.ma.MaskedArray(whole, np.concatenate([np.ma.getmaskarray(column) for column in columns]))


def _together(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of groups as those of one call; the first group holds the first query."""
    stats = dict(every[0])
    for more in every[1:]:
        for name, value in more.items():
            if name == "calibrated":
                stats[name] = stats[name] and value
            elif name == "escalated":
                stats[name] = max(stats[name], value, key=_BY_ESCALATION.index)
            elif name == "recall":
                stats[name] = min(stats[name], value)
            elif name in _MOST:
                stats[name] = max(stats[name], value)
            elif name != "stopped":
                stats[name] += value
    return stats
