"""The index of a log against a dict: hashed and direct, growing, in DRAM that follows the keys in use."""

from typing import Any

import numpy as np
import pytest

from memhier.errors import BudgetError
from memhier.log.index import LogIndex, place

LENGTH = 8


def set_places(index: LogIndex, keys: Any, places: Any) -> None:
    keys = np.asarray(keys, np.int64)
    index.point(index.reserve(keys), np.asarray(places, np.int64), np.full(len(keys), LENGTH))


@pytest.mark.parametrize("key_space", [None, 4000])
@pytest.mark.parametrize("length", [LENGTH, None])
def test_equal_to_a_dict_while_it_grows(key_space: int | None, length: int | None) -> None:
    rng, plain = np.random.default_rng(0), dict[int, int]()
    index = LogIndex(3500, length, key_space)
    for turn in range(40):
        keys, offsets = rng.integers(0, 4000, 97), LENGTH * (97 * turn + np.arange(97))
        set_places(index, keys, place(turn % 3, offsets))
        plain.update(zip(keys.tolist(), place(turn % 3, offsets).tolist(), strict=True))
        gone = rng.integers(0, 4000, 5)
        index.erase(gone)
        for key in gone.tolist():
            plain.pop(key, None)
        asked = np.arange(4000)
        assert index.places(asked).tolist() == [plain.get(key, -1) for key in asked.tolist()]
        assert len(index) == len(plain)
        assert sorted(np.concatenate([*index.keys()]).tolist()) == sorted(plain)
        assert index.live(3).bytes > LENGTH * len(plain)


def test_dram_follows_the_keys_in_use() -> None:
    index = LogIndex(10**7, LENGTH, 10**9)
    empty = index.memory_bytes
    assert empty < 4 * 2**20
    rng = np.random.default_rng(0)
    for _ in range(20):
        set_places(index, rng.integers(0, 10**9, 5000), np.arange(5000))
        assert 36 * len(index) <= index.memory_bytes - empty + 36 * 1024 < 46 * (len(index) + 5000)
    assert index.memory_bytes <= LogIndex.bytes_for(len(index) * 5 // 4)


def test_room_taken_at_once_needs_no_more_for_growth() -> None:
    keys = 200_000
    index = LogIndex(keys, LENGTH, expected=keys)
    counts = index.memory_bytes - LogIndex.bytes_for(keys, at_once=True)  # of the parts
    set_places(index, np.arange(keys), np.arange(keys))
    assert 0 <= counts <= 1024
    assert index.memory_bytes == LogIndex.bytes_for(keys, at_once=True) + counts < 0.8 * LogIndex.bytes_for(keys)


def test_room_ends_at_the_capacity() -> None:
    index = LogIndex(2000, LENGTH)
    set_places(index, np.arange(1999), np.arange(1999))
    with pytest.raises(BudgetError, match="more than capacity=2000 distinct"):
        set_places(index, [5, 3000, 3001], [0, 1, 2])
    set_places(index, [5, 3000, 5, 3000], [7, 8, 9, 10])
    assert index.places(np.array([5, 3000, 3001])).tolist() == [9, 10, -1]
