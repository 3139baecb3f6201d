"""The scan of codes of one query in NumPy, list after list."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.blocks import codes_of
from memhier.ann.zoom.preview.codes import WIDTHS, CodeBook, chunks
from memhier.ann.zoom.preview.scan_arguments import (
    BORDERS,
    REACH,
    Candidates,
    CodedPart,
    CodeLists,
    ScanLimits,
    ScanQueries,
    WavePart,
    beyond_borders,
    positions_of,
)

__all__ = ["PlainScan"]

_ROUNDING = 4e-6  # the share of an estimate's terms that single precision loses
_NEAREST = 0.125  # the least distance of a query from a centroid, as a share of a vector's radius; see the native scan

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


class PlainScan:
    """The scan of one query on its way.

    Parameters
    ----------
    queries, number
        The queries of a scan, and which of them this is.
    lists, limits
        As of a scan.
    """

    def __init__(self, queries: ScanQueries, number: int, lists: CodeLists, limits: ScanLimits) -> None:
        self._query, self._most = queries.queries[number], float(queries.most[number])
        self._inner = None if queries.inner is None else queries.inner[number]
        self._number, self._lists, self._limits = number, lists, limits
        self._positions = self._ids = np.empty(0, np.int64)
        self._estimates = self._margins = np.empty(0, np.float32)
        self._probed, self._open, self._first, self._widest = 0, True, 0.0, 0.0
        self._squared, self._nearest, self._away = 0.0, -1, np.inf
        probes = queries.probes[number, :BORDERS]
        self._around = self._query - lists.centroids[probes[probes >= 0]].astype(np.float32)

    def ahead(self, probes: Ints) -> int:
        """Return how many of the next lists are scanned if none of them brings nearer rows; none ends the scan."""
        if not self._open:
            return 0
        kept = self._probed, self._first, self._widest
        count = 0
        while count < len(probes) and not self._ends_at(int(probes[count])):
            self._probed, count = self._probed + 1, count + 1
        self._probed, self._first, self._widest = kept
        self._open = count > 0 or not len(probes)
        return count

    def scan(self, probes: Ints, parts: Sequence[CodedPart | WavePart]) -> None:
        """Scan the next lists, up to one that ends the scan; -1 is none."""
        for number in probes[probes >= 0].tolist():
            if not self._open:
                return
            wanted = [part.rows_of(number) for part in parts]
            if any(len(rows) for rows, _, _ in wanted):
                self._open = not self._ends_at(number)
                if self._open and not self._passes(number):
                    self._probed += 1
                    if self._inner is None and self._squared < self._away:
                        self._nearest, self._away = number, self._squared
                    for place, (part, rows) in enumerate(zip(parts, wanted, strict=True)):
                        self._look(number, part, place, rows)

    def finish(self, found: Candidates) -> None:
        """Note the rows whose lower bound is at most the k-th smallest upper bound."""
        number, limit = self._number, found.positions.shape[1]
        threshold = min(_kth(self._estimates + self._margins, self._limits.k), self._most)
        lower = self._estimates - self._margins
        order = np.lexsort((self._positions, lower))
        order = order[lower[order] <= threshold]
        kept = order[:limit]
        found.positions[number, : len(kept)] = self._positions[kept]
        if found.ids is not None:
            found.ids[number, : len(kept)] = self._ids[kept]
        found.lower[number, : len(kept)] = lower[kept]
        found.estimates[number, : len(kept)] = self._estimates[kept]
        found.counts[number] = len(kept)
        found.thresholds[number] = threshold
        cut_short = len(order) > len(kept)
        found.tally[number] = self._probed, len(self._positions), cut_short, self._open, self._nearest

    def _ends_at(self, number: int) -> bool:
        """Return whether a list ends the scan."""
        limits, centroid = self._limits, self._lists.centroids[number].astype(np.float32)
        kth = min(_kth(self._estimates, limits.k), self._most)
        if self._inner is None:
            residual = self._query - centroid
            self._squared = squared = float(residual @ residual)
            self._first = squared if self._probed == 0 else self._first
            away, unit = squared - self._first, abs(kth)
        else:
            squared, along = -2 * float(self._query @ centroid), float(self._inner[1])
            radius = float(self._lists.radii[number])
            self._widest = max(self._widest, radius)
            away, unit = squared - REACH * 2 * along * radius - kth, 2 * along * self._widest
        is_clear = np.isfinite(kth) and (self._inner is not None or squared >= limits.clear * kth)
        return bool(self._probed >= limits.least and is_clear and away >= limits.gap * unit)

    def _passes(self, number: int) -> bool:
        """Return whether the scan passes over a list."""
        kth = min(_kth(self._estimates, self._limits.k), self._most)
        residual = self._query - self._lists.centroids[[number]].astype(np.float32)
        counts = self._limits.border > 0 and self._inner is None and np.isfinite(kth)
        return counts and bool(beyond_borders(residual, self._around)[0] >= self._limits.border * kth)

    def _look(self, number: int, part: CodedPart | WavePart, place: int, wanted: tuple[Ints, Ints, Ints]) -> None:
        """Take down the estimates and margins of the rows wanted of a list."""
        book, (rows, written, ids) = self._lists.book, wanted
        centroid = self._lists.centroids[number].astype(np.float32)
        if self._inner is None:
            residual = self._query - centroid
            squared = float(residual @ residual)
            distance, squares, roots, nearest = squared**0.5, 1, 0, _NEAREST
        else:
            residual, squared = self._query, -2 * float(self._query @ centroid)
            distance, squares, roots, nearest = max(float(self._inner[0]), _NEAREST), 0, 2, 0.0
        sums, scale, offset = _dot(book, codes_of(part.codes, rows, book.dimensions), residual)
        lengths, factors, errors = book.numbers_of(part.numbers[:, rows])
        product = factors * scale * (sums - offset)
        lengths_squared = np.square(book.unit * lengths)
        near = squared + squares * lengths_squared - 2 * book.unit * product
        terms = abs(squared) + squares * lengths_squared + roots * np.sqrt(lengths_squared)
        with np.errstate(invalid="ignore"):  # nothing is known where no errors meet an infinite one
            apart = np.maximum(distance, nearest * np.sqrt(lengths_squared))
            margin = 2 * self._limits.eps * book.unit * apart * errors + _ROUNDING * terms
        self._positions = np.append(self._positions, positions_of(place, written))
        self._ids = np.append(self._ids, ids)
        self._estimates = np.append(self._estimates, near.astype(np.float32))
        self._margins = np.append(self._margins, np.where(np.isnan(margin), np.inf, margin).astype(np.float32))


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
