"""ZoomIndex as its users see it: exactness, arguments, damage, budget."""

import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.ann.zoom.storage import catalog
from memhier.ann.zoom.storage.catalog import Description, load_preview
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, MemhierError
from memhier.store.store import Store


def make_vectors(count, dimension, dtype="float32", seed=0, clusters=20):
    """Clusters of different spread, with some vectors twice, so that ties occur."""
    random = np.random.default_rng(seed)
    centres = random.uniform(20, 200, (clusters, dimension))
    member = random.integers(0, clusters, count)
    vectors = centres[member] + random.normal(size=(count, dimension)) * random.uniform(1, 15, (clusters, 1))[member]
    if dtype == "int8":
        vectors -= 110
    vectors[count // 2 : count // 2 + count // 10] = vectors[: count // 10]
    low, high = (-128, 127) if dtype == "int8" else (0, 255)
    return (np.clip(vectors, low, high) if dtype.endswith("int8") else vectors).astype(dtype)


def exact_distances(vectors, queries, metric):
    """Every distance in float64 as :class:`SearchResult` defines it."""
    vectors, queries = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "l2":
        return np.square(queries[:, None, :] - vectors[None]).sum(axis=2)
    product = queries @ vectors.T
    if metric == "ip":
        return -product
    norms = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=1)[None]
    return 1 - np.divide(product, norms, out=np.zeros_like(product), where=norms > 0)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A small index to search; tests that damage it work on a copy."""
    path = tmp_path_factory.mktemp("built") / "index"
    vectors = make_vectors(3000, 24)
    ids = np.arange(3000) * 7 - 5000
    ZoomIndex.build(path, vectors, ids=ids, dram="4MiB").close()
    return path, vectors, ids


@pytest.mark.filterwarnings("ignore:calibration found")  # what is asked of the search here does not depend on it
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([1, 3, 97, 700]),
    dimension=st.sampled_from([1, 3, 33]),
    dtype=st.sampled_from(["float32", "float16", "int8", "uint8"]),
    metric=st.sampled_from(["l2", "ip", "cosine"]),
    queries=st.sampled_from([0, 1, 3]),
)
def test_everything_probed_and_read_equals_exact_search(
    tmp_path_factory, seed, count, dimension, dtype, metric, queries
):
    vectors = make_vectors(count, dimension, dtype, seed)
    asked = make_vectors(queries + 20, dimension, "float32", seed + 1)[:queries]
    path = tmp_path_factory.mktemp("exact") / "index"
    with ZoomIndex.build(path, vectors, metric=metric, dram="4MiB", seed=seed) as index:
        k = min(count, 11)
        result = index.search(asked, k, candidates=count, nprobe=10**6)
    assert result.ids.shape == result.distances.shape == (queries, k)
    expected = exact_distances(vectors, asked, metric)
    reach = max(float(np.abs(expected).max(initial=0)), 1.0)
    for row in range(queries):
        assert len(set(result.ids[row])) == k
        # Ties count by distance: the distances agree rank by rank, and each id has the distance it is given.
        np.testing.assert_allclose(result.distances[row], np.sort(expected[row])[:k], rtol=2e-5, atol=2e-6 * reach)
        own = expected[row][result.ids[row]]
        np.testing.assert_allclose(result.distances[row], own, rtol=2e-5, atol=2e-6 * reach)
    shutil.rmtree(path.parent)


def test_array_memmap_and_iterator_build_the_same_index(tmp_path):
    vectors = make_vectors(1500, 12)
    np.save(tmp_path / "vectors.npy", vectors)
    sources = {
        "array": vectors,
        "memmap": np.load(tmp_path / "vectors.npy", mmap_mode="r"),
        "iterator": (vectors[start : start + 97] for start in range(0, 1500, 97)),
    }
    results = []
    for name, source in sources.items():
        with ZoomIndex.build(tmp_path / name, source, dram="4MiB", seed=4) as index:
            assert index.check() == []
            results.append(index.search(vectors[:50], 10))
            assert os.listdir(tmp_path / name / "tmp") == []
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].ids, other.ids)
        np.testing.assert_array_equal(results[0].distances, other.distances)
        assert results[0].stats == other.stats


def test_more_vectors_than_a_bucket_are_put_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("memhier.ann.zoom.storage.fullview._BUCKET_BYTES", 5000)
    monkeypatch.setattr("memhier.ann.zoom.source._BLOCK_BYTES", 3000)
    vectors = make_vectors(1000, 9)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        result = index.search(vectors, 1, candidates=1000, nprobe=1000)
    np.testing.assert_allclose(result.distances, 0)
    np.testing.assert_array_equal(vectors[result.ids[:, 0]], vectors)


def test_default_effort_finds_nearly_all(built):
    path, vectors, ids = built
    queries = make_vectors(200, 24, seed=0)[100:] + np.float32(0.5)
    rows, distances = exact_neighbours(vectors, queries, 10)
    with ZoomIndex.open(path) as index:
        result = index.search(queries, 10)
        assert recall_at_k(result.distances, distances) >= 0.95
        assert result.stats["candidates"] < 100 * 1000
        assert set(result.ids.ravel()) <= set(ids)
        assert (result.ids[:, 0] == ids[rows[:, 0]]).mean() >= 0.8


def test_single_query_and_batch_agree(built):
    path, vectors, _ = built
    with ZoomIndex.open(path) as index:
        batch = index.search(vectors[:40], 7)
        for row in range(40):
            one = index.search(vectors[row], 7)
            assert one.ids.shape == (7,)
            np.testing.assert_array_equal(one.ids, batch.ids[row])
            np.testing.assert_array_equal(one.distances, batch.distances[row])
        for name in ("scanned", "candidates"):
            assert sum(index.search(v, 7).stats[name] for v in vectors[:40]) == batch.stats[name]


def test_queries_of_any_dtype_and_layout(built):
    path, vectors, _ = built
    whole = np.round(vectors[:60]).astype(np.int64)
    with ZoomIndex.open(path) as index:
        expected = index.search(whole.astype(np.float32), 5)
        for form in (whole, whole.tolist(), np.asfortranarray(whole), np.repeat(whole, 2, axis=0)[::2]):
            np.testing.assert_array_equal(index.search(form, 5).ids, expected.ids)
        assert index.search(np.empty((0, 24)), 5).ids.shape == (0, 5)


def test_k_beyond_the_probed_lists_probes_more(built):
    path, vectors, _ = built
    with ZoomIndex.open(path) as index:
        result = index.search(vectors[:5], 2500, nprobe=1)
        assert all(len(set(row)) == 2500 for row in result.ids)
        assert (np.diff(result.distances, axis=1) >= 0).all()


def test_more_effort_never_finds_less(built):
    path, vectors, _ = built
    queries = vectors[::30] + np.float32(1)
    with ZoomIndex.open(path) as index:
        last = np.full((len(queries), 10), np.inf)
        for candidates in (10, 30, 100, 3000):
            distances = index.search(queries, 10, candidates=candidates, nprobe=10**6).distances
            assert (distances <= last).all()
            last = distances


@pytest.mark.parametrize(
    ("queries", "k", "options", "error", "message"),
    [
        (np.ones(23), 1, {}, ValueError, "24"),
        (np.ones((2, 25)), 1, {}, ValueError, "24"),
        (np.ones((2, 2, 24)), 1, {}, ValueError, "24"),
        (np.full(24, np.nan), 1, {}, ValueError, "row 0"),
        (np.vstack([np.ones(24), np.full(24, np.inf)]), 1, {}, ValueError, "row 1"),
        (np.ones(24, complex), 1, {}, TypeError, "complex"),
        (np.ones(24), 0, {}, ValueError, "k=0"),
        (np.ones(24), 2.0, {}, TypeError, "k=2.0"),
        (np.ones(24), True, {}, TypeError, "k=True"),
        (np.ones(24), 10, {"candidates": 9}, ValueError, "candidates=9"),
        (np.ones(24), 10, {"nprobe": 0}, ValueError, "nprobe=0"),
    ],
)
def test_bad_searches_name_the_argument(built, queries, k, options, error, message):
    with ZoomIndex.open(built[0]) as index, pytest.raises(error, match=message):
        index.search(queries, k, **options)


@pytest.mark.parametrize(
    ("vectors", "options", "error", "message"),
    [
        (np.array([[1.0, np.nan]]), {}, ValueError, "row 0"),
        (np.ones((5, 2)), {"ids": [1, 2, 3]}, ValueError, "ids has 3"),
        (np.ones((3, 2)), {"ids": [1, 2, 1]}, ValueError, "ids holds 1 more"),
        (np.ones((3, 2)), {"ids": [1.0, 2.0, 3.0]}, TypeError, "ids"),
        (np.ones((3, 2)), {"ids": np.array([1, 2, 2**63], np.uint64)}, ValueError, "2\\*\\*63"),
        (np.ones((3, 2)), {"metric": "hamming"}, ValueError, "metric='hamming'"),
        (np.ones((3, 2)), {"dram": "lots"}, ValueError, "dram='lots'"),
        (np.ones((3, 2)), {"dram": 1000}, BudgetError, "is needed"),
    ],
)
def test_bad_builds_leave_nothing_behind(tmp_path, vectors, options, error, message):
    with pytest.raises(error, match=message):
        ZoomIndex.build(tmp_path / "index", vectors, **options)
    assert os.listdir(tmp_path) == []


def test_a_source_that_fails_half_way_leaves_nothing_behind(tmp_path):
    def blocks():
        yield np.ones((5, 3), np.float32)
        raise RuntimeError("the file server went away")

    with pytest.raises(RuntimeError, match="file server"):
        ZoomIndex.build(tmp_path / "index", blocks())
    assert os.listdir(tmp_path) == []


def test_build_refuses_a_path_in_use(tmp_path, built):
    before = sorted(os.listdir(built[0]))
    with pytest.raises(FileExistsError):
        ZoomIndex.build(built[0], np.ones((3, 2)))
    assert sorted(os.listdir(built[0])) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        ZoomIndex.build(tmp_path, np.ones((3, 2)))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        ZoomIndex.build(tmp_path / "no" / "parent", np.ones((3, 2)))


def test_open_refuses_what_is_no_index(tmp_path):
    with pytest.raises(FileNotFoundError):
        ZoomIndex.open(tmp_path / "missing")
    with pytest.raises(FormatError):
        ZoomIndex.open(tmp_path)
    (tmp_path / "file").write_text("text")
    with pytest.raises((FormatError, NotADirectoryError)):
        ZoomIndex.open(tmp_path / "file")


def segment(path, name):
    (found,) = [path / "segments" / f for f in os.listdir(path / "segments") if f.startswith(name + ".")]
    return found


@pytest.mark.parametrize("name", ["p0-rows", "p0-codes", "p0-numbers", "p0-ids", "p0-starts", "router", "rotation"])
@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_damage_is_reported_and_spreads_nowhere(tmp_path, built, name, damage):
    path, vectors, _ = built
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    file = segment(copy, name)
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "missing":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 3] ^= 4
        file.write_bytes(raw)
    state = {f: f.read_bytes() for f in sorted(copy.rglob("*")) if f.is_file() and f.parent.name == "segments"}
    with pytest.raises((CorruptionError, FileNotFoundError)) as caught, ZoomIndex.open(copy) as index:
        index.search(vectors, 5, candidates=3000, nprobe=10**6)
    assert name in str(caught.value)
    assert state == {f: f.read_bytes() for f in sorted(copy.rglob("*")) if f.is_file() and f.parent.name == "segments"}
    with pytest.raises((MemhierError, FileNotFoundError)):
        ZoomIndex.open(copy, verify="open").close()


def test_check_finds_a_flipped_bit_that_no_search_has_read(tmp_path, built):
    copy = tmp_path / "copy"
    shutil.copytree(built[0], copy)
    file = segment(copy, "p0-rows")
    raw = bytearray(file.read_bytes())
    raw[-4096] ^= 1
    file.write_bytes(raw)
    with ZoomIndex.open(copy) as index:
        assert any("p0-rows" in problem for problem in index.check())


def test_another_format_version_is_refused(built, monkeypatch):
    with Store.open(built[0], kind=catalog.KIND) as store:
        about = json.loads(store.get("index"))
    assert about["version"] == catalog.VERSION
    monkeypatch.setattr(catalog, "VERSION", catalog.VERSION + 1)
    with pytest.raises(FormatError, match=f"index format {about['version']}"):
        ZoomIndex.open(built[0])


def test_a_build_without_a_bar_takes_no_lock_of_tqdm(tmp_path):
    """A killed child of a fork leaves such a lock taken in its parent."""
    build = threading.Thread(
        target=lambda: ZoomIndex.build(tmp_path / "index", np.eye(300, 8), dram="4MiB").close(), daemon=True
    )
    with tqdm.get_lock():
        build.start()
        build.join(60)
        assert not build.is_alive()


def test_a_killed_build_is_no_index_and_the_next_build_takes_over(tmp_path):
    vectors = make_vectors(2000, 16)
    path = tmp_path / "index"
    opened = 0
    for delay in np.linspace(0.0, 0.5, 8):
        child = os.fork()
        if child == 0:
            try:
                ZoomIndex.build(path, vectors, dram="4MiB").close()
            finally:
                os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            with ZoomIndex.open(path) as index:
                assert index.check() == []
                assert index.search(vectors[3], 1).distances[0] == 0
            opened += 1
            shutil.rmtree(path)
        except (FormatError, FileNotFoundError):
            pass
    if path.exists():
        with ZoomIndex.build(path, vectors, dram="4MiB") as index:
            assert index.check() == []


def test_reading_needs_no_write_permission(tmp_path, built):
    copy = tmp_path / "copy"
    shutil.copytree(built[0], copy)
    for place in (copy, *copy.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)
    copy.parent.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                for parent in copy.parents:  # pytest's folders are private to their owner
                    if parent != parent.parent and str(parent).startswith(str(tmp_path.parent.parent.parent)):
                        parent.chmod(0o755)
                os.setuid(65534)
            with ZoomIndex.open(copy) as index:
                assert index.search(built[1][9], 1).distances[0] == 0
                assert index.check() == []
            try:
                ZoomIndex.build(copy / "inner", np.ones((3, 2)))
            except PermissionError as error:
                code = 0 if "inner" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for place in (copy, *copy.rglob("*")):
        place.chmod(0o755)


def test_closed_index_says_so(built):
    index = ZoomIndex.open(built[0])
    index.close()
    index.close()
    for call in (lambda: index.search(np.ones(24), 1), index.check):
        with pytest.raises(ClosedError):
            call()


def test_many_threads_get_the_answers_of_one(built):
    path, vectors, _ = built
    with ZoomIndex.open(path) as index:
        expected = index.search(vectors[:64], 10)
        wrong = []

        def work(offset):
            for row in range(offset, 64, 8):
                found = index.search(vectors[row], 10)
                if not np.array_equal(found.ids, expected.ids[row]):
                    wrong.append(row)

        threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.mark.parametrize(("dram", "coding"), [("3MiB", "rabitq"), ("64MiB", "rabitq"), ("3MiB", "pq")])
def test_memory_counts_everything_and_keeps_the_budget(tmp_path, dram, coding):
    vectors = make_vectors(6000 if coding == "rabitq" else 2000, 64)
    with ZoomIndex.build(tmp_path / "index", vectors, dram=dram, preview=coding) as index:
        index.search(vectors[:10], 10)
        stats = index.stats()
        parts = 2 * stats["lists"] * index.dimension + len(index) * (stats["code_bytes"] + 4)  # centroids, codes, ids
        with Store.open(tmp_path / "index", kind=catalog.KIND) as store:
            parts += load_preview(store, Description.decode(store.get("index"), store.path)).book.memory_bytes
        assert parts < index.memory_bytes <= stats["dram"]


def test_stats_are_plain_numbers_and_text(built):
    with ZoomIndex.open(built[0]) as index:
        result = index.search(built[1][:4], 3)
        json.dumps(index.stats())
        json.dumps(result.stats)
        assert result.stats["pages"] >= result.stats["reads"] > 0
        assert index.stats()["engine"]
        assert len(index) == 3000
        assert "3000 x 24" in repr(index)
