"""Scan of codes that arrive in waves: the native core's, or the same in NumPy without it.

Each wave brings the next lists of some queries, and the scan of a query goes on where it was. A query scans the lists
that it would scan if all codes were there at once.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.preview.code_scan import core_arguments, core_result
from memhier.ann.zoom.preview.plain_scan import PlainScan
from memhier.ann.zoom.preview.scan_arguments import Candidates, CodeLists, ScanLimits, ScanQueries, WavePart

__all__ = ["CodeWaves"]

Ints: TypeAlias = npt.NDArray[np.int64]


class CodeWaves:
    """A scan on its way.

    Parameters
    ----------
    queries, lists, limits
        As of a scan; -1 stands only at the end of the probes of a query.

    Attributes
    ----------
    done
        int64 ``[q]``: how many of its lists each query had.
    """

    def __init__(self, queries: ScanQueries, lists: CodeLists, limits: ScanLimits) -> None:
        count = len(queries.queries)
        self.done: Ints = np.zeros(count, np.int64)
        self._probes, self._limits = queries.probes, limits
        self._ends = (queries.probes >= 0).sum(axis=1)
        self._core: Any = None
        self._plain: list[PlainScan] = []
        if backend.core is None:
            self._plain = [PlainScan(queries, number, lists, limits) for number in range(count)]
        else:
            self._core = backend.core.CodeWaves(**core_arguments(queries, lists, limits), limit=limits.limit)

    def ahead(self, first: int, window: int, total: int) -> Ints:
        """Return how many of its next lists each query scans if they bring nothing nearer, int64 ``[q]``.

        They are at most `first`, or as many as it had so far, and at most `window`; none of the queries after `total`
        lists. All are 0 at the end.
        """
        counts = np.zeros(len(self.done), np.int64)
        if self._core is not None:
            self._core.ahead(first=first, window=window, total=total, counts=counts)
            return counts
        for number, scan in enumerate(self._plain):
            if counts.sum() >= total:
                break
            done, end = int(self.done[number]), int(self._ends[number])
            stop = min(end, done + min(max(first, self._limits.least, done), window))
            counts[number] = scan.ahead(self._probes[number, done:stop])
        return counts

    def scan(self, parts: Sequence[WavePart], lists: Ints, counts: Ints) -> None:
        """Scan the next `counts` lists of each query, int64 ``[q]``; all are among `lists`, ascending."""
        if self._core is None:
            for number in np.flatnonzero(counts).tolist():
                done = int(self.done[number])
                self._plain[number].scan(self._probes[number, done : done + int(counts[number])], parts)
        else:
            assert backend.core is not None
            read = [
                backend.core.WavePart(
                    starts=part.starts, stops=part.stops, shifts=part.shifts, codes=part.codes, numbers=part.numbers,
                    ids=part.ids, written=part.written, allowed=part.allowed,
                )
                for part in parts
            ]  # fmt: skip
            self._core.scan(parts=read, lists=lists, counts=counts)
        self.done += counts

    def finish(self) -> Candidates:
        """Return the candidates, with their ids."""
        found = Candidates.room(len(self.done), self._limits.limit, named=True)
        if self._core is not None:
            self._core.finish(result=core_result(found))
        for scan in self._plain:
            scan.finish(found)
        return found
