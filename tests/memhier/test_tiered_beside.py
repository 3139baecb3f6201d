"""Tiers beside each other: rows of several widths with one checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import ClosedError, Store, Tiered
from memhier.table.loans import changing
from memhier.table.tiered import KIND

WIDTHS = (3, 700)
ROWS = 3000


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[list[Tiered]]:
    with Store.open(path, KIND, writable=True) if path.exists() else Store.create(path, KIND) as store:
        tiers: list[Tiered] = []
        for number, width in enumerate(WIDTHS):
            beside = tiers[0] if tiers else None
            tiers.append(Tiered(store, f"w{number}", np.float32, width, rows=ROWS, beside=beside, **options))
        try:
            yield tiers
        finally:
            tiers[-1].close()


def rows_of(keys: Any, width: int, version: int) -> Any:
    return (np.asarray(keys)[:, None] + np.zeros(width, np.float32) + ROWS * version).astype(np.float32)


@pytest.mark.parametrize("of", [0, 1])
def test_a_checkpoint_of_either_is_one_of_both(tmp_path: Path, of: int) -> None:
    keys = np.arange(0, ROWS, 3)
    with opened(tmp_path / "a", dram="16MiB") as tiers:
        for tier, width in zip(tiers, WIDTHS, strict=True):
            tier.scatter(keys, rows_of(keys, width, 1))
        first = tiers[of].checkpoint({"mine": b"1"})
        for tier, width in zip(tiers, WIDTHS, strict=True):
            tier.scatter(keys[:50], rows_of(keys[:50], width, 2))
        assert tiers[1 - of].gather(keys[:50])[0, 0] == 2 * ROWS
    with opened(tmp_path / "a", dram="16MiB", batch=ROWS) as tiers:
        for tier, width in zip(tiers, WIDTHS, strict=True):
            assert np.array_equal(tier.gather(keys, keep=False), rows_of(keys, width, 1))
        assert tiers[of].checkpoint() == first + 1


def test_an_image_has_the_rows_of_both_at_one_moment(tmp_path: Path) -> None:
    """While it is written, rows change and leave both tiers, whose queues are small."""
    keys = np.arange(ROWS)
    with opened(tmp_path / "a", dram="16MiB", batch=ROWS) as tiers:

        def write(version: int) -> None:
            for part in np.array_split(keys, 10):
                for tier, width in zip(tiers, WIDTHS, strict=True):
                    tier.scatter(part, rows_of(part, width, version))

        write(1)
        saving = tiers[0].start_checkpoint()
        write(2)
        saving.result()
        write(3)
        for tier, width in zip(tiers, WIDTHS, strict=True):
            assert np.array_equal(tier.gather(keys, keep=False), rows_of(keys, width, 3))
    with opened(tmp_path / "a", dram="16MiB", batch=ROWS) as tiers:
        for tier, width in zip(tiers, WIDTHS, strict=True):
            assert np.array_equal(tier.gather(keys, keep=False), rows_of(keys, width, 1))


def test_loans_of_both_change_in_one_call(tmp_path: Path) -> None:
    with opened(tmp_path / "a", dram="16MiB") as tiers:
        loans = [tier.lend(np.array([4, 9])) for tier in tiers]
        with changing(loans) as slabs:
            for slab, loan in zip(slabs, loans, strict=True):
                slab[loan.slots] = 5
        assert [float(tier.gather([9])[0, 0]) for tier in tiers] == [5, 5]
        loans[1].release()
        with pytest.raises(ValueError, match="the loan was released"):
            changing(loans)


def test_closing_one_closes_both(tmp_path: Path) -> None:
    with opened(tmp_path / "a", dram="16MiB") as tiers:
        tiers[0].close()
        assert tiers[1].closed
        with pytest.raises(ClosedError):
            tiers[1].gather([1])
