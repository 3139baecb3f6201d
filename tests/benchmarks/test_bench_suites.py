"""Adapters for the suites of others, with the methods that their runners call, and their data sets."""

import ast
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memhier.ann.files import write_vectors
from memhier.benchmarks.bench import runner
from memhier.benchmarks.bench.results import Results
from memhier.benchmarks.bench.workload import PeerEntry, Workload
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, id_recall
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.suites import ann_benchmarks, big_ann, vibe
from memhier.benchmarks.suites.ann_benchmarks.module import MemhierZoom as AnnBenchmarks
from memhier.benchmarks.suites.big_ann.module import MemhierZoom as BigAnn
from memhier.benchmarks.suites.big_ann.tracks import MemhierFilter, MemhierOod, MemhierStreaming
from memhier.benchmarks.suites.sets import SUITE_SETS
from memhier.benchmarks.suites.vibe.module import MemhierVibe
from memhier.errors import FormatError

DATA = mixed(1200, 16, seed=5, clusters=8)
SMALL: dict[str, Any] = {"dram": "4MiB"}

# What the suites' base classes have, with the parameters that their runners give.
ANN_BENCHMARKS = {
    "fit": ["X"], "query": ["q", "n"], "batch_query": ["X", "n"], "get_batch_results": [], "get_memory_usage": [],
    "get_additional": [], "done": [],
}  # fmt: skip
BIG_ANN = {
    "track": [], "fit": ["dataset"], "load_index": ["dataset"], "index_files_to_store": ["dataset"],
    "query": ["X", "k"], "range_query": ["X", "radius"], "get_results": [], "get_range_results": [],
    "get_additional": [], "get_memory_usage": [], "done": [],
}  # fmt: skip
STREAMING = {
    "track": [], "setup": ["dtype", "max_pts", "ndims"], "insert": ["X", "ids"], "delete": ["ids"],
    "replace": ["X", "ids"], "query": ["X", "k"], "get_results": [], "get_additional": [], "get_memory_usage": [],
    "done": [],
}  # fmt: skip
INTERFACES = [
    (AnnBenchmarks, ANN_BENCHMARKS),
    (BigAnn, BIG_ANN),
    (MemhierOod, BIG_ANN),
    (MemhierFilter, BIG_ANN | {"filtered_query": ["X", "filter", "k"]}),
    (MemhierStreaming, STREAMING),
    (MemhierVibe, ANN_BENCHMARKS | {"fit_ood": ["X_train", "X_learn", "X_learn_neighbors"]}),
]


@pytest.mark.parametrize(("kind", "interface"), INTERFACES)
def test_an_adapter_has_the_methods_of_its_suite(kind: type, interface: dict[str, list[str]]) -> None:
    for name, parameters in interface.items():
        assert list(inspect.signature(getattr(kind, name)).parameters)[1:] == parameters
    assert callable(kind("euclidean", SMALL).set_query_arguments)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="metric='jaccard'"):
        kind("jaccard", SMALL)


@pytest.mark.parametrize(
    ("file", "interface"),
    [
        ("ann-benchmarks/ann_benchmarks/algorithms/base/module.py", ANN_BENCHMARKS),
        ("big-ann-benchmarks/benchmark/algorithms/base.py", BIG_ANN),
    ],
)
def test_the_interface_is_that_of_the_suite(file: str, interface: dict[str, list[str]]) -> None:
    base = Path(os.environ.get("MEMHIER_SUITES", "")) / file
    if not base.is_file():
        pytest.skip("MEMHIER_SUITES names no folder with checkouts of the suites")
    (kind,) = (node for node in ast.parse(base.read_text()).body if isinstance(node, ast.ClassDef))
    found = {
        node.name: [argument.arg for argument in node.args.args[1:]]
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and node.name != "__str__"
    }
    assert found == interface


@pytest.mark.parametrize("metric", ["euclidean", "angular", "ip"])
def test_ann_benchmarks_gets_answers_one_by_one_and_in_a_batch(
    metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base, queries = DATA.array(), DATA.queries(9)
    algorithm = AnnBenchmarks(metric, SMALL)
    assert algorithm.get_memory_usage() == 0
    with pytest.raises(RuntimeError, match="call fit first"):
        algorithm.query(queries[0], 3)
    algorithm.fit(base)
    assert 0 < algorithm.get_memory_usage() <= 4096
    algorithm.set_query_arguments(1.0)
    assert "recall" in str(algorithm)
    found = [algorithm.query(query, 3) for query in queries]
    kinds = {"euclidean": "l2", "angular": "cosine", "ip": "ip"}
    true, _ = exact_neighbours(base, queries, 3, kinds[metric])
    assert id_recall(np.array(found), true) == 1
    assert algorithm.get_additional()["mean_ssd_ios"] >= 1
    algorithm.set_query_arguments(500, 100)
    assert algorithm.get_additional() == {}
    algorithm.batch_query(queries, 3)
    assert id_recall(np.array(algorithm.get_batch_results()), true) > 0.9
    with pytest.raises(ValueError, match="nprobe and candidates"):
        algorithm.set_query_arguments(1, 2, 3)
    assert len(algorithm.query(queries[0], 5000)) == len(base)  # more than there are: none twice, no -1
    algorithm.done()
    algorithm.done()
    assert list(tmp_path.iterdir()) == []


TAGS = [[row % 7, 10 + row % 3] if row % 5 else [] for row in range(DATA.n)]


def compressed(rows: list[list[int]]) -> SimpleNamespace:
    """Return rows as a sparse matrix has them."""
    ends = np.cumsum([0, *map(len, rows)])
    return SimpleNamespace(indices=np.array([tag for row in rows for tag in row], np.int32), indptr=ends)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the suite's module of data sets, in a folder where it would run."""

    def blocks(bs: int) -> Any:
        return (DATA.array()[start : start + bs] for start in range(0, DATA.n, bs))

    module = ModuleType("benchmark.datasets")
    described = SimpleNamespace(
        get_dataset_iterator=blocks, short_name=lambda: "Tiny-1200", get_dataset_metadata=lambda: compressed(TAGS)
    )
    module.DATASETS = {"tiny": lambda: described}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmark", ModuleType("benchmark"))
    monkeypatch.setitem(sys.modules, "benchmark.datasets", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_big_ann_builds_loads_and_searches(suite: Path) -> None:
    queries = DATA.queries(9)
    algorithm = BigAnn("euclidean", SMALL)
    assert algorithm.track() == "T2"
    assert not algorithm.load_index("tiny")
    algorithm.fit("tiny")
    algorithm.done()
    assert not BigAnn("euclidean", {"dram": "5MiB"}).load_index("tiny")  # of other parameters
    algorithm = BigAnn("euclidean", SMALL)
    assert algorithm.load_index("tiny")
    algorithm.set_query_arguments({"recall": 1.0})
    algorithm.query(queries, 4)
    true, distances = exact_neighbours(DATA.array(), queries, 4)
    assert id_recall(algorithm.get_results(), true) == 1
    radius = float(np.median(distances))
    algorithm.range_query(queries, radius)
    lims, near, ids = algorithm.get_range_results()
    assert len(lims) == 10
    assert lims[-1] == len(ids) == len(near)
    assert all(near <= radius)
    assert algorithm.get_additional()["mean_ssd_ios"] > 0
    folder, prefix, files = algorithm.index_files_to_store("tiny")
    assert all((Path(folder) / f"{prefix}{file}").is_file() for file in files)
    assert any(file.endswith(".seg") for file in files)
    algorithm.done()
    assert Path(folder).is_relative_to(suite / "data" / "indices" / "T2")


@pytest.mark.usefixtures("suite")
def test_the_track_of_filters_finds_the_nearest_with_all_tags() -> None:
    queries = DATA.queries(6)
    algorithm = MemhierFilter("euclidean", SMALL)
    algorithm.fit("tiny")
    algorithm.set_query_arguments({"recall": 1.0})
    asked = [[3], [11], [2, 12], [], [99], [5, 10]]
    algorithm.filtered_query(queries, compressed(asked), 4)
    found = algorithm.get_results()
    for query, tags, ids in zip(queries, asked, found, strict=True):
        rows = np.array([row for row in range(DATA.n) if set(tags) <= set(TAGS[row])])
        if not len(rows):
            assert (ids == -1).all()
            continue
        true, _ = exact_neighbours(DATA.array()[rows], query[None], 4)
        assert ids.tolist() == rows[true[0]].tolist()
    algorithm.done()
    assert MemhierFilter("euclidean", SMALL).load_index("tiny")
    assert not MemhierOod("euclidean", SMALL).load_index("tiny")


@pytest.mark.usefixtures("suite")
def test_the_track_of_streams_follows_a_runbook() -> None:
    base, queries = DATA.array(), DATA.queries(5)
    algorithm = MemhierStreaming("euclidean", SMALL)
    algorithm.setup("float32", 1000, 16)
    algorithm.set_query_arguments({"recall": 1.0})
    algorithm.insert(base[:600], np.arange(600, dtype=np.uint32))
    algorithm.delete(np.arange(100, 300, dtype=np.uint32))
    algorithm.replace(base[600:700], np.arange(100, dtype=np.uint32))
    algorithm.query(queries, 3)
    ids = np.concatenate([np.arange(100), np.arange(300, 600)])
    true, _ = exact_neighbours(np.concatenate([base[600:700], base[300:600]]), queries, 3)
    np.testing.assert_array_equal(algorithm.get_results(), ids[true])
    algorithm.setup("uint8", 10, 4)
    algorithm.query(np.zeros((2, 4), np.uint8), 1)
    assert algorithm.get_results().tolist() == [[-1], [-1]]
    algorithm.done()


def test_vibe_learns_from_the_queries_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = DATA.array()
    algorithm = MemhierVibe("normalized", SMALL)
    algorithm.fit_ood(base, DATA.queries(80), None)
    algorithm.set_query_arguments(0.9)
    true, _ = exact_neighbours(base, DATA.queries(100)[80:], 3, "cosine")
    assert id_recall(np.array([algorithm.query(query, 3) for query in DATA.queries(100)[80:]]), true) > 0.85
    algorithm.done()


def test_the_suites_files_name_what_is_here() -> None:
    config = (Path(ann_benchmarks.__file__).parent / "config.yml").read_text()
    assert set(re.findall(r"constructor: (\w+)", config)) == {AnnBenchmarks.__name__}
    assert "module: ann_benchmarks.algorithms.memhier\n" in config  # the suite itself appends .module
    algos = (Path(big_ann.__file__).parent / "algos.yaml").read_text()
    kinds = (BigAnn, MemhierOod, MemhierFilter, MemhierStreaming)
    assert set(re.findall(r"module: ([\w.]+)", algos)) == {kind.__module__ for kind in kinds}
    assert set(re.findall(r"constructor: (\w+)", algos)) == {kind.__name__ for kind in kinds}
    tracks = {"text2image-10M", "yfcc-10M", "msturing-30M-clustered"}
    assert set(re.findall(r"^([\w-]+):", algos, re.MULTILINE)) <= set(SUITE_SETS) | tracks
    config = (Path(vibe.__file__).parent / "config.yml").read_text()
    assert set(re.findall(r"constructor: (\w+)", config)) == {MemhierVibe.__name__}
    assert "module: vibe.algorithms.memhier\n" in config


def write_hdf5(path: Path, base: Any, queries: Any, k: int, metric: str) -> Any:
    """Write a file as ann-benchmarks does, with a truth that a search would not come to: it has to be the one used."""
    h5py = pytest.importorskip("h5py")
    true, distances = exact_neighbours(base, queries, k, metric)
    path.parent.mkdir(parents=True)
    with h5py.File(path, "w") as file:
        for name, values in (("train", base), ("test", queries), ("neighbors", true), ("distances", distances)):
            file[name] = values
    return true


def test_a_set_of_ann_benchmarks_is_read_with_its_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"put glove-25-angular\.hdf5 at .*ann-benchmarks.*ann-benchmarks\.com"):
        load_search_set("glove-25-angular")
    base, queries = DATA.array(), DATA.queries(7)
    base[3] = 0
    true = write_hdf5(tmp_path / "ann-benchmarks" / "glove-25-angular.hdf5", base, queries, 12, "cosine")
    read = load_search_set("glove-25-angular")
    assert read.truth is not None
    assert np.array_equal(read.truth, true)
    lengths = np.linalg.norm(read.base, axis=1)
    assert lengths[3] == 0
    assert np.delete(lengths, 3) == pytest.approx(1, abs=1e-5)
    # Vectors of unit length rank by L2 as they do by angle; the one without a direction is left to either.
    assert id_recall(exact_neighbours(read.base, read.queries, 12)[0], true) > 0.97


def test_a_set_of_big_ann_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    folder = tmp_path / "big-ann" / "bigann"
    folder.mkdir(parents=True)
    vectors = np.arange(97 * 5, dtype=np.uint8).reshape(97, 5)
    write_vectors(folder / "base.u8bin", vectors)
    (folder / "base.u8bin").rename(folder / "base.1B.u8bin.crop_nb_10000000")
    write_vectors(folder / "query.public.10K.u8bin", vectors[:3])
    with pytest.raises(FileNotFoundError, match=r"put bigann-10M at .*bigann-10M \(from create_dataset\.py"):
        load_search_set("bigann-10M")
    truth = np.arange(6, dtype=np.uint32).reshape(3, 2)
    (folder / "bigann-10M").write_bytes(np.array([3, 2], np.uint32).tobytes() + truth.tobytes() + bytes(24))
    read = load_search_set("bigann-10M")
    assert np.array_equal(read.base, vectors)
    assert np.array_equal(read.queries, vectors[:3])
    assert read.truth is not None
    assert np.array_equal(read.truth, truth)
    with (folder / "query.public.10K.u8bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(FormatError, match="expected 23 as its header says"):
        load_search_set("bigann-10M")


@pytest.mark.parametrize("vectors", [None, 1000])
def test_a_workload_takes_the_truth_of_the_whole_set_alone(
    vectors: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    monkeypatch.setattr(runner, "profile_device", lambda folder: {})
    write_hdf5(tmp_path / "ann-benchmarks" / "sift-128-euclidean.hdf5", DATA.array(), DATA.queries(5), 20, "l2")

    def never(*arguments: Any) -> Any:
        raise AssertionError("the file has the neighbours")

    if vectors is None:
        monkeypatch.setattr("memhier.benchmarks.bench.search_group.exact_neighbours", never)
    parameters = {"data": "sift-128-euclidean", "queries": 5, "rounds": 1, "k": 3, "dram_share": 0.5, "sweep_step": 1,
                  "timeout_s": 600} | ({} if vectors is None else {"vectors": vectors})  # fmt: skip
    peer = PeerEntry("faiss", "faiss_lists", efforts=({"nprobe": 1000},))
    load = Workload("small", "search", "", "search", {}, {}, parameters, (peer,))
    results = Results(tmp_path / "results.jsonl")
    runner.run(runner.Plan([load], "quick", tmp_path / "work", tmp_path), results, lambda words: None)
    (search,) = (row for row in results.rows() if row["kind"] == "search")
    assert search["rows"][0]["recall_id"] == search["rows"][0]["recall"] == 1
