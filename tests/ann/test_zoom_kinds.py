"""Kinds of vectors and attributes: what is stored, and what is refused with a word on what to do instead."""

import datetime as dt
import operator

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.filters.attributes import Attributes
from memhier.ann.zoom.filters.times import moment_of_text
from memhier.ann.zoom.source import open_source
from memhier.ann.zoom.storage.catalog import KIND
from memhier.fields import stored_array
from memhier.io.reader import Reader
from memhier.store.store import Store

EXACT = ["int16", "uint16", "int32", "uint32", "int64", "uint64"]


def make(count, seed=0, dimension=6):
    return np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)


@pytest.mark.parametrize("dtype", EXACT)
def test_integers_are_stored_as_float32_where_that_holds_them(tmp_path, dtype):
    whole = np.random.default_rng(0).integers(0, 30_000, (40, 6)).astype(dtype)
    with ZoomIndex.build(tmp_path / "index", whole, dram="4MiB") as index:
        assert index.stats()["dtype"] == "float32"
        index.add(whole + np.array(1, dtype))
        np.testing.assert_array_equal(index.reconstruct(np.arange(80)), np.concatenate([whole, whole + 1]))
        assert index.search(whole[3], 1, recall=1.0).ids.tolist() == [3]
        index.update([0], whole[1:2])
        np.testing.assert_array_equal(index.reconstruct([0]), whole[1:2])


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("value", [2**24 + 1, 2**31 - 1])
def test_integers_that_float32_rounds_are_refused(tmp_path, dtype, value):
    whole = np.ones((5, 6), dtype)
    whole[3, 2] = value
    with pytest.raises(ValueError, match=r"row 3 .*astype\('float32'\)"):
        ZoomIndex.build(tmp_path / "index", whole)
    with pytest.raises(ValueError, match="row 3 "):
        open_source(iter([whole[:2], whole[2:]]), tmp_path)
    with ZoomIndex.build(tmp_path / "index", np.ones((5, 6), dtype), dram="4MiB") as index:
        for change in (lambda: index.add(whole), lambda: index.update(np.arange(5), whole)):
            with pytest.raises(ValueError, match=r"row 3 .*astype\('float32'\)"):
                change()
        whole[3, 2] = 2**26  # which float32 holds
        index.add(whole)


@pytest.mark.parametrize(("dtype", "advice"), [("bool", "uint8"), ("complex64", "float32"), ("longdouble", "float32")])
def test_other_kinds_are_refused_with_advice(tmp_path, dtype, advice):
    with pytest.raises(TypeError, match=f"convert it to {advice}"):
        ZoomIndex.build(tmp_path / "index", np.ones((5, 6), dtype))
    with (
        ZoomIndex.build(tmp_path / "index", make(5), dram="4MiB") as index,
        pytest.raises(TypeError, match="convert it"),
    ):
        index.add(np.ones((5, 6), dtype))


def test_tensors_of_bfloat16_and_with_gradients(tmp_path):
    torch = pytest.importorskip("torch")
    exact = make(40)
    half = torch.tensor(exact).bfloat16()
    rounded = half.float().numpy()
    with ZoomIndex.build(tmp_path / "index", half, dram="4MiB") as index:
        assert index.stats()["dtype"] == "float32"
        index.add(half[:3])
        index.add(torch.tensor(exact[:2], requires_grad=True))
        expected = np.concatenate([rounded, rounded[:3], exact[:2]])
        np.testing.assert_array_equal(index.reconstruct(np.arange(45)), expected)
        assert index.search(half[5], 1, recall=1.0).ids.tolist() == [5]
        assert index.search(half[5:7], 1, recall=1.0).ids.tolist() == [[5], [6]]
    blocks = open_source(iter([half[:10], half[10:]]), tmp_path)
    np.testing.assert_array_equal(blocks.take(np.arange(40)), rounded)


def test_arrays_of_bfloat16(tmp_path):
    kinds = pytest.importorskip("ml_dtypes")
    half = make(40).astype(kinds.bfloat16)
    with ZoomIndex.build(tmp_path / "index", half, dram="4MiB") as index:
        index.add(half[:3])
        expected = half.astype(np.float32)
        np.testing.assert_array_equal(index.reconstruct(np.arange(43)), np.concatenate([expected, expected[:3]]))
        assert index.search(half[5], 1, recall=1.0).ids.tolist() == [5]
    with pytest.raises(TypeError, match="convert it to float32"):
        ZoomIndex.build(tmp_path / "other", make(4).astype(kinds.float8_e4m3fn))


ZONE = dt.timezone(dt.timedelta(hours=2))
DAYS = [dt.datetime(2024, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999), None, dt.datetime(9999, 12, 31)]
FORMS = {
    "datetimes": lambda days: days,
    "zoned": lambda days: [None if each is None else each.replace(tzinfo=dt.UTC) for each in days],
    "shifted": lambda days: [None if d is None else (d + dt.timedelta(hours=2)).replace(tzinfo=ZONE) for d in days],
    "numpy": lambda days: np.array(days, "M8[us]"),
    "scalars": lambda days: list(np.array(days, "M8[us]")),
    "milliseconds": lambda days: np.array(days, "M8[ms]"),
    "pandas": lambda days: pytest.importorskip("pandas").Series(np.array(days, "M8[us]")),
    "pyarrow": lambda days: pytest.importorskip("pyarrow").array(days, pytest.importorskip("pyarrow").timestamp("us")),
}
TESTS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">=": operator.ge, ">": operator.gt}


def found(index, where):
    ids = index.search(np.zeros(index.dimension), len(index), recall=1.0, where=where).ids
    return sorted(ids[ids >= 0].tolist())


@pytest.mark.parametrize("form", FORMS)
def test_moments_are_filtered_by_whatever_they_came_as(tmp_path, form):
    days = DAYS if form not in ("milliseconds",) else [DAYS[0], dt.datetime(1969, 12, 31), None, DAYS[3]]
    count = len(days)
    with ZoomIndex.build(
        tmp_path / "index", make(count), attributes={"day": FORMS[form](days)}, dram="4MiB", grow_to=100
    ) as index:
        index.add(make(count, 1), attributes={"day": FORMS[form](days)})
        both = days + days
        for round_number in range(3):
            for sign, test in TESTS.items():
                for text, moment in (
                    ("2024-01-01", dt.datetime(2024, 1, 1)),
                    ("1969-12-31 23:59:59.999999", days[1]),
                    ("2024-01-01T02:00:00+02:00", dt.datetime(2024, 1, 1)),
                ):
                    if moment == days[1]:
                        text = moment.isoformat()
                    expected = [at for at, day in enumerate(both) if day is not None and test(day, moment)]
                    assert found(index, f"day {sign} '{text}'") == expected
            assert found(index, "day is null") == [2, 6]
            assert found(index, "day in ('2024-01-01', '2000-01-01')") == [0, 4]
            assert found(index, "not day between '2024-01-01' and '9999-12-31'") == [1, 5]
            index.update([0, 5], make(2, 2))  # keeps the days
            index.compact() if round_number else index.commit()


def test_dates_without_a_time_and_what_a_part_gives_back(tmp_path):
    days = [dt.date(2024, 2, 29), None, dt.date(1, 1, 1)]
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"day": days}, dram="4MiB") as index:
        assert found(index, "day == '2024-02-29T00:00'") == [0]
        assert found(index, "day < '1000-01-01'") == [2]
    with Store.open(tmp_path / "index", kind=KIND) as store, Reader() as reader:
        values = Attributes(store, "p0-a-", {"day": "datetime"}, 3, reader).take(np.arange(3), ["day"])["day"]
        assert values.dtype == "M8[us]"
        order = np.argsort(stored_array(store, "p0-ids", "<u4", (3,)))
        np.testing.assert_array_equal(values[order], np.array(days, "M8[us]"))


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (np.array(["2024-01-01T00:00:00.000000001"] * 2, "M8[ns]"), ValueError, "day.*row 0.*microseconds"),
        (np.array(["292277-01-01", "2024-01-01"], "M8[Y]") + np.timedelta64(10**6, "Y"), ValueError, "day.*row 0"),
        ([dt.datetime(2024, 1, 1), 3], TypeError, "datetime in row 0 and int64 in row 1"),
        (["2024-01-01", dt.datetime(2024, 1, 1)], TypeError, "str in row 0 and datetime in row 1"),
        (np.array([1, 2], "m8[s]"), TypeError, "convert it to int64"),
        ([dt.time(12), None], TypeError, "day.*time in row 0"),
        (np.array(["NaT", "NaT"], "M8[us]"), ValueError, "null in every row"),
    ],
)
def test_moments_that_are_none_or_finer_are_refused(tmp_path, values, error, words):
    with pytest.raises(error, match=words):
        ZoomIndex.build(tmp_path / "index", make(2), attributes={"day": values}, dram="4MiB")


def test_a_filter_of_moments_says_what_it_wants(tmp_path):
    day = [dt.datetime(2024, 1, 1), None]
    with ZoomIndex.build(tmp_path / "index", make(2), attributes={"day": day}, dram="4MiB") as index:
        for where, error in (
            ("day > 3", TypeError),
            ("day", TypeError),
            ("day > 'soon'", ValueError),
            ("day > '2024-13-01'", ValueError),
            ("day > '2024-01-01T00:00:00.0000001'", ValueError),
        ):
            with pytest.raises(error, match=r"day.*2024-01-31"):
                index.search(make(1)[0], 1, where=where)
        with pytest.raises(TypeError, match=r"day.*datetime"):
            index.add(make(1), attributes={"day": [20240101]})


def test_text_of_moments():
    assert moment_of_text("1970-01-01T00:00:00.000001000") == 1
    assert moment_of_text("2024-01-01T00:00:00Z") == moment_of_text("2023-12-31T19:00:00-05:00")
    assert moment_of_text("0001-01-01T00:00:00+05:00") == moment_of_text("0001-01-01") - 5 * 3_600_000_000


@pytest.mark.parametrize("name", ["null", "and", "NOT", "True", "between", "in", "is", "or", "false"])
def test_a_column_whose_name_is_a_word_of_filters_is_told_to_be_renamed(tmp_path, name):
    for attributes in ({name: [1, 2]}, [{name: 1}, {name: 2}]):
        with pytest.raises(ValueError, match=f"attribute '{name}'.*rename the column, to '{name}_'"):
            ZoomIndex.build(tmp_path / "index", make(2), attributes=attributes, dram="4MiB")
    assert not (tmp_path / "index").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; make that first") as caught:
        ZoomIndex.build(tmp_path / "missing" / "index", make(2), dram="4MiB")
    assert caught.value.filename == str(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
