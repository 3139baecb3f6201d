"""The question that a plan of a vector index answers, and the plan."""

from dataclasses import dataclass

from memhier.ann.zoom.preview.space import METRICS, Metric
from memhier.arguments import check_int, check_number
from memhier.planning.node import Node
from memhier.planning.queues import Busiest, QueryTrace

__all__ = ["IndexPlan", "SearchWorkload"]


@dataclass(frozen=True, slots=True)
class SearchWorkload:
    """The index and the traffic to plan for.

    Attributes
    ----------
    vectors
        Number of vectors.
    recall
        The declared recall, above 0 and below 1.
    qps
        Queries per second.
    k
        Neighbours of each query.
    metric
        ``"l2"``, ``"ip"`` or ``"cosine"``.
    p99_ms
        The latency that 99 % of the queries keep, in milliseconds; None lets utilisation alone decide.
    """

    vectors: int
    recall: float = 0.95
    qps: float = 1000.0
    k: int = 10
    metric: Metric = "l2"
    p99_ms: float | None = None

    def __post_init__(self) -> None:
        check_int("vectors", self.vectors, 1, 2**40)
        check_number("recall", self.recall, 0, 0.9999, above=True)
        check_number("qps", self.qps, 0, 1e9, above=True)
        check_int("k", self.k, 1)
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r}: expected one of {', '.join(METRICS)}")
        if self.p99_ms is not None:
            check_number("p99_ms", self.p99_ms, 0, above=True)


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The plan of :func:`plan_index`. Figures of a machine are means over queries where nothing else is said.

    Attributes
    ----------
    workload, node
        The question.
    nodes, shards, replicas
        Machines: shards times replicas. A query goes to all shards of one replica.
    vectors_per_shard, lists, code_bytes
        Of the index of one machine.
    dram_bytes, disk_bytes, build_disk_bytes
        Of one machine: DRAM of the index, its files, and the most on disk while it is built.
    probes, scanned, candidates, reads, cpu_ms
        Of one query on one machine: lists and codes scanned, vectors left by the bounds, pages read, processor
        milliseconds.
    p50_ms, p99_ms
        Of a query at `workload.qps` on all machines, milliseconds.
    cores, drives, searches
        Shares of the time that they are busy at that load.
    limit
        The busiest of the three.
    qps_most
        Queries per second at which it would always be busy.
    build_hours
        Processor hours of one machine's build: hours on one core.
    ranges
        Ends of 95 % intervals of probes and reads, from the scatter of the small indexes.
    places
        Searches that a machine runs at a time.
    trace
        The queries that the simulation drew from, as they are on one machine.
    assumptions
        Sentences.
    """

    workload: SearchWorkload
    node: Node
    nodes: int
    shards: int
    replicas: int
    vectors_per_shard: int
    lists: int
    code_bytes: int
    dram_bytes: int
    disk_bytes: int
    build_disk_bytes: int
    probes: float
    scanned: float
    candidates: float
    reads: float
    cpu_ms: float
    p50_ms: float
    p99_ms: float
    cores: float
    drives: float
    searches: float
    limit: Busiest
    qps_most: float
    build_hours: float
    ranges: dict[str, tuple[float, float]]
    places: int
    trace: QueryTrace
    assumptions: tuple[str, ...]

    def cost_per_million(self, price_node_hour: float) -> float:
        """Return the price of a million queries, for the price of a machine for an hour."""
        return self.nodes * check_number("price_node_hour", price_node_hour, 0) / (self.workload.qps * 3600) * 1e6
