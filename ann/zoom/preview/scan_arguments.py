"""The arguments of a scan of codes, and its candidates."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.filters.bitmaps import unpack
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.io.read_arguments import Tallies

__all__ = [
    "BORDERS",
    "REACH",
    "SCAN_TALLY",
    "Candidates",
    "CodeLists",
    "CodedPart",
    "ScanLimits",
    "ScanQueries",
    "WavePart",
    "beyond_borders",
    "positions_of",
    "split_positions",
]

BORDERS = 16  # nearest lists whose borders count; see the native scan
_LOGISTIC = 1.702  # of a normal distribution, the scale of the logistic one like it
_PART_SHIFT = 40  # a position is the number of its part, then 40 bits of row
SCAN_TALLY = np.dtype([(name, np.int64) for name in ("probed", "scanned", "cut_short", "open", "nearest")])
"""Of a query: lists scanned (of which any row may be found), codes scanned, 1 where candidates were left out for lack
of room, 1 where the probes ended before a list lay far enough beyond the first; and the nearest list scanned, -1
of inner products."""
REACH = 2.0  # spreads of a list's residuals beyond its centroid, that its best vector is taken to lie

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CodedPart:
    """The codes of rows that were written together, in list order.

    Attributes
    ----------
    starts
        int64 ``[lists + 1]``.
    codes
        uint8 ``[n, code_bytes]``, in the order of `memhier.ann.zoom.preview.blocks`.
    numbers
        uint16 ``[2, n]``: the radius of each, and the ratios of factor and error to it, as the code book has them.
    allowed
        uint64 words, a bit for each row that may be found; None for all.
    """

    starts: Ints
    codes: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint16]
    allowed: npt.NDArray[np.uint64] | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.codes)

    @cached_property
    def compiled(self) -> Any:
        """The part as the native core takes it, made once for all searches of a snapshot."""
        assert backend.core is not None
        return backend.core.CodedPart(starts=self.starts, codes=self.codes, numbers=self.numbers, allowed=self.allowed)

    def rows_of(self, number: int) -> tuple[Ints, Ints, Ints]:
        """Return the rows of a list that may be found: here, among those written, and their ids, which are unknown."""
        rows = np.arange(self.starts[number], self.starts[number + 1])
        rows = rows if self.allowed is None else rows[unpack(self.allowed, len(self.codes))[rows]]
        return rows, rows, np.full(len(rows), -1)


@dataclass(frozen=True, slots=True)
class WavePart:
    """The codes of some lists of rows that were written together, as they were read.

    Attributes
    ----------
    lists
        int64 ``[n]``, ascending: their numbers.
    starts, stops
        int64 ``[n]``: their rows among those here; each starts with a block of its own.
    shifts
        int64 ``[n]``: from a row here to the row as written.
    codes, numbers
        As of :class:`CodedPart`.
    ids
        int64 ``[r]``.
    written
        The number of rows written.
    allowed
        uint64 words, a bit for each row written that may be found; None for all.
    """

    lists: Ints
    starts: Ints
    stops: Ints
    shifts: Ints
    codes: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint16]
    ids: Ints
    written: int
    allowed: npt.NDArray[np.uint64] | None = None

    def rows_of(self, number: int) -> tuple[Ints, Ints, Ints]:
        """Return the rows of a list that may be found: here, among those written, and their ids."""
        place = int(np.searchsorted(self.lists, number))
        rows = np.arange(self.starts[place], self.stops[place])
        written = rows + self.shifts[place]
        if self.allowed is not None:
            found = unpack(self.allowed, self.written)[written]
            rows, written = rows[found], written[found]
        return rows, written, self.ids[rows]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The rows that may be among the nearest of each query, in ascending order of the lower bound.

    Attributes
    ----------
    positions
        int64 ``[q, limit]``: part and row of each; only the first ``counts`` of a row mean anything.
    lower, estimates
        float32 ``[q, limit]``: lower bounds and estimates of remoteness in the preview's space.
    counts
        int64 ``[q]``.
    thresholds
        float32 ``[q]``: the k-th smallest upper bound, or the most remoteness wanted where that is less.
    tally
        `SCAN_TALLY` ``[q]``.
    ids
        int64 ``[q, limit]`` of codes on SSD, which have their ids beside them; None of others.
    reads
        `memhier.io.read_arguments.READ_TALLY` ``[1]`` of codes on SSD; None of others.
    """

    positions: Ints
    lower: Floats
    estimates: Floats
    counts: Ints
    thresholds: Floats
    tally: Tallies
    ids: Ints | None = None
    reads: npt.NDArray[np.void] | None = None

    @classmethod
    def room(cls, count: int, limit: int, *, named: bool = False) -> Self:
        """Return room for `limit` candidates of each of `count` queries; `named` for their ids, too."""
        shape = count, limit
        return cls(
            np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.float32),
            np.zeros(count, np.int64), np.zeros(count, np.float32), np.zeros(count, SCAN_TALLY),
            np.zeros(shape, np.int64) if named else None,
        )  # fmt: skip

    def take(self, chosen: npt.NDArray[np.bool_]) -> "Candidates":
        """Return those of some of the queries, bool ``[q]``."""
        names = [each.name for each in fields(self) if each.name != "reads" and getattr(self, each.name) is not None]
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def put(self, rows: Ints, more: "Candidates") -> None:
        """Put those of other queries in the place of some."""
        for name in ("positions", "lower", "estimates", "counts", "thresholds", "tally", "ids"):
            if (mine := getattr(self, name)) is not None:
                mine[rows] = getattr(more, name)

    def likely(self, k: int, eps: float, loss: float) -> Ints:
        """Return how many of each query to read, int64 ``[q]``, to miss at most `loss` of its neighbours on average.

        The errors of estimates are taken as normal, with `eps` of them between estimate and bound; the `k`-th distance
        as the `k`-th of the estimates with an error added, as the least of many estimates are too small. The first `k`
        are always read.
        """
        widest = int(self.counts.max(initial=0))
        if widest <= k:
            return self.counts
        present = np.arange(widest) < self.counts[:, None]
        estimates, lower = self.estimates[:, :widest], self.lower[:, :widest]
        with np.errstate(all="ignore"):
            above = estimates + (estimates - lower) / np.float32(eps)
            kth = np.partition(np.where(present, above, np.float32(np.inf)), k - 1, axis=1)[:, k - 1 : k]
            errors = np.float32(_LOGISTIC * eps) * (estimates - kth) / (estimates - lower)
            odds = np.where(present, 1 / (1 + np.exp(errors)), 0)  # of a nearer one
        missed = odds[:, ::-1].cumsum(axis=1)
        # Unknown odds count as likely.
        likely: Ints = np.minimum(self.counts, np.maximum(k, widest - (missed <= loss).sum(axis=1)))
        return likely


@dataclass(frozen=True, slots=True)
class ScanQueries:
    """The queries of a scan, and the lists that each of them visits.

    Attributes
    ----------
    queries
        float32 ``[q, d]``, turned as the codes are.
    probes
        int64 ``[q, p]`` list numbers, nearest first; -1 for none.
    most
        float32 ``[q]``: the most remoteness that each query wants; infinity for no limit.
    inner
        Where remoteness is ``-2 <q, x>``, and not a squared distance, float32 ``[q, 2]`` of queries of length one: the
        factor by which a standard error exceeds that of a query like the residuals, and the root mean square share of
        a residual's length that lies along the query.
    """

    queries: Floats
    probes: Ints
    most: Floats
    inner: Floats | None = None


@dataclass(frozen=True)
class CodeLists:
    """The lists of all parts, and the book that their codes were made with.

    Attributes
    ----------
    centroids
        fp16 ``[lists, d]``, turned as the codes are.
    radii
        float32 ``[lists]``: root mean square distance of a list's vectors to its centroid.
    """

    centroids: npt.NDArray[np.float16]
    radii: Floats
    book: CodeBook

    @cached_property
    def compiled(self) -> dict[str, Any]:
        """Lists and book as the native core takes them, made once for all scans."""
        core, book = backend.core, self.book
        assert core is not None
        return {
            "lists": core.CodeLists(centroids=self.centroids.view(np.uint16), radii=self.radii),
            "book": core.CodeBook(
                dimensions=np.array(book.dimensions), alpha=book.alpha, unit=book.unit, ratios=book.ratios
            ),
        }


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """The limits of a scan.

    Attributes
    ----------
    k
        Neighbours that the bounds are to let through.
    eps
        Standard errors between an estimate and its bounds.
    limit
        The most candidates kept of a query, at least `k`; those with the lowest bounds stay.
    least, gap
        After `least` lists with rows that may be found, the scan of a query ends at the first list whose squared
        distance exceeds that of the nearest by `gap` times the k-th estimate so far; of inner products, at the first
        whose best vector, `REACH` spreads beyond its centroid, lies `gap` spreads beyond the k-th, the spread being
        that of the widest list so far.
    clear
        It does not end before a list whose squared distance is at least so many times the k-th estimate so far; nothing
        of inner products.
    border
        The scan passes over lists :func:`beyond_borders` by so many times the k-th estimate so far. 0 for none.
    """

    k: int
    eps: float
    limit: int
    least: int = 0
    gap: float = np.inf
    clear: float = 0.0
    border: float = 0.0


def beyond_borders(residuals: Floats, near: Floats) -> Floats:
    """Return how far a query lies beyond the borders of lists, squared ``[p]``.

    A border lies halfway between two centroids. `residuals` ``[p, d]`` are the query less the centroids, `near` those
    of the nearest lists. The squares for nearer lists are added up, as if their borders met at right angles.
    """
    squared, nearer = np.einsum("ij,ij->i", residuals, residuals)[:, None], np.einsum("ij,ij->i", near, near)
    excess = np.maximum(squared - nearer, 0)
    between = squared + nearer - 2 * np.einsum("ik,jk->ij", residuals, near)
    parts = np.divide(excess**2, 4 * between, out=np.zeros_like(excess), where=between > 0)
    return np.asarray(parts.sum(axis=1), np.float32)


def positions_of(numbers: Any, rows: Ints) -> Ints:
    """Return positions: the number of a part and a row of it in one integer."""
    positions: Ints = numbers << _PART_SHIFT | rows
    return positions


def split_positions(positions: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of parts and the rows of positions; the number of -1, which is none, is -1."""
    return positions >> _PART_SHIFT, positions & ((1 << _PART_SHIFT) - 1)
