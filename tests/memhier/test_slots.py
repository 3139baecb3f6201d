"""SlotMap against a dict, in every form: compiled and Python, hashed and direct, the same slots to the number."""

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memhier import backend
from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError

INT64 = np.iinfo(np.int64)
CORES = ["python"] if backend.core is None else ["native", "python"]
DENSE = 50


def make_map(core: str, capacity: int, **sizes: Any) -> SlotMap:
    with mock.patch.object(backend, "core", backend.core if core == "native" else None):
        return SlotMap(capacity, **sizes)


def key_hashing_to(tag: int, low: int) -> int:
    """Undo the compiled core's hash, so that a test can choose the place a key falls on."""
    inverse = pow(0xD6E8FEB86659FD93, -1, 2**64)
    x = (tag << 32) | low
    for _ in range(2):
        x = x * inverse % 2**64
        x ^= x >> 32
    return x - 2**64 if x >= 2**63 else x


# Keys on one place, on the last place (from where probing wraps round), beside each other; extremes; ordinary ones.
colliding = st.builds(key_hashing_to, st.sampled_from([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), st.integers(0, 12))
any_key = st.one_of(
    st.integers(-3, 12), st.sampled_from([INT64.min, INT64.min + 1, INT64.max, INT64.max - 1]), colliding
)
dense_key = st.integers(0, DENSE - 1)


class DictModel:
    """The promises of SlotMap, in the plainest form."""

    def __init__(self, capacity: int) -> None:
        self.slot_of: dict[int, int] = {}
        self.free = list(range(capacity))[::-1]

    def insert(self, keys: list[int]) -> list[int] | None:
        if len(set(keys) - set(self.slot_of)) > len(self.free):
            return None
        for key in keys:
            if key not in self.slot_of:
                self.slot_of[key] = self.free.pop()
        return [self.slot_of[key] for key in keys]

    def erase(self, keys: list[int]) -> list[int]:
        slots = [self.slot_of.pop(key, -1) for key in keys]
        self.free += [slot for slot in slots if slot >= 0]
        return slots


def reference_unique(keys: list[int]) -> tuple[list[int], list[int]]:
    distinct = list(dict.fromkeys(keys))
    return distinct, [distinct.index(key) for key in keys]


class SlotMachine(RuleBasedStateMachine):
    """Feeds the same batches to a dict and to every form of the map."""

    keys = any_key
    forms: tuple[dict[str, int], ...] = ({},)

    @initialize(capacity=st.sampled_from([1, 3, 7, 30]))
    def build(self, capacity: int) -> None:
        self.model = DictModel(capacity)
        self.maps = [make_map(core, capacity, **form) for core in CORES for form in self.forms]

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(self.keys, max_size=12))
        expected = self.model.insert(keys)
        for slots in self.maps:
            if expected is None:
                with pytest.raises(BudgetError):
                    slots.insert(keys)
            else:
                assert slots.insert(keys).tolist() == expected

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        held = list(self.model.slot_of)
        keys = data.draw(st.lists(st.one_of(self.keys, st.sampled_from(held)) if held else self.keys, max_size=12))
        expected = self.model.erase(keys)
        for slots in self.maps:
            assert slots.erase(keys).tolist() == expected

    @rule(more=st.integers(0, 9))
    def grow(self, more: int) -> None:
        if self.forms != ({},):
            return
        capacity = self.maps[0].capacity
        self.model.free = [*reversed(range(capacity, capacity + more)), *self.model.free]
        for slots in self.maps:
            slots.grow(capacity + more)
            assert slots.capacity == capacity + more

    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(self.keys, max_size=40))
        distinct, inverse = reference_unique(keys)
        for slots in self.maps:
            assert slots.find(keys).tolist() == [self.model.slot_of.get(key, -1) for key in keys]
            assert [part.tolist() for part in slots.unique(keys)] == [distinct, inverse]
            places = [self.model.slot_of.get(key, -1) for key in distinct]
            assert [part.tolist() for part in slots.unique_find(keys)] == [distinct, inverse, places]

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        expected = sorted((slot, key) for key, slot in self.model.slot_of.items())
        for slots in self.maps:
            assert len(slots) == len(expected)
            assert slots.free == len(self.model.free)
            keys, places = slots.items()
            assert list(zip(places.tolist(), keys.tolist(), strict=True)) == expected
            assert slots.keys_of(places).tolist() == keys.tolist()


class DenseSlotMachine(SlotMachine):
    """Keys of a known range: the direct forms must agree with the hashed ones."""

    keys = dense_key
    forms = ({}, {"key_space": DENSE})


TestSlotMachine = SlotMachine.TestCase
TestDenseSlotMachine = DenseSlotMachine.TestCase
TestSlotMachine.settings = TestDenseSlotMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[{}, {"key_space": 300_000}], ids=["hashed", "direct"])
def form(request: pytest.FixtureRequest) -> dict[str, int]:
    return dict(request.param)


def skewed(seed: int, size: int, universe: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    rng = np.random.default_rng(seed)
    return (universe * rng.random(size) ** 4).astype(np.int64)


@pytest.mark.parametrize("size", [0, 1, 3, 97, 50_000])
def test_large_batches_equal_numpy(core: str, form: dict[str, int], size: int) -> None:
    slots = make_map(core, 40_000, **form)
    keys = skewed(1, size, 300_000)
    held = np.unique(skewed(2, 30_000, 300_000))
    np.random.default_rng(3).shuffle(held)
    assert (slots.insert(held) == np.arange(len(held))).all()

    unique, inverse, places = slots.unique_find(keys)
    assert (unique[inverse] == keys).all()
    assert (np.sort(unique) == np.unique(keys)).all()
    first = [int(np.argmax(inverse == i)) for i in range(min(50, len(unique)))]
    assert first == sorted(first)
    slot_of = np.full(300_000, -1)
    slot_of[held] = np.arange(len(held))
    assert (places == slot_of[unique]).all()
    assert (slots.find(keys) == slot_of[keys]).all()

    gone = held[::3]
    assert (slots.erase(gone) == slot_of[gone]).all()
    slot_of[gone] = -1
    assert (slots.find(np.arange(300_000)) == slot_of).all()
    # The slot freed last is used first.
    fresh = np.setdiff1d(np.arange(300_000), held)[: len(gone)]
    assert (slots.insert(fresh) == np.arange(len(held))[::3][::-1]).all()


def test_inserts_the_same_key_once(core: str) -> None:
    slots = make_map(core, 2)
    assert slots.insert([7, 7, 7, 8, 7]).tolist() == [0, 0, 0, 1, 0]
    assert slots.erase([8, 8, 7]).tolist() == [1, -1, 0]
    assert slots.insert([5]).tolist() == [0]


def test_full_map_says_what_would_help_and_stays_as_it_was(core: str, form: dict[str, int]) -> None:
    slots = make_map(core, 3, **form)
    slots.insert([10, 11])
    with pytest.raises(BudgetError, match=r"2 of them are new, but 1 of 3 slots are free.*erase 1.*capacity=4"):
        slots.insert([12, 10, 13, 12])
    assert slots.find([10, 11, 12, 13]).tolist() == [0, 1, -1, -1]
    assert slots.insert([13, 10, 13, 11]).tolist() == [2, 0, 2, 1]


def test_colliding_keys_fill_the_whole_map(core: str) -> None:
    keys = [key_hashing_to(2**32 - 1, low) for low in range(97)]
    slots = make_map(core, 97)
    assert slots.insert(keys).tolist() == list(range(97))
    assert slots.erase(keys[::2]).tolist() == list(range(0, 97, 2))
    assert slots.find(keys).tolist() == [-1 if i % 2 == 0 else i for i in range(97)]


def test_memory_is_taken_once_and_counted(core: str, form: dict[str, int]) -> None:
    slots = make_map(core, 1000, batch=5000, **form)
    before = slots.memory_bytes
    slots.insert(np.arange(1000))
    slots.unique_find(skewed(4, 5000, 300_000))
    slots.erase(np.arange(500))
    assert slots.memory_bytes == before
    slots.unique(np.arange(6000))
    if core == "native":
        index_bytes = 4 * form["key_space"] if form else 16 * 1000
        assert before == 12 * 1000 + 8 * -(-1000 // 64) + index_bytes + 40 * 5000
        assert slots.memory_bytes == SlotMap.bytes_for(1000, batch=6000, **form)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 5)])
def test_results_take_the_shape_of_the_keys(core: str, shape: tuple[int, ...]) -> None:
    slots = make_map(core, 100)
    keys = np.random.default_rng(0).integers(-50, 50, shape)
    placed = slots.insert(keys)
    assert placed.shape == shape
    assert slots.find(keys).shape == shape
    assert (slots.find(keys) == placed).all()
    unique, inverse = slots.unique(keys)
    assert inverse.shape == shape
    assert (unique[inverse] == keys).all()
    assert slots.erase(keys).shape == shape


@pytest.mark.parametrize("dtype", ["i1", "u1", ">i4", "u8", "i8"])
def test_any_layout_of_integers(core: str, dtype: str) -> None:
    slots = make_map(core, 100)
    keys = np.arange(60, dtype=dtype).reshape(6, 10)
    strided = keys[::2, ::-3].T
    assert (slots.insert(strided) == np.arange(12).reshape(4, 3)).all()
    assert (slots.keys_of(slots.find(strided)) == strided).all()


def test_find_into_an_array(core: str) -> None:
    slots = make_map(core, 100)
    slots.insert(np.arange(100, 200))
    keys = np.arange(90, 190)
    expected = slots.find(keys)
    out = np.empty(100, np.int64)
    assert slots.find(keys, out=out) is out
    assert (out == expected).all()
    assert (slots.find(keys[:-1], out=keys[1:]) == expected[:-1]).all()


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.empty(3, np.int32), TypeError),
        ([0, 0, 0], TypeError),
        (np.empty(4, np.int64), ValueError),
        (np.empty((3, 1), np.int64), ValueError),
        (np.empty(6, np.int64)[::2], ValueError),
    ],
)
def test_unfit_out(core: str, out: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="out: expected"):
        make_map(core, 3).find([1, 2, 3], out=out)


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ([1.5], TypeError, "float64"),
        ([True], TypeError, "bool"),
        (["a"], TypeError, "keys"),
        ([[1], [2, 3]], ValueError, "inhomogeneous"),
        (np.array([2**63], np.uint64), ValueError, "9223372036854775808 does not fit"),
    ],
)
def test_keys_that_are_no_int64(core: str, keys: Any, error: type[Exception], words: str) -> None:
    slots = make_map(core, 3)
    for call in (slots.find, slots.insert, slots.erase, slots.unique, slots.unique_find):
        with pytest.raises(error, match=words):
            call(keys)
    assert len(slots) == 0


@pytest.mark.parametrize("key", [-1, 10, INT64.min, INT64.max])
def test_keys_outside_the_key_space(core: str, key: int) -> None:
    slots = make_map(core, 3, key_space=10)
    slots.insert([4])
    for call in (slots.find, slots.insert, slots.erase, slots.unique, slots.unique_find):
        with pytest.raises(ValueError, match=rf"keys\[1\]={key}: expected 0 to 9"):
            call([5, key])
    assert slots.items()[0].tolist() == [4]


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ({"capacity": 0}, ValueError, "capacity=0: expected 1 to"),
        ({"capacity": 2**31}, ValueError, "capacity=2147483648"),
        ({"capacity": 2.0}, TypeError, r"capacity=2\.0: expected an int"),
        ({"capacity": True}, TypeError, "capacity=True"),
        ({"capacity": None}, TypeError, "capacity=None"),
        ({"capacity": 2, "key_space": 0}, ValueError, "key_space=0"),
        ({"capacity": 2, "key_space": 2**64}, ValueError, "key_space=18446744073709551616: expected 1 to"),
        ({"capacity": 2, "key_space": "9"}, TypeError, "key_space='9'"),
        ({"capacity": 2, "batch": -1}, ValueError, "batch=-1"),
    ],
)
def test_sizes_out_of_range(core: str, sizes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_map(core, **sizes)
    with pytest.raises(error, match=words):
        SlotMap.bytes_for(**sizes)


def test_keys_of_free_slots(core: str) -> None:
    slots = make_map(core, 4)
    slots.insert([0, 5, 6])
    slots.erase([5])
    with pytest.raises(ValueError, match=r"slots\[2\]=1: .*it is free"):
        slots.keys_of([0, 2, 1])
    with pytest.raises(ValueError, match=r"slots\[0\]=3: .*it is free"):
        slots.keys_of([3])
    with pytest.raises(ValueError, match=r"slots\[1\]=-1: expected a slot, 0 to 3"):
        slots.keys_of([0, -1])
    with pytest.raises(ValueError, match=r"slots\[0\]=4"):
        slots.keys_of([4])


@given(st.lists(any_key, max_size=200))
def test_forms_agree_on_unique(keys: list[int]) -> None:
    expected = list(reference_unique(keys))
    for core in CORES:
        assert [part.tolist() for part in make_map(core, 1).unique(keys)] == expected


def test_threads_share_a_map(core: str, form: dict[str, int]) -> None:
    """Each thread works on keys of its own; none may see another's half-done work."""
    slots = make_map(core, 4000, **form)
    wrong: list[str] = []

    def work(which: int) -> None:
        rng = np.random.default_rng(which)
        mine = np.arange(1000) + 1000 * which
        for _ in range(25):
            keys = rng.choice(mine, 600)
            placed = slots.insert(keys)
            unique, inverse, places = slots.unique_find(keys)
            if not ((placed == places[inverse]).all() and (unique[inverse] == keys).all()):
                wrong.append("unique_find")
            if (slots.keys_of(placed) != keys).any() or (np.sort(slots.erase(unique)) != np.sort(places)).any():
                wrong.append("erase")

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(slots) == 0


def test_maps_that_cannot_grow_say_so(core: str, form: dict[str, int]) -> None:
    slots = make_map(core, 5, **form)
    slots.insert(range(5))
    with pytest.raises(ValueError, match="capacity=4"):
        slots.grow(4)
    if form:
        with pytest.raises(ValueError, match="key_space=300000: such a map does not grow"):
            slots.grow(6)
        return
    with pytest.raises(BudgetError):
        slots.insert([5])
    slots.grow(50_000)
    assert slots.insert(range(50_000)).tolist() == list(range(50_000))
