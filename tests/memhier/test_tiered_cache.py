"""The cache of a tier by itself: its map follows the policy, held slots stay, and a broken-off call goes on later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError
from memhier.policies import LRU
from memhier.table.cache import Cache, Pins, PrefetchedSlots

SLOTS = 5


def make_cache() -> Cache:
    return Cache(LRU(SLOTS), SlotMap, lambda slots: 1000 * slots)


def admit(cache: Cache, keys: list[int]) -> NDArray[np.int64]:
    """Make keys resident as a call does; return the slot of each."""
    unique, inverse, slots = cache.find(np.array(keys, np.int64))
    if cache.access(unique, slots, np.array(keys, np.int64)):
        slots[slots < 0] = cache.exchange()
    cache.served()
    return slots[inverse]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=SLOTS), max_size=20))
def test_the_map_holds_the_keys_of_the_policy(batches: list[list[int]]) -> None:
    cache, plain = make_cache(), LRU(SLOTS)
    for batch in batches:
        slots = admit(cache, batch)
        plain.access(batch)
        assert cache.keys_of(slots).tolist() == batch
        resident = [key for key in range(13) if key in plain]
        assert [key for key in range(13) if cache.find(np.array([key]))[2][0] >= 0] == resident
    assert cache.accesses == sum(map(len, batches))
    assert cache.misses - cache.evictions == len(cache)


def test_a_broken_off_exchange_is_finished_later() -> None:
    cache = make_cache()
    before = admit(cache, [0, 1, 2, 3, 4])
    keys, _, slots = cache.find(np.array([7, 1]))
    assert cache.access(keys, slots, keys)
    leaving, emptied = cache.victims()  # and then the call fails
    assert (leaving.tolist(), emptied.tolist(), cache.unfinished) == ([0], [before[0]], True)
    assert cache.exchange().tolist() == [before[0]]
    assert not cache.unfinished
    accesses = cache.accesses
    assert admit(cache, [7, 1]).tolist() == [before[0], before[1]]
    assert cache.accesses == accesses, "the same call, made again, is the same access"
    admit(cache, [7, 1])
    assert cache.accesses == accesses + 2


def test_held_slots_stay() -> None:
    cache = make_cache()
    slots = admit(cache, [0, 1, 2, 3, 4])
    cache.pins.pin(slots[:2])
    keys = np.array([2, 3])
    ahead = PrefetchedSlots(keys, keys, slots[2:4])
    cache.pins.hold(ahead)
    admit(cache, [9])
    with pytest.raises(BudgetError, match=r"2 distinct rows beside 4 that are pinned or held .* dram=6000 would be"):
        admit(cache, [10, 11])
    cache.pins.gathered(slots[2:3])
    assert ahead.slots.tolist() == [slots[3]]
    admit(cache, [10, 11])
    assert cache.keys_of(slots[[0, 1, 3]]).tolist() == [0, 1, 3]


@pytest.mark.parametrize("by_key", [False, True])
def test_held_slots_are_those_of_loans_tickets_and_pins(by_key: bool) -> None:
    rng = np.random.default_rng(3)
    pins, loans, tickets = Pins(40), list[NDArray[np.int64]](), list[PrefetchedSlots]()
    for number in range(200):
        slots = rng.permutation(40)[: rng.integers(0, 8)]
        action = rng.integers(0, 5)
        if action == 0:
            pins.lend(slots)
            loans.append(slots)
        elif action == 1:
            tickets.append(PrefetchedSlots(slots, slots, slots))
            pins.hold(tickets[-1])
        elif action == 2 and loans:
            pins.unpin(loans.pop(int(rng.integers(0, len(loans)))))
        elif action == 3 and tickets:
            pins.release(tickets.pop(int(rng.integers(0, len(tickets)))))
        elif action == 4:
            pins.gathered(slots)
        if by_key and number in (50, 100):  # as the calls `pin` and `unpin`, which look the slots up anew
            (pins.pin if number == 50 else pins.unpin)(np.arange(3))
        assert np.unique(pins.held()).tolist() == np.flatnonzero(pins.is_held(np.arange(40))).tolist()
