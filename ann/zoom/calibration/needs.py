"""The needs of reading the true neighbours of queries: the width of bounds, and the number of candidates.

One scan with the widest bounds gives the candidates of a query. The candidates left by narrower bounds, for any number
of neighbours, follow without another scan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.truth import NeighbourTruth
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.preview import Effort, Preview
from memhier.ann.zoom.preview.scan_arguments import positions_of, split_positions
from memhier.ann.zoom.preview.stored_scan import Parts

__all__ = ["EPS", "USUAL_MOST", "Needs", "lists_of", "measure_needs"]

EPS = np.geomspace(0.2, 5.0, 20, dtype=np.float32)  # standard errors, ascending: the widths of bounds that are tried
USUAL_MOST = 4  # times the usual number of candidates: the most that a query gets
_BLOCK = 64  # queries

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of reading `k` neighbours.

    Attributes
    ----------
    widths, alone
        ``[q, k]``: the first width of the bounds at which each neighbour is read, and the first at which it would be
        read without the other rows of its page.
    ranks
        ``[widths, q, k]``: the rank of the lower bound for which it is read among those of its query, without the query
        and its copies; scaled down where the bounds leave more than `usual`.
    pages
        ``[widths, ranks]``: the number of pages read whose least bound has that rank among those of its query.
    usual
        ``[widths]``: the usual number of candidates that the bounds leave.
    kth
        float32 ``[q]``: the k-th distance that a scan assumes; it is too small where estimates are rough.
    """

    widths: npt.NDArray[np.uint8]
    alone: npt.NDArray[np.uint8]
    ranks: npt.NDArray[np.int32]
    pages: Ints
    usual: Ints
    kth: Floats

    def reads(self, width: int, most: int) -> float:
        """Return the pages that a query reads with at most `most` candidates."""
        return float(self.pages[width, :most].sum()) / max(1, len(self.widths))


def measure_needs(
    preview: Preview,
    parts: Parts,
    truth: NeighbourTruth,
    rows_of_page: int,
    numbers: Sequence[int],
    nprobe: int,
    limit: int,
) -> dict[int, Needs]:
    """Return the needs by each of the `numbers` of neighbours, for candidates in `nprobe` lists of each query.

    Parameters
    ----------
    rows_of_page
        Rows read together.
    limit
        The most candidates of a query.
    """
    turned, lists = preview.turn(truth.queries), lists_of(parts, truth.found)
    places = {k: _Places(truth, k, limit) for k in numbers}
    wide = Effort(nprobe, eps=float(EPS[-1]))
    for start in range(0, len(turned), _BLOCK):
        part = slice(start, start + _BLOCK)
        # The query and its copies are among its own nearest, and hide as many of its neighbours.
        wanted_k = max(numbers) + 1 + int(truth.copies[part].max(initial=0))
        found = preview.search(turned[part], parts, wanted_k, wide, max(limit, 4 * wanted_k))
        for query, count in enumerate(found.counts.tolist(), start):
            pause()
            positions, estimates = found.positions[query - start, :count], found.estimates[query - start, :count]
            error = (estimates - found.lower[query - start, :count]) / EPS[-1]
            # Copies of the query have its code. Without the query in the index no page would be read for them.
            itself = positions == truth.own[query]
            copies = np.isin(estimates, estimates[itself])
            others = ~itself if truth.hidden[query] else ~copies
            of_pages = _pages_of(preview, rows_of_page, positions[others], lists_of(parts, positions[others]))
            wanted = _pages_of(preview, rows_of_page, truth.found[query], lists[query])
            if truth.hidden[query]:  # any copy is as near
                wanted = _pages_of_copies(of_pages, copies[others], wanted)
            seen = _Seen(positions[others], estimates[others], error[others], of_pages, numbers)
            for each in places.values():
                each.note(query, seen, wanted)
    return {k: each.needs() for k, each in places.items()}


class _Seen:
    """The candidates of one query by all widths of the bounds, and the pages they lie on.

    Attributes
    ----------
    positions
        Of the candidates, ``[n]``; ascending through `by_position`.
    lower
        ``[widths, n]``.
    pages
        Their numbers, ascending.
    ranks
        ``[widths, pages]``: where the least bound on each stands among all bounds.
    kth, estimated
        By number of neighbours, the k-th smallest upper bound ``[widths]``, and the k-th estimate.
    """

    def __init__(
        self, positions: Ints, estimates: Floats, error: Floats, of_pages: Ints, numbers: Sequence[int]
    ) -> None:
        self.positions, self.by_position = positions, np.argsort(positions)
        self.lower = estimates - EPS[:, None] * error
        upper = estimates + EPS[:, None] * error
        ranks = np.empty(self.lower.shape, np.int32)
        np.put_along_axis(ranks, np.argsort(self.lower, axis=1), np.arange(len(positions), dtype=np.int32)[None], 1)
        # A row is read with its page, for whichever row of it. Rows of other lists there do not count, as they may
        # not be scanned.
        order = np.argsort(of_pages, kind="stable")
        first = np.flatnonzero(np.diff(of_pages[order], prepend=-1))
        self.pages = of_pages[order[first]]
        self.ranks = np.minimum.reduceat(ranks[:, order], first, axis=1) if len(first) else ranks
        enough = [k for k in numbers if k <= len(positions)]
        if enough:
            places = np.array(enough, np.int64) - 1
            upper.partition(places, axis=1)
            estimates = np.partition(estimates, places)
        self.kth = {k: upper[:, k - 1] for k in enough}
        self.estimated = {k: float(estimates[k - 1]) for k in enough}


class _Places:
    """Collects :class:`Needs` query by query."""

    def __init__(self, truth: NeighbourTruth, k: int, limit: int) -> None:
        self._truth, self._k, self._limit = truth, k, limit
        count = len(truth.queries)
        self._widths = np.full((count, k), len(EPS), np.uint8)
        self._alone = np.full((count, k), len(EPS), np.uint8)
        self._ranks = np.full((len(EPS), count, k), limit, np.int32)
        self._left = np.zeros((len(EPS), count), np.int64)  # by the bounds
        self._kth = truth.distances[:, k - 1].copy()
        # By width, a bit for each place: whether it is that of the least bound of a page that the query reads.
        self._read = [np.empty((len(EPS), 0), np.uint8)] * count

    def note(self, query: int, seen: _Seen, wanted: Ints) -> None:
        """Note the needs of one query, whose neighbours lie on the pages `wanted`."""
        if not len(seen.positions):
            return
        k, truth = self._k, self._truth
        self._kth[query] = min(self._kth[query], seen.estimated.get(k, np.inf))
        kth = seen.kth.get(k, np.full(len(EPS), np.inf, np.float32))
        furthest = truth.distances[query, k - 1]
        reached = np.minimum(kth, furthest + 1e-5 * np.abs(furthest))[:, None]
        self._left[:, query] = np.count_nonzero(seen.lower <= kth[:, None], axis=1)
        inside = seen.lower <= reached
        is_read = seen.ranks < np.count_nonzero(inside, axis=1)[:, None]
        places = np.zeros(seen.lower.shape, np.bool_)
        places[np.nonzero(is_read)[0], seen.ranks[is_read]] = True
        self._read[query] = np.packbits(places, axis=1)
        page = np.minimum(seen.pages.searchsorted(wanted[:k]), len(seen.pages) - 1)
        is_there = seen.pages[page] == wanted[:k]
        self._ranks[:, query] = np.where(is_there, seen.ranks[:, page], self._limit)
        self._widths[query] = _first(is_there & is_read[:, page])
        neighbours, order = truth.found[query, :k], seen.by_position
        row = order[np.minimum(seen.positions[order].searchsorted(neighbours), len(order) - 1)]
        self._alone[query] = _first((seen.positions[row] == neighbours) & inside[:, row])

    def needs(self) -> Needs:
        """Return the needs, after all queries; called once."""
        limit = self._limit
        usual = np.maximum(1, np.median(self._left, axis=1) if self._left.size else np.ones(len(EPS))).astype(np.int64)
        times = np.clip(self._left / usual[:, None], 1, USUAL_MOST)
        for ranks, each in zip(self._ranks, times, strict=True):
            ranks[:] = np.where(ranks < limit, _scaled(ranks, each[:, None]), limit)
        pages = np.zeros(len(EPS) * (limit + 1), np.int64)
        for query, packed in enumerate(self._read):
            width, place = np.nonzero(np.unpackbits(packed, axis=1))
            scaled = np.minimum(_scaled(place, times[width, query]), limit)
            pages += np.bincount(width * (limit + 1) + scaled, minlength=len(pages))
        return Needs(self._widths, self._alone, self._ranks, pages.reshape(len(EPS), -1), usual, self._kth)


def lists_of(parts: Parts, positions: Ints) -> Ints:
    """Return the list that each position lies in."""
    lists = np.zeros(positions.shape, np.int64)
    number, rows = split_positions(positions)
    for which, part in enumerate(parts):
        here = number == which
        lists[here] = np.searchsorted(part.starts, rows[here], side="right") - 1
    return lists


def _pages_of(preview: Preview, rows_of_page: int, positions: Ints, lists: Ints) -> Ints:
    """Return a number for the page and the list of each position; -1 for none."""
    number, rows = split_positions(positions)
    page = positions_of(number, rows // rows_of_page)
    return np.where(positions >= 0, page * preview.lists + lists, -1)


def _pages_of_copies(of_pages: Ints, copies: npt.NDArray[np.bool_], wanted: Ints) -> Ints:
    """Return the pages of the candidates that are copies, in their order, in the place of as many of those `wanted`."""
    first = of_pages[copies][: len(wanted)]
    return np.concatenate([first, wanted[len(first) :]])


def _first(holds: npt.NDArray[np.bool_]) -> Ints:
    """Return the first true row of each column ``[widths, n]``; the number of rows if none is true."""
    return np.where(holds.any(axis=0), holds.argmax(axis=0), len(holds))


def _scaled(places: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> Ints:
    """Return the places scaled down by `times`."""
    return np.ceil((places + 1.0) / times).astype(np.int64) - 1
