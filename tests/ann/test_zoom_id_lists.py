"""Searches among the vectors of some ids, or all but some, beside an exact search of these."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from memhier.ann import ZoomIndex

DIMENSION = 6


def make(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, DIMENSION)).astype(np.float32)


def nearest(vectors, names, query, k):
    away = np.square(vectors - query).sum(axis=1)
    return [names[row] for row in np.argsort(away, kind="stable")[:k]]


@pytest.fixture(params=[False, True], ids=["integers", "strings"])
def living(request, tmp_path, small_sizes):
    """An index of several parts, with removed rows and rows that wait, and the vectors of its ids."""
    every = [f"name {number}" for number in range(400)] if request.param else [3 * number + 1 for number in range(400)]
    vectors = make(400)
    prices = {"price": [number % 10 for number in range(400)]}
    cut = {"price": prices["price"][:250]}
    with ZoomIndex.build(tmp_path / "index", vectors[:250], ids=every[:250], attributes=cut, dram="4MiB") as index:
        for start in (250, 300, 350):
            rows = slice(start, start + 50)
            index.add(vectors[rows], ids=every[rows], attributes={"price": prices["price"][rows]})
            if start < 350:
                index.commit()
        index.remove(every[5:400:9])
        yield index, {each: (vectors[row], row % 10) for row, each in enumerate(every) if row % 9 != 5}, every


@pytest.mark.long
@pytest.mark.parametrize("where", [None, "price < 4"])
@pytest.mark.parametrize("lists", ["allow", "deny", "both"])
@pytest.mark.parametrize("size", [0, 1, 7, 63, 200, 400])
def test_the_nearest_are_those_of_the_vectors_left(living, where, lists, size):
    """Of lists in any order, with repetitions, removed ids and ids that never were."""
    index, model, every = living
    random = np.random.default_rng(size)
    strangers = ["nobody", "none"] if isinstance(every[0], str) else [10**12, 2]
    chosen = [every[row] for row in random.permutation(400)[:size]]
    chosen = [*chosen, *chosen[:3], *strangers]
    other = [every[row] for row in random.permutation(400)[:100]]
    options = {"allow": chosen} if lists == "allow" else {"deny": chosen} if lists == "deny" else None
    options = options or {"allow": chosen, "deny": other}
    left = [
        name
        for name, (_, price) in model.items()
        if (where is None or price < 4)
        and ("allow" not in options or name in set(options["allow"]))
        and name not in set(options.get("deny", ()))
    ]
    queries, k = make(3, 9), 10
    found = index.search(queries, k, recall=1.0, where=where, **options)
    matrix = np.array([model[name][0] for name in left]).reshape(-1, DIMENSION)
    for row, query in enumerate(queries):
        real = [name for name in found.ids[row].tolist() if name not in (-1, None)]
        assert real == nearest(matrix, left, query, k)
    _, _, ids = index.range_search(queries[:1], 6.0, recall=1.0, where=where, **options)
    away = np.square(matrix - queries[0]).sum(axis=1)
    assert set(ids.tolist()) == {left[row] for row in np.flatnonzero(away <= 6.0)}


def test_lists_of_every_container(living):
    index, _, every = living
    chosen = every[:40]
    expected = index.search(make(1)[0], 5, allow=chosen).ids.tolist()
    containers = [tuple(chosen), np.array(chosen)]
    if not isinstance(every[0], str):
        containers += [np.array(chosen, np.int32), range(1, 121, 3)]
    for container in containers:
        assert index.search(make(1)[0], 5, allow=container).ids.tolist() == expected
    containers += [set(chosen), frozenset(chosen), dict.fromkeys(chosen).keys(), dict(enumerate(chosen)).values()]
    containers += [iter(chosen), (each for each in chosen), np.array(chosen, object), [None, *chosen], deque(chosen)]
    containers += [np.array(chosen).reshape(2, 4, 5), np.array([*chosen, None], object)]
    containers += [np.ma.MaskedArray([*chosen, every[300]], [False] * 40 + [True])]
    if not isinstance(every[0], str):
        containers += [[-1, *chosen, -1], np.array([*chosen, -1]), np.array(chosen, np.uint64)]
    for container in containers:
        assert index.search(make(1)[0], 5, allow=container).ids.tolist() == expected
    others = [iter(every[40:]), set(every[40:]), [None, *every[40:]]]
    for container in others:
        assert index.search(make(1)[0], 5, deny=container).ids.tolist() == expected
    assert index.search(make(1)[0], 5, allow=every[7:8]).ids.tolist()[0] == every[7]


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", "torch"])
def test_columns_of_other_libraries(living, library):
    """With nulls, where a column can have them."""
    module, (index, _, every) = pytest.importorskip(library), living
    chosen = every[:40]
    expected = index.search(make(1)[0], 5, allow=chosen).ids.tolist()
    if library == "torch":
        columns = [] if isinstance(every[0], str) else [module.tensor(chosen), module.tensor([chosen, chosen])]
    elif library == "pyarrow":
        columns = [module.array(chosen), module.array([*chosen, None]), module.chunked_array([chosen[:9], chosen[9:]])]
    elif library == "polars":
        columns = [module.Series(chosen), module.Series([*chosen, None])]
    else:
        kind = "string" if isinstance(every[0], str) else "Int64"
        columns = [module.Series(chosen), module.Index(chosen), module.Series([*chosen, None], dtype=kind)]
    for column in columns:
        assert index.search(make(1)[0], 5, allow=column).ids.tolist() == expected
        assert not set(index.search(make(1)[0], 5, deny=column).ids) & set(chosen)


def test_results_are_denied_as_they_are(living):
    """Of one query or several, with the missing neighbours among them, and of a search in batches."""
    index, model, every = living
    few = index.search(make(3, 1), 8, recall=1.0, allow=every[:6])
    assert {-1, None} & set(few.ids.ravel().tolist())
    for found in (few, index.search(make(1)[0], 8, recall=1.0), index.search(make(4, 2), 5, recall=1.0)):
        gone = set(found.ids.ravel().tolist())
        left = set(index.search(make(1)[0], 400, recall=1.0, deny=found.ids).ids.tolist()) - {-1, None}
        assert left == model.keys() - gone
        batches = index.search_iter(make(1)[0], 50, recall=1.0, deny=(each for each in found.ids.ravel()))
        assert {name for batch in batches for name in batch.ids.tolist()} == left
        asked = index.explain(make(1)[0], 3, deny=iter(found.ids.ravel().tolist()))
        assert not {record.id for record in asked.records} & gone
    assert set(index.search(make(1)[0], 9, allow=[-1] if isinstance(every[0], int) else [None]).ids) <= {-1, None}


def test_batches_of_neighbours_and_accounts_keep_to_the_lists(living):
    index, model, every = living
    chosen = every[:200]
    batches = index.search_iter(make(1)[0], 20, recall=1.0, allow=chosen, deny=every[:10])
    found = [name for batch in batches for name in batch.ids.tolist()]
    assert sorted(found) == sorted(name for name in model if name in set(chosen[10:]))
    explained = index.explain(make(1)[0], 3, allow=chosen[10:20])
    assert {record.id for record in explained.records} <= set(chosen[10:20])


def test_a_declared_recall_holds_among_few_and_among_most(tmp_path):
    vectors, queries = make(6000), make(100, 7)
    random = np.random.default_rng(3)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        for size in (30, 600, 5900):
            chosen = np.sort(random.permutation(6000)[:size])
            away = np.square(queries[:, None] - vectors[chosen][None]).sum(axis=2)
            truth = chosen[np.argsort(away, axis=1)[:, :10]]
            for options in ({"allow": chosen}, {"deny": np.setdiff1d(np.arange(6000), chosen)}):
                found = index.search(queries, 10, recall=0.95, **options).ids
                hits = np.mean([len(np.intersect1d(one, other)) / 10 for one, other in zip(found, truth, strict=True)])
                assert hits >= 0.94


def test_wrong_lists_are_refused(living, tmp_path):
    index, _, every = living
    wrong = [1, 2] if isinstance(every[0], str) else ["a", "b"]
    for name in ("allow", "deny"):
        integers = [[1, True], np.array([True]), np.array([1.0, -1.0])] if isinstance(every[0], int) else [["a", 1]]
        table = SimpleNamespace(columns=["ids"])
        for value in (wrong, set(wrong), [1.5], [[1, 2], [3, 4]], [[1], [2, 3]], {1: 2}, b"ab", table, *integers):
            with pytest.raises((TypeError, ValueError), match=name):
                index.search(make(1)[0], 3, **{name: value})
    with (
        ZoomIndex.build(tmp_path / "pq", make(500), preview="pq", dram="4MiB") as products,
        pytest.raises(ValueError, match="cannot be filtered"),
    ):
        products.search(make(1)[0], 3, allow=[1])
