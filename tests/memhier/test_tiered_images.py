"""Checkpoints taken beside calls: each has the table of the moment it was started, however it changes meanwhile."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.errors import LockedError
from memhier.log.row_log import RowLog
from memhier.policies import LRU
from memhier.table import writer
from memhier.table.sizes import Sizes
from memhier.table.tiered import Tiered

ROWS, WIDTH, SLOTS = 40, 3, 9
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # its copies and syncs are many


def open_tier(path: Path, **options: Any) -> Tiered:
    options = {"rows": ROWS, "dram": "64MiB", "policy": LRU(SLOTS), "key_space": ROWS} | options
    return Tiered(path / "table", "rows", np.float32, WIDTH, **options)


@contextmanager
def small_queue(rows: int) -> Iterator[None]:
    """Make tiers under it with a write queue of so few rows, whose images are written a row at a time."""
    with pytest.MonkeyPatch.context() as patch:
        made = Sizes.__init__

        def make(sizes: Any, *arguments: Any) -> None:
            made(sizes, *arguments)
            sizes.queued = rows
            sizes.outgoing = writer.batch_rows(rows)

        patch.setattr(Sizes, "__init__", make)
        patch.setattr(writer, "_SAVE_BYTES", 1)
        yield


operation = st.one_of(
    st.tuples(st.sampled_from(["scatter", "change", "gather"]), st.lists(st.integers(0, ROWS - 1), max_size=SLOTS)),
    st.tuples(st.just("start"), st.just([])),
)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(operation, max_size=30),
    queued=st.sampled_from([1, 2, 5, 16, 100]),
    codec=st.sampled_from(["none", "fp16"]),
)
def test_an_image_is_of_its_moment(operations: list[Any], queued: int, codec: str) -> None:
    truth = np.zeros((ROWS, WIDTH), np.float32)
    with (
        tempfile.TemporaryDirectory(dir=FAST) as folder,
        small_queue(queued),
        open_tier(path := Path(folder), codec=codec) as tier,
    ):
        for number, (kind, some) in enumerate([*operations, ("start", [])], 1):
            keys = np.unique(np.array(some, np.int64))
            if kind == "scatter":
                truth[keys] = number
                tier.scatter(keys, truth[keys])
            elif kind == "change":
                with tier.lend(keys) as loan, loan.changing() as rows:
                    rows[loan.slots] += number
                truth[keys] += number
            elif kind == "gather":
                assert np.array_equal(tier.gather(keys), truth[keys])
            else:
                # Waits for the one before; then its folder is as a crash at any later moment would leave it.
                moment, future = truth.copy(), tier.start_checkpoint({"number": str(number).encode()})
                for key in range(0, ROWS, 7):
                    truth[key] = -number
                    tier.scatter([key], truth[[key]])
                future.result(60)
                shutil.copytree(path / "table", path / f"copy-{number}" / "table")
                with open_tier(path / f"copy-{number}", codec=codec) as copy:
                    assert np.array_equal(copy.gather(np.arange(ROWS), keep=False), moment)
        assert np.array_equal(tier.gather(np.arange(ROWS), keep=False), truth)
        assert tier.stats()["queued"] <= queued


def test_calls_go_on_while_rows_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    with open_tier(tmp_path) as tier:
        tier.scatter(np.arange(SLOTS), np.ones((SLOTS, WIDTH), np.float32))
        drain = writer.WriteQueue.drain

        def slow(queue: writer.WriteQueue) -> None:
            entered.set()
            assert go_on.wait(30)
            drain(queue)

        monkeypatch.setattr(writer.WriteQueue, "drain", slow)
        future = tier.start_checkpoint()
        assert entered.wait(30)
        # Nothing of the image was written yet: a row that changes now is copied first.
        for number in range(2, 5):
            tier.scatter(np.arange(SLOTS), np.full((SLOTS, WIDTH), number, np.float32))
        assert (tier.gather([0, 1]) == 4).all()
        assert not future.done()
        go_on.set()
        assert future.result(30) == 1
        shutil.copytree(tmp_path / "table", tmp_path / "copy" / "table")
        with open_tier(tmp_path / "copy") as copy:
            assert (copy.gather(np.arange(SLOTS)) == 1).all()


def test_an_image_that_others_prevent_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tier(tmp_path) as tier:
        tier.scatter(np.arange(SLOTS), np.ones((SLOTS, WIDTH), np.float32))
        with monkeypatch.context() as patch:

            def refused(*_: Any) -> None:
                raise LockedError("another object is changing the store")

            patch.setattr(RowLog, "append", refused)
            with pytest.raises(LockedError):
                tier.start_checkpoint().result(30)
        tier.scatter([1], np.full((1, WIDTH), 2, np.float32))
        assert tier.start_checkpoint().result(30) == 1
    with open_tier(tmp_path) as tier:
        assert tier.gather(np.arange(3))[:, 0].tolist() == [1, 2, 1]
