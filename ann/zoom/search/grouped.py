"""Searches of one call whose queries have filters of their own: each different filter is evaluated once."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.search.results import SearchResult

__all__ = ["check_filters", "joined", "queries_by_filter"]

_MOST = frozenset({"rounds"})  # of all groups the most counts, and not the sum
_BY_ESCALATION = ("no", "wider", "exact")


def check_filters(filters: object, count: int) -> list[str | None]:
    """Return a filter, or None, for each of `count` queries.

    Raises
    ------
    ValueError, TypeError
        For another number of them, or values that are no text.
    """
    if not isinstance(filters, Sequence | np.ndarray) or isinstance(filters, bytes):
        raise TypeError(f"where={filters!r}: expected text, or a list of text or None, one for each query")
    if len(filters) != count:
        raise ValueError(f"where has {len(filters)} filters for {count} queries: expected one for each, or one text")
    for number, each in enumerate(filters):
        if each is not None and not isinstance(each, str):
            raise TypeError(f'where[{number}]={each!r}: expected text such as "price < 10", or None for no filter')
    return list(filters)


def queries_by_filter(filters: Sequence[str | None]) -> Iterator[tuple[str | None, npt.NDArray[np.int64]]]:
    """Yield each different filter with the numbers of its queries, in the order in which they come."""
    numbers: dict[str | None, list[int]] = {}
    for number, each in enumerate(filters):
        numbers.setdefault(each, []).append(number)
    for each, of in numbers.items():
        yield each, np.array(of, np.int64)


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
