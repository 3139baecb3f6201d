"""A sharded index under load and changes, while a process of a shard dies every few seconds.

``python -m memhier.benchmarks.workloads.search.shard_kills`` compares every answer with a plain reference of the same
vectors. It ends by itself after ``--seconds``.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.benchmarks.bench.figures import Better, Figure, Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.errors import MemhierError, ShardLostError

__all__ = ["main"]

K, BATCH = 10, 16
CLIENTS, SEARCHES = 2, 8  # threads, and their searches between two changes
CHANGED = 20  # vectors added, replaced and removed at a time
LEVELS = (1.0, 0.95)

Floats: TypeAlias = npt.NDArray[np.float32]


class _Reference:
    """The vectors that the index should have, compared one by one. Ids are places in one array."""

    def __init__(self, vectors: Floats, room: int) -> None:
        self.vectors = np.vstack([vectors, np.zeros((room, vectors.shape[1]), np.float32)])
        self.there = np.arange(len(self.vectors)) < len(vectors)
        self.next = len(vectors)

    def copy(self) -> "_Reference":
        made = _Reference(self.vectors[:0], 0)
        made.vectors, made.there, made.next = self.vectors.copy(), self.there.copy(), self.next
        return made

    def distances(self, queries: Floats) -> Floats:
        squares = np.square(self.vectors).sum(axis=1)[None] - 2 * queries @ self.vectors.T
        squares += np.square(queries).sum(axis=1)[:, None]
        return np.where(self.there, squares, np.inf)


@dataclass(slots=True)
class _Tally:
    """The answers of searches, and the fate of changes."""

    calls: int = 0
    unanswered: int = 0
    wrong: int = 0
    kills: int = 0
    commits: int = 0
    lost_changes: int = 0
    recalls: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Vectors.")
@click.option("--shards", default=3, show_default=True)
@click.option("--replicas", default=2, show_default=True)
@click.option("--seconds", default=600, show_default=True, help="After them the load stops.")
@click.option("--every", default=5.0, show_default=True, help="Seconds between two deaths.")
@click.option("--seed", default=0, show_default=True)
def main(
    scratch: Path, data: str, count: int, shards: int, replicas: int, seconds: int, every: float, seed: int
) -> Outcome:
    """Kill processes of shards under load."""
    from memhier.ann.cluster import ShardedIndex

    case = load_search_set(data)
    vectors, queries = np.asarray(case.base[:count], np.float32), np.asarray(case.queries, np.float32)
    random = np.random.default_rng(seed)
    reference = _Reference(vectors, 50 * seconds)
    tally, ended = _Tally(), threading.Event()
    room = 2 * count + 50 * seconds
    with ShardedIndex.build(
        scratch / "index", vectors, shards=shards, replicas=replicas, dram="64MiB", grow_to=room
    ) as index:
        killer = threading.Thread(target=_kill, args=(index, shards, replicas, every, seed, tally, ended))
        killer.start()
        try:
            reference = _load(index, reference, queries, random, time.monotonic() + seconds, tally)
        finally:
            ended.set()
            killer.join()
        index.rollback()
        index.heal()
        stale, problems = index.stats()["stale"], index.check()
        for start in range(0, 256, BATCH):
            _search(index, reference, queries[start : start + BATCH], 1.0, tally)
    if tally.wrong or problems or stale:
        raise AssertionError(f"{tally.wrong} wrong answers, stale replicas {stale}, problems {problems[:3]}")
    share = 1 - tally.unanswered / tally.calls
    times = {
        f"time of a call of {BATCH} queries, {level}th percentile": float(np.percentile(tally.milliseconds, level))
        for level in (50, 95, 99)
    }
    found: list[tuple[str, float, str, Better, bool]] = [
        ("calls answered", share, "share", "more", True), ("wrong answers", tally.wrong, "calls", "less", False),
        ("recall@10 at .95 declared", float(np.mean(tally.recalls)), "share", "more", False),
        ("processes killed", tally.kills, "processes", "neither", True),
        ("searches", tally.calls, "calls", "more", True), ("commits", tally.commits, "commits", "more", True),
        ("changes lost with a shard, and said", tally.lost_changes, "times", "less", True),
        *((name, value, "ms", "less", True) for name, value in times.items()),
    ]  # fmt: skip
    figures = [Figure.of(name, [value], unit, better, clock=clock) for name, value, unit, better, clock in found]
    return Outcome(Record(figures))


def _kill(
    index: Any, shards: int, replicas: int, every: float, seed: int, tally: _Tally, ended: threading.Event
) -> None:
    """End a random process every few seconds."""
    random = np.random.default_rng(seed)
    while not ended.wait(every):
        index.simulate_fault(int(random.integers(shards)), int(random.integers(replicas)))
        tally.kills += 1


def _load(
    index: Any, reference: _Reference, queries: Floats, random: np.random.Generator, until: float, tally: _Tally
) -> _Reference:
    """Search and change by turns until a time; return the reference of the last commit."""
    committed, rounds = reference.copy(), 0
    with ThreadPoolExecutor(CLIENTS) as clients:
        while time.monotonic() < until:
            picks = random.integers(0, len(queries), (SEARCHES, BATCH))
            answers = [
                clients.submit(_search, index, reference, queries[pick], LEVELS[number % 2], tally)
                for number, pick in enumerate(picks)
            ]
            for answer in answers:
                answer.result()
            rounds += 1
            try:
                _change(index, reference, random)
                if rounds % 3 == 0:
                    index.commit()
                    committed = reference.copy()
                    tally.commits += 1
                    index.heal()
            except (ShardLostError, KeyError):
                tally.lost_changes += 1
                reference = _rolled_back(index, committed, until)
    return committed


def _rolled_back(index: Any, committed: _Reference, until: float) -> _Reference:
    """Return to the last commit, also while processes die."""
    while True:
        try:
            index.rollback()
            return committed.copy()
        except MemhierError:
            if time.monotonic() > until + 60:
                raise


def _change(index: Any, reference: _Reference, random: np.random.Generator) -> None:
    """Add, replace and remove vectors, in the index first."""
    alive = np.flatnonzero(reference.there)
    chosen = random.choice(alive, 2 * CHANGED, replace=False)
    fresh = np.arange(reference.next, reference.next + CHANGED)
    made = reference.vectors[random.choice(alive, 2 * CHANGED)] + random.normal(size=(2 * CHANGED, 1))
    made = made.astype(np.float32)
    index.add(made[:CHANGED], fresh)
    index.update(chosen[:CHANGED], made[CHANGED:])
    index.remove(chosen[CHANGED:])
    reference.vectors[fresh], reference.vectors[chosen[:CHANGED]] = made[:CHANGED], made[CHANGED:]
    reference.there[fresh], reference.there[chosen[CHANGED:]] = True, False
    reference.next += CHANGED


def _search(index: Any, reference: _Reference, queries: Floats, recall: float, tally: _Tally) -> None:
    """Search once and compare: every distance is that of its vector, and at a recall of 1 no neighbour is missing."""
    began = time.perf_counter()
    found = None
    with suppress(ShardLostError):
        found = index.search(queries, K, recall=recall)
    took = 1e3 * (time.perf_counter() - began)
    with tally.lock:
        tally.calls += 1
        tally.milliseconds.append(took)
        tally.unanswered += found is None
    if found is None:
        return
    every = reference.distances(queries)
    exact = np.sort(np.partition(every, K, axis=1)[:, :K], axis=1)
    theirs = np.take_along_axis(every, found.ids, 1)
    right = bool((found.ids >= 0).all()) and _alike(theirs, found.distances)
    if recall == 1:
        right = right and _alike(exact, found.distances)
    hits = float((theirs <= exact[:, -1:] * (1 + 1e-5)).mean())
    with tally.lock:
        tally.wrong += not right
        if recall < 1:
            tally.recalls.append(hits)


def _alike(one: Floats, other: Floats) -> bool:
    return bool(np.allclose(one, other, rtol=1e-3, atol=0.1))  # squared norms of these vectors are above 1e5


if __name__ == "__main__":
    main()
