"""Latency under load: a discrete-event simulation of the queues before cores and drives, fed by a recorded trace.

A query computes, then reads pages in rounds and ranks the rows of each round. The thread that was idle for the shortest
time takes it, and computes slower at first. Every core, every channel of a drive and every place for a search is a
server with one queue, first come, first served. Queries arrive as a Poisson stream. A query over several shards ends
with the last of them.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.arguments import check_int, check_number
from memhier.planning.node import Node
from memhier.rows.rank_request import round_sizes

__all__ = ["Busiest", "Fleet", "QueryTrace", "QueueTimes", "most_queries", "simulate_queues"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Busiest: TypeAlias = Literal["cores", "drives", "searches"]

_ALONE = 2000  # queries that tell how long a search holds its place
_WARM = 0.1  # of the queries, that fill the queues and do not count


@dataclass(frozen=True, slots=True)
class QueryTrace:
    """The work of recorded queries, each on its own.

    Attributes
    ----------
    cpu_s
        float64 [q]: processor seconds of each query, those for its pages included.
    pages
        int64 [q]: pages that it reads.
    page_cpu_s
        Processor seconds for one page, spent after the round that reads it.
    first_round
        Most pages of its first round of reads: `k` of the search.
    waking
        Idle seconds of a thread that searches, ascending, and the seconds that its next query takes longer: it has to
        wake up, and its caches are cold.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.planning.queues import QueryTrace
    >>> trace = QueryTrace(np.array([1e-3]), np.array([30]), 1e-6, 10)
    >>> trace.rounds(0)
    [10, 8, 9, 3]
    """

    cpu_s: Floats
    pages: Ints
    page_cpu_s: float
    first_round: int
    waking: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.cpu_s) or self.cpu_s.shape != self.pages.shape or self.cpu_s.ndim != 1:
            raise ValueError(
                f"cpu_s, pages: shapes {list(self.cpu_s.shape)}, {list(self.pages.shape)}: expected [q], one or more"
            )
        if not (np.isfinite(self.cpu_s) & (self.cpu_s >= 0)).all() or (self.pages < 0).any():
            raise ValueError("cpu_s, pages: expected finite numbers from zero up")
        check_number("page_cpu_s", self.page_cpu_s, 0)
        check_int("first_round", self.first_round, 1)
        for name, values in zip(("idle", "longer"), zip(*self.waking, strict=True), strict=False):
            for value in values:
                check_number(f"waking: seconds {name}", value, 0)

    def scaled(self, cpu: float, pages: float, seed: int = 0) -> "QueryTrace":
        """Return the trace of queries with so many times the processor time and pages; pages are rounded at random."""
        wanted = self.pages * pages
        drawn = np.random.default_rng(seed).random(len(wanted))
        rounded = (np.floor(wanted) + (drawn < wanted % 1)).astype(np.int64)
        return QueryTrace(self.cpu_s * cpu, rounded, self.page_cpu_s, self.first_round, self.waking)

    def woken(self, idle_s: float) -> float:
        """Return how many seconds longer a query takes on a thread that was idle for so long."""
        if not self.waking:
            return 0.0
        idle, longer = np.array(self.waking).T
        return float(np.interp(idle_s, idle, longer))

    def rounds(self, query: int) -> list[int]:
        """Return the pages of each round of reads of a query."""
        return round_sizes(int(self.pages[query]), self.first_round)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines that share the queries.

    Attributes
    ----------
    node
        Each of them.
    shards
        Machines that each query goes to.
    replicas
        Groups of so many machines; a query goes to one group, drawn at random.
    searches
        Searches that one machine runs at a time; further ones wait.
    """

    node: Node
    shards: int = 1
    replicas: int = 1
    searches: int = 8


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """The result of :func:`simulate_queues`.

    Attributes
    ----------
    p50_s, p99_s, mean_s
        Seconds from a query's arrival to its answer.
    cores, drives, searches
        Shares of the time that they were busy, 0 to 1.
    answered_per_s
        Queries answered per second until the last one arrives.
    """

    p50_s: float
    p99_s: float
    mean_s: float
    cores: float
    drives: float
    searches: float
    answered_per_s: float


class _Servers:
    """Equal servers behind one queue, by the times at which they become free."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count
        self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Return when work that comes now is done; calls come in the order of time."""
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        self.busy += seconds
        return end


class _Machine:
    """The servers of one machine, and the searches that wait for a place."""

    def __init__(self, fleet: Fleet) -> None:
        self.cores = _Servers(fleet.node.cores)
        self.drives = [_Servers(fleet.node.channels) for _ in range(fleet.node.drives)]
        self.free = [0.0] * fleet.searches  # when each place without a search became free, in ascending order
        self.waiting: deque[_Part] = deque()
        self.held = 0.0


@dataclass(slots=True)
class _Part:
    """The part of a query on one machine: `left` are the rounds that it has still to read."""

    query: int
    machine: _Machine
    left: Iterator[int]
    began: float = 0.0
    read: int = 0  # pages of the round under way


def simulate_queues(trace: QueryTrace, fleet: Fleet, rate: float, *, queries: int = 4000, seed: int = 0) -> QueueTimes:
    """Return the times of queries that arrive at random.

    Parameters
    ----------
    trace
        Queries to draw from; all shards of a query do the work of the same one.
    fleet
        The machines.
    rate
        Queries per second, on all machines together.
    queries
        Queries to simulate; the first tenth fills the queues and does not count.
    seed
        Of arrivals, draws and times of reads.

    Raises
    ------
    ValueError, TypeError
        When a number is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.planning.node import Node
    >>> from memhier.planning.queues import Fleet, QueryTrace, simulate_queues
    >>> trace = QueryTrace(np.full(10, 1e-3), np.full(10, 12), 0.0, 10)
    >>> fleet = Fleet(Node.parse("4 cores, 16 GiB, NVMe 400k IOPS"))
    >>> idle, busy = (simulate_queues(trace, fleet, rate) for rate in (100, 3500))
    >>> idle.p50_s < 0.002 < busy.p99_s
    True
    """
    check_number("rate", rate, 0, above=True)
    check_int("queries", queries, 10)
    return _Simulation(trace, fleet, rate, queries, seed).run()


def most_queries(trace: QueryTrace, fleet: Fleet) -> tuple[Busiest, float]:
    """Return the servers of a fleet that are busy first, and the queries per second at which they always are.

    A search holds its place as long as it takes on an idle machine.
    """
    node, tiny = fleet.node, 1e-12
    cpu_s = max(tiny, float(trace.cpu_s.mean()))
    alone = simulate_queues(replace(trace, waking=()), Fleet(node, 1, 1, fleet.searches), 1e-3 / cpu_s, queries=_ALONE)
    rates: dict[Busiest, float] = {
        "cores": node.cores / cpu_s,
        "drives": node.iops / max(tiny, float(trace.pages.mean())),
        "searches": fleet.searches / alone.mean_s,
    }
    busiest = min(rates, key=lambda name: rates[name])
    return busiest, fleet.replicas * rates[busiest]


class _Simulation:
    """One run: the events to come, and the answers so far."""

    def __init__(self, trace: QueryTrace, fleet: Fleet, rate: float, queries: int, seed: int) -> None:
        self._trace, self._fleet, self._random = trace, fleet, Random(seed)
        random = np.random.default_rng(seed)
        self._arrivals = np.cumsum(random.exponential(1 / rate, queries)).tolist()
        self._drawn = random.integers(0, len(trace.cpu_s), queries).tolist()
        self._groups = random.integers(0, fleet.replicas, queries).tolist()
        self._machines = [[_Machine(fleet) for _ in range(fleet.shards)] for _ in range(fleet.replicas)]
        self._law = fleet.node.read_law()
        self._open = [fleet.shards] * queries
        self._ends = [0.0] * queries
        self._events: list[tuple[float, int, _Part, bool]] = []  # time, number, part, whether it has computed
        self._count = 0

    def run(self) -> QueueTimes:
        """Run until every query is answered."""
        for query, arrival in enumerate(self._arrivals):
            self._advance(arrival)
            pages = self._trace.rounds(self._drawn[query])
            for machine in self._machines[self._groups[query]]:
                part = _Part(query, machine, iter(pages))
                if machine.free:
                    self._begin(part, arrival, arrival - machine.free.pop())
                else:
                    machine.waiting.append(part)
        self._advance(math.inf)
        return self._times()

    def _advance(self, until: float) -> None:
        """Handle the events up to a moment, in the order of time."""
        while self._events and self._events[0][0] <= until:
            now, _, part, computed = heapq.heappop(self._events)
            if not computed:
                seconds = part.read * self._trace.page_cpu_s
                self._push(part.machine.cores.serve(now, seconds), part, computed=True)
            elif (pages := next(part.left, None)) is not None:
                part.read = pages
                self._push(self._read(part.machine, now, pages), part, computed=False)
            else:
                self._end(part, now)

    def _push(self, when: float, part: _Part, *, computed: bool) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, part, computed))

    def _begin(self, part: _Part, now: float, idle: float) -> None:
        part.began = now
        drawn = self._drawn[part.query]
        later = self._trace.page_cpu_s * self._trace.pages[drawn]
        seconds = max(0.0, float(self._trace.cpu_s[drawn] - later))
        seconds += self._trace.woken(idle)
        self._push(part.machine.cores.serve(now, seconds), part, computed=True)

    def _read(self, machine: _Machine, now: float, pages: int) -> float:
        """Return when the last page of a round is there."""
        draw, drives, (mu, sigma) = self._random, machine.drives, self._law
        return max(
            drives[int(draw.random() * len(drives))].serve(now, draw.lognormvariate(mu, sigma)) for _ in range(pages)
        )

    def _end(self, part: _Part, now: float) -> None:
        machine = part.machine
        machine.held += now - part.began
        if machine.waiting:
            self._begin(machine.waiting.popleft(), now, 0.0)
        else:
            machine.free.append(now)
        self._open[part.query] -= 1
        if not self._open[part.query]:
            self._ends[part.query] = now

    def _times(self) -> QueueTimes:
        arrivals, ends, node = np.array(self._arrivals), np.array(self._ends), self._fleet.node
        counted = (ends - arrivals)[int(_WARM * len(arrivals)) :]
        machines = [machine for group in self._machines for machine in group]
        whole = max(ends.max(), 1e-12) * len(machines)
        drives = sum(drive.busy for machine in machines for drive in machine.drives)
        return QueueTimes(
            p50_s=float(np.quantile(counted, 0.5)),
            p99_s=float(np.quantile(counted, 0.99)),
            mean_s=float(counted.mean()),
            cores=sum(machine.cores.busy for machine in machines) / (whole * node.cores),
            drives=drives / (whole * node.drives * node.channels),
            searches=sum(machine.held for machine in machines) / (whole * self._fleet.searches),
            answered_per_s=float((ends <= arrivals[-1]).sum() / arrivals[-1]),
        )
