"""Results, refusals and counts of a tier; `test_tiered_machine` tries orders of calls."""

import gc
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.codecs import get_codec
from memhier.errors import BudgetError, ClosedError
from memhier.planning.plan import plan
from memhier.policies import LRU, Belady
from memhier.store.store import Store
from memhier.table.tiered import KIND, Tiered

Make = Callable[..., Tiered]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Open tiers at one place, one after the other."""
    opened: list[Tiered] = []

    def open_tier(dtype: Any = np.float32, shape: Any = 4, **options: Any) -> Tiered:
        for other in opened:
            other.close()
        opened.append(Tiered(tmp_path / "s", "t", dtype, shape, **{"rows": 1000, "dram": "16MiB"} | options))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()


def numbered(keys: Any, dim: int = 4) -> NDArray[np.float32]:
    return np.repeat(np.asarray(keys)[..., None], dim, axis=-1).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (np.uint8, 1),
        (np.float64, ()),
        (np.int16, (3, 7)),
        ([("a", "<i4"), ("b", "<f8", (3,))], ()),
        (np.complex64, 97),
        (np.bool_, 3),
        (np.float32, 1500),
    ],
)
def test_rows_of_every_kind_come_back_from_the_log(make: Make, dtype: Any, shape: Any) -> None:
    tier = make(dtype, shape, rows=97, policy=LRU(3))
    shape = shape if isinstance(shape, tuple) else (shape,)
    raw = np.random.default_rng(0).integers(0, 2, (97, np.dtype(dtype).itemsize * int(np.prod(shape))), np.uint8)
    rows = raw.view(dtype).reshape(97, *shape)
    for key in range(97):
        tier.scatter([key - 48], rows[key : key + 1])
    tier.checkpoint()
    tier = make(dtype, shape, rows=97, policy=LRU(3))
    for key in np.random.default_rng(1).permutation(97):
        np.testing.assert_array_equal(tier.gather(key - 48), rows[key])
    assert tier.stats()["refetches"] == 97


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), codec=st.sampled_from(["fp16", "bf16", "int8", "int8ef"]))
def test_codecs_round_a_row_once_it_leaves(seed: int, codec: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = np.random.default_rng(seed).normal(size=(20, 5)).astype(np.float32)
    with Tiered(tmp_path_factory.mktemp("t") / "s", "t", np.float32, 5, rows=20, policy=LRU(4), codec=codec) as tier:
        for key in range(20):
            tier.scatter([key], rows[key : key + 1])
        np.testing.assert_array_equal(tier.gather([16, 17, 18, 19]), rows[16:])
        rounded = get_codec(codec).decode(get_codec(codec).encode(rows[:16]))
        for flush in (False, True):  # from the write queue, then from the log
            if flush:
                tier.flush()
            np.testing.assert_array_equal(np.concatenate([tier.gather([key]) for key in range(16)]), rounded)


def test_rows_a_codec_cannot_hold_are_refused_when_they_come(make: Make) -> None:
    tier = make(codec="fp16")
    tier.scatter([1], numbered([1]))
    with pytest.raises(ValueError, match="fp16"):
        tier.scatter([1, 2], np.full((2, 4), 1e6, np.float32))
    assert tier.gather([1, 2]).tolist() == numbered([1, 0]).tolist()


def test_keys_of_any_shape_and_layout(make: Make) -> None:
    tier = make()
    keys = np.arange(24).reshape(4, 6)[::2, ::-3]
    tier.scatter(keys, numbered(keys)[:, ::-1][:, ::-1])
    np.testing.assert_array_equal(tier.gather(keys), numbered(keys))
    np.testing.assert_array_equal(tier.gather(np.asfortranarray(keys.T)), numbered(keys.T))
    out = np.empty((*keys.shape, 4), np.float32)
    assert tier.gather(keys, out) is out
    np.testing.assert_array_equal(out, numbered(keys))
    assert tier.gather([]).shape == (0, 4)
    assert tier.gather(7).shape == (4,)
    tier.scatter([], np.empty((0, 4), np.float32))
    assert len(tier.prefetch([])) == 0


def test_last_of_duplicates_stays(make: Make) -> None:
    tier = make(policy=LRU(2))
    tier.scatter([5, 6, 5], numbered([1, 2, 3]))
    assert tier.gather([5, 6, 5])[:, 0].tolist() == [3, 2, 3]


def test_first_rows_need_no_read_and_no_write(make: Make) -> None:
    asked: list[list[int]] = []

    def initial(keys: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(keys.tolist())
        return numbered(keys)

    tier = make(policy=LRU(3), initial=initial)
    for _ in range(2):
        for keys in ([1, 2, 3], [4, 5, 6]):
            np.testing.assert_array_equal(tier.gather(keys), numbered(keys))
    tier.checkpoint()
    stats = tier.stats()
    assert asked == [[1, 2, 3], [4, 5, 6]] * 2
    assert (stats["first_touches"], stats["reads"], stats["writes"], stats["evictions"]) == (12, 0, 0, 9)


@pytest.mark.parametrize(
    ("initial", "error", "message"),
    [
        (lambda keys: np.zeros((len(keys), 4)), TypeError, "initial: expected it to return an array of float32"),
        (lambda keys: np.zeros((len(keys), 3), np.float32), ValueError, r"initial: expected .* shape \(2, 4\)"),
        (lambda keys: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_an_unfit_initial_raises_and_nothing_breaks(
    make: Make, initial: Any, error: type[Exception], message: str
) -> None:
    tier = make(initial=initial)
    for call in (tier.gather, tier.prefetch, tier.pin):
        with pytest.raises(error, match=message):
            call([1, 2])
    tier.scatter([1, 2], numbered([1, 2]))
    np.testing.assert_array_equal(tier.gather([2, 1]), numbered([2, 1]))


def test_counts_follow_the_policy(make: Make) -> None:
    tier = make(policy=LRU(2))
    tier.scatter([1, 2], numbered([1, 2]))  # two misses
    tier.gather([1, 1, 2])  # hits
    tier.gather([3])  # evicts 1
    tier.gather([2, 3])
    tier.gather([1])  # from the write queue; evicts 2
    tier.flush()
    tier.gather([2])  # from the log; evicts 3, which was never written
    stats = tier.stats()
    assert {name: stats[name] for name in ("accesses", "hits", "misses", "evictions", "resident", "capacity")} == {
        "accesses": 10, "hits": 5, "misses": 5, "evictions": 3, "resident": 2, "capacity": 2,
    }  # fmt: skip
    assert (stats["first_touches"], stats["queue_hits"], stats["refetches"], stats["writes"]) == (1, 1, 1, 2)


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=6), min_size=1, max_size=12),
    prefetches=st.booleans(),
)
def test_belady_reads_as_planned(
    batches: list[list[int]], prefetches: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    capacity = 12
    steps = list(plan(batches, capacity, lookahead=2))
    policy = Belady(capacity)
    with Tiered(tmp_path_factory.mktemp("t") / "s", "t", np.float32, 4, rows=16, policy=policy) as tier:
        for batch in batches[:2]:
            policy.announce(batch)
        for index, batch in enumerate(batches):
            if index + 2 < len(batches):
                policy.announce(batches[index + 2])
            ticket = tier.prefetch(batch) if prefetches else None
            tier.gather(batch)
            del ticket
        stats = tier.stats()
        assert stats["misses"] == sum(len(step.load) for step in steps)
        assert stats["evictions"] == sum(len(step.evict) for step in steps)


def test_a_needed_set_beyond_the_slots_is_refused_before_anything_changes(make: Make) -> None:
    tier = make(policy=LRU(4), shape=64)
    tier.scatter([1, 2], numbered([1, 2], 64))
    ticket = tier.prefetch([2, 3])
    before = tier.stats()
    for call in (tier.gather, tier.prefetch, tier.pin, lambda keys: tier.scatter(keys, numbered(keys, 64))):
        with pytest.raises(BudgetError, match="5 slots, but there are 4") as caught:
            call([2, 5, 6, 7])
        assert tier.stats() == before
    found = re.search(r"dram=(\d+) would be enough", str(caught.value))
    assert found is not None
    ticket.release()
    tier = make(shape=64, dram=int(found[1]))
    assert tier.capacity >= 5


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_budget_too_small_says_what_is_enough(make: Make, codec: str) -> None:
    with pytest.raises(BudgetError, match=r"dram=1.0 KiB: too little for 1 rows") as caught:
        make(dram="1KiB", codec=codec)
    enough = int(re.findall(r"dram=(\d+) would be enough", str(caught.value))[0])
    with pytest.raises(BudgetError):
        make(dram=enough - 4096, codec=codec)
    tier = make(dram=enough, codec=codec)
    assert tier.capacity >= 1
    assert tier.memory_bytes <= enough


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "belady"])
@pytest.mark.parametrize("dram", ["11MiB", "20MiB"])
def test_memory_stays_under_the_budget(make: Make, policy: str, dram: str) -> None:
    tier = make(shape=256, rows=30_000, dram=dram, policy=policy, batch=500)
    budget = int(dram[:-3]) * 2**20
    step = min(tier.capacity, 500)
    for start in range(0, 30_000, step):
        keys = np.arange(start, min(start + step, 30_000))
        tier.scatter(keys, numbered(keys, 256))
        assert tier.memory_bytes <= budget
    assert tier.stats()["evictions"] > 0
    tickets = [tier.prefetch(np.arange(start, start + step // 4)) for start in range(0, step, step // 4)]
    assert tier.memory_bytes <= budget
    for ticket in tickets:
        ticket.release()
    tier.checkpoint()
    assert tier.memory_bytes <= budget


def test_keys_beyond_the_index_are_refused_before_anything_changes(make: Make) -> None:
    tier = make(rows=5, policy=LRU(3))
    tier.scatter([1, 2, 3], numbered([1, 2, 3]))
    tier.scatter([4], numbered([4]))
    tier.gather([7, 8])  # not written
    with pytest.raises(BudgetError, match=r"2 of them are new beside 4 .* rows=5; make the tier with rows=6"):
        tier.scatter([7, 8, 1], numbered([7, 8, 9]))
    tier.scatter([7, 1], numbered([7, 9]))
    tier.checkpoint()
    assert make(rows=5).gather([1, 2, 3, 4, 7, 8])[:, 0].tolist() == [9, 2, 3, 4, 7, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dram": "much"}, ValueError, "dram='much'"),
        ({"policy": "fifo"}, ValueError, "policy='fifo': expected one of 'lru'"),
        ({"policy": 3}, TypeError, "policy=3"),
        ({"codec": "gzip"}, ValueError, "codec='gzip'"),
        ({"codec": "fp16", "dtype": np.int32}, TypeError, "fp16"),
        ({"rows": 0}, ValueError, "rows=0"),
        ({"rows": 1.5}, TypeError, "rows=1.5"),
        ({"batch": 0}, ValueError, "batch=0"),
        ({"key_space": -1}, ValueError, "key_space=-1"),
        ({"shape": 0}, ValueError, "shape=0"),
        ({"dtype": object}, ValueError, "dtype=object"),
    ],
)
def test_bad_options_name_themselves(make: Make, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make(**options)
    make().scatter([1], numbered([1]))


def test_a_used_policy_is_refused(make: Make) -> None:
    policy = LRU(3)
    policy.access([1])
    with pytest.raises(ValueError, match="without resident rows, this one has 1"):
        make(policy=policy)


def test_bad_calls_change_nothing(make: Make) -> None:
    tier = make(policy=LRU(3), key_space=50, batch=4)
    tier.scatter([1], numbered([1]))
    before = tier.stats()
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: tier.gather([1.5]), TypeError, "keys: expected integers"),
        (lambda: tier.gather([50]), ValueError, "key_space"),
        (lambda: tier.gather([1] * 5), BudgetError, "batch=4; make the tier with batch=5"),
        (lambda: tier.gather([1], np.empty((2, 4), np.float32)), ValueError, "out: expected shape"),
        (lambda: tier.gather([1], np.empty((1, 4))), TypeError, "out: expected an array of float32"),
        (lambda: tier.scatter([1], np.zeros((1, 4))), TypeError, "rows: expected an array of float32"),
        (lambda: tier.scatter([1], np.zeros((2, 4), np.float32)), ValueError, "rows: expected shape"),
        (lambda: tier.prefetch(["a"]), TypeError, "keys: expected integers"),
        (lambda: tier.unpin([1]), ValueError, "keys: 1 is not pinned"),
        (lambda: tier.unpin([2]), ValueError, "keys: 2 is not pinned"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert tier.stats() == before
    assert tier.gather([1]).tolist() == numbered([1]).tolist()


def test_values_travel_with_the_checkpoint(tmp_path: Path, make: Make) -> None:
    tier = make()
    tier.scatter([1], numbered([1]))
    assert tier.checkpoint({"step": b"12"}) == 1
    tier.scatter([1], numbered([2]))
    tier.close()
    with Store.open(tmp_path / "s", KIND) as store:
        assert store.get("step") == b"12"
    assert make().gather([1])[0, 0] == 1


def test_rows_that_were_never_checkpointed_are_no_obstacle(make: Make) -> None:
    make().scatter([1], numbered([1]))
    assert make().gather([1])[0, 0] == 0


def test_closed_tiers_say_so_and_close_again(make: Make) -> None:
    tier = make()
    ticket, pin = tier.prefetch([1]), tier.pin([2])
    tier.close()
    tier.close()
    for call in (lambda: tier.gather([1]), tier.flush, tier.checkpoint, lambda: tier.prefetch([1])):
        with pytest.raises(ClosedError, match="the tier is closed"):
            call()
    ticket.release()
    pin.release()


def test_a_forgotten_tier_ends_its_threads(tmp_path: Path) -> None:
    tier = Tiered(tmp_path / "s", "t", np.float32, 4, rows=10)
    names = {thread.name for thread in threading.enumerate()}
    assert {"memhier-load", "memhier-write"} <= names
    del tier
    gc.collect()
    Tiered(tmp_path / "s", "t", np.float32, 4, rows=10).close()
    assert not {"memhier-load", "memhier-write"} & {thread.name for thread in threading.enumerate()}
