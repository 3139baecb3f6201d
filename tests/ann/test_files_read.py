"""Files of vectors, against bytes put together by hand: every format, any shape, any order of rows, any damage."""

import errno
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier.ann.files import open_vectors, write_vectors
from memhier.errors import ClosedError, FormatError
from memhier.files import Fault, FaultyFiles, RealFiles

VECS = {".fvecs": "<f4", ".bvecs": "u1", ".ivecs": "<i4"}
BIN = {".fbin": "<f4", ".f16bin": "<f2", ".u8bin": "u1", ".i8bin": "i1", ".ibin": "<i4"}
ARROW = ("list", "large_list", "fixed_list")
FORMATS = [*VECS, *BIN, ".npy", ".NPY", "column.npy", "big.npy", ".hdf5", ".h5", "gzip.h5"]
FORMATS += [f"{kind}.parquet" for kind in ARROW]


def make(folder, kind, matrix):
    """Write `matrix` by other means than memhier's, and return the path."""
    path = str(folder / ("x" + kind))
    if kind in VECS:
        rows = matrix.astype(VECS[kind])
        with open(path, "wb") as file:
            for row in rows:
                file.write(struct.pack("<i", len(row)) + row.tobytes())
    elif kind in BIN:
        with open(path, "wb") as file:
            file.write(struct.pack("<II", *matrix.shape) + matrix.astype(BIN[kind]).tobytes())
    elif kind.lower().endswith(".npy"):
        array = matrix.astype(">f8" if kind == "big.npy" else "f4", order="F" if kind == "column.npy" else "C")
        with open(path, "wb") as file:
            np.save(file, array)
    elif kind.endswith((".hdf5", ".h5")):
        h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
        packed = {"chunks": (min(7, len(matrix)), 1), "compression": "gzip"} if kind == "gzip.h5" else {}
        with h5py.File(path, "w") as file:
            file.create_dataset("train", data=matrix.astype("f4"), **packed)
            file["test"], file["ids"] = matrix[:1].astype("f8"), np.arange(3)
    else:
        make_parquet(path, kind.split(".")[0], matrix)
    return path


def make_parquet(path, kind, matrix, **options):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra parquet")
    from pyarrow import parquet

    types = {
        "list": arrow.list_(arrow.float32()),
        "large_list": arrow.large_list(arrow.float64()),
        "fixed_list": arrow.list_(arrow.float32(), matrix.shape[1]),
    }
    column = arrow.array(matrix.tolist(), types[kind])
    table = arrow.table({"id": np.arange(len(matrix)), "the.vector": column})
    parquet.write_table(table, path, **{"row_group_size": 10} | options)


def joined(vectors):
    blocks = list(vectors.blocks())
    assert [start for start, _ in blocks] == [0, *np.cumsum([len(block) for _, block in blocks])[:-1]]
    for _, block in blocks:
        assert block.flags.c_contiguous
        assert block.flags.writeable
        assert block.dtype == vectors.dtype
        assert block.dtype.isnative
        assert block.shape[1] * len(block) * 4 <= 8 << 20 or len(block) == 1
    return np.vstack([block for _, block in blocks])


@pytest.mark.parametrize("kind", FORMATS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_blocks_and_rows_are_those_of_the_file(kind, data, tmp_path, monkeypatch):
    count = data.draw(st.sampled_from([1, 2, 3, 10, 11, 97]))
    dimension = data.draw(st.sampled_from([1, 2, 3, 16, 97]))
    block_bytes = data.draw(st.sampled_from([1, 400, 8 << 20]))
    gap_bytes = data.draw(st.sampled_from([1, 100, 64 << 10]))
    rows = sorted(data.draw(st.lists(st.integers(0, count - 1), max_size=30)))
    monkeypatch.setattr("memhier.ann.files._reader._BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("memhier.ann.files._reader._GAP_BYTES", gap_bytes)
    matrix = np.random.default_rng(data.draw(st.integers(0, 100))).integers(0, 127, (count, dimension))
    with open_vectors(make(tmp_path, kind, matrix)) as vectors:
        assert (vectors.count, vectors.dimension) == matrix.shape
        np.testing.assert_array_equal(joined(vectors), matrix)
        np.testing.assert_array_equal(joined(vectors), matrix)  # any number of times
        taken = vectors.take(rows)
        assert taken.dtype == vectors.dtype
        assert taken.shape == (len(rows), dimension)
        np.testing.assert_array_equal(taken, matrix[rows])


def test_dtypes_are_those_of_the_format(tmp_path):
    expected = {**VECS, **BIN, ".npy": "f4", "big.npy": "f8", ".h5": "f4", "list.parquet": "f4"}
    expected["large_list.parquet"] = "f8"
    for kind, dtype in expected.items():
        with open_vectors(make(tmp_path, kind, np.ones((3, 2)))) as vectors:
            assert vectors.dtype == np.dtype(dtype).newbyteorder("=")


def test_a_block_is_at_most_eight_mebibytes_as_float32(tmp_path):
    write_vectors(tmp_path / "x.u8bin", np.ones((70_000, 97), np.uint8))
    with open_vectors(tmp_path / "x.u8bin") as vectors:
        lengths = [len(block) for _, block in vectors.blocks()]
    assert sum(lengths) == 70_000
    assert max(lengths) == (8 << 20) // (4 * 97)


class CountedReads(RealFiles):
    """Counts the bytes that reads ask for."""

    def open(self, path, mode):
        file = super().open(path, mode)
        self.lengths = lengths = []
        inner = file.read_into

        def read_into(buffer, offset):
            lengths.append(memoryview(buffer).nbytes)
            return inner(buffer, offset)

        file.read_into = read_into
        return file


def test_taking_rows_reads_near_ones_together_and_skips_what_lies_far_between(tmp_path):
    write_vectors(tmp_path / "x.fbin", np.zeros((100_000, 64), np.float32))
    files = CountedReads()
    with open_vectors(tmp_path / "x.fbin", files=files) as vectors:
        files.lengths.clear()
        vectors.take([0, 3, 50_000, 50_001, 99_999])
        assert files.lengths == [4 * 256, 2 * 256, 256]
        files.lengths.clear()
        vectors.take(np.arange(0, 100_000, 2))
        assert max(files.lengths) <= 8 << 20
        assert len(files.lengths) == 4


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([3, 2], ValueError, r"rows\[1\]=2 comes after 3"),
        ([-1], ValueError, r"rows\[0\]=-1: .* rows 0 to 4"),
        ([0, 5], ValueError, r"rows\[1\]=5"),
        (np.array([2**63 + 1], np.uint64), ValueError, "rows 0 to 4"),
        ([0.5], TypeError, "float64"),
        ([[1]], TypeError, r"\(1, 1\)"),
        (2, TypeError, r"shape \(\)"),
    ],
)
def test_rows_are_checked(tmp_path, rows, error, words):
    with open_vectors(make(tmp_path, ".fvecs", np.ones((5, 2)))) as vectors, pytest.raises(error, match=words):
        vectors.take(rows)


@pytest.mark.parametrize("kind", [".fvecs", ".npy", "column.npy", ".h5", "list.parquet", "fixed_list.parquet"])
def test_a_closed_file_says_so(tmp_path, kind):
    vectors = open_vectors(make(tmp_path, kind, np.ones((5, 2))))
    begun = vectors.blocks()
    vectors.close()
    vectors.close()
    for call in (lambda: vectors.take([0]), lambda: next(vectors.blocks()), lambda: next(begun)):
        with pytest.raises(ClosedError, match="open it again"):
            call()


FVECS = struct.pack("<i2f", 2, 1, 2) * 3
DAMAGE = [
    (".fvecs", b"", "0 bytes, expected at least 4"),
    (".fvecs", FVECS[:3], "3 bytes, expected at least 4"),
    (".fvecs", FVECS[:-1], r"35 bytes are 2 vectors of dimension 2 \(12 bytes each\) and 11 bytes more"),
    (".fvecs", FVECS[:8], "8 bytes are 0 vectors"),
    (".fvecs", struct.pack("<i", 0) * 3, "dimension 0, expected at least 1"),
    (".fvecs", struct.pack("<i", -7) * 3, "dimension -7, expected at least 1"),
    (".fvecs", FVECS[:24] + struct.pack("<i2f", 3, 1, 2), "vector 2 at byte 24 says dimension 3, expected 2"),
    (".bvecs", struct.pack("<i", 2**31 - 1) + b"12", "cut short, or the dimension changes"),
    (".fbin", b"1234567", "7 bytes, expected at least 8"),
    (".fbin", struct.pack("<II", 3, 0), "dimension 0, expected at least 1"),
    (".fbin", struct.pack("<II", 3, 2) + bytes(23), "31 bytes, expected 32 .* 3 vectors of dimension 2 of float32: .*"),
    (".fbin", struct.pack("<II", 3, 2) + bytes(25), "33 bytes, expected 32 .* more follows"),
    (".u8bin", struct.pack("<II", 2**32 - 1, 2**32 - 1), "8 bytes, expected 18,446,744,065,119,617,033"),
    (".npy", b"", "no header of a .npy file"),
    (".npy", b"\x93NUMPY\x03\x00", "no header of a .npy file"),
    (".npy", b"PK\x03\x04 a zip file", "no header of a .npy file"),
    (".hdf5", b"", "hdf5"),
    (".hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100), "hdf5"),
    (".parquet", b"", "parquet"),
    (".parquet", b"PAR1" + bytes(20) + b"PAR1", "parquet"),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "raw", "words"), DAMAGE)
def test_damage_is_found_when_a_file_is_opened(tmp_path, suffix, raw, words):
    if suffix == ".hdf5":
        pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs the extra parquet")
    path = tmp_path / ("x" + suffix)
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=words) as caught:
        open_vectors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not kind.startswith(("gzip", "big"))])
def test_a_file_cut_anywhere_is_refused(tmp_path, kind):
    path = make(tmp_path, kind, np.arange(15).reshape(5, 3))
    with open(path, "rb") as file:
        raw = file.read()
    row_bytes = 4 + 3 * np.dtype(VECS[kind]).itemsize if kind in VECS else len(raw)
    lengths = np.unique(np.linspace(0, len(raw) - 1, 150, dtype=int))
    for length in lengths:
        if length and length % row_bytes == 0:
            continue  # a cut between two vectors cannot be told: the format has no count
        with open(path, "wb") as file:
            file.write(raw[:length])
        with pytest.raises(FormatError, match="x"), open_vectors(path) as vectors:
            joined(vectors)


def test_a_dimension_that_changes_within_is_found_where_it_is_read(tmp_path):
    path = tmp_path / "x.fvecs"
    # Two vectors of dimension 1 have just the size of one of dimension 3.
    path.write_bytes(FVECS.replace(FVECS[:12], struct.pack("<i3f", 3, 1, 2, 3)) * 2 + struct.pack("<ifif", 1, 0, 1, 0)
                     + struct.pack("<i3f", 3, 1, 2, 3))  # fmt: skip
    with open_vectors(path) as vectors:
        assert vectors.count == 8
        assert vectors.take([0, 4, 5]).shape == (3, 3)
        with pytest.raises(FormatError, match=r"x.fvecs: vector 6 at byte 96 says dimension 1, expected 3"):
            list(vectors.blocks())
        with pytest.raises(FormatError, match="vector 6 at byte 96"):
            vectors.take([1, 6])


@pytest.mark.parametrize("kind", [".fvecs", ".fbin", ".npy", "column.npy"])
def test_a_file_that_shrinks_while_open_is_an_error_and_no_crash(tmp_path, kind):
    path = make(tmp_path, kind, np.ones((20, 3)))
    with open_vectors(path) as vectors:
        with open(path, "r+b") as file:
            file.truncate(200)
        with pytest.raises(FormatError, match="ends at byte 200, expected"):
            list(vectors.blocks())


@pytest.mark.parametrize("kind", [".fvecs", ".fbin", ".npy"])
def test_a_fault_of_the_disk_keeps_its_number_and_path(tmp_path, kind):
    path = make(tmp_path, kind, np.ones((20, 3)))
    counted = FaultyFiles(RealFiles())
    with open_vectors(path, files=counted) as vectors:
        list(vectors.blocks())
    assert len(counted.calls) >= 3
    for number in range(1, len(counted.calls) + 1):
        with (
            pytest.raises(OSError, match="Input/output error") as caught,
            open_vectors(path, files=FaultyFiles(RealFiles(), number, Fault.EIO)) as vectors,
        ):
            list(vectors.blocks())
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)


@pytest.mark.parametrize(
    "array", [np.ones(3), np.ones((2, 2, 2)), np.ones((3, 0)), np.ones((2, 2), complex), np.array([["a"]])]
)
def test_npy_of_something_else_is_refused(tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(FormatError, match=r"x.npy: holds"):
        open_vectors(tmp_path / "x.npy")


def test_npy_of_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[{"a": 1}]], object), allow_pickle=True)
    with pytest.raises(FormatError, match=r"x\.npy: holds object"):
        open_vectors(tmp_path / "x.npy")


def test_no_vectors_but_a_dimension(tmp_path):
    for kind in (".fbin", ".npy", ".h5", "fixed_list.parquet"):
        with open_vectors(make(tmp_path, kind, np.ones((0, 3)))) as vectors:
            assert (vectors.count, vectors.dimension) == (0, 3)
            assert list(vectors.blocks()) == []
            assert vectors.take([]).shape == (0, 3)
            with pytest.raises(ValueError, match=r"rows\[0\]=0"):
                vectors.take([0])


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("x.txt", {}, ValueError, "'.txt' is not one of .fvecs, .*parquet"),
        ("x", {}, ValueError, "the suffix '' is not one of"),
        ("x.fvecs.gz", {}, ValueError, "unpacked"),
        ("x.fvecs", {"key": "test"}, ValueError, "key='test': .* no HDF5"),
        ("x.h5", {"column": "v"}, ValueError, "column='v': .* no Parquet"),
        ("x.fvecs", {}, FileNotFoundError, "x.fvecs"),
        ("x.h5", {}, FileNotFoundError, "x.h5"),
        ("x.parquet", {}, FileNotFoundError, "x.parquet"),
    ],
)
def test_arguments_are_checked(tmp_path, name, options, error, words):
    with pytest.raises(error, match=words):
        open_vectors(tmp_path / name, **options)


def test_a_path_is_text(tmp_path):
    for path in (b"x.fvecs", 3, None):
        with pytest.raises(TypeError, match="path="):
            open_vectors(path)


@pytest.mark.parametrize("suffix", [".fvecs", ".npy", ".h5", ".parquet"])
def test_a_directory_is_an_error_of_the_system(tmp_path, suffix):
    if suffix in (".h5", ".parquet"):
        pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
        pytest.importorskip("pyarrow", reason="Parquet needs the extra parquet")
    path = tmp_path / f"folder{suffix}"
    path.mkdir()
    with pytest.raises(OSError, match="folder") as caught:
        open_vectors(path)
    assert caught.value.errno == errno.EISDIR


@pytest.mark.parametrize(("name", "package", "extra"), [("x.h5", "h5py", "hdf5"), ("x.parquet", "pyarrow", "parquet")])
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, name, package, extra):
    (tmp_path / name).write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}: pip install 'memhier\[{extra}\]'"):
        open_vectors(tmp_path / name)


def test_importing_the_package_imports_no_extra():
    code = "import memhier.ann.files, sys; sys.exit(bool({'h5py', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_threads_read_one_file_at_once(tmp_path):
    matrix = np.random.default_rng(0).normal(size=(3000, 16)).astype(np.float32)
    for kind in (".fvecs", "gzip.h5", "list.parquet"):
        wrong = []
        with open_vectors(make(tmp_path, kind, matrix)) as vectors:

            def work(vectors=vectors, wrong=wrong):
                rows = np.arange(0, 3000, 7)
                if not (vectors.take(rows) == matrix[rows]).all() or not (joined(vectors) == matrix).all():
                    wrong.append(1)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []
