"""Rows: equal to a plain array for every width and order, within 1.1 times its bytes where a page can be shared."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.io.reader import Reader
from memhier.rows.rows import Rows, RowsWriter, rows_per_page
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
WIDTHS = [1, 3, 97, 372, 373, 400, 512, 1365, 2048, 3072, 3724, 3725, 4095, 4096, 4097, 10_007]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        yield Path(folder) / "store"


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


def random_rows(count: int, row_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, row_bytes), np.uint8)


def write(store: Store, **tables: NDArray[np.uint8]) -> None:
    with store.begin() as tx:
        for name, rows in tables.items():
            writer = RowsWriter(tx, name, rows.shape[1])
            writer.append(rows)
            writer.finish()
        tx.commit()


@settings(max_examples=60, deadline=None)
@given(
    row_bytes=st.sampled_from(WIDTHS) | st.integers(1, 5000),
    pieces=st.lists(st.integers(0, 97), max_size=5),
    seed=st.integers(0, 99),
)
def test_equal_to_an_array(reader: Reader, row_bytes: int, pieces: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = random_rows(sum(pieces), row_bytes, seed)
    with tempfile.TemporaryDirectory(dir=FAST) as folder, Store.create(Path(folder) / "s", KIND) as store:
        with store.begin() as tx:
            writer = RowsWriter(tx, "rows", row_bytes)
            for part in np.split(expected, np.cumsum(pieces)[:-1] if pieces else []):
                writer.append(part)
            assert len(writer) == len(expected)
            writer.finish()
            tx.commit()
        with Rows(store, "rows", reader) as rows:
            assert (len(rows), rows.row_bytes) == expected.shape
            numbers = rng.integers(0, max(len(expected), 1), 97 if len(expected) else 0)
            assert np.array_equal(rows.read(numbers), expected[numbers])
            out = np.empty((len(numbers), row_bytes), np.uint8)
            assert rows.read(numbers.astype(np.uint16), out) is out
            assert np.array_equal(out, expected[numbers])
            start, stop = sorted(rng.integers(0, len(expected) + 1, 2).tolist())
            assert np.array_equal(rows.read_range(start, stop), expected[start:stop])


@pytest.mark.parametrize("row_bytes", WIDTHS)
def test_space_and_straddling(root: Path, row_bytes: int) -> None:
    count = 3 * 2**20 // row_bytes
    with Store.create(root, KIND) as store:
        write(store, rows=random_rows(count, row_bytes))
        length = store.segments()["rows"].length
    assert length <= 1.1 * count * row_bytes + 4096
    per_page = rows_per_page(row_bytes)
    assert (per_page is None) == (row_bytes > 4096 or 4096 % row_bytes in (0, *range(373, 4096)))
    if per_page is not None:
        assert length == -(-count // per_page) * 4096


def test_pages_and_reads_per_row(root: Path, reader: Reader) -> None:
    def cost(rows: Rows, numbers: list[int]) -> tuple[int, int]:
        before = reader.stats()
        rows.read(numbers)
        after = reader.stats()
        return after["pages"] - before["pages"], after["reads"] - before["reads"]

    with Store.create(root, KIND) as store:
        write(store, packed=random_rows(1000, 400), dense=random_rows(1000, 3072))
        with Rows(store, "packed", reader) as rows:
            assert [cost(rows, [number]) for number in range(30)] == [(1, 1)] * 30
            assert cost(rows, [11] * 5) == (1, 1)
        with Rows(store, "dense", reader) as rows:
            # Four rows in three pages: the second and the third straddle.
            assert [cost(rows, [number]) for number in range(4)] == [(1, 1), (2, 1), (2, 1), (1, 1)]


def test_rows_of_any_strides(root: Path, reader: Reader) -> None:
    base = random_rows(2 * 1003, 2 * 97)
    for row_bytes, table in ((97, base[::2, ::2]), (97, base[::-1, :97]), (1003, base[:1003, :97].T)):
        path = root.with_name(f"store{id(table)}")
        with Store.create(path, KIND) as store:
            write(store, rows=table)
            with Rows(store, "rows", reader) as rows:
                assert rows.row_bytes == row_bytes
                assert np.array_equal(rows.read_range(0, len(rows)), table)


def test_a_long_table_in_bounded_memory(root: Path, reader: Reader) -> None:
    table = random_rows(70_000, 97)
    with Store.create(root, KIND) as store:
        with store.begin() as tx:
            writer = RowsWriter(tx, "rows", 97)
            for start in range(0, len(table), 9973):
                writer.append(table[start : start + 9973])
                assert writer.memory_bytes + tx.memory_bytes < 2**21 + 2**16
            writer.finish()
            tx.commit()
        with Rows(store, "rows", reader) as rows:
            assert rows.memory_bytes < 2**12
            for start in range(0, len(table), 7919):
                stop = min(start + 7919, len(table))
                assert np.array_equal(rows.read_range(start, stop), table[start:stop])


def test_bad_numbers(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store:
        write(store, rows=random_rows(97, 3), none=random_rows(0, 3))
        with Rows(store, "rows", reader) as rows, Rows(store, "none", reader) as none:
            for numbers, message in (([0, -1], r"numbers\[1\]=-1: expected 0 to 96"), ([97], r"numbers\[0\]=97")):
                with pytest.raises(IndexError, match=message):
                    rows.read(numbers)
            with pytest.raises(IndexError, match=r"numbers\[0\]=0"):
                none.read([0])
            with pytest.raises(IndexError, match="numbers"):
                rows.read(np.array([2**64 - 1], np.uint64))
            assert none.read([]).shape == none.read_range(0, 0).shape == (0, 3)
            for start, stop in ((-1, 3), (5, 4), (0, 98)):
                with pytest.raises(IndexError, match=f"start={start}, stop={stop}"):
                    rows.read_range(start, stop)
            with pytest.raises(TypeError, match="float64"):
                rows.read([0.5])
            with pytest.raises(ValueError, match=r"shape \[n\]"):
                rows.read([[1]])
            with pytest.raises(ValueError, match="out"):
                rows.read([1], np.empty((2, 3), np.uint8))


def test_bad_rows(root: Path) -> None:
    with Store.create(root, KIND) as store, store.begin() as tx:
        for row_bytes, error in (
            (0, ValueError),
            (-1, ValueError),
            (2**30 + 1, ValueError),
            (1.5, TypeError),
            (True, TypeError),
        ):
            with pytest.raises(error, match="row_bytes="):
                RowsWriter(tx, "rows", row_bytes)  # type: ignore[arg-type]
        writer = RowsWriter(tx, "rows", 4)
        for rows, error in (
            (np.zeros((2, 3), np.uint8), ValueError),
            (np.zeros(4, np.uint8), ValueError),
            (np.zeros((1, 4), np.int8), TypeError),
            (b"abcd", TypeError),
        ):
            with pytest.raises(error, match="rows: expected"):
                writer.append(rows)  # type: ignore[arg-type]
        writer.append(np.ones((1, 4), np.uint8))
        writer.finish()
        for call in (writer.finish, lambda: writer.append(np.ones((1, 4), np.uint8))):
            with pytest.raises(ClosedError):
                call()
        tx.commit()
        assert store.read_segment("rows").tobytes() == b"\1\1\1\1"


def test_rows_that_are_not_there(root: Path, reader: Reader) -> None:
    with Store.create(root, KIND) as store:
        with store.begin() as tx:
            RowsWriter(tx, "unfinished", 4).append(np.ones((3, 4), np.uint8))
            tx.segment("shorter").append(b"123")
            tx.put("rows/shorter", (4).to_bytes(8, "little") + (2).to_bytes(8, "little"))
            tx.segment("damaged")
            tx.put("rows/damaged", b"")
            tx.commit()
        for name in ("missing", "unfinished"):
            with pytest.raises(FormatError, match=f"no rows named '{name}'"):
                Rows(store, name, reader)
        with pytest.raises(CorruptionError, match="3 bytes do not hold 2 rows of 4"):
            Rows(store, "shorter", reader)
        with pytest.raises(CorruptionError, match="record of rows 'damaged' has 0 bytes"):
            Rows(store, "damaged", reader)


def test_a_flipped_bit_is_found_when_its_row_is_read(root: Path, reader: Reader) -> None:
    table = random_rows(100, 97)
    with Store.create(root, KIND) as store:
        write(store, rows=table)
        path = store.segments()["rows"].path
    with open(path, "r+b") as file:
        file.seek(4096 + 5)
        byte = file.read(1)[0]
        file.seek(4096 + 5)
        file.write(bytes([byte ^ 8]))
    with Store.open(root, KIND) as store, Rows(store, "rows", reader) as rows:
        good = np.r_[0:42, 84:100]
        assert np.array_equal(rows.read(good), table[good])
        with pytest.raises(CorruptionError, match=r"rows\.00000001\.seg"):
            rows.read([83, 0])


def test_what_was_closed_reads_no_other_file(root: Path, reader: Reader) -> None:
    """Whose handle may be the one it had."""
    with Store.create(root, KIND) as store:
        write(store, one=random_rows(9, 97), other=random_rows(9, 97, 1))
        rows = Rows(store, "one", reader)
        rows.close()
        with Rows(store, "other", reader) as other:
            with pytest.raises(ValueError, match="handle from add"):
                rows.read([0])
            with pytest.raises(ValueError, match="handle from add"):
                rows.close()
            assert np.array_equal(other.read([0]), random_rows(9, 97, 1)[:1])
