"""A plan beside the index that it is a plan of: predicted and measured reads, DRAM, disk, build and latency.

``python -m memhier.benchmarks.workloads.search.plan --dir /path/on/the/device`` takes three real data sets at a half,
three quarters and all of their vectors. Each plan is calibrated on a quarter of the vectors and on other queries than
are asked then. Both get the same DRAM and a probe of the device. Latency is measured under load: queries arrive at
random, whether earlier ones are answered or not, at a share of the rate that the plan takes for the most.

``others`` are the cores that other processes kept busy meanwhile. On a machine that is not quiet, processor times
differ from minute to minute, and latencies tell nothing.

Two more predictions are for a hundred machines, and a simulation of all their queues answers: the most queries a
second, and the latency at a share of them, which a plan takes from the queues of one machine.
"""

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
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
from memhier.benchmarks.machine import Neighbours
from memhier.benchmarks.workloads.harness import Outcome, Row, rows_table, workload
from memhier.io.device import probe
from memhier.planning.node import Node
from memhier.planning.queues import Fleet, most_queries, simulate_queues

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
    profile = probe(folder, size="256MiB", seconds=2.0, depths=(1, 8, 64))
    return Node.of_probe(profile, os.cpu_count() or 1, int(np.ceil(dram / DRAM_SHARE)))


def measure(case: Case, share: float, seconds: float, folder: Path) -> tuple[list[Row], IndexPlan]:
    """Return a row for each figure of an index of a share of the vectors, and the plan."""
    count, most = int(share * len(case.base)), int(SAMPLE * len(case.base))
    node = machine(folder, DRAM_EACH[case.name] * count)
    with Neighbours() as neighbours:
        plan = plan_index(
            case.base[:most], SearchWorkload(count, RECALL, 1.0, K), node, queries=case.calibrating, sample_rows=most
        )
        spent = time.process_time()
        index = ZoomIndex.build(folder / "index", case.base[:count], dram=int(DRAM_SHARE * node.dram))
        spent = time.process_time() - spent
        rate = LOAD * plan.qps_most
        with index:
            stats = index.stats()
            pages, cpu = _asked_alone(index, case.asking)
            late = 1e3 * under_load(index, case.asking, rate, seconds, plan.places)
    shutil.rmtree(folder / "index")
    times = simulate_queues(plan.trace, Fleet(plan.node, 1, 1, plan.places), rate, queries=10_000)
    figures = [
        ("reads", "a query", plan.reads, pages),
        ("DRAM", "MB", plan.dram_bytes / 1e6, stats["planned_bytes"] / 1e6),
        ("disk", "MB", plan.disk_bytes / 1e6, stats["file_bytes"] / 1e6),
        ("build", "CPU s", plan.build_hours * 3600, spent),
        ("CPU", "ms a query", plan.cpu_ms, 1e3 * cpu),
        ("p50", f"ms at {rate:,.0f}/s", 1e3 * times.p50_s, float(np.quantile(late, 0.5))),
        ("p99", f"ms at {rate:,.0f}/s", 1e3 * times.p99_s, float(np.quantile(late, 0.99))),
    ]
    return [
        {"data": case.name, "vectors": count, "figure": name, "unit": unit, "predicted": predicted,
         "measured": measured, "ratio": predicted / measured, "others": neighbours.cores}
        for name, unit, predicted, measured in figures
    ], plan  # fmt: skip


def _asked_alone(index: ZoomIndex, queries: Matrix) -> tuple[float, float]:
    """Return the mean pages and processor seconds of queries, each asked alone."""
    pages, spent = [], []
    for query in queries:
        before = time.thread_time()
        pages.append(index.search(query, K, recall=RECALL).stats["page_requests"])
        spent.append(time.thread_time() - before)
    return float(np.mean(pages)), float(np.mean(spent))


def hundredfold(plan: IndexPlan, name: str) -> Iterator[Row]:
    """Yield predictions for a hundred machines, and the figures of their simulation."""
    one = Fleet(Node(16, 64 << 30, 2, 800_000.0))
    fleet, queries = replace(one, replicas=MACHINES), 400 * MACHINES
    most = most_queries(plan.trace, fleet)[1]
    rate = LOAD * most
    flooded = simulate_queues(plan.trace, fleet, 2 * most, queries=queries)
    group = simulate_queues(plan.trace, one, rate / MACHINES, queries=20_000)
    whole = simulate_queues(plan.trace, fleet, rate, queries=queries, seed=1)
    for figure, unit, predicted, simulated in (
        ("most queries", "a second", most, flooded.answered_per_s),
        (f"p50 of {rate:,.0f} queries/s", "ms", 1e3 * group.p50_s, 1e3 * whole.p50_s),
        (f"p99 of {rate:,.0f} queries/s", "ms", 1e3 * group.p99_s, 1e3 * whole.p99_s),
    ):
        yield {"trace": name, "figure": figure, "unit": unit, "predicted": predicted, "simulated": simulated,
               "ratio": predicted / simulated}  # fmt: skip


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
            for share in SHARES:
                found, plan = measure(case, share, seconds, Path(folder))
                rows += found
        fleets += hundredfold(plan, name)
    figures = [
        Figure.of(f"{row['figure']}, {row['data']}, {row['vectors']:,} vectors", row["ratio"],
                  "predicted over measured", "neither", clock=row["figure"] in ("build", "CPU", "p50", "p99"))
        for row in rows
    ]  # fmt: skip
    figures += [
        Figure.of(f"{row['figure'].partition(' of ')[0]}, {MACHINES} machines, {row['trace']}", row["ratio"],
                  "predicted over simulated", "neither")
        for row in fleets
    ]  # fmt: skip
    shown = [
        rows_table("Plans, and the indexes measured", rows),
        rows_table(
            f"{MACHINES} machines of 16 cores and two NVMe drives, from the traces of the largest plans", fleets
        ),
    ]
    return Outcome(Record(figures), shown, {"results": rows, "fleets": fleets})


if __name__ == "__main__":
    main()
