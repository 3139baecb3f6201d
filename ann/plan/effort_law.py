"""The work of a search as the index grows: laws fitted to small indexes with the same codes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from memhier.ann.plan.small_index import SmallIndex
from memhier.ann.zoom.preview.routing.router import routing_cost
from memhier.planning.fits import GrowthLaw
from memhier.planning.queues import QueryTrace

__all__ = ["EffortLaw", "QueryWork"]


# A sample of a clustered set may be too thin to show its growth. The reads of all sets measured, up to 10 million
# vectors, grew as N^0.13 or faster (`python -m memhier.benchmarks.workloads.search.plan`, README on ten million).
_LEAST_SLOPE = 0.1


@dataclass(frozen=True, slots=True)
class QueryWork:
    """The mean work of one query.

    Attributes
    ----------
    probed, scanned, candidates, pages
        Lists and codes scanned, vectors that the bounds leave, and pages read.
    cpu_s
        Processor seconds.
    """

    probed: float
    scanned: float
    candidates: float
    pages: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class EffortLaw:
    """How the work of a search grows.

    Attributes
    ----------
    probed, scanned, candidates, pages
        The laws of the means.
    call_s, code_s, page_s
        Processor seconds of a call, of a code scanned (a list found counts as some), and of a page read and ranked.
    cpu_residual
        Root mean square of the relative errors of the mean processor times.
    trace
        The queries of the largest small index.
    """

    probed: GrowthLaw
    scanned: GrowthLaw
    candidates: GrowthLaw
    pages: GrowthLaw
    call_s: float
    code_s: float
    page_s: float
    cpu_residual: float
    trace: QueryTrace

    @classmethod
    def fit(cls, measured: Sequence[SmallIndex], k: int) -> Self:
        """Return the law of small indexes of different sizes, the largest last."""
        sizes = [small.vectors for small in measured]
        names = ("probed", "scanned", "candidates", "pages")
        means = {name: [max(1e-3, float(getattr(small, name).mean())) for small in measured] for name in names}
        last = measured[-1]
        code_s, page_s = last.code_s, last.page_s
        rest = [float(np.mean(small.cpu_s - _units(small) @ [code_s, page_s])) for small in measured]
        call_s = max(0.0, float(np.median(rest)))
        off = [(call_s - alone) / small.cpu_s.mean() for alone, small in zip(rest, measured, strict=True)]
        waking = np.median([small.waking for small in measured], axis=0)
        trace = QueryTrace(last.cpu_s, last.pages.astype(np.int64), page_s, k, tuple(map(tuple, waking.tolist())))
        laws = {name: GrowthLaw.fit(sizes, values, low=_LEAST_SLOPE) for name, values in means.items()}
        return cls(**laws, call_s=call_s, code_s=code_s, page_s=page_s,
                   cpu_residual=float(np.sqrt(np.mean(np.square(off)))), trace=trace)  # fmt: skip

    def at(self, vectors: int, lists: int) -> QueryWork:
        """Return the work of a query in an index of so many vectors and lists."""
        probed = min(float(lists), self.probed.at(vectors))
        scanned = min(float(vectors), self.scanned.at(vectors))
        pages = self.pages.at(vectors)
        codes = scanned + routing_cost(lists, probed)
        cpu = self.call_s + self.code_s * codes + self.page_s * pages
        return QueryWork(probed, scanned, self.candidates.at(vectors), pages, cpu)

    def trace_at(self, work: QueryWork, cpu_factor: float, seed: int) -> QueryTrace:
        """Return the recorded queries with the mean work of a larger index, on cores that need `cpu_factor` as long."""
        mean = max(1e-9, float(self.trace.pages.mean()))
        scaled = self.trace.scaled(cpu_factor * work.cpu_s / float(self.trace.cpu_s.mean()), work.pages / mean, seed)
        return replace(scaled, page_cpu_s=cpu_factor * self.page_s)


def _units(small: SmallIndex) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return codes and pages of each query, [q, 2]; a list found counts as some codes."""
    routing = [routing_cost(small.layout.lists, probed) for probed in small.probed.tolist()]
    return np.stack([small.scanned + routing, small.pages], 1)
