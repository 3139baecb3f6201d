"""Scan of coded residuals in inverted lists, with bounds: the native core's, or the same in NumPy without it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.filters.bitmaps import unpack
from memhier.ann.zoom.preview.blocks import codes_of
from memhier.ann.zoom.preview.codes import WIDTHS, CodeBook, chunks
from memhier.io.read_arguments import Tallies

__all__ = [
    "REACH",
    "SCAN_TALLY",
    "Candidates",
    "CodeLists",
    "CodedPart",
    "ScanLimits",
    "ScanQueries",
    "code_scan",
    "positions_of",
    "split_positions",
]

_ROUNDING = 4e-6  # the share of an estimate's terms that single precision loses
_NEAREST = 0.125  # the least distance of a query from a centroid, as a share of a vector's radius; see the native scan
_LOGISTIC = 1.702  # of a normal distribution, the scale of the logistic one like it
_PART_SHIFT = 40  # a position is the number of its part, then 40 bits of row
SCAN_TALLY = np.dtype([(name, np.int64) for name in ("probed", "scanned", "cut_short", "open")])
"""Of a query: lists scanned (of which any row may be found), codes scanned, 1 where candidates were left out for lack
of room, and 1 where the probes ended before a list lay far enough beyond the first."""
REACH = 2.0  # spreads of a list's residuals beyond its centroid, that its best vector is taken to lie

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
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
        as the `k`-th estimate. The first `k` are always read.
        """
        widest = int(self.counts.max(initial=0))
        if widest <= k:
            return self.counts
        present = np.arange(widest) < self.counts[:, None]
        estimates, lower = self.estimates[:, :widest], self.lower[:, :widest]
        kth = np.partition(np.where(present, estimates, np.float32(np.inf)), k - 1, axis=1)[:, k - 1 : k]
        with np.errstate(all="ignore"):
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


@dataclass(frozen=True, slots=True)
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
    """

    k: int
    eps: float
    limit: int
    least: int = 0
    gap: float = np.inf
    clear: float = 0.0


def code_scan(queries: ScanQueries, lists: CodeLists, parts: Sequence[CodedPart], limits: ScanLimits) -> Candidates:
    """Return the rows of each query whose lower bound is at most the k-th smallest upper bound; one part or more."""
    count = len(queries.queries)
    shape = count, limits.limit
    found = Candidates(
        np.zeros(shape, np.int64),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
        np.empty(count, np.int64),
        np.empty(count, np.float32),
        np.empty(count, SCAN_TALLY),
    )
    if backend.core is None:
        for number in range(count):
            _scan_one(found, number, queries, lists, parts, limits)
    else:
        _scan_compiled(found, queries, lists, parts, limits)
    return found


def _scan_compiled(
    found: Candidates,
    queries: ScanQueries,
    lists: CodeLists,
    parts: Sequence[CodedPart],
    limits: ScanLimits,
) -> None:
    book, core = lists.book, backend.core
    assert core is not None
    core.code_scan(
        queries=core.ScanQueries(
            queries=queries.queries, probes=queries.probes, most=queries.most, inner=queries.inner
        ),
        lists=core.CodeLists(centroids=lists.centroids.view(np.uint16), radii=lists.radii),
        book=core.CodeBook(
            dimensions=np.array(book.dimensions), alpha=book.alpha, unit=book.unit, ratios=book.ratios
        ),
        parts=[
            core.CodedPart(starts=part.starts, codes=part.codes, numbers=part.numbers, allowed=part.allowed)
            for part in parts
        ],
        limits=core.ScanLimits(
            k=limits.k, eps=limits.eps, least=limits.least, gap=limits.gap, clear=limits.clear
        ),
        result=core.ScanResult(
            positions=found.positions, lower=found.lower, estimates=found.estimates, counts=found.counts,
            thresholds=found.thresholds, tally=found.tally,
        ),
    )  # fmt: skip


def _scan_one(
    found: Candidates,
    number: int,
    queries: ScanQueries,
    lists: CodeLists,
    parts: Sequence[CodedPart],
    limits: ScanLimits,
) -> None:
    book, query, probes = lists.book, queries.queries[number], queries.probes[number]
    most, inner = float(queries.most[number]), None if queries.inner is None else queries.inner[number]
    positions = np.empty(0, np.int64)
    estimates = margins = np.empty(0, np.float32)
    probed, open_, first, widest = 0, True, 0.0, 0.0
    for chosen in probes[probes >= 0]:
        wanted = [_wanted_rows(part, int(chosen)) for part in parts]
        if not any(map(len, wanted)):
            continue
        centroid, radius = lists.centroids[chosen].astype(np.float32), float(lists.radii[chosen])
        kth = min(_kth(estimates, limits.k), most)
        if inner is None:
            residual = query - centroid
            squared = float(residual @ residual)
            distance = squared**0.5
            squares, roots, nearest = 1, 0, _NEAREST
            first = squared if probed == 0 else first
            away, unit = squared - first, abs(kth)
        else:
            residual, squared = query, -2 * float(query @ centroid)
            distance, along = max(float(inner[0]), _NEAREST), float(inner[1])
            squares, roots, nearest = 0, 2, 0.0
            widest = max(widest, radius)
            away, unit = squared - REACH * 2 * along * radius - kth, 2 * along * widest
        is_clear = np.isfinite(kth) and (inner is not None or squared >= limits.clear * kth)
        if probed >= limits.least and is_clear and away >= limits.gap * unit:
            open_ = False
            break
        probed += 1
        for part_number, (part, rows) in enumerate(zip(parts, wanted, strict=True)):
            sums, scale, offset = _dot(book, codes_of(part.codes, rows, book.dimensions), residual)
            lengths, factors, errors = book.numbers_of(part.numbers[:, rows])
            product = factors * scale * (sums - offset)
            lengths_squared = np.square(book.unit * lengths)
            near = squared + squares * lengths_squared - 2 * book.unit * product
            terms = abs(squared) + squares * lengths_squared + roots * np.sqrt(lengths_squared)
            positions = np.append(positions, positions_of(part_number, rows))
            estimates = np.append(estimates, near.astype(np.float32))
            with np.errstate(invalid="ignore"):  # nothing is known where no errors meet an infinite one
                apart = np.maximum(distance, nearest * np.sqrt(lengths_squared))
                margin = 2 * limits.eps * book.unit * apart * errors + _ROUNDING * terms
            margins = np.append(margins, np.where(np.isnan(margin), np.inf, margin).astype(np.float32))
    found.tally[number] = probed, len(positions), 0, open_
    _keep(found, number, positions, estimates, margins, limits.k, most)


def _keep(
    found: Candidates, number: int, positions: Ints, estimates: Floats, margins: Floats, k: int, most: float
) -> None:
    """Note of one query the rows whose lower bound is at most the k-th smallest upper bound."""
    limit = found.positions.shape[1]
    threshold = min(_kth(estimates + margins, k), most)
    lower = estimates - margins
    order = np.lexsort((positions, lower))
    order = order[lower[order] <= threshold]
    kept = order[:limit]
    found.positions[number, : len(kept)] = positions[kept]
    found.lower[number, : len(kept)] = lower[kept]
    found.estimates[number, : len(kept)] = estimates[kept]
    found.counts[number] = len(kept)
    found.thresholds[number] = threshold
    found.tally["cut_short"][number] = len(order) > len(kept)


def _wanted_rows(part: CodedPart, chosen: int) -> Ints:
    """Return the rows of a list that may be found."""
    rows = np.arange(part.starts[chosen], part.starts[chosen + 1])
    return rows if part.allowed is None else rows[unpack(part.allowed, len(part.codes))[rows]]


def _kth(values: Floats, k: int) -> float:
    return float(np.partition(values, k - 1)[k - 1]) if len(values) >= k else np.inf


def _dot(book: CodeBook, codes: npt.NDArray[np.uint8], residual: Floats) -> tuple[Floats, np.float32, np.float32]:
    """Return the inner products of the fields with the query as signed bytes, its step, and the product of half."""
    values = residual[: len(book.alpha)] * book.alpha
    largest = np.abs(values).max(initial=np.float32(0))
    scale = np.float32(largest / np.float32(127))
    rounded = np.rint(values * (np.float32(127) / largest if largest > 0 else np.float32(0))).astype(np.int64)
    sums = np.zeros(len(codes), np.int64)
    for start, first, width, dimensions in chunks(book.dimensions):
        columns = -(-dimensions * width // 8)
        for field in range(8 // width):
            low = field * columns
            part = rounded[first + low : first + min(low + columns, dimensions)]
            fields = codes[:, start : start + len(part)] >> np.uint8(field * width) & np.uint8(2**width - 1)
            sums += fields.astype(np.int64) @ part
    half = np.repeat((2.0 ** np.array(WIDTHS) - 1) / 2, book.dimensions)
    return sums.astype(np.float32), scale, np.float32((half * rounded).sum())


def positions_of(numbers: Any, rows: Ints) -> Ints:
    """Return positions: the number of a part and a row of it in one integer."""
    positions: Ints = numbers << _PART_SHIFT | rows
    return positions


def split_positions(positions: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of parts and the rows of positions; the number of -1, which is none, is -1."""
    return positions >> _PART_SHIFT, positions & ((1 << _PART_SHIFT) - 1)
