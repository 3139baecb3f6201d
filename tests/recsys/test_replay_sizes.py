"""The largest group and the slots of groups, next to plain counting."""

import numpy as np
import pytest

from memhier.recsys.replay.placement.sizes import GroupSlots, Sizes


@pytest.mark.parametrize("groups", [1, 3, 200])
def test_the_largest_group_is_the_one_that_counting_finds(groups: int) -> None:
    random = np.random.default_rng(groups)
    sizes, plain = Sizes(), dict.fromkeys(range(groups), 0)
    assert sizes.largest() == -1
    for _ in range(3000):
        number, by = int(random.integers(groups)), int(random.choice([1, 1, 2, -1, -3]))
        by = max(by, -plain[number])
        sizes.change(number, by)
        plain[number] += by
        assert dict(sizes) == {number: size for number, size in plain.items() if size}
        assert sizes.largest() == min(sizes, key=lambda number: (-sizes[number], number), default=-1)
        assert sizes.memory_bytes <= 72 * (2 * groups + 65)


def test_slots_of_groups_stay_in_rising_order() -> None:
    random = np.random.default_rng(0)
    group_of = random.integers(0, 5, 60)
    used = np.sort(random.permutation(60)[:40])
    slots = GroupSlots(used, group_of[used])
    there = dict(zip(used.tolist(), group_of[used].tolist(), strict=True))
    for _ in range(500):
        slot = int(random.integers(60))
        if slot in there:
            slots.remove(there.pop(slot), slot)
        else:
            there[slot] = int(random.integers(5))
            slots.add(there[slot], slot)
        for number in set(there.values()):
            expected = sorted(slot for slot, group in there.items() if group == number)
            assert [slots.at(number, rank) for rank in range(len(expected))] == expected
    assert GroupSlots(np.empty(0, np.int64), np.empty(0, np.int64)).memory_bytes == 0
