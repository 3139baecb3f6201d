"""Bitmaps: sets of rows, and those used last."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.ann.zoom.filters.bitmaps import BitmapCache, pack, popcount, runs_with, unpack, word_count


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([0, 1, 63, 64, 65, 97, 4097]))
def test_bitmaps_are_sets_of_rows(data, count):
    ids = data.draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=50 if count else 0))
    rows = np.zeros(count, np.bool_)
    rows[ids] = True
    words = pack(rows)
    assert (words.dtype, len(words)) == (np.uint64, word_count(count))
    assert sum(int(word) << (64 * i) for i, word in enumerate(words)) == sum(1 << i for i in set(ids))
    np.testing.assert_array_equal(unpack(words, count), rows)
    assert popcount(words) == len(set(ids))
    np.testing.assert_array_equal(pack(np.repeat(rows, 2)[::2]), words)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 200]), max_size=70), st.integers(0, 2**32), st.booleans())
def test_runs_of_rows_are_those_that_hold_one(lengths, seed, compiled):
    starts = np.cumsum([0, *lengths])
    rows = np.random.default_rng(seed).random(int(starts[-1])) < 0.02
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr("memhier.backend.core", None)
        found = unpack(runs_with(pack(rows), starts)[0], len(lengths))
    assert found.tolist() == [bool(rows[low:high].any()) for low, high in itertools.pairwise(starts.tolist())]


def test_a_bitmap_of_another_count_is_refused():
    with pytest.raises(ValueError, match="1 entries: expected 2 for 65 rows"):
        unpack(np.zeros(1, np.uint64), 65)


def test_the_cache_keeps_what_was_used_last_within_its_limit():
    words = [np.full(64, i + 1, np.uint64) for i in range(5)]
    cache = BitmapCache(3 * (64 * 8 + 256 + 4))
    for i in range(3):
        cache.put(str(i), words[i])
    assert cache.get("0") is words[0]
    cache.put("3", words[3])
    assert [cache.get(str(i)) is not None for i in range(4)] == [True, False, True, True]
    cache.put("3", words[4])
    assert (cache.get("3") is words[4], len(cache)) == (True, 3)
    cache.put("4", np.ones(10_000, np.uint64))
    assert (cache.get("4"), len(cache)) == (None, 3)
    assert cache.memory_bytes <= 3 * (64 * 8 + 256 + 4)
    with pytest.raises(ValueError, match="limit=0"):
        BitmapCache(0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.2, 0.5, 1.0]))
def test_the_cache_gives_a_bitmap_back_as_it_was(count, seed, share):
    random = np.random.default_rng(seed)
    words = random.integers(1, 2**63, count).astype(np.uint64) * (random.random(count) < share)
    cache, kept = BitmapCache("1MiB"), words.copy()
    cache.put("some", words)
    found = cache.get("some")
    np.testing.assert_array_equal(found, kept)
    if found.flags.writeable:  # the caller's own
        found[:] = 1
        words[:] = 1
    np.testing.assert_array_equal(cache.get("some"), kept)


def test_bitmaps_of_few_rows_take_little_of_the_cache():
    cache = BitmapCache("256KiB")
    for number in range(400):
        words = np.zeros(3_000, np.uint64)  # of 24 kB each, ten of which would fit
        words[number] = 5
        cache.put(str(number), words)
        assert cache.memory_bytes <= cache.limit
    assert len(cache) > 300
    found = cache.get("399")
    assert found.nonzero()[0].tolist() == [399]
    assert int(found[399]) == 5
    for number in range(20):
        cache.put(str(number), np.ones(3_000, np.uint64))
    assert 5 < len(cache) < 20
    assert cache.memory_bytes <= cache.limit


class Turn(tuple):
    """A key that gives another thread its turn where it is hashed, as a key with code of its own may."""

    turns = []  # noqa: RUF012

    def __hash__(self):
        while self.turns:
            self.turns.pop()()
        return super().__hash__()


@pytest.mark.parametrize("moved", range(6))
def test_bitmaps_are_counted_and_dropped_beside_threads_that_use_them(moved):
    cache, keys = BitmapCache("64KiB"), [Turn((owner, number)) for owner in "ab" for number in range(3)]
    for key in keys:
        cache.put(key, np.ones(64, np.uint64))
    whole = cache.memory_bytes
    Turn.turns.append(lambda: cache.get(keys[moved]))
    assert cache.memory_bytes == whole
    Turn.turns.append(lambda: cache.get(keys[moved]))
    cache.drop("b")
    Turn.turns.clear()
    assert cache.memory_bytes == whole // 2
