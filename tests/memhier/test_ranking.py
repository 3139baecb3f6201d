"""Ranking in rounds of reads against brute force: nothing near is missed, and nothing is read that a bound excludes."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.errors import ClosedError, CorruptionError
from memhier.io.kernels import METRICS, ROW_DTYPES, crc32c_pages, distances
from memhier.io.read_arguments import READ_TALLY
from memhier.io.reader import PAGE_BYTES, Reader
from memhier.rows.rank_request import page_keys
from memhier.rows.ranking import STOPS, HotPages, Ranking, RankRequest, rank_rows
from memhier.rows.rows import rows_per_page

Ints = npt.NDArray[np.int64]
ENGINES = ("native", "python")


@dataclass
class Rows:
    """Vectors in two files, packed as an index packs them, with few different values, so that ties occur."""

    handles: list[int]
    vectors: npt.NDArray[Any]
    dtype: str
    files: npt.NDArray[np.int32]
    offsets: Ints
    paths: list[Path]

    @classmethod
    def write(cls, folder: Path, reader: Reader, count: int, dimension: int, dtype: str, seed: int) -> "Rows":
        random = np.random.default_rng(seed)
        values = random.integers(0, 4, (count, dimension))
        if dtype == "bfloat16":
            vectors: npt.NDArray[Any] = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            vectors = values.astype(dtype)
        row_bytes = vectors.dtype.itemsize * dimension
        per_page = rows_per_page(row_bytes)
        handles, paths, files, offsets = [], [], np.empty(count, np.int32), np.empty(count, np.int64)
        for number, rows in enumerate(np.array_split(np.arange(count), 2)):
            place = np.arange(len(rows))
            start = (
                place * row_bytes if per_page is None else place // per_page * PAGE_BYTES + place % per_page * row_bytes
            )
            length = -(-(int(start.max(initial=0)) + row_bytes) // PAGE_BYTES) * PAGE_BYTES
            raw = np.zeros(length, np.uint8)
            for row, at in zip(rows, start, strict=True):
                raw[at : at + row_bytes] = vectors[row].view(np.uint8)
            path = folder / f"{dtype}-{count}-{dimension}-{seed}-{number}"
            path.write_bytes(raw.tobytes())
            handles.append(reader.add(path, checksums=crc32c_pages(raw)))
            paths.append(path)
            files[rows], offsets[rows] = handles[-1], start
        return cls(handles, vectors, dtype, files, offsets, paths)

    def request(self, queries: int, metric: str, k: int, seed: int, *, share: float = 0.7, **more: Any) -> RankRequest:
        """Return a request of random candidates with valid bounds, some close and some that say nothing."""
        random = np.random.default_rng(seed)
        count, dimension = self.vectors.shape
        asked = random.integers(0, 4, (queries, dimension)).astype(np.float32)
        names = random.permutation(count).astype(np.int64) * 4 - 2 * count
        first, chosen, lower = [0], [], []
        thresholds = np.full(queries, np.inf, np.float32)
        for number, query in enumerate(asked):
            rows = np.flatnonzero(random.random(count) < share * random.random())
            exact = self.distances(query, rows, metric)
            margin = random.choice([0.0, 0.5, 8.0, np.inf], len(rows))
            bound = np.nextafter((exact - margin).astype(np.float32), np.float32(-np.inf))
            order = np.argsort(bound, kind="stable")
            if len(rows) >= k and random.random() < 0.5:
                thresholds[number] = np.sort(exact)[k - 1] + random.random()
            chosen.append(rows[order])
            lower.append(bound[order])
            first.append(first[-1] + len(rows))
        rows = np.concatenate([np.empty(0, np.int64), *chosen])
        return RankRequest(
            asked, metric, self.dtype, self.vectors.itemsize * dimension, np.array(first), self.files[rows],
            self.offsets[rows], np.concatenate([np.empty(0, np.float32), *lower]), names[rows], thresholds, k,
            **{"first_round": k} | more,
        )  # fmt: skip

    def distances(self, query: npt.NDArray[np.float32], rows: Ints, metric: str) -> npt.NDArray[np.float32]:
        found = distances(query, self.vectors[rows], metric, dtype=self.dtype)
        return np.maximum(found, 0) if metric == "cosine" else found

    def brute(self, request: RankRequest) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Return ids and distances of the nearest candidates, every one compared."""
        place = {(int(f), int(o)): row for row, (f, o) in enumerate(zip(self.files, self.offsets, strict=True))}
        shape = len(request.queries), request.k
        ids, near = np.full(shape, -1), np.full(shape, np.inf, np.float32)
        for number, query in enumerate(request.queries):
            part = slice(request.first[number], request.first[number + 1])
            at = zip(request.files[part].tolist(), request.offsets[part].tolist(), strict=True)
            exact = self.distances(query, np.array([place[each] for each in at], np.int64), request.metric)
            order = np.lexsort((request.ids[part], exact))[: request.k]
            ids[number, : len(order)], near[number, : len(order)] = request.ids[part][order], exact[order]
        return ids, near


@pytest.fixture(scope="module", params=ENGINES)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    if request.param == "native" and backend.core is None:
        pytest.skip("needs the compiled core")
    with Reader("python" if request.param == "python" else None) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def run(reader: Reader, request: RankRequest, rows: int = 50, **more: Any) -> Ranking:
    return rank_rows(reader, request, np.empty((rows, request.row_bytes), np.uint8), **more)


@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([1, 3, 97, 300]),
    dimension=st.sampled_from([1, 3, 97, 1500]),
    dtype=st.sampled_from(ROW_DTYPES),
    metric=st.sampled_from(METRICS),
    queries=st.sampled_from([0, 1, 5]),
    k=st.sampled_from([1, 4, 30]),
    first_round=st.sampled_from([1, 4, 1000]),
    workspace=st.sampled_from([1, 7, 200]),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_valid_bounds_give_the_nearest_and_their_ties_by_id(
    reader: Reader,
    folder: Path,
    seed: int,
    count: int,
    dimension: int,
    dtype: str,
    metric: str,
    queries: int,
    k: int,
    first_round: int,
    workspace: int,
) -> None:
    rows = Rows.write(folder, reader, count, dimension, dtype, seed)
    request = rows.request(queries, metric, k, seed, first_round=first_round)
    found = run(reader, request, workspace)
    ids, near = rows.brute(request)
    np.testing.assert_array_equal(found.distances, near)
    np.testing.assert_array_equal(found.ids, ids)
    candidates = np.diff(request.first)
    assert (found.tally["ranked"] <= candidates).all()
    assert np.isin(found.tally["stopped"], [STOPS.index("bound"), STOPS.index("all_read")]).all()
    read = found.tally["stopped"] == STOPS.index("all_read")
    assert (found.tally["ranked"][read] == candidates[read]).all()
    for handle in rows.handles:
        reader.remove(handle)


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@pytest.mark.parametrize("seed", range(12))
def test_both_implementations_do_the_same(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    dtype, metric = ROW_DTYPES[seed % 5], METRICS[seed % 3]
    options: dict[str, Any] = {"first_round": int(random.integers(1, 20))}
    if seed % 2:
        options["max_reads"] = int(random.integers(1, 12))
    results = []
    for engine in (None, "python"):
        with Reader(engine) as reader:
            rows = Rows.write(folder, reader, 400, [5, 97, 1500][seed % 3], dtype, seed)
            request = rows.request(6, metric, 5, seed, **options)
            raw = np.frombuffer(rows.paths[0].read_bytes(), np.uint8).reshape(-1, PAGE_BYTES)
            held = np.arange(0, min(2 * (seed % 4), len(raw)), 2)
            hot = HotPages(page_keys(rows.handles[:1], held), raw[held])
            sums = np.zeros(1, READ_TALLY)
            rounds = np.zeros(len(request.lower), np.int32)
            results.append((run(reader, request, 9, hot=hot, tally=sums, rounds=rounds), sums, rounds))
    (native, native_sums, native_rounds), (plain, plain_sums, plain_rounds) = results
    np.testing.assert_array_equal(native_rounds, plain_rounds)
    for query, tally in enumerate(native.tally):
        taken = native_rounds[request.first[query] : request.first[query + 1]]
        assert (taken > 0).sum() == tally["ranked"]
        assert taken.max(initial=0) == tally["rounds"]
    np.testing.assert_array_equal(native.ids, plain.ids)
    np.testing.assert_array_equal(native.distances, plain.distances)
    np.testing.assert_array_equal(native.tally, plain.tally)
    for name in ("pages", "bytes"):  # how many pages go in one I/O is the engine's affair
        assert native_sums[name] == plain_sums[name]


@pytest.mark.parametrize("dimension", [97, 1500])
@pytest.mark.parametrize("most", [1, 3, 10])
def test_no_more_pages_are_read_than_allowed(reader: Reader, folder: Path, dimension: int, most: int) -> None:
    rows = Rows.write(folder, reader, 400, dimension, "float32", 1)
    free = rows.request(8, "l2", 5, 2, share=1.0)
    request = replace(free, max_reads=most)
    found, everything = run(reader, request), run(reader, free)
    assert (everything.tally["page_requests"] > most).any()
    assert (found.tally["page_requests"] <= most).all()
    stopped = found.tally["stopped"] == STOPS.index("max_reads")
    assert stopped.any()
    np.testing.assert_array_equal(found.ids[~stopped], everything.ids[~stopped])
    assert (found.distances >= everything.distances).all()


@pytest.mark.parametrize("dimension", [97, 375, 384, 1500])
@pytest.mark.parametrize("most", [1, 2, 7, 2**62])
def test_pages_are_counted_as_they_are_read(reader: Reader, folder: Path, dimension: int, most: int) -> None:
    """Rows that straddle pages share the first or the last of theirs with others."""
    rows = Rows.write(folder, reader, 400, dimension, "float32", 19)
    request = replace(rows.request(1, "l2", 5, 20, share=1.0), first_round=400, max_reads=most)
    sums = np.zeros(1, READ_TALLY)
    found = run(reader, request, 400, tally=sums)
    assert found.tally["rounds"][0] <= 1  # or a page may be read twice
    assert found.tally["page_requests"][0] == sums["pages"][0] <= most


def test_bounds_that_exclude_are_not_read(reader: Reader, folder: Path) -> None:
    rows = Rows.write(folder, reader, 400, 1024, "float32", 3)  # a page each
    request = rows.request(1, "l2", 5, 4, share=1.0)
    exact = rows.distances(request.queries[0], np.arange(400), "l2")
    order = np.argsort(exact, kind="stable")
    request = replace(
        request, first=np.array([0, 400]), files=rows.files[order], offsets=rows.offsets[order], lower=exact[order],
        ids=order.astype(np.int64), thresholds=exact[order[4:5]],
    )  # fmt: skip
    found = run(reader, request)
    within = int((exact <= exact[order[4]]).sum())
    assert found.tally["ranked"][0] == found.tally["page_requests"][0] == within
    assert STOPS[found.tally["stopped"][0]] == "bound"


def test_rows_beside_those_asked_for_are_ranked_at_no_cost(reader: Reader, folder: Path) -> None:
    rows = Rows.write(folder, reader, 160, 64, "float32", 5)  # sixteen to a page, five pages a file
    request = rows.request(1, "l2", 1, 6)
    order = np.concatenate([np.arange(0, 80, 16), np.setdiff1d(np.arange(80), np.arange(0, 80, 16))])
    request = replace(
        request, first=np.array([0, 80]), files=rows.files[order], offsets=rows.offsets[order], ids=order,
        lower=np.full(80, -np.inf, np.float32), thresholds=np.array([np.inf], np.float32), first_round=2,
    )  # fmt: skip
    found = run(reader, request, 3)
    assert found.tally[0].item()[:4] == (80, 5, 0, 2)  # two pages with all on them, then the other three


def test_queries_share_pages(reader: Reader, folder: Path) -> None:
    rows = Rows.write(folder, reader, 100, 1024, "float32", 7)
    one = rows.request(1, "l2", 3, 8, share=1.0)
    count = int(one.first[-1])
    both = replace(
        one, queries=np.repeat(one.queries, 2, axis=0), first=np.array([0, count, 2 * count]),
        files=np.tile(one.files, 2), offsets=np.tile(one.offsets, 2), lower=np.tile(one.lower, 2),
        ids=np.tile(one.ids, 2), thresholds=np.tile(one.thresholds, 2),
    )  # fmt: skip
    single, double = np.zeros(1, READ_TALLY), np.zeros(1, READ_TALLY)
    alone, found = run(reader, one, 200, tally=single), run(reader, both, 200, tally=double)
    assert single["pages"][0] == double["pages"][0] == alone.tally["page_requests"][0] > 0
    np.testing.assert_array_equal(found.tally, np.repeat(alone.tally, 2, axis=0))
    np.testing.assert_array_equal(found.ids, np.repeat(alone.ids, 2, axis=0))


def test_pages_in_dram_are_not_read(folder: Path, reader: Reader) -> None:
    rows = Rows.write(folder, reader, 200, 97, "float32", 9)
    request = rows.request(5, "ip", 4, 10)
    expected = run(reader, request)
    keys, pages = [], []
    for handle, path in zip(rows.handles, rows.paths, strict=True):
        raw = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, PAGE_BYTES)
        keys += page_keys([handle], range(len(raw))).tolist()
        pages.append(raw)
        path.write_bytes(bytes(raw.nbytes))  # what was on the SSD is gone
    hot = HotPages(np.array(keys, np.int64), np.concatenate(pages))
    assert hot.memory_bytes == len(keys) * (PAGE_BYTES + 8)
    sums = np.zeros(1, READ_TALLY)
    found = run(reader, request, hot=hot, tally=sums)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.distances, expected.distances)
    np.testing.assert_array_equal(found.tally["hot_pages"], expected.tally["page_requests"])
    assert sums[0].item() == (0, 0, 0)
    assert (found.tally["page_requests"] == 0).all()
    with pytest.raises(CorruptionError):
        run(reader, request)


def test_a_deadline_ends_it_after_a_round(reader: Reader, folder: Path) -> None:
    rows = Rows.write(folder, reader, 300, 1024, "uint8", 11)
    request = rows.request(4, "l2", 2, 12, share=1.0)
    request = replace(request, lower=np.full_like(request.lower, -np.inf), deadline=0.0)
    found = run(reader, request)
    busy = np.diff(request.first) > 0
    assert (found.tally["rounds"][busy] == 1).all()
    assert (found.tally["stopped"][busy] == STOPS.index("deadline")).all()
    assert np.isfinite(found.distances[np.diff(request.first) >= 2]).all()


def test_queries_without_candidates_find_nothing(reader: Reader, folder: Path) -> None:
    rows = Rows.write(folder, reader, 50, 8, "float16", 13)
    request = rows.request(3, "cosine", 2, 14, share=0.0)
    found = run(reader, request)
    assert (found.ids == -1).all()
    assert np.isinf(found.distances).all()
    assert found.tally.tolist() == [(0, 0, 0, 0, STOPS.index("all_read"))] * 3
    empty = run(reader, rows.request(0, "cosine", 2, 14))
    assert empty.ids.shape == (0, 2)


@pytest.mark.parametrize("dimension", [97, 1500])
def test_a_damaged_page_is_an_error(reader: Reader, folder: Path, dimension: int) -> None:
    rows = Rows.write(folder, reader, 100, dimension, "float32", 15 + dimension)
    raw = bytearray(rows.paths[1].read_bytes())
    raw[5] ^= 1
    rows.paths[1].write_bytes(bytes(raw))
    request = rows.request(3, "l2", 90, 16, share=100.0)
    with pytest.raises(CorruptionError, match=os.path.basename(rows.paths[1])):
        run(reader, request)
    fine = request.files == rows.handles[0]  # the other file, and no threshold that came from this one
    counts = [int(fine[start:stop].sum()) for start, stop in itertools.pairwise(request.first)]
    kept = replace(
        request, first=np.concatenate([[0], np.cumsum(counts)]), files=request.files[fine],
        offsets=request.offsets[fine], lower=request.lower[fine], ids=request.ids[fine],
        thresholds=np.full(3, np.inf, np.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(run(reader, kept).ids, rows.brute(kept)[0])


@pytest.mark.parametrize(
    ("change", "workspace", "message"),
    [
        ({"k": 0}, (4, 3000), "k=0"),
        ({"first_round": 0}, (4, 3000), "first_round=0"),
        ({}, (0, 3000), "workspace"),
        ({}, (4, 2999), "workspace"),
    ],
)
def test_bad_requests_are_named(
    reader: Reader, folder: Path, change: dict[str, Any], workspace: tuple[int, int], message: str
) -> None:
    rows = Rows.write(folder, reader, 50, 750, "float32", 17)  # which straddle pages
    request = replace(rows.request(1, "l2", 2, 18), **change)
    with pytest.raises(ValueError, match=message):
        rank_rows(reader, request, np.empty(workspace, np.uint8))


@pytest.mark.parametrize("held", [False, True])
def test_rows_of_a_size_that_lies_whole_in_pages_do(reader: Reader, folder: Path, held: bool) -> None:
    """They are ranked in their page: a row that straddled its end would be ranked by the bytes behind it."""
    rows = Rows.write(folder, reader, 50, 128, "float32", 21)
    request = rows.request(1, "l2", 2, 22, share=100.0)
    offsets = request.offsets.copy()
    offsets[3] = PAGE_BYTES - 100
    pages = np.zeros((int(held), PAGE_BYTES), np.uint8)
    hot = HotPages(page_keys(request.files[3:4], [0] * int(held)), pages)
    with pytest.raises(ValueError, match=r"offsets\[3\]=3996"):
        rank_rows(reader, replace(request, offsets=offsets), hot=hot)


def test_a_closed_reader_says_so(folder: Path) -> None:
    with Reader() as reader:
        rows = Rows.write(folder, reader, 50, 8, "float32", 19)
        request = rows.request(1, "l2", 2, 20)
    with pytest.raises(ClosedError):
        run(reader, request)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("dimension", [97, 1500])
def test_bounds_that_fail_for_all_rows_read_stop_nothing(
    reader: Reader, folder: Path, metric: str, dtype: str, dimension: int
) -> None:
    rows = Rows.write(folder, reader, 97, dimension, dtype, seed=11)
    query = np.random.default_rng(2).integers(0, 4, (1, dimension)).astype(np.float32)
    exact = rows.distances(query[0], np.arange(97), metric)
    order = np.argsort(-exact, kind="stable")  # the farthest have the lowest bounds, which exceed all distances
    lower = (4 * np.abs(exact).max() - exact)[order]

    def found(lower: npt.NDArray[Any], k: int) -> Ranking:
        return run(
            reader,
            RankRequest(
                query, metric, dtype, rows.vectors.itemsize * dimension, np.array([0, 97]), rows.files[order],
                rows.offsets[order], lower.astype(np.float32), np.arange(97)[order], np.full(1, np.inf, np.float32), k,
                first_round=k,
            ),
        )  # fmt: skip

    for k in (1, 4):
        misled = found(lower, k)
        assert misled.distances[0].tolist() == np.sort(exact)[:k].tolist()
        assert misled.tally["ranked"][0] == 97
        assert STOPS[misled.tally["stopped"][0]] == "all_read"
        kept = found(np.concatenate([[exact[order[0]]], lower[1:]]), k)  # one bound holds, so that others do, too
        assert kept.tally["ranked"][0] < 97
        assert STOPS[kept.tally["stopped"][0]] == "bound"
