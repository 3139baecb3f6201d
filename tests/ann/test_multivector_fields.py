"""String ids, documents, upserts and look-ups of MultiVectorIndex, beside a model at every step."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.errors import BudgetError

spec = importlib.util.spec_from_file_location("multivector_data", Path(__file__).with_name("multivector_data.py"))
data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)

DIMENSION = 6


def item_of(name, version):
    """Return the tokens of an id and version."""
    rng = np.random.default_rng([number_of(name), version])
    return rng.normal(size=(int(rng.integers(1, 12)), DIMENSION)).astype(np.float32)


def number_of(name):
    """Return the number in an id."""
    return int(str(name).split("-")[-1])


def fields_of(name, version):
    """Return the attributes and documents of an id and version."""
    text = None if version % 5 == 4 else f"item {name}, version {version} " + "x" * (version % 3 * 900)
    return {"third": number_of(name) % 3}, {"text": text, "meta": {"version": [version]}}


def given(names, model):
    """Return the arguments that add or update some ids."""
    pairs = [fields_of(name, model[name]) for name in names]
    items = [item_of(name, model[name]) for name in names]
    return {"items": items, "attributes": [pair[0] for pair in pairs], "documents": [pair[1] for pair in pairs]}


def assert_holds(index, model):
    """Assert that an index holds just the ids, items and fields of a model."""
    assert len(index) == len(model)
    stats = index.stats()
    assert stats["memory_bytes"] <= stats["planned_bytes"] <= stats["dram"]
    names = sorted(model, key=str)
    assert sorted(np.concatenate([np.empty(0, object), *index.ids()]).tolist(), key=str) == names
    assert all(np.array_equal(a, item_of(b, model[b])) for a, b in zip(index.reconstruct(names), names, strict=True))
    found = index.fetch(names)
    streamed = {name: item for ids, items in index.blocks() for name, item in zip(ids, items, strict=True)}
    assert streamed.keys() == model.keys()
    for row, name in enumerate(names):
        attributes, documents = fields_of(name, model[name])
        assert int(found["third"][row]) == attributes["third"]
        assert (found["text"][row], found["meta"][row]) == (documents["text"], documents["meta"])
        assert np.array_equal(streamed[name], item_of(name, model[name]))
    if not names:
        return
    chosen = [name for name in names if number_of(name) % 3 == 1]
    assert sorted(np.concatenate([np.empty(0, object), *index.ids("third == 1")]).tolist(), key=str) == chosen
    query = item_of(names[0], model[names[0]])[:4]
    scores = {name: data.exact_scores(query, [item_of(name, model[name])])[0] for name in names}
    for allowed, options in ((names, {}), (chosen, {"where": "third == 1"}), (names[3:40], {"allow": {*names[3:40]}})):
        best = sorted(allowed, key=lambda name: -scores[name])[:5]
        for recall in (0.9, 1.0):
            result = index.search(query, 5, recall=recall, fields=["text"], **options)
            rows = result.rows()
            assert [row["id"] for row in rows] == best
            assert [row["text"] for row in rows] == [fields_of(name, model[name])[1]["text"] for name in best]
            assert len(result.ids) == len(result.fields["text"]) == 5


@pytest.mark.long
@pytest.mark.parametrize("strings", [True, False])
def test_changes_agree_with_a_model(tmp_path, small_sizes, strings):
    rng, last = random.Random(3), 40

    def named(number):
        return f"passage-{number}" if strings else number

    model = {named(number): 0 for number in range(last)}
    names = [*model]
    build = given(names, model)
    path = tmp_path / "index"
    with MultiVectorIndex.build(path, ids=names, **build, dram="6MiB", grow_to=400) as index:
        assert_holds(index, model)
        for step in range(5):
            new = {named(number): step for number in range(last, last + 6)}
            last += 6
            known = rng.sample(sorted(model, key=str), 9)
            model |= new | {name: model[name] + 1 for name in known}
            some = [*new, *known]
            rng.shuffle(some)
            assert index.upsert(some, **given(some, model)) == len(new)
            gone = rng.sample(sorted(model, key=str), 4)
            assert index.remove(gone) == 4
            for name in gone:
                del model[name]
            assert index.contains([*gone[:1], *sorted(model, key=str)[:2]]).tolist() == [False, True, True]
            assert_holds(index, model)
            if step % 3 == 1:
                index.commit(compact=step == 4 or None)
                assert_holds(index, model)
        index.commit()
        assert index.check() == []
    with MultiVectorIndex.open(path) as reader:
        assert_holds(reader, model)
    with MultiVectorIndex.open(path, writable=True) as index:
        assert index.remove(where="third == 1") == sum(number_of(name) % 3 == 1 for name in model)
        model = {name: version for name, version in model.items() if number_of(name) % 3 != 1}
        index.commit()
        assert_holds(index, model)


def test_an_update_keeps_fields_that_it_does_not_give(tmp_path):
    names = ["a", "b", "c"]
    items = [np.eye(4)[:1], np.eye(4)[1:2], np.eye(4)[2:]]
    documents, attributes = {"text": ["A", "B", "C"], "page": [1, 2, 3]}, {"year": [1, 2, 3]}
    path = tmp_path / "index"
    with MultiVectorIndex.build(
        path, items, names, documents=documents, attributes=attributes, dram="4MiB", grow_to=9
    ) as index:
        assert index.fields == {"year": "int64", "text": "document", "page": "document"}
        index.update(["b"], documents={"text": ["new"]})
        index.update(["c", "a"], attributes=[{"year": 8}, {}])
        index.update(["c"], [np.eye(4)[:2]])
        index.add([np.eye(4)[:1]], ["d"])
        for _ in range(2):
            found = index.fetch(["d", "b", "c", "a", "b"])
            assert found["text"].tolist() == [None, "new", "C", "A", "new"]
            assert found["page"].tolist() == [None, 2, 3, 1, 2]
            assert found["year"].tolist() == [None, 2, 8, 1, 2]
            assert np.array_equal(index.reconstruct(["c"])[0], np.eye(4)[:2])
            assert index.search(np.eye(4)[1:2], 9).ids.tolist()[:2] in (["b", "c"], ["c", "b"])
            assert index.search(np.eye(4)[1:2], 9).ids.tolist()[4:] == [None] * 5
            index.commit()
        table = index.search([np.eye(4)[:1]] * 2, 2, fields=True).hit_table().columns()
        assert list(table) == ["query", "rank", "id", "score", "year", "text", "page"]


def test_refusals(tmp_path):
    names, items = ["a", "b"], [np.ones((2, 4)), np.ones((1, 4))]
    with MultiVectorIndex.build(tmp_path / "index", items, names, dram="4MiB", grow_to=4) as index:
        for call, error, words in (
            (lambda: index.add(items), ValueError, "strings as ids"),
            (lambda: index.add(items, [1, 2]), TypeError, "strings"),
            (lambda: index.add(items, ["b", "c"]), ValueError, "'b'"),
            (lambda: index.add(items, ["c", "c"]), ValueError, "more than once"),
            (lambda: index.upsert(["c"], items), ValueError, "1 entry for 2 items"),
            (lambda: index.update(["z"], items[:1]), KeyError, "'z'"),
            (lambda: index.add(items, ["c", "d"], documents={"text": ["x"]}), ValueError, "1 values"),
            (
                lambda: index.add(items, ["c", "d"], {"t": [1, 2]}, {"t": [1, 2]}),
                ValueError,
                "attribute and a document",
            ),
            (lambda: index.add(items, ["c", "d"], documents={"t": ["x" * (1 << 20)] * 2}), BudgetError, "documents"),
            (lambda: index.search(items[0], 2, fields=["text"]), ValueError, "fields holds 'text'"),
            (lambda: index.fetch(["z"]), KeyError, "'z'"),
        ):
            with pytest.raises(error, match=words):
                call()
            assert len(index) == 2
            assert sorted(index.search(items[0], 2).ids.tolist()) == names
        index.commit()
    with pytest.raises(ValueError, match="attribute and a document"):
        MultiVectorIndex.build(
            tmp_path / "other", items, attributes={"t": [1, 2]}, documents={"t": ["a", "b"]}, dram="4MiB"
        )
    assert not (tmp_path / "other").exists()


def test_an_index_with_strings_begins_empty(tmp_path):
    none = np.empty((0, 4), np.float32)
    with MultiVectorIndex.build(
        tmp_path / "index", none, np.empty(0, str), lengths=[], dram="6MiB", grow_to=99
    ) as index:
        assert index.search(np.ones((1, 4)), 2).ids.tolist() == [None, None]
        index.add([np.ones((1, 4))], ["x"], documents={"text": ["X"]})
        index.commit()
    with MultiVectorIndex.open(tmp_path / "index") as index:
        assert index.search(np.ones((1, 4)), 1, fields=True).rows() == [{"id": "x", "score": 4.0, "text": "X"}]


@pytest.mark.long
def test_documents_of_many_small_items_fill_no_more_than_their_room(tmp_path):
    items, dram = [np.ones((1, 4), np.int8)] * 3000, 6 << 20
    with MultiVectorIndex.build(tmp_path / "index", items[:10], dram=dram, grow_to=4000) as index:
        index.add(items, documents={"text": ["y" * 900] * 3000})
        assert index.stats()["parts"] > 2
        assert index.stats()["memory_bytes"] <= dram
        index.commit()
        assert index.fetch([5, 3009])["text"].tolist() == [None, "y" * 900]
