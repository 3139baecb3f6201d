"""The estimators with scikit-learn's own checks, beside its neighbours (``make test-plugins``)."""

import copy
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there it must not be missing
    pytest.importorskip("sklearn", reason="make test-plugins tries it")
from scipy.sparse import csr_matrix, issparse
from sklearn.base import clone
from sklearn.cluster import DBSCAN
from sklearn.manifold import TSNE, Isomap
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsTransformer, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from memhier.ann.sklearn import ZoomNeighbors, ZoomTransformer

RANDOM = np.random.default_rng(0)
CENTRES = RANDOM.normal(size=(4, 8)) * 5
LABELS = RANDOM.integers(0, 4, 300)
X = CENTRES[LABELS] + RANDOM.normal(size=(300, 8))
QUERIES = CENTRES[RANDOM.integers(0, 4, 50)] + RANDOM.normal(size=(50, 8))


@parametrize_with_checks([ZoomNeighbors(), ZoomTransformer(), ZoomTransformer(mode="connectivity")])
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
@pytest.mark.parametrize("queries", [None, QUERIES, QUERIES[:1]])
def test_answers_are_those_of_exact_search(metric, queries):
    ours = ZoomNeighbors(n_neighbors=7, metric=metric, recall=1).fit(X)
    exact = NearestNeighbors(n_neighbors=7, metric=metric, algorithm="brute").fit(X.astype(np.float32).astype(float))
    distances, ids = ours.kneighbors(queries)
    wanted, numbers = exact.kneighbors(queries)
    np.testing.assert_array_equal(ids, numbers)
    np.testing.assert_allclose(distances, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours.kneighbors(queries, return_distance=False), numbers)
    radius = float(np.median(wanted)) * 1.3
    distances, ids = ours.radius_neighbors(queries, radius)
    wanted, numbers = exact.radius_neighbors(queries, radius, sort_results=True)
    for mine, theirs, far, at in zip(ids, numbers, distances, wanted, strict=True):
        np.testing.assert_array_equal(np.sort(mine), np.sort(theirs))
        np.testing.assert_allclose(far, at, rtol=1e-4, atol=1e-5)
    for mode in ("connectivity", "distance"):
        for graph, other in (
            (ours.kneighbors_graph(queries, mode=mode), exact.kneighbors_graph(queries, mode=mode)),
            (ours.radius_neighbors_graph(queries, radius, mode), exact.radius_neighbors_graph(queries, radius, mode)),
        ):
            assert graph.shape == other.shape
            np.testing.assert_allclose(graph.toarray(), other.toarray(), rtol=1e-4, atol=1e-5)


def test_no_sample_is_its_own_neighbour_among_copies():
    copies = np.repeat(X[:40], 5, axis=0)
    ours = ZoomNeighbors(n_neighbors=3, recall=1).fit(copies)
    distances, ids = ours.kneighbors()
    assert (distances == 0).all()
    assert (ids // 5 == np.arange(200)[:, None] // 5).all()
    assert (ids != np.arange(200)[:, None]).all()
    assert all(len(found) == 4 and row not in found for row, found in enumerate(ours.radius_neighbors(radius=0)[1]))


def test_the_graph_is_that_of_scikit_learn():
    ours = ZoomTransformer(n_neighbors=6, recall=1).fit_transform(X)
    theirs = KNeighborsTransformer(n_neighbors=6).fit_transform(X)
    np.testing.assert_allclose(ours.toarray(), theirs.toarray(), atol=1e-5)
    np.testing.assert_array_equal(ours.indices.reshape(300, 7)[:, 0], np.arange(300))
    assert (np.diff(ours.data.reshape(300, 7)) >= 0).all()
    assert (ours.data.reshape(300, 7)[:, 0] == 0).all()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_estimators_that_take_a_graph():
    model = make_pipeline(ZoomTransformer(n_neighbors=5), KNeighborsClassifier(5, metric="precomputed"))
    assert model.fit(X, LABELS).score(QUERIES, model.predict(QUERIES)) == 1
    np.testing.assert_array_equal(model.predict(QUERIES), KNeighborsClassifier(5).fit(X, LABELS).predict(QUERIES))
    search = GridSearchCV(model, {"zoomtransformer__n_neighbors": [6, 9]}, cv=2).fit(X, LABELS)
    assert search.best_score_ > 0.9
    graph = make_pipeline(
        ZoomTransformer(n_neighbors=40), TSNE(metric="precomputed", init="random", perplexity=12, max_iter=250)
    )
    assert graph.fit_transform(X[:100]).shape == (100, 2)
    graph = make_pipeline(ZoomTransformer(n_neighbors=60), Isomap(n_neighbors=50, metric="precomputed"))
    assert graph.fit_transform(X - CENTRES[LABELS]).shape == (300, 2)
    graph = make_pipeline(ZoomTransformer(n_neighbors=60), DBSCAN(eps=3.0, metric="precomputed"))
    np.testing.assert_array_equal(graph.fit_predict(X), DBSCAN(eps=3.0).fit_predict(X))


def test_an_index_without_a_path_goes_with_its_estimator(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = ZoomNeighbors().fit(X)
    wanted = ours.kneighbors(QUERIES)[1]
    assert len(os.listdir(tmp_path)) == 1
    ours.fit(X)
    gc.collect()
    assert len(os.listdir(tmp_path)) == 1
    others = [pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)]
    assert len(os.listdir(tmp_path)) == 3
    del ours
    gc.collect()
    for other in others:
        np.testing.assert_array_equal(other.kneighbors(QUERIES)[1], wanted)
    del other, others
    gc.collect()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="NaN"):
        ZoomNeighbors().fit([[np.nan]])
    with pytest.raises(ValueError, match="dram"):
        ZoomNeighbors(dram=1).fit(X)
    assert os.listdir(tmp_path) == []


def test_an_index_with_a_path_stays(tmp_path):
    ours = ZoomNeighbors(path=tmp_path / "x").fit(X)
    wanted = ours.kneighbors(QUERIES)[1]
    text = pickle.dumps(ours)
    assert len(text) < 2000
    with pytest.raises(FileExistsError):
        clone(ours).fit(X)
    ours.fit(X[:100])
    assert (ours.n_samples_fit_, len(ours.index_)) == (100, 100)
    ours.fit(X)
    del ours
    gc.collect()
    other = pickle.loads(text)
    np.testing.assert_array_equal(other.kneighbors(QUERIES)[1], wanted)
    other.fit(X[:50])
    assert other.n_samples_fit_ == 50


def test_a_pickle_opens_in_another_process(tmp_path):
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(ZoomNeighbors(n_neighbors=1).fit(X)))
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'x.pickle')!r}, 'rb')).kneighbors({X[:1].tolist()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("array([[0]]))\n"), done.stderr


def test_a_forked_process_leaves_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = ZoomNeighbors().fit(X)
    child = os.fork()
    if child == 0:
        del ours
        gc.collect()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert ours.kneighbors(X[:1])[1][0, 0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [({"metric": "manhattan"}, "metric='manhattan'"), ({"n_neighbors": 0}, "n_neighbors=0"),
     ({"n_neighbors": 301}, "n_neighbors <= n_samples_fit"), ({"radius": -1}, "radius=-1")],
)  # fmt: skip
def test_parameters_out_of_range(options, words):
    def call():
        estimator = ZoomNeighbors(**options).fit(X)
        estimator.kneighbors(X)
        estimator.radius_neighbors(X)

    with pytest.raises(ValueError, match=words):
        call()
    with pytest.raises(ValueError, match="mode='x'"):
        ZoomTransformer(mode="x").fit(X)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "uint8", "bool", "object"])
def test_samples_of_any_dtype(dtype):
    values = np.abs(X * 20)
    samples = (values > 20) if dtype == "bool" else values.astype(int).astype(dtype)
    ours = ZoomNeighbors(n_neighbors=4, recall=1).fit(samples)
    exact = NearestNeighbors(n_neighbors=4, algorithm="brute").fit(samples)
    np.testing.assert_allclose(ours.kneighbors(samples[:9])[0], exact.kneighbors(samples[:9])[0], rtol=1e-4, atol=1e-4)
    assert ours.index_.stats()["dtype"] == ("float16" if dtype == "float16" else "float32")


def test_tables_and_output_in_tables():
    pandas = importlib.import_module("pandas")
    table = pandas.DataFrame(X, columns=[f"c{column}" for column in range(8)])
    ours = ZoomNeighbors().fit(table)
    assert ours.feature_names_in_.tolist() == [*table]
    np.testing.assert_array_equal(ours.kneighbors(table)[1], ZoomNeighbors().fit(X).kneighbors(X)[1])
    with pytest.raises(ValueError, match="feature names should match"):
        ours.kneighbors(table[["c1", "c0", *table.columns[2:]]])
    assert issparse(ZoomTransformer().set_output(transform="default").fit_transform(table))
    for transformer in (ZoomTransformer(), KNeighborsTransformer()):  # a sparse graph fits no table
        with pytest.raises(ValueError, match="outputs a scipy sparse matrix"):
            transformer.set_output(transform="pandas").fit_transform(table)


def test_sparse_samples_are_refused_with_the_way_out():
    for call in (lambda: ZoomNeighbors().fit(csr_matrix(X)), lambda: ZoomNeighbors().fit(X).kneighbors(csr_matrix(X))):
        with pytest.raises(TypeError, match=r"dense data is required. Use '\.toarray\(\)'"):
            call()


def test_pipelines_are_searched_in_parallel_cached_and_dumped(tmp_path):
    model = make_pipeline(
        ZoomTransformer(n_neighbors=9), KNeighborsClassifier(5, metric="precomputed"), memory=str(tmp_path / "memory")
    )
    grid = {"zoomtransformer__metric": ["euclidean", "cosine"], "kneighborsclassifier__n_neighbors": [3, 5]}
    search = GridSearchCV(model, grid, cv=2, n_jobs=2, error_score="raise").fit(X, LABELS)
    wanted = search.predict(QUERIES)
    importlib.import_module("joblib").dump(search, tmp_path / "model.joblib")
    code = (
        "import joblib, sys, json\n"
        f"print(joblib.load({str(tmp_path / 'model.joblib')!r}).predict({QUERIES.tolist()}).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{wanted.tolist()}\n", done.stderr
