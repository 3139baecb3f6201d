"""A budget is divided by configuration alone: the length of a table's log changes neither slots nor batch."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.cache.slab_memory import SlabLayout
from memhier.errors import BudgetError
from memhier.io.reader import Reader
from memhier.log.index import LogIndex
from memhier.log.parts import ENTRY, lay_out, page_after
from memhier.log.row_log import RowLog
from memhier.log.tail import BLOCK_BYTES, LogTail
from memhier.rows.rows import rows_per_page
from memhier.store.store import Store
from memhier.table.sizes import WRITE_BUFFERS_BYTES, Sizes, TierNeeds, divide, log_bytes, policy_bytes
from memhier.table.tiered import Tiered

ROWS = 200


def open_tier(place: Path, dim: int, dram: int, rows: int = ROWS, **options: Any) -> Tiered:
    return Tiered(place, "t", np.float32, dim, rows=rows, dram=dram, **options)


def smallest(place: Path, dim: int, rows: int = ROWS) -> int:
    with pytest.raises(BudgetError) as caught:
        open_tier(place, dim, 1, rows)
    found = re.search(r"dram=(\d+) would be enough", str(caught.value))
    assert found is not None
    return int(found[1])


def rewrite(tier: Tiered, dim: int, rng: np.random.Generator) -> None:
    """Write each row once, in another order each time, a few at a time."""
    step = min(tier.capacity, tier.batch, 20)
    for keys in np.array_split(rng.permutation(ROWS), -(-ROWS // step)):
        tier.scatter(keys, np.repeat(keys[:, None], dim, axis=1).astype(np.float32))


@pytest.mark.parametrize("dim", [1, 600, 1024, 1025])
@pytest.mark.parametrize("spare", [0, 30_000])
def test_a_budget_means_the_same_however_long_the_log_has_become(tmp_path: Path, dim: int, spare: int) -> None:
    """Rows of less than a page, of most of one, of just one, and of more."""
    dram = smallest(tmp_path / "s", dim) + spare
    rng = np.random.default_rng(0)
    with open_tier(tmp_path / "s", dim, dram) as tier:
        capacity, batch = tier.capacity, tier.batch
        for checkpoint in range(6):
            rewrite(tier, dim, rng)
            assert tier.memory_bytes <= dram
            if checkpoint % 2:
                tier.scatter([0], np.zeros((1, dim), np.float32))
            tier.checkpoint()
            assert tier.memory_bytes <= dram
    with open_tier(tmp_path / "s", dim, dram) as tier:
        assert (tier.capacity, tier.batch) == (capacity, batch)
        assert tier.memory_bytes <= dram
        assert tier.gather([ROWS - 1])[0, 0] == ROWS - 1


@pytest.mark.parametrize("dim", [1, 1000, 2**18])
@pytest.mark.parametrize("rows", [1, 200, 50_000, 400_000])
def test_a_budget_that_would_be_enough_is_enough_and_so_is_more(tmp_path: Path, dim: int, rows: int) -> None:
    """Whether the index is most of the budget or hardly any of it."""
    enough = smallest(tmp_path / "s", dim, rows)
    for more in (0, 1, 4 * dim, 16 * rows - 1, 16 * rows, 52 * rows, 2 * enough):
        with open_tier(tmp_path / str(more), dim, enough + more, rows=rows) as tier:
            assert tier.memory_bytes <= enough + more
            assert tier.capacity >= 1


def test_many_parts_take_nothing_from_the_rows(tmp_path: Path) -> None:
    dram = smallest(tmp_path / "s", 4) + 2000
    with open_tier(tmp_path / "s", 4, dram) as tier:
        capacity = tier.capacity
        for size in range(1, 26):  # of different sizes, so that they are not merged
            for key in range(size * size % ROWS):
                tier.scatter([key], np.zeros((1, 4), np.float32))
            tier.checkpoint()
    with open_tier(tmp_path / "s", 4, dram) as tier:
        assert tier.capacity == capacity


def test_a_budget_that_is_too_small_leaves_no_store_behind(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        open_tier(tmp_path / "s", 4, 1000)
    with pytest.raises(BudgetError):  # an index of 77 GB is not even tried
        Tiered(tmp_path / "s", "t", np.float32, 4, rows=2**31 - 1, dram="64MiB")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("row_bytes", [1, 16, 700, 3000, 4096, 5000, 65536, 70_000])
def test_the_memory_of_a_log_is_known_before_it_is_opened(tmp_path: Path, row_bytes: int) -> None:
    rows, rng = 97, np.random.default_rng(0)
    with (
        Store.create(tmp_path / "s", "test") as store,
        Reader() as reader,
        RowLog(store, "t", row_bytes=row_bytes, reader=reader, capacity=rows) as log,
    ):
        planned = log_bytes(rows, row_bytes)
        for _ in range(6):
            for keys in np.array_split(rng.permutation(rows), 10):
                log.append(keys, np.zeros((len(keys), row_bytes), np.uint8))
            held = log.memory_bytes + sum(info.memory_bytes for info in store.segments().values())
            # Records that wait to be written take at most their planned room.
            assert planned - WRITE_BUFFERS_BYTES - 2**17 < held <= planned
            log.compact()
            log.commit()


@pytest.mark.parametrize("rows", [1, 1000, 100_000])
@pytest.mark.parametrize("row_bytes", [1, 700, 3000, 4096, 5000, 70_000])
def test_checksums_of_every_page_are_planned(rows: int, row_bytes: int) -> None:
    end = lay_out(0, np.full(rows, row_bytes), rows_per_page(row_bytes))[1]
    pages = page_after(end) // 4096 + -(-rows * ENTRY.itemsize // 4096)
    buffers = LogTail.bytes_for(BLOCK_BYTES, row_bytes) + WRITE_BUFFERS_BYTES
    rest = log_bytes(rows, row_bytes) - LogIndex.bytes_for(rows) - 16 * pages
    assert 0 <= rest - (buffers + 2**16) < 2**14


def test_values_of_a_checkpoint_are_counted(tmp_path: Path) -> None:
    with Tiered(tmp_path / "s", "t", np.float32, 4, rows=10, dram="16MiB") as tier:
        tier.checkpoint()
        before = tier.memory_bytes
        tier.checkpoint({"step": bytes(10_000)})
        assert tier.memory_bytes - before >= 10_000


def test_a_share_of_the_budget_may_be_left_to_the_caller(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rows": 1000, "key_space": 1000}
    with Tiered(tmp_path / "a", "t", np.float32, 2**12, dram="16MiB", **options) as whole:
        capacity = whole.capacity
    with Tiered(tmp_path / "b", "t", np.float32, 2**12, dram="16MiB", aside=0.25, **options) as most:
        assert 0 < most.capacity < capacity
        assert most.memory_bytes <= 12 * 2**20
    with pytest.raises(BudgetError) as caught:
        Tiered(tmp_path / "c", "t", np.float32, 2**12, dram="1MiB", aside=0.25, **options)
    found = re.search(r"dram=(\d+) would be enough", str(caught.value))
    assert found is not None
    Tiered(tmp_path / "c", "t", np.float32, 2**12, dram=int(found[1]), aside=0.25, **options).close()
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="aside"):
            Tiered(tmp_path / "d", "t", np.float32, dram="16MiB", aside=wrong, **options)


@pytest.mark.parametrize("fixed", [12_014, 24_028, 36_042])
@pytest.mark.parametrize("rows", [10, 3000])
def test_all_rows_have_slots_in_every_budget_above_one_that_is_enough(rows: int, fixed: int) -> None:
    layout = SlabLayout.checked(1, np.float32, 17)
    needs = TierNeeds(layout, 68, True, rows, min(rows, 100), policy_bytes("belady"), fixed, 1 / 8)
    with_log = replace(needs, fixed_bytes=fixed + log_bytes(rows, 68, rows))
    least = Sizes(with_log, 0).enough(rows)
    for dram in range(least, least + 2000, 3):  # buffers grow by a row within these
        sizes, _ = divide(needs, dram, rows, "belady")
        assert sizes.solve("belady") == rows
