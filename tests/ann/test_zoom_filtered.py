"""Searches of the few or many rows that a filter leaves, of any relation to the vectors, beside an exact search."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann import ZoomIndex
from memhier.ann.zoom.filters.bitmaps import pack, runs_with, unpack
from memhier.ann.zoom.preview.routing import router
from memhier.ann.zoom.preview.routing.router import Router
from memhier.ann.zoom.preview.scan_arguments import SCAN_TALLY, Candidates
from memhier.ann.zoom.search import search as searching
from memhier.ann.zoom.search.search import Selection
from memhier.ann.zoom.storage import layout

COUNT, DIMENSION, K = 6000, 16, 10
SHARES = (0.5, 0.1, 0.02, 0.005, 0.001)


def make(count, seed):
    """Return vectors around forty centres."""
    random = np.random.default_rng([seed, 1])
    centres = 3 * np.random.default_rng(0).normal(size=(40, DIMENSION))
    return (centres[random.integers(0, 40, count)] + random.normal(size=(count, DIMENSION))).astype(np.float32)


def order_from(vectors, query):
    """Return the share of the vectors that are nearer to a query, of each."""
    return np.argsort(np.argsort(np.square(vectors - query).sum(axis=1), kind="stable")) / len(vectors)


VECTORS, QUERIES = make(COUNT, 0), make(40, 1)
PRICE, PLACE = np.random.default_rng(2).permutation(COUNT) / COUNT, order_from(VECTORS, QUERIES[0])
FILTERS = {
    "unrelated": [(f"price < {share}", share > PRICE) for share in SHARES],
    "near one": [(f"place < {share}", share > PLACE) for share in SHARES],
    "far from one": [(f"place >= {1 - share}", 1 - share <= PLACE) for share in SHARES],
    "few near, many far": [
        (f"place >= {1 - share} or place < {share / 8}", (1 - share <= PLACE) | (share / 8 > PLACE)) for share in SHARES
    ],
    "hardly any": [("price < 0", PRICE < 0), ("price == 0", PRICE == 0), ("price < 0.0005", PRICE < 0.0005)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An index of some hundred lists."""
    path = tmp_path_factory.mktemp("filtered") / "index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_VECTORS_PER_LIST", 20)
        ZoomIndex.build(path, VECTORS, attributes={"price": PRICE, "place": PLACE}, dram="8MiB").close()
    return path


@pytest.fixture(scope="module")
def index(folder):
    with ZoomIndex.open(folder) as index:
        yield index


def exact(vectors, ids, queries, k):
    """Return ids and distances of the nearest, -1 and infinity where there are fewer."""
    away = np.square(queries[:, None].astype(np.float64) - vectors[None]).sum(axis=2)
    order = np.argsort(away, axis=1, kind="stable")[:, :k]
    more = ((0, 0), (0, k - order.shape[1]))
    near = np.take_along_axis(away, order, 1)
    return np.pad(ids[order], more, constant_values=-1), np.pad(near, more, constant_values=np.inf)


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("k", [1, K, 300])
def test_a_recall_of_one_finds_the_nearest_rows_left(index, kind, k):
    for where, left in FILTERS[kind]:
        found = index.search(QUERIES[:6], k, where=where, recall=1.0)
        rows = np.flatnonzero(left)
        assert found.ids.tolist() == exact(VECTORS[rows], rows, QUERIES[:6], k)[0].tolist(), where


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("recall", [0.9, 0.95, 0.99])
def test_the_declared_recall_is_kept(index, kind, recall):
    for where, left in FILTERS[kind]:
        rows = np.flatnonzero(left)
        found, (_, near) = index.search(QUERIES, K, where=where, recall=recall), exact(VECTORS[rows], rows, QUERIES, K)
        some = min(K, len(rows))
        assert (found.ids[:, :some] >= 0).all()
        assert (found.ids[:, some:] == -1).all()
        hits = found.distances[:, :some] <= near[:, some - 1 : some] * (1 + 1e-5)
        assert not some or hits.mean() >= recall, (where, hits.mean())


def test_lists_without_rows_left_are_not_scanned(index):
    lists = index.stats()["lists"]
    assert lists > 200
    for kind in ("near one", "unrelated", "few near, many far"):
        for where, left in FILTERS[kind][2:]:
            told = index.explain(QUERIES[3], K, where=where)
            assert all(codes > 0 for _, codes in told.scans), where
            assert told.probed == len(told.scans) <= min(left.sum(), lists)
            assert told.scanned <= left.sum()
    none = index.search(QUERIES, K, where="price < 0")
    assert none.stats["probed"] == none.stats["scanned"] == none.stats["reads"] == 0


def test_fewer_rows_take_less_work(index):
    """Of rows in a few lists, and of rows anywhere once they are fewer than lists."""
    for kind in ("near one", "unrelated"):
        scanned = [index.search(QUERIES, K, where=where).stats["scanned"] for where, _ in FILTERS[kind]]
        assert scanned == sorted(scanned, reverse=True), kind


@pytest.mark.long
@pytest.mark.parametrize("kind", FILTERS)
def test_the_plain_core_a_cache_and_a_batch_change_nothing(folder, kind, monkeypatch):
    for where, left in FILTERS[kind]:
        with ZoomIndex.open(folder, pool=False) as index:
            first, again = (index.search(QUERIES, K, where=where, recall=0.9) for _ in range(2))
            alone = [index.search(query, K, where=where, recall=0.9).ids.tolist() for query in QUERIES]
            allowed = index.search(QUERIES, K, allow=np.flatnonzero(left), recall=0.9)
        assert first.ids.tolist() == again.ids.tolist() == alone == allowed.ids.tolist(), where
        assert first.stats == again.stats
        if backend.core is not None:
            with monkeypatch.context() as patch, ZoomIndex.open(folder) as index:
                patch.setattr(backend, "core", None)
                plain = index.search(QUERIES, K, where=where, recall=0.9)
            assert plain.ids.tolist() == first.ids.tolist(), where


@pytest.mark.parametrize("where", ["price < 0.02", "place >= 0.9", "place < 0.1"])
def test_little_room_for_candidates_changes_nothing(index, where, monkeypatch):
    usual = index.search(QUERIES, K, where=where)
    for room in (1, 13, 1 << 20):
        monkeypatch.setattr(searching, "_LIMIT_FEW", room)
        found = index.search(QUERIES, K, where=where)
        assert found.ids.tolist() == usual.ids.tolist()
        assert found.distances.tolist() == usual.distances.tolist()


@given(seed=st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
def test_parts_removed_rows_and_rows_that_wait(tmp_path_factory, seed):
    """Filters are compared anew after every change, with bitmaps that were made before it."""
    random = np.random.default_rng(seed)
    names, path = np.arange(900), tmp_path_factory.mktemp("living") / "index"
    columns = {"price": PRICE[:900], "place": order_from(VECTORS[:900], QUERIES[0])}
    alive = np.zeros(900, np.bool_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_VECTORS_PER_LIST", 5)
        index = ZoomIndex.build(
            path, VECTORS[:400], attributes={name: each[:400] for name, each in columns.items()}, dram="4MiB"
        )
    with index:
        alive[:400] = True
        for step in range(4):
            share = float(random.choice([0.001, 0.01, 0.1, 0.6]))
            for where, left in [
                (f"price < {share}", columns["price"] < share),
                (f"place < {share}", columns["place"] < share),
                (f"place > {1 - share}", columns["place"] > 1 - share),
                ("price < 0.2 and place < 0.3", (columns["price"] < 0.2) & (columns["place"] < 0.3)),
            ]:
                rows, chosen = np.flatnonzero(left & alive), random.permutation(900)[:200]
                found = index.search(QUERIES[:5], 7, where=where, recall=1.0)
                assert found.ids.tolist() == exact(VECTORS[rows], rows, QUERIES[:5], 7)[0].tolist(), (step, where)
                found = index.search(QUERIES[:5], 7, where=where, allow=chosen, recall=1.0)
                rows = np.intersect1d(rows, chosen)
                assert found.ids.tolist() == exact(VECTORS[rows], rows, QUERIES[:5], 7)[0].tolist(), (step, where)
            gone = random.permutation(np.flatnonzero(alive))[:60]
            index.remove(gone)
            alive[gone] = False
            new = slice(400 + 100 * step, 500 + 100 * step)
            index.add(VECTORS[new], ids=names[new], attributes={name: each[new] for name, each in columns.items()})
            alive[new] = True
            if step % 2 == 0:
                index.commit()


def test_some_lists_of_many_axes_are_put_in_order_and_not_all_scanned(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "_VECTORS_PER_LIST", 40)
    random = np.random.default_rng(5)
    centres = random.normal(size=(40, 512))
    vectors = (centres[random.integers(0, 40, 3040)] + 0.6 * random.normal(size=(3040, 512))).astype(np.float32)
    vectors, queries, price = vectors[:3000], vectors[3000:], random.random(3000)
    chosen = np.flatnonzero(price < 0.2)
    exact = chosen[np.argsort(np.square(vectors[chosen] - queries[:, None]).sum(axis=2), axis=1)[:, :K]]
    with ZoomIndex.build(tmp_path / "index", vectors, attributes={"price": price}, dram="8MiB") as index:
        found = index.search(queries, K, recall=0.9, where="price < 0.2")
        lists = index.stats()["lists"]
    assert np.mean([len(np.intersect1d(*pair)) for pair in zip(found.ids, exact, strict=True)]) >= 0.9 * K
    assert found.stats["probed"] < 0.7 * lists * len(queries)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("codes", ["dram", "ssd"])
def test_the_rows_and_lists_that_a_filter_leaves_are_those_of_a_plain_count(tmp_path, native, codes, monkeypatch):
    if native and backend.core is None:
        pytest.skip("needs the compiled core")
    if not native:
        monkeypatch.setattr(backend, "core", None)
    monkeypatch.setattr(layout, "_VECTORS_PER_LIST", 20)
    if codes == "ssd":
        monkeypatch.setattr(layout, "_fair_bytes", lambda axes: 99)
    names = np.arange(COUNT)
    with ZoomIndex.build(tmp_path / "index", VECTORS[:5003], attributes={"price": PRICE[:5003]}, dram="8MiB") as index:
        assert index.stats()["codes"] == codes
        index.add(VECTORS[5003:], ids=names[5003:], attributes={"price": PRICE[5003:]})
        index.commit()
        index.remove(names[::7])
        index.commit()
        made, of = [], Selection.of
        monkeypatch.setattr(
            Selection, "of", lambda state, *limits: made.append((state, of(state, *limits))) or made[-1][1]
        )
        for where, allow, deny in (
            ("price < 0.005", None, None), ("price < 0.5", None, None), ("price < 0", None, None),
            (None, names[:40], None), ("price < 0.1", None, names[:3000]), (None, None, names[::2]),
        ):  # fmt: skip
            left = np.arange(COUNT) % 7 != 0
            left &= True if where is None else float(where.split()[-1]) > PRICE
            left &= True if allow is None else np.isin(names, allow)
            left &= True if deny is None else ~np.isin(names, deny)
            index.search(QUERIES[0], 3, where=where, allow=allow, deny=deny)
            state, (rows, *_) = made[-1]
            assert rows.total == left.sum()
            held = rows.lists
            assert rows.held == (None if held is None else len(held))
            if held is not None:
                every = [np.searchsorted(part.arrays.starts, np.flatnonzero(unpack(bits, len(part))), side="right") - 1
                         for part, bits in zip(state.parts, rows.bitmaps, strict=True)]  # fmt: skip
                assert held.tolist() == np.unique(np.concatenate(every)).tolist()


@given(data=st.data(), sizes=st.lists(st.integers(0, 200), max_size=40), share=st.sampled_from([0.0, 0.01, 0.3, 1.0]))
@settings(max_examples=60, deadline=None)
def test_runs_with_rows_are_those_of_a_plain_count(data, sizes, share):
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)
    rows = np.random.default_rng(data.draw(st.integers(0, 99))).random(starts[-1]) < share
    expected = [bool(rows[start:stop].any()) for start, stop in itertools.pairwise(starts)]
    runs, count = runs_with(pack(rows), starts)
    assert unpack(runs, len(sizes)).tolist() == expected
    assert count == rows.sum()


def test_runs_are_as_many_as_there_are():
    starts = 3 * np.arange(5001)
    rows = np.random.default_rng(0).random(15000) < 0.2
    assert (unpack(runs_with(pack(rows), starts)[0], 5000) == rows.reshape(-1, 3).any(axis=1)).all()


@pytest.mark.long
@pytest.mark.parametrize("lists", [1, 7, 255, 256, 257, 3000])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_a_route_among_some_lists_is_that_of_a_plain_comparison(lists, graph, native, monkeypatch):
    if native and backend.core is None:
        pytest.skip("needs the compiled core")
    if not native:
        monkeypatch.setattr(backend, "core", None)
    if graph:
        monkeypatch.setattr(router, "EXACT_LISTS", 0)
    random = np.random.default_rng(lists)
    # Whole numbers, so that there are ties, which go to the lower number, and no rounding.
    centroids = random.integers(-20, 21, (4 * lists, 20)).astype(np.float32)
    centroids[1::7] = centroids[0]
    made = Router.build(centroids)
    among = np.sort(random.permutation(4 * lists)[:lists])
    queries = random.integers(-20, 21, (6, 20)).astype(np.float32)
    away = np.square(queries[:, None] - centroids[among]).sum(axis=2)
    expected = among[np.argsort(away, axis=1, kind="stable")]
    assert made.route(queries, 4 * lists, in_order=True, among=among).tolist() == expected.tolist()
    assert made.route(queries, lists, among=among).tolist() == [among.tolist()] * 6
    few = max(1, lists // 3)
    found = made.route(queries, few, in_order=True, among=among)
    if not graph:
        assert found.tolist() == expected[:, :few].tolist()


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@pytest.mark.parametrize("among", [[3, 2], [1, 1], [-1, 2], [0, 9]])
def test_rows_that_do_not_ascend_are_refused(among):
    nearest = partial(backend.core.nearest_rows, rows=np.zeros((9, 4), np.uint16), nearest=np.zeros((1, 1), np.int64))
    with pytest.raises(ValueError, match="among has row numbers, ascending"):
        nearest(queries=np.zeros((1, 4), np.float32), among=np.array(among, np.int64))


@given(seed=st.integers(0, 2**16), k=st.integers(1, 12), loss=st.sampled_from([0.0, 0.01, 0.3, 4.0]))
@settings(max_examples=60, deadline=None)
def test_the_candidates_left_out_are_hardly_neighbours(seed, k, loss):
    random = np.random.default_rng(seed)
    counts = random.integers(0, 30, 5)
    estimates, errors = random.random((5, 30)).astype(np.float32), random.random((5, 30)).astype(np.float32) / 4
    errors[:, 7], errors[:, 9] = np.inf, 0
    order = np.argsort(estimates - 2 * errors, axis=1)
    estimates, errors = np.take_along_axis(estimates, order, 1), np.take_along_axis(errors, order, 1)
    lower = estimates - 2 * errors
    empty = np.zeros(5, np.float32)
    found = Candidates(np.zeros((5, 30), np.int64), lower, estimates, counts, empty, np.zeros(5, SCAN_TALLY))
    likely = found.likely(k, 2.0, loss)
    assert (likely <= counts).all()
    assert (likely >= np.minimum(counts, k)).all()
    for query, (kept, count) in enumerate(zip(likely.tolist(), counts.tolist(), strict=True)):
        if kept == count:
            continue
        kth = np.sort((estimates + errors)[query, :count])[k - 1]
        with np.errstate(all="ignore"):
            odds = 1 / (1 + np.exp(1.702 * (estimates[query] - kth) / errors[query]))
        assert odds[kept:count].sum() <= loss + 1e-4
        assert kept == k or not odds[kept - 1 : count].sum() <= loss - 1e-4  # unknown odds count


@pytest.mark.parametrize("recall", [0.9, 0.95])
def test_far_rows_among_heavy_tails_are_found(tmp_path, recall):
    """Of Cauchy vectors, those far from most queries: residuals exceed three of their standard deviations."""
    random = np.random.default_rng(9)

    def draw(count):
        return np.clip(random.standard_cauchy((count, 24)), -1e4, 1e4).astype("f4")

    vectors, queries = draw(20_000), draw(300)
    away = np.stack([np.square(vectors.astype("f8") - each).sum(1) for each in queries.astype("f8")])
    remote = np.argsort(np.argsort(np.median(away, 0))) / len(vectors)
    with ZoomIndex.build(tmp_path / "index", vectors, attributes={"remote": remote}, dram="3MiB") as index:
        found = index.search(queries, 10, where="remote >= 0.9", recall=recall).ids
    kth = np.partition(away[:, remote >= 0.9], 9, axis=1)[:, 9:10]
    hits = np.take_along_axis(away, found, 1) <= kth * (1 + 1e-5)
    assert hits.mean() >= recall
