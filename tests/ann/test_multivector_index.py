"""MultiVectorIndex beside exhaustive MaxSim: dtypes, lengths, ties, filters, and data unlike that of a model."""

import importlib.util
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.ann.multivector.storage.layout import workspace_bytes

spec = importlib.util.spec_from_file_location("multivector_data", Path(__file__).with_name("multivector_data.py"))
data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)

DTYPES = ["float32", "float16", "int8", "uint8"]


def queries_of(items, count, seed=1):
    """Return parts of some items, with noise."""
    random = np.random.default_rng(seed)
    found = []
    for number in random.choice(len(items), count):
        tokens = items[number].astype(np.float32)
        tokens = tokens[random.permutation(len(tokens))[: int(random.integers(1, 9))]]
        found.append(tokens + 0.1 * np.abs(tokens).mean() * random.normal(size=tokens.shape).astype(np.float32))
    return found


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_search_finds_what_a_comparison_with_all_finds(tmp_path, dtype):
    items = data.drawn_items(400, 24, dtype)
    model = dict(enumerate(items))
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        for query in queries_of(items, 12):
            data.assert_best(index.search(query, 10, recall=1.0), query, model, 10)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_search_keeps_its_recall(tmp_path, dtype):
    items = data.drawn_items(1500, 24, dtype)
    queries = queries_of(items, 40)
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        found = index.search(queries, 10)
        shares = [
            len(np.intersect1d(ids, data.best_of(query, items, 10)[0])) / 10
            for ids, query in zip(found.ids, queries, strict=True)
        ]
        assert np.mean(shares) >= 0.97
        assert found.stats["ranked"] < len(queries) * len(items)
        assert found.stats["calibrated"]


def test_items_of_one_to_three_hundred_tokens(tmp_path):
    random = np.random.default_rng(3)
    items = [random.normal(size=(length, 9)).astype(np.float32) for length in [*range(1, 301, 7), 300, 1, 2]]
    model = dict(enumerate(items))
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        for query in [items[5], items[-3][:100], items[-2], random.normal(size=(3, 9))]:
            for recall in (1.0, 0.9):
                data.assert_best(index.search(query, 5, recall=1.0), query, model, 5)
                assert len(index.search(query, 5, recall=recall).ids) == 5


def test_queries_of_many_vectors_take_several_tables(tmp_path):
    items = data.drawn_items(200, 16, "float32")
    query = np.concatenate(items[:8])[:150]
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        data.assert_best(index.search(query, 7, recall=1.0), query, dict(enumerate(items)), 7)
        assert index.search(query, 7).ids[0] == data.best_of(query, items, 1)[0][0]


def test_ties_stand_in_the_order_of_ids(tmp_path):
    random = np.random.default_rng(5)
    kinds = [random.integers(-3, 4, size=(4, 6)).astype(np.int8) for _ in range(3)]
    items = [kinds[number % 3] for number in range(90)]
    names = np.random.default_rng(1).permutation(90) + 1000
    query = kinds[1].astype(np.float32)
    with MultiVectorIndex.build(tmp_path / "index", items, names, dram="4MiB") as index:
        wanted, scores = data.best_of(query, items, 40, names)
        for recall in (1.0, 0.99):
            found = index.search(query, 40, recall=recall)
            assert found.ids.tolist() == wanted.tolist()
            assert found.scores.tolist() == scores.tolist()


@pytest.mark.parametrize("zeros", [1.0, 0.5])
def test_zero_vectors(tmp_path, zeros):
    random = np.random.default_rng(2)
    items = [random.normal(size=(3, 8)).astype(np.float16) for _ in range(60)]
    for number in range(int(60 * zeros)):
        items[number][:] = 0
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        for query in (np.zeros((2, 8)), -np.ones((1, 8)), random.normal(size=(4, 8))):
            data.assert_best(index.search(query, 70, recall=1.0), query, dict(enumerate(items)), 70)
        assert index.search(np.zeros((2, 8)), 3).ids.tolist() == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("tail", [3.0, 8.0])
def test_heavy_tailed_norms(tmp_path, tail):
    random = np.random.default_rng(7)
    items = data.drawn_items(600, 12, "float32", 7)
    items = [item * np.exp(tail * random.normal(size=(len(item), 1))).astype(np.float32) for item in items]
    model = dict(enumerate(items))
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        shares = []
        for query in queries_of(items, 10):
            data.assert_best(index.search(query, 10, recall=1.0), query, model, 10)
            best = data.best_of(query, items, 10)[0]
            shares.append(len(np.intersect1d(index.search(query, 10).ids, best)) / 10)
        assert np.mean(shares) >= 0.95


def test_vectors_far_beyond_those_of_the_build_are_found(tmp_path):
    items = data.drawn_items(400, 12, "float32")
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB", grow_to=600) as index:
        more = [1e9 * item for item in items[:3]]
        added = index.add([*more, items[5]])
        index.commit(compact=False)
        model = dict(enumerate(items)) | dict(zip(added.tolist(), [*more, items[5]], strict=True))
        for recall in (0.9, 1.0):
            data.assert_best(index.search(items[0], 3, recall=recall), items[0], model, 3)


@pytest.mark.parametrize("count", [1, 2, 11])
def test_few_items(tmp_path, count):
    items = data.drawn_items(count, 5, "float32", seed=count)
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        data.assert_best(index.search(items[0], 20), items[0], dict(enumerate(items)), 20)


def test_copies_of_one_vector(tmp_path):
    items = [np.ones((3, 4), np.float32)] * 300
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        assert index.search(np.ones((1, 4)), 5).ids.tolist() == [0, 1, 2, 3, 4]


def test_arrays_and_lengths_are_the_same_items(tmp_path):
    array = np.random.default_rng(0).normal(size=(50, 6, 8)).astype(np.float32)
    query = array[7, :3]
    found = []
    for number, (items, lengths) in enumerate([(array, None), (list(array), None), (array.reshape(-1, 8), [6] * 50)]):
        with MultiVectorIndex.build(tmp_path / str(number), items, lengths=lengths, dram="4MiB") as index:
            found.append(index.search([query, array[9]], 4))
    assert all(np.array_equal(each.ids, found[0].ids) for each in found)
    assert all(np.array_equal(each.scores, found[0].scores) for each in found)
    assert found[0].ids[:, 0].tolist() == [7, 9]


@pytest.mark.long
def test_results_do_not_depend_on_the_budget(tmp_path):
    items = data.drawn_items(500, 16, "float16")
    queries = queries_of(items, 10)
    found = []
    for number, dram in enumerate(["4MiB", "16MiB"]):
        with MultiVectorIndex.build(tmp_path / str(number), items, dram=dram) as index:
            found.append(index.search(queries, 10, recall=1.0))
    assert np.array_equal(found[0].ids, found[1].ids)
    assert np.array_equal(found[0].scores, found[1].scores)


def test_filters(tmp_path):
    items = data.drawn_items(900, 12, "float32")
    years = [1990 + number % 30 for number in range(900)]
    tags = [["a"] if number % 100 == 0 else ["b", "c"] for number in range(900)]
    attributes = {"year": years, "tags": tags}
    model = dict(enumerate(items))
    cases = {
        "year >= 2000": {name for name in model if years[name] >= 2000},
        "tags contains 'a'": {name for name in model if name % 100 == 0},
        "year < 1990": set(),
    }
    with MultiVectorIndex.build(tmp_path / "index", items, attributes=attributes, dram="4MiB") as index:
        assert index.fields == {"year": "int64", "tags": "list[str]"}
        for where, names in cases.items():
            left = {name: model[name] for name in names}
            for query in queries_of(items, 4):
                found = index.search(query, 10, recall=1.0, where=where)
                if left:
                    data.assert_best(found, query, left, 10)
                near = index.search(query, 10, where=where)
                assert set(near.ids.tolist()) <= names | {-1}
                assert (near.ids >= 0).sum() == min(10, len(names))
                assert not near.stats["calibrated"] or near.stats["recall"] == 1.0
        query = items[3]
        top = index.search(query, 10, recall=1.0).ids
        denied = index.search(query, 10, recall=1.0, deny=top[:4])
        assert denied.ids[:6].tolist() == top[4:].tolist()
        allowed = index.search(query, 10, allow=[*top[2:5].tolist(), 10**6])
        assert allowed.ids.tolist() == [*top[2:5].tolist(), *[-1] * 7]


def test_a_filter_that_leaves_some_keeps_the_recall(tmp_path):
    random = np.random.default_rng(4)
    items = data.drawn_items(6000, 12, "float16", longest=6)
    half = random.random(6000) < 0.5
    with MultiVectorIndex.build(tmp_path / "index", items, attributes={"half": half}, dram="4MiB") as index:
        shares = []
        for query in queries_of(items, 15):
            kept = np.flatnonzero(half)
            best = data.best_of(query, [items[name] for name in kept], 10, kept)[0]
            shares.append(len(np.intersect1d(index.search(query, 10, where="half").ids, best)) / 10)
        assert np.mean(shares) >= 0.95


def test_rows_and_order_of_a_result(tmp_path):
    items = data.drawn_items(20, 5, "float32")
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        found = index.search([items[0], items[1]], 2)
        scores, ids = found
        assert scores is found.scores
        assert ids is found.ids
        assert found.rows()[1][0] == {"id": int(ids[1, 0]), "score": float(scores[1, 0])}
        assert len(index.search(items[0], 30).rows()) == 20
        assert index.search([], 3).ids.shape == (0, 3)


@pytest.mark.long
@pytest.mark.parametrize(("count", "longest"), [(1500, 32), (60, 300), (8000, 2)])
def test_a_search_takes_no_more_memory_than_is_counted(tmp_path, count, longest):
    items = data.drawn_items(count, 48, "float16", longest=longest)
    query = np.concatenate(items[:6])[:32]
    attributes = {"number": range(count)}
    with MultiVectorIndex.build(tmp_path / "index", items, attributes=attributes, dram="6MiB") as index:
        stats = index.stats()
        assert stats["memory_bytes"] <= stats["planned_bytes"] <= stats["dram"]
        work = workspace_bytes(stats["lists"], count, 32 << 10, 96, max(map(len, items)))
        for options in ({}, {"recall": 1.0}, {"where": f"number < {count // 2}"}, {"k": 150}):
            index.search(query, **{"k": 10, **options})
            tracemalloc.start()
            index.search(query, **{"k": 10, **options})
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= work + (64 << 10), options  # of Python's own objects


@pytest.mark.long
@pytest.mark.parametrize(("shift", "scale"), [(2.0, 1.0), (0.0, 4.0)])
def test_items_unlike_those_of_the_build_are_found(tmp_path, shift, scale):
    items = data.drawn_items(900, 16, "float32")
    drifted = [scale * (item + np.float32(shift)) for item in data.drawn_items(250, 16, "float32", seed=9)]
    both = items + drifted
    with MultiVectorIndex.build(tmp_path / "index", items, dram="6MiB", grow_to=2000) as index:
        index.add(drifted)
        index.commit(compact=False)
        shares = [
            len(np.intersect1d(index.search(query, 10).ids, data.best_of(query, both, 10)[0])) / 10
            for query in queries_of(drifted, 10) + queries_of(items, 10)
        ]
        assert np.mean(shares) >= 0.97


@pytest.mark.long
@pytest.mark.parametrize(("longest", "vectors", "mixed"), [(24, 1, False), (24, 6, True), (1, 24, True)])
def test_queries_of_few_and_of_many_vectors_keep_the_recall(tmp_path, longest, vectors, mixed):
    random = np.random.default_rng(6)
    items = [random.normal(size=(int(length), 16)) for length in random.integers(1 + longest // 2, longest + 1, 1000)]
    items = [(item / np.linalg.norm(item, axis=1, keepdims=True)).astype(np.float16) for item in items]
    tokens, starts = np.concatenate(items).astype(np.float32), np.cumsum([0, *map(len, items)])
    with MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB") as index:
        shares = []
        for number in random.choice(len(items), 30):
            query = tokens[random.choice(len(tokens), vectors)] if mixed else items[number][:vectors]
            exact = np.maximum.reduceat(tokens @ query.T, starts[:-1], axis=0).sum(axis=1)
            kth = np.sort(exact)[-10]
            shares.append(np.mean(exact[index.search(query, 10).ids] >= kth - 1e-4))
        assert np.mean(shares) >= 0.96


@pytest.mark.long
@pytest.mark.parametrize("removed", [0, 700])
def test_a_proof_reads_little_more_than_all_items_once(tmp_path, removed):
    random = np.random.default_rng(8)
    items = [random.normal(size=(int(length), 48)).astype(np.float16) for length in random.integers(1, 40, 1500)]
    model = dict(enumerate(items))
    with MultiVectorIndex.build(tmp_path / "index", items, dram="1280KiB") as index:
        index.remove(range(removed))
        model = {name: item for name, item in model.items() if name >= removed}
        pages = sum(item.nbytes for item in model.values()) / 4096
        for query in queries_of(items[removed:], 4):
            found = index.search(query, 10, recall=1.0)
            data.assert_best(found, query, model, 10)
            assert found.stats["ranked"] > len(model) / 2  # the bounds leave most, so all are read in one round
            # Reads of 128 KiB share their last pages, and some items are read before.
            assert found.stats["pages"] <= 1.1 * pages + 50
        near = index.search(items[-1][:1] * 30, 1, recall=1.0)
        assert near.stats["ranked"] <= len(model)


def test_the_few_best_items_are_found_as_often_as_declared(tmp_path):
    random = np.random.default_rng(4)
    lengths = random.integers(1, 30, 1000)
    norms = np.repeat(random.lognormal(0, 0.6, 1000), lengths) * random.lognormal(0, 0.5, lengths.sum())
    tokens = (random.normal(size=(lengths.sum(), 48)) * norms[:, None]).astype(np.float32)
    queries = random.normal(size=(200, 1, 48)).astype(np.float32)
    exact = np.maximum.reduceat(tokens @ queries[:, 0].T, np.cumsum(lengths) - lengths, axis=0).T
    with MultiVectorIndex.build(tmp_path / "index", tokens, lengths=lengths, dram="1000KiB") as index:
        for k in (1, 3):
            found = index.search(queries, k, recall=0.99)
            kth = np.sort(exact, axis=1)[:, -k, None]
            assert (np.take_along_axis(exact, found.ids, 1) >= kth - 1e-4).mean() >= 0.98


def test_queries_of_vectors_that_are_alike_keep_the_recall(tmp_path):
    random = np.random.default_rng(5)
    lengths = random.integers(1, 20, 800)
    tokens = random.normal(size=(lengths.sum(), 48)).astype(np.float32)
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    alike = np.repeat(tokens[random.choice(len(tokens), 40), None], 16, axis=1)
    queries = (alike + 0.02 * random.normal(size=alike.shape)).astype(np.float32)
    products = np.maximum.reduceat(tokens @ queries.reshape(-1, 48).T, np.cumsum(lengths) - lengths, axis=0)
    exact = products.reshape(800, 40, 16).sum(axis=2).T
    kth = np.sort(exact, axis=1)[:, -10, None]
    with MultiVectorIndex.build(tmp_path / "index", tokens, lengths=lengths, dram="900KiB") as index:
        for declared in (0.9, 0.99):
            found = index.search(queries, 10, recall=declared)
            assert (np.take_along_axis(exact, found.ids, 1) >= kth - 1e-3).mean() >= declared - 0.02
