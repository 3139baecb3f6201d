"""An update of vectors: attributes that are not given are kept."""

import tracemalloc

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.storage.changes import Change

LANGS = ["en", "de", None]


def make(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def columns(count, seed):
    random = np.random.default_rng(seed)
    values = {
        "price": [None if each == 0 else int(each) for each in random.integers(0, 30, count)],
        "weight": [None if each < 0.1 else float(each) for each in random.random(count)],
        "sold": [[True, False, None][each] for each in random.integers(0, 3, count)],
        "lang": [LANGS[each] for each in random.integers(0, 3, count)],
    }
    for column, value in zip(values.values(), (7, 0.5, True, "en"), strict=True):
        column[0] = value  # a column of nulls alone has no type
    return values


def selected(index, where):
    found = index.search(np.zeros(index.dimension), max(1, len(index)), recall=1.0, where=where).ids
    return {name for name in found.tolist() if name not in (-1, None)}


def same(index, rows):
    """Whether filters find just the rows of the model that have each value, and those that have none."""
    names = {name for row in rows.values() for name in row}
    for name in names:
        for value in {row.get(name) for row in rows.values()}:
            shown = "null" if value is None else repr(value).lower() if isinstance(value, bool) else repr(value)
            where = f"{name} is null" if value is None else f"{name} == {shown}"
            if selected(index, where) != {each for each, row in rows.items() if row.get(name) == value}:
                return False
    return True


def as_rows(values, ids):
    return {each: {name: column[at] for name, column in values.items()} for at, each in enumerate(ids)}


@pytest.mark.long
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_attributes_that_are_not_given_are_kept(tmp_path, small_sizes, strings, spilled):
    """Of vectors that wait, of those that were written, and of some of each; given whole, in part, or not at all."""
    every = [f"name{number}" for number in range(90)] if strings else list(range(90))
    first, more = columns(60, 1), columns(30, 2)
    random = np.random.default_rng(3)
    with ZoomIndex.build(tmp_path / "index", make(60), ids=every[:60], attributes=first, dram="4MiB") as index:
        index.add(make(30, 1), ids=every[60:], attributes=more)
        if spilled:
            index.commit()
        rows = as_rows(first, every[:60]) | as_rows(more, every[60:])
        assert same(index, rows)
        for number in range(8):
            chosen = [every[each] for each in random.permutation(90)[: [1, 3, 17, 60][number % 4]]]
            values = columns(len(chosen), 10 + number)
            given = {name: values[name] for name in list(values)[: number % 5]}
            vectors = make(len(chosen), 20 + number)
            if number > 3 and given:  # the vectors stay
                vectors = index.reconstruct(chosen)
                index.update(chosen, attributes=given)
            else:
                index.update(chosen, vectors, given or None)
            for name, row in as_rows(given, chosen).items():
                rows[name] |= row
            np.testing.assert_array_equal(index.reconstruct(chosen), vectors)
            assert same(index, rows)
        index.compact()
        assert same(index, rows)
    with ZoomIndex.open(tmp_path / "index") as index:
        assert same(index, rows)


def test_a_dict_for_each_vector_keeps_the_names_that_it_has_not(tmp_path):
    values = {"price": [1, 2, 3], "lang": ["en", "de", "fr"]}
    with ZoomIndex.build(tmp_path / "index", make(3), attributes=values, dram="4MiB") as index:
        index.update([0, 1, 2], make(3, 1), [{"price": 10}, {"lang": None}, {}])
        assert same(index, as_rows({"price": [10, 2, 3], "lang": ["en", None, "fr"]}, range(3)))


def test_a_new_attribute_in_an_update_leaves_the_others(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        index.update([1], make(1, 1), {"lang": ["en"]})
        assert same(index, {0: {"price": 1}, 1: {"price": 2, "lang": "en"}, 2: {"price": 3}})


def test_a_new_attribute_of_no_vectors_is_null_for_those_that_wait(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        index.add(make(2, 1), attributes={"price": [4, 5]})
        index.add(make(0), attributes={"lang": np.array([], "U1")})
        assert selected(index, "lang is null") == {0, 1, 2, 3, 4}
        assert index.fetch([3], ["lang"])["lang"].tolist() == [None]


def test_null_given_as_a_value_is_null(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        index.update([1], make(1, 1), {"price": [None]})
        assert same(index, {0: {"price": 1}, 1: {"price": None}, 2: {"price": 3}})


def test_an_update_that_is_refused_changes_nothing(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        for change, error in (
            (lambda: index.update([1, 9], make(2)), KeyError),
            (lambda: index.update([1], make(2)), ValueError),
            (lambda: index.update([1], make(1), {"price": ["text"]}), TypeError),
            (lambda: index.update([1], make(1), 7), TypeError),
            (lambda: index.update([1]), ValueError),
            (lambda: index.update([1, 9], attributes={"price": [1, 2]}), KeyError),
            (lambda: index.update([1], attributes={"price": [1, 2]}), ValueError),
            (lambda: index.update([1], attributes={"price": ["text"]}), TypeError),
        ):
            with pytest.raises(error):
                change()
        assert same(index, {0: {"price": 1}, 1: {"price": 2}, 2: {"price": 3}})
        np.testing.assert_array_equal(index.reconstruct([0, 1, 2]), make(3))


WHERES = {
    "price < 10": lambda row: row["price"] is not None and row["price"] < 10,
    "not (lang == 'en') and weight >= 0.5": lambda row: (
        row["lang"] not in ("en", None) and row["weight"] is not None and row["weight"] >= 0.5
    ),
    "sold is null or price == 29": lambda row: row["sold"] is None or row["price"] == 29,
    "price > 1000": lambda row: False,
    "price is null or price is not null": lambda row: True,
}


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_filter_removes_just_the_rows_that_it_finds(tmp_path, small_sizes, strings, spilled):
    """Also rows that wait, and beside rows removed before; again after a commit and an opening."""
    every = [f"name{number}" for number in range(190)] if strings else list(range(190))
    first, more = columns(130, 1), columns(60, 2)
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(130), ids=every[:130], attributes=first, dram="4MiB") as index:
        index.add(make(60, 1), ids=every[130:], attributes=more)
        if spilled:
            index.commit()
        rows = as_rows(first, every[:130]) | as_rows(more, every[130:])
        for where, fulfils in WHERES.items():
            gone = [each for each, row in rows.items() if fulfils(row)]
            before = index.search(np.zeros(6), 5, recall=1.0, where=where).ids  # its bitmap is in the cache
            assert index.remove(where=where) == len(gone)
            assert selected(index, where) == set()
            assert set(before.tolist()) <= {*gone, -1, None}
            rows = {each: row for each, row in rows.items() if each not in set(gone)}
            assert len(index) == len(rows)
            assert index.contains(every).tolist() == [each in rows for each in every]
            assert index.remove(where=where) == 0
            index.commit(compact=len(rows) > 40)
            assert same(index, rows)
            if len(rows) > 1:
                assert index.remove([next(iter(rows))]) == 1
                rows.pop(next(iter(rows)))
    with ZoomIndex.open(path) as index:
        assert len(index) == 0
        assert index.check() == []


@pytest.mark.long
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_filter_updates_just_the_rows_that_it_finds(tmp_path, small_sizes, strings, spilled):
    """Also rows that wait, rows beside removed ones, rows whose new value no longer fulfils it, and a new attribute."""
    every = [f"name{number}" for number in range(190)] if strings else list(range(190))
    first, more = columns(130, 1), columns(60, 2)
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(130), ids=every[:130], attributes=first, dram="4MiB") as index:
        index.add(make(60, 1), ids=every[130:], attributes=more)
        if spilled:
            index.commit()
        assert index.remove(every[5:9]) == 4
        rows = as_rows(first, every[:130]) | as_rows(more, every[130:])
        rows = {each: row for each, row in rows.items() if each not in every[5:9]}
        before = index.reconstruct([*rows])
        for number, (where, fulfils) in enumerate(WHERES.items()):
            values = [
                {"price": 29},
                {"lang": None, "sold": True},
                {"new": "x", "weight": 1},
                {"price": 3},
                {"lang": "y"},
            ]
            chosen = [each for each, row in rows.items() if fulfils(row)]
            index.search(np.zeros(6), 5, recall=1.0, where=where)  # its bitmap is in the cache
            assert index.update(where=where, attributes=values[number]) == len(chosen)
            for each in chosen:
                rows[each] |= values[number]
            assert same(index, rows)
            if number % 2:
                index.commit()
        np.testing.assert_array_equal(index.reconstruct([*rows]), before)
        index.commit()
    with ZoomIndex.open(path) as index:
        assert same(index, rows)
        np.testing.assert_array_equal(index.reconstruct([*rows]), before)
        assert index.check() == []


def test_an_update_by_filter_sets_lists_whole(tmp_path):
    tags = [["a"], ["b", "a"], None, []]
    with ZoomIndex.build(tmp_path / "index", make(4), attributes={"tags": tags}, dram="4MiB") as index:
        assert index.update(where="tags contains 'a'", attributes={"tags": ["c", "d"]}) == 2
        assert index.fetch(range(4))["tags"].tolist() == [["c", "d"], ["c", "d"], None, []]
        assert index.update(where="tags contains 'd'", attributes={"tags": []}) == 2
        assert index.update(where="tags is null", attributes={"tags": ["e"]}) == 1
        assert index.fetch(range(4))["tags"].tolist() == [[], [], ["e"], []]


def test_an_update_by_filter_that_is_refused_changes_nothing(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        for options, error in (
            ({"where": "price <"}, ValueError),
            ({"where": "none == 1"}, ValueError),
            ({"where": "price == 'x'"}, TypeError),
            ({"ids": [1], "where": "price == 1"}, ValueError),
            ({}, ValueError),
            ({"where": "price == 1", "attributes": None}, TypeError),
            ({"where": "price == 1", "attributes": {}}, TypeError),
            ({"where": "price == 1", "attributes": [{"price": 1}]}, TypeError),
            ({"where": "price == 1", "attributes": {"price": "text"}}, TypeError),
            ({"where": "price == 99", "attributes": {"price": "text"}}, TypeError),
            ({"where": "price == 1", "attributes": {"price": [1, 2, 3]}}, TypeError),
            ({"where": "price == 1", "attributes": {"new": None}}, ValueError),
            ({"where": "price == 1", "vectors": make(1)}, ValueError),
            ({"where": "price == 1", "documents": {"text": "x"}}, ValueError),
        ):
            with pytest.raises(error):
                index.update(**{"attributes": {"price": 7}} | options)
        assert same(index, {0: {"price": 1}, 1: {"price": 2}, 2: {"price": 3}})
    with ZoomIndex.open(tmp_path / "index") as reader, pytest.raises(OSError, match="writable"):
        reader.update(where="price == 1", attributes={"price": 7})


def test_a_removal_by_filter_waits_for_a_commit(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(70), attributes=columns(70, 1), dram="4MiB") as index:
        gone = index.remove(where="price >= 3")
        assert 0 < gone < 70
        with ZoomIndex.open(tmp_path / "index") as reader:
            assert len(reader) == 70
        index.prepare(1)
        index.withdraw()
        assert len(index) == 70 - gone
        index.commit()
        with ZoomIndex.open(tmp_path / "index") as reader:
            assert len(reader) == 70 - gone
            assert selected(reader, "price >= 3") == set()


def test_a_removal_that_is_refused_removes_nothing(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(30), attributes=columns(30, 1), dram="4MiB") as index:
        for arguments, words in (
            ({}, "neither was given"),
            ({"ids": [1], "where": "price < 3"}, "both were given"),
            ({"where": "price <"}, "or a value"),
            ({"where": "cost < 3"}, "no attribute 'cost'"),
        ):
            with pytest.raises(ValueError, match=words):
                index.remove(**arguments)
        with pytest.raises(TypeError, match="cannot be compared"):
            index.remove(where="price == 'x'")
        with pytest.raises(TypeError, match="where=3"):
            index.remove(where=3)
        assert len(index) == 30
    with ZoomIndex.build(tmp_path / "plain", make(30), dram="4MiB") as index:
        with pytest.raises(ValueError, match="no attributes"):
            index.remove(where="price < 3")
        assert len(index) == 30
    with ZoomIndex.open(tmp_path / "index") as reader, pytest.raises(OSError, match="writable=True"):
        reader.remove(where="price < 3")


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
def test_fields_change_without_their_vectors(tmp_path, small_sizes, metric, dtype):
    """Documents stay where attributes alone are given, and the other way round; also of vectors that wait."""
    vectors = np.abs(20 * make(120)).astype(dtype)
    prices, words = list(range(120)), [f"text {number}" for number in range(120)]
    first = {"attributes": {"price": prices[:80]}, "documents": {"text": words[:80]}}
    more = {"attributes": {"price": prices[80:]}, "documents": {"text": words[80:]}}
    with ZoomIndex.build(tmp_path / "index", vectors[:80], dram="4MiB", metric=metric, **first) as index:
        index.add(vectors[80:] // 2, **more)
        stored = index.reconstruct(range(120))
        chosen = [3, 119, 40, 81, 79]
        index.update(chosen, attributes={"price": [-1, -2, -3, -4, -5]})
        index.update([119, 5], documents={"text": ["new", "other"]})
        for _ in range(2):
            np.testing.assert_array_equal(index.reconstruct(range(120)), stored)
            found = index.fetch(range(120))
            price = [*prices]
            for row, value in zip(chosen, range(-1, -6, -1), strict=True):
                price[row] = value
            assert found["price"].tolist() == price
            texts = [*words]
            texts[119], texts[5] = "new", "other"
            assert found["text"].tolist() == texts
            assert sorted(selected(index, "price < 0")) == sorted(chosen)
            index.commit(compact=True)
        assert index.check() == []


@pytest.mark.long
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_an_upsert_is_an_update_of_known_ids_and_an_addition_of_others(tmp_path, small_sizes, strings, share):
    """With fields given for all, for some and for none, and documents; some of the known wait, some are on SSD."""
    every = [f"name{number}" for number in range(300)] if strings else list(range(300))
    random = np.random.default_rng(4)
    values = columns(120, 1)
    words = [f"word {number}" for number in range(120)]
    first = {"documents": {"text": words[:80]}, "attributes": {name: each[:80] for name, each in values.items()}}
    with ZoomIndex.build(tmp_path / "index", make(80), ids=every[:80], dram="4MiB", **first) as index:
        index.add(make(40, 1), every[80:120], {name: each[80:] for name, each in values.items()}, {"text": words[80:]})
        rows = as_rows(values, every[:120])
        texts = dict(zip(every, words, strict=False))
        stored = dict(zip(every, np.concatenate([make(80), make(40, 1)]), strict=False))
        for number in range(6):
            known, unknown = sorted(rows, key=str), [each for each in every if each not in rows]
            size = min(30, len(unknown)) if share < 1 else 30
            old = [known[row] for row in random.permutation(len(known))[: round(share * size)]]
            chosen = old + unknown[: size - len(old)]
            chosen = [chosen[row] for row in random.permutation(len(chosen))]
            more = columns(len(chosen), 20 + number)
            names = list(more)[: number % 5]
            given = [{name: more[name][row] for name in names if (row + number) % 3} for row in range(len(chosen))]
            vectors = make(len(chosen), 40 + number)
            documents = [{"text": f"new {number} {each}"} if number % 2 else {} for each in chosen]
            added = index.upsert(chosen, vectors, given if any(given) else None, documents)
            assert added == len(set(chosen) - set(known))
            for row, each in enumerate(chosen):
                rows[each] = rows.get(each, dict.fromkeys(values)) | given[row]
                texts[each] = documents[row].get("text", texts.get(each))
                stored[each] = vectors[row]
            assert same(index, rows)
            np.testing.assert_array_equal(index.reconstruct(list(stored)), list(stored.values()))
            assert index.fetch(list(rows), ["text"])["text"].tolist() == [texts.get(each) for each in rows]
            if number % 2:
                index.commit()
        assert len(index) == len(rows)
        assert index.check() == []


def test_an_upsert_that_is_refused_changes_nothing(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        for arguments, error in (
            (([1, 1], make(2)), ValueError),
            (([1], make(2)), ValueError),
            ((["one"], make(1)), TypeError),
            (([1, 7], make(2), {"price": ["text", "text"]}), TypeError),
            (([1, 7], make(2), {"price": [1]}), ValueError),
            (([1, 7], make(2) * np.nan), ValueError),
        ):
            with pytest.raises(error):
                index.upsert(*arguments)
        assert same(index, {0: {"price": 1}, 1: {"price": 2}, 2: {"price": 3}})
        assert index.upsert([], make(0)) == 0


def test_an_update_by_filter_takes_little_dram_for_each_vector(tmp_path):
    peaks = {}
    for count in (1000, 7000):
        vectors = np.random.default_rng(0).integers(-99, 99, (count, 4)).astype("i1")
        fields, path = {"price": np.arange(count) % 9, "tags": [["a", "b"]] * count}, tmp_path / str(count)
        with ZoomIndex.build(path, vectors, attributes=fields, dram="4MiB", grow_to=14_000) as index:
            tracemalloc.start()
            try:
                assert index.update(where="price >= 0", attributes={"price": 9, "sold": True}) == count
                peaks[count] = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            found = index.fetch(np.arange(count))
            assert (found["price"] == 9).all()
            assert found["sold"].all()
            assert found["tags"][count - 1] == ["a", "b"]
    assert peaks[7000] - peaks[1000] < 6000 * 150  # the vectors that wait are among them


def test_an_update_by_filter_that_fails_between_its_blocks_changes_nothing(tmp_path, monkeypatch):
    vectors, price = np.random.default_rng(0).standard_normal((900, 8), np.float32), np.arange(900)
    with ZoomIndex.build(
        tmp_path / "index", vectors, attributes={"price": price}, dram="4MiB", grow_to=2000
    ) as index:  # fmt: skip
        monkeypatch.setattr("memhier.ann.zoom.renewal.life._UPDATED_BYTES", 1 << 11)
        join, calls = Change.joined, []

        def failing(*arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise OSError("no room")
            return join(*arguments)

        monkeypatch.setattr(Change, "joined", failing)
        with pytest.raises(OSError, match="no room"):
            index.update(where="price < 800", attributes={"price": -1, "sold": True})
        monkeypatch.undo()
        assert index.fields == {"price": "int64"}
        np.testing.assert_array_equal(index.fetch(np.arange(900))["price"], price)
        assert index.update(where="price < 800", attributes={"price": -1}) == 800
        index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        np.testing.assert_array_equal(index.fetch(np.arange(900))["price"], np.where(price < 800, -1, price))
