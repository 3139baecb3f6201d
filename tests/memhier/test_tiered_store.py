"""Tiers of one store: their turns at writing, and the descriptions of their rows."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.errors import ClosedError, FormatError, LockedError
from memhier.policies import LRU
from memhier.store.store import Store
from memhier.store.way_back import go_back
from memhier.table.tiered import KIND, Tiered

DIM = 1024


def numbered(keys: Any, dim: int = DIM) -> NDArray[np.float32]:
    return np.repeat(np.asarray(keys)[..., None], dim, axis=-1).astype(np.float32)


def test_a_store_open_for_reading_is_refused(tmp_path: Path) -> None:
    with Tiered(tmp_path / "s", "t", np.float32, DIM, rows=50, policy=LRU(4)) as tier:
        tier.checkpoint()
    with Store.open(tmp_path / "s", KIND) as store, pytest.raises(OSError, match="open for reading") as caught:
        Tiered(store, "t", np.float32, DIM, rows=50, policy=LRU(4))
    assert (caught.value.errno, caught.value.filename) == (errno.EROFS, str(tmp_path / "s"))


def scatter_each(tier: Tiered, taken: list[int]) -> None:
    """Write one row after the other, and note which the tier took."""
    for key in range(3000):
        tier.scatter([key], numbered([key]))
        taken.append(key)


def test_tiers_of_one_store_write_by_turns(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "s", KIND) as store,
        Tiered(store, "a", np.float32, DIM, rows=3000, dram="9MiB", policy=LRU(2)) as first,
        Tiered(store, "b", np.float32, DIM, rows=3000, dram="9MiB", policy=LRU(2)) as second,
    ):
        first.scatter([1], numbered([1]))
        first.flush()
        taken: list[int] = []
        with pytest.raises(LockedError, match="could not be written yet"):  # when the queue is full
            scatter_each(second, taken)
        for call in (second.flush, second.checkpoint, second.flush):
            with pytest.raises(LockedError):
                call()
        first.checkpoint()
        first.scatter([2], numbered([2]))
        second.checkpoint()
        for key in taken:
            assert second.gather([key])[0, 0] == key
        second.scatter([0], numbered([-5]))
        second.flush()
        with pytest.raises(LockedError):
            first.checkpoint()
        second.checkpoint()
        first.checkpoint()
        assert first.gather([1, 2])[:, 0].tolist() == [1, 2]
        assert second.gather([0])[0, 0] == -5


def test_a_checkpoint_while_another_changes_the_store_can_be_repeated(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "s", KIND) as store,
        Tiered(store, "a", np.float32, DIM, rows=30, policy=LRU(2)) as tier,
    ):
        with store.begin(), pytest.raises(LockedError):
            tier.checkpoint()
        tier.scatter([1], numbered([1]))
        assert tier.checkpoint() == 1


@pytest.mark.parametrize(("dtype", "shape", "codec"), [("<i4", 4, "none"), ("<f4", (2, 2), "none"), ("<f4", 8, "fp16")])
def test_rows_are_not_taken_for_others_of_the_same_width(tmp_path: Path, dtype: str, shape: Any, codec: str) -> None:
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(2)) as tier:
        tier.scatter([1], numbered([1], 4))
        with pytest.raises(ValueError, match="'tiered/t' is the tier's own"):
            tier.checkpoint({"tiered/t": b""})
        tier.checkpoint()
    with pytest.raises(FormatError, match=r"'tiered/t' says .*'<f4'.*\(4,\).*'none'.*expected") as caught:
        Tiered(tmp_path / "s", "t", dtype, shape, rows=30, policy=LRU(2), codec=codec)
    assert dtype in str(caught.value)
    assert codec in str(caught.value)
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(2)) as tier:
        assert tier.gather([1]).tolist() == [[1] * 4]


def test_an_unreadable_description_raises(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s", KIND) as store:
        with store.begin() as tx:
            tx.put("tiered/t", b"\xff{")
            tx.commit()
        with pytest.raises(FormatError, match="tiered/t"):
            Tiered(store, "t", np.float32, 4, rows=30, policy=LRU(2))


def test_stored_keys_are_those_that_left_dram(tmp_path: Path) -> None:
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(3)) as tier:
        tier.scatter([7, 2, 9], numbered([7, 2, 9], 4))
        assert [*tier.stored_keys()] == []
        tier.flush()
        tier.gather([20])  # was never written
        assert sorted(np.concatenate([*tier.stored_keys()])) == [2, 7, 9]
        assert not tier.closed
    assert tier.closed
    for call in (tier.stored_keys, tier.keep_way_back):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("further", [False, True])
def test_a_store_goes_back_to_the_commit_that_a_tier_kept(tmp_path: Path, further: bool) -> None:
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(3)) as tier:
        tier.keep_way_back()
        for value in (1, 2, 3):
            tier.keep_way_back(further=further and value == 3)
            tier.scatter([1], numbered([value], 4))
            tier.checkpoint()
    with Store.open(tmp_path / "s", KIND, writable=True) as store:
        go_back(store)
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=30, policy=LRU(3)) as tier:
        assert tier.gather([1])[0, 0] == (1 if further else 2)
