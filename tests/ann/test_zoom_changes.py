"""Updates of attributes alone: the columns that they name change, and no vector is written."""

import json
from datetime import datetime

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.storage.catalog import KIND, Description
from memhier.errors import CorruptionError
from memhier.store.store import Store

WORDS = ["a", "bee", "c" * 300, "né", None]
DAYS = [datetime(2020, 1, day) for day in range(1, 5)]
FILTERS = {
    "price < 10": lambda row: row["price"] is not None and row["price"] < 10,
    "lang == 'bee' or price == 3": lambda row: row["lang"] == "bee" or row["price"] == 3,
    "lang is null": lambda row: row["lang"] is None,
    "lang like 'n%'": lambda row: row["lang"] is not None and row["lang"].startswith("n"),
    "not sold": lambda row: row["sold"] is False,
    "weight > 0.5 and day >= '2020-01-03'": lambda row: (
        row["weight"] is not None and row["weight"] > 0.5 and row["day"] is not None and row["day"] >= DAYS[2]
    ),
    "tags contains 'bee'": lambda row: row["tags"] is not None and "bee" in row["tags"],
    "numbers contains 2": lambda row: row["numbers"] is not None and 2 in row["numbers"],
    "numbers contains 2 and not tags contains 'a'": lambda row: (
        row["numbers"] is not None and 2 in row["numbers"] and row["tags"] is not None and "a" not in row["tags"]
    ),
    "price < weight": lambda row: None not in (row["price"], row["weight"]) and row["price"] < row["weight"],
}


def make(count, seed=0, dimension=6):
    return np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)


def value_of(name, rng):
    if rng.random() < 0.15:
        return None
    return {
        "price": lambda: int(rng.integers(0, 20)),
        "weight": lambda: float(rng.random() * 20),
        "sold": lambda: bool(rng.integers(2)),
        "lang": lambda: WORDS[rng.integers(5)],
        "day": lambda: DAYS[rng.integers(4)],
        "tags": lambda: [WORDS[each] for each in rng.integers(0, 4, rng.integers(4))],
        "numbers": lambda: rng.integers(0, 5, rng.integers(4)).tolist(),
    }[name]()


NAMES = ["price", "weight", "sold", "lang", "day", "tags", "numbers"]
FIRST = {
    "price": 1, "weight": 0.5, "sold": True, "lang": "a", "day": DAYS[0], "tags": ["a"], "numbers": [2],
}  # fmt: skip


class Model:
    """An index beside a dict of its fields."""

    def __init__(self, path, seed, strings):
        self.path, self.rng, self.strings, self.next = path, np.random.default_rng(seed), strings, 0
        self.rows = {}
        ids, fields = self.more(120)
        fields[0] = dict(FIRST)
        self.index = ZoomIndex.build(
            path, make(120), ids=ids, attributes=columns(fields), dram="8MiB", grow_to=2000, seed=seed
        )
        self.rows = dict(zip(ids, fields, strict=True))
        self.committed = self.copy()

    def copy(self):
        return {name: dict(row) for name, row in self.rows.items()}

    def more(self, count):
        numbers = range(self.next, self.next + count)
        self.next += count
        fields = [{name: value_of(name, self.rng) for name in NAMES} for _ in numbers]
        return [f"id {number}" if self.strings else number for number in numbers], fields

    def some(self, count):
        every = list(self.rows)
        return [every[at] for at in self.rng.permutation(len(every))[:count]]

    def add(self):
        ids, fields = self.more(int(self.rng.choice([1, 30])))
        fields[0] = dict(FIRST)
        self.index.add(make(len(ids), self.next), ids=ids, attributes=columns(fields))
        self.rows |= dict(zip(ids, fields, strict=True))

    def update(self):
        ids = self.some(int(self.rng.choice([0, 1, 5, 60])))
        names = [NAMES[at] for at in self.rng.permutation(len(NAMES))[: self.rng.integers(1, 4)]]
        given = [{name: value_of(name, self.rng) for name in names} for _ in ids]
        if self.rng.random() < 0.3:  # a dict for each vector, some without a name
            given = [{name: value for name, value in row.items() if self.rng.random() < 0.6} for row in given]
            assert self.index.update(ids, attributes=given) == len(ids)
        else:
            assert self.index.update(ids, attributes=columns(given, names)) == len(ids)
        for each, row in zip(ids, given, strict=True):
            self.rows[each] |= row

    def update_where(self):
        where = list(FILTERS)[self.rng.integers(len(FILTERS))]
        name = NAMES[self.rng.integers(len(NAMES))]
        value = value_of(name, self.rng)
        chosen = [each for each, row in self.rows.items() if FILTERS[where](row)]
        assert self.index.update(where=where, attributes={name: value}) == len(chosen)
        for each in chosen:
            self.rows[each][name] = value

    def upsert(self):
        ids = self.some(9)
        more, _ = self.more(3)
        values = [int(value) for value in self.rng.integers(0, 20, 12)]
        self.index.upsert(ids + more, make(12, self.next), {"price": values})
        for each, value in zip(ids + more, values, strict=True):
            self.rows[each] = self.rows.get(each, dict.fromkeys(NAMES)) | {"price": value}

    def remove(self):
        for each in (ids := self.some(int(self.rng.choice([1, 25])))):
            del self.rows[each]
        self.index.remove(ids)

    def commit(self):
        self.index.commit()
        self.committed = self.copy()

    def compact(self):
        self.index.compact()
        self.committed = self.copy()

    def reopen(self):
        self.index.close()
        self.index = ZoomIndex.open(self.path, writable=True, verify="open")
        self.rows = {name: dict(row) for name, row in self.committed.items()}
        assert self.index.check() == []

    def check(self):
        same(self.index, self.rows)
        assert self.index.memory_bytes <= 8 << 20


def columns(fields, names=NAMES):
    return {name: [row[name] for row in fields] for name in names}


def same(index, rows):
    """Compare all fields, and the filters, one by one and together."""
    assert len(index) == len(rows)
    found = index.fetch(list(rows)) if rows else {}
    for name, column in found.items():
        values = column.tolist(None) if isinstance(column, np.ma.MaskedArray) else column.tolist()
        values = [None if value != value else value for value in values]
        expected = [row[name] for row in rows.values()]
        if name == "weight":
            np.testing.assert_equal(values, expected)
        else:
            assert values == expected, name
    for where, chosen in FILTERS.items():
        expected = {name for name, row in rows.items() if chosen(row)}
        assert {name for block in index.ids(where) for name in block.tolist()} == expected, where
    both = index.search(make(len(FILTERS), 9), max(1, len(index)), recall=1.0, where=list(FILTERS)).ids
    for ids, chosen in zip(both.tolist(), FILTERS.values(), strict=True):
        assert {name for name in ids if name not in (-1, None)} == {name for name, row in rows.items() if chosen(row)}


@pytest.mark.parametrize(
    ("seed", "strings"),
    [(1, False), pytest.param(2, True, marks=pytest.mark.long), pytest.param(3, False, marks=pytest.mark.long)],
)
def test_random_changes_equal_those_of_a_dict(tmp_path, small_sizes, seed, strings):
    model = Model(tmp_path / "index", seed, strings)
    steps = [model.update] * 5 + [model.update_where] * 2 + [
        model.add, model.remove, model.upsert, model.commit, model.commit, model.reopen, model.compact,
    ]  # fmt: skip
    for number in range(60):
        steps[model.rng.integers(len(steps))]()
        if number % 4 == 3:
            model.check()
    model.commit()
    model.index.close()
    with ZoomIndex.open(tmp_path / "index") as index:
        same(index, model.rows)
        index.save_to(tmp_path / "copy")
    with ZoomIndex.open(tmp_path / "copy", writable=True) as index:
        assert index.check() == []
        index.compact()
        same(index, model.rows)


def stored(path):
    with Store.open(path, kind=KIND) as store:
        return Description.decode(store.get("index"), store.path), store.segments()


def built(path, count=4096):
    return ZoomIndex.build(
        path, make(count, dimension=64), dram="8MiB", attributes={"price": np.arange(count), "lang": ["en"] * count}
    )


def test_an_update_writes_its_column_alone(tmp_path):
    with built(tmp_path / "index") as index:
        _, before = stored(tmp_path / "index")
        index.update(np.arange(0, 4000, 100), attributes={"price": np.arange(40)})
        index.commit()
        about, after = stored(tmp_path / "index")
        new = {name for name in after if name not in before or not after[name].is_same(before[name])}
        (generation, rows), *others = about.parts[0]["changes"]["price"]
        assert (rows, others) == (40, [])
        assert new == {f"p0-c{generation}-price", f"p0-r{generation}-price", "radii"}
        assert after.keys() >= before.keys()
        assert sum(after[name].payload for name in new - {"radii"}) == 40 * 12
        assert index.stats()["calibrated_vectors"] == 4096
        assert about.calibration.changes == 0


def test_changes_are_joined_and_a_column_is_written_whole(tmp_path):
    expected, longest = np.arange(4096), 0
    with built(tmp_path / "index") as index:
        for number in range(60):
            ids = np.random.default_rng(number).permutation(4096)[:12]
            expected[ids] = -number
            index.update(ids, attributes={"price": expected[ids]})
            index.commit()
            about, segments = stored(tmp_path / "index")
            changes = about.parts[0]["changes"]["price"]
            longest = max(longest, len(changes))
            assert sum(rows or 0 for _, rows in changes) < 4096 / 8
            kept = {f"p0-{kind}{at}-price" for at, rows in changes for kind in ("cr" if rows else "c")}
            assert {name for name in segments if name.endswith("price") and name != "p0-a-price"} == kept
            assert ("p0-a-price" in segments) == (changes[0][1] is not None)
            np.testing.assert_array_equal(index.fetch(np.arange(4096), ["price"])["price"], expected)
        assert changes[0][1] is None
        assert longest <= 7
    with ZoomIndex.open(tmp_path / "index") as index:
        np.testing.assert_array_equal(index.fetch(np.arange(4096), ["price"])["price"], expected)


def test_no_word_outlasts_its_rows(tmp_path):
    with built(tmp_path / "index") as index:
        for number in range(30):
            index.update([3, 700], attributes={"lang": [f"{number}" * 1000, None]})
            index.commit()
        about, segments = stored(tmp_path / "index")
        assert len(about.parts[0]["changes"]["lang"]) == 1
        words = [each.payload for name, each in segments.items() if name.endswith("lang-words")]
        assert sum(words) < 4000
        assert index.fetch([3, 4, 700], ["lang"])["lang"].tolist() == ["29" * 1000, "en", None]


def test_a_reader_keeps_its_values_until_it_refreshes(tmp_path):
    with built(tmp_path / "index") as index, ZoomIndex.open(tmp_path / "index") as reader:
        for number in range(3):
            index.update(where="price < 1000", attributes={"price": number - 5})
            index.commit()
        assert sorted(np.concatenate([*reader.ids("price < 3")]).tolist()) == [0, 1, 2]
        assert reader.fetch([1, 2000], ["price"])["price"].tolist() == [1, 2000]
        assert reader.refresh()
        assert sum(map(len, reader.ids("price == -3"))) == 1000
        assert reader.fetch([1, 2000], ["price"])["price"].tolist() == [-3, 2000]


def test_changes_without_a_commit_are_gone(tmp_path, small_sizes):
    """Also those that were written, as many waited."""
    with built(tmp_path / "index") as index:
        index.update(np.arange(10), attributes={"price": [-1] * 10})
        index.commit()
        _, before = stored(tmp_path / "index")
        index.update(where="price >= 2000", attributes={"price": -2})
        index.add(make(3, dimension=64), attributes={"price": [1, 2, 3]})
        _, between = stored(tmp_path / "index")
        assert between.keys() > before.keys()
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert stored(tmp_path / "index")[1].keys() == before.keys()
        assert sum(map(len, index.ids("price == -1"))) == 10
        assert not sum(map(len, index.ids("price == -2")))


@pytest.mark.parametrize("published", [False, True])
def test_a_prepared_commit_has_the_changes(tmp_path, published):
    with built(tmp_path / "index") as index:
        index.update(where="price < 5", attributes={"price": -1})
        index.prepare(1)
        with ZoomIndex.open(tmp_path / "index") as reader:
            assert not sum(map(len, reader.ids("price == -1")))
        if published:
            index.publish()
        else:
            index.withdraw()
            index.update([0], attributes={"price": [-1]})
            assert sum(map(len, index.ids("price == -1"))) == 5
            index.commit()
    with ZoomIndex.open(tmp_path / "index", verify="open") as index:
        assert sum(map(len, index.ids("price == -1"))) == 5
        assert index.check() == []


def test_an_error_changes_nothing(tmp_path, monkeypatch):
    with built(tmp_path / "index") as index:
        for values in ({"price": ["a"]}, {"price": [1.5]}, {"new": [None]}, {"price": [1, 2]}):
            with pytest.raises((TypeError, ValueError)):
                index.update([4], attributes=values)
        with pytest.raises(KeyError):
            index.update([4, 9999], attributes={"price": [1, 2]})
        index.update([4], attributes={"price": [-4]})

        def fail(*arguments, **options):
            raise OSError("no room")

        with monkeypatch.context() as patch:
            patch.setattr("memhier.ann.zoom.renewal.changes.write_attributes", fail)
            with pytest.raises(OSError, match="no room"):
                index.commit()
        assert index.fetch([3, 4], ["price"])["price"].tolist() == [3, -4]
        index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        assert index.fetch([3, 4], ["price"])["price"].tolist() == [3, -4]


@pytest.mark.parametrize("damage", ["unknown", "late", "order", "beyond", "short", "gone"])
def test_a_damaged_change_is_told(tmp_path, damage):
    with built(tmp_path / "index") as index:
        index.update([4, 70, 900], attributes={"price": [1, 2, 3]})
        index.commit()
    with Store.open(tmp_path / "index", kind=KIND, writable=True) as store, store.begin() as tx:
        about = json.loads(store.get("index"))
        changes = about["parts"][0]["changes"]
        generation = changes["price"][0][0]
        if damage == "unknown":
            changes["other"] = changes.pop("price")
        elif damage == "late":
            changes["price"].append([generation, None])
        elif damage == "gone":
            changes["price"] = [[generation + 1, 3]]
        else:
            rows = {"order": [4, 900, 70], "beyond": [4, 70, 4096], "short": [4, 70]}[damage]
            changes["price"] = [[99, 3]]
            tx.segment("p0-r99-price").append(np.array(rows, "<u4"))
            tx.segment("p0-c99-price").append(np.array([1, 2, 3], "<i8"))
        tx.put("index", json.dumps(about).encode())
        tx.commit()
    with pytest.raises(CorruptionError):
        ZoomIndex.open(tmp_path / "index")
