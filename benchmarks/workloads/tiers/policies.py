"""Policies on the whole traces of the data set ``cache-traces``: misses, and speed.

``python -m memhier.benchmarks.workloads.tiers.policies`` also compares every access with a plain cache (``--check``).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.benchmarks.bench.figures import Curves, Figure, Record, Series
from memhier.benchmarks.cli.traces import read_trace
from memhier.benchmarks.datasets import data_set_folder
from memhier.benchmarks.workloads.harness import Outcome, rows_table, workload
from memhier.benchmarks.workloads.tiers.plain_caches import PLAIN_CACHES
from memhier.planning.curves import miss_ratio_curve
from memhier.planning.simulation import simulate
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy

__all__ = ["main"]

Keys = npt.NDArray[np.int64]

POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "belady": Belady}
SHARES = (0.001, 0.01, 0.1)
CURVE_POINTS = 24
SLOTS, ACCESSES, ROUNDS = 1_000_000, 400_000, 9


def compare(path: Path, check: bool, first: int | None) -> list[dict[str, Any]]:
    """Count misses on one trace at several capacities, and compare them with the plain caches."""
    keys = read_trace(path)[:first]
    distinct = len(np.unique(keys))
    rows = []
    for share in SHARES:
        capacity = max(1, round(distinct * share))
        row: dict[str, Any] = {"trace": path.name.split(".")[0], "accesses": len(keys), "distinct": distinct}
        row |= {"share": share, "capacity": capacity, "equal": check}
        for name, make in POLICIES.items():
            hit = make(capacity).replay(keys)
            row[name] = len(keys) - int(np.count_nonzero(hit))
            if check and not np.array_equal(hit, PLAIN_CACHES[name](keys.tolist(), capacity)):
                raise AssertionError(f"{path.name}: {name} at {capacity} rows differs from the plain cache")
        rows.append(row)
    return rows


def curves_of(path: Path, first: int | None) -> Curves:
    """Return misses per access of every policy at many capacities."""
    keys = read_trace(path)[:first]
    sizes = np.unique(np.rint(np.geomspace(1, len(np.unique(keys)), CURVE_POINTS)).astype(np.int64))
    found = {name: miss_ratio_curve(keys, sizes, policy=name).miss_ratio.tolist() for name in POLICIES}
    lines = [Series(name, list(zip(sizes.tolist(), ratios, strict=True))) for name, ratios in found.items()]
    return Curves(path.name.split(".")[0], "rows in DRAM", "misses per access", lines, log_x=True)


def least_lead(curves: Curves) -> float:
    """Return the smallest lead of Belady over the others at any capacity, in misses per access."""
    ratios = {line.name: np.array([ratio for _, ratio in line.points]) for line in curves.series}
    belady = ratios.pop("belady")
    return float(min(np.min(other - belady) for other in ratios.values()))


def measure_speed(longest: Keys) -> list[dict[str, Any]]:
    """Return millions of accesses a second of processor time, round by round."""
    weights = np.cumsum(1 / np.arange(1, SLOTS + 1) ** 1.05)
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(SLOTS)
    skewed = shuffled[np.searchsorted(weights / weights[-1], rng.random(ACCESSES))]
    uniform = rng.integers(0, SLOTS, ACCESSES)
    rows = []
    for name, make in POLICIES.items():
        if name == "belady":
            continue
        policy = make(SLOTS)
        policy.replay(shuffled)
        for batch, words in ((skewed, "skewed"), (uniform, "uniform")):
            rows.append(_rate(f"{name}: batches of {ACCESSES:,} hits, {words}, {SLOTS:,} rows", batch, policy.access))
    distinct = len(np.unique(longest))
    for name in POLICIES:
        for share in (0.01, 0.1):
            dram = max(1, round(distinct * share)) * 256

            def run(keys: Keys, name: str = name, dram: int = dram) -> None:
                simulate(keys, dram=dram, row_bytes=256, policy=name)

            rows.append(_rate(f"simulate {name}, {share:.0%} of the rows in DRAM", longest, run))
    sizes = np.unique(np.rint(np.geomspace(1, distinct, CURVE_POINTS)).astype(np.int64))
    for name in ("lru", "belady"):

        def draw(keys: Keys, name: str = name) -> None:
            miss_ratio_curve(keys, sizes, policy=name)

        rows.append(_rate(f"curve of {len(sizes)} capacities, {name}", longest, draw))
    return rows


def _rate(what: str, keys: Keys, call: Callable[[Keys], object]) -> dict[str, Any]:
    rates = []
    for _ in range(ROUNDS):
        started = time.process_time()
        call(keys)
        rates.append(len(keys) / (time.process_time() - started) / 1e6)
    return {"what": what, "cpu_rounds": rates}


def record(rows: list[dict[str, Any]], curves: list[Curves], speeds: list[dict[str, Any]]) -> Record:
    """Return misses and speed as figures, and a plot of each trace's curves."""
    figures = [
        Figure.of(
            f"{row['trace']}, {name}, {row['share']:.1%} of the rows in DRAM", row[name] / row["accesses"],
            "misses per access", "less", exact=True,
        )
        for row in rows
        for name in POLICIES
    ]  # fmt: skip
    unit = "million accesses a CPU second"
    return Record([*figures, *(Figure.of(row["what"], row["cpu_rounds"], unit, "more") for row in speeds)], curves)


@workload
@click.option("--check/--no-check", default=True, help="Compare every access with a plain cache: minutes.")
@click.option("--first", type=click.IntRange(1), help="Only so many accesses of each trace.")
def main(check: bool, first: int | None) -> Outcome:
    """Count misses of every policy on every trace, and measure speed."""
    folder = data_set_folder("cache-traces")
    paths = sorted(path for path in folder.glob("*.*") if path.suffix in (".xz", ".gz"))
    if not paths:
        raise FileNotFoundError(f"no data set 'cache-traces' at {folder}: it holds no .xz or .gz file")
    rows = [row for path in tqdm(paths, desc="misses") for row in compare(path, check, first)]
    curves = [curves_of(path, first) for path in tqdm(paths, desc="curves")]
    margin = min(map(least_lead, curves))
    if margin < 0:
        raise AssertionError("Belady missed more than another policy")
    speeds = measure_speed(max((read_trace(path)[:first] for path in paths), key=len))
    shown = rows_table(
        "misses, one access at a time" + (", equal to plain caches at every access" if check else ""), rows
    )
    return Outcome(record(rows, curves, speeds), [shown], {"misses": rows, "least_lead": margin, "speed": speeds})


if __name__ == "__main__":
    main()
