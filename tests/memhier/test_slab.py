"""Slab against a plain array; what it refuses; reads that meet a write."""

import mmap
import os
import pickle
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.cache import slab as slab_module
from memhier.cache.slab import Slab
from memhier.errors import ClosedError

FIELDS = np.dtype([("weight", "<f4", (5,)), ("state", "<f4"), ("step", "<u2")])
ROWS = [("<f4", (64,)), ("u1", (97,)), ("<f8", ()), ("<i2", (3, 5)), (FIELDS, ()), (FIELDS, (2,)), ("S3", (1,))]


def random_rows(seed: int, count: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    size = count * int(np.prod(shape)) * dtype.itemsize
    rows: np.ndarray[Any, Any] = np.random.default_rng(seed).integers(1, 100, size, np.uint8).view(dtype)
    return rows.reshape(count, *shape)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ROWS),
    st.sampled_from([1, 3, 97]),
    st.booleans() if hasattr(os, "memfd_create") else st.just(False),
    st.lists(st.lists(st.integers(0, 96), max_size=30), max_size=4),
)
def test_equals_a_plain_array(
    row: tuple[Any, tuple[int, ...]], slots: int, shared: bool, batches: list[list[int]]
) -> None:
    dtype, shape = row
    plain = np.zeros((slots, *shape), dtype)
    with Slab(slots, dtype, shape, shared=shared) as slab:
        for number, batch in enumerate(batches):
            index = np.array(batch, np.int64) % slots
            rows = random_rows(number, len(index), dtype, shape)
            slab.scatter(index, rows)
            for i, at in enumerate(index):
                plain[at] = rows[i]
            assert slab.rows.tobytes() == plain.tobytes()
            gathered = slab.gather(index)
            assert gathered.dtype == plain.dtype
            assert gathered.shape == (len(index), *shape)
            assert gathered.tobytes() == plain[index].tobytes()


def test_any_shape_and_layout_of_arguments() -> None:
    slab = Slab(97, np.int16, (3,))
    rows = random_rows(0, 2 * 24, np.int16, (3,)).reshape(12, 4, 3)[::2].transpose(1, 0, 2)
    slots = np.arange(48, dtype=np.uint8).reshape(6, 8)[:, ::2].T
    slab.scatter(slots, rows)
    assert (slab.gather(slots) == rows).all()
    assert (slab.rows[slots.astype(int)] == rows).all()
    assert slab.gather(5).shape == (3,)
    assert slab.gather([]).shape == (0, 3)
    assert slab.gather(np.empty((2, 0), int)).shape == (2, 0, 3)
    out = np.empty((4, 6, 3), np.int16)
    assert slab.gather(slots, out=out) is out
    assert (out == rows).all()


def test_memory_is_page_aligned_and_counted() -> None:
    page = mmap.PAGESIZE
    for slots, width in ((1, 1), (1024, 4), (1025, 4), (97, 999)):
        slab = Slab(slots, np.uint8, width)
        expected = page + -(-4 * slots // page) * page + -(-slots * width // page) * page
        assert slab.memory_bytes == expected == Slab.bytes_for(slots, np.uint8, width)
        assert slab.rows.ctypes.data % page == 0
        assert slab.row_bytes == width
        slab.close()
        assert slab.memory_bytes == 0


@pytest.mark.parametrize("slots", [[0, -1], [0, 10], [0, 2**62], np.array([0, 2**63], np.uint64), [0.0, 1.0], ["a"]])
def test_bad_slots_change_nothing(slots: Any) -> None:
    slab = Slab(10, np.float32, 2)
    slab.scatter(np.arange(10), np.ones((10, 2), np.float32))
    generations = slab.generations(np.arange(10))
    for call in (
        slab.gather,
        slab.gather_versioned,
        slab.generations,
        lambda s: slab.scatter(s, np.zeros((2, 2), "f4")),
    ):
        with pytest.raises((ValueError, TypeError), match="slots"):
            call(slots)
    assert (slab.rows == 1).all()
    assert (slab.generations(np.arange(10)) == generations).all()


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (np.zeros((2, 2)), TypeError, "float32, got float64"),
        (np.zeros((2, 3), np.float32), ValueError, r"\(2, 2\), got \(2, 3\)"),
        (np.zeros(2, np.float32), ValueError, r"\(2, 2\), got \(2,\)"),
        (np.zeros((1, 2), np.float32), ValueError, r"\(2, 2\), got \(1, 2\)"),
    ],
)
def test_unfit_rows(rows: Any, error: type[Exception], words: str) -> None:
    slab = Slab(10, np.float32, 2)
    with pytest.raises(error, match=words):
        slab.scatter([1, 2], rows)
    assert not slab.generations([1, 2]).any()


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.empty((2, 2)), TypeError),
        ([[0, 0], [0, 0]], TypeError),
        (np.empty((2, 3), np.float32), ValueError),
        (np.empty((2, 4), np.float32)[:, ::2], ValueError),
        (np.broadcast_to(np.float32(0), (2, 2)), ValueError),
    ],
)
def test_unfit_out(out: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="out: expected"):
        Slab(10, np.float32, 2).gather([1, 2], out=out)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, "f4"), ValueError, "slots=0"),
        ((2.0, "f4"), TypeError, r"slots=2\.0"),
        ((2, "O"), ValueError, "dtype=object"),
        ((2, "S0"), ValueError, "dtype="),
        ((2, "f4", (3, 0)), ValueError, r"shape\[1\]=0"),
        ((2, "f4", -1), ValueError, "shape=-1"),
        ((2, "f4", 1.5), TypeError, r"shape=1\.5"),
        ((2, ("f4", 3)), ValueError, "shape of a row as shape"),
    ],
)
def test_unfit_arguments(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Slab(*arguments)
    with pytest.raises(error, match=words):
        Slab.bytes_for(*arguments)


def test_rows_cannot_be_written_in_place() -> None:
    slab = Slab(3, np.float32, 2)
    with pytest.raises(ValueError, match="read-only"):
        slab.rows[0] = 1


def test_closed() -> None:
    slab = Slab(3, np.float32, 2)
    kept = slab.rows
    slab.close()
    slab.close()
    for call in (
        slab.gather,
        slab.gather_versioned,
        slab.generations,
        lambda s: slab.scatter(s, np.zeros((1, 2), "f4")),
    ):
        with pytest.raises(ClosedError):
            call([0])
    with pytest.raises(ClosedError):
        _ = slab.rows
    assert (kept == 0).all()


def test_generations_count_writes() -> None:
    slab = Slab(5, np.uint8)
    slab.scatter([1, 3, 1], np.zeros(3, np.uint8))
    slab.scatter([3], np.zeros(1, np.uint8))
    assert slab.generations(np.arange(5)).tolist() == [0, 2, 0, 4, 0]
    slab._generations[3] = 2**32 - 2
    slab.scatter([3], np.zeros(1, np.uint8))
    assert slab.generations(3) == 0


def test_a_row_written_while_read_is_reported() -> None:
    slab = Slab(4, np.uint8, 3)
    ones = np.ones((1, 3), np.uint8)
    _, versions = slab.gather_versioned([2, 1])
    assert versions.tolist() == [0, 0]
    slab.scatter([1], ones)
    fences: list[Any] = []

    def write_at_first_fence() -> None:
        fences.append(None)
        if len(fences) == 1:
            slab.scatter([1], ones)

    with mock.patch.object(slab_module, "_fence", write_at_first_fence):
        _, versions = slab.gather_versioned([2, 1, 3])
    assert (versions % 2).tolist() == [0, 1, 0]
    rows, versions = slab.gather_versioned([2, 1])
    assert versions.tolist() == [0, 4]
    assert (rows[1] == 1).all()


def test_a_row_read_while_written_is_reported() -> None:
    slab = Slab(4, np.uint8, 3)
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(slab.generations([1, 2]).tolist())

    with mock.patch.object(slab_module, "_fence", look):
        slab.scatter([1], np.ones((1, 3), np.uint8))
    assert seen == [[1, 0], [1, 0]]
    assert slab.generations(1) == 2


def test_a_write_that_broke_off_leaves_the_row_marked_until_it_is_written_again() -> None:
    slab = Slab(4, np.uint8, 3)
    with mock.patch.object(slab_module, "_fence", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        slab.scatter([1], np.ones((1, 3), np.uint8))
    assert slab.generations(1) % 2 == 1
    slab.scatter([1], np.ones((1, 3), np.uint8))
    assert slab.generations(1) % 2 == 0


def test_writing_in_place() -> None:
    slab = Slab(5, FIELDS, (2,))
    ones = random_rows(0, 1, FIELDS, (2,))
    with slab.writing([1, 3, 1]) as rows:
        rows["weight"][[1, 3]] = 7
        assert slab.generations(np.arange(5)).tolist() == [0, 1, 0, 1, 0]
        slab.scatter([4], ones)
    assert slab.generations(np.arange(5)).tolist() == [0, 2, 0, 2, 2]
    assert (slab.gather([1, 3])["weight"] == 7).all()
    assert slab.gather([4]).tobytes() == ones.tobytes()
    with pytest.raises(ValueError, match=r"slots\[0\]=5"), slab.writing([5]):
        pass
    with pytest.raises(RuntimeError, match="half"), slab.writing([1]):
        raise RuntimeError("half done")
    assert slab.generations([1, 3]).tolist() == [3, 2]
    slab.scatter([1], ones)
    assert slab.generations(1) == 4


def test_threads_that_write_the_same_rows() -> None:
    """Rows are written whole: each ends as one writer's, with as many generations as writes."""
    slab = Slab(16, np.int64, 100)

    def work(which: int) -> None:
        for _ in range(50):
            slab.scatter(np.arange(16), np.full((16, 100), which))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (slab.rows == slab.rows[:, :1]).all()
    assert slab.generations(np.arange(16)).tolist() == [2 * 50 * 4] * 16


def test_a_private_slab_does_not_pickle() -> None:
    with pytest.raises(TypeError, match="shared=True"):
        pickle.dumps(Slab(3, np.float32))
