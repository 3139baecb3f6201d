"""The policy that keeps all keys: Belady's answers where no key ever has to leave."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.policies import Belady
from memhier.table.keep_all import KeepAll

KEYS = 9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, KEYS - 1), max_size=12)), max_size=20))
def test_equal_to_belady(batches: list[tuple[bool, list[int]]]) -> None:
    ours, plain = KeepAll(KEYS), Belady(KEYS)
    for announced, batch in batches:
        keys = np.array(batch, np.int64)
        if announced:
            ours.announce(keys)
            plain.announce(keys)
            keys = keys[::-1].copy()
        assert ours.pending == plain.pending
        found, expected = ours.access(keys), plain.access(keys)
        assert found.hit.tolist() == expected.hit.tolist()
        assert not len(found.evicted)
        assert [key in ours for key in range(-1, KEYS + 1)] == [key in plain for key in range(-1, KEYS + 1)]
        assert len(ours) == len(plain)
        ours.discard(keys[:1])
        plain.discard(keys[:1])


def test_calls_are_held_to_the_announcements() -> None:
    policy = KeepAll(KEYS)
    keys = np.array([1, 2])
    policy.announce(keys)
    keys[0] = 7  # the array is the caller's
    policy.announce([3])
    with pytest.raises(ValueError, match="keys differ from the batch that was announced"):
        policy.access([1, 3])
    assert policy.access([2, 1]).hit.tolist() == [False, False]
    policy.withdraw()
    assert policy.pending == 0
    assert policy.access([5, 5, 1]).hit.tolist() == [False, True, True]
    assert policy.memory_bytes >= KEYS
