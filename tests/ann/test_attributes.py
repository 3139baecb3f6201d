"""Attributes on SSD: what is written is what is read, whatever it came from; filters, parts, caches, damage."""

import math
import pickle
import re
import threading
import tracemalloc

import numpy as np
import pytest

from memhier.ann.zoom.filters.attributes import (
    WORKSPACE_BYTES,
    Attributes,
    as_columns,
    chain,
    merge_schema,
    write_attributes,
)
from memhier.ann.zoom.filters.bitmaps import BitmapCache, pack, popcount, unpack
from memhier.ann.zoom.filters.where import evaluate, parse
from memhier.errors import BudgetError, CorruptionError
from memhier.io.reader import Reader
from memhier.store.store import Store

COUNTS = [0, 1, 63, 64, 65, 97, 4097, 65_536 + 64 + 1]
FILTERS = [
    "price < 10 and lang == 'en'",
    "not (price < 10 or lang in ('en', 'zz', ''))",
    "views >= 9007199254740993 or views is null",
    "not views == -9223372036854775808",
    "sold and lang > 'e' and lang <= 'fr'",
    "lang not between 'de' and 'en'",
    "price is null or not sold",
    "word >= 'w5' and word != 'w50'",
    "lang like 'e%' or not lang like '%'",
    "not lang like '%e%' and not lang like '_\uffff%'",
    "word like 'w_' or word like '%7%' or word like 'w1%2' or word like 'w12'",
    "lang like '\U0001f600%' or lang like '_'",
    "later == 3",
    "not later is null or lang is null",
    "(views is null or views == 0) and views == 0",
]
SCHEMA = {"price": "float64", "views": "int64", "sold": "bool", "lang": "str", "word": "str", "later": "int64"}


def table(count, seed=0):
    """Return columns as plain lists, None where null, in which everything awkward comes up."""
    random = np.random.default_rng(seed)

    def some(values, nulls):
        picked = [values[i] for i in random.integers(0, len(values), count)]
        return [None if null else value for value, null in zip(picked, random.random(count) < nulls, strict=True)]

    return {
        "price": some([0.5, 9.99, 10.0, -0.0, math.inf, -math.inf, 1e300], 0.2),
        "views": some([0, -1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)], 0.2),
        "sold": some([True, False], 0.2),
        "lang": some(["en", "de", "fr", "", "日本", "\U0001f600", "e\x00", "\uffff"], 0.2),
        "word": [f"w{i}" for i in random.permutation(count)],
    }


def arrays(columns):
    """Return the same for `evaluate`."""
    made = {name: np.fromiter(values, object, len(values)) for name, values in columns.items()}
    return made | {"later": np.full(len(columns["price"]), None, object)}


@pytest.fixture
def reader():
    with Reader() as opened:
        yield opened


@pytest.fixture
def keep(tmp_path, reader):
    """Return a function that writes parts ``(attributes, order)`` and opens them again."""
    stores = []

    def write(*parts, schema=None, cache=None):
        path = tmp_path / f"store{len(stores)}"
        schema = dict(schema or {})
        with Store.create(path, kind="test") as store, store.begin() as tx:
            for number, (attributes, order) in enumerate(parts):
                schema = merge_schema(schema, attributes, len(order))
                write_attributes(tx, f"p{number}-", schema, attributes, order)
            tx.commit()
        store = Store.open(path, kind="test")
        stores.append(store)
        return [
            Attributes(store, f"p{number}-", schema, len(order), reader, cache)
            for number, (_, order) in enumerate(parts)
        ]

    yield write
    for store in stores:
        store.close()


def plain(values):
    """Return an array of `take` as a list with None where null."""
    if isinstance(values, np.ma.MaskedArray):
        return values.tolist()
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values.tolist()]


@pytest.mark.parametrize("count", COUNTS)
def test_filters_and_values_are_those_of_the_columns(count, keep):
    columns = table(count)
    order = np.random.default_rng(1).permutation(count)
    (part,) = keep((columns, order), schema=SCHEMA)
    permuted = {name: [values[i] for i in order] for name, values in columns.items()}
    for text in FILTERS:
        words = part.bitmap(text)
        assert words.dtype == np.uint64
        expected = evaluate(parse(text), arrays(permuted))
        np.testing.assert_array_equal(words, pack(expected), err_msg=text)
        assert words.shape == (-(-count // 64),)
        assert [i for i in range(count) if int(words[i // 64]) >> (i % 64) & 1] == np.flatnonzero(expected).tolist()
    rows = np.random.default_rng(2).integers(0, max(count, 1), min(count, 500))
    taken = part.take(rows)
    assert set(taken) == {*columns, "later"}
    for name, values in permuted.items():
        assert plain(taken[name]) == [values[i] for i in rows], name
    assert plain(taken["later"]) == [None] * len(rows)


def test_take_gives_the_types_it_says(keep):
    (part,) = keep((table(97), np.arange(97)))
    taken = part.take([5, 5, 0])
    kinds = {name: (type(values), values.dtype) for name, values in taken.items()}
    masked = np.ma.MaskedArray
    assert kinds == {
        "price": (np.ndarray, np.float64), "views": (masked, np.int64), "sold": (masked, np.bool_),
        "lang": (np.ndarray, object), "word": (np.ndarray, object),
    }  # fmt: skip
    assert list(part.take([0], ["sold"])) == ["sold"]
    assert part.take([], ["lang"])["lang"].shape == (0,)
    with pytest.raises(IndexError, match=r"rows\[1\]=97: expected 0 to 96"):
        part.take([0, 97])
    with pytest.raises(ValueError, match="did you mean 'lang'"):
        part.take([0], ["langs"])
    with pytest.raises(TypeError, match="float64"):
        part.take([0.5])


def test_long_and_short_words_are_read_in_batches(keep):
    words = ["x" * n for n in (0, 1, 3_000_000, 5, 70_000, 4096)] + [f"w{i:05}" for i in range(10_000)]
    (part,) = keep(({"s": words}, np.arange(len(words))))
    assert part.take(np.arange(len(words)))["s"].tolist() == words
    for found in (2, 4, 9_999):
        # A literal of 3 million characters is longer than a filter may be; its neighbours are not.
        text = "s > '" + words[found][:70_000] + "' and s <= '" + words[found][:70_000] + "x'"
        expected = [words[found][:70_000] < word <= words[found][:70_000] + "x" for word in words]
        assert unpack(part.bitmap(text), len(words)).tolist() == expected


def test_many_literals_are_sought_in_batches(keep):
    words = [f"w{i}" for i in range(1000)]
    (part,) = keep(({"s": words}, np.arange(1000)))
    listed = ", ".join(f"'w{i}'" for i in range(0, 1200, 12))
    # One long literal: the heads of only 17 words fit a batch.
    found = unpack(part.bitmap(f"s in ({listed}, '{'x' * 60_000}')"), 1000)
    assert np.flatnonzero(found).tolist() == list(range(0, 1000, 12))


def test_a_text_longer_than_all_words_together_is_sought(keep):
    (part,) = keep(({"s": ["a", "b", "bc", "c"]}, np.arange(4)))
    for text, expected in (("b" * 5000, [2]), ("bb", [2]), ("c" * 5000, [])):
        found = unpack(part.bitmap(f"s > '{text}' and s != 'c'"), 4)
        assert np.flatnonzero(found).tolist() == expected
        assert np.flatnonzero(unpack(part.bitmap(f"s <= '{text}'"), 4)).tolist() == [
            0,
            1,
            *([2, 3] if not expected else []),
        ]


def test_a_column_without_nulls_keeps_no_bits_and_one_with_nulls_keeps_them(keep):
    full, holed = keep(({"n": np.arange(130)}, np.arange(130)), ({"n": [None, *range(129)]}, np.arange(130)))
    assert popcount(full.bitmap("n is not null")) == 130
    assert np.flatnonzero(unpack(holed.bitmap("n is null"), 130)).tolist() == [0]
    assert full.column("n").read(np.arange(130)).nulls is None
    assert holed.column("n").read(np.arange(130)).nulls.tolist() == [True] + 129 * [False]


@pytest.mark.parametrize(
    ("data", "kind", "expected"),
    [
        (np.arange(6, dtype=np.uint8)[::2], "int64", [0, 2, 4]),
        (np.array([1, 2, 3], ">i4"), "int64", [1, 2, 3]),
        (np.array([0.5, math.nan, 2], np.float16), "float64", [0.5, None, 2.0]),
        (np.array([True, False, True]), "bool", [True, False, True]),
        (np.array(["b", "", "é"]), "str", ["b", "", "é"]),
        (["b", None, "a\x00"], "str", ["b", None, "a\x00"]),
        (["b", math.nan, "a"], "str", ["b", None, "a"]),
        ([1, None, 2**63 - 1], "int64", [1, None, 2**63 - 1]),
        ([1, math.nan, 2], "int64", [1, None, 2]),
        ([1, 2.5, None], "float64", [1.0, 2.5, None]),
        ((np.int8(1), np.uint64(2), 3), "int64", [1, 2, 3]),
        ((np.float32(0.5), 1, np.nan), "float64", [0.5, 1.0, None]),
        ([np.bool_(True), None, False], "bool", [True, None, False]),
        (np.ma.MaskedArray([1, 2, 3], [False, True, False]), "int64", [1, None, 3]),
        (np.ma.MaskedArray([1.0, 2.0, 3.0], [False, True, False]), "float64", [1.0, None, 3.0]),
        (np.ma.MaskedArray(["a", "b", "c"], [False, True, False]), "str", ["a", None, "c"]),
        (np.ma.MaskedArray(["a", "a", "c"], [False, True, False]), "str", ["a", None, "c"]),
        (np.ma.MaskedArray([True, False, True], [False, True, False]), "bool", [True, None, True]),
        (np.ma.MaskedArray(np.array(["a", 7, None], object), [False, True, False]), "str", ["a", None, None]),
    ],
)
def test_columns_of_every_kind_are_taken(data, kind, expected, keep):
    assert merge_schema({}, {"x": data}, 3) == {"x": kind}
    (part,) = keep(({"x": data}, np.arange(3)))
    assert plain(part.take(np.arange(3))["x"]) == expected


def test_tables_and_dicts_per_row(keep):
    rows = [{"a": 1, "b": "x"}, {"b": "y"}, {"a": 3, "c": 0.5}]
    (part,) = keep((rows, np.array([2, 1, 0])))
    assert {name: plain(values) for name, values in part.take([0, 1, 2]).items()} == {
        "a": [3, None, 1], "b": [None, "y", "x"], "c": [0.5, None, None],
    }  # fmt: skip


WHOLE = {"i": [2**53 + 1, None, 3], "s": ["a", None, "é"], "b": [True, None, False], "f": [0.5, None, 1.0]}


def test_pyarrow_tables(keep):
    pyarrow = pytest.importorskip("pyarrow")
    (part,) = keep((pyarrow.table(WHOLE), np.arange(3)))
    assert {name: plain(values) for name, values in part.take([0, 1, 2]).items()} == WHOLE


def test_pandas_frames(keep):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "i": pandas.array(WHOLE["i"], "Int64"),
            "s": pandas.Series(WHOLE["s"]),
            "b": pandas.array(WHOLE["b"], "boolean"),
            "f": WHOLE["f"],
        }
    )
    (part,) = keep((frame, np.arange(3)))
    assert {name: plain(values) for name, values in part.take([0, 1, 2]).items()} == WHOLE


def test_later_parts_must_fit_the_schema_and_may_bring_attributes(keep):
    schema = merge_schema({}, {"i": [1, 2], "f": [0.5, 1.5]}, 2)
    assert merge_schema(schema, {"s": ["a", None]}, 2) == {"i": "int64", "f": "float64", "s": "str"}
    assert schema == {"i": "int64", "f": "float64"}
    # Numbers that the type there is can hold are taken as such; all null fits anything.
    fitting = {"i": [2.0, math.nan], "f": [3, None]}
    assert merge_schema(schema, fitting, 2) == merge_schema(schema, {"i": [None, None]}, 2) == schema
    for wrong, message in [
        ({"i": [0.5, 1]}, "'i' is int64, which cannot hold 0.5 of row 0"),
        ({"i": [1, 2.0**53 + 2]}, "'i' is int64, which cannot hold 9007199254740994.0 of row 1"),
        ({"i": np.array([1, np.inf])}, "'i' is int64, which cannot hold inf of row 1"),
        ({"f": [1, 2**53 + 1]}, "'f' is float64, which cannot hold 9007199254740993 of row 1"),
        ({"f": [1, 2**63 - 1]}, "'f' is float64, which cannot hold 9223372036854775807 of row 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge_schema(schema, wrong, 2)
    for wrong in ({"i": ["a", "b"]}, {"i": [True, False]}, {"f": ["a", None]}):
        with pytest.raises(TypeError, match=r"expected (int64|float64)"):
            merge_schema(schema, wrong, 2)
    first, second = keep(({"i": [1, 2]}, [0, 1]), (fitting | {"s": ["a", "b"]}, [1, 0]), schema=schema | {"s": "str"})
    assert [plain(part.take([0, 1])["i"]) for part in (first, second)] == [[1, 2], [None, 2]]
    assert [plain(part.take([0, 1])["f"]) for part in (first, second)] == [[None, None], [None, 3.0]]
    assert [part.bitmap("s == 'a' or i == 1").tolist() for part in (first, second)] == [[1], [2]]
    assert first.bitmap("s != 'a'").tolist() == [0]
    assert first.bitmap("s is null").tolist() == [3]


def test_attributes_are_checked_before_they_are_written(tmp_path):
    with Store.create(tmp_path / "store", kind="test") as store, store.begin() as tx:
        for attributes, order, error, message in [
            ({"x": [1, 2], "y": [1, 2]}, [0, 1], ValueError, "no attribute 'y'"),
            ({"x": ["a", "b"]}, [0, 1], TypeError, "'x' is int64, but str came"),
            ({"x": [1, 2]}, [0, 2], ValueError, "order holds 0 to 2: expected 0 to 1"),
            ({"x": [1, 2]}, [0.5], TypeError, "float64"),
        ]:
            with pytest.raises(error, match=message):
                write_attributes(tx, "p-", {"x": "int64"}, attributes, order)
        assert tx.memory_bytes == 0


def test_parts_are_written_together_without_holding_a_column(keep, tmp_path, reader):
    one, two = table(97, seed=3), table(4097, seed=4)
    del two["sold"]
    parts = keep((one, np.arange(97)), (two, np.arange(4097)))
    schema = merge_schema({}, one, 97)
    order = np.random.default_rng(5).permutation(97 + 4097)[:4000]
    with Store.create(tmp_path / "merged", kind="test") as store, store.begin() as tx:
        write_attributes(tx, "m-", schema, chain(parts, schema), order)
        tx.commit()
    both = {name: one[name] + two.get(name, [None] * 4097) for name in one}
    permuted = {name: [values[i] for i in order] for name, values in both.items()}
    with Store.open(tmp_path / "merged", kind="test") as store:
        merged = Attributes(store, "m-", schema | {"later": "int64"}, 4000, reader)
        for name, values in merged.take(np.arange(4000), list(one)).items():
            assert plain(values) == permuted[name]
        for text in FILTERS:
            np.testing.assert_array_equal(merged.bitmap(text), pack(evaluate(parse(text), arrays(permuted))))


@pytest.mark.parametrize(("segment", "text"), [("n", "n < 0"), ("s", "s == 'a'"), ("s-words", "s == 'w5'")])
def test_damage_is_detected(segment, text, tmp_path, reader):
    count = 5000
    columns = {"n": [None, *range(count - 1)], "s": [f"w{i}" for i in range(count)]}
    path = tmp_path / "store"
    schema = merge_schema({}, columns, count)
    with Store.create(path, kind="test") as store, store.begin() as tx:
        write_attributes(tx, "p-", schema, columns, np.arange(count))
        tx.commit()
    with Store.open(path, kind="test") as store:
        part = Attributes(store, "p-", schema, count, reader)
        part.bitmap(text)
        file = store.segments()[f"p-{segment}"].path
        contents = bytearray(file.read_bytes())
        # All pages: a bisection does not see them all. The null bits are on the last one.
        for page in range(0 if segment != "n" else len(contents) // 4096 - 1, len(contents) // 4096):
            contents[page * 4096 + 7] ^= 1
        file.write_bytes(contents)
        with pytest.raises(CorruptionError, match="is damaged"):
            part.bitmap(text)
        with pytest.raises(CorruptionError, match="is damaged"):
            part.take([count - 1])


def test_columns_of_another_length_are_refused(keep, tmp_path, reader):
    (part,) = keep(({"n": np.arange(100), "s": ["a"] * 100}, np.arange(100)))
    with Store.open(tmp_path / "store0", kind="test") as store:
        for schema, count in (({"n": "int64"}, 99), ({"n": "int64"}, 101), ({"s": "str"}, 99), ({"s": "int64"}, 100)):
            with pytest.raises(CorruptionError, match="bytes do not hold"):
                Attributes(store, "p0-", schema, count, reader)
    assert len(part) == 100


def test_unknown_attributes_and_other_kinds_are_refused(keep):
    (part,) = keep(({"price": [1, 2], "lang": ["a", "b"]}, [0, 1]))
    with pytest.raises(ValueError, match=r"did you mean 'price'\? expected one of lang, price"):
        part.bitmap("pric < 3")
    with pytest.raises(TypeError, match="'lang' is str, it cannot be compared with int"):
        part.bitmap("lang < 3")
    with pytest.raises(ValueError, match="position 7"):
        part.bitmap("price <")


@pytest.mark.long
def test_a_filter_holds_no_column(keep):
    count = 400_000
    columns = {
        "a": np.arange(count), "b": np.arange(count) / 7, "s": np.arange(count).astype(str),
        "t": np.arange(count) % 2 == 0,
    }  # fmt: skip
    (part,) = keep((columns, np.arange(count)))
    listed = ", ".join(f"'{i}'" for i in range(0, 2000, 2))
    text = f"a < 300000 and not b < 5 and t and (s < '5' or s in ({listed})) and a is not null and not s like '%7_1%'"
    first = part.bitmap(text)
    tracemalloc.start()
    try:
        again = part.bitmap(parse(text))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < WORKSPACE_BYTES
    np.testing.assert_array_equal(first, again)
    expected = [
        i < 300_000 and i / 7 >= 5 and i % 2 == 0 and (str(i) < "5" or i < 2000) and not re.search("7.1", str(i))
        for i in range(count)
    ]
    np.testing.assert_array_equal(unpack(first, count), expected)
    assert part.memory_bytes < 4096


def test_a_pattern_that_too_many_texts_may_be_of_is_refused(keep, tmp_path, reader):
    words = [f"w{i}" for i in range(3000)]
    keep(({"word": words}, np.arange(3000)))
    with Store.open(tmp_path / "store0", kind="test") as store:
        part = Attributes(store, "p0-", {"word": "str"}, 3000, reader, work_bytes=512)
        with pytest.raises(BudgetError, match="3,000 different texts begin with 'w'"):
            part.bitmap("word like 'w%5'")
        found = unpack(part.bitmap("word like 'w12_5' or word like 'w3%'"), 3000)
        np.testing.assert_array_equal(found, [bool(re.fullmatch("w12.5|w3.*", word)) for word in words])
        part.close()


def test_many_threads_filter_one_part(keep):
    columns = table(4097)
    (part,) = keep((columns, np.arange(4097)), schema={"later": "int64"})
    expected = {text: part.bitmap(text) for text in FILTERS}
    wrong = []

    def run():
        wrong.extend(text for text in FILTERS * 3 if not np.array_equal(part.bitmap(text), expected[text]))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_bitmaps_are_kept_by_what_is_asked_and_forgotten_with_the_part(keep, reader):
    cache = BitmapCache("64KiB")
    one, two = keep(({"a": np.arange(97)}, np.arange(97)), ({"a": np.arange(97)[::-1]}, np.arange(97)), cache=cache)
    bitmap = one.bitmap("a < 10")
    calls = reader.stats()["calls"]
    assert one.bitmap("( a<10 )") is bitmap
    assert reader.stats()["calls"] == calls
    assert not bitmap.flags.writeable
    assert not np.array_equal(two.bitmap("a < 10"), bitmap)
    assert one.bitmap("a == 1") is one.bitmap("a == 1.0")  # comparisons round nothing, so both ask for the same rows
    assert (len(cache), cache.memory_bytes > 3 * bitmap.nbytes) == (3, True)
    one.close()
    assert len(cache) == 1
    two.close()
    assert (len(cache), cache.memory_bytes) == (0, 0)


def test_columns_are_converted_once_and_trees_travel(keep):
    columns = as_columns({"a": [1, None], "s": ["x", "y"]}, 2)
    assert as_columns(columns, 2) == columns
    hidden = np.ma.MaskedArray(["x", "secret"], [False, True])
    assert list(as_columns({"s": hidden}, 2)["s"].words()) == [b"x"]
    with pytest.raises(ValueError, match="'a' has 2 values: expected 3"):
        as_columns(columns, 3)
    tree = parse("a < 1 or s in ('x')")
    assert pickle.loads(pickle.dumps(tree)) == tree
    (part,) = keep((columns, [1, 0]))
    assert part.bitmap(tree).tolist() == [2]
