"""Records of documents beside plain lists: their form, their files, and the values that are refused."""

import datetime
import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier.ann.zoom.payload.given import GivenDocuments
from memhier.ann.zoom.payload.record import decode, encode, pack, unpack
from memhier.ann.zoom.payload.stored import StoredRecords, in_order, records_bytes, write_records
from memhier.errors import CorruptionError
from memhier.io.ranges import CountedReads
from memhier.io.reader import Reader
from memhier.store.store import Store

TEXT = st.text(st.characters(codec=None), max_size=20)  # lone surrogates, too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(TEXT, each, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.integers(0, 999), JSON | TEXT | st.binary(max_size=40), max_size=5))
def test_values_come_back_as_they_went_in(values):
    values = {number: value for number, value in values.items() if value is not None}
    record = pack({number: encode(value, "x") for number, value in values.items()})
    assert (record == b"") == (not values)
    found = {number: decode(document, "x") for number, document in unpack(record, "x").items()}
    assert repr(found) == repr(dict(sorted(values.items())))  # NaN, -0.0 and types as well


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2**200, 2**200),
        (-0.0, -0.0),
        (math.inf, math.inf),
        ((1, (2,)), [1, [2]]),
        (np.int8(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.bool_(True), True),
        ({"a": np.int64(2**60)}, {"a": 2**60}),
        (np.str_("漢"), "漢"),
        (bytearray(b"\0a"), b"\0a"),
        (memoryview(b"ab"), b"ab"),
        ("", ""),
        (b"", b""),
        ([], []),
        ({}, {}),
        ("🙂" * 100_000, "🙂" * 100_000),
    ],
)
def test_values_of_other_types_come_back_as_plain_ones(value, expected):
    found = decode(encode(value, "x"), "x")
    assert repr(found) == repr(expected)
    assert type(found) is type(expected)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (object(), TypeError, "holds a object: expected text, bytes or a JSON value"),
        ({1: "a"}, TypeError, "has the key 1: expected text"),
        ({"a": {1, 2}}, TypeError, "holds a set"),
        ([b"a"], TypeError, "holds a bytes"),
        (1j, TypeError, "holds a complex"),
        (np.zeros(3), TypeError, "as a list"),
        (datetime.date(2020, 1, 1), TypeError, "attributes= takes datetimes"),
        (np.datetime64("2020-01-01"), TypeError, "attributes= takes datetimes"),
        (nested(101), ValueError, "more than 100 levels"),
        ([10**5000], ValueError, "digits"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value, error, words):
    with pytest.raises(error, match=words) as caught:
        encode(value, "documents['a'] of row 7")
    assert "documents['a'] of row 7" in str(caught.value)
    assert decode(encode(nested(100), "x"), "x") == nested(100)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_record_are_damage(record):
    with suppress(CorruptionError):  # and nothing else
        for document in unpack(record, "x").values():
            decode(document, "x")


LENGTHS = {
    "none": [],
    "empty": [0] * 2100,
    "equal": [7] * 1000,
    "late": [0] * 2100 + [1],
    "early": [3] * 100 + [0] * 2100,
    "of a page": [4096] * 5,
    "of a page's room": [4088, 4088, 4087, 1, 4089, 4090, 4091],
    "about a page": [4095, 1, 4097, 0, 8192, 12_289, 8180, 8179, 8181, 8178],
    "long": [100_000, 0, 5, 300_000],
    "growing": list(range(0, 2000, 7)),
    "like": [195, 200, 205] * 400,
    "random": np.random.default_rng(0).integers(0, 9000, 300).tolist(),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("work", [1, 1 << 20])
def test_records_are_read_as_they_were_written(tmp_path, lengths, work):
    random = np.random.default_rng(0)
    records = [random.bytes(length) for length in LENGTHS[lengths]]
    with Store.create(tmp_path / "store", kind="test") as store, store.begin(4096) as tx:
        cuts = np.sort(random.integers(0, len(records) + 1, 3)).tolist()
        write_records(tx, "a", [records[low:high] for low, high in zip([0, *cuts], [*cuts, len(records)], strict=True)])
        tx.commit()
    with Store.open(tmp_path / "store", kind="test") as store, Reader() as reader:
        assert set(store.segments()) == ({"a", "a-rows"} if any(records) else set())
        if not any(records):
            return
        held = StoredRecords.load(store, "a", len(records), reader)
        total = sum(map(len, records))
        pages = store.segments()["a"].length // 4096
        assert held.memory_bytes + 4 * pages <= records_bytes(len(records), total)
        assert pages <= 1.15 * (total + 2 * len(records)) / 4090 + 1
        for rows in (np.arange(len(records)), random.permutation(len(records))[:9], np.empty(0, np.int64)):
            reads = CountedReads(reader)
            assert dict(held.read(rows, work, reads)) == {
                place: records[row] for place, row in enumerate(rows.tolist())
            }
            begun = set(held.pages_of(rows).tolist())
            assert reads.tally["pages"][0] == len(begun) + sum(going_on(held, records, rows))
        order = random.permutation(2 * len(records) + 3)
        both = [*records, b"", b"", b"", *records]
        blocks = list(in_order([held, None, held], [len(records), 3, len(records)], order, work))
        assert [record for block in blocks for record in block] == [both[row] for row in order.tolist()]
        most = max(4096, work // 4)
        assert all(sum(map(bool, block)) <= 1 or sum(map(len, block)) <= most for block in blocks)


def going_on(held, records, rows):
    """Yield the pages on which each record goes on: no record of under 512 bytes does."""
    for head in (head for heads in held.heads(rows, 1 << 20) for _, head in heads):
        yield -(-head.rest // 4090)
    assert all(
        not head.rest or len(records[rows[place]]) >= 512 for heads in held.heads(rows, 1) for place, head in heads
    )


@pytest.fixture
def stored(tmp_path):
    """Return a store of records, some longer than a page, and its file of pages."""
    records = [bytes([row]) * length for row, length in enumerate([3, 0, 5000, 40, 9000, 7])]
    with Store.create(tmp_path / "store", kind="test") as store, store.begin() as tx:
        write_records(tx, "a", [records])
        tx.commit()
    (path,) = (tmp_path / "store" / "segments").glob("a.*")
    return tmp_path / "store", path, records


def test_files_that_do_not_hold_the_rows_are_damage(stored):
    with Store.open(stored[0], kind="test") as store, Reader() as reader:
        for count in (5, 7, 0, 2**32):
            with pytest.raises(CorruptionError, match="do not hold"):
                StoredRecords.load(store, "a", count, reader)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_pages_that_are_damaged_are_never_read_beyond(stored, changes):
    """With checksums all damage is found; without them, reads stay within the file and end."""
    place, path, records = stored
    good = path.read_bytes()
    raw = bytearray(good)
    for page, at, value in changes:
        raw[min(page, len(raw) // 4096 - 1) * 4096 + at] = value
    path.write_bytes(raw)
    try:
        for verify in ("off", "read"):
            with Store.open(place, kind="test", verify=verify) as store, Reader() as reader:
                held = StoredRecords.load(store, "a", len(records), reader)
                for row, record in enumerate(records):
                    with suppress(CorruptionError):
                        found = dict(held.read(np.array([row]), 4096))
                        assert verify == "off" or found == {0: record}
                if verify == "read" and raw != good:
                    with pytest.raises(CorruptionError, match="is damaged"):
                        dict(held.read(np.arange(len(records)), 4096))
    finally:
        path.write_bytes(good)


COLUMNS = {
    "list": lambda: ["a", None, {"b": 1}],
    "tuple": lambda: ("a", None, {"b": 1}),
    "objects": lambda: np.array(["a", None, {"b": 1}], object),
    "iterator": lambda: iter(["a", None, {"b": 1}]),
    "view": lambda: dict(enumerate(["a", None, {"b": 1}])).values(),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_every_form_have_the_same_rows(kind):
    rows = [{"x": "a"}, {"x": None}, {"x": {"b": 1}}]
    assert GivenDocuments({"x": COLUMNS[kind]()}).take(3) == rows
    assert GivenDocuments(iter(rows)).take(3) == GivenDocuments(rows).take(3) == rows


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (np.array([1, 2], np.uint8), [1, 2]),
        (np.array([0.5, np.nan], np.float16), [0.5, math.nan]),
        (np.array([True, False]), [True, False]),
        (np.array(["a", "漢"]), ["a", "漢"]),
        (np.array([b"a", b"\xff"]), [b"a", b"\xff"]),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.ma.MaskedArray([1, 2], [True, False]), [None, 2]),
        ([np.int64(1), np.float32(0.5)], [1, 0.5]),
    ],
    ids=str,
)
def test_arrays_become_python_values(column, expected):
    assert repr([row["x"] for row in GivenDocuments({"x": column}).take(2)]) == repr(expected)


def test_tables_of_arrow_pandas_and_polars(tmp_path):
    rows = [{"x": "a", "n": 1}, {"x": None, "n": None}, {"x": "", "n": 3}]
    for name, make in (("pyarrow", "table"), ("pandas", "DataFrame"), ("polars", "DataFrame")):
        try:
            library = __import__(name)
        except ImportError:
            assert name != "pyarrow"
            continue
        values = {"x": ["a", None, ""], "n": [1, None, 3]}
        given = GivenDocuments(getattr(library, make)(values))
        assert [*given.names] == ["x", "n"]
        given.check_length(3)
        assert given.block(1, 3) == rows[1:]
        with pytest.raises(ValueError, match="3 values: expected 4"):
            given.check_length(4)


@pytest.mark.parametrize(
    ("documents", "error", "words"),
    [
        (3, TypeError, "documents=int: expected columns by name"),
        ("text", TypeError, "documents=str"),
        ({"x": "text"}, TypeError, "documents\\['x'\\]=str: expected a value for each row"),
        ({"x": 3}, TypeError, "documents\\['x'\\]=int"),
        ({"x": np.array(["2020-01-01"], "M8[D]")}, TypeError, "attributes= takes"),
        ({"": []}, ValueError, "the name ''"),
        ({3: []}, ValueError, "the name 3"),
        ({"x" * 201: []}, ValueError, "1 to 200 letters"),
    ],
    ids=str,
)
def test_documents_of_other_forms_are_refused(documents, error, words):
    with pytest.raises(error, match=words):
        GivenDocuments(documents)


def test_streams_that_end_early_or_late_are_refused():
    given = GivenDocuments({"x": iter("ab"), "y": [1, 2]})
    assert given.streamed
    assert given.take(1) == [{"x": "a", "y": 1}]
    with pytest.raises(ValueError, match="documents\\['x'\\] ended after 2 values"):
        given.take(2)
    given = GivenDocuments({"x": iter("ab")})
    given.take(1)
    with pytest.raises(ValueError, match="documents\\['x'\\] goes on after 1 values"):
        given.check_ended()
    with pytest.raises(ValueError, match="ended after 1 rows"):
        GivenDocuments(iter([{"x": 1}])).take(2)
    with pytest.raises(TypeError, match="documents\\[1\\]=int: expected a dict"):
        GivenDocuments([{"x": 1}, 3]).take(2)
