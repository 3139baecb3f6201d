"""Checks of arguments mean the same at every border."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from memhier import Slab, SlotMap, get_codec
from memhier.arguments import as_bytes, as_ints, check_array, check_int, check_number, check_range
from memhier.policies import LFU, LRU, S3FIFO, Belady, Static


def misaligned(values: Any, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
    """Return an array of these values that starts one byte past a multiple of its alignment."""
    plain = np.asarray(values, dtype)
    raw = np.zeros(plain.nbytes + 1, np.uint8)
    array = raw[1:].view(dtype).reshape(plain.shape)
    array[...] = plain
    assert not array.flags.aligned
    return array


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)])
def test_integers_of_any_type(value: Any) -> None:
    found = check_int("rows", value, 1, 10)
    assert found == 7
    assert type(found) is int


@pytest.mark.parametrize("value", [True, np.True_, 7.0, "7", None, np.float32(7), np.array([1, 2]), Decimal(7)])
def test_no_integers(value: Any) -> None:
    with pytest.raises(TypeError, match=r"rows=.*: expected an int"):
        check_int("rows", value, 1, 10)


@pytest.mark.parametrize(
    ("value", "high", "expected"), [(0, 10, "1 to 10 keys"), (11, 10, "1 to 10 keys"), (0, None, "at least 1 keys")]
)
def test_integers_out_of_range(value: int, high: int | None, expected: str) -> None:
    with pytest.raises(ValueError, match=f"rows={value}: expected {expected}"):
        check_int("rows", value, 1, high, "keys")


@pytest.mark.parametrize("value", [1, 0.5, np.float16(0.5), np.int32(1), Fraction(1, 2)])
def test_numbers_of_any_type(value: Any) -> None:
    assert check_number("share", value, 0, 1) == float(value)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, np.array([0.5])])
def test_no_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match=r"share=.*: expected a number"):
        check_number("share", value, 0, 1)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), -float("inf")])
def test_numbers_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match=r"share=.*: expected a number from 0 to 1"):
        check_number("share", value, 0, 1)
    with pytest.raises(ValueError, match=r"share=.*: expected a number above 0 and at most 1"):
        check_number("share", value, 0, 1, above=True)


def test_numbers_above_a_bound() -> None:
    with pytest.raises(ValueError, match="seconds=0: expected a number above 0"):
        check_number("seconds", 0, 0, above=True)
    with pytest.raises(ValueError, match="seconds=-1: expected a number of at least 0"):
        check_number("seconds", -1, 0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, ">i4", np.int64, np.uint64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5)])
def test_arrays_of_integers(dtype: Any, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    arrays = [values, np.asfortranarray(values)]
    if values.size and values.dtype.itemsize > 1:
        arrays.append(misaligned(values, dtype))
    for array in arrays:
        found = as_ints("keys", array)
        assert found.dtype == np.int64
        assert found.flags.c_contiguous
        assert found.flags.aligned
        assert np.array_equal(found, values)


def test_arrays_that_are_no_integers() -> None:
    with pytest.raises(TypeError, match="keys: expected integers, got an array of float64"):
        as_ints("keys", [0.5])
    with pytest.raises(TypeError, match="bool"):
        as_ints("keys", [True])
    with pytest.raises(ValueError, match="does not fit"):
        as_ints("keys", np.array([2**63], np.uint64))
    with pytest.raises(ValueError, match=r"keys\[1\]=9: expected a key"):
        check_range("keys", np.array([0, 9]), 9, "a key")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 6), np.int64)[:, ::2],
        misaligned(np.zeros((4, 3))),
        np.broadcast_to(np.int64(0), (4, 3)),
        np.frombuffer(bytes(96), np.int64).reshape(4, 3),
    ],
    ids=["strided", "misaligned", "broadcast", "read-only"],
)
def test_arrays_that_the_core_cannot_fill(array: Any) -> None:
    with pytest.raises(ValueError, match="out: expected a writable, C-contiguous, aligned array"):
        check_array("out", array, np.int64, (4, 3))


def test_bytes_of_any_buffer() -> None:
    assert as_bytes("data", np.arange(2, dtype="<u2")) == b"\x00\x00\x01\x00"
    with pytest.raises(TypeError, match="data: expected bytes"):
        as_bytes("data", 5)
    with pytest.raises(ValueError, match="C-contiguous"):
        as_bytes("data", np.zeros((4, 4), np.uint8)[:, ::2])


POLICIES: list[Callable[[int], Any]] = [
    LRU,
    LFU,
    S3FIFO,
    Belady,
    lambda capacity: Static(capacity, range(capacity - 1)),
]


@pytest.mark.parametrize("make", POLICIES, ids=["lru", "lfu", "s3fifo", "belady", "static"])
def test_policies_take_misaligned_keys(make: Callable[[int], Any]) -> None:
    keys = np.array([1, 2, 3, 1, 5, 6, 2, 1])
    plain, shifted = make(4), make(4)
    if isinstance(plain, Belady):
        plain.announce(keys[:4])
        shifted.announce(misaligned(keys[:4]))
    expected, found = plain.access(keys[:4]), shifted.access(misaligned(keys[:4]), pinned=misaligned([1]))
    assert np.array_equal(found.hit, expected.hit)
    shifted.discard(misaligned([1, 2]))
    plain.discard([1, 2])
    assert len(shifted) == len(plain)


@pytest.mark.parametrize("key_space", [None, 100])
def test_slot_maps_and_misaligned_arrays(key_space: int | None) -> None:
    slots = SlotMap(8, key_space=key_space)
    keys = misaligned([5, 7, 5, 90])
    assert np.array_equal(slots.insert(keys), slots.find(keys))
    assert np.array_equal(slots.keys_of(misaligned(slots.find([5, 90]))), [5, 90])
    with pytest.raises(ValueError, match="out: expected a writable, C-contiguous, aligned"):
        slots.find(keys, out=misaligned(np.zeros(4)))
    slots.erase(keys)
    assert len(slots) == 0


def test_slabs_and_misaligned_arrays() -> None:
    with Slab(8, np.float32, 3) as slab:
        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        slab.scatter(misaligned([2, 4]), misaligned(rows, np.float32))
        assert np.array_equal(slab.gather(misaligned([2, 4])), rows)
        with pytest.raises(ValueError, match="out: expected a writable, C-contiguous, aligned"):
            slab.gather([2, 4], out=misaligned(rows, np.float32))


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int8ef"])
def test_codecs_and_misaligned_rows(name: str) -> None:
    codec = get_codec(name)
    rows = np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8)
    assert np.array_equal(codec.encode(misaligned(rows, np.float32)), codec.encode(rows))
