"""The graph: the transform, the links, walks and screening; FGD as published against plain inner product."""

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.ann.decoder import FGD, LogitIndex
from memhier.ann.decoder.calibration import calibrate
from memhier.ann.decoder.calibration.build import BuildOptions, build_codes
from memhier.ann.decoder.coding.codes import RowCodes
from memhier.ann.decoder.coding.graph import build_links, learn_seeds, relink
from memhier.ann.decoder.coding.transform import transform_contexts, transform_rows
from memhier.ann.decoder.core import core as core_module
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.engine import Coarse, Effort, Walk
from memhier.ann.decoder.layer import check_layer
from memhier.ann.decoder.stored import open_index
from memhier.ann.links import NO_ROW, prune_links


def make_model(words=3000, dimension=48, seed=0):
    """A layer as trained ones are: a common component, biases that follow a word's frequency, contexts of low rank."""
    rng = np.random.default_rng(seed)
    topics = rng.normal(size=(12, dimension))
    weight = rng.normal(size=(words, 12)) @ topics * 0.35 + rng.normal(size=(words, dimension)) * 0.1
    weight += 2 * rng.normal(size=dimension)
    bias = -np.log(np.arange(1, words + 1)) - 3
    hidden = rng.normal(size=(2400, 12)) @ topics * 0.5 + rng.normal(size=(2400, dimension)) * 0.05
    return weight.astype(np.float32), bias.astype(np.float32), hidden.astype(np.float32)


def make_engine(weight, bias, contexts, **options):
    """The engine that an index of this layer answers by, and its settings."""
    layer = check_layer(weight, bias, None)
    codes, measured, _ = build_codes(layer, contexts, BuildOptions(**options))
    return DramEngine(codes, layer), measured


def saved_codes(index, path):
    """The codes of an index, read from its files."""
    index.save(path)
    return open_index(path, None, "read")[0].codes


def precision(found, weight, bias, hidden):
    logits = hidden @ weight.T + bias
    k = found.shape[1]
    kth = np.sort(logits, 1)[:, -k]
    rows = np.arange(len(hidden))[:, None]
    return (logits[rows, found] >= kth[:, None] - 1e-4).mean()


@pytest.fixture(params=["native", "python"])
def core(request, monkeypatch):
    """Both cores, by turns."""
    if request.param == "python":
        monkeypatch.setattr(core_module.backend, "core", None)
    elif core_module.backend.core is None:
        pytest.skip("needs the compiled core")


@settings(max_examples=30, deadline=None)
@given(words=st.integers(1, 50), dimension=st.integers(1, 9), seed=st.integers(0, 1000))
def test_after_the_transform_nearest_is_largest(words, dimension, seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(words, dimension)).astype(np.float32), rng.normal(size=words).astype(np.float32)
    hidden = rng.normal(size=(3, dimension)).astype(np.float32)
    rows, contexts = transform_rows(weight, bias), transform_contexts(hidden)
    norms = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(norms, norms.max(), rtol=1e-5)
    away = np.square(rows[None] - contexts[:, None], dtype=np.float64).sum(2) / 2
    right = (norms.max() ** 2 + np.square(hidden).sum(1) + 1)[:, None] / 2 - (hidden @ weight.T + bias)
    np.testing.assert_allclose(away, right, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(words=st.integers(1, 40), degree=st.integers(1, 8), candidates=st.integers(1, 20), seed=st.integers(0, 1000))
def test_links_are_those_of_the_rule(words, degree, candidates, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(words, 5)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    near = rng.integers(-1, words, (words, candidates))
    links = prune_links(rows, np.arange(words), near, degree, inner=True)
    for own, kept in enumerate(links.tolist()):
        others = sorted({*near[own].tolist()} - {-1, own}, key=lambda other: -float(rows[other] @ rows[own]))
        wanted = []
        for other in others:
            product = rows[other] @ rows[own]
            if len(wanted) < degree and all(rows[other] @ rows[one] <= product for one in wanted):
                wanted.append(other)
        wanted += [other for other in others if other not in wanted][: degree - len(wanted)]
        assert [row for row in kept if row != NO_ROW] == wanted


@pytest.mark.parametrize("inner", [False, True])
def test_the_two_cores_prune_alike(monkeypatch, inner):
    if core_module.backend.core is None:
        pytest.skip("needs the compiled core")
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(200, 9)).astype(np.float32)
    near = rng.integers(-1, 200, (200, 30))
    native = prune_links(rows, np.arange(200), near, 8, inner=inner)
    monkeypatch.setattr(core_module.backend, "core", None)
    np.testing.assert_array_equal(native, prune_links(rows, np.arange(200), near, 8, inner=inner))


def test_contexts_between_the_groups_are_walked_for_by_screening():
    """A wide cloud with the mean and covariance of clustered contexts; no norm tells them apart."""
    rng = np.random.default_rng(3)
    weight = (rng.normal(size=(6000, 48)) / np.sqrt(np.arange(1, 49))).astype(np.float32)
    states = 3 * rng.normal(size=(40, 48))[rng.integers(0, 40, 2400)] + rng.normal(size=(2400, 48))
    wide = states.mean(0) + rng.normal(size=(200, 48)) @ np.linalg.cholesky(np.cov(states.T)).T
    index = LogitIndex.build(weight, contexts=states.astype(np.float32), k=5, method="screen")
    wide = wide.astype(np.float32)
    assert precision(index.topk(wide).indices, weight, 0, wide) >= 0.95  # 0.88 by seeds alone


@pytest.mark.parametrize("method", ["graph", "screen"])
def test_walks_reach_their_declared_precision(method):
    weight, bias, hidden = make_model()
    index = LogitIndex.build(weight, bias, contexts=hidden[:2000], k=10, precision=0.98, method=method)
    assert index.settings.reached[method] > 0.98
    assert precision(index.topk(hidden[2000:]).indices, weight, bias, hidden[2000:]) > 0.98
    found = index.topk(hidden[2000:2100], 3)
    assert found.indices.shape == (100, 3)
    assert precision(found.indices, weight, bias, hidden[2000:2100]) > 0.98


@pytest.mark.parametrize("method", ["graph", "screen"])
def test_contexts_unlike_any_seen_go_to_the_preview(method):
    weight, bias, hidden = make_model()
    index = LogitIndex.build(weight, bias, contexts=hidden[:2000], k=10, method=method)
    strange = np.random.default_rng(5).normal(size=(100, 48)).astype(np.float32) * 3
    with pytest.warns(UserWarning, match="16 of 16 hidden states are unlike the contexts that this decoder was built"):
        found = index.topk(strange).indices
    np.testing.assert_array_equal(found, index.topk(strange, method="preview").indices)  # which does not warn again


def test_far_contexts_are_walked_for_as_far_as_that_was_measured(monkeypatch):
    weight, bias, hidden = make_model(1500, 24)
    monkeypatch.setattr(calibrate, "scan_cost", lambda *_: np.inf)
    engine, measured = make_engine(weight, bias, hidden[:2000], k=10, method="graph")
    index = LogitIndex(engine, measured, "graph", "")
    far = hidden[2000:2400].reshape(4, 100, 24).sum(0) - 3 * hidden.mean(0)
    strange = np.random.default_rng(5).normal(size=(20, 24)).astype(np.float32) * 3
    asked, away = np.concatenate([far, strange]), np.empty(120, np.float32)
    engine.walk(asked, 10, Walk(Effort(1, 0, 10)), away=away)
    assert (away[:100] > measured.radius).mean() > 0.9
    assert (away > measured.far_radius).mean() < 0.3
    scanned, preview = [], engine.preview
    monkeypatch.setattr(engine, "preview", lambda states, *rest: scanned.append(states) or preview(states, *rest))
    with pytest.warns(UserWarning, match="hidden states are unlike the contexts that this decoder was built from"):
        found = index.topk(asked).indices
    assert precision(found, weight, bias, asked) > 0.99
    np.testing.assert_array_equal(scanned[0], asked[away > measured.far_radius])
    assert len(scanned) == 2, "the preview answers, and then compares some of all states"


def test_a_walk_that_loses_its_way_far_out_is_not_taken(monkeypatch):
    weight, bias, hidden = make_model(1500, 24)
    monkeypatch.setattr(calibrate, "scan_cost", lambda *_: np.inf)
    engine, measured = make_engine(weight, bias, hidden[:600], k=10, method="graph")
    held, measured = calibrate.HeldOut.of(engine.layer, hidden[600:800], 10), measured.with_(far_ef=0)
    found = calibrate.calibrate_far(engine, held, measured, 0)
    assert found.far_ef >= measured.graph_ef
    assert found.far_radius > measured.radius
    monkeypatch.setattr(calibrate, "EFS", (4, 10))
    short = calibrate.calibrate_far(engine, held, measured.with_(graph_ef=2), 0)
    assert short.reached["far"] < short.asked
    assert short.far_ef == 0
    monkeypatch.undo()
    costly = calibrate.calibrate_far(engine, held, measured, 0)
    assert costly.reached["far"] == found.reached["far"]
    assert costly.far_ef == 0, "a scan of 1,500 words costs less than any walk"


def test_a_coarse_scan_keeps_the_best_of_its_survivors(core):
    weight, bias, hidden = make_model(900, 24)
    engine, _ = make_engine(weight, bias, hidden[:600], k=5, method="graph", rank=24)
    states = hidden[600:607]
    whole = engine.preview(states, 5, 20)
    for leading, survivors in ((4, 900), (8, 2000), (24, 20)):
        found = engine.preview(states, 5, 20, Coarse(leading, survivors))
        np.testing.assert_array_equal(found.indices, whole.indices)
    # With as few survivors as are asked for, the first directions alone decide.
    z, codes = engine.codes.projection(states), engine.codes.rows
    leading = (codes.codes[:, :4].astype(np.float64) - 128) * codes.numbers[1][:, None]
    best = np.argsort(-(z[:, :4] @ leading.T + codes.numbers[0]), 1)[:, :5]
    found = engine.preview(states, 5, 5, Coarse(4, 5)).indices
    assert (found[:, :, None] == best[:, None]).any(2).mean() > 0.9
    assert (whole.indices[:, :, None] == best[:, None]).any(2).mean() < 0.9
    # With more, all directions do.
    found = engine.preview(states, 5, 20, Coarse(4, 300)).indices
    assert (found[:, :, None] == whole.indices[:, None]).any(2).mean() > 0.9


def test_an_impossible_coarse_scan_is_refused():
    if core_module.backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, hidden = make_model(300, 24)
    engine, _ = make_engine(weight, bias, hidden[:300], k=5, method="graph", rank=24)
    for coarse in (Coarse(6, 50), Coarse(28, 50), Coarse(8, 10)):
        with pytest.raises(ValueError, match="coarse"):
            engine.preview(hidden[:1], 5, 20, coarse)
    without, _ = make_engine(weight, bias, hidden[:300], k=5, method="preview", rank=24)
    with pytest.raises(ValueError, match="coarse: needs codes"):
        without.preview(hidden[:1], 5, 20, Coarse(8, 50))


@pytest.mark.parametrize("further", [0.0, 1.5])
def test_both_cores_walk_the_same_way(monkeypatch, tmp_path, further):
    if core_module.backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, hidden = make_model(800, 24)
    LogitIndex.build(weight, bias, contexts=hidden[:1000], k=5, method="graph").save(tmp_path / "index")
    answers = []
    for _ in range(2):
        engine = open_index(tmp_path / "index", None, "read")[0]
        tally, away, states = np.zeros(60, np.int64), np.empty(60, np.float32), hidden[1000:1060]
        near, far = Effort(1, 12, 12), Effort(3, 20, 15)
        engine.walk(states, 5, Walk(near), away=away)
        radius = float(np.median(away))
        rows = engine.walk(states, 5, Walk(near, radius, far, further * radius), looked=tally).indices
        answers.append((rows, tally))
        # Each is answered as with its own effort alone, or not at all.
        left = away > max(1, further) * radius
        assert left.any()
        assert (rows[left] == -1).all()
        assert (tally[left] == 0).all()
        for effort, which in ((near, away <= radius), (far, (away > radius) & ~left)):
            alone = engine.walk(states, 5, Walk(effort)).indices
            np.testing.assert_array_equal(rows[which], alone[which])
        monkeypatch.setattr(core_module.backend, "core", None)
    (native, looked), (python, python_looked) = answers
    assert (native == python).mean() > 0.99
    assert (looked == python_looked).mean() > 0.9


def test_a_walk_looks_at_few_rows_and_screening_at_seeds_alone(core):
    weight, bias, hidden = make_model(900, 24)
    engine, _ = make_engine(weight, bias, hidden[:600], k=5, method="graph")
    tally = np.zeros(20, np.int64)
    engine.walk(hidden[600:620], 5, Walk(Effort(1, 16, 16)), looked=tally)
    assert (tally < 600).all()
    assert (tally > 16).all()
    largest_group = np.diff(engine.codes.graph.starts).max()
    engine.walk(hidden[600:620], 5, Walk(Effort(1, 0, 16)), looked=tally)
    assert (tally <= largest_group).all()


def test_seeds_are_the_largest_of_each_group():
    rng = np.random.default_rng(0)
    contexts = np.repeat(np.eye(4, dtype=np.float32) * 50, 100, axis=0) + rng.normal(size=(400, 4)).astype(np.float32)
    largest = np.repeat(np.arange(4), 100)[:, None] * 10 + rng.integers(0, 5, (400, 3))
    graph = learn_seeds(np.empty((80, 16), np.uint32), contexts, largest, np.array([77]), 0)
    assert graph.starts[0] == 0
    assert graph.starts[-1] == len(graph.seeds)
    for centre, start, stop in zip(graph.centres, graph.starts[:-1], graph.starts[1:], strict=True):
        own = graph.seeds[start:stop]
        assert len(own)
        assert 77 in own
        assert (own[own != 77] // 10 == centre.argmax()).all()


@pytest.mark.parametrize("where", ["row", "bias"])
def test_one_dominating_row_leaves_the_graph_as_good(where):
    weight, bias, hidden = make_model()
    if where == "row":
        weight[7] *= 1000
    else:
        bias[7] = 1e5
    index = LogitIndex.build(weight, bias, contexts=hidden[:2000], k=10, method="graph")
    assert precision(index.topk(hidden[2000:]).indices, weight, bias, hidden[2000:]) > 0.99
    assert index.settings.graph_ef <= 64, "a longer list would make up for links that lead nowhere"


@pytest.mark.parametrize("times", [2, 5])
def test_rows_that_are_there_several_times_are_walked_past(times):
    weight, bias, hidden = make_model(1500, 24)
    weight, bias = np.concatenate([weight] * times), np.concatenate([bias] * times)
    index = LogitIndex.build(weight, bias, contexts=hidden[:2000], k=10, method="graph")
    assert precision(index.topk(hidden[2000:]).indices, weight, bias, hidden[2000:]) > 0.99
    assert index.settings.reached["graph"] >= index.settings.asked == 0.9975


def test_relinking_changes_trained_rows_and_keeps_the_rest():
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 256, (900, 8)).astype(np.uint8)
    numbers = np.stack([rng.normal(size=900), np.full(900, 0.01)]).astype(np.float32)
    before = RowCodes(codes, numbers)
    links = build_links(before)
    changed = np.array([5, 17, 640])
    codes = codes.copy()
    codes[changed] = rng.integers(1, 256, (3, 8))
    after = RowCodes(codes, numbers)
    again = relink(links, after, changed)
    fresh = build_links(after)
    for row in changed:
        assert len(set(again[row].tolist()) & set(fresh[row].tolist())) >= 10
        assert any(row in again[other] for other in again[row]), "nothing near leads to a row that was linked anew"
    assert (again == links).all(1).mean() > 0.9


def test_a_refreshed_graph_keeps_its_precision(tmp_path):
    weight, bias, hidden = make_model(1500, 32)
    index = LogitIndex.build(weight, bias, contexts=hidden[:1500], k=5, method="graph")
    tuned = weight.copy()
    tuned[10:60] += np.random.default_rng(1).normal(size=(50, 32)).astype(np.float32) * 0.2
    before = saved_codes(index, tmp_path / "before").graph.links[10:60]
    assert 50 <= index.refresh(tuned, bias) <= 1500
    assert (saved_codes(index, tmp_path / "after").graph.links[10:60] != before).any(1).all()
    assert precision(index.topk(hidden[2000:2200]).indices, tuned, bias, hidden[2000:2200]) > 0.97


def test_builds_repeat():
    weight, bias, hidden = make_model(600, 16)
    builds = [make_engine(weight, bias, hidden[:500], k=5, method="graph", seed=3) for _ in range(2)]
    first, second = (engine.codes.graph for engine, _ in builds)
    np.testing.assert_array_equal(first.links, second.links)
    np.testing.assert_array_equal(first.seeds, second.seeds)
    assert builds[0][1] == builds[1][1]


def test_saved_graphs_walk_alike(tmp_path):
    weight, bias, hidden = make_model(800, 16)
    index = LogitIndex.build(weight, bias, contexts=hidden[:500], k=5, method="graph")
    index.save(tmp_path / "index")
    again = LogitIndex.open(tmp_path / "index")
    assert again.way(1) == "graph"
    np.testing.assert_array_equal(again.topk(hidden[500:]).indices, index.topk(hidden[500:]).indices)


def test_fgd_as_published_finds_words_that_plain_inner_product_misses(data):
    folder = data("lm-softmax-50k")
    weight = np.load(folder / "weight_f16.npy")[:3000].astype(np.float32)
    bias = np.load(folder / "bias_f32.npy")[:3000]
    queries = np.load(folder / "contexts_wikitext_f16.npy")[:200].astype(np.float32)
    found = FGD(weight, bias, m=16, ef_construction=100).topk(queries, 10, ef_search=200)
    assert precision(found.indices, weight, bias, queries) > 0.94
    plain = faiss.IndexHNSWFlat(512 + 1, 16, faiss.METRIC_INNER_PRODUCT)
    plain.hnsw.efConstruction = 100
    plain.add(np.concatenate([weight, bias[:, None]], 1))
    plain.hnsw.efSearch = 200
    _, rows = plain.search(np.concatenate([queries, np.ones((200, 1), np.float32)], 1), 10)
    assert precision(rows, weight, bias, queries) < 0.3


def test_fgds_bound_on_probabilities_holds_where_the_k_are_right():
    weight, bias, hidden = make_model(1000, 24)
    logits = (hidden[:50] @ weight.T + bias).astype(np.float64)
    for k in (1, 10, 100, 1000):
        found = FGD(weight, bias).topk(hidden[:50], k, ef_search=1000)
        right = np.exp(logits - logits.max(1, keepdims=True))
        right /= right.sum(1, keepdims=True)
        rows = np.arange(50)[:, None]
        exact_rows = precision(found.indices, weight, bias, hidden[:50]) == 1
        if exact_rows:
            share = 1 - right[rows, found.indices] / found.probabilities
            assert (share <= found.bound[:, None] + 1e-4).all()
    assert exact_rows
    np.testing.assert_allclose(found.bound, 0, atol=1e-12)


def test_fgds_errors_name_the_argument():
    weight, bias, hidden = make_model(300, 8)
    fgd = FGD(weight, bias, m=4)
    with pytest.raises(ValueError, match="k=301"):
        fgd.topk(hidden[:2], 301)
    with pytest.raises(ValueError, match="m=1"):
        FGD(weight, bias, m=1)
    with pytest.raises(ValueError, match="hidden holds NaN"):
        fgd.topk(np.full((1, 8), np.nan, np.float32), 3)
    assert fgd.memory_bytes > weight.nbytes
