"""Columns of pandas and of Hugging Face's data sets, with the real libraries (``make test-plugins``)."""

import os

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there they must not be missing
    pytest.importorskip("datasets", reason="make test-plugins tries it")
import datasets
import pandas
import pyarrow

from memhier.ann import ZoomIndex
from memhier.ann.files import as_array, as_rows
from memhier.ann.zoom.source import open_source

MATRIX = np.random.default_rng(0).normal(size=(97, 5)).astype(np.float32)


def data(matrix=MATRIX):
    return datasets.Dataset.from_dict(
        {"v": matrix, "id": list(range(len(matrix))), "name": [f"n{row}" for row in range(len(matrix))]},
        features=datasets.Features({
            "v": datasets.List(datasets.Value("float32"), length=matrix.shape[1]),
            "id": datasets.Value("int64"), "name": datasets.Value("string"),
        }),
    )  # fmt: skip


def of_arrow(matrix):
    kind = pyarrow.list_(pyarrow.float32(), matrix.shape[1])
    return pandas.Series(pyarrow.array(matrix.tolist(), kind), dtype=pandas.ArrowDtype(kind))


COLUMNS = {
    "series of arrays": lambda: pandas.Series(list(MATRIX), index=np.arange(97)[::-1]),
    "series of lists": lambda: pandas.Series(MATRIX.tolist()),
    "series of arrow": lambda: of_arrow(MATRIX),
    "slice of a series": lambda: of_arrow(np.vstack([MATRIX[:4], MATRIX]))[4:],
    "frame": lambda: pandas.DataFrame(MATRIX),
    "column": lambda: data()["v"],
    "column with a format": lambda: data().with_format("torch")["v"],
    "column of chosen rows": lambda: data(np.ascontiguousarray(MATRIX[::-1])).select(range(96, -1, -1))["v"],
    "column of two data sets": lambda: datasets.concatenate_datasets([data(MATRIX[:9]), data(MATRIX[9:])])["v"],
    "column made on use": lambda: data().with_transform(lambda batch: {"v": np.array(batch["v"])})["v"],
}
STREAMS = {
    "stream": lambda: data().to_iterable_dataset()["v"],
    "stream with a format": lambda: data().to_iterable_dataset(num_shards=3).with_format("torch")["v"],
}


@pytest.mark.parametrize("name", [*COLUMNS, *STREAMS])
def test_a_column_is_read_as_the_matrix_that_it_holds(tmp_path, monkeypatch, name):
    monkeypatch.setattr("memhier.ann.files._reader._BLOCK_BYTES", 400)
    with open_source((COLUMNS | STREAMS)[name](), tmp_path) as source:
        assert (source.count, source.dimension, source.dtype) == (97, 5, np.float32)
        np.testing.assert_array_equal(np.vstack([block for _, block in source.blocks()]), MATRIX)
        np.testing.assert_array_equal(source.take(np.array([0, 5, 5, 96])), MATRIX[[0, 5, 5, 96]])


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_queries(name):
    np.testing.assert_array_equal(as_array(COLUMNS[name]()), MATRIX)


def test_a_column_of_a_data_set_is_read_by_slices(monkeypatch):
    rows = as_rows(data()["v"])
    assert rows is not None
    read = datasets.Dataset.__getitem__

    def spy(whole, key):
        assert isinstance(key, slice)
        assert key.stop - key.start <= 10
        return read(whole, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", spy)
    np.testing.assert_array_equal(rows[20:30], MATRIX[20:30])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (data, TypeError, "yields dict as item 0: .* give one column"),
        (lambda: data().to_iterable_dataset(), TypeError, "give one column"),
        (lambda: data()["id"], TypeError, "yields int as item 0"),
        (lambda: pandas.DataFrame({"v": list(MATRIX)}), TypeError, "give one column"),
        (lambda: pandas.Series([*MATRIX, None]), ValueError, "vectors row 97 is null"),
        (lambda: pandas.Series([*MATRIX, np.nan]), ValueError, "vectors row 97 is null"),
        (lambda: pandas.Series([MATRIX[0], MATRIX[0][:2]]), ValueError, "vectors row 1 has dimension 2"),
        (lambda: datasets.Dataset.from_dict({"v": [[1.0], None]})["v"], ValueError, "vectors row 1 is null"),
        (lambda: datasets.Dataset.from_dict({"v": [[1.0], [1.0, 2.0]]})["v"], ValueError, "row 1 has dimension 2"),
    ],
)
def test_columns_that_hold_no_vectors(tmp_path, given, error, words):
    with pytest.raises(error, match=words):
        ZoomIndex.build(tmp_path / "x", given(), dram="3MiB")


def test_ids_are_columns_too(tmp_path):
    whole = data()
    for number, (ids, first) in enumerate([(whole["id"], 0), (whole["name"], "n0"), (pandas.Series(whole["id"]), 0)]):
        with ZoomIndex.build(tmp_path / f"{number}", whole["v"], ids=ids, dram="3MiB") as index:
            assert index.search(MATRIX[0], k=1).ids.tolist() == [first]
            np.testing.assert_array_equal(index.reconstruct(ids), MATRIX)
