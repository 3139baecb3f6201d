"""Features of HDF5 and Parquet alone: keys, columns, nulls, lists of unequal length, damage within."""

import importlib

import numpy as np
import pytest

from memhier.ann.files import open_vectors
from memhier.errors import FormatError


@pytest.fixture
def hdf5(tmp_path):
    h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file["train"] = np.arange(20, dtype=np.float32).reshape(10, 2)
        file["test"] = np.ones((3, 2))
        file["neighbors"] = np.arange(6, dtype=np.int32).reshape(3, 2)
        file["group/inner"] = np.ones((4, 5), np.uint8)
        file["flat"] = np.ones(4)
        file["words"] = np.array([[b"a", b"b"]])
    return path


def test_keys_choose_a_data_set(hdf5):
    shapes = {None: (10, 2), "train": (10, 2), "test": (3, 2), "neighbors": (3, 2), "group/inner": (4, 5)}
    for key, shape in shapes.items():
        with open_vectors(hdf5, key=key) as vectors:
            assert (vectors.count, vectors.dimension) == shape
    with open_vectors(hdf5, key="neighbors") as vectors:
        assert vectors.dtype == np.int32


@pytest.mark.parametrize("key", ["none", "group", "group/none", ""])
def test_a_key_that_is_not_there_is_told_those_that_are(hdf5, key):
    words = rf"key={key!r}: .*expected one of flat, group/inner, neighbors, test, train"
    with pytest.raises(ValueError, match=words):
        open_vectors(hdf5, key=key)


@pytest.mark.parametrize("key", ["flat", "words"])
def test_a_data_set_of_something_else_is_refused(hdf5, key):
    with pytest.raises(FormatError, match=rf"x.hdf5\['{key}'\]: holds .* expected real numbers of shape"):
        open_vectors(hdf5, key=key)


def test_damage_within_hdf5_is_a_format_error(tmp_path):
    h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("train", data=np.random.default_rng(0).random((500, 8)), chunks=(100, 8),
                                   compression="gzip", fletcher32=True)  # fmt: skip
        where = data.id.get_chunk_info(2).byte_offset
    with path.open("r+b") as file:
        file.seek(where + 50)
        file.write(b"damage")
    with open_vectors(path) as vectors:
        assert vectors.take([0, 199]).shape == (2, 8)
        assert vectors.take([300, 499]).shape == (2, 8)
        with pytest.raises(FormatError, match=r"x.h5\['train'\]"):
            list(vectors.blocks())


def table(path, columns, **options):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra parquet")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns(arrow)), path, **{"row_group_size": 2} | options)
    return path


def test_the_only_column_of_vectors_is_found_and_others_can_be_named(tmp_path):
    path = table(tmp_path / "x.parquet", lambda arrow: {
        "id": [1, 2, 3], "words": [["a"], ["b"], ["c"]], "v": arrow.array([[1, 2]] * 3, arrow.list_(arrow.float32()))
    })  # fmt: skip
    with open_vectors(path) as vectors:
        np.testing.assert_array_equal(vectors.take([0, 2]), [[1, 2], [1, 2]])
    with pytest.raises(ValueError, match=r"column='w': .* no such column, expected one of id, words, v"):
        open_vectors(path, column="w")
    for column in ("id", "words"):
        with pytest.raises(FormatError, match=rf"x.parquet\['{column}'\]: .* expected lists of numbers"):
            open_vectors(path, column=column)
    path = table(tmp_path / "two.parquet", lambda arrow: {"a": [[1.0]], "b": [[2.0, 3.0]], "a.b": [[4.0]]})
    with pytest.raises(ValueError, match=r"several columns of vectors, expected one of a, b, a\.b"):
        open_vectors(path)
    for column, row in {"a": [1], "b": [2, 3], "a.b": [4]}.items():
        with open_vectors(path, column=column) as vectors:
            np.testing.assert_array_equal(vectors.take([0]), [row])
    with pytest.raises(FormatError, match="columns id, expected one of lists"):
        open_vectors(table(tmp_path / "none.parquet", lambda arrow: {"id": [1]}))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1.0, 2.0], [3.0, 4.0], [5.0], [6.0, 7.0]], "row 2 has dimension 1: expected 2"),
        ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0, 9.0]], "row 3 has dimension 3: expected 2"),
        # Right in sum, so that the values alone would fit.
        ([[1.0, 2.0], [3.0, 4.0], [5.0], [7.0, 8.0, 9.0]], "row 2 has dimension 1: expected 2"),
        ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], None], "row 3 is null: expected a vector of dimension 2"),
        ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, None]], "row 3 holds a null"),
    ],
)
def test_uneven_vectors_and_nulls_are_named(tmp_path, rows, words):
    path = table(tmp_path / "x.parquet", lambda arrow: {"v": rows})
    with open_vectors(path) as vectors:
        np.testing.assert_array_equal(vectors.take([0, 1]), rows[:2])
        for call in (lambda: list(vectors.blocks()), lambda: vectors.take([2, 3])):
            with pytest.raises(FormatError, match=rf"x.parquet\['v'\] {words}"):
                call()


@pytest.mark.parametrize(
    ("rows", "words"), [([None, [1.0]], "row 0 is null"), ([[], []], "dimension 0"), ([], "no rows")]
)
def test_a_column_without_a_first_vector_is_refused(tmp_path, rows, words):
    path = table(tmp_path / "x.parquet",
                 lambda arrow: {"v": arrow.array(rows, arrow.list_(arrow.float32()))})  # fmt: skip
    with pytest.raises(FormatError, match=words):
        open_vectors(path)


def test_nulls_in_a_fixed_list(tmp_path):
    for rows, words in (([[1, 2], None], "row 1 is null"), ([[1, 2], [None, 3]], "row 1 holds a null")):
        path = table(tmp_path / "x.parquet",
                     lambda arrow, rows=rows: {"v": arrow.array(rows, arrow.list_(arrow.float32(), 2))})  # fmt: skip
        with open_vectors(path) as vectors, pytest.raises(FormatError, match=words):
            list(vectors.blocks())


def test_damage_within_parquet_is_a_format_error(tmp_path):
    rows = np.random.default_rng(0).random((400, 8)).tolist()
    path = table(tmp_path / "x.parquet", lambda arrow: {"v": rows}, row_group_size=100, write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 400] = bytes(400)
    path.write_bytes(raw)
    with open_vectors(path) as vectors, pytest.raises(FormatError, match=r"x.parquet\['v'\]"):
        list(vectors.blocks())


def test_a_row_group_is_skipped_where_no_row_of_it_is_taken(tmp_path, monkeypatch):
    path = table(tmp_path / "x.parquet", lambda arrow: {"v": np.arange(20.0).reshape(10, 2).tolist()})
    with open_vectors(path) as vectors:
        read = []
        kind = importlib.import_module("pyarrow.parquet").ParquetFile
        inner = kind.iter_batches

        def spy(*each, row_groups, **more):
            read.extend(row_groups)
            return inner(*each, row_groups=row_groups, **more)

        monkeypatch.setattr(kind, "iter_batches", spy)
        np.testing.assert_array_equal(vectors.take([1, 8, 8]), [[2, 3], [16, 17], [16, 17]])
        assert read == [0, 4]
