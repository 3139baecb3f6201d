"""Results of searches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.payload.table import Hits, HitTable, are_there

__all__ = ["Chosen", "RangeResult", "SearchResult", "iterate"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Chosen: TypeAlias = Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]
"""Takes the ids found for a query, -1 or None for none; returns those whose fields are to be read."""


@dataclass(frozen=True, slots=True)
class SearchResult(Hits):
    """The nearest vectors of each query, nearest first.

    It unpacks as faiss has it, distances first: ``distances, ids = index.search(queries, k)``.

    Attributes
    ----------
    ids
        int64 ``[q, k]``; ``[k]`` for a single query. -1 stands where the index, or the filter, leaves fewer than `k`
        vectors. An index with strings as ids gives these as objects, and None where there are fewer.
    distances
        float32, of the same shape: squared Euclidean distance for ``l2``, negative inner product for ``ip``,
        1 - cosine similarity for ``cosine``; infinity beside -1. Ties stand in the order of their ids. Ties of strings
        stand in the order of a hash: always the same order, but not that of the alphabet.
    stats
        Plain numbers of this call. ``queries``: their number. ``probed`` and ``scanned``: lists and codes scanned.
        ``candidates``: those that the bounds left; ``cut_short``: queries that had no room for all of them; ``ranked``:
        vectors compared exactly. ``reads``, ``pages`` and ``bytes``: the I/Os for them. ``page_requests``: pages, where
        a page that several queries share counts for each, and one that DRAM holds since it was read counts as well;
        ``hot_pages``: pages that :meth:`memhier.ann.ZoomIndex.tune` put into DRAM. ``rounds``: the most
        rounds of reads of a query. ``stopped``: why the first query ended; ``stopped_early``: queries that a limit on
        reads or time ended. ``calibrated``: whether the effort is known to reach the recall asked for (never with a
        filter). ``escalated``: ``"wider"`` or ``"exact"`` where the search did more than was calibrated, as that is not
        known to be enough, otherwise ``"no"``. ``recall``: the recall asked for, or less where limits or codes without
        bounds forbid it (absent with ``nprobe`` and ``candidates``). ``payload_reads``, ``payload_pages`` and
        ``payload_bytes``: the I/Os for fields, which are none of the others; ``payload_rounds``: the submissions that
        they took, one for the values of all attributes and two for the words of their text.
    fields
        Attributes and documents by name, each of the shape of `ids`; empty where ``fields=`` asked for none. Attributes
        are float64 with NaN where null, datetime64[us] with NaT, masked arrays of int64 and bool, and text and lists as
        objects with None. Documents are objects: text, bytes or JSON values, None where there is none.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import ZoomIndex
    >>> vectors, names = np.eye(4, dtype="float32"), ["ash", "birch", "cedar", "elm"]
    >>> path = tempfile.mkdtemp() + "/trees"
    >>> with ZoomIndex.build(path, vectors, documents={"name": names}, dram="1MiB") as index:
    ...     found = index.search(vectors[2], k=2, fields=True)
    >>> found.rows()
    [{'id': 2, 'distance': 0.0, 'name': 'cedar'}, {'id': 0, 'distance': 2.0, 'name': 'ash'}]
    >>> distances, ids = found
    """

    ids: npt.NDArray[Any]
    distances: Floats
    stats: dict[str, Any]
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """Yield distances, then ids."""
        yield self.distances
        yield self.ids

    def rows(self) -> list[Any]:
        """Return the vectors found as a list of dicts, ``{"id", "distance", field: value, ...}``.

        For a batch, return such a list for each query. Missing vectors are left out. Null values are None, datetimes
        are ``datetime.datetime``. A field named ``id`` or ``distance`` gets a ``_`` behind its name.
        """
        return self.rows_of(None if self.ids.ndim == 1 else np.cumsum(are_there(self.ids).sum(axis=1)))

    def hit_table(self) -> HitTable:
        """Return the vectors found, with the missing ones left out."""
        return HitTable.of_grid(self.ids, self.distances, self.fields, "distance")


@dataclass(frozen=True, slots=True)
class RangeResult(Hits):
    """The vectors within a radius of each query, nearest first, ties by id.

    It unpacks as faiss has it: ``offsets, distances, ids = index.range_search(queries, radius)``.

    Attributes
    ----------
    offsets
        int64 ``[q + 1]``: the vectors of query ``i`` stand from ``offsets[i]`` to ``offsets[i + 1]``.
    ids, distances
        int64, or strings as objects, and float32, ``[n]``; the distances as :class:`memhier.ann.SearchResult` has them.
    stats
        Plain numbers of this call: those of :class:`memhier.ann.SearchResult` that apply.
    fields
        Attributes and documents by name, ``[n]`` each, as :class:`memhier.ann.SearchResult` has them.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.ann import ZoomIndex
    >>> vectors = np.arange(20, dtype="float32").reshape(10, 2)
    >>> with ZoomIndex.build(tempfile.mkdtemp() + "/index", vectors, dram="4MiB") as index:
    ...     found = index.range_search([[4, 5], [0, 0]], radius=10)
    >>> [found.ids[start:stop].tolist() for start, stop in zip(found.offsets, found.offsets[1:])]
    [[2, 1, 3], [0]]
    """

    offsets: Ints
    ids: npt.NDArray[Any]
    distances: Floats
    stats: dict[str, Any]
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """Yield offsets, distances, then ids."""
        yield self.offsets
        yield self.distances
        yield self.ids

    def rows(self) -> list[list[dict[str, Any]]]:
        """Return a list of dicts for each query, as :meth:`SearchResult.rows` has them."""
        return self.rows_of(self.offsets[1:])

    def hit_table(self) -> HitTable:
        """Return the vectors found."""
        query = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return HitTable(query, np.arange(len(query)) - self.offsets[query], self.ids, self.distances, self.fields)


def iterate(search: Callable[[int, Chosen], SearchResult], batch: int) -> Iterator[SearchResult]:
    """Yield the results of ever larger searches, `batch` at a time, each id once.

    Parameters
    ----------
    search
        Takes a number of neighbours, and a function that chooses those whose fields are read.
    """
    seen: set[int | str] = set()
    k, last = 2 * batch, False
    rows = np.empty(0, np.int64)

    def choose(ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which of the ids found are yielded now: new ones, in whole batches but for the last."""
        nonlocal last, rows
        there = are_there(ids)
        new = np.flatnonzero(there & np.array([name not in seen for name in ids.tolist()], np.bool_))
        last = len(ids) < k or not there.all() or not len(new)
        rows = new if last else new[: len(new) // batch * batch]
        return np.isin(np.arange(len(ids)), rows)

    while not last:
        found = search(k, choose)
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            seen.update(found.ids[part].tolist())
            fields = {name: column[part] for name, column in found.fields.items()}
            yield SearchResult(found.ids[part], found.distances[part], found.stats, fields)
        k *= 2
