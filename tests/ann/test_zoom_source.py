"""Sources of vectors for an index: paths, readers, array-likes that are read by slices, lists of blocks."""

import os
from pathlib import Path

import numpy as np
import pytest

from memhier.ann.files import open_vectors, write_vectors
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.errors import ClosedError, FormatError

MATRIX = np.random.default_rng(0).normal(size=(97, 5)).astype(np.float32)


class Slices:
    """An array-like that must not be asked for all of itself, as a data set on disk must not."""

    def __init__(self, array, rows_max):
        self.array, self.shape, self.dtype, self.rows_max = array, array.shape, array.dtype, rows_max

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        part = self.array[rows]
        assert len(part) <= self.rows_max
        return part

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("asked for all of itself")

    def __iter__(self):
        raise AssertionError("asked row by row")


def all_of(source):
    blocks = []
    for start, block in source.blocks():
        assert start == sum(map(len, blocks))
        assert block.flags.c_contiguous
        assert block.dtype == source.dtype
        blocks.append(block)
    return np.vstack(blocks)


def check(source, matrix):
    assert (source.count, source.dimension) == matrix.shape
    for _ in range(2):
        np.testing.assert_array_equal(all_of(source), matrix)
    rows = np.array([0, 1, 1, 50, 96])
    np.testing.assert_array_equal(source.take(rows), matrix[rows])
    assert source.take(rows).dtype == source.dtype


def test_a_path_and_a_reader(tmp_path):
    path = tmp_path / "x.fvecs"
    write_vectors(path, MATRIX)
    for given in (path, str(path)):
        with open_source(given, tmp_path) as source:
            check(source, MATRIX)
        with pytest.raises(ClosedError):
            source.take(np.array([0]))
    with open_vectors(path) as reader:
        with open_source(reader, tmp_path) as source:
            check(source, MATRIX)
        check(open_source(reader, tmp_path), MATRIX)  # the caller's reader stays open
    assert os.listdir(tmp_path) == ["x.fvecs"]


def test_a_path_is_no_iterable_of_letters(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_source(str(tmp_path / "none.fbin"), tmp_path)
    with pytest.raises(ValueError, match="'' is not one of"):
        open_source("vectors", tmp_path)


@pytest.mark.parametrize(("dtype", "stored"), [("<f8", "f4"), (">f4", "f4"), ("f2", "f2"), ("u1", "u1")])
def test_array_likes_are_read_by_slices(tmp_path, monkeypatch, dtype, stored):
    monkeypatch.setattr("memhier.ann.files._reader._BLOCK_BYTES", 400)
    matrix = np.random.default_rng(1).integers(0, 100, (97, 5)).astype(dtype)
    source = open_source(Slices(matrix, 20), tmp_path)
    assert source.dtype == stored
    check(source, matrix)


class Recorded:
    """A data set that notes which rows are read."""

    def __init__(self, data, reads):
        self.shape, self.dtype, self.chunks = data.shape, data.dtype, data.chunks
        self.data, self.reads = data, reads

    def __getitem__(self, rows):
        self.reads.append((rows.start, rows.stop))
        return self.data[rows]


def test_a_data_set_of_h5py_is_read_by_slices(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("any", data=MATRIX.astype(np.float64), chunks=(10, 2), compression="gzip")
        monkeypatch.setattr(h5py.Dataset, "__array__", lambda *_, **__: pytest.fail("read as a whole"))
        check(open_source(data, tmp_path), MATRIX)
        # Rows of one chunk come together, however far apart in bytes.
        monkeypatch.setattr("memhier.ann.files._reader._GAP_BYTES", 1)
        reads = []
        source = open_source(Recorded(data, reads), tmp_path)
        reads.clear()  # those of the checks
        source.take(np.array([0, 9, 80]))
        assert reads == [(0, 10), (80, 81)]


def test_a_list_of_blocks_is_a_stream_and_a_list_of_rows_a_matrix(tmp_path):
    for given in ([MATRIX[:40], MATRIX[40:41], MATRIX[41:]], (MATRIX[:40].tolist(), MATRIX[40:].tolist())):
        check(open_source(given, tmp_path), MATRIX)
    check(open_source(MATRIX.tolist(), tmp_path), MATRIX)
    check(open_source(list(MATRIX), tmp_path), MATRIX)
    with pytest.raises(ValueError, match="block 1 of vectors"):
        open_source([np.ones((2, 3)), np.ones((2, 4))], tmp_path)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (Slices(np.ones(3), 3), ValueError, r"shape \(3,\): expected two dimensions"),
        (Slices(np.ones((3, 0)), 3), ValueError, "d of at least 1"),
        (Slices(np.full((3, 3), 2**24 + 1, np.int32), 3), ValueError, "row 0 holds integers"),
        (Slices(np.array([[1, 2], [np.nan, 1]]), 3), ValueError, "row 1 holds NaN"),
        (b"x.fvecs", TypeError, "vectors yields int as item 0"),
        (3, TypeError, "vectors=int: expected an array"),
        (None, TypeError, "vectors=NoneType"),
    ],
)
def test_vectors_that_cannot_be_indexed(tmp_path, given, error, words):
    with pytest.raises(error, match=words):
        open_source(given, tmp_path)


def test_files_that_cannot_be_indexed(tmp_path):
    write_vectors(tmp_path / "x.ivecs", [[[1, 2**24 + 1]]])
    with pytest.raises(ValueError, match="row 0 holds integers"):
        open_source(tmp_path / "x.ivecs", tmp_path)
    write_vectors(tmp_path / "x.fbin", [[[1, 2], [np.inf, 1]]])
    with pytest.raises(ValueError, match="row 1 holds NaN or infinity"):
        open_source(tmp_path / "x.fbin", tmp_path)
    (tmp_path / "y.fbin").write_bytes((tmp_path / "x.fbin").read_bytes()[:-1])
    with pytest.raises(FormatError, match="cut short"):
        open_source(tmp_path / "y.fbin", tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_a_file_that_is_refused_is_closed_again(tmp_path):
    for name, block in {"nan.fbin": [[np.nan]], "int.ibin": [[2**24 + 1]]}.items():
        path = tmp_path / name
        write_vectors(path, [block])
        with pytest.raises((ValueError, TypeError)) as caught:
            open_source(path, tmp_path)
        opened = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
        assert str(path) not in opened
        del caught


def test_an_array_needs_no_closing():
    with VectorSource(MATRIX) as source:
        check(source, MATRIX)
    check(source, MATRIX)
