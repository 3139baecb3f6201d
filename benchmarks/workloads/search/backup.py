"""An index in a simulated object store: a push with faults, a push of changes, a pull, and search in place.

``python -m memhier.benchmarks.workloads.search.backup --vectors 50000`` builds an index of generated vectors. Each
request to the store takes 30 ms and its bytes 100 MB/s; every fiftieth request fails, loses its answer, is cut short,
or has a byte flipped; the first push is killed half-way, and resumed. The pulled copy must equal the index. Then single
queries run in place with an empty cache, and then each in turn with a warm one and on the local index. For an index of
10 GB: ``--vectors 2600000 --dram 1800000000 --recall 0.85``.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from memhier import check_backup
from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.simulated_store import FAULTS, Bucket, FileObjects, Killed, simulated
from memhier.benchmarks.workloads.harness import Outcome, workload

__all__ = ["main"]

K = 10
URL = "simulated://bucket/index"
_ROUNDS = 5

Floats = npt.NDArray[np.float32]


class Times:
    """Wall and processor milliseconds of single searches of one index, and the ids found."""

    def __init__(self, index: ZoomIndex, recall: float) -> None:
        self._index = index
        self._recall = recall
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.ids: list[Any] = []

    def ask(self, query: Floats) -> None:
        """Search for one query."""
        cpu, wall = time.process_time(), time.perf_counter()
        found = self._index.search(query, K, recall=self._recall)
        self.wall.append((time.perf_counter() - wall) * 1e3)
        self.cpu.append((time.process_time() - cpu) * 1e3)
        self.ids.append(found.ids)


def by_query(here: ZoomIndex, far: ZoomIndex, queries: Floats, recall: float) -> tuple[Times, Times]:
    """Ask each query of both, one after the other, so that a neighbour on the machine disturbs both alike."""
    local, warm = Times(here, recall), Times(far, recall)
    for number, query in enumerate(queries):
        for side in (local, warm) if number % 2 else (warm, local):
            side.ask(query)
    return local, warm


def moved(bucket: Bucket, work: Callable[[], object]) -> tuple[int, int, int]:
    """Do work; return the requests, and the bytes sent and received by the store."""
    before = bucket.requests, bucket.received, bucket.sent
    work()
    return bucket.requests - before[0], bucket.received - before[1], bucket.sent - before[2]


def push_killed_and_resumed(index: ZoomIndex, bucket: Bucket, size: int) -> None:
    """Push an index of about `size` bytes; the process dies half-way once."""
    plain = bucket.fault
    bucket.fault = lambda number: "kill" if bucket.received > size / 2 else plain(number)
    try:
        index.push(URL)
    except Killed:
        bucket.fault, bucket.dead = plain, False
        index.push(URL)


def transfers(index: ZoomIndex, scratch: Path, bucket: Bucket, added: Floats) -> list[Figure]:
    """Push, change, push again and pull; check that nothing is lost."""
    size = index.stats()["file_bytes"]
    first = moved(bucket, lambda: push_killed_and_resumed(index, bucket, size))
    index.remove(np.arange(len(added)))
    index.add(added)
    index.commit()
    second = moved(bucket, lambda: index.push(URL))
    pull = moved(bucket, lambda: ZoomIndex.pull(URL, scratch / "copy"))
    damage = check_backup(URL)
    with ZoomIndex.open(scratch / "copy") as copy:
        damage += copy.check()
    index_bytes = index.stats()["file_bytes"] / 1e6
    return [
        Figure.of("index", index_bytes, "MB", "neither"),
        *(
            Figure.of(f"{name}, {title}", value, unit, "less")
            for title, (requests, received, sent) in {
                "first push": first, "push after 1 % changed": second, "pull": pull,
            }.items()
            for name, value, unit in (
                ("requests", requests, "requests"), ("sent there", received / 1e6, "MB"),
                ("read from there", sent / 1e6, "MB"),
            )
        ),
        Figure.of("damage found in backup and copy", len(damage), "findings", "less", exact=True),
    ]  # fmt: skip


def searches(
    here: ZoomIndex, scratch: Path, bucket: Bucket, queries: Floats, recall: float, cache_bytes: int
) -> list[Figure]:  # fmt: skip
    """Search in place with an empty and with a warm cache, beside the local index."""
    start, before = time.perf_counter(), bucket.requests
    with ZoomIndex.open(URL, cache=scratch / "cache", cache_bytes=cache_bytes) as far:
        opening, requests = time.perf_counter() - start, bucket.requests - before
        cold, before = Times(far, recall), bucket.requests
        for query in queries:
            cold.ask(query)
        cold_requests, before = (bucket.requests - before) / len(queries), bucket.requests
        rounds = [by_query(here, far, queries, recall) for _ in range(_ROUNDS)]
        warm_requests = (bucket.requests - before) / len(queries) / _ROUNDS
    expected = rounds[0][0].ids
    differ = sum(not np.array_equal(ids, other) for ids, other in zip(cold.ids, expected, strict=True))
    figures = [
        Figure.of("open in place", opening, "s", "less", clock=True),
        Figure.of("requests to open in place", requests, "requests", "less"),
        Figure.of("requests, cold", cold_requests, "a query", "less"),
        Figure.of("requests, warm", warm_requests, "a query", "less"),
        Figure.of("answers that differ", differ, "queries", "less", exact=True),
    ]
    sides = {"cold": [cold], "local": [local for local, _ in rounds], "warm": [warm for _, warm in rounds]}
    for share in (50, 99):
        found = {side: [float(np.percentile(one.wall, share)) for one in times] for side, times in sides.items()}
        figures += [Figure.of(f"p{share}, {side}", found[side], "ms", "less", clock=True) for side in sides]
        figures.append(Figure.of(f"p{share}, warm by local", ratios(found), "times", "less", clock=True))
    cpu = {side: [sum(one.cpu) for one in times] for side, times in sides.items()}
    figures.append(Figure.of("CPU, warm by local", ratios(cpu), "times", "less", clock=True))
    return figures


def ratios(found: dict[str, list[float]]) -> list[float]:
    """Return the warm figures divided by the local ones, round by round."""
    return [warm / local for warm, local in zip(found["warm"], found["local"], strict=True)]


@workload
@click.option("--vectors", default=50_000, show_default=True)
@click.option("--dimension", default=960, show_default=True)
@click.option("--dram", default=32 << 20, show_default=True, help="Bytes.")
@click.option("--queries", default=200, show_default=True)
@click.option(
    "--recall", default=0.95, show_default=True, help="Of searches; above the most that codes reach, all is read."
)
@click.option("--latency-ms", default=30.0, show_default=True)
@click.option("--megabytes-per-second", default=100.0, show_default=True, help="Of one request.")
@click.option("--fault-every", default=50, show_default=True, help="Requests.")
@click.option("--cache-bytes", default=64 << 30, show_default=True)
def main(
    scratch: Path, vectors: int, dimension: int, dram: int, queries: int, recall: float, latency_ms: float,
    megabytes_per_second: float, fault_every: int, cache_bytes: int,
) -> Outcome:  # fmt: skip
    """Push, pull and search."""
    data = mixed(vectors, dimension, 0)
    added = data.queries(vectors // 100 + queries)
    asked = added[vectors // 100 :]

    def fault(number: int) -> str | None:
        return FAULTS[number // fault_every % 4] if number % fault_every == 0 else None

    conduct = {"latency_s": latency_ms / 1e3, "bytes_per_s": megabytes_per_second * 1e6}
    with (
        simulated("bucket", objects=FileObjects(scratch / "objects"), fault=fault, **conduct) as bucket,
        ZoomIndex.build(scratch / "index", data.blocks(8192), dram=dram, grow_to=vectors + len(added)) as index,
    ):
        figures = transfers(index, scratch, bucket, added[: vectors // 100])
        bucket.fault = lambda number: None
        with ZoomIndex.open(scratch / "index") as here:
            figures += searches(here, scratch, bucket, asked, recall, cache_bytes)
    return Outcome(Record(figures))


if __name__ == "__main__":
    main()
