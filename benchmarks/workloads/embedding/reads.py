"""Rows that a step reads from SSD under each policy, beside the least number possible.

``python -m memhier.benchmarks.workloads.embedding.reads --dir /path/on/the/device``: batches of ids of Criteo's log, of
Gowalla and of the generator with Criteo's sizes, run through each policy at several shares of the rows in DRAM. The
first use of a row costs no read, as its first value is made on the spot; only rows that come back count. Bagpipe's rule
(keep a row while its next use lies within so many batches) has no capacity; its points stand at its mean residency.
Then memhier itself trains on the same batches with a window over all of them, beside Belady offline.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from memhier.benchmarks.bench.figures import Curves, Figure, Record, Series
from memhier.benchmarks.datasets import criteo_dac, gowalla
from memhier.benchmarks.workloads.embedding.common import Ints, samples, table_sizes
from memhier.benchmarks.workloads.harness import Outcome, skip, workload
from memhier.planning.plan import plan
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy
from memhier.recsys import SGD, EmbeddingBag, Uniform, lookahead

__all__ = ["main"]

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)
WINDOWS = (5, 20, 50, 200)
REACTIVE: dict[str, type[LRU] | type[LFU] | type[S3FIFO]] = {"LRU": LRU, "LFU": LFU, "S3FIFO": S3FIFO}


def traces(limit: int | None, scale: float) -> Iterator[tuple[str, list[Ints], int]]:
    """Yield each data set's name, its batches of distinct keys, and its rows; those that are there."""
    try:
        ids, _, sizes = criteo_dac()
        keys = ids + np.cumsum([0, *sizes])[:-1]
        yield "Criteo's log", _cut(keys, 64)[:limit], sum(sizes)
        pairs, users, items = gowalla()
        pairs = pairs[np.random.default_rng(0).permutation(len(pairs))] + np.array([0, users])
        yield "Gowalla", _cut(pairs, 128)[:limit], users + items
    except FileNotFoundError as error:
        skip(error)
    sizes = table_sizes(scale)
    bases = np.cumsum([0, *sizes])[:-1]
    made = samples(sizes, 512, limit or 2000, 0)
    yield "generator", [np.unique(sample.ids.numpy() + bases) for sample in made], sum(sizes)


def _cut(keys: Ints, size: int) -> list[Ints]:
    return [np.unique(keys[at : at + size]) for at in range(0, len(keys), size)]


def reads_of(batches: list[Ints], slots: int, policy: str) -> float:
    """Return the rows that come back per step; the first half of the steps fills DRAM, and is not counted."""
    seen: set[int] = set()
    counted = []
    for step, load in enumerate(_loads(batches, slots, policy)):
        if step >= len(batches) // 2:
            counted.append(sum(key in seen for key in load.tolist()))
        seen.update(load.tolist())
    return float(np.mean(counted))


def _loads(batches: list[Ints], slots: int, policy: str) -> Iterator[Ints]:
    if policy == "Belady":
        yield from (step.load for step in plan(batches, slots))
        return
    cache: Policy = REACTIVE[policy](slots)
    for keys in batches:
        yield keys[~cache.access(keys).hit]


def bagpipe(batches: list[Ints], window: int) -> tuple[float, float]:
    """Return the mean residency and the rows that come back per step under Bagpipe's rule."""
    last: dict[int, int] = {}
    counted = []
    for step, keys in enumerate(batches):
        gaps = [step - last[key] for key in keys.tolist() if key in last]
        counted.append(sum(gap > window for gap in gaps))
        last.update(dict.fromkeys(keys.tolist(), step))
    half = len(batches) // 2
    return _kept(batches, window, half), float(np.mean(counted[half:]))


def _kept(batches: list[Ints], window: int, half: int) -> float:
    """Return the mean number of rows that stay: those whose next use lies within the window, and the batch's own."""
    following: dict[int, int] = {}
    change = np.zeros(len(batches) + 1, np.int64)
    for step in range(len(batches) - 1, -1, -1):
        for key in batches[step].tolist():
            later = following.get(key)
            end = later if later is not None and later - step <= window else step + 1
            change[step] += 1
            change[end] -= 1
            following[key] = step
    return float(np.cumsum(change)[half : len(batches)].mean())


def trained(folder: Path, batches: list[Ints], rows: int, slots: int) -> tuple[float, float]:
    """Return the rows that memhier fetched per step, first touches included, and those of Belady offline."""
    least = sum(len(step.load) for step in plan(batches, slots)) / len(batches)
    with EmbeddingBag(
        rows, 4, mode="sum", optimizer=SGD(), dram="1GiB", path=folder, policy=Belady(slots), initial=Uniform()
    ) as bag:
        some = [torch.from_numpy(keys)[None] for keys in batches]
        for batch in lookahead(some, bag, ids=lambda batch: batch, window=None, prefetch=1):
            torch.autograd.backward(bag(batch).sum())
        stats = bag.stats()
    return (stats["refetches"] + stats["queue_hits"] + stats["first_touches"]) / len(batches), least


def measure(folder: Path, limit: int | None, scale: float) -> dict[str, Any]:
    """Return reads by data set, policy and share, and memhier's own."""
    found: dict[str, Any] = {}
    for name, batches, rows in traces(limit, scale):
        largest = max(map(len, batches))
        shares = [share for share in SHARES if share * rows > 2 * largest]
        curves = {
            policy: [(share, reads_of(batches, int(share * rows), policy)) for share in shares]
            for policy in ("Belady", *REACTIVE)
        }
        points = [bagpipe(batches, window) for window in WINDOWS]
        curves["Bagpipe's rule"] = sorted((size / rows, reads) for size, reads in points)
        own = [(share, *trained(folder / f"{name}-{share}", batches, rows, int(share * rows))) for share in shares]
        found[name] = {"rows": rows, "steps": len(batches), "curves": curves, "own": own}
    return found


def record(found: dict[str, Any]) -> Record:
    """Return curves of reads, how far memhier's own are from the least, and LRU's over Belady's."""
    figures, curves = [], []
    for name, each in found.items():
        lines = [Series(policy, points) for policy, points in each["curves"].items()]
        curves.append(Curves(name, "share of the rows in DRAM", "rows read per step", lines, log_x=True))
        for share, own, least in each["own"]:
            figures.append(
                Figure.of(
                    f"{name}, {share:.1%} in DRAM: rows fetched over offline Belady's", own / least, "times", "less"
                )
            )
        for (share, best), (_, lru) in zip(each["curves"]["Belady"], each["curves"]["LRU"], strict=True):
            if best > 0:
                figures.append(
                    Figure.of(f"{name}, {share:.1%} in DRAM: LRU's reads over Belady's", lru / best, "times", "more")
                )
    return Record(figures, curves, scale="80,000 samples of Criteo, Gowalla, and ids made up with Criteo's sizes")


@workload
@click.option("--limit", type=int, help="Batches of each data set.")
@click.option("--scale", default=0.05, show_default=True, help="Of the generator's large tables.")
def main(scratch: Path, limit: int | None, scale: float) -> Outcome:
    """Count the rows that each policy reads per step."""
    found = measure(scratch, limit, scale)
    lines = [
        f"{name:14} {policy:15} {'  '.join(f'{share:.2%}: {reads:,.0f}' for share, reads in points)}"
        for name, each in found.items()
        for policy, points in each["curves"].items()
    ]
    return Outcome(record(found), lines, {"found": found})


if __name__ == "__main__":
    main()
