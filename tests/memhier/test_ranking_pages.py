"""Ranking of whole pages: the rows beside a candidate are ranked with it, if they may be found."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.io.kernels import METRICS, distances
from memhier.io.read_arguments import READ_TALLY
from memhier.io.reader import PAGE_BYTES, Reader
from memhier.rows.rank_request import page_keys
from memhier.rows.ranking import HotPages, PageRows, RankRequest, page_rows_of, rank_rows

Ints = npt.NDArray[np.int64]


class Packed:
    """Two files of packed rows, some of which may not be found, and requests for them."""

    def __init__(self, folder: Path, reader: Reader, counts: tuple[int, int], dimension: int, dtype: str, seed: int):
        random = np.random.default_rng(seed)
        self.row_bytes = np.dtype(dtype).itemsize * dimension
        self.per_page = page_rows_of(self.row_bytes)
        self.dtype = dtype
        self.vectors = [random.integers(0, 5, (count, dimension)).astype(dtype) for count in counts]
        self.page_rows = []
        names = random.permutation(sum(counts))
        for number, vectors in enumerate(self.vectors):
            rows = np.arange(len(vectors))
            raw = np.zeros((-(-len(vectors) // self.per_page) * PAGE_BYTES), np.uint8)
            for row, start in zip(rows, self.offsets(rows).tolist(), strict=True):
                raw[start : start + self.row_bytes] = vectors[row].view(np.uint8)
            path = folder / f"{dtype}-{counts}-{dimension}-{seed}-{number}"
            path.write_bytes(raw.tobytes())
            ids, names = names[: len(vectors)], names[len(vectors) :]
            allowed = None
            if random.random() < 0.5:
                allowed = random.integers(0, 2**63, -(-len(vectors) // 64), np.uint64)
            self.page_rows.append(PageRows(reader.add(path), ids.astype([np.uint32, np.int64][number]), allowed))

    def offsets(self, rows: Ints) -> Ints:
        return rows // self.per_page * PAGE_BYTES + rows % self.per_page * self.row_bytes

    def request(self, queries: int, metric: str, k: int, seed: int, **more: Any) -> RankRequest:
        """Return a request of random candidates with random bounds."""
        random = np.random.default_rng(seed)
        asked = random.integers(0, 5, (queries, self.vectors[0].shape[1])).astype(np.float32)
        counts = random.integers(0, 12, queries)
        total = int(counts.sum())
        which = random.integers(0, 2, total)
        rows = np.array([random.integers(0, len(self.vectors[each])) for each in which], np.int64)
        lower = np.concatenate([np.empty(0), *[np.sort(random.normal(size=count)) for count in counts]])
        return RankRequest(
            asked, metric, self.dtype, self.row_bytes, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.array([self.page_rows[each].file for each in which], np.int32), self.offsets(rows),
            lower.astype(np.float32), np.zeros(total, np.int64), np.full(queries, np.inf, np.float32), k,
            **{"first_round": k, "page_rows": self.page_rows} | more,
        )  # fmt: skip

    def nearest(self, request: RankRequest, query: int) -> list[tuple[float, int, int, int]]:
        """Return distance, id, file and offset of all that may be found on the pages of a query's candidates."""
        found = []
        part = slice(request.first[query], request.first[query + 1])
        pages = set(zip(request.files[part].tolist(), (request.offsets[part] // PAGE_BYTES).tolist(), strict=True))
        for vectors, known in zip(self.vectors, self.page_rows, strict=True):
            rows = np.arange(len(vectors))
            away = distances(request.queries[query], vectors, request.metric, dtype=self.dtype)
            for row, offset in zip(rows.tolist(), self.offsets(rows).tolist(), strict=True):
                allowed = known.allowed is None or int(known.allowed[row // 64]) >> row % 64 & 1
                if allowed and (known.file, offset // PAGE_BYTES) in pages:
                    near = float(away[row])
                    near = max(near, 0.0) if request.metric == "cosine" else near
                    found.append((near, int(known.ids[row]), known.file, offset))
        return sorted(found)


@pytest.fixture(scope="module", params=["native", "python"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    if request.param == "native" and backend.core is None:
        pytest.skip("needs the compiled core")
    with Reader("python" if request.param == "python" else None) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@given(
    seed=st.integers(0, 2**16),
    counts=st.sampled_from([(1, 1), (70, 3), (200, 129)]),
    shape=st.sampled_from([(128, "uint8"), (96, "float32"), (1000, "float32"), (64, "float16"), (1, "int8")]),
    metric=st.sampled_from(METRICS),
    k=st.sampled_from([1, 4, 300]),
    first_round=st.sampled_from([1, 50]),
    hot=st.booleans(),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_all_that_lies_on_the_pages_of_candidates_is_ranked(
    reader: Reader,
    folder: Path,
    seed: int,
    counts: tuple[int, int],
    shape: tuple[int, str],
    metric: str,
    k: int,
    first_round: int,
    hot: bool,
) -> None:
    packed = Packed(folder, reader, counts, *shape, seed)
    request = replace(packed.request(3, metric, k, seed), first_round=first_round)
    request = replace(request, lower=np.full(len(request.lower), -np.inf, np.float32))  # all are to be read
    pages = HotPages.none()
    if hot:
        file = packed.page_rows[0].file
        pages = HotPages(page_keys([file], [0]), reader.read(file, np.array([0]), PAGE_BYTES))
    found = rank_rows(reader, request, hot=pages)
    for query in range(3):
        nearest = packed.nearest(request, query)
        assert found.tally["ranked"][query] == len(nearest)
        part = slice(request.first[query], request.first[query + 1])
        touched = np.unique(page_keys(request.files[part], request.offsets[part] // PAGE_BYTES))
        assert found.tally["page_requests"][query] + found.tally["hot_pages"][query] == len(touched)
        assert found.tally["hot_pages"][query] == np.isin(touched, pages.keys).sum()
        both = zip(found.distances[query], found.ids[query], found.files[query], found.offsets[query], strict=True)
        wanted = nearest[:k] + [(np.inf, -1, -1, -1)] * (k - len(nearest))
        assert [tuple(each) for each in both] == wanted


@pytest.mark.parametrize("metric", METRICS)
def test_bounds_that_fail_for_the_candidate_of_each_page_read_stop_nothing(
    reader: Reader, folder: Path, metric: str
) -> None:
    packed = Packed(folder, reader, (200, 129), 96, "float32", 5)
    request = packed.request(3, metric, 1, 7)
    above = 1e6 + np.arange(len(request.lower))  # of all distances, and ascending
    misled = rank_rows(reader, replace(request, lower=above.astype(np.float32)))
    below = np.where(np.isin(np.arange(len(above)), request.first), -1e6, above)  # of the first candidate of a query
    kept = rank_rows(reader, replace(request, lower=below.astype(np.float32)))
    for query in range(3):
        part = slice(request.first[query], request.first[query + 1])
        pages = np.unique(page_keys(request.files[part], request.offsets[part] // PAGE_BYTES))
        assert misled.tally["page_requests"][query] == len(pages)
        assert kept.tally["page_requests"][query] == min(1, len(pages))
    assert kept.tally["page_requests"].sum() < misled.tally["page_requests"].sum()


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@given(
    seed=st.integers(0, 2**16),
    metric=st.sampled_from(METRICS),
    k=st.sampled_from([1, 5]),
    first_round=st.sampled_from([1, 3, 20]),
    most=st.sampled_from([1, 4, 2**62]),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_both_implementations_read_the_same_pages(
    folder: Path, seed: int, metric: str, k: int, first_round: int, most: int
) -> None:
    results = []
    for engine in (None, "python"):
        with Reader(engine) as opened:
            packed = Packed(folder, opened, (300, 200), 128, "float32", seed)
            request = replace(packed.request(4, metric, k, seed), first_round=first_round, max_reads=most)
            sums = np.zeros(1, READ_TALLY)
            rounds = np.zeros(len(request.lower), np.int32)
            found = rank_rows(opened, request, tally=sums, rounds=rounds)
            results.append((found, sums, rounds))
            assert (found.tally["page_requests"] <= most).all()
            first = np.add.reduceat(np.append(rounds > 0, 0), request.first[:-1]) * (np.diff(request.first) > 0)
            np.testing.assert_array_equal(first, found.tally["page_requests"])  # one candidate of each page
    (one, sums, rounds), (other, other_sums, other_rounds) = results
    np.testing.assert_array_equal(rounds, other_rounds)
    for name in ("ids", "distances", "files", "offsets", "tally"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(sums, other_sums)


def test_rows_that_straddle_pages_are_refused(reader: Reader, folder: Path) -> None:
    packed = Packed(folder, reader, (10, 10), 128, "uint8", 1)
    request = packed.request(1, "l2", 1, 1)
    with pytest.raises(ValueError, match="straddle"):
        rank_rows(reader, replace(request, row_bytes=3000), np.empty((31, 3000), np.uint8))
    assert page_rows_of(128) == 32
    assert page_rows_of(384) == 10
    assert page_rows_of(3136) == page_rows_of(5000) == 0
    assert page_rows_of(4096) == 1
