"""Documents and attributes that come back with hits: an index that changes, beside a dict of plain values."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memhier.ann import ZoomIndex
from memhier.ann.zoom.renewal import merge
from memhier.ann.zoom.storage import layout
from memhier.ann.zoom.storage.catalog import KIND
from memhier.errors import BudgetError, ClosedError, CorruptionError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.store.store import Store

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
DIMENSION = 5
COUNTS = st.sampled_from([0, 1, 3, 17, 97])
VALUES = [
    None, "", "text", "é漢🙂\0\n", "\ud800", b"", b"\0\xff", 0, -7, 2**70, True, False, 0.5, -0.0, float("nan"), [], {},
    ["a", "b"], [1, 2], {"a": {"b": [1, None, "x", float("inf")]}, "é": -(2**64)}, "long " * 900, b"\x01" * 3000,
]  # fmt: skip
LISTS = {"labels": ["new", "red", "", "漢x'y"], "marks": [0, -7, 2**62]}  # attributes
LABELLED = {
    "labels contains 'red'": lambda labels: "red" in labels,
    "not labels contains all ('new', '')": lambda labels: not {"new", ""} <= labels,
    "labels contains any ('none', '漢x''y')": lambda labels: "漢x'y" in labels,
}
NAMES = ["title", "body", "tags", "in"]  # the last is a word of filters


def make(count, dimension=DIMENSION, seed=0):
    return np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)


def build(path, count=300, dram="4MiB", name="index", **options):
    return ZoomIndex.build(path / name, make(count), dram=dram, **options)


def stored(value):
    """Return a document as it comes back: NaN stands for none."""
    return None if value != value else value


class Life(RuleBasedStateMachine):
    """The model maps an id to the attributes and the documents of its vector."""

    @initialize(seed=st.integers(0, 2**31), count=st.sampled_from([0, 1, 97, 200]), strings=st.booleans())
    def build(self, seed, count, strings):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(layout, "_FRESH_MOST", 20_000)
        self.patch.setattr(layout, "_VECTORS_PER_LIST", 20)
        self.patch.setattr(merge, "_CHUNK_BYTES", 700)
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.rng = np.random.default_rng(seed)
        self.strings = strings
        self.next = 0
        self.rows, self.names = {}, []
        vectors, ids, attributes, documents = self.make(count)
        self.index = ZoomIndex.build(
            self.folder / "index", vectors, ids=ids, attributes=attributes, documents=documents, dram="8MiB",
            grow_to=500, seed=seed % 100,
        )  # fmt: skip
        self.put(ids, attributes, documents)
        self.commit_model()

    def make(self, count):
        """Return vectors, new ids, attributes that are null at times, and documents in one of their forms."""
        numbers = np.arange(self.next, self.next + count)
        self.next += count
        ids = numbers.astype(str) if self.strings else numbers
        return self.rng.normal(size=(count, DIMENSION)).astype(np.float32), ids, *self.fields(count)

    def fields(self, count):
        price = np.ma.MaskedArray(self.rng.integers(0, 9, count), self.rng.random(count) < 0.2)
        price[:1] = 3  # a column of nulls has no type
        attributes = {"price": price} if count else None
        for name, items in LISTS.items() if count else ():
            lengths = self.rng.integers(0, 4, count)
            lists = [[items[i] for i in self.rng.integers(0, len(items), length)] for length in lengths]
            attributes[name] = [[items[0]], *(None if self.rng.random() < 0.2 else each for each in lists[1:])]
        names = [name for name in NAMES if self.rng.random() < 0.6]
        columns = {name: [VALUES[i] for i in self.rng.integers(0, len(VALUES), count)] for name in names}
        if self.rng.random() < 0.5:
            return attributes, columns
        return attributes, [
            {name: column[row] for name, column in columns.items() if self.rng.random() < 0.7} for row in range(count)
        ]

    def put(self, ids, attributes, documents):
        known = documents if isinstance(documents, dict) else {name: 0 for row in documents for name in row}
        self.names += [name for name in known if name not in self.names and (len(ids) or self.index_is_new())]
        for row, name in enumerate(ids.tolist()):
            old = self.rows.setdefault(name, {})
            old |= {name: list(column)[row] for name, column in attributes.items() if name != "price"}
            old["price"] = attributes["price"].tolist()[row]
            given = documents[row] if isinstance(documents, list) else {n: c[row] for n, c in documents.items()}
            old |= {name: stored(value) for name, value in given.items()}

    def index_is_new(self):
        return not hasattr(self, "committed")

    def some(self, count):
        names = sorted(self.rows)
        return np.array([names[i] for i in self.rng.permutation(len(names))[:count]], object if self.strings else int)

    @rule(count=COUNTS)
    def add(self, count):
        vectors, ids, attributes, documents = self.make(count)
        self.index.add(vectors, ids, attributes, documents)
        self.put(ids, attributes, documents)

    @rule(count=COUNTS)
    def add_without(self, count):
        vectors, ids, *_ = self.make(count)
        self.index.add(vectors, ids)
        self.rows |= {name: {} for name in ids.tolist()}

    @rule(count=COUNTS)
    def update(self, count):
        ids = self.some(count)
        attributes, documents = self.fields(len(ids))
        vectors = self.rng.normal(size=(len(ids), DIMENSION))
        self.index.update(ids, vectors, attributes, documents)
        self.put(ids, attributes, documents)

    @rule(count=COUNTS)
    def update_vectors(self, count):
        ids = self.some(count)
        self.index.update(ids, self.rng.normal(size=(len(ids), DIMENSION)))

    @rule(count=COUNTS)
    def remove(self, count):
        ids = self.some(count)
        self.index.remove(ids)
        for name in ids.tolist():
            del self.rows[name]

    @rule(fully=st.booleans())
    def commit(self, fully):
        if fully:
            self.index.compact()
        else:
            self.index.commit()
        self.commit_model()

    def commit_model(self):
        self.committed = {name: dict(row) for name, row in self.rows.items()}, list(self.names)

    @rule(verify=st.sampled_from(["read", "open", "off"]))
    def reopen(self, verify):
        self.index.close()
        rows, names = self.committed
        self.rows, self.names = {name: dict(row) for name, row in rows.items()}, list(names)
        self.index = ZoomIndex.open(self.folder / "index", writable=True, verify=verify)
        assert self.index.check() == []

    @rule()
    def read_elsewhere(self):
        self.index.save_to(self.folder / "copy")
        with ZoomIndex.open(self.folder / "copy") as other:
            self.holds(other, *self.committed)
        shutil.rmtree(self.folder / "copy")

    def holds(self, index, rows, names):
        assert [name for name, kind in index.fields.items() if kind == "document"] == names
        found = index.fetch(np.array(list(rows), object if self.strings else int))
        for name, column in found.items():
            assert repr(column.tolist()) == repr([row.get(name) for row in rows.values()])
        if "labels" in index.fields:
            held = {name: row.get("labels") for name, row in self.rows.items()} if index is self.index else {}
            for where, fits in LABELLED.items() if held else ():
                ids = index.search(np.zeros(DIMENSION), len(held), where=where, recall=1).ids.tolist()
                assert {name for name in ids if name not in (None, -1)} == {
                    name for name, labels in held.items() if labels is not None and fits(set(labels))
                }

    @rule(k=st.sampled_from([1, 7, 300]), queries=st.sampled_from([1, 4]), where=st.sampled_from([None, "price < 5"]))
    def search(self, k, queries, where):
        if where and "price" not in self.index.fields:
            return
        asked = self.rng.normal(size=(queries, DIMENSION))
        fields = [name for name in self.index.fields if self.rng.random() < 0.7]
        result = self.index.search(asked, k, where=where, fields=fields)
        plain = self.index.search(asked, k, where=where)
        np.testing.assert_array_equal(result.ids, plain.ids)
        assert list(result.fields) == fields
        assert plain.fields == {}
        for ids, rows in zip(result.ids.tolist(), result.rows(), strict=True):
            there = [name for name in ids if name not in (None, -1)]
            expected = [[name, *(self.rows[name].get(field) for field in fields)] for name in there]
            assert repr([[row["id"], *(row[field] for field in fields)] for row in rows]) == repr(expected)
        assert plain.stats["payload_reads"] == plain.stats["payload_pages"] == plain.stats["payload_bytes"] == 0

    @invariant()
    def same(self):
        if hasattr(self, "index"):
            some = self.some(9).tolist()
            self.holds(self.index, {name: self.rows[name] for name in some}, self.names)
            assert self.index.memory_bytes <= self.index.stats()["planned_bytes"] <= 8 << 20

    def teardown(self):
        if hasattr(self, "patch"):  # also after a build that failed
            self.patch.undo()
        if hasattr(self, "index"):
            self.index.close()
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
    report_multiple_bugs=False,
)


def test_every_value_comes_back(tmp_path):
    count = len(VALUES) * 10
    columns = {"a": VALUES * 10, "b": [*reversed(VALUES)] * 10}
    with build(tmp_path, count, documents=columns) as index:
        for name, column in index.fetch(np.arange(count)).items():
            assert repr(column.tolist()) == repr([*map(stored, columns[name])])
        for row in index.search(make(count)[5], 20, fields=True).rows():
            assert repr([row["a"], row["b"]]) == repr([stored(columns[name][row["id"]]) for name in "ab"])


def test_hits_share_no_list(tmp_path):
    with build(tmp_path, documents={"tags": [["a"]] * 300}) as index:
        found = index.search(np.stack([make(1)[0]] * 3), 2, fields=["tags"])
        found.fields["tags"][0, 0].append("b")
        assert found.fields["tags"][1:].tolist() == [[["a"], ["a"]]] * 2
        columns = index.fetch([4, 4, 5])
        columns["tags"][0].append("b")
        assert columns["tags"].tolist() == [["a", "b"], ["a"], ["a"]]


def test_documents_of_a_megabyte(tmp_path):
    random = np.random.default_rng(0)
    sizes = [1 << 20, 3, 0, (1 << 20) + 17, 4096, 900_000] * 10
    bodies = [random.bytes(size) for size in sizes]
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(60), documents={"body": bodies}, dram="40MiB") as index:
        assert index.fetch(np.arange(60))["body"].tolist() == bodies
        ids = index.add(make(6, seed=1), documents={"body": bodies[:6]})
        index.update([0, 1], make(2, seed=2), documents={"body": [bodies[1], bodies[0]]})
        index.commit()
        index.compact()
        assert index.fetch(ids)["body"].tolist() == bodies[:6]
        assert index.fetch([0, 1, 2, 3])["body"].tolist() == [bodies[1], bodies[0], bodies[2], bodies[3]]
        with pytest.raises(BudgetError, match=r"documents of row 1 have 2\.0 MiB: an index holds up to 1\.2 MiB"):
            index.add(make(2), documents={"body": [b"", bytes(2 << 20)]})
        assert len(index) == 66
    with pytest.raises(BudgetError, match=r"documents of row 0 have 1\.0 MiB"):
        build(tmp_path, 60, name="small", documents={"body": bodies}, dram="4MiB").close()


def cursor(count):
    """Yield rows as a database does, so that only a few are held at a time."""
    for row in range(count):
        yield {"title": f"title {row}", "vector": make(1, seed=row)[0], "meta": {"row": row}}


def test_documents_stream_beside_vectors(tmp_path):
    count, ahead = 700, []

    def counted():
        for number, row in enumerate(cursor(count)):
            ahead.append(number)
            yield row

    one, two = itertools.tee(counted())
    taken = []

    def blocks():
        while block := list(itertools.islice(one, 64)):
            yield np.stack([row["vector"] for row in block])

    def documents():
        for number, row in enumerate(two):
            taken.append(len(ahead) - number)
            yield {"title": row["title"], "meta": row["meta"]}

    with ZoomIndex.build(tmp_path / "index", blocks(), documents=documents(), dram="4MiB") as index:
        found = index.fetch(np.arange(count))
        assert found["title"].tolist() == [f"title {row}" for row in range(count)]
        assert found["meta"].tolist() == [{"row": row} for row in range(count)]
        np.testing.assert_array_equal(index.reconstruct([123])[0], make(1, seed=123)[0])
    assert max(taken) <= 64
    with ZoomIndex.build(
        tmp_path / "columns", make(count), documents={"title": (f"t{row}" for row in range(count))}, dram="4MiB"
    ) as index:
        assert index.fetch([5, 699])["title"].tolist() == ["t5", "t699"]


@pytest.mark.parametrize(
    ("documents", "error", "words"),
    [
        ({"x": ["a"] * 299}, ValueError, "299 values: expected 300"),
        (({"x": 1} for _ in range(299)), ValueError, "ended after 299 rows"),
        ({"x": iter(range(301))}, ValueError, "goes on after 300"),
        ({"x": [object()] * 300}, TypeError, "documents\\['x'\\] of row 0 holds a object"),
        ({"price": ["a"] * 300}, ValueError, "'price' is an attribute and a document"),
        ({f"n{row}": [None] * 300 for row in range(1001)}, ValueError, "1,001 names: expected at most 1,000"),
    ],
    ids=["short", "stream-short", "stream-long", "object", "attribute", "names"],
)
def test_a_build_refuses_documents_and_leaves_nothing(tmp_path, documents, error, words):
    with pytest.raises(error, match=words):
        build(tmp_path, documents=documents, attributes={"price": np.arange(300)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("documents", "attributes", "error", "words"),
    [
        ({"x": ["a"]}, None, ValueError, "1 values: expected 3"),
        (iter([{}] * 3), None, TypeError, "an iterator is for build"),
        ({"x": [1, 2, {3}]}, None, TypeError, "row 2 holds a set"),
        ({"price": [1, 2, 3]}, None, ValueError, "is an attribute and a document"),
        (None, {"title": [1, 2, 3]}, ValueError, "is an attribute and a document"),
        (None, {"tags": [["a"], [["b"]], None]}, TypeError, "a list in the list of row 1: .*documents= stores any"),
        (None, {"tags": [["a"], ["b", None], None]}, ValueError, "None in the list of row 1: .*without missing"),
        (None, {"tags": [["a"], "b", None]}, TypeError, "holds lists and, in row 1, a str"),
        (None, {"tags": ["a", ["b"], None]}, TypeError, "holds a list in row 1"),
        (None, {"tags": [["a"], [1], []]}, TypeError, "holds str in the list of row 0 and int64 in the list of row 1"),
        (None, {"tags": [[], None, []]}, ValueError, "is null or an empty list in every row"),
        (None, {"price": [[1], [2], [3]]}, TypeError, "attribute 'price' is int64, but list\\[int64\\] came"),
        (None, {"tags": np.zeros((3, 2))}, ValueError, r"shape \(3, 2\): expected \[3\]; for a list .*tolist"),
        (None, {"raw": [b"a", b"b", b"c"]}, TypeError, "documents= stores dicts and bytes"),
    ],
    ids=[
        "short",
        "stream",
        "set",
        "attribute",
        "document",
        "nested",
        "null",
        "text",
        "list",
        "kinds",
        "empty",
        "lists-of-known",
        "array",
        "bytes",
    ],
)
def test_a_change_that_is_refused_changes_nothing(tmp_path, documents, attributes, error, words):
    with build(tmp_path, documents={"title": ["a"] * 300}, attributes={"price": np.arange(300)}) as index:
        fields, held = index.fields, index.stats()["planned_bytes"]
        with pytest.raises(error, match=words):
            index.add(make(3), None, attributes, documents)
        with pytest.raises(error, match=words):
            index.update([1, 2, 3], make(3), attributes, documents)
        assert (index.fields, index.stats()["planned_bytes"], len(index)) == (fields, held, 300)
        assert index.fetch([1])["title"].tolist() == ["a"]


@pytest.mark.parametrize("argument", ["documents", "attributes"])
def test_a_table_with_two_columns_of_a_name_is_refused(tmp_path, argument):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_arrays([pyarrow.array(range(300))] * 2, ["x", "x"])
    with pytest.raises(ValueError, match=f"{argument} has 2 columns 'x'"):
        build(tmp_path, **{argument: table})
    assert list(tmp_path.iterdir()) == []


def test_fields_are_named(tmp_path):
    with build(tmp_path, documents={"title": ["a"] * 300}, attributes={"price": np.arange(300)}) as index:
        assert index.fields == {"price": "int64", "title": "document"}
        query = make(1)[0]
        assert list(index.search(query, 2, fields=["title", "price", "title"]).fields) == ["title", "price"]
        for nothing in (None, False, []):
            assert index.search(query, 2, fields=nothing).fields == {}
        for wrong in ("title", 3, [3], b"title", {"title"}):
            for ask in (index.search, index.range_search):
                with pytest.raises(TypeError, match="expected True for all fields, or a list of their names"):
                    ask(query, 2, fields=wrong)
            with pytest.raises(TypeError, match="expected True"):
                index.fetch([1], wrong)
        for ask in (index.search, index.range_search):
            with pytest.raises(ValueError, match=r"fields holds 'colour': .* which has 'price', 'title'"):
                ask(query, 2, fields=["colour"])
        with pytest.raises(KeyError, match="300"):
            index.fetch([1, 300])
        with pytest.raises(TypeError, match="integers as ids"):
            index.fetch(["a"])
        assert [len(column) for column in index.fetch([]).values()] == [0, 0]
    with pytest.raises(ClosedError):
        index.fetch([1])
    with (
        build(tmp_path, 30, name="plain") as index,
        pytest.raises(ValueError, match="none: give attributes= or documents="),
    ):
        index.search(query, 2, fields=["title"])


def test_vectors_of_negative_ids_have_fields(tmp_path):
    ids = [*range(-400, -100)]
    with build(tmp_path, ids=ids, documents={"title": [str(i) for i in ids]}, attributes={"number": ids}) as index:
        index.add(make(1, seed=3), ids=[-2], attributes={"number": [-2]}, documents={"title": ["-2"]})
        query = make(1)[0]
        for found in (
            index.search(query, 20, fields=True), index.range_search(query, 1e9, fields=True),
            *index.search_iter(query, 20, fields=True), index.search(query, 400, where="number < 0", fields=True),
        ):  # fmt: skip
            real = found.ids != -1
            assert found.fields["number"][real].tolist() == found.ids[real].tolist()
            assert found.fields["title"][real].tolist() == [str(i) for i in found.ids[real].tolist()]


def test_attributes_of_every_type_come_back(tmp_path):
    count = 120
    days = np.arange(count).astype("M8[D]")
    columns = {
        "i": np.ma.MaskedArray(np.arange(count) - 2**62, np.arange(count) % 3 == 0),
        "f": np.where(np.arange(count) % 4, np.arange(count) / 7, np.nan),
        "b": [None if row % 5 == 0 else row % 2 == 0 for row in range(count)],
        "s": [None if row % 6 == 0 else "" if row % 6 == 1 else f"漢{row}" for row in range(count)],
        "d": np.where(np.arange(count) % 7, days, np.datetime64("NaT")),
    }
    with build(tmp_path, count, attributes=columns) as index:
        index.add(make(2, seed=1), attributes={"i": [1, None], "s": ["x", None], "d": [days[5], None]})
        index.add(make(1, seed=2))

        def look():
            rows = index.search(make(count)[0], 200, fields=True).rows()
            assert len(rows) == count + 3
            for row in rows:
                at = row["id"]
                if at >= count:
                    expected = {120: (1, "x", days[5].astype("M8[us]").item())}.get(at, (None, None, None))
                    assert (row["i"], row["s"], row["d"]) == expected
                    assert (row["f"], row["b"]) == (None, None)
                    continue
                assert row["i"] == (None if at % 3 == 0 else at - 2**62)
                assert row["f"] == (None if at % 4 == 0 else at / 7)
                assert row["b"] == columns["b"][at]
                assert row["s"] == columns["s"][at]
                assert row["d"] == (None if at % 7 == 0 else days[at].astype("M8[us]").item())
            kinds = {name: column.dtype.name for name, column in index.fetch([0, 120]).items()}
            assert kinds == {"i": "int64", "f": "float64", "b": "bool", "s": "object", "d": "datetime64[us]"}

        look()
        index.commit()
        look()


def test_results_unpack_as_those_of_faiss(tmp_path):
    with build(tmp_path) as index:
        distances, ids = found = index.search(make(3), 2)
        assert distances is found.distances
        assert ids is found.ids
        offsets, distances, ids = around = index.range_search(make(3), 2.0)
        assert offsets is around.offsets
        assert distances is around.distances
        assert ids is around.ids


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("options", [{}, {"where": "price < 3"}, {"max_reads": 1}, {"candidates": 50}], ids=str)
def test_fewer_than_k_are_padded_and_left_out_of_rows(tmp_path, strings, options):
    names = np.arange(20).astype(str).astype(object) if strings else np.arange(20)
    documents = {"title": [f"title {row}" for row in range(20)]}
    with build(tmp_path, 20, ids=names, attributes={"price": np.arange(20)}, documents=documents) as index:
        result = index.search(make(2), 50, fields=True, **options)
        distances, ids = result
        there = 3 if "where" in options else 20
        assert ids.shape == distances.shape == result.fields["title"].shape == result.fields["price"].shape == (2, 50)
        assert (ids[:, there:] == (np.array(None) if strings else -1)).all()
        assert np.isinf(distances[:, there:]).all()
        assert (result.fields["title"][:, there:] == np.array(None)).all()
        assert np.ma.getmaskarray(result.fields["price"])[:, there:].all()
        for rows in result.rows():
            assert [row["title"] for row in rows] == [f"title {row['id']}" for row in rows]
            assert len(rows) == there
            assert sorted(rows[0]) == ["distance", "id", "price", "title"]
        one = index.search(make(2)[0], 50, fields=["title"], **options)
        assert [row["id"] for row in one.rows()] == [row["id"] for row in result.rows()[0]]
        assert len(result.to_arrow()) == 2 * there
    with ZoomIndex.build(
        tmp_path / "empty", make(0), documents={"title": []}, ids=[] if not strings else np.array([], str), dram="1MiB"
    ) as index:
        found = index.search(make(1), 3, fields=True)
        assert found.rows() == [[]]
        assert found.fields["title"].tolist() == [[None] * 3]


def test_iterators_and_radii_have_fields_too(tmp_path):
    titles = [f"title {row}" for row in range(300)]
    with build(tmp_path, documents={"title": titles}) as index:
        seen = []
        for found in index.search_iter(make(1)[0], 40, fields=["title"]):
            assert [row["title"] for row in found.rows()] == [titles[name] for name in found.ids]
            seen += found.ids.tolist()
        assert sorted(seen) == list(range(300))
        around = index.range_search(make(3), 3.0, fields=["title"])
        assert [len(rows) for rows in around.rows()] == np.diff(around.offsets).tolist()
        assert around.fields["title"].tolist() == [titles[name] for name in around.ids]
        assert around.stats["payload_pages"] > 0
        assert index.range_search(make(1), 3.0).stats["payload_pages"] == 0
        table = around.to_arrow()
        assert table["query"].to_pylist() == np.repeat([0, 1, 2], np.diff(around.offsets)).tolist()
        assert table["rank"].to_pylist() == [rank for rows in around.rows() for rank in range(len(rows))]


def test_tables_hold_the_hits(tmp_path):
    count = 40
    documents = {
        "text": [f"t{row}" if row % 2 else None for row in range(count)],
        "raw": [bytes([row]) for row in range(count)],
        "tags": [["a", "b"][: row % 3] for row in range(count)],
        "any": [1, "a", {"x": [None]}, None] * 10,
        "big": [2**70] * count,
        "bool": [True, None] * 20,
        "id": list(range(count)),
        "rank": ["r"] * count,
    }
    attributes = {"price": np.ma.MaskedArray(np.arange(count), np.arange(count) < 20), "f": [0.5, None] * 20}
    attributes["day"] = np.arange(count).astype("M8[D]")
    with build(tmp_path, count, attributes=attributes, documents=documents) as index:
        result = index.search(make(2), 30, fields=True)
    arrow = result.to_arrow()
    assert len(arrow) == 60
    kinds = {name: str(arrow.schema.field(name).type) for name in arrow.column_names}
    assert kinds == {
        "query": "int64", "rank": "int64", "id": "int64", "distance": "float", "price": "int64", "f": "double",
        "day": "timestamp[us]", "text": "string", "raw": "binary", "tags": "list<item: string>", "any": "string",
        "big": "string", "bool": "bool", "id_": "int64", "rank_": "string",
    }  # fmt: skip
    rows = arrow.to_pylist()
    plain = [row for each in result.rows() for row in each]
    for row, expected in zip(rows, plain, strict=True):
        assert expected["id_"] == expected["id"] == row["id_"] == row["id"]
        for name in ("price", "f", "day", "text", "raw", "tags", "bool"):
            assert row[name] == expected[name]
        assert row["any"] is None if expected["any"] is None else json.loads(row["any"]) == expected["any"]
        assert json.loads(row["big"]) == expected["big"]
    with build(tmp_path, 10, name="mixed", documents={"mixed": [b"a", {}] * 5}) as index:
        found = index.search(make(1), 5, fields=True)
    with pytest.raises(TypeError, match="field 'mixed' holds bytes and other values"):
        found.to_arrow()
    assert len(found.rows()[0]) == 5


def test_tables_of_pandas_and_polars(tmp_path):
    attributes = {"n": np.ma.MaskedArray(np.arange(30), np.arange(30) % 2), "b": [True, None, False] * 10}
    attributes["d"] = np.arange(30).astype("M8[D]")
    with build(tmp_path, 30, attributes=attributes, documents={"meta": [{"a": 1}, ["x"], None] * 10}) as index:
        result = index.search(make(2), 9, fields=True)
    plain = [row for each in result.rows() for row in each]
    for name, call in (("pandas", result.to_pandas), ("polars", result.to_polars)):
        try:
            __import__(name)
        except ImportError:
            with pytest.raises(ImportError, match=f"pip install 'memhier\\[{name}\\]'"):
                call()
            continue
        frame = call()
        assert [*frame.columns] == ["query", "rank", "id", "distance", "n", "b", "d", "meta"]
        assert frame["id"].to_list() == [row["id"] for row in plain]
        numbers = frame["n"].to_list()
        assert [None if row["n"] is None else row["n"] for row in plain] == [
            None if type(number).__name__ == "NAType" else number for number in numbers
        ]
        if name == "pandas":
            assert frame["meta"].to_list() == [row["meta"] for row in plain]
        else:
            assert [None if x is None else json.loads(x) for x in frame["meta"]] == [row["meta"] for row in plain]


def test_an_index_of_the_version_before_opens(tmp_path):
    """Version 6 is this one without documents."""
    build(tmp_path, attributes={"price": np.arange(300)}).close()
    with Store.open(tmp_path / "index", kind=KIND, writable=True) as store, store.begin() as tx:
        about = json.loads(store.get("index"))
        assert about.pop("documents") == []
        tx.put("index", json.dumps(about | {"version": 6}).encode())
        tx.commit()
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert index.search(make(1)[0], 1, fields=True).rows() == [{"id": 0, "distance": 0.0, "price": 0}]
        index.add(make(1, seed=5), documents={"title": ["new"]})
        index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        assert index.fetch([0, 300])["title"].tolist() == [None, "new"]


def test_a_damaged_page_is_found(tmp_path):
    build(tmp_path, documents={"title": [f"title {row}" * (row % 40) for row in range(300)]}).close()
    segments = tmp_path / "index" / "segments"
    for name in ("p0-docs.", "p0-docs-rows."):
        (path,) = segments.glob(f"{name}*")
        raw = bytearray(path.read_bytes())
        raw[1000] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CorruptionError, match=name[:-1]):
            ZoomIndex.open(tmp_path / "index", verify="open")
        if name == "p0-docs-rows.":  # held in DRAM
            with pytest.raises(CorruptionError, match=name[:-1]):
                ZoomIndex.open(tmp_path / "index")
            continue
        with ZoomIndex.open(tmp_path / "index") as index:
            with pytest.raises(CorruptionError, match=name[:-1]):
                index.search(make(300), 5, fields=["title"])
            with pytest.raises(CorruptionError, match=name[:-1]):
                index.fetch(np.arange(300))
            assert (index.search(make(300), 1).ids[:, 0] == np.arange(300)).all()
            assert any(name[:-1] in problem for problem in index.check())
        raw[1000] ^= 1
        path.write_bytes(raw)


def test_damage_without_checksums_names_the_file(tmp_path):
    build(tmp_path, documents={"title": ["titles"] * 300}).close()
    (path,) = (tmp_path / "index" / "segments").glob("p0-docs.*")
    good = path.read_bytes()
    update = {"documents": {"title": [None] * 300}}
    for damaged in (good.replace(b"titles", b"\xfftitle"), good.replace(b"\x01\x06\x00\x00", b"\x77\x06\x00\x00")):
        path.write_bytes(damaged)
        with ZoomIndex.open(tmp_path / "index", verify="off") as index, pytest.raises(CorruptionError) as caught:
            index.fetch([0], fields=["title"])
        assert str(path) in str(caught.value)
    opened = ZoomIndex.open(tmp_path / "index", verify="off", writable=True)
    with opened as index, pytest.raises(CorruptionError) as caught:
        index.update(np.arange(300), make(300), **update)
    assert str(path.parent) in str(caught.value)


CHANGES = {
    "add": lambda index: index.add(make(90, seed=7), documents={"body": [bytes(500)] * 90, "new": ["x"] * 90}),
    "update": lambda index: index.update(np.arange(50, 120), make(70), documents=[{"body": {"new": [1]}}] * 70),
    "commit": lambda index: index.commit(),
    "compact": lambda index: index.compact(),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_a_full_disk_changes_nothing(tmp_path, small_sizes, switched_files, name):
    bodies = [f"body {row} " * (row % 30) for row in range(200)]
    place = Path(tempfile.mkdtemp(dir=FAST))
    ZoomIndex.build(place / "index", make(200), documents={"body": bodies}, dram="4MiB").close()

    def opened(number):
        shutil.copytree(place / "index", place / f"copy{number}")
        switch = switched_files()
        index = ZoomIndex(Store.open(place / f"copy{number}", kind=KIND, writable=True, files=switch))
        index.add(make(40, seed=2), documents={"body": [b"waiting"] * 40})
        index.remove(np.arange(10, 20))
        return index, switch

    left = np.setdiff1d(np.arange(240), np.arange(10, 20))
    index, switch = opened(0)
    with index:
        switch.files = FaultyFiles(RealFiles(), 0, Fault.SHORT_WRITE)
        CHANGES[name](index)
        last = len(switch.files.calls)
    for number, fail_at in enumerate(sorted({*range(2, last, max(1, last // 8)), last - 1}), 1):
        index, switch = opened(number)
        with index:
            before, fields = index.fetch(left)["body"].tolist(), index.fields
            switch.files = FaultyFiles(RealFiles(), fail_at, Fault.SHORT_WRITE)
            try:
                CHANGES[name](index)
            except OSError:
                assert index.fields == fields
                assert index.fetch(left)["body"].tolist() == before
        with ZoomIndex.open(place / f"copy{number}", verify="open") as index:
            assert index.fetch([0, 199])["body"].tolist()[1] == bodies[199]
    shutil.rmtree(place)


def test_the_pages_of_documents_are_counted_and_few(tmp_path):
    """Neighbours of a query share pages of documents, and those of a batch are read together."""
    count = 5000
    random = np.random.default_rng(0)
    centres = random.normal(size=(80, 16)) * 5
    vectors = (centres[random.integers(0, 80, count)] + random.normal(size=(count, 16))).astype(np.float32)
    titles = [f"{row:06}" + "x" * 190 for row in range(count)]
    bodies = {"fixed": titles, "varied": [title[: 100 + row % 90] for row, title in enumerate(titles)]}
    for name, column in bodies.items():
        with ZoomIndex.build(tmp_path / name, vectors, documents={"body": column}, dram="4MiB") as index:
            before = index.stats()["pages"]
            result = index.search(vectors[:64], 10, fields=["body"])
            stats = result.stats
            assert index.stats()["pages"] - before == stats["pages"] + stats["payload_pages"]
            assert 0 < stats["payload_bytes"] == 4096 * stats["payload_pages"]
            assert stats["payload_reads"] <= stats["payload_pages"] < len(np.unique(result.ids)) + 9
            alone = index.search(vectors[0], 10, fields=["body"]).stats
            assert alone["payload_pages"] <= 10
            assert index.search(vectors[0], 10).stats["payload_pages"] == 0
            # 4 bytes for each page, and a little for the part: nothing for a vector.
            assert index.stats()["planned_bytes"] <= 4 << 20


CORE = """
import json, sys
import numpy as np
from memhier.ann import ZoomIndex
random = np.random.default_rng(0)
vectors = random.normal(size=(400, 8)).astype(np.float32)
documents = {"a": [{"row": row, "x": "y" * (row % 70)} for row in range(400)], "b": ["t" * row for row in range(400)]}
with ZoomIndex.build(sys.argv[1], vectors, documents=documents, attributes={"p": np.arange(400)}, dram="4MiB") as index:
    index.add(vectors[:50] + 0.1, documents={"a": list(range(50))}, attributes={"p": [None] * 49 + [3]})
    index.update([3, 4], vectors[:2], documents={"b": ["new", None]})
    index.commit()
    result = index.search(vectors[:5], 20, recall=1.0, fields=True)
    print(json.dumps([[{**row, "distance": round(row["distance"], 4)} for row in rows] for rows in result.rows()]))
    names = ("payload_reads", "payload_pages", "payload_bytes")
    print(json.dumps([result.stats[name] for name in names][1:]))
"""


def test_the_python_core_gives_the_same(tmp_path):
    found = []
    for native in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", CORE, str(tmp_path / native)], capture_output=True, text=True, check=False,
            env=os.environ | {"MEMHIER_NATIVE": native, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
