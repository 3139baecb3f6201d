"""The map of ids to slots: against a dict that knows no slots, the core against Python, and back over its frames."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memhier import backend
from memhier.errors import CorruptionError
from memhier.recsys import Hash64, hash64
from memhier.recsys.embedding.ids.id_map import IdMap
from memhier.table.shortage import Shortage

Ints = NDArray[np.int64]
EXTREMES = np.array([-(2**63), 2**63 - 1, -1, 0, 1])
needs_core = pytest.mark.skipif(backend.core is None, reason="the compiled core is compared with Python")


class Model:
    """Which ids have a row, by the rules as a reader of their description understands them; counts are exact."""

    def __init__(self, capacity: int, rules: Hash64) -> None:
        self.capacity, self.rules = capacity, rules
        self.ids: dict[int, list[int]] = {}  # last use, uses
        self.seen: dict[int, int] = {}
        self.now = 0
        self.room = capacity

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.ids[number]
            self.room += 1

    def make_room(self) -> None:
        after, share = self.rules.expire_after, max(1, self.capacity // 64)
        expired = [number for number, (last, _) in self.ids.items() if after is not None and self.now - last > after]
        self.forget(expired)
        if len(expired) < share and self.rules.evict is not None:
            order = (lambda n: self.ids[n]) if self.rules.evict == "lru" else (lambda n: self.ids[n][::-1])
            may = [number for number, (last, _) in self.ids.items() if self.now - last >= self.rules.pending]
            last_only = self.rules.evict == "lru"
            ranked = sorted(may, key=lambda n: self.ids[n][:1] if last_only else order(n))
            self.ties = len(ranked) > share - len(expired) > 0 and (
                self.key(ranked[share - len(expired) - 1]) == self.key(ranked[share - len(expired)])
            )
            self.forget(ranked[: share - len(expired)])

    def key(self, number: int) -> Any:
        last, uses = self.ids[number]
        return last if self.rules.evict == "lru" else (uses, last)

    def map(self, ids: Ints) -> list[bool]:
        self.now += 1
        after = self.rules.expire_after
        numbers = ids.tolist()
        for number in numbers:
            if number in self.ids:
                if after is not None and self.now - self.ids[number][0] > after:
                    self.forget([number])
                else:
                    self.ids[number] = [self.now, self.ids[number][1] + 1]
        early = []
        known = {number for number in numbers if number in self.ids}
        for number in numbers:
            if number in known:
                continue
            if number in self.ids:
                self.ids[number][1] += 1
                continue
            self.seen[number] = self.seen.get(number, 0) + 1
            if self.seen[number] < self.rules.admit_after:
                early.append(number)
                continue
            if not self.room:
                self.make_room()
            if self.room:
                self.ids[number] = [self.now, 1]
                self.room -= 1
            else:
                early.append(number)
        for number in early:
            if number in self.ids:
                self.ids[number][1] += 1
        return [number in self.ids for number in numbers]


def batches_of(seed: int, steps: int = 60, most: int = 120) -> list[Ints]:
    rng = np.random.default_rng(seed)
    names = np.concatenate([EXTREMES, rng.integers(-(2**63), 2**63 - 1, most)])
    return [names[(len(names) * rng.random(rng.integers(0, 30)) ** 2).astype(int)] for _ in range(steps)]


# A sketch so large that no counts are shared, and that its hand never comes round.
LARGE = 2**23
RULES = {
    "all": Hash64(),
    "kept": Hash64(evict=None),
    "lfu": Hash64(evict="lfu", pending=1),
    "expiring": Hash64(expire_after=5, pending=2, evict=None),
    "both": Hash64(expire_after=9, pending=3),
    "admitted": Hash64(admit_after=3, sketch=LARGE),
    "everything": Hash64(admit_after=2, expire_after=7, evict="lfu", sketch=LARGE),
}


@pytest.mark.parametrize("capacity", [1, 7, 64, 200])
@pytest.mark.parametrize("rules", [*RULES])
def test_the_map_admits_and_forgets_as_a_dict_does(capacity: int, rules: str) -> None:
    for seed in range(4):
        ids, model = IdMap(capacity, RULES[rules]), Model(capacity, RULES[rules])
        for batch in batches_of(seed):
            slots, added, new = ids.map(batch)
            ids.begin(1)
            model.ties = False
            assert (slots >= 0).tolist() == model.map(batch)
            if model.ties:
                break  # the order of slots decides, which the model does not know
            assert len(ids) == len(model.ids)
            assert len(set(added.tolist())) == len(added)
            assert ids.find(new).tolist() == added.tolist()
            # No two ids share a slot.
            used, held = ids.ids(0, capacity)
            assert len({*used.tolist()}) == len({*held.tolist()}) == len(used)
            alive = {
                number for number, (last, _) in model.ids.items()
                if RULES[rules].expire_after is None or model.now - last <= RULES[rules].expire_after
            }  # fmt: skip
            assert {*held.tolist()} == alive
            assert ids.find(held).tolist() == used.tolist()


def state_of(ids: IdMap) -> Any:
    return ids.records(np.arange(IdMap.records_for(ids.capacity, ids.rules))).tobytes(), ids.described()


@pytest.mark.parametrize("rules", [*RULES])
def test_a_map_goes_back_over_batches_read_ahead(rules: str) -> None:
    changed = replace(RULES[rules], sketch=None)
    batches = batches_of(5)
    plain, ahead = IdMap(20, changed), IdMap(20, changed)
    waiting, states = 0, []
    rng = np.random.default_rng(3)
    for number, batch in enumerate(batches):
        expected = plain.map(batch)
        plain.begin(1)
        states.append(state_of(plain))
        for got, wanted in zip(ahead.map(batch), expected, strict=True):
            assert got.tolist() == wanted.tolist()
        waiting += 1
        while waiting > rng.integers(0, 6):
            ahead.begin(1)
            waiting -= 1
        trained = number - waiting
        with ahead.begun():
            if trained >= 0:
                assert state_of(ahead) == states[trained]
        assert state_of(ahead) == states[number]
    ahead.drop()
    assert ahead.frames == 0
    assert state_of(ahead) == states[len(batches) - 1 - waiting]


@needs_core
@pytest.mark.parametrize("rules", [*RULES])
def test_the_core_maps_as_python_does(rules: str) -> None:
    small = replace(RULES[rules], sketch=None)
    core = IdMap(150, small)
    with mock.patch.object(backend, "core", None):
        twin = IdMap(150, small)
    for number, batch in enumerate(batches_of(7, steps=150, most=600)):
        for got, wanted in zip(core.map(batch), twin.map(batch), strict=True):
            assert got.tolist() == wanted.tolist()
        for ids in (core, twin):
            if number % 5 == 4:
                ids.begin(min(4, ids.frames))
            if number % 13 == 12:
                ids.drop()
        assert core.find(batch).tolist() == twin.find(batch).tolist()
        assert core.frames == twin.frames
        assert state_of(core) == state_of(twin)
        assert core.changed().tolist() == twin.changed().tolist()


@pytest.mark.parametrize("rules", [*RULES])
def test_a_map_that_grows_maps_as_one_that_has_all_its_memory(rules: str) -> None:
    rng = np.random.default_rng(4)
    small = replace(RULES[rules], sketch=2**16)
    names = rng.integers(-(2**63), 2**63 - 1, 3600)
    with mock.patch.object(backend, "core", None):
        twin = IdMap(3001, small, room=1024)
    whole, grown = IdMap(3001, small), IdMap(3001, small, room=1024)
    assert grown.room == twin.room == 1024
    for number in range(60):
        batch = names[: 60 * (number + 1)][rng.integers(0, 60 * (number + 1), 500)]
        wanted = whole.map(batch)
        for one in (grown, twin):
            for got, expected in zip(one.map(batch, 10**6), wanted, strict=True):
                assert got.tolist() == expected.tolist()
            assert one.changed().tolist() == whole.changed().tolist()
        for one in (whole, grown, twin):
            if number % 5 == 4:
                one.begin(min(4, one.frames))
            if number % 13 == 12:
                one.drop()
            if number % 17 == 16:
                one.written()
    assert grown.room == twin.room > 1024
    assert grown.fresh > 1024
    changed = whole.changed()
    for one in (grown, twin):
        assert one.records(changed).tobytes() == whole.records(changed).tobytes()
        assert one.described() == whole.described()
    again = IdMap(3001, small, room=1024)
    again.make_room(3001, 10**6)
    records = whole.records(np.arange(IdMap.records_for(3001, small)))
    slots = -(-grown.fresh // 16)
    again.read(0, records[:slots])
    again.read(-(-3001 // 16), records[-(-3001 // 16) :])
    again.complete(whole.described(), "here")
    assert [part.tolist() for part in again.map(names)] == [part.tolist() for part in whole.map(names)]


@pytest.mark.parametrize("core", [pytest.param(True, marks=needs_core), False])
def test_a_batch_without_room_changes_nothing(core: bool) -> None:
    rules = Hash64(admit_after=2, expire_after=40, sketch=2**16)
    with mock.patch.object(backend, "core", backend.core if core else None):
        ids, plain = (IdMap(5000, rules, room=1024) for _ in range(2))
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(60):
        batch = rng.integers(0, 60 * number + 1, 60)
        # Some ids of the large batch expire, some are counted, some have slots.
        large = np.concatenate([batch, rng.integers(0, 10**6, 2000)])
        large = np.concatenate([large, large])
        with plain.begun(), ids.begun():
            assert state_of(ids) == state_of(plain)
        try:
            ids.map(large)
            ids.undo()
        except Shortage:
            refused += 1
        assert ids.map(batch)[0].tolist() == plain.map(batch)[0].tolist()
        for one in (ids, plain):
            one.begin(one.frames - 1)
        if plain.fresh > 900:
            break
    assert refused > 5


@pytest.mark.parametrize("core", [pytest.param(True, marks=needs_core), False])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_map_without_memory_to_grow_stays_as_it_was(core: bool, call: int) -> None:
    with mock.patch.object(backend, "core", backend.core if core else None):
        ids, plain = IdMap(5000, Hash64(), room=100), IdMap(5000, Hash64(), room=100)
    batches = np.arange(300).reshape(4, 75)
    for one in (ids, plain):
        one.map(batches[0])
    real, calls = np.zeros, 0

    def zeros(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise MemoryError
        return real(*arguments)

    with mock.patch.object(np, "zeros", zeros), pytest.raises(MemoryError):
        ids.map(batches[1], 10**6)
    for batch in batches[1:]:
        for got, expected in zip(ids.map(batch, 10**6), plain.map(batch, 10**6), strict=True):
            assert got.tolist() == expected.tolist()
    assert ids.records(ids.changed()).tobytes() == plain.records(plain.changed()).tobytes()


def test_records_bring_a_map_back() -> None:
    rules = Hash64(admit_after=2, expire_after=30)
    ids = IdMap(150, rules)
    stored = np.zeros((IdMap.records_for(150, rules), 256), np.uint8)
    for number, batch in enumerate(batches_of(9, steps=120, most=600)):
        ids.map(batch)
        ids.begin(1)
        if number % 10 == 3:
            changed = ids.changed()
            stored[changed] = ids.records(changed)
            ids.written()
            assert not len(ids.changed())
            again = IdMap(150, rules)
            for start in range(0, len(stored), 7):
                again.read(start, stored[start : start + 7])
            again.complete(ids.described(), "here")
            assert state_of(again) == state_of(ids)
            other = batches_of(number, steps=1)[0]
            assert [part.tolist() for part in again.map(other)] == [part.tolist() for part in ids.map(other)]
            again.begin(1)
            ids.drop()


@pytest.mark.parametrize("damage", ["id", "uses", "live", "free", "fresh", "hand", "last"])
def test_a_damaged_map_is_refused(damage: str) -> None:
    rules = Hash64(expire_after=4, admit_after=2)
    ids = IdMap(20, rules)
    for batch in batches_of(2):
        ids.map(batch)
        ids.begin(1)
    with ids.begun():
        records, numbers = ids.records(np.arange(IdMap.records_for(20, rules))), ids.described()
    entries = records[:2].view([("id", "<i8"), ("last", "<u4"), ("uses", "<u4")]).reshape(-1)
    used = np.flatnonzero(entries["uses"])
    if damage == "id":
        entries["id"][used[0]] = entries["id"][used[1]]
    elif damage == "uses":
        entries["uses"][used[0]] = 0
    elif damage == "last":
        entries["last"][used[0]] = numbers["batches"] + 1
    else:
        numbers[damage] += {"live": 1, "free": 1, "fresh": 1, "hand": 1000}[damage]
    again = IdMap(20, rules)
    again.read(0, records)
    with pytest.raises(CorruptionError):
        again.complete(numbers, "here")


def test_a_sketch_forgets_rare_ids_and_stays_small() -> None:
    rules = Hash64(admit_after=2, sketch=4096, evict=None)
    ids = IdMap(2000, rules)
    rng = np.random.default_rng(0)
    early = 0
    for _ in range(100):
        batch = rng.integers(-(2**63), 2**63 - 1, 100)  # none comes twice
        early += int((ids.map(batch)[0] >= 0).sum())
        ids.begin(1)
    assert early < 0.05 * 100 * 100
    kept = np.array([5])
    assert ids.map(kept)[0].tolist() == [-1]
    assert ids.map(kept)[0][0] >= 0


def test_the_bytes_are_as_planned() -> None:
    rules = Hash64(admit_after=2)
    ids = IdMap(1000, rules)
    planned = IdMap.bytes_for(1000, rules)
    for batch in batches_of(1):
        ids.map(batch)
        ids.begin(1)
    assert ids.memory_bytes == planned <= (33 + 8.3) * 1000


WORDS = ["", "a", "abc", "68fd1e64", "message digest", "é" * 9, "x" * 31, "x" * 32, "x" * 33, "0123456789" * 20]


def test_words_have_the_hashes_of_the_specification() -> None:
    # From the specification's sanity checks, and its reference implementation.
    assert [value % 2**64 for value in hash64(["", "abc", b"xxhash"]).tolist()] == [
        0xEF46DB3751D8E999, 0x44BC2CF5AD770999, 0x32DD38952C4BC720,
    ]  # fmt: skip
    assert hash64([]).shape == (0,)
    assert hash64(WORDS).dtype == torch.int64
    assert len(set(hash64(WORDS).tolist())) == len(WORDS)


@needs_core
def test_the_core_hashes_words_as_python_does() -> None:
    words = WORDS + [bytes(range(256))[:length] for length in range(100)]
    with mock.patch.object(backend, "core", None):
        twin = hash64(words)
    assert torch.equal(hash64(words), twin)


def test_options_are_checked() -> None:
    for wrong in ({"admit_after": 0}, {"admit_after": 256}, {"expire_after": 3}, {"evict": "fifo"}, {"sketch": 300}):
        with pytest.raises((ValueError, TypeError)):
            Hash64(**wrong)  # type: ignore[arg-type]
