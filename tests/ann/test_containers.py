"""Vectors in the containers of other libraries: every call takes them, and a build reads them by slices."""

import importlib
import shutil

import numpy as np
import pytest
import torch

from memhier.ann import ZoomIndex
from memhier.ann.files import as_array, as_rows, open_vectors, write_vectors
from memhier.ann.zoom.source import open_source

MATRIX = np.random.default_rng(0).normal(size=(97, 5)).astype(np.float32)
ROUNDED = torch.from_numpy(MATRIX).bfloat16().float().numpy()  # as bfloat16 holds it
ROWS = np.array([0, 1, 1, 50, 96])

pyarrow = pytest.importorskip("pyarrow", reason="Arrow needs the extra parquet")


class Dlpack:
    """An array of another library, which NumPy reads through DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnDevice:
    """Like an array of CuPy: it comes to the CPU by `get` alone, and is to come in slices."""

    __cuda_array_interface__: dict[str, object] = {}  # noqa: RUF012
    rows_max = 97

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, rows):
        return OnDevice(self.array[rows])

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def get(self):
        assert len(self.array) <= self.rows_max
        return self.array


def fixed(matrix, kind=None):
    matrix = np.ascontiguousarray(matrix)
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(matrix.reshape(-1), kind), matrix.shape[1])


def lists(matrix):
    return pyarrow.array(matrix.tolist(), pyarrow.list_(pyarrow.float32()))


def sliced(matrix):
    return fixed(np.vstack([MATRIX[:3], matrix, MATRIX[:2]])).slice(3, len(matrix))


def tensors(matrix):
    shape = pyarrow.fixed_shape_tensor(pyarrow.float32(), [matrix.shape[1]])
    return pyarrow.ExtensionArray.from_storage(shape, fixed(matrix))


CONTAINERS = {
    "fixed lists": fixed,
    "lists": lists,
    "large lists": lambda matrix: pyarrow.array(matrix.tolist(), pyarrow.large_list(pyarrow.float32())),
    "a slice of fixed lists": sliced,
    "a slice of lists": lambda matrix: lists(np.vstack([MATRIX[:3], matrix, MATRIX[:2]])).slice(3, len(matrix)),
    "chunks": lambda matrix: pyarrow.chunked_array([sliced(matrix[:1]), fixed(matrix[1:1]), fixed(matrix[1:])]),
    "chunks of lists": lambda matrix: pyarrow.chunked_array([lists(matrix[:1]), lists(matrix[1:])]),
    "tensors of arrow": tensors,
    "float64 tensor": lambda matrix: torch.from_numpy(matrix).double(),
    "tensor with gradients": lambda matrix: torch.nn.Parameter(torch.from_numpy(matrix.copy())),
    "column-major tensor": lambda matrix: torch.from_numpy(np.asfortranarray(matrix)),
    "list of tensors": lambda matrix: list(torch.from_numpy(matrix)),
    "list of arrays": list,
    "tuple of lists": lambda matrix: tuple(matrix.tolist()),
    "mixed list": lambda matrix: [matrix[0].tolist(), *matrix[1:]],
    "array of objects": lambda matrix: np.fromiter(matrix, object, len(matrix)),
    "dlpack": Dlpack,
    "on another device": OnDevice,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_read_as_the_matrix_that_it_holds(tmp_path, monkeypatch, name):
    monkeypatch.setattr("memhier.ann.files._reader._BLOCK_BYTES", 400)
    monkeypatch.setattr(OnDevice, "rows_max", 20)
    source = open_source(CONTAINERS[name](MATRIX), tmp_path)
    assert (source.count, source.dimension, source.dtype) == (97, 5, np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(np.vstack([block for _, block in source.blocks()]), MATRIX)
    np.testing.assert_array_equal(source.take(ROWS), MATRIX[ROWS])
    monkeypatch.setattr(OnDevice, "rows_max", 97)
    np.testing.assert_array_equal(as_array(CONTAINERS[name](MATRIX)), MATRIX)


@pytest.mark.parametrize("short", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"])
def test_every_float_of_torch(tmp_path, short):
    tensor = torch.from_numpy(MATRIX).to(getattr(torch, short))
    source = open_source(tensor, tmp_path)
    assert source.dtype == (np.float16 if short == "float16" else np.float32)
    np.testing.assert_array_equal(source.take(ROWS), tensor.float().numpy()[ROWS])


def test_a_tensor_that_numpy_lacks_is_converted_by_slices(tmp_path, monkeypatch):
    monkeypatch.setattr("memhier.ann.files._reader._BLOCK_BYTES", 400)
    whole = torch.Tensor.float

    def spy(tensor):
        assert len(tensor) <= 20
        return whole(tensor)

    monkeypatch.setattr(torch.Tensor, "float", spy)
    source = open_source(torch.from_numpy(MATRIX).bfloat16(), tmp_path)
    np.testing.assert_array_equal(np.vstack([block for _, block in source.blocks()]), ROUNDED)


def test_arrow_is_not_copied_as_a_whole():
    column = pyarrow.chunked_array([fixed(MATRIX[:50]), fixed(MATRIX[50:])])
    rows = as_rows(column)
    assert (rows.shape, rows.dtype) == ((97, 5), np.float32)
    before = pyarrow.total_allocated_bytes()
    for start in range(0, 97, 10):
        rows[start : start + 10]
    assert pyarrow.total_allocated_bytes() - before < MATRIX.nbytes
    assert np.shares_memory(as_array(column.chunk(0)), column.chunk(0).values.to_numpy())


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    place = tmp_path_factory.mktemp("containers") / "x"
    with ZoomIndex.build(place, CONTAINERS["chunks"](MATRIX), dram="3MiB") as index:
        yield index


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_call_takes_every_container(shared, name):
    make = CONTAINERS[name]
    wanted = shared.search(MATRIX[:4], k=3)
    found = shared.search(make(MATRIX[:4]), k=3)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.distances, wanted.distances)
    near = shared.range_search(make(MATRIX[:4]), 1.0)
    np.testing.assert_array_equal(near.ids, shared.range_search(MATRIX[:4], 1.0).ids)
    ids = shared.add(make(MATRIX[:2] + 9))
    np.testing.assert_array_equal(shared.reconstruct(ids), MATRIX[:2] + 9)
    shared.update(ids, make(MATRIX[:2] - 9))
    np.testing.assert_array_equal(shared.reconstruct(ids), MATRIX[:2] - 9)
    shared.remove(ids)
    shared.tune(make(MATRIX[:64]))


@pytest.mark.parametrize("one", [
    lambda row: torch.from_numpy(row).bfloat16(), lambda row: list(torch.from_numpy(row)), lambda row: row.tolist(),
    lambda row: fixed(row[None])[0], lambda row: lists(row[None])[0], pyarrow.array, Dlpack, OnDevice,
    lambda row: tensors(row[None])[0],
])  # fmt: skip
def test_a_single_query(shared, one):
    for found in (shared.search(one(MATRIX[7]), k=1), next(shared.search_iter(one(MATRIX[7]), batch=1))):
        assert found.ids.tolist() == [7]
    assert shared.explain(one(MATRIX[7])).vectors == 97


@pytest.mark.parametrize(
    "make", [torch.tensor, pyarrow.array, lambda ids: Dlpack(np.array(ids)), lambda ids: OnDevice(np.array(ids)), range]
)
def test_ids_of_other_libraries(tmp_path, make):
    ids = range(5, 102) if make is range else list(range(5, 102))
    given = ids if make is range else make(ids)
    with ZoomIndex.build(tmp_path / "x", MATRIX, ids=given, dram="3MiB") as index:
        assert index.search(MATRIX[0], k=1).ids.tolist() == [5]
        np.testing.assert_array_equal(index.reconstruct(given), MATRIX)
        index.remove(given)
        assert len(index) == 0


def test_integers_keep_their_type_or_are_refused(tmp_path):
    small = np.arange(20, dtype=np.uint8).reshape(10, 2)
    for given in (fixed(small), list(small), list(torch.from_numpy(small)), torch.from_numpy(small)):
        source = open_source(given, tmp_path)
        assert source.dtype == np.uint8
        np.testing.assert_array_equal(source.take(np.arange(10)), small)
    large = np.array([[1, 2**24 + 1]])
    for given in (fixed(large), list(large), large.tolist(), torch.from_numpy(large)):
        with pytest.raises(ValueError, match="row 0 holds integers that float32 does not hold exactly"):
            open_source(given, tmp_path)


def test_an_iterator_of_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr("memhier.ann.zoom.source._BLOCK_BYTES", 400)
    for stream in (iter(MATRIX), (row.tolist() for row in MATRIX), (torch.from_numpy(row) for row in MATRIX),
                   iter([*MATRIX[:3], MATRIX[3:50], *MATRIX[50:]])):  # fmt: skip
        with open_source(stream, tmp_path) as source:
            np.testing.assert_array_equal(source.take(np.arange(97)), MATRIX)


VECTORS = pyarrow.list_(pyarrow.float32())
WRONG = {
    "null": (lambda: pyarrow.array([[1, 2], None], VECTORS), ValueError, "row 1 is null"),
    "first null": (lambda: pyarrow.array([None, [1, 2]], VECTORS), ValueError, "row 0 is null"),
    "null inside": (lambda: pyarrow.array([[1, 2], [3, None]], VECTORS), ValueError, "row 1 holds a null"),
    "ragged arrow": (
        lambda: pyarrow.array([[1, 2], [3]], VECTORS), ValueError, "row 1 has dimension 1: expected 2"),
    "ragged chunks": (
        lambda: pyarrow.chunked_array([[[1, 2]], [[1, 2], [3]]], VECTORS), ValueError, "row 2 has dimension 1"),
    "words": (lambda: pyarrow.array([["a"]]), TypeError, "expected lists of numbers"),
    "no width": (lambda: pyarrow.array([], VECTORS), ValueError, "their length is the dimension"),
    "width 0": (lambda: pyarrow.array([[], []], VECTORS), ValueError, "d of at least 1"),
    "ragged list": (lambda: [[1.0, 2.0], [3.0]], ValueError, "row 1 has dimension 1: expected dimension 2"),
    "ragged arrays": (lambda: [MATRIX[0], MATRIX[0, :3]], ValueError, "row 1 has dimension 3: expected dimension 5"),
    "ragged tensors": (lambda: [torch.ones(2), torch.ones(3)], ValueError, "row 1 has dimension 3"),
    "no vector": (lambda: [MATRIX[0], None], ValueError, "row 1 is null"),
    "none within": (lambda: [[1.0, None]], TypeError, r"row 0 is \[1.0, None\]: expected numbers"),
    "nan for a vector": (lambda: [[1.0], float("nan")], ValueError, "row 1 is null"),
    "masked": (lambda: np.ma.MaskedArray(MATRIX, MATRIX[3, 2] == MATRIX), ValueError, "row 3 holds a masked value"),
    "masked stream": (
        lambda: iter([MATRIX[:2], np.ma.MaskedArray(MATRIX[:2], [[0] * 5, [1] * 5])]), ValueError, "holds a masked"),
    "dicts": (lambda: iter([{"v": [1.0]}]), TypeError, "yields dict as item 0.* give one column"),
    "table": (lambda: pyarrow.table({"v": [[1.0]], "w": ["a"]}), TypeError, "give one column"),
    "ragged stream": (lambda: iter([[1.0], [1.0], [1.0, 2.0]]), ValueError, "row 2 has dimension 2"),
    "null in a stream": (lambda: iter([[1.0], None]), TypeError, "yields NoneType as item 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_containers_that_hold_no_matrix(tmp_path, name):
    make, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        ZoomIndex.build(tmp_path / "x", make(), dram="3MiB")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", [name for name in WRONG if "stream" not in name and name not in ("dicts", "no width")])
def test_queries_and_additions_that_are_no_matrix(shared, name):
    for call in (lambda given: shared.search(given, k=1), shared.add):
        with pytest.raises((ValueError, TypeError), match=r"(queries|vectors)( row| has|:)"):
            call(WRONG[name][0]())
    assert len(shared) == 97


def test_an_empty_column_of_known_width(tmp_path):
    with ZoomIndex.build(tmp_path / "x", fixed(MATRIX[:0].reshape(0, 5)), grow_to=100, dram="3MiB") as index:
        assert (len(index), index.dimension) == (0, 5)
        index.add(fixed(MATRIX))
        assert index.add(fixed(MATRIX[:0].reshape(0, 5))).tolist() == []
        assert index.search(MATRIX[3], k=1).ids.tolist() == [3]
        assert index.search(fixed(MATRIX[:0].reshape(0, 5)), k=1).ids.shape == (0, 1)


# There a list of lists is one of blocks.
@pytest.mark.parametrize("name", [name for name in CONTAINERS if name not in ("tuple of lists", "mixed list")])
def test_every_container_can_be_written_to_a_file(tmp_path, name):
    write_vectors(tmp_path / "x.fbin", CONTAINERS[name](MATRIX))
    with open_vectors(tmp_path / "x.fbin") as vectors:
        np.testing.assert_array_equal(vectors.take(range(97)), MATRIX)


def test_parquet_behind_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="URLs need the extra remote")
    parquet = importlib.import_module("pyarrow.parquet")
    memory = fsspec.filesystem("memory")
    with memory.open("/bucket/x.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"v": fixed(MATRIX), "w": lists(MATRIX[:, :2])}), file, row_group_size=20)
    (tmp_path / "x.parquet").write_bytes(memory.cat("/bucket/x.parquet"))
    for url in ("memory://bucket/x.parquet", f"file://{tmp_path}/x.parquet", "memory://bucket/x.parquet?version=1"):
        if "?" in url:
            memory.cp("/bucket/x.parquet", "/bucket/x.parquet?version=1")
        with open_vectors(url, column="v") as vectors:
            assert (vectors.count, vectors.dimension) == (97, 5)
            np.testing.assert_array_equal(np.vstack([block for _, block in vectors.blocks()]), MATRIX)
            np.testing.assert_array_equal(vectors.take(ROWS), MATRIX[ROWS])
            with ZoomIndex.build(tmp_path / "index", vectors, dram="3MiB") as index:
                assert index.search(MATRIX[7], k=1).ids.tolist() == [7]
        shutil.rmtree(tmp_path / "index")
    with pytest.raises(FileNotFoundError):
        open_vectors("memory://bucket/none.parquet")
    with pytest.raises(ValueError, match="only Parquet files"):
        open_vectors("memory://bucket/x.fbin")
    with pytest.raises(ValueError, match="no such column"):
        open_vectors("memory://bucket/x.parquet", column="z")


def test_masked_values_in_lists_of_rows_are_refused(tmp_path):
    rows = [np.ma.MaskedArray(row, False) for row in np.eye(4, dtype=np.float32)]
    np.testing.assert_array_equal(as_array(rows), np.eye(4))
    rows[2][1] = np.ma.masked
    rows_of = as_rows(rows)
    assert rows_of is not None
    for read in (
        lambda: as_array(rows),
        lambda: as_array(tuple(rows)),
        lambda: rows_of[1:4],
        lambda: ZoomIndex.build(tmp_path / "index", rows, dram="2MiB"),
        lambda: ZoomIndex.build(tmp_path / "stream", iter(rows), dram="2MiB"),
    ):
        with pytest.raises(ValueError, match=r"row \d holds a masked value"):
            read()
