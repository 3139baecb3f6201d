"""The order of rows in pages, and the room that pages are read into."""

import itertools
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.ann.zoom.preview.codes import train_codes
from memhier.ann.zoom.storage import pages
from memhier.ann.zoom.storage.fullview import make_workspace, workspace_bytes
from memhier.ann.zoom.storage.pages import page_order
from memhier.rows.ranking import page_rows_of

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def make_residuals(count: int, dimension: int, seed: int = 0) -> Floats:
    """Return vectors of 20 clusters, in no order."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(20, dimension))[random.integers(0, 20, count)]
    return (centres + 0.2 * random.normal(size=(count, dimension))).astype(np.float32)


def order_of(residuals: Floats, starts: Ints, row_bytes: int, first: int = 0) -> Ints:
    book = train_codes(residuals, residuals.shape[1] // 2, 0)
    return page_order(book, *book.encode(book.turn(residuals)), starts, row_bytes, first)


@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, 33, 100]), min_size=1, max_size=6),
    row_bytes=st.sampled_from([4, 128, 384, 3136, 4096, 5000]),
    first=st.integers(0, 70),
    block=st.sampled_from([1, 4000, 1 << 24]),
)
@settings(max_examples=30, deadline=None)
def test_all_rows_stay_in_their_list(lengths: list[int], row_bytes: int, first: int, block: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    residuals = make_residuals(max(1, starts[-1]), 8)
    book = train_codes(residuals, 4, 0)
    codes, numbers = book.encode(book.turn(residuals[: starts[-1]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_BLOCK_BYTES", block)
        order = page_order(book, codes, numbers, starts, row_bytes, first)
    for low, high in itertools.pairwise(starts):
        np.testing.assert_array_equal(np.sort(order[low:high]), np.arange(low, high))


@pytest.mark.parametrize("power", [-52, 0, 45])
def test_near_vectors_share_a_page_at_any_scale(power: int) -> None:
    residuals, starts = make_residuals(640, 16), np.array([0, 640])
    order = order_of(residuals * np.float32(2.0**power), starts, 128)
    np.testing.assert_array_equal(order, order_of(residuals, starts, 128))
    spread = [residuals[some].reshape(20, 32, 16).std(axis=1).mean() for some in (order, np.arange(640))]
    assert spread[0] < 0.6 * spread[1]


def test_a_long_list_is_put_in_order_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    residuals = make_residuals(20_000, 16)
    book = train_codes(residuals[:1000], 8, 0)
    codes, numbers = book.encode(book.turn(residuals))
    monkeypatch.setattr(pages, "_BLOCK_BYTES", 64_000)
    tracemalloc.start()
    order = page_order(book, codes, numbers, np.array([0, len(codes)]), 128)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * order.nbytes + 8 * 64_000
    near = residuals[order][:19_968].reshape(-1, 32, 16).std(axis=1).mean()
    assert near < 0.6 * residuals.std(axis=0).mean()


@pytest.mark.parametrize("row_bytes", [1, 3, 128, 384, 3136, 4096, 3000, 5000, 100_000])
def test_a_workspace_takes_no_more_than_is_counted(row_bytes: int) -> None:
    tracemalloc.start()
    room = make_workspace(row_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= workspace_bytes(row_bytes) + 1000
    assert room.shape[1] == row_bytes
    assert room.nbytes >= 0.95 * workspace_bytes(row_bytes)
    assert (len(room) == 0) == (page_rows_of(row_bytes) > 0)  # those are ranked where they land
