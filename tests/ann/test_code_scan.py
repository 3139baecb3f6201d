"""Codes and their scan: the bounds hold, the native scan is the plain one, and filters hide their rows."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann.zoom.filters.bitmaps import pack
from memhier.ann.zoom.preview.blocks import BLOCK_ROWS, codes_of, interleave
from memhier.ann.zoom.preview.codes import WIDTHS, train_codes
from memhier.ann.zoom.preview.scan_arguments import BORDERS, CodedPart, beyond_borders
from tests.ann.coded_lists import Lists

Floats = npt.NDArray[np.float32]

needs_core = pytest.mark.skipif(backend.core is None, reason="needs the compiled core")

SHAPES = [(1, 1), (3, 2), (8, 1), (97, 30), (128, 16), (128, 64), (128, 128), (600, 90)]


@pytest.mark.long
@needs_core
@pytest.mark.parametrize(("dimension", "code_bytes"), SHAPES)
@pytest.mark.parametrize(
    "reach",
    [
        {},
        {"least": 2, "gap": 0.05},
        {"least": 0, "gap": 0.3},
        {"least": 1, "gap": 0.0, "clear": 1.2},
        {"gap": 0.6, "border": 0.3},
    ],
)
@pytest.mark.parametrize("instructions", [0, 1, 2])
@pytest.mark.parametrize("products", [False, True])
def test_the_native_scan_is_the_plain_one(
    dimension: int,
    code_bytes: int,
    reach: dict[str, Any],
    instructions: int,
    products: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists = Lists(dimension, code_bytes, count=397)  # the last rows are no whole block
    if products:
        lists.seek_products()
    lists.probes[0, 3] = -1
    allowed = pack(np.random.default_rng(1).random(len(lists.part.codes)) < 0.3)
    filtered = CodedPart(lists.part.starts, lists.part.codes, lists.part.numbers, allowed)
    parts = [lists.part, filtered]
    assert backend.core is not None
    code_scan = partial(backend.core.code_scan, instructions=instructions)
    monkeypatch.setattr(backend, "core", SimpleNamespace(**vars(backend.core) | {"code_scan": code_scan}))
    native = lists.scan(parts=parts, limit=800, **reach)
    monkeypatch.setattr(backend, "core", None)
    plain = lists.scan(parts=parts, limit=800, **reach)
    assert native.counts.tolist() == plain.counts.tolist()
    assert native.tally.tolist() == plain.tally.tolist()
    for query, count in enumerate(native.counts):
        assert set(native.positions[query, :count]) == set(plain.positions[query, :count])
        assert np.allclose(native.lower[query, :count], plain.lower[query, :count], rtol=1e-3, atol=1e-4)


@given(
    count=st.integers(0, 100),
    dimensions=st.tuples(*[st.integers(0, 3).map(lambda blocks: 16 * blocks)] * 3, st.integers(0, 700)).filter(any),
    seed=st.integers(0, 9),
)
@settings(max_examples=50, deadline=None)
def test_codes_come_back_from_the_order_of_blocks(count: int, dimensions: tuple[int, int, int, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    code_bytes = sum(-(-axes * width // 8) for axes, width in zip(dimensions, WIDTHS, strict=True))
    codes = random.integers(0, 256, (count, code_bytes), np.uint8)
    arranged = codes.copy()
    interleave(arranged, dimensions)
    rows = random.permutation(count)
    assert (codes_of(arranged, rows, dimensions) == codes[rows]).all()
    rest = count // BLOCK_ROWS * BLOCK_ROWS
    assert (arranged[rest:] == codes[rest:]).all()
    if rest and dimensions[0]:  # the first four bytes of all rows of a block come first
        assert (arranged.ravel()[: 4 * BLOCK_ROWS].reshape(-1, 4) == codes[:BLOCK_ROWS, :4]).all()


@given(
    dimension=st.integers(1, 200),
    code_bytes=st.integers(1, 200),
    count=st.sampled_from([1, 3, 97]),
    seed=st.integers(0, 9),
    products=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_wide_bounds_hold_the_distance_and_nothing_near_is_dropped(
    dimension: int, code_bytes: int, count: int, seed: int, products: bool
) -> None:
    lists = Lists(dimension, code_bytes, count, seed, lists=min(count, 7))
    if products:
        lists.seek_products()
    found = lists.scan(k=1, eps=100.0)
    exact = lists.remoteness()
    for query in range(len(lists.queries)):
        rows = found.positions[query, : found.counts[query]]
        assert int(exact[query].argmin()) in rows
        assert (found.lower[query, : len(rows)] <= exact[query, rows] + 1e-3).all()
        assert found.thresholds[query] >= exact[query].min() - 1e-3
    assert lists.book.code_bytes <= code_bytes


@pytest.mark.parametrize("code_bytes", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("products", [False, True])
def test_estimates_come_as_near_as_they_say(code_bytes: int, products: bool) -> None:
    lists = Lists(128, code_bytes, 2000, queries=100)
    if products:
        lists.seek_products()
    found = lists.scan(k=2000, eps=1.0, limit=2000)
    exact = lists.remoteness()
    wrong = np.concatenate(
        [
            (found.estimates[query] - exact[query, found.positions[query]])
            / (found.estimates[query] - found.lower[query])
            for query in range(100)
        ]
    )
    assert 0.9 < np.sqrt(np.square(wrong).mean()) < (1.15 if code_bytes < 128 else 1.6)  # the query's bytes show there
    assert abs(wrong.mean()) < 0.05


def errors_of(lists: Lists) -> npt.NDArray[np.float32]:
    return lists.book.numbers_of(lists.part.numbers)[2]


@given(seed=st.integers(0, 2**16), dimension=st.sampled_from([1, 3, 16, 40]), power=st.integers(-20, 15))
@settings(max_examples=40, deadline=None)
def test_what_a_byte_says_of_an_error_is_no_less_than_it_is(seed: int, dimension: int, power: int) -> None:
    random = np.random.default_rng(seed)
    book = train_codes((random.normal(size=(50, dimension)) * 10.0**power).astype(np.float32), 1 + dimension // 4, 0)
    sizes = 10.0 ** (power + random.uniform(-12, 3, (60, 1)))  # from below what fp16 holds to about what it holds
    residuals = (random.normal(size=(60, dimension)) * sizes).astype(np.float32)
    residuals[0], residuals[1:4, 1:] = 0, 0
    codes, numbers = book.encode(residuals)
    errors = book.numbers_of(numbers)[2].astype(np.float64)
    wrong = residuals / book.unit
    wrong[:, : len(book.alpha)] -= book.decode(codes, numbers)
    assert (np.sqrt(np.square(wrong.astype(np.float64)) @ book.share) <= errors * (1 + 1e-3) + 1e-12).all()


def test_longer_codes_err_less() -> None:
    errors = [float(errors_of(Lists(128, size)).mean()) for size in (8, 16, 32, 64, 128)]
    assert all(shorter > 1.3 * longer for shorter, longer in itertools.pairwise(errors))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_only_allowed_rows_are_found_and_scanned(share: float) -> None:
    lists = Lists(97, 30)
    chosen = np.random.default_rng(3).random(len(lists.part.codes)) < share
    part = CodedPart(lists.part.starts, lists.part.codes, lists.part.numbers, pack(chosen))
    found = lists.scan(k=5, parts=[part], eps=100.0)
    assert (found.tally["scanned"] == chosen.sum()).all()
    for query in range(5):
        assert chosen[found.positions[query, : found.counts[query]]].all()
        assert found.counts[query] >= min(5, chosen.sum())


def test_too_many_candidates_are_cut_to_the_lowest_bounds_and_said_so() -> None:
    lists = Lists(64, 2)
    everything, cut = lists.scan(k=3, eps=50.0), lists.scan(k=3, eps=50.0, limit=4)
    for query in range(5):
        assert everything.counts[query] > 4
        assert cut.counts[query] == 4
        assert cut.tally["cut_short"][query] == 1
        assert cut.lower[query].tolist() == everything.lower[query, :4].tolist()


@pytest.mark.parametrize("native", [True, False])
def test_what_the_bounds_would_have_excluded_is_no_lack_of_room(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and backend.core is None:
        pytest.skip("needs the compiled core")
    if not native:
        monkeypatch.setattr(backend, "core", None)
    seen = set()
    for seed in range(4):
        lists = Lists(32, 16, seed=seed, queries=20)
        lists.probes = np.ascontiguousarray(lists.probes[:, ::-1])  # the farthest first
        everything, cut = lists.scan(k=3, eps=3.0), lists.scan(k=3, eps=3.0, limit=12)
        for query in range(20):
            short = bool(everything.counts[query] > 12)
            assert bool(cut.tally["cut_short"][query]) == short
            assert cut.counts[query] == min(12, everything.counts[query])
            seen.add(short)
    assert seen == {False, True}


@pytest.mark.parametrize("native", [True, False])
def test_nothing_beyond_the_largest_distance_wanted_is_handed_on(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and backend.core is None:
        pytest.skip("needs the compiled core")
    if not native:
        monkeypatch.setattr(backend, "core", None)
    lists = Lists(64, 16)
    everything = lists.scan(k=400)
    most = np.array([-1, 1e-3, 1, np.median(everything.estimates[3]), np.inf], np.float32)
    found = lists.scan(k=400, most=most)
    for query in range(5):
        within = everything.lower[query, :400] <= most[query]
        assert found.counts[query] == within.sum()
        assert set(found.positions[query, : within.sum()]) == set(everything.positions[query, :400][within])
    assert 0 < found.counts[3] < 400 == found.counts[4]
    assert (found.tally["cut_short"] == 0).all()
    assert (found.thresholds <= most).all()
    near = lists.scan(k=3, most=most)
    assert near.thresholds[4] == lists.scan(k=3).thresholds[4]


@pytest.mark.parametrize("native", [True, False])
def test_a_vector_of_which_nothing_is_known_is_always_handed_on(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and backend.core is None:
        pytest.skip("needs the compiled core")
    if not native:
        monkeypatch.setattr(backend, "core", None)
    lists = Lists(64, 16)
    numbers = lists.part.numbers.copy()
    numbers[1, 17] |= 255 << 8
    part = CodedPart(lists.part.starts, lists.part.codes, numbers)
    for eps in (0.0, 1.0):
        found = lists.scan(k=1, parts=[part], eps=eps)
        assert all(17 in found.positions[query, : found.counts[query]] for query in range(5))
        assert np.isfinite(found.thresholds).all()


def test_a_scan_ends_at_the_first_list_that_lies_too_far_beyond() -> None:
    lists = Lists(128, 64, 2000)
    every, fewer, one = (lists.scan(gap=gap).tally for gap in (np.inf, 0.05, -10.0))
    assert every["probed"].sum() == 35
    assert every["open"].all()
    assert one["probed"].sum() == 5  # the first is always scanned: nothing is known before
    assert not one["open"].any()
    assert 5 < fewer["probed"].sum() < 35


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_core), False])
def test_a_scan_passes_over_lists_beyond_their_borders(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(backend, "core", None)
    lists = Lists(16, 16, 3000, lists=80, queries=30)
    whole = lists.scan(gap=0.8).tally["probed"]
    every, most, few, none = (lists.scan(gap=0.8, border=border).tally["probed"] for border in (1e9, 0.5, 0.2, 1e-9))
    assert (every == whole).all()
    assert (most <= every).all()
    assert (few <= most).all()
    assert 30 <= none.sum() < few.sum() < most.sum() < every.sum()


def test_lists_lie_beyond_the_planes_halfway_to_nearer_ones() -> None:
    random = np.random.default_rng(0)
    query, centroids = random.normal(size=6), random.normal(size=(BORDERS + 9, 6))
    centroids = centroids[np.square(query - centroids).sum(axis=1).argsort()]
    wanted = np.zeros(len(centroids))
    for number, centroid in enumerate(centroids):
        for near in centroids[: min(number, BORDERS)]:
            along = (centroid - near) / np.linalg.norm(centroid - near)
            wanted[number] += ((centroid + near) / 2 @ along - query @ along) ** 2
    residuals = (query - centroids).astype(np.float32)
    np.testing.assert_allclose(beyond_borders(residuals, residuals[:BORDERS]), wanted, rtol=1e-3, atol=1e-5)
    copies = np.repeat(residuals[:1], 3, axis=0)
    assert beyond_borders(copies, copies).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["zeros", "constant", "huge", "tiny", "one_far"])
def test_degenerate_residuals_have_finite_codes(kind: str) -> None:
    random = np.random.default_rng(0)
    residuals = {
        "zeros": np.zeros((50, 20)),
        "constant": np.ones((50, 20)),
        "huge": random.normal(size=(50, 20)) * 1e15,
        "tiny": random.normal(size=(50, 20)) * 1e-15,
        "one_far": random.normal(size=(50, 20)) * np.where(np.arange(50) == 7, 1e9, 1e-3)[:, None],
    }[kind].astype(np.float32)
    book = train_codes(residuals, 10, 0)
    codes, numbers = book.encode(residuals)
    assert codes.shape == (50, book.code_bytes)
    radii, factors, errors = book.numbers_of(numbers)
    assert np.isfinite(radii).all()
    assert np.isfinite(factors).all()
    assert (errors >= 0).all()


def test_bad_arrays_are_refused_by_the_core() -> None:
    if backend.core is None:
        pytest.skip("needs the compiled core")
    lists = Lists(16, 8)
    with pytest.raises(ValueError, match="list number"):
        lists.scan(probes=lists.probes + 1)
    with pytest.raises(ValueError, match="limit"):
        lists.scan(k=5, limit=4)
    damaged = lists.part.starts.copy()
    damaged[-1] += 1
    with pytest.raises(ValueError, match="ascend"):
        lists.scan(parts=[CodedPart(damaged, lists.part.codes, lists.part.numbers)])


@needs_core
@given(dimension=st.sampled_from([1, 3, 16, 63, 64, 97, 200]), count=st.integers(0, 11), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_vectors_are_turned_alike_however_many_go_together(dimension: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(random.normal(size=(dimension, dimension)))
    book = train_codes(random.normal(size=(50, dimension)).astype(np.float32), 8, seed)
    book = replace(book, rotation=np.ascontiguousarray(axes, np.float32))
    vectors = random.normal(size=(2 * count, dimension)).astype(np.float32)[::2]  # not contiguous
    turned = book.turn(vectors)
    assert turned.shape == vectors.shape
    assert np.allclose(turned, vectors.astype(np.float64) @ book.rotation, atol=1e-5)
    for row, vector in enumerate(vectors):
        assert (book.turn(vector[None])[0] == turned[row]).all()
