"""Filters that compare attributes with each other, beside a plain reference of one row."""

import datetime
import math
import operator
import tracemalloc
from itertools import product

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.filters.attributes import Attributes, merge_schema, write_attributes
from memhier.ann.zoom.filters.bitmaps import pack
from memhier.ann.zoom.filters.where import evaluate, parse
from memhier.errors import CorruptionError
from memhier.io.reader import Reader
from memhier.store.store import Store

COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
EDGES = [s * (2**e + d) for s in (1, -1) for e in (0, 53, 62, 63) for d in (-1, 0, 1)]
DAY = datetime.datetime(2024, 1, 31)
VALUES = {
    "int64": [value for value in EDGES if -(2**63) <= value < 2**63],
    "float64": [*map(float, EDGES), 0.5, -0.0, 1.5, 2.0**53 + 2, 5e-324, math.inf, -math.inf],
    "bool": [True, False],
    "str": ["", "a", "ab", "e\x00", "\uffff", "\U0001f600", "日本", "word " * 40],
    "datetime": [DAY + datetime.timedelta(microseconds=step) for step in (-1, 0, 1)],
}
KINDS = [*VALUES]
NUMBERS = ("int64", "float64")
COMPARABLE = [(one, other) for one, other in product(KINDS, KINDS) if one == other or {one, other} == {*NUMBERS}]


def table(count, seed, nulls=0.2):
    """Return two columns and a list column of every type, as plain lists with None where null."""
    random = np.random.default_rng(seed)

    def some(values):
        picked = [values[at] for at in random.integers(0, len(values), count)]
        return [None if null else value for value, null in zip(picked, random.random(count) < nulls, strict=True)]

    columns = {f"{kind}_{number}": some(values) for kind, values in VALUES.items() for number in (0, 1)}
    for kind, values in VALUES.items():
        lists = [[], *([values[at] for at in random.integers(0, len(values), size)] for size in (1, 2, 3, 5) * 5)]
        columns[f"{kind}_list"] = some(lists)
    return columns


def filters():
    """Return texts of filters, each with the same test of a row: True, False or None."""

    def compared(name, sign, other):
        return lambda row: None if row[name] is None or row[other] is None else COMPARE[sign](row[name], row[other])

    def contained(name, other):
        return lambda row: None if row[name] is None or row[other] is None else row[other] in row[name]

    made = {}
    for one, other in COMPARABLE:
        for sign in COMPARE if one != "bool" else ("==", "!="):
            names = f"{one}_0", f"{other}_1"
            made[f"{names[0]} {sign} {names[1]}"] = compared(names[0], sign, names[1])
        made[f"{one}_list contains {other}_0"] = contained(f"{one}_list", f"{other}_0")
    made["str_0 <= str_0"] = compared("str_0", "<=", "str_0")
    return made


def negated(test):
    return lambda row: None if (found := test(row)) is None else not found


def rows_of(columns, count):
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


@pytest.fixture
def reader():
    with Reader() as opened:
        yield opened


@pytest.fixture
def keep(tmp_path, reader):
    """Return a function that writes one part for each table and opens them with a schema of all."""
    stores = []

    def write(*tables, **options):
        schema = {}
        with Store.create(tmp_path / f"store{len(stores)}", kind="test") as store, store.begin() as tx:
            for number, (columns, count) in enumerate(tables):
                schema = merge_schema(schema, columns, count)
                write_attributes(tx, f"p{number}-", schema, columns, np.arange(count))
            tx.commit()
        stores.append(Store.open(tmp_path / f"store{len(stores)}", kind="test"))
        counts = [count for _, count in tables]
        return [
            Attributes(stores[-1], f"p{number}-", schema, count, reader, **options)
            for number, count in enumerate(counts)
        ]

    yield write
    for store in stores:
        store.close()


@pytest.mark.long
@pytest.mark.parametrize("work_bytes", [1 << 18, 4 << 20])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 4097])
def test_every_pair_of_types_is_that_of_each_row(count, work_bytes, keep):
    """In a part that has every attribute, and in one that lacks some, which are null there."""
    whole = table(count, count)
    less = {name: values for name, values in table(count, 7).items() if not name.endswith("_1")}
    parts = keep((table(97, 3, nulls=0), 97), (whole, count), (less, count), work_bytes=work_bytes)[1:]
    nothing = {name: [None] * count for name in whole}
    for part, columns in zip(parts, (whole, nothing | less), strict=True):
        rows = rows_of(columns, count)
        arrays = {name: np.fromiter(values, object, count) for name, values in columns.items()}
        for text, test in filters().items():
            for where, wanted in ((text, test), (f"not ({text})", negated(test))):
                expected = np.array([wanted(row) is True for row in rows])
                np.testing.assert_array_equal(part.bitmap(where), pack(expected), err_msg=where)
                np.testing.assert_array_equal(evaluate(parse(where), arrays), expected, err_msg=where)


def test_lists_that_are_empty_and_parts_without_rows(keep):
    tables = [({"tags": tags, "brand": ["a"] * len(tags)}, len(tags)) for tags in ([["a"], ["b"]], [], [[], None])]
    parts = keep(*tables)
    assert [part.bitmap("tags contains brand").tolist() for part in parts] == [[1], [], [0]]
    assert [part.bitmap("not tags contains brand").tolist() for part in parts] == [[2], [], [1]]
    columns = {"tags": np.fromiter([[], None], object, 2), "brand": np.array(["a", "a"])}
    assert evaluate(parse("not tags contains brand"), columns).tolist() == [True, False]


@pytest.mark.long
def test_texts_compare_within_the_work_bytes(keep):
    """Of columns whose words take more than that, all different, and some longer than the room of a comparison."""
    count, work = 20_000, 1 << 18
    random = np.random.default_rng(0)
    left = [f"{number:09}" * 5 for number in random.permutation(count)]
    right = [f"{number:09}" * 5 for number in random.permutation(count)]
    left[17] = right[17] = "long" * 20_000
    right[18] = left[17] + "er"
    left[18] = left[17]
    tags = [[left[row], right[(row + 1) % count]] for row in range(count)]
    (part,) = keep(({"left": left, "right": right, "tags": tags}, count), work_bytes=work)
    expected = {
        "left < right": [one < other for one, other in zip(left, right, strict=True)],
        "left == right": [one == other for one, other in zip(left, right, strict=True)],
        "tags contains right": [other in held for held, other in zip(tags, right, strict=True)],
    }
    for where, wanted in expected.items():
        tracemalloc.start()
        words = part.bitmap(where)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(words, pack(np.array(wanted)))
        assert peak < work + 6 * len(right[18]), where  # two words that are longer are compared on their own


def test_a_rank_beyond_the_words_is_damage(keep, monkeypatch):
    (part,) = keep(({"one": ["a", "b"], "other": ["b", "c"]}, 2))
    monkeypatch.setattr("memhier.ann.zoom.filters.vocabulary.Vocabulary.__len__", lambda _: 1)
    with pytest.raises(CorruptionError, match="a rank beyond the 1 words"):
        part.bitmap("one < other")


@pytest.fixture
def living(tmp_path, small_sizes):
    """An index of several parts with removed rows, rows that wait and an attribute that came late; its rows by id."""
    count = 240
    columns = table(count, 5)
    late = {name: [None] * 80 + values[80:] if name == "float64_1" else values for name, values in columns.items()}
    vectors = np.random.default_rng(1).normal(size=(count, 6)).astype(np.float32)

    def cut(low, high):
        return {name: values[low:high] for name, values in late.items() if low or name != "float64_1"}

    with ZoomIndex.build(tmp_path / "index", vectors[:80], attributes=cut(0, 80), dram="4MiB") as index:
        for low in (80, 160):
            index.add(vectors[low : low + 80], ids=np.arange(low, low + 80), attributes=cut(low, low + 80))
            if low == 80:
                index.commit()
        index.remove(np.arange(3, count, 11))
        rows = {row: values for row, values in enumerate(rows_of(late, count)) if row % 11 != 3}
        yield index, vectors, rows


@pytest.mark.long
def test_searches_of_a_living_index_find_the_rows_that_hold(living):
    index, vectors, rows = living
    for text, test in filters().items():
        for where, wanted in ((text, test), (f"not ({text})", negated(test))):
            left = {row for row, values in rows.items() if wanted(values) is True}
            found = index.search(vectors[:2], 240, recall=1.0, where=where).ids
            assert all(set(ids.tolist()) - {-1} == left for ids in found), where
    where, test = next(iter(filters().items()))
    left = {row for row, values in rows.items() if test(values) is True}
    assert set(index.range_search(vectors[0], 1e9, recall=1.0, where=where).ids.tolist()) == left
    assert {record.id for record in index.explain(vectors[0], 5, where=where).records} <= left


@pytest.mark.long
def test_removal_takes_the_rows_that_hold(living):
    index, vectors, rows = living
    where = "int64_0 >= float64_1 or str_list contains str_0"
    tests = [filters()[each] for each in where.split(" or ")]
    left = {row for row, values in rows.items() if not any(test(values) for test in tests)}
    index.remove(where=where)
    for _ in range(2):
        found = index.search(vectors[0], 240, recall=1.0).ids
        assert set(found.tolist()) - {-1} == left
        index.commit()


WRONG = {
    "int64_0 < str_0": "'int64_0' is int64; it cannot be compared with attribute 'str_0', which is str",
    "not datetime_0 == int64_0": "'datetime_0' is datetime; it cannot be compared with attribute 'int64_0'",
    "bool_0 <= bool_1": "'bool_0' is bool, which has no order; expected == or !=",
    "str_list contains int64_0": r"'str_list' is list\[str\]; it cannot be compared with attribute 'int64_0'",
    "str_list == str_0": r"'str_list' is list\[str\]; expected contains",
    "str_0 == str_list": r"'str_list' is list\[str\]; expected single values on the right",
    "str_0 contains str_1": "'str_0' is str; expected a comparison; lists have contains",
    "str_0 == str_2": "no attribute 'str_2': did you mean 'str_",
    "str_0 == en": "text stands in quotes: str_0 == 'en'",
}


@pytest.mark.long
def test_pairs_that_cannot_be_compared_are_refused(living):
    index, vectors, _ = living
    for where, message in WRONG.items():
        for call in (lambda: index.search(vectors[0], 1, where=where), lambda: index.remove(where=where)):  # noqa: B023
            with pytest.raises((TypeError, ValueError), match=message):
                call()
