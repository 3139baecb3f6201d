"""Records by text ids beside a dict, and the filters that adapters write."""

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.documents import DocumentIndex, comparison

SMALL = {"attributes": ["part", "word"], "dram": "16MiB", "grow_to": 1000, "metric": "l2"}
WORDS = ["en", "it's", None, 'a "b"']


def batch(random, count):
    names = [f"n{number}" for number in random.integers(0, 60, count)]
    vectors = random.normal(size=(count, 4)).astype(np.float32)
    about = [{"part": int(part), "word": WORDS[part % 4], "more": [1]} for part in random.integers(0, 9, count)]
    return names, vectors, [{"text": f"{part}", "about": part} for part in about], about


@pytest.mark.parametrize("seed", range(3))
def test_records_are_those_of_a_dict(tmp_path, seed):
    random, model = np.random.default_rng(seed), {}
    index = DocumentIndex(tmp_path / "x", **SMALL)
    for step in range(12):
        names, vectors, records, about = batch(random, int(random.integers(0, 30)))
        index.put(names, vectors, records, about)
        model |= dict(zip(names, zip(vectors, records, about, strict=True), strict=True))
        gone = [f"n{number}" for number in random.integers(0, 70, 6)]
        index.discard(gone)
        model = {name: entry for name, entry in model.items() if name not in gone}
        if step % 4 == 3:
            index.discard_where("part == 5")
            model = {name: entry for name, entry in model.items() if entry[2]["part"] != 5}
            index.close()
            index = DocumentIndex(tmp_path / "x", **SMALL)
        asked = [f"n{number}" for number in range(70)]
        assert dict(index.get(asked)) == {name: entry[1] for name, entry in model.items()}
        chosen = {name: entry for name, entry in model.items() if entry[2]["word"] == "it's"}
        query = random.normal(size=4).astype(np.float32)
        found = index.search(query, 100, comparison("word", "==", "it's"), recall=1) if model else []
        far = {name: float(((entry[0] - query) ** 2).sum()) for name, entry in chosen.items()}
        assert [name for name, *_ in found] == sorted(far, key=far.__getitem__)
        assert all(record == model[name][1] for name, record, _ in found)
    index.close()


def test_a_refused_call_changes_nothing(tmp_path):
    with DocumentIndex(tmp_path / "x", **SMALL) as index:
        index.put(["a", "b"], np.eye(2), [{"n": 1}, {"n": 2}], [{"part": 1}, {"part": 2}])
        for about in ([{"part": "x"}, {"part": 3}], [{"part": 3}, {"part": "x"}]):
            with pytest.raises(TypeError, match="part"):
                index.put(["a", "c"], np.eye(2), [{"n": 3}, {"n": 4}], about)
            assert index.get(["a", "b", "c"]) == [("a", {"n": 1}), ("b", {"n": 2})]
            assert [name for name, *_ in index.search([1, 0], 5)] == ["a", "b"]


def test_attributes_that_no_record_has_are_null(tmp_path):
    options = SMALL | {"attributes": ["part", "none", "gone"]}
    filters = {
        "none == 1": "", "none is null": "ab", "not none == 1": "", "not none is null": "", "none is not null": "",
        "part == 1 or none == 1": "a", "part == 1 and none == 1": "", "part == 1 and none is null": "a",
        "not (part == 1 and none == 1)": "b", "not (part == 1 or none == 1)": "", "gone in (1) or none is null": "ab",
        "not (part == 1 or none is not null)": "b", "not not part == 2": "b",
    }  # fmt: skip
    with DocumentIndex(tmp_path / "x", **options) as index:
        index.put(["a", "b"], np.eye(2), [{}, {}], [{"part": 1}, {"part": 2, "none": None}])
        for where, wanted in filters.items():
            assert sorted(name for name, *_ in index.search([1, 0], 5, where)) == list(wanted), where
        index.put(["c"], [[9, 9]], [{}], [{"part": 3, "none": 1}])  # now it is an attribute of the index
        for where, wanted in filters.items():
            found = {name for name, *_ in index.search([1, 0], 5, where)} - {"c"}
            assert sorted(found) == list(wanted), where
        index.discard_where("gone == 1")
        assert len(index.search([1, 0], 5)) == 3
        index.discard_where("gone is null")
        assert index.search([1, 0], 5) == []
        with pytest.raises(ValueError, match="no attribute 'other'"):
            index.put(["a"], [[1, 0]], [{}], [{}]) or index.search([1, 0], 5, "other == 1")


@pytest.mark.parametrize(
    ("name", "operator", "value", "text"),
    [
        ("a", "==", "it's", "a == 'it''s'"), ("a", "!=", None, "a is not null"), ("a", "==", None, "a is null"),
        ("a", "in", ["x", 2], "a in ('x', 2)"), ("a", "<", np.float32(0.5), "a < 0.5"), ("a", "==", True, "a == true"),
    ],
)  # fmt: skip
def test_a_comparison_as_text(name, operator, value, text):
    assert comparison(name, operator, value) == text


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.float32("nan"), [1, float("inf")]])
def test_a_comparison_with_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match=r"price is compared with -?(inf|nan): expected a finite number"):
        comparison("price", "in" if isinstance(value, list) else "<", value)


def test_an_index_tells_which_ids_it_contains(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(50, 4))
    with ZoomIndex.build(tmp_path / "x", vectors, ids=[f"n{number}" for number in range(50)], dram="3MiB") as index:
        index.remove(["n3"])
        index.add(vectors[:1], ids=["new"])
        assert index.contains(["n0", "n3", "new", "none", "n0"]).tolist() == [True, False, True, False, True]
        with pytest.raises(TypeError, match="strings"):
            index.contains([1])
    with ZoomIndex.build(tmp_path / "y", vectors, dram="3MiB") as index:
        assert index.contains([0, 99, -5, 0]).tolist() == [True, False, False, True]
        assert index.contains(np.array([], np.int64)).tolist() == []
