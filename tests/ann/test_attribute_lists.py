"""Attributes that are lists, in every step of their way, beside plain Python."""

import itertools
import json
import math
import random
import tracemalloc
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.ann import MultiVectorIndex, ZoomIndex
from memhier.ann.zoom.filters import blocks
from memhier.ann.zoom.filters.attributes import (
    WORKSPACE_BYTES,
    Attributes,
    chain,
    merge_schema,
    merged_schema,
    write_attributes,
)
from memhier.ann.zoom.filters.bitmaps import unpack
from memhier.ann.zoom.filters.postings import write_postings
from memhier.ann.zoom.filters.where import And, Comparison, Contains, IsNull, Not, Or, evaluate, parse
from memhier.ann.zoom.storage.catalog import KIND
from memhier.errors import BudgetError, CorruptionError
from memhier.io.reader import Reader
from memhier.store.store import Store

DAY = datetime(2024, 1, 31)
ITEMS = {
    "list[str]": ["red", "new", "", "x'y", "日本", "e\x00", "red "],
    "list[int64]": [0, -1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)],
    "list[float64]": [0.5, -0.0, math.inf, -math.inf, 1e300, float(2**53)],
    "list[bool]": [True, False],
    "list[datetime]": [DAY, DAY + timedelta(microseconds=1), datetime(1, 1, 1), datetime(9999, 12, 31)],
}
COUNTS = [1, 63, 64, 65, 300, 4097]


def lists(items, count, seed=0):
    """Return lists of few items, of many, empty ones and null; the first has an item."""
    draw = random.Random(seed)
    made = [[draw.choice(items)]]
    for _ in range(count - 1):
        length = draw.choice([0, 0, 1, 2, 3, draw.choice([0, 900]) if draw.random() < 0.02 else 4])
        made.append(None if draw.random() < 0.15 else [draw.choice(items) for _ in range(length)])
    return made


def literal(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return f"'{value.isoformat()}'"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "1e999" if value == math.inf else repr(value)


def conditions(items):
    """Return filters on the column ``x`` with plain functions that decide them; None is unknown."""
    known = [item for item in items if item not in (math.inf, -math.inf)]
    one, two = known[0], known[-1]
    return {
        f"x contains {literal(one)}": lambda held: one in held,
        f"x not contains {literal(two)}": lambda held: two not in held,
        f"x contains any ({literal(one)}, {literal(two)})": lambda held: one in held or two in held,
        f"x CONTAINS ALL ({literal(one)}, {literal(two)})": lambda held: {one, two} <= set(held),
        f"not (x contains {literal(one)} and x contains {literal(two)})": lambda held: not {one, two} <= set(held),
        f"not (x contains {literal(one)} or y contains 1)": lambda held: one not in held,
    }


def expected(column, fits):
    return [held is not None and fits(held) for held in column]


def plain(values):
    """Return lists of an index as plain Python."""
    return [
        None if value is None else [item.item() if isinstance(item, np.datetime64) else item for item in value]
        for value in values
    ]


@pytest.fixture
def parts(tmp_path):
    """Return a function that writes attributes as parts and opens them."""
    opened, numbers = [], itertools.count()

    def write(*many, schema=None, orders=None, work_bytes=WORKSPACE_BYTES):
        path, schema = tmp_path / f"store{next(numbers)}", dict(schema or {})
        with Store.create(path, kind="test") as store, store.begin() as tx:
            for number, attributes in enumerate(many):
                count = len(next(iter(attributes.values())))
                schema = merge_schema(schema, attributes, count)
                order = np.arange(count) if orders is None else orders[number]
                write_attributes(tx, f"p{number}-", schema, attributes, order)
            tx.commit()
        store, reader = Store.open(path, kind="test"), Reader()
        opened.extend((reader, store))
        counts = [len(next(iter(attributes.values()))) for attributes in many]
        made = [Attributes(store, f"p{each}-", schema, n, reader, None, work_bytes) for each, n in enumerate(counts)]
        return made, schema

    yield write
    for each in opened:
        each.close()


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("count", COUNTS)
def test_lists_filter_and_come_back(parts, kind, count):
    column = lists(ITEMS[kind], count)
    order = np.random.default_rng(1).permutation(count)
    (part,), schema = parts({"x": column, "y": [[2]] * count}, orders=[order])
    assert schema == {"x": kind, "y": "list[int64]"}
    placed = [column[row] for row in order]
    assert plain(part.take(np.arange(count), ["x"])["x"]) == placed
    some = np.random.default_rng(2).integers(0, count, 17)
    assert plain(part.take(some)["x"]) == [placed[row] for row in some]
    arrays = {"x": np.fromiter(placed, object, count), "y": np.fromiter([[2]] * count, object, count)}
    for text, fits in conditions(ITEMS[kind]).items():
        assert unpack(part.bitmap(text), count).tolist() == expected(placed, fits), text
        assert evaluate(parse(text), arrays).tolist() == expected(placed, fits), text
        assert str(parse(str(parse(text)))) == str(parse(text))
    assert unpack(part.bitmap("x is null"), count).tolist() == [held is None for held in placed]
    assert unpack(part.bitmap("x is not null"), count).tolist() == [held is not None for held in placed]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(-3, 3), max_size=5)), max_size=70),
    st.lists(st.integers(-4, 4), min_size=1, max_size=3),
    st.booleans(),
)
def test_contains_is_that_of_python(column, wanted, every):
    column = [[0], *column]
    text = f"x contains {'all' if every else 'any'} ({', '.join(map(str, wanted))})"
    fits = set(wanted).issubset if every else (lambda held: not set(wanted).isdisjoint(held))
    fits = (lambda held: set(wanted) <= set(held)) if every else fits
    found = evaluate(parse(text), {"x": np.fromiter(column, object, len(column))})
    assert found.tolist() == expected(column, fits)
    found = evaluate(parse(f"not {text}"), {"x": np.fromiter(column, object, len(column))})
    assert found.tolist() == expected(column, lambda held: not fits(held))


def known_or_not(expression, row):
    """Return True, False or None for unknown, by SQL's three values."""
    match expression:
        case Not(operand):
            value = known_or_not(operand, row)
            return None if value is None else not value
        case And(operands):
            values = [known_or_not(operand, row) for operand in operands]
            return False if False in values else None if None in values else True
        case Or(operands):
            values = [known_or_not(operand, row) for operand in operands]
            return True if True in values else None if None in values else False
        case IsNull(name):
            return row[name] is None
        case Contains(name, values):
            return None if row[name] is None else not set(values).isdisjoint(row[name])
        case Comparison(name, _, value):
            return None if row[name] is None else row[name] < value


WORDS = st.sampled_from(["a", "b", "common", "", "none has it"])
NUMBERS = st.sampled_from([0, 1, 7, -3, 2.5, 2**70])
CONTAINED = st.one_of(
    *(
        st.builds(Contains, st.just(name), st.lists(values, min_size=1, max_size=3).map(tuple))
        for name, values in (("words", WORDS), ("numbers", NUMBERS), ("nowhere", NUMBERS))
    ),
    st.builds(IsNull, st.sampled_from(["words", "numbers", "nowhere"])),
)
SINGLE = st.builds(Comparison, st.just("n"), st.just("<"), st.integers(-1, 90))


def trees(leaf):
    def deeper(inner):
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return st.one_of(inner.map(Not), several.map(And), several.map(Or))

    return st.recursive(leaf, deeper, max_leaves=7)


@pytest.mark.long
@pytest.mark.parametrize("work", [(1 << 15) + 1200, 1 << 20])
@pytest.mark.parametrize("compiled", [True, False])
def test_any_filter_of_items_selects_the_rows_of_a_plain_evaluation(parts, monkeypatch, work, compiled):
    """Of lists alone, and beside single values; in one piece or several, as the DRAM of a filter has room."""
    count, draw = 6_000, random.Random(1)
    words, numbers, singles = [["a"]], [[7]], [0]
    for row in range(1, count):
        some = [word for word, odds in (("common", 0.8), ("a", 0.02), ("b", 0.3), ("", 0.1)) if draw.random() < odds]
        words.append(None if draw.random() < 0.1 else some)
        numbers.append(None if row % 3 == 0 else [draw.choice([0, 1, 7, -3]) for _ in range(draw.randrange(4))])
        singles.append(None if draw.random() < 0.1 else draw.randrange(90))
    columns = {"words": words, "numbers": numbers, "n": singles}
    schema = {"nowhere": "list[int64]"}
    (part,), _ = parts(columns, schema=schema, work_bytes=work)
    if not compiled:
        monkeypatch.setattr("memhier.backend.core", None)
    rows = [
        dict(zip(columns, values, strict=True)) | {"nowhere": None} for values in zip(*columns.values(), strict=True)
    ]

    @settings(max_examples=60 if compiled else 25, deadline=None)
    @given(st.one_of(trees(CONTAINED), trees(st.one_of(CONTAINED, SINGLE))))
    def selects(tree):
        wanted = [known_or_not(tree, row) is True for row in rows]
        assert unpack(part.bitmap(str(tree)), count).tolist() == wanted

    selects()


def test_parts_are_joined(parts, tmp_path):
    for kind, items in ITEMS.items():
        columns = [lists(items[:3], 65, 1), lists(items[-2:], 300, 2), [None] * 4, [[], None, []]]
        many = [{"x": columns[0]}, {"x": columns[1]}, {"y": [1, 2, 3, 4]}, {"x": columns[3]}]
        opened, schema = parts(*many)
        assert schema == {"x": kind, "y": "int64"}
        together = [*itertools.chain.from_iterable(columns)]
        order = np.random.default_rng(0).permutation(len(together))[:360]
        path = tmp_path / kind[5:-1]
        with Store.create(path, kind="test") as store, store.begin() as tx:
            write_attributes(tx, "p9-", schema, chain(opened, schema), order, block_rows=64)
            tx.commit()
        with Store.open(path, kind="test") as store, Reader() as reader:
            joined = Attributes(store, "p9-", schema, len(order), reader)
            placed = [together[row] for row in order]
            assert plain(joined.take(np.arange(len(order)), ["x"])["x"]) == placed
            one, two = (literal(items[number]) for number in (0, -1))
            for text, fits in (
                (f"x contains {one}", lambda held, items=items: items[0] in held),
                (f"not x contains any ({one}, {two})", lambda held, items=items: not {items[0], items[-1]} & {*held}),
            ):
                if "1e999" not in text and "-inf" not in text:
                    assert unpack(joined.bitmap(text), len(order)).tolist() == expected(placed, fits)


def test_texts_that_no_row_has_any_more_leave_the_others_to_filters(tmp_path):
    tags = [[f"only {row}", f"of {row % 3}"] for row in range(300)]
    vectors = np.random.default_rng(0).normal(size=(300, 4)).astype("float32")
    with ZoomIndex.build(tmp_path / "index", vectors, attributes={"tags": tags}, dram="4MiB", grow_to=600) as index:
        index.update(range(100), attributes={"tags": [["new", "of 1"]] * 100})
        index.remove(range(150, 299))
        index.compact()
        held = {row: ["new", "of 1"] if row < 100 else tags[row] for row in [*range(150), 299]}
        for tag in ("new", "of 0", "of 1", "of 2", "only 3", "only 120", "only 299"):
            found = [row for block in index.ids(f"tags contains '{tag}'") for row in block.tolist()]
            assert sorted(found) == [row for row, items in held.items() if tag in items]


def test_a_filter_on_lists_holds_no_column(parts, monkeypatch):
    count = 100_000
    column = [[f"w{row % 5000}", "all"] + ["more"] * (row % 7) for row in range(count)]
    column[70_000] = ["one"] * 200_000
    (part,), _ = parts({"x": column, "n": [[row] for row in range(count)]})
    text = "x contains any ('w17', 'one') and not n contains 17 and x contains 'all' or n contains 3"
    wanted = [row == 3 or (row % 5000 == 17 and row != 17) for row in range(count)]
    part.bitmap(text)
    tracemalloc.start()
    try:
        found = part.bitmap(parse(text))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < WORKSPACE_BYTES
    assert unpack(found, count).tolist() == wanted
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ROWS", 64)  # lists longer than a run of items
        assert unpack(part.bitmap(text), count).tolist() == wanted


def test_hits_read_all_columns_in_one_submission(tmp_path):
    count, columns = 500, {}
    vectors = np.random.default_rng(0).normal(size=(count, 8)).astype("float32")
    for number in range(6):
        columns |= {f"i{number}": np.arange(count), f"f{number}": np.arange(count) / 3, f"b{number}": [True] * count}
    columns["n"] = [None if row % 3 else row for row in range(count)]
    with ZoomIndex.build(tmp_path / "index", vectors, attributes=columns, dram="8MiB") as index:
        found = index.search(vectors[:50], 10, fields=True)
        assert found.stats["payload_rounds"] == 1
        assert index.search(vectors[:50], 10).stats["payload_rounds"] == 0
        index.add(vectors[:40], attributes={name: column[:40] for name, column in columns.items()})
        index.commit(compact=False)
        assert index.stats()["parts"] == 2
        assert index.search(vectors[:50], 10, fields=True).stats["payload_rounds"] == 1
        words = {"s": ["one", "zwei"] * 250, "t": [["x"]] * 500, "u": ["é" * (row % 300) for row in range(count)]}
        index.update(np.arange(count), vectors, words)
        index.commit(compact=False)
        found = index.search(vectors[:50], 10, fields=True)
        assert found.stats["payload_rounds"] <= 5  # starts and values, items, where words begin, words in two lengths
        for row in itertools.chain.from_iterable(found.rows()):
            at = row["id"] % count
            assert row["i3"] == at
            if row["id"] < count:
                assert (row["s"], row["t"], row["u"]) == ([*words["s"]][at], ["x"], "é" * (at % 300))


def test_search_iter_reads_the_fields_of_a_hit_once(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(400, 8)).astype("float32")
    bodies = [bytes([row % 256]) * 5000 for row in range(400)]  # on pages of their own
    with ZoomIndex.build(tmp_path / "index", vectors, documents={"body": bodies}, dram="8MiB") as index:
        once = index.search(vectors[0], 400, fields=True).stats["payload_pages"]
        read, seen = {}, []
        for found in index.search_iter(vectors[0], 30, fields=["body"]):
            read[id(found.stats)] = (found.stats["payload_pages"], found.stats)
            seen += found.ids.tolist()
            assert found.fields["body"].tolist() == [bodies[name] for name in found.ids]
        assert sorted(seen) == list(range(400))
        assert sum(pages for pages, _ in read.values()) <= 1.1 * once  # the first page of a record may be shared


def test_the_index_keeps_no_list_of_the_caller(tmp_path):
    tags = [["a"], ["b"], None, []]
    with ZoomIndex.build(tmp_path / "index", np.zeros((0, 4), "f4"), dram="3MiB", grow_to=100) as index:
        index.add(np.eye(4, dtype="f4"), attributes={"tags": tags})
        tags[0].append("changed")
        found = index.search(np.eye(4, dtype="f4"), 4, fields=["tags"])
        found.fields["tags"][0, 0].append("changed")
        index.fetch([0])["tags"][0].append("changed")
        assert index.fetch([0, 1, 2, 3])["tags"].tolist() == [["a"], ["b"], None, []]
        index.commit()
        assert index.fetch([0, 1, 2, 3])["tags"].tolist() == [["a"], ["b"], None, []]


def test_numbers_are_converted_exactly(tmp_path):
    vectors = np.eye(4, dtype="f4")
    with ZoomIndex.build(
        tmp_path / "index", vectors, attributes={"f": [[0.5]] * 4, "i": [[1]] * 4}, dram="3MiB"
    ) as index:
        index.add(vectors, attributes={"f": [[1, 2], [], None, [2**53]], "i": [[1.0], [], None, [-3.0]]})
        for _ in range(2):
            found = index.fetch([4, 5, 6, 7])
            assert repr(found["f"].tolist()) == repr([[1.0, 2.0], [], None, [float(2**53)]])
            assert repr(found["i"].tolist()) == repr([[1], [], None, [-3]])
            assert index.search(vectors[0], 8, where="i contains -3").ids.tolist()[:2] == [7, -1]
            index.commit()
        for attributes in ({"f": [[2**53 + 1]]}, {"i": [[0.5]]}, {"i": [[True]]}, {"f": [["x"]]}, {"f": [1.0]}):
            with pytest.raises((ValueError, TypeError), match=r"exactly|is list\[(int64|float64)\], but"):
                index.add(vectors[:1], attributes=attributes)
        assert len(index) == 8


def test_conditions_of_the_wrong_kind_are_refused(tmp_path):
    attributes = {"tags": [["a"]] * 4, "n": [1] * 4, "days": [[DAY]] * 4}
    with ZoomIndex.build(tmp_path / "index", np.eye(4, dtype="f4"), attributes=attributes, dram="3MiB") as index:
        for where, words in {
            "tags == 'a'": r"'tags' is list\[str\]; expected contains",
            "tags in ('a')": r"'tags' is list\[str\]; expected contains",
            "tags": r"'tags' is list\[str\]; expected contains",
            "n contains 1": "'n' is int64; expected a comparison",
            "tags contains 1": r"'tags' is list\[str\], it cannot be compared with int",
            "days contains 1": r"'days' is list\[datetime\], it cannot be compared with int, but with text",
            "days contains 'x'": "is no moment",
            "tags contains tags": r"'tags' is list\[str\]; expected single values on the right",
        }.items():
            with pytest.raises((TypeError, ValueError), match=words):
                index.search(np.ones(4), 1, where=where)
        for where in (
            "tags contains",
            "tags contains any 'a'",
            "tags contains any ()",
            "tags not 'a'",
        ):
            with pytest.raises(ValueError, match="where: expected"):
                index.search(np.ones(4), 1, where=where)


def test_words_of_filters_are_names_still():
    columns = {name: np.array([1, 2]) for name in ("contains", "any", "all")}
    assert evaluate(parse("contains == 1 and any != 2 or all in (2)"), columns).tolist() == [True, True]
    listed = {"any": np.fromiter([["all"], []], object, 2)}
    assert evaluate(parse("any contains any ('all', 'x')"), listed).tolist() == [True, False]


def test_lists_of_arrays_masks_and_zones(tmp_path):
    zone = DAY.replace(tzinfo=UTC)
    attributes = {
        "a": [np.array([1, 2], np.int8), np.array([], np.int8), None, (3,)],
        "d": [np.array(["2024-01-31"], "M8[D]"), [zone], np.array([], "M8[ns]"), [DAY.date()]],
        "m": np.ma.MaskedArray(np.fromiter([[1], [2], [3], []], object, 4), [False, True, False, False]),
        "s": [np.array(["x", "yy"]), [np.str_("z")], [], None],
    }
    with ZoomIndex.build(tmp_path / "index", np.eye(4, dtype="f4"), attributes=attributes, dram="3MiB") as index:
        found = {name: plain(column) for name, column in index.fetch([0, 1, 2, 3]).items()}
    assert found == {
        "a": [[1, 2], [], None, [3]], "d": [[DAY], [DAY], [], [DAY]], "m": [[1], None, [3], []],
        "s": [["x", "yy"], ["z"], [], None],
    }  # fmt: skip
    for values, words in {
        "masked": ([np.ma.MaskedArray([1, 2], [False, True])], "None in the list of row 0"),
        "nan": ([[1.0, math.nan]], "nan in the list of row 0"),
        "fine": ([[np.datetime64("2024-01-31T00:00:00.000000001")]], "in the list of row 0"),
        "set": ([[1], {1}], "in row 1, a set"),
        "matrix": ([np.zeros((2, 2))], "in row 0, a ndarray"),
        "point": ([[1], np.array(3)], "in row 1, a ndarray"),
        "big": ([[2**63]], "in the list of row 0: expected int64"),
        "surrogate": ([["\ud800"]], "in the list of row 0"),
    }.values():
        with pytest.raises((ValueError, TypeError), match=words):
            merge_schema({}, {"x": values}, len(values))
    assert merged_schema({}, {}, 0) == {}


@pytest.mark.long
def test_lists_take_what_is_planned(tmp_path):
    count, draw = 5000, np.random.default_rng(0)
    vectors = draw.normal(size=(count, 16)).astype("float32")
    tags = [[f"word {item}" for item in draw.integers(0, 20_000, draw.integers(0, 40))] for _ in range(count)]
    with ZoomIndex.build(
        tmp_path / "index", vectors, attributes={"tags": tags}, dram="3MiB", grow_to=2 * count
    ) as index:
        for start in range(0, count, 500):
            index.add(vectors[start : start + 500], attributes={"tags": tags[start : start + 500]})
            stats = index.stats()
            assert stats["memory_bytes"] <= stats["planned_bytes"] <= stats["dram"]
            if start % 1000:
                index.commit(compact=False)
        assert index.fetch(np.arange(2 * count))["tags"].tolist() == tags + tags
        with pytest.raises(BudgetError, match=r"attributes of row 1 take .* raise dram= at build"):
            index.add(vectors[:2], attributes={"tags": [["x"], ["y"] * 100_000]})
        assert len(index) == 2 * count


@pytest.mark.parametrize("version", [6, 7])
def test_indexes_of_the_versions_before_open_and_take_lists(tmp_path, version):
    vectors = np.eye(8, dtype="f4")
    documents = {"title": ["a"] * 8} if version == 7 else None
    ZoomIndex.build(
        tmp_path / "index", vectors, attributes={"n": np.arange(8)}, documents=documents, dram="3MiB"
    ).close()
    with Store.open(tmp_path / "index", kind=KIND, writable=True) as store, store.begin() as tx:
        about = json.loads(store.get("index"))
        if version == 6:
            assert about.pop("documents") == []
        tx.put("index", json.dumps(about | {"version": version}).encode())
        tx.commit()
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert index.search(vectors[3], 1, fields=True).rows()[0]["n"] == 3
        index.add(vectors, attributes={"tags": [["new"], [], None, ["old", "new"]] * 2}, documents={"body": ["b"] * 8})
        index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        assert sorted(index.search(vectors[0], 8, where="tags contains 'new'").ids.tolist())[-4:] == [8, 11, 12, 15]
        assert index.fetch([0, 8, 9, 10])["tags"].tolist() == [None, ["new"], [], None]
        assert index.fetch([0, 8])["body"].tolist() == [None, "b"]


@pytest.mark.parametrize("segment", ["p0-a-tags", "p0-a-tags-items", "p0-a-tags-items-words"])
def test_a_damaged_page_is_found(tmp_path, segment):
    ZoomIndex.build(
        tmp_path / "index", np.eye(8, dtype="f4"), attributes={"tags": [["a", "b"]] * 8}, dram="3MiB"
    ).close()
    (path,) = (tmp_path / "index" / "segments").glob(f"{segment}.*")
    raw = bytearray(path.read_bytes())
    raw[1] ^= 255
    path.write_bytes(raw)
    with pytest.raises(CorruptionError), ZoomIndex.open(tmp_path / "index") as index:
        index.fetch([1])


def test_starts_that_lie_are_refused(tmp_path):
    ZoomIndex.build(
        tmp_path / "index", np.eye(8, dtype="f4"), attributes={"tags": [["a", "b"]] * 8}, dram="3MiB"
    ).close()
    (path,) = (tmp_path / "index" / "segments").glob("p0-a-tags.*")
    raw = np.frombuffer(path.read_bytes(), "<i8").copy()
    raw[4] = 2**40
    path.write_bytes(raw.tobytes())
    with ZoomIndex.open(tmp_path / "index", verify="off") as index:
        with pytest.raises(CorruptionError, match="lies outside of the 16 items"):
            index.fetch(np.arange(8))
        assert sorted(index.search(np.ones(8), 8, where="tags contains 'a'").ids.tolist()) == [*range(8)]


def test_postings_that_lie_are_refused_or_find_other_rows(tmp_path):
    """Whatever number stands in them, a filter that reads them ends with rows or with a CorruptionError."""
    tags = [[row % 700, -row, row % 3] for row in range(1500)]
    ZoomIndex.build(
        tmp_path / "index", np.eye(1500, 4, dtype="f4") + 1, attributes={"tags": tags}, dram="4MiB"
    ).close()  # fmt: skip
    (path,) = (tmp_path / "index" / "segments").glob("p0-a-tags-items-sets.*")
    whole = np.frombuffer(path.read_bytes(), "<i8")
    random, refused = np.random.default_rng(0), 0
    used = int(np.flatnonzero(whole)[-1]) + 1
    for turn in range(90):
        raw = whole.copy()
        place = random.integers(used) if turn % 2 else used - 1 - random.integers(12)
        raw[place] = random.choice([0, -1, 2**62, -(2**62), 2**31, 77, int(random.integers(-(2**40), 2**40))])
        path.write_bytes(raw.tobytes())
        try:
            with ZoomIndex.open(tmp_path / "index", verify="off") as index:
                index.search(np.ones(4), 3, where="tags contains any (0, 2, 699, -1400, 5000)")
        except CorruptionError:
            refused += 1
    assert refused > 2


@pytest.mark.parametrize("number", ["first row", "records"])
def test_blocks_of_postings_that_begin_at_odd_places_are_refused(tmp_path, number):
    tags = [[row % 3] for row in range(1500)]
    ZoomIndex.build(
        tmp_path / "index", np.eye(1500, 4, dtype="f4") + 1, attributes={"tags": tags}, dram="4MiB"
    ).close()  # fmt: skip
    (path,) = (tmp_path / "index" / "segments").glob("p0-a-tags-items-sets.*")
    raw = np.frombuffer(path.read_bytes(), "<i8").copy()
    blocks = np.flatnonzero(raw)[-1]  # their number, behind the block
    raw[blocks - (3 if number == "first row" else 2)] += 1
    path.write_bytes(raw.tobytes())
    refused = pytest.raises(CorruptionError, match="tags-items-sets")
    with ZoomIndex.open(tmp_path / "index", verify="off") as index, refused:
        index.search(np.ones(4), 3, where="tags contains 1")


@pytest.mark.long
@pytest.mark.parametrize("block", [7, 500, 1 << 20])
def test_postings_of_many_blocks_find_what_a_scan_finds(parts, monkeypatch, block):
    """Skewed items, long and short lists, repeated items; the DRAM of a filter ample and scant."""
    monkeypatch.setattr("memhier.ann.zoom.filters.attributes.BLOCK_ITEMS", block)
    count, random = 9_000 if block > 7 else 500, np.random.default_rng(5)
    column = [[min(9999, int(each)) for each in random.zipf(1.2, random.integers(0, 9))] for _ in range(count)]
    column[5] = [4] * 3000
    column[6] = [*range(2000)]
    column[7] = None
    held = [None if each is None else set(each) for each in column]
    assert count < 9_000 or sum(1 in (each or ()) for each in column) > 4096  # which are a bitmap in a block of all
    for work, core in (((1 << 15) + 1500, True), (1 << 16, True), (1 << 16, False), (1 << 22, True)):
        (part,), _ = parts({"x": column, "n": [*range(count)]}, work_bytes=work)
        if not core:
            monkeypatch.setattr("memhier.backend.core", None)
        for text, fits in {
            "x contains 1": lambda items, row: 1 in items,
            "x contains 9999": lambda items, row: 9999 in items,
            "x contains 12345678": lambda items, row: False,
            "x contains 1999 or x contains 4": lambda items, row: 1999 in items or 4 in items,
            "x is null or not x contains any (1, 2)": lambda items, row: not items & {1, 2},
            "x contains all (1, 2) and not x contains 3": lambda items, row: {1, 2} <= items and 3 not in items,
            "x contains any (2, 2.5, 17, 40) and n < 700": lambda items, row: items & {2, 17, 40} and row < 700,
            f"x contains any ({', '.join(map(str, range(3, 9000, 7)))})": lambda items, row: any(
                item % 7 == 3 and item < 9000 for item in items
            ),
        }.items():
            wanted = [bool(fits(items, row)) if items is not None else "null" in text for row, items in enumerate(held)]
            assert unpack(part.bitmap(text), count).tolist() == wanted, text
        monkeypatch.undo()
        monkeypatch.setattr("memhier.ann.zoom.filters.attributes.BLOCK_ITEMS", block)


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize(("block", "count"), [(5, 300), (1 << 20, 5000)])
def test_right_postings_are_found_right(parts, monkeypatch, kind, block, count, core):
    """Repeated items, lists cut in two, and items of more than 4,096 rows."""
    if not core:
        monkeypatch.setattr("memhier.backend.core", None)
    monkeypatch.setattr("memhier.ann.zoom.filters.attributes.BLOCK_ITEMS", block)
    column = [ITEMS[kind][:1] * 9 if row % 50 == 0 else each for row, each in enumerate(lists(ITEMS[kind], count))]
    column[1:4600] = [None if each is None else [*each, ITEMS[kind][1]] for each in column[1:4600]]
    (part,), _ = parts({"x": column, "n": [*range(count)]})
    assert part.misposted() == []


def test_check_finds_right_postings_after_joins_and_updates(tmp_path):
    column = lists(ITEMS["list[str]"], 300)
    vectors = np.random.default_rng(0).normal(size=(300, 4)).astype("f4")
    with ZoomIndex.build(tmp_path / "index", vectors, attributes={"x": column}, dram="8MiB", grow_to=900) as index:
        for first in (300, 400, 500):
            index.add(vectors[:100], ids=range(first, first + 100), attributes={"x": column[100:200]})
            index.update([0, first], attributes={"x": [column[first % 7], None]})
            index.remove([first - 5])
            index.commit(compact=False)
            assert index.check() == []
        index.compact()
        assert index.check() == []


@pytest.mark.parametrize("fault", ["row", "item", "missing", "more"])
def test_check_finds_wrong_postings(tmp_path, monkeypatch, fault):
    """As indexes of earlier versions have them, with right checksums."""
    made = {
        "row": lambda rows, items: (np.append(rows[:-1], rows[-1] + 1), items),
        "item": lambda rows, items: (rows, np.append(items[:-1], 77)),
        "missing": lambda rows, items: (rows[:-1], items[:-1]),
        "more": lambda rows, items: (np.append(rows, rows[-1]), np.append(items, 77)),
    }[fault]
    monkeypatch.setattr(
        "memhier.ann.zoom.filters.stored_lists.write_postings",
        lambda tx, name, floats, pairs: write_postings(tx, name, floats, [made(*each) for each in pairs]),
    )
    vectors, tags = np.eye(90, 4, dtype="f4") + 1, [[row % 7 - 9, row] for row in range(90)]
    options = {"attributes": {"tags": tags, "right": tags[::-1]}, "dram": "4MiB"}
    with ZoomIndex.build(tmp_path / "index", vectors, **options) as index:
        assert index.check() == [f"part p0: '{name}' has postings unlike its lists" for name in ("tags", "right")]
    items = [vectors[row : row + 1] for row in range(90)]
    with MultiVectorIndex.build(tmp_path / "items", items, **options) as several:
        assert several.check() == [f"part p0: '{name}' has postings unlike its lists" for name in ("tags", "right")]
