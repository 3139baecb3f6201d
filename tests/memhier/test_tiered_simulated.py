"""`simulate` predicts the counts of a tier with as many slots, for each policy."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.planning.simulation import simulate
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy, Static
from memhier.table.tiered import Tiered

Ints = NDArray[np.int64]
POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "belady": Belady}


def hindsight(batches: list[Ints], capacity: int) -> Static:
    """Keep the most frequent keys, with room for the widest batch to pass through, as "static" of simulate does."""
    keys, uses = np.unique(np.concatenate(batches), return_counts=True)
    room = max(len(np.unique(batch)) for batch in batches)
    return Static(capacity, keys[np.argsort(-uses, kind="stable")[: max(0, capacity - room)]])


def run(place: Path, policy: Policy, batches: list[Ints], dirty: bool, lookahead: int | None) -> dict[str, int]:
    """Gather the batches, and change their rows if `dirty`; announce them to Belady as simulate does."""
    known = 0
    with Tiered(place, "t", np.float32, 2, rows=100, policy=policy, batch=64) as tier:
        for index, batch in enumerate(batches):
            if isinstance(policy, Belady):
                while known < len(batches) and (lookahead is None or known <= index + lookahead):
                    policy.announce(batches[known])
                    known += 1
            rows = tier.gather(batch)
            if dirty:
                tier.scatter(batch, rows)
        stats = tier.stats()
    return {name: stats[name] for name in ("accesses", "hits", "misses", "writes", "evictions")}


def expected(trace: Ints | Iterable[Ints], capacity: int, policy: str, dirty: bool, lookahead: int | None) -> list[int]:
    found = simulate(trace, dram=8 * capacity, row_bytes=8, policy=policy, dirty=dirty, lookahead=lookahead)
    assert found.capacity == capacity
    return [found.accesses, found.hits, found.reads, found.writes]


@pytest.mark.parametrize("policy", [*POLICIES, "static"])
@settings(max_examples=12, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9), min_size=1, max_size=20),
    capacity=st.integers(9, 20),
    dirty=st.booleans(),
    lookahead=st.sampled_from([None, 0, 3]),
)
def test_batches_count_the_same(
    policy: str,
    batches: list[list[int]],
    capacity: int,
    dirty: bool,
    lookahead: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arrays = [np.array(batch) for batch in batches]
    lookahead = lookahead if policy == "belady" else None
    made = hindsight(arrays, capacity) if policy == "static" else POLICIES[policy](capacity)
    found = run(tmp_path_factory.mktemp("t") / "s", made, arrays, dirty, lookahead)
    wanted = expected(iter(arrays), capacity, policy, dirty, lookahead)
    assert [found[name] for name in ("accesses", "hits", "misses", "writes")] == wanted
    assert found["writes"] == (found["evictions"] if dirty else 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_single_accesses_count_the_same(policy: str, tmp_path: Path) -> None:
    trace = np.random.default_rng(3).zipf(1.3, 400) % 60
    found = run(tmp_path / "s", POLICIES[policy](17), list(trace.reshape(-1, 1)), True, None)
    wanted = expected(trace, 17, policy, True, None)
    assert [found[name] for name in ("accesses", "hits", "misses", "writes")] == wanted
