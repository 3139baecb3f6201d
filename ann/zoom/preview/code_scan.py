"""Scan of coded residuals in inverted lists, with bounds: the native core's, or the same in NumPy without it."""

from collections.abc import Sequence
from typing import Any

from memhier import backend
from memhier.ann.zoom.preview.plain_scan import PlainScan
from memhier.ann.zoom.preview.scan_arguments import Candidates, CodedPart, CodeLists, ScanLimits, ScanQueries

__all__ = ["code_scan", "core_arguments", "core_result"]


def code_scan(queries: ScanQueries, lists: CodeLists, parts: Sequence[CodedPart], limits: ScanLimits) -> Candidates:
    """Return the rows of each query whose lower bound is at most the k-th smallest upper bound; one part or more."""
    found = Candidates.room(len(queries.queries), limits.limit)
    core = backend.core
    if core is None:
        for number, probes in enumerate(queries.probes):
            scan = PlainScan(queries, number, lists, limits)
            scan.scan(probes, parts)
            scan.finish(found)
        return found
    coded = [part.compiled for part in parts]
    core.code_scan(**core_arguments(queries, lists, limits), parts=coded, result=core_result(found))
    return found


def core_arguments(queries: ScanQueries, lists: CodeLists, limits: ScanLimits) -> dict[str, Any]:
    """Return the arguments of a scan as the native core takes them."""
    core = backend.core
    assert core is not None
    return {
        "queries": core.ScanQueries(
            queries=queries.queries, probes=queries.probes, most=queries.most, inner=queries.inner
        ),
        **lists.compiled,
        "limits": core.ScanLimits(
            k=limits.k, eps=limits.eps, least=limits.least, gap=limits.gap, clear=limits.clear, border=limits.border
        ),
    }  # fmt: skip


def core_result(found: Candidates) -> Any:
    """Return the room for candidates as the native core takes it."""
    assert backend.core is not None
    return backend.core.ScanResult(
        positions=found.positions, lower=found.lower, estimates=found.estimates, counts=found.counts,
        thresholds=found.thresholds, tally=found.tally, ids=found.ids,
    )  # fmt: skip
