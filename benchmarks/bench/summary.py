"""Summaries of rows of results: medians over the rounds, figures at a given recall, and ratios pair by pair."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.bench.results import Row

__all__ = ["CLOCK", "METRICS", "TARGETS", "Point", "at_recall", "curve", "ratios", "script_records", "search_peers"]

TARGETS = (0.95, 0.99)
# Of a search row: the label, and whether less is better.
METRICS = {
    "pages": ("4 KiB reads a query", True),
    "cpu_ms": ("CPU ms a query", True),
    "qps_core": ("queries a CPU second", False),
    "qps_wall": ("queries a second, one at a time", False),
    "p50_ms": ("p50 ms", True),
    "p99_ms": ("p99 ms", True),
}
# Those that depend on wall time.
CLOCK = ("qps_wall", "p50_ms", "p99_ms")
# By how much the recall of a batch may fall short of that of single queries: reads that end in another order.
_TIES = 0.005


@dataclass(frozen=True, slots=True)
class Point:
    """One effort of one peer: medians over the rounds, and the least and the greatest of each figure.

    Attributes
    ----------
    effort
        The search parameters.
    recall, recall_id
        Recall@k by distance, where ties count, and by id.
    figures
        For each of :data:`METRICS`: median, least and greatest.
    """

    effort: dict[str, Any]
    recall: float
    recall_id: float
    figures: dict[str, tuple[float, float, float]]


def search_peers(rows: list[Row], workload: str, size: str) -> dict[str, list[Row]]:
    """Return the search rows of each peer of a workload, in the order of the rounds."""
    peers: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "search" and row["workload"] == workload and row["size"] == size:
            peers.setdefault(row["peer"], []).append(row)
    return {peer: _of_one_kind(sorted(found, key=lambda row: int(row["round"]))) for peer, found in peers.items()}


def _of_one_kind(rounds: list[Row]) -> list[Row]:
    """Return the rounds with the settings of the first, which a new run measures first: the rest are left from before.

    Settings hold the version of the index, too, so that no median mixes two.
    """
    return [row for row in rounds if row["settings"] == rounds[0]["settings"]]


def script_records(rows: list[Row]) -> dict[tuple[str, str], tuple[Row, Record]]:
    """Return row and record of each script, by workload and size."""
    return {
        (row["workload"], row["size"]): (row, Record.read(row["figures"])) for row in rows if row["kind"] == "script"
    }


def curve(rounds: list[Row]) -> list[Point]:
    """Return a point for each effort, by rising recall, from all rounds that hold it."""
    points = []
    same: dict[str, list[Row]] = {}
    for row in rounds:
        for point in row["rows"]:
            same.setdefault(json.dumps(point["effort"]), []).append(point)
    for efforts in same.values():
        figures = {}
        for name in METRICS:
            values = [_figure(row, name) for row in efforts]
            figures[name] = (float(np.median(values)), min(values), max(values))
        recall, by_id = (float(np.median([row[name] for row in efforts])) for name in ("recall", "recall_id"))
        points.append(Point(efforts[0]["effort"], recall, by_id, figures))
    return sorted(points, key=lambda point: point.recall)


def at_recall(points: list[Point], target: float, metric: str) -> tuple[float, str] | None:
    """Return a metric at a recall, from the best efforts for it, and its origin in words.

    Between two efforts it is interpolated, linearly in recall; below the least recall measured it is that of the
    cheapest effort that exceeds the target. None if no effort reaches the target.
    """
    sign = 1 if METRICS[metric][1] else -1
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.recall):
        value = sign * point.figures[metric][0]
        if not best or value < best[-1][1]:
            best.append((point.recall, value))
    reaching = [pair for pair in best if pair[0] >= target]
    if not reaching:
        return None
    above = reaching[-1]
    below = next((pair for pair in best if pair[0] < target), None)
    if below is None or above[0] == target:
        return sign * above[1], f"measured at {above[0]:.3f}"
    share = (target - below[0]) / (above[0] - below[0])
    value = below[1] + share * (above[1] - below[1])
    return sign * value, f"interpolated between {below[0]:.3f} and {above[0]:.3f}"


def ratios(ours: list[Row], theirs: list[Row], target: float, metric: str) -> list[float]:
    """Return the factors by which ours is better, of each round in which both reach the target."""
    out = []
    for mine, other in zip(ours, theirs, strict=False):
        pair = [at_recall(curve([row]), target, metric) for row in (mine, other)]
        if pair[0] is not None and pair[1] is not None and min(pair[0][0], pair[1][0]) > 0:
            ratio = pair[1][0] / pair[0][0]
            out.append(ratio if METRICS[metric][1] else 1 / ratio)
    return out


def _figure(row: Row, name: str) -> float:
    if name == "qps_core":
        # A batch spares calls: it counts if a peer offers one that finds as much.
        as_good = row.get("batch_recall", 0.0) >= row["recall"] - _TIES
        return 1e3 / max(1e-9, float(min(row["cpu_ms"], row["batch_cpu_ms"]) if as_good else row["cpu_ms"]))
    if name == "qps_wall":
        return 1e3 / max(1e-9, float(row["mean_ms"]))
    return float(row[name])
