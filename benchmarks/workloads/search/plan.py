"""A plan beside the index that it is a plan of: predicted and measured reads, DRAM, disk, build and latency.

``python -m memhier.benchmarks.workloads.search.plan --dir /path/on/the/device`` takes three real data sets at a half,
three quarters and all of their vectors. Each plan is calibrated on a quarter of the vectors and on other queries than
are asked then. Both get the same DRAM and a probe of the device. Latency is measured under load: queries arrive at
random, whether earlier ones are answered or not, at a share of the rate that the plan takes for the most.

Processor time on a shared machine changes from minute to minute. So a fixed search is timed beside the small indexes and
beside the measurement; ``pace`` is the ratio of the two, 1 on a quiet machine, and the column ``at that pace`` is the
prediction with processor times multiplied by it.

Two more predictions are for a hundred times this machine, and a simulation of a hundred machines answers: the most
queries a second, and the latency of an index of a hundred shards.
"""

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.ann.plan import IndexPlan, SearchWorkload, plan_index
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import data_set_folder, load_search_set
from memhier.benchmarks.workloads.harness import Outcome, Row, rows_table, workload
from memhier.io.device import probe
from memhier.planning.node import Node
from memhier.planning.queues import Fleet, QueryTrace, QueueTimes, simulate_queues

__all__ = ["main"]

K = 10
RECALL = 0.95
SHARES = (1 / 2, 3 / 4, 1.0)  # of the vectors, to predict
SAMPLE = 1 / 4  # of the vectors, to calibrate with
ASKED = 256  # queries to calibrate with, and as many others to measure with
LOAD = 0.4  # of the most queries a second
MACHINES = 100
DRAM_SHARE = 0.85  # that a plan gives to the index
DRAM_EACH = {"sift-imagenet200k": 43, "fashion-mnist": 160, "lm-softmax-50k": 190}  # bytes for each vector

Matrix: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """Vectors in random order, and queries to calibrate and to measure with."""

    name: str
    base: Matrix
    calibrating: Matrix
    asking: Matrix


def load(name: str, most: int | None) -> Case:
    """Return a data set, cut to `most` vectors."""
    random = np.random.default_rng(1)
    if name == "lm-softmax-50k":  # the weights of an output layer, some of which play queries
        vectors = np.load(data_set_folder(name) / "weight_f16.npy")
        queries, base = np.split(vectors[random.permutation(len(vectors))], [2 * ASKED])
    else:
        data = load_search_set(name)
        base = data.base[random.permutation(len(data.base))]
        queries = data.queries[random.permutation(len(data.queries))[: 2 * ASKED]]
    queries = queries.astype(np.float32)
    return Case(name, base[:most], queries[:ASKED], queries[ASKED:])


class Pace:
    """The processor time of a fixed search, which tells how fast the machine is just now."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._queries = case.calibrating
        self._index = ZoomIndex.build(folder / "pace", case.base[:4096], dram=16 << 20)

    def seconds(self) -> float:
        """Return the median processor seconds of a query."""
        spent = []
        for query in self._queries:
            before = time.thread_time()
            self._index.search(query, K, recall=RECALL)
            spent.append(time.thread_time() - before)
        return float(np.median(spent))

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def under_load(index: ZoomIndex, queries: Matrix, rate: float, seconds: float, places: int) -> Floats:
    """Return the seconds from arrival to answer of queries that arrive at random for so long, in the order of arrival.

    As many threads search as the index searches at a time; queries wait for them in one queue.
    """
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(1 / rate, max(20, int(rate * seconds))))
    taken: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    latencies = np.zeros(len(arrivals))
    start = time.perf_counter() + 0.05

    def answer() -> None:
        while (number := taken.get()) is not None:
            index.search(queries[number % len(queries)], K, recall=RECALL)
            latencies[number] = time.perf_counter() - start - arrivals[number]

    workers = [threading.Thread(target=answer) for _ in range(places)]
    for worker in workers:
        worker.start()
    for number, arrival in enumerate(arrivals.tolist()):
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        taken.put(number)
    for _ in workers:
        taken.put(None)
    for worker in workers:
        worker.join()
    return latencies[len(latencies) // 10 :]


def machine(folder: Path, dram: int) -> Node:
    """Return this machine, its drive probed now, with so much DRAM for the index."""
    profile = probe(folder, size="256MiB", seconds=2.0, depths=(1, 4, 16, 64))
    return Node.of_probe(profile, os.cpu_count() or 1, int(np.ceil(dram / DRAM_SHARE)))


def measure(case: Case, share: float, seconds: float, pace: Pace, folder: Path) -> tuple[list[Row], IndexPlan]:
    """Return a row for each figure of an index of a share of the vectors, and the plan."""
    count = int(share * len(case.base))
    dram = DRAM_EACH[case.name] * count
    rows_most = int(SAMPLE * len(case.base))
    node = machine(folder, dram)
    before = pace.seconds()
    plan = plan_index(
        case.base[:rows_most], SearchWorkload(count, RECALL, 1.0, K), node, queries=case.calibrating,
        sample_rows=rows_most,
    )  # fmt: skip
    between = pace.seconds()
    spent = time.process_time()
    index = ZoomIndex.build(folder / "index", case.base[:count], dram=int(DRAM_SHARE * node.dram))
    spent = time.process_time() - spent
    with index:
        after, stats = pace.seconds(), index.stats()
        pages, cpu = _asked_alone(index, case.asking)
        now = (after + pace.seconds()) / (before + between)
        trace = plan.trace.scaled(now, 1.0)
        rate = LOAD * min(plan.qps_most, _most(trace, plan))
        late = 1e3 * under_load(index, case.asking, rate, seconds, plan.places)
    shutil.rmtree(folder / "index")
    plain, paced = (_at(each, plan, rate) for each in (plan.trace, trace))
    figures = [
        ("reads", "a query", plan.reads, plan.reads, pages),
        ("DRAM", "MB", plan.dram_bytes / 1e6, plan.dram_bytes / 1e6, stats["planned_bytes"] / 1e6),
        ("disk", "MB", plan.disk_bytes / 1e6, plan.disk_bytes / 1e6, stats["file_bytes"] / 1e6),
        ("build", "CPU s", plan.build_hours * 3600, plan.build_hours * 3600 * 2 * after / (before + between), spent),
        ("CPU", "ms a query", plan.cpu_ms, plan.cpu_ms * now, 1e3 * cpu),
        ("p50", f"ms at {rate:,.0f}/s", 1e3 * plain.p50_s, 1e3 * paced.p50_s, float(np.quantile(late, 0.5))),
        ("p99", f"ms at {rate:,.0f}/s", 1e3 * plain.p99_s, 1e3 * paced.p99_s, float(np.quantile(late, 0.99))),
    ]
    return [
        {
            "data": case.name, "vectors": count, "figure": name, "unit": unit, "predicted": predicted,
            "at_that_pace": at_pace, "measured": measured, "ratio": predicted / measured,
            "ratio_at_pace": at_pace / measured, "pace": now,
        }
        for name, unit, predicted, at_pace, measured in figures
    ], plan  # fmt: skip


def _asked_alone(index: ZoomIndex, queries: Matrix) -> tuple[float, float]:
    """Return the mean pages and processor seconds of queries, each asked alone."""
    pages, spent = [], []
    for query in queries:
        before = time.thread_time()
        pages.append(index.search(query, K, recall=RECALL).stats["page_requests"])
        spent.append(time.thread_time() - before)
    return float(np.mean(pages)), float(np.mean(spent))


def _most(trace: QueryTrace, plan: IndexPlan) -> float:
    """Return the queries a second that the places of searches answer at most."""
    alone = _at(trace, plan, 1e-3 / float(trace.cpu_s.mean()))
    return plan.places / alone.mean_s


def _at(trace: QueryTrace, plan: IndexPlan, rate: float) -> QueueTimes:
    return simulate_queues(trace, Fleet(plan.node, 1, 1, plan.places), rate, queries=10_000)


def hundredfold(plan: IndexPlan, name: str) -> Iterator[Row]:
    """Yield predictions for a hundred machines, and what their simulation gives."""
    node = Node(16, 64 << 30, 2, 800_000.0)
    one = Fleet(node, 1, 1, 8)
    alone = simulate_queues(plan.trace, one, 1e-3 / float(plan.trace.cpu_s.mean()), queries=2000)
    most = MACHINES * min(
        node.cores / float(plan.trace.cpu_s.mean()), node.iops / float(plan.trace.pages.mean()), 8 / alone.mean_s
    )
    flooded = simulate_queues(plan.trace, replace(one, replicas=MACHINES), 2 * most, queries=400 * MACHINES)
    rate = LOAD * most / MACHINES
    group = simulate_queues(plan.trace, one, rate, queries=20_000)
    fleet = simulate_queues(plan.trace, replace(one, replicas=MACHINES), LOAD * most, queries=400 * MACHINES, seed=1)
    each: Callable[[str, str, float, float], Row] = lambda figure, unit, predicted, simulated: {  # noqa: E731
        "trace": name, "figure": figure, "unit": unit, "predicted": predicted, "simulated": simulated,
        "ratio": predicted / simulated,
    }  # fmt: skip
    yield each("most queries", "a second", most, flooded.answered_per_s)
    for quantile, own, whole in (("p50", group.p50_s, fleet.p50_s), ("p99", group.p99_s, fleet.p99_s)):
        yield each(f"{quantile} of {LOAD * most:,.0f} queries/s", "ms", 1e3 * own, 1e3 * whole)


@workload
@click.option("--data", "names", multiple=True, type=click.Choice([*DRAM_EACH]), default=[*DRAM_EACH],
              show_default=True)  # fmt: skip
@click.option("--vectors", type=click.IntRange(16384), help="Of each set at most; all by default.")
@click.option("--seconds", default=8.0, show_default=True, help="Of load on each index.")
def main(scratch: Path, names: tuple[str, ...], vectors: int | None, seconds: float) -> Outcome:
    """Predict, build, search, and set the figures side by side."""
    rows: list[Row] = []
    fleets: list[Row] = []
    for name in names:
        case = load(name, vectors)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            pace = Pace(case, Path(folder))
            for share in SHARES:
                found, plan = measure(case, share, seconds, pace, Path(folder))
                rows += found
            pace.close()
        fleets += hundredfold(plan, name)
    figures = [
        Figure.of(f"{row['figure']}, {row['data']}, {row['vectors']:,} vectors", row["ratio"], "predicted over measured",
                  "neither", clock=row["figure"] in ("build", "CPU", "p50", "p99"))
        for row in rows
    ]  # fmt: skip
    figures += [
        Figure.of(f"{row['figure'].partition(' of ')[0]}, {MACHINES} machines, {row['trace']}", row["ratio"],
                  "predicted over simulated", "neither")
        for row in fleets
    ]  # fmt: skip
    shown = [
        rows_table("Plans, and the indexes measured", rows),
        rows_table(f"{MACHINES} machines of 16 cores and two NVMe drives, from the traces of the largest plans", fleets),
    ]
    return Outcome(Record(figures), shown, {"results": rows, "fleets": fleets})


if __name__ == "__main__":
    main()
