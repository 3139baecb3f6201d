"""A filter or lists of ids for each query of a call on items of many vectors: results are those of single calls."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.ann.zoom.filters.attributes import Attributes

spec = importlib.util.spec_from_file_location("multivector_data", Path(__file__).with_name("multivector_data.py"))
data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)

COUNT, DIMENSION = 300, 16
FILTERS = ["tags contains 3", None, "number < 150 and tags contains any (1, 2)", "tags contains 3", "tags contains 99"]


@pytest.fixture(scope="module", params=["numbers", "strings"])
def index(request, tmp_path_factory):
    items = data.drawn_items(COUNT, DIMENSION, "float32", longest=8)
    attributes = {"number": np.arange(COUNT), "tags": [[row % 5, row % 11] for row in range(COUNT)]}
    options = {"ids": [f"id{row}" for row in range(COUNT)]} if request.param == "strings" else {}
    path = tmp_path_factory.mktemp("each") / "index"
    with MultiVectorIndex.build(path, items, attributes=attributes, dram="8MiB", **options) as built:
        built.remove([built_id for block in built.ids() for built_id in block.tolist()][5:9])
        built.add(items[:3], attributes={"number": [900, 901, 902], "tags": [[3], [1], [99]]}, **(
            {"ids": ["x", "y", "z"]} if request.param == "strings" else {}
        ))  # fmt: skip
        yield built


def queries_for(count):
    return [each[:4].astype(np.float32) for each in data.drawn_items(count, DIMENSION, "float32", seed=1, longest=6)]


@pytest.mark.parametrize("options", [{}, {"recall": 1.0}, {"max_reads": 2}], ids=str)
@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning")
def test_each_query_finds_the_items_of_a_call_of_its_own(index, options):
    queries = queries_for(len(FILTERS))
    found = index.search(queries, 5, where=FILTERS, fields=True, **options)
    rows = found.rows()
    for number, where in enumerate(FILTERS):
        single = index.search(queries[number], 5, where=where, fields=True, **options)
        assert found.ids[number].tolist() == single.ids.tolist()
        np.testing.assert_array_equal(found.scores[number], single.scores)
        assert rows[number] == single.rows()
    alone = index.search(queries[:1], 5, where=FILTERS[0], fields=True, **options)
    assert found.stats["queries"] == len(FILTERS)
    assert set(found.stats) == set(alone.stats)
    assert not found.stats["calibrated"] or options == {"recall": 1.0}


def test_each_query_may_have_lists_of_ids_of_its_own(index):
    every = [name for block in index.ids() for name in block.tolist()]
    allow = [every[::3], None, every[:0], every[::3]]
    deny = [None, every[::2], None, every[:9]]
    queries = queries_for(len(allow))
    found = index.search(queries, 4, allow=allow, deny=deny)
    for number, (some, others) in enumerate(zip(allow, deny, strict=True)):
        single = index.search(queries[number], 4, allow=some, deny=others)
        assert found.ids[number].tolist() == single.ids.tolist()
    assert all(name in (None, -1) for name in found.ids[2].tolist())


def test_a_batch_whose_queries_have_no_limits_is_not_limited(index):
    queries = queries_for(3)
    free = index.search(queries, 4).ids.tolist()
    assert index.search(queries, 4, allow=(None,) * 3, deny=[None] * 3).ids.tolist() == free
    assert index.search(queries[:1], 4, allow=[None], where=[None]).ids.tolist() == free[:1]
    assert all(each in (None, -1) for each in index.search(queries[0], 4, allow=[None]).ids.tolist())


def test_equal_filters_are_evaluated_once(index, monkeypatch):
    asked, bitmap = [], Attributes.bitmap

    def counted(attributes, expression):
        asked.append(str(expression))
        return bitmap(attributes, expression)

    monkeypatch.setattr(Attributes, "bitmap", counted)
    index.search(queries_for(4), 3, where=["number < 9", "number > 9", "number < 9", None])
    parts = len(set(asked)) and len(asked) // len(set(asked))
    assert sorted(set(asked)) == ["number < 9", "number > 9"]
    assert len(asked) == 2 * parts


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"where": ["number < 9"]}, ValueError, "where has 1 filters for 2 queries"),
        ({"where": ["number < 9", 3]}, TypeError, r"where\[1\]=3: expected text"),
        ({"where": 3}, TypeError, "where=3: expected text"),
        ({"allow": [[1], [2], [3]]}, ValueError, "allow has 3 lists for 2 queries"),
        ({"where": ["number < 9", "nothing < 1"]}, ValueError, "no attribute 'nothing'"),
    ],
)
def test_lists_that_do_not_fit_are_refused(index, options, error, message):
    with pytest.raises(error, match=message):
        index.search(queries_for(2), 3, **options)
