"""Rows on pages that are read for others: kept for the announced batches that need them, and never out of date."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier import backend
from memhier.policies import LRU, Belady, Policy
from memhier.table.tiered import Tiered

PER_PAGE = 16
WIDTH = 64


def numbered(keys: Any, add: float = 0, width: int = WIDTH) -> NDArray[np.float32]:
    return np.repeat(np.asarray(keys)[..., None] + add, width, axis=-1).astype(np.float32)


def stored(path: Path, policy: Policy, rows: int = 320, width: int = WIDTH) -> Tiered:
    """Return a tier of written rows, in the order of their keys on SSD and none in DRAM, opened anew."""
    with Tiered(path, "t", np.float32, width, rows=rows, policy=LRU(16)) as tier:
        for start in range(0, rows, 16):
            keys = np.arange(start, start + 16)
            tier.scatter(keys, numbered(keys, width=width))
        tier.checkpoint()
    return Tiered(path, "t", np.float32, width, rows=rows, policy=policy)


def test_a_page_is_read_once_for_all_batches_that_are_known(tmp_path: Path) -> None:
    policy = Belady(64)
    batches = [np.arange(first, 320, 40) for first in range(10)]  # rows of the same pages, each in one batch
    with stored(tmp_path / "s", policy) as tier:
        for batch in batches:
            policy.announce(batch)
        for batch in batches:
            with tier.prefetch(batch) as ticket:
                ticket.wait()
                assert (tier.gather(batch) == numbered(batch)).all()
        stats = tier.stats()
        assert stats["misses"] == stats["refetches"] == sum(map(len, batches))
        assert stats["read_bytes"] <= 4096 * 320 // PER_PAGE


@pytest.mark.parametrize("width", [1024, 700, 48])
def test_rows_of_other_widths_are_read_as_well(tmp_path: Path, width: int) -> None:
    policy = Belady(48)
    rng = np.random.default_rng(width)
    batches = [rng.choice(64, 8, replace=False) for _ in range(6)]
    with stored(tmp_path / "s", policy, rows=64, width=width) as tier:
        for batch in batches:
            policy.announce(batch)
        for batch in batches:
            with tier.prefetch(batch):
                assert (tier.gather(batch) == numbered(batch, width=width)).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_kept_row_that_changes_elsewhere_is_read_anew(tmp_path: Path, seed: int) -> None:
    """Plans are withdrawn, rows change without being read, parts are rewritten: values are those of a dict."""
    rng = np.random.default_rng(seed)
    policy = Belady(40)
    values = {key: float(key) for key in range(320)}

    def some() -> NDArray[np.int64]:
        return np.unique(rng.integers(0, 320, 12))

    with stored(tmp_path / "s", policy) as tier:
        for turn in range(40):
            batches = [some() for _ in range(5)]
            for batch in batches:
                policy.announce(batch)
            for batch in batches[: rng.integers(1, 6)]:
                with tier.prefetch(batch):
                    assert tier.gather(batch)[:, 0].tolist() == [values[key] for key in batch]
            policy.withdraw()
            changed = some()
            tier.scatter(changed, numbered(changed, 1000 * turn))
            values |= {int(key): float(key + 1000 * turn) for key in changed}
            tier.gather(np.sort(rng.choice(320, 36, replace=False)))  # sends them out
            if turn % 5 == 4:
                tier.checkpoint()
        assert tier.gather(np.arange(40))[:, 0].tolist() == [values[key] for key in range(40)]


def test_rows_in_the_write_queue_come_before_those_that_were_kept(tmp_path: Path) -> None:
    policy = Belady(16)
    with stored(tmp_path / "s", policy) as tier:
        policy.announce([0])
        policy.announce([1])
        with tier.prefetch([0]) as ticket:
            ticket.wait()  # row 1 lies on the same page
            tier.gather([0])
        policy.withdraw()
        tier.scatter([1], numbered([1], 5))
        tier.gather(np.arange(100, 116))  # row 1 leaves, and waits to be written
        policy.announce([1])
        with tier.prefetch([1]):
            assert tier.gather([1])[0, 0] == 6
        tier.checkpoint()
        tier.gather(np.arange(100, 116))
        policy.announce([1])
        with tier.prefetch([1]):
            assert tier.gather([1])[0, 0] == 6


@pytest.mark.skipif(backend.core is None, reason="the compiled core's own")
@pytest.mark.parametrize("few", [0, 1, 2, 7, 500])
def test_the_core_finds_pages_as_numpy_does(few: int) -> None:
    assert backend.core is not None
    rng = np.random.default_rng(few)
    for most in (3, 100, 2**51):
        others = rng.integers(0, most, few)
        pages = np.concatenate([rng.integers(0, most, 1000), others, [-1, 0, 2**51]])  # -1 is the page of no row
        found = np.empty(len(pages), np.bool_)
        backend.core.are_among(pages=pages, others=np.append(others, -1), found=found)
        assert np.array_equal(found, np.isin(pages, others))
