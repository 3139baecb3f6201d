"""The planner of a vector index: shards with codes that fit, small indexes of each, replicas until the load is kept."""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.plan.build_law import BuildLaw
from memhier.ann.plan.effort_law import EffortLaw
from memhier.ann.plan.geometry import Geometry, find_geometry
from memhier.ann.plan.index_plan import IndexPlan, SearchWorkload
from memhier.ann.plan.small_index import Asked, linking_seconds, measure_small
from memhier.ann.zoom.arguments import STORED_DTYPES
from memhier.ann.zoom.source import open_source
from memhier.arguments import check_int, check_number
from memhier.budget import format_bytes
from memhier.planning.node import Node
from memhier.planning.queues import Fleet, QueryTrace, QueueTimes, most_queries, simulate_queues

__all__ = ["plan_index"]

_SAMPLE_ROWS = 32768
_LEAST_ROWS = 2048  # of a sample: below, held-out vectors and lists are too few to tell anything
_QUERIES = 256  # taken from the sample where none are given
_STEPS = 4  # from the smallest small index to the largest, which is eight times as large
_SHRUNK = 8
_DRAM_SHARE = 0.85  # of a machine, for the index; the rest is for the system, Python and results
_BUSY = 0.7  # the share of the time that the busiest of cores, drives and searches works at most
_SHARDS_MOST = 4096
_QUERIES_SIMULATED = 4000
_GROWTH = 1.15  # of the replicas, until the latency is kept
_ATTEMPTS = 40

Matrix: TypeAlias = npt.NDArray[Any]


def plan_index(
    sample: object,
    workload: SearchWorkload,
    node: Node,
    *,
    queries: object = None,
    sample_rows: int = _SAMPLE_ROWS,
    cpu_factor: float = 1.0,
    seed: int = 0,
) -> IndexPlan:
    """Plan an index of vectors like those of a sample.

    It builds small indexes of the sample, five for each length of codes that it considers, with codes and lists as the
    large index would have them. Their searches and builds are measured on this machine and extrapolated.

    Parameters
    ----------
    sample
        Vectors ``[n, d]`` in any container or file that :meth:`memhier.ann.ZoomIndex.build` takes, 2,048 or more.
    workload
        Number of vectors, recall, queries per second.
    node
        One machine.
    queries
        Vectors ``[q, d]`` to ask for; by default 256 of the sample, which are then not indexed.
    sample_rows
        Vectors of the sample to use at most, drawn with `seed`. More take longer and predict better.
    cpu_factor
        Processor time that a core of `node` needs, in times of a core of this machine.
    seed
        Of draws, builds and the simulation.

    Raises
    ------
    ValueError, TypeError
        When an argument is out of its range, or no number of machines keeps `p99_ms`.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.plan import SearchWorkload, plan_index
    >>> from memhier.planning.node import Node
    >>> sample = np.random.default_rng(0).normal(size=(4096, 16)).astype("float32")
    >>> node = Node.parse("8 cores, 8 GiB, NVMe 500k IOPS")
    >>> plan = plan_index(sample, SearchWorkload(10_000_000, qps=100), node)
    >>> plan.shards, plan.reads < 100, plan.dram_bytes < node.dram
    (1, True, True)
    """
    check_int("sample_rows", sample_rows, _LEAST_ROWS, unit="vectors")
    check_number("cpu_factor", cpu_factor, 0, above=True)
    base, asked = _draw(sample, queries, workload, sample_rows, check_int("seed", seed, 0, 2**31 - 2))
    best: IndexPlan | None = None
    for shards, geometry in _choices(workload, node, base):
        if best is not None and shards >= best.nodes:
            break
        plan = _plan_shards(shards, geometry, base, asked, _Question(workload, node, cpu_factor))
        if best is None or (plan.nodes, plan.p99_ms) < (best.nodes, best.p99_ms):
            best = plan
    assert best is not None
    return best


@dataclass(frozen=True, slots=True)
class _Question:
    """The workload, one machine, and how slow its cores are."""

    workload: SearchWorkload
    node: Node
    cpu_factor: float


def _draw(sample: object, queries: object, workload: SearchWorkload, most: int, seed: int) -> tuple[Matrix, Asked]:
    """Return vectors of the sample in random order, and the queries."""
    with tempfile.TemporaryDirectory() as scratch, open_source(sample, Path(scratch)) as source:
        if source.count < _LEAST_ROWS:
            raise ValueError(f"sample: {source.count} vectors: expected at least {_LEAST_ROWS}")
        random = np.random.default_rng([seed, 7])
        held = _QUERIES if queries is None else 0
        rows = random.permutation(source.count)[: most + held]
        order = np.argsort(rows)
        drawn = np.empty((len(rows), source.dimension), source.dtype)
        drawn[order] = source.take(rows[order])
    asking = drawn[:held]
    if queries is not None:
        with tempfile.TemporaryDirectory() as scratch, open_source(queries, Path(scratch)) as source:
            if source.dimension != drawn.shape[1] or not source.count:
                raise ValueError(
                    f"queries: {source.count} of dimension {source.dimension}: expected one or more of {drawn.shape[1]}"
                )
            asking = source.take(np.arange(min(source.count, _QUERIES)))
    if drawn.dtype not in STORED_DTYPES:
        drawn = drawn.astype(np.float32)
    asked = Asked(asking.astype(np.float32), workload.k, workload.recall, workload.metric, seed)
    return drawn[held : held + workload.vectors], asked


def _choices(workload: SearchWorkload, node: Node, base: Matrix) -> list[tuple[int, Geometry]]:
    """Return numbers of shards to look at: the fewest that hold the vectors, and some with longer codes."""
    fitting: list[tuple[int, Geometry]] = []
    for shards in _shard_counts():
        vectors = -(-workload.vectors // shards)
        geometry = find_geometry(vectors, base.shape[1], base.dtype.name, workload.metric, int(_DRAM_SHARE * node.dram))
        if geometry is None or geometry.build_bytes > node.disk_bytes:
            continue
        if fitting and geometry.layout.code_bytes == fitting[-1][1].layout.code_bytes:
            break  # more machines would not make codes longer
        fitting.append((shards, geometry))
    if not fitting:
        raise ValueError(f"node={node}: {_SHARDS_MOST} of these cannot hold {workload.vectors:,} vectors")
    middle = len(fitting) // 2
    return [fitting[place] for place in sorted({0, middle, len(fitting) - 1})]


def _shard_counts() -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, ..."""
    yield 1
    power = 2
    while power <= _SHARDS_MOST:
        yield power
        yield power * 3 // 2
        power *= 2


def _plan_shards(shards: int, geometry: Geometry, base: Matrix, asked: Asked, question: _Question) -> IndexPlan:
    """Return the plan with so many shards."""
    effort, build = _calibrate(geometry, base, asked, int(_DRAM_SHARE * question.node.dram))
    layout, workload = geometry.layout, question.workload
    work, left = effort.at(geometry.vectors, layout.lists), 1 - geometry.held_share
    work = replace(work, pages=left * work.pages)
    trace = effort.trace_at(work, question.cpu_factor, asked.seed)
    fleet = Fleet(question.node, shards, 1, layout.searches)
    limit, most = most_queries(trace, fleet)
    replicas, times = _replicate(trace, fleet, workload, most)
    seconds = question.cpu_factor * build.seconds(geometry.vectors, layout)
    laws = {"probes": effort.probed, "reads": effort.pages}
    ranges = {name: law.interval(geometry.vectors) for name, law in laws.items()}
    ranges["reads"] = left * ranges["reads"][0], left * ranges["reads"][1]
    return IndexPlan(
        workload=workload, node=question.node, nodes=shards * replicas, shards=shards, replicas=replicas,
        vectors_per_shard=geometry.vectors, lists=layout.lists, code_bytes=layout.code_bytes,
        dram_bytes=layout.memory_bytes, disk_bytes=geometry.file_bytes, build_disk_bytes=geometry.build_bytes,
        probes=work.probed, scanned=work.scanned, candidates=work.candidates, reads=work.pages,
        cpu_ms=1e3 * question.cpu_factor * work.cpu_s, p50_ms=1e3 * times.p50_s, p99_ms=1e3 * times.p99_s,
        cores=times.cores, drives=times.drives, searches=times.searches, limit=limit, qps_most=most * replicas,
        build_hours=seconds / 3600, ranges=ranges, places=layout.searches, trace=trace,
        assumptions=(*_assumptions(base, asked, effort, build, question), _held(geometry.held_share)),
    )  # fmt: skip


def _calibrate(geometry: Geometry, base: Matrix, asked: Asked, dram: int) -> tuple[EffortLaw, BuildLaw]:
    """Return the laws of small indexes with the codes and lists of a geometry."""
    sizes = np.unique(np.rint(len(base) * _SHRUNK ** (np.arange(-_STEPS, 1) / _STEPS)).astype(np.int64))
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes.tolist():
            path = Path(folder) / f"{size}.index"
            measured.append(measure_small(base[:size], asked, geometry.layout_of(size), dram, path))
    return EffortLaw.fit(measured, asked.k), BuildLaw.fit(measured, linking_seconds(geometry.layout))


def _replicate(trace: QueryTrace, fleet: Fleet, workload: SearchWorkload, most: float) -> tuple[int, QueueTimes]:
    """Return the fewest replicas that keep utilisation and latency, and the times of queries on one of them."""
    replicas = max(1, math.ceil(workload.qps / (_BUSY * most)))
    queries = max(1000, _QUERIES_SIMULATED // fleet.shards)
    for _ in range(_ATTEMPTS):
        times = simulate_queues(trace, fleet, workload.qps / replicas, queries=queries)
        if workload.p99_ms is None or 1e3 * times.p99_s <= workload.p99_ms:
            return replicas, times
        replicas = max(replicas + 1, int(replicas * _GROWTH))
    raise ValueError(
        f"p99_ms={workload.p99_ms:g}: with {replicas * fleet.shards} machines 99 % of the queries still take "
        f"{1e3 * times.p99_s:.3g} ms: expected a limit above that, or faster cores and drives"
    )


def _held(share: float) -> str:
    return f"DRAM holds {share:.0%} of the pages of vectors; queries need all pages alike."


def _assumptions(
    base: Matrix, asked: Asked, effort: EffortLaw, build: BuildLaw, question: _Question
) -> tuple[str, ...]:
    pages = effort.pages
    return (
        f"The vectors are like {len(base):,} of the sample ({base.dtype.name}, dimension {base.shape[1]}), the queries "
        f"like {len(asked.queries)} others.",
        f"At {pages.size:,} vectors reads grow as N^{pages.slope:.2f}, probes as N^{effort.probed.slope:.2f} and codes "
        f"scanned as N^{effort.scanned.slope:.2f}; over each factor of e in N, the height of these slopes over "
        f"{pages.least:g} falls by {-math.expm1(-pages.fade):.0%}, {-math.expm1(-effort.probed.fade):.0%} and "
        f"{-math.expm1(-effort.scanned.fade):.0%}. The fits are off by {pages.residual:.1%}, "
        f"{effort.probed.residual:.1%} and {effort.scanned.residual:.1%} at the sizes measured.",
        f"A query takes {1e6 * effort.call_s:.0f} us of processor time, {1e9 * effort.code_s:.1f} ns for each code and "
        f"{1e6 * effort.page_s:.1f} us for each page (off by {effort.cpu_residual:.1%}); a core of the node takes "
        f"{question.cpu_factor:g} times as long as this machine's.",
        f"Build times are those of small indexes, phase by phase (off by {build.residual:.1%}), on one core; linking a "
        f"list into the graph over more than 12,288 of them takes {1e6 * build.link_s:.0f} us.",
        f"{_DRAM_SHARE:.0%} of a node's DRAM ({format_bytes(_DRAM_SHARE * question.node.dram)}) is the index's budget.",
        "Each query goes to every shard of one replica and asks one query a call; queries arrive at random. A query "
        f"to a thread that was idle for {1e3 * effort.trace.waking[-1][0]:.0f} ms takes "
        f"{1e6 * effort.trace.waking[-1][1]:.0f} us longer, as on this machine.",
        f"At most {_BUSY:.0%} of cores, drives or places of searches are busy; reads take log-normal times ("
        f"{question.node}).",
        "Time on the network, and commits, filters and documents, are not counted.",
    )
