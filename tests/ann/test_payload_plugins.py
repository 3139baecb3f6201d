"""Attributes and documents in the tables of pandas and polars, with the real libraries (``make test-plugins``)."""

import os
from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there they must not be missing
    pytest.importorskip("pandas", reason="make test-plugins tries it")
    pytest.importorskip("polars", reason="make test-plugins tries it")
import pandas
import polars
import pyarrow

from memhier.ann import ZoomIndex

VECTORS = np.eye(4, dtype=np.float32)
DAY = datetime(2024, 1, 31, 12)
EAST = timezone(timedelta(hours=2))
MOMENTS = [DAY, None, DAY + timedelta(microseconds=1), datetime(1969, 12, 31)]
INTS = [1, None, 2**53 + 1, -(2**63)]
TEXTS = ["red", None, "", "日本"]
LISTS = [["red", "new"], None, [], ["日本"]]
ARROW = {"list": pyarrow.list_(pyarrow.string()), "zoned": pyarrow.timestamp("us", "Europe/Berlin")}

PANDAS = {
    "int8": (lambda: pandas.Series([1, 2, 3, -4], dtype="int8"), "int64", [1, 2, 3, -4]),
    "uint64": (lambda: pandas.Series([1, 2, 3, 4], dtype="uint64"), "int64", [1, 2, 3, 4]),
    "Int64": (lambda: pandas.Series(INTS, dtype="Int64"), "int64", INTS),
    "UInt8": (lambda: pandas.Series([1, None, 3, 255], dtype="UInt8"), "int64", [1, None, 3, 255]),
    "int64 of arrow": (lambda: pandas.Series(INTS, dtype="int64[pyarrow]"), "int64", INTS),
    "float32": (lambda: pandas.Series([0.5, np.nan, 1, 2], dtype="float32"), "float64", [0.5, None, 1.0, 2.0]),
    "Float64": (lambda: pandas.Series([0.5, None, 1, 2], dtype="Float64"), "float64", [0.5, None, 1.0, 2.0]),
    "bool": (lambda: pandas.Series([True, False, True, False]), "bool", [True, False, True, False]),
    "boolean": (lambda: pandas.Series([True, None, False, True], dtype="boolean"), "bool", [True, None, False, True]),
    "str": (lambda: pandas.Series(TEXTS, dtype="str"), "str", TEXTS),
    "string": (lambda: pandas.Series(TEXTS, dtype="string"), "str", TEXTS),
    "object": (lambda: pandas.Series(TEXTS, dtype=object), "str", TEXTS),
    "string of arrow": (lambda: pandas.Series(TEXTS, dtype="string[pyarrow]"), "str", TEXTS),
    "category": (lambda: pandas.Series(TEXTS, dtype="category"), "str", TEXTS),
    "category of ints": (lambda: pandas.Series([3, 1, 3, 2], dtype="category"), "int64", [3, 1, 3, 2]),
    "datetime": (lambda: pandas.Series(MOMENTS, dtype="datetime64[us]"), "datetime", MOMENTS),
    "datetime of ns": (lambda: pandas.Series(MOMENTS, dtype="datetime64[ns]"), "datetime", MOMENTS),
    "zoned": (lambda: pandas.Series(MOMENTS, dtype="datetime64[us]").dt.tz_localize(EAST), "datetime", 2),
    "zoned of arrow": (
        lambda: pandas.Series(MOMENTS, dtype=pandas.ArrowDtype(ARROW["zoned"])), "datetime", 1,
    ),
    "objects of dates": (lambda: pandas.Series([date(2024, 1, 31)] * 4), "datetime", [datetime(2024, 1, 31)] * 4),
    "lists": (lambda: pandas.Series(LISTS), "list[str]", LISTS),
    "lists of arrow": (lambda: pandas.Series(LISTS, dtype=pandas.ArrowDtype(ARROW["list"])), "list[str]", LISTS),
    "arrays": (
        lambda: pandas.Series([np.array([1, 2]), None, np.array([], int), np.array([3])]),
        "list[int64]", [[1, 2], None, [], [3]],
    ),
    "lists of moments": (
        lambda: pandas.Series([[pandas.Timestamp(DAY)], [], None, [DAY]]), "list[datetime]", [[DAY], [], None, [DAY]],
    ),
}  # fmt: skip
POLARS = {
    "Int8": (lambda: polars.Series([1, None, 3, -4], dtype=polars.Int8), "int64", [1, None, 3, -4]),
    "Int64": (lambda: polars.Series(INTS, dtype=polars.Int64), "int64", INTS),
    "UInt64": (lambda: polars.Series([1, 2, 3, 4], dtype=polars.UInt64), "int64", [1, 2, 3, 4]),
    "Float32": (lambda: polars.Series([0.5, None, 1, 2], dtype=polars.Float32), "float64", [0.5, None, 1.0, 2.0]),
    "Boolean": (lambda: polars.Series([True, None, False, True]), "bool", [True, None, False, True]),
    "String": (lambda: polars.Series(TEXTS), "str", TEXTS),
    "Categorical": (lambda: polars.Series(TEXTS, dtype=polars.Categorical), "str", TEXTS),
    "Enum": (lambda: polars.Series(TEXTS, dtype=polars.Enum(["red", "", "日本"])), "str", TEXTS),
    "Date": (lambda: polars.Series([date(2024, 1, 31), None] * 2), "datetime", [datetime(2024, 1, 31), None] * 2),
    "Datetime": (lambda: polars.Series(MOMENTS, dtype=polars.Datetime("us")), "datetime", MOMENTS),
    "Datetime of ms": (
        lambda: polars.Series([DAY, None, DAY, DAY], dtype=polars.Datetime("ms")), "datetime", [DAY, None, DAY, DAY],
    ),
    "zoned": (
        lambda: polars.Series([DAY.replace(tzinfo=UTC), None] * 2).dt.convert_time_zone("Europe/Berlin"),
        "datetime", [DAY, None] * 2,
    ),
    "List": (lambda: polars.Series(LISTS), "list[str]", LISTS),
    "List of ints": (
        lambda: polars.Series([[1, 2], None, [], [3]], dtype=polars.List(polars.Int16)),
        "list[int64]", [[1, 2], None, [], [3]],
    ),
    "Array": (
        lambda: polars.Series([[0.5, 1]] * 4, dtype=polars.Array(polars.Float32, 2)), "list[float64]", [[0.5, 1.0]] * 4,
    ),
    "List of categories": (
        lambda: polars.Series(LISTS, dtype=polars.List(polars.Categorical)), "list[str]", LISTS,
    ),
    "List of moments": (
        lambda: polars.Series([[DAY], [], None, [DAY]], dtype=polars.List(polars.Datetime("ns"))),
        "list[datetime]", [[DAY], [], None, [DAY]],
    ),
}  # fmt: skip
CASES = [
    *((f"pandas {name}", pandas.DataFrame, *case) for name, case in PANDAS.items()),
    *((f"polars {name}", polars.DataFrame, *case) for name, case in POLARS.items()),
]


def values(index, count=4):
    """Return the field ``x`` of all rows in their order, as `rows` has it."""
    rows = index.search(VECTORS[0], 2 * count, fields=["x"]).rows()
    return [row["x"] for row in sorted(rows, key=lambda row: row["id"])]


@pytest.mark.parametrize(("frame", "make", "kind", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_every_type_of_column_comes_back(tmp_path, frame, make, kind, expected):
    column = make()
    if isinstance(expected, int):  # hours of a zone
        expected = [None if moment is None else moment - timedelta(hours=expected) for moment in MOMENTS]
    path = tmp_path / "index"
    with ZoomIndex.build(path, VECTORS, attributes=frame({"x": column}), dram="2MiB", grow_to=8) as index:
        assert index.fields == {"x": kind}
        assert repr(values(index)) == repr(expected)
        index.add(VECTORS, attributes={"x": column})
        assert repr(values(index)) == repr([*expected, *expected])
        index.commit()
        result = index.search(VECTORS[0], 8, fields=["x"])
        by_id = dict(zip(result.ids.tolist(), range(8), strict=True))
        for table in (result.to_pandas(), pandas.DataFrame(result.to_polars().to_dict(as_series=False))):
            again = [table["x"][by_id[name]] for name in range(8)]
            for value, wanted in zip(again, [*expected, *expected], strict=True):
                if wanted is None:
                    assert value is None or pandas.isna(value)
                elif isinstance(wanted, list):
                    assert [getattr(item, "item", lambda item=item: item)() for item in value] == wanted
                else:
                    assert value == wanted
    rows = result.to_pandas().sort_values("id")[["x"]]
    with ZoomIndex.build(tmp_path / "again", np.eye(8, dtype="f4"), attributes=rows, dram="2MiB") as index:
        assert index.fields == {"x": kind}  # the table of a result can be stored


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame])
def test_moments_finer_than_a_microsecond_are_refused(tmp_path, frame):
    fine = np.array(["2024-01-31T00:00:00.000000001"] * 4, "M8[ns]")
    null = np.where(np.arange(4) == 1, np.datetime64("NaT"), fine)
    columns = [fine, null, pyarrow.array(list(np.split(fine, 4)))]
    for column in map(polars.Series if frame is polars.DataFrame else pandas.Series, columns):
        with pytest.raises(ValueError, match="kept as microseconds"):
            ZoomIndex.build(tmp_path / "index", VECTORS, attributes=frame({"x": column}), dram="2MiB")


def test_documents_are_the_same_from_a_frame_and_from_its_records(tmp_path):
    frame = pandas.DataFrame({
        "number": [0.5, np.nan, 1.5, np.nan], "text": ["a", None, "", np.nan], "int": pandas.array(INTS, "Int64"),
        "any": [{"a": [1]}, None, [1, {"b": None}], pandas.NA], "kind": pandas.Categorical(["x", None, "y", "x"]),
    })  # fmt: skip
    expected = {
        "number": [0.5, None, 1.5, None], "text": ["a", None, "", None], "int": INTS,
        "any": [{"a": [1]}, None, [1, {"b": None}], None], "kind": ["x", None, "y", "x"],
    }  # fmt: skip
    forms = {
        "frame": frame,
        "records": frame.to_dict("records"),
        "lists": frame.to_dict("list"),
        "stream": iter(frame.to_dict("records")),
        "polars": polars.DataFrame({name: expected[name] for name in ("number", "text", "int", "kind")}),
    }
    for name, documents in forms.items():
        with ZoomIndex.build(tmp_path / name, VECTORS, documents=documents, dram="2MiB", grow_to=8) as index:
            found = {field: column.tolist() for field, column in index.fetch([0, 1, 2, 3]).items()}
            assert repr(found) == repr({field: expected[field] for field in found}), name
            if name != "stream":
                ids = index.add(VECTORS, documents=documents)
                assert {field: column.tolist() for field, column in index.fetch(ids).items()} == found
            tables = index.search(VECTORS[0], 4, fields=True)
            assert len(tables.to_pandas()) == len(tables.to_polars()) == 4
