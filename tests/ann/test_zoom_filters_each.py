"""A filter or lists of ids for each query of a call: results are those of single calls, equal ones evaluated once."""

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.filters.attributes import Attributes
from memhier.ann.zoom.search.search import Selection

COUNT, DIMENSION = 1500, 16
FILTERS = [
    "tags contains 3", None, "number < 700 and tags contains any (1, 2)", "tags contains 3", "tags contains 999",
    "number >= 1490", None, "not sold",
]  # fmt: skip


@pytest.fixture(scope="module")
def vectors():
    return np.random.default_rng(1).normal(size=(COUNT, DIMENSION)).astype(np.float32)


@pytest.fixture(scope="module", params=["l2", "ip", "strings"])
def index(request, tmp_path_factory, vectors):
    attributes = {
        "number": np.ma.MaskedArray(np.arange(COUNT), np.arange(COUNT) % 7 == 3),
        "tags": [[row % 5, row % 11] for row in range(COUNT)],
        "sold": np.arange(COUNT) % 2 == 0,
        "name": [None if row % 4 == 0 else f"n{row}" for row in range(COUNT)],
    }
    options = {"metric": "ip"} if request.param == "ip" else {}
    if request.param == "strings":
        options["ids"] = [f"id{row}" for row in range(COUNT)]
    path = tmp_path_factory.mktemp("each") / "index"
    with ZoomIndex.build(path, vectors, attributes=attributes, dram="8MiB", **options) as built:
        yield built


def queries_for(filters):
    return np.random.default_rng(2).normal(size=(len(filters), DIMENSION)).astype(np.float32)


@pytest.mark.parametrize(
    "options", [{}, {"recall": 0.9}, {"recall": 1.0}, {"max_reads": 3}, {"candidates": 40, "nprobe": 3}], ids=str
)
@pytest.mark.filterwarnings("ignore::memhier.errors.RecallWarning")
def test_each_query_finds_the_vectors_of_a_call_of_its_own(index, options):
    queries = queries_for(FILTERS)
    found = index.search(queries, 5, where=FILTERS, fields=True, **options)
    assert found.ids.shape == found.distances.shape == (len(FILTERS), 5)
    rows = found.rows()
    for number, where in enumerate(FILTERS):
        single = index.search(queries[number], 5, where=where, fields=True, **options)
        assert found.ids[number].tolist() == single.ids.tolist()
        np.testing.assert_array_equal(found.distances[number], single.distances)
        assert rows[number] == single.rows()
    assert found.stats["queries"] == len(FILTERS)
    alone = index.search(queries[:1], 5, where=FILTERS[0], fields=True, **options)
    assert set(found.stats) == set(alone.stats)
    assert (found.ids[4] == index.search(queries[4], 5, where=FILTERS[4]).ids).all()


def test_lists_of_ids_and_radii_go_with_the_filters_of_queries(index):
    queries, radii = queries_for(FILTERS), np.linspace(-2, 30, len(FILTERS))
    every = [name for block in index.ids() for name in block.tolist()]
    allow, deny = every[::2], every[::6]
    found = index.search(queries, 4, where=FILTERS, recall=1.0, allow=iter(allow), deny=iter(deny), radius=radii)
    for number, where in enumerate(FILTERS):
        single = index.search(
            queries[number], 4, where=where, recall=1.0, allow=allow, deny=deny, radius=float(radii[number])
        )
        assert found.ids[number].tolist() == single.ids.tolist()


@pytest.mark.parametrize("options", [{}, {"recall": 1.0, "radius": 25.0}, {"where": "number < 900"}], ids=str)
def test_each_query_may_have_lists_of_ids_of_its_own(index, options):
    every = np.array([name for block in index.ids() for name in block.tolist()], object)
    some = every[::3].tolist()
    allow = [some, None, set(every[:40].tolist()), every[:0].tolist(), some, iter(every[100:300].tolist())]
    deny = [None, every[::2].tolist(), None, None, tuple(every[:9].tolist()), None]
    expected = [None if each is None else list(each) for each in allow]
    allow[5] = iter(expected[5])
    queries, asked = queries_for(allow), dict(options)
    found = index.search(queries, 4, allow=allow, deny=deny, **asked)
    for number, of_one in enumerate(zip(expected, deny, strict=True)):
        single = index.search(queries[number], 4, allow=of_one[0], deny=of_one[1], **asked)
        assert found.ids[number].tolist() == single.ids.tolist()
        np.testing.assert_array_equal(found.distances[number], single.distances)
    where = ["number < 700", None, "sold", None, "sold", None]
    both = index.search(queries, 4, **asked | {"where": where}, allow=every[::3], deny=deny)
    for number, of_one in enumerate(zip(where, deny, strict=True)):
        options_of_one = asked | {"where": of_one[0]}
        single = index.search(queries[number], 4, **options_of_one, allow=every[::3].tolist(), deny=of_one[1])
        assert both.ids[number].tolist() == single.ids.tolist()


def test_a_batch_whose_queries_have_no_limits_is_not_limited(index):
    queries = queries_for(range(3))
    free = index.search(queries, 4).ids.tolist()
    assert index.search(queries, 4, allow=[None] * 3, deny=[None] * 3).ids.tolist() == free
    assert index.search(queries[:1], 4, allow=[None], where=[None]).ids.tolist() == free[:1]
    nothing = [None, -1]
    assert all(each in nothing for each in index.search(queries[0], 4, allow=[None]).ids.tolist())
    assert all(each in nothing for each in index.search(queries, 4, allow=[None] * 2).ids.ravel().tolist())


def test_lists_of_ids_of_another_number_and_other_values_are_refused(index, vectors):
    every = [name for block in index.ids() for name in block.tolist()]
    with pytest.raises(ValueError, match="deny has 2 lists for 3 queries"):
        index.search(vectors[:3], 2, deny=[every[:2], None])
    with pytest.raises(TypeError, match=r"allow\[1\]=.*expected a list of ids, or None"):
        index.search(vectors[:2], 2, allow=[every[:2], every[0]])
    with pytest.raises(TypeError, match="give its keys"):
        index.search(vectors[:2], 2, allow=[{every[0]: 1}, None])
    with pytest.raises(TypeError, match="allow holds a"):
        index.search(vectors[:2], 2, allow=[[every[:2]], None])
    with pytest.raises(TypeError, match="deny holds a"):
        index.range_search(vectors[:2], 2, deny=[every[:2], every[:3]])


def test_equal_lists_of_ids_are_looked_up_once(index, monkeypatch):
    asked = []
    of = Selection.of
    monkeypatch.setattr(Selection, "of", lambda *limits: asked.append(limits) or of(*limits))
    some = [name for block in index.ids() for name in block.tolist()][::3]
    index.search(queries_for(range(6)), 3, allow=[some, None, some, None, some, some])
    assert len(asked) == 2


def test_equal_filters_are_evaluated_once(tmp_path, vectors, monkeypatch):
    asked = []
    bitmap = Attributes.bitmap
    monkeypatch.setattr(Attributes, "bitmap", lambda self, where: asked.append(str(where)) or bitmap(self, where))
    with ZoomIndex.build(tmp_path / "index", vectors, attributes={"number": np.arange(COUNT)}, dram="4MiB") as built:
        built.search(vectors[:60], 3, where=["number < 9", "number < 99", None] * 20)
    assert sorted(asked) == ["number < 9", "number < 99"]


def test_another_number_of_filters_and_other_values_are_refused(index, vectors):
    with pytest.raises(ValueError, match="where has 2 filters for 3 queries"):
        index.search(vectors[:3], 2, where=["sold", "sold"])
    with pytest.raises(TypeError, match=r"where\[1\]=7"):
        index.search(vectors[:2], 2, where=["sold", 7])
    with pytest.raises(TypeError, match="expected text, or a list of text"):
        index.search(vectors[:2], 2, where=7)
    with pytest.raises(ValueError, match="no attribute 'colour'"):
        index.search(vectors[:2], 2, where=["sold", "colour == 'red'"])


def test_no_queries_and_one_query(index, vectors):
    assert index.search(vectors[:0], 3, where=[]).ids.shape == (0, 3)
    assert (
        index.search(vectors[0], 3, where=["sold"]).ids.tolist()
        == index.search(vectors[0], 3, where="sold").ids.tolist()
    )


def test_a_list_of_one_filter_for_one_query_is_that_filter(index, vectors):
    for where in ("sold", "tags contains 3", "tags contains 3 and tags contains 1"):
        alone, listed = index.search(vectors[:1], 3, where=where), index.search(vectors[:1], 3, where=[where])
        assert alone.ids.tolist() == listed.ids.tolist()
        assert alone.stats.keys() == listed.stats.keys()
    named = isinstance(alone.ids[0, 0], str)
    first = index.search(vectors[:1], 3, where=["sold"], allow=[["id4", "id7"] if named else [4, 7]])
    assert first.ids[0].tolist() == (["id4", None, None] if named else [4, -1, -1])
    assert index.search(vectors[:1], 3, where=[None]).ids.tolist() == index.search(vectors[:1], 3).ids.tolist()
    with pytest.raises(TypeError, match=r"where\[0\]=7"):
        index.search(vectors[:1], 2, where=[7])
    with pytest.raises(ValueError, match="where has 1 filters for 2 queries"):
        index.search(vectors[:2], 2, where=["sold"])
