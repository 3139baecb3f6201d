"""Codes that arrive in waves: the candidates are those of codes that are all there at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memhier import backend
from memhier.ann.zoom.filters.bitmaps import pack, unpack
from memhier.ann.zoom.preview.blocks import BLOCK_ROWS, codes_of, interleave
from memhier.ann.zoom.preview.code_scan import code_scan
from memhier.ann.zoom.preview.code_waves import CodeWaves
from memhier.ann.zoom.preview.scan_arguments import (
    Candidates,
    CodedPart,
    CodeLists,
    ScanLimits,
    ScanQueries,
    WavePart,
    split_positions,
)
from tests.ann.coded_lists import Lists

LIMITS: list[dict[str, Any]] = [
    {},
    {"least": 2, "gap": 0.05},
    {"gap": 0.3},
    {"least": 1, "gap": 0.0, "clear": 1.2},
    {"gap": 0.6, "border": 0.3},
]


@pytest.fixture(params=["native", "plain"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both cores, by turns."""
    if request.param == "plain":
        monkeypatch.setattr(backend, "core", None)
    elif backend.core is None:
        pytest.skip("needs the compiled core")
    return str(request.param)


def part_of(lists: Lists, part: CodedPart, chosen: np.ndarray) -> WavePart:
    """Return some lists of a part as a read brings them: each begins with a block; the id of row r is 7 r + 5."""
    begin, stop = part.starts[chosen], part.starts[chosen + 1]
    blocks = -(-(stop - begin) // BLOCK_ROWS)
    at = (np.cumsum(blocks) - blocks) * BLOCK_ROWS
    count = int(blocks.sum()) * BLOCK_ROWS
    codes, numbers = np.zeros((count, part.codes.shape[1]), np.uint8), np.zeros((2, count), np.uint16)
    ids = np.full(count, -9)
    for first, low, high in zip(at, begin, stop, strict=True):
        rows = np.arange(low, high)
        codes[first : first + len(rows)] = codes_of(part.codes, rows, lists.book.dimensions)
        numbers[:, first : first + len(rows)] = part.numbers[:, rows]
        ids[first : first + len(rows)] = 7 * rows + 5
    interleave(codes, lists.book.dimensions)
    return WavePart(chosen, at, at + stop - begin, begin - at, codes, numbers, ids, part.rows, part.allowed)


def in_waves(lists: Lists, parts: list[CodedPart], limits: ScanLimits, most: np.ndarray, seed: int) -> Candidates:
    """Scan in waves of any length, some of the queries at a time."""
    random = np.random.default_rng(seed)
    queries = ScanQueries(lists.queries, lists.probes, most, lists.inner)
    waves = CodeWaves(queries, CodeLists(lists.centroids, lists.radii, lists.book), limits)
    while (counts := waves.ahead(int(random.integers(1, 4)), int(random.integers(1, 9)), 12)).any():
        some = random.random(len(counts)) < 0.6
        some[np.flatnonzero(counts)[0]] = True
        counts = np.where(some, np.maximum((counts > 0).astype(int), random.integers(0, counts + 1)), 0)
        wanted = [lists.probes[q, waves.done[q] : waves.done[q] + count] for q, count in enumerate(counts)]
        chosen = np.unique(np.concatenate(wanted))
        waves.scan([part_of(lists, part, chosen) for part in parts], chosen, counts)
    return waves.finish()


@pytest.mark.long
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize(("dimension", "code_bytes"), [(3, 2), (97, 30), (128, 16)])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("limit", [4, 800])
def test_waves_find_what_a_scan_of_all_codes_finds(
    dimension: int, code_bytes: int, limits: dict[str, Any], products: bool, limit: int
) -> None:
    lists = Lists(dimension, code_bytes, count=397, lists=23, queries=6)
    if products:
        lists.seek_products()
    allowed = pack(np.random.default_rng(1).random(len(lists.part.codes)) < 0.3)
    parts = [lists.part, CodedPart(lists.part.starts, lists.part.codes, lists.part.numbers, allowed)]
    most = np.full(len(lists.queries), np.inf, np.float32)
    if not products:
        most[1] = np.quantile(lists.remoteness()[1], 0.1)
    chosen = ScanLimits(k=3, **{"eps": 2.0, "limit": limit} | limits)
    book = CodeLists(lists.centroids, lists.radii, lists.book)
    wanted = code_scan(ScanQueries(lists.queries, lists.probes, most, lists.inner), book, parts, chosen)
    for seed in range(3):
        found = in_waves(lists, parts, chosen, most, seed)
        assert found.ids is not None
        assert found.counts.tolist() == wanted.counts.tolist()
        assert found.tally.tolist() == wanted.tally.tolist()
        np.testing.assert_array_equal(found.thresholds, wanted.thresholds)
        for query, count in enumerate(found.counts):
            for name in ("positions", "lower", "estimates"):
                np.testing.assert_array_equal(getattr(found, name)[query, :count], getattr(wanted, name)[query, :count])
            number, rows = split_positions(found.positions[query, :count])
            np.testing.assert_array_equal(found.ids[query, :count], 7 * rows + 5)
            assert unpack(allowed, len(lists.part.codes))[rows[number == 1]].all()


@pytest.mark.usefixtures("core")
def test_queries_without_lists_end_at_once() -> None:
    lists = Lists(8, 4)
    lists.probes[:] = -1
    found = in_waves(lists, [lists.part], ScanLimits(3, 2.0, 10), np.full(5, np.inf, np.float32), 0)
    assert found.counts.tolist() == [0] * 5
    assert np.isinf(found.thresholds).all()


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("starts", np.array([-16])),
        ("starts", np.array([3])),
        ("stops", np.array([10_000])),
        ("shifts", np.array([10_000])),
        ("shifts", np.array([-10_000])),
        ("ids", np.zeros(3, np.int64)),
        ("written", 1),
        ("allowed", np.zeros(1, np.uint64)),
    ],
)
def test_lists_beyond_the_codes_are_refused(name: str, value: Any) -> None:
    lists = Lists(8, 4)
    queries = ScanQueries(lists.queries, lists.probes, np.full(5, np.inf, np.float32))
    waves = CodeWaves(queries, CodeLists(lists.centroids, lists.radii, lists.book), ScanLimits(3, 2.0, 10))
    first = lists.probes[0, :1]
    part = replace(part_of(lists, lists.part, first), **{name: value})
    with pytest.raises(ValueError, match="code_waves"):
        waves.scan([part], first, np.array([1, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="a list was not read"):
        waves.scan([], lists.probes[0, 1:2], np.array([1, 0, 0, 0, 0]))
