"""How a DRAM budget is divided among the parts of a tier."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memhier.arguments import check_int
from memhier.budget import format_bytes
from memhier.cache.slab import Slab
from memhier.cache.slab_memory import SlabLayout
from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError
from memhier.log.index import LogIndex
from memhier.log.parts import ENTRY, LARGE_BYTES, page_after
from memhier.log.tail import BLOCK_BYTES, LogTail
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy
from memhier.policies._base import CAPACITY_MAX
from memhier.rows.rows import rows_per_page
from memhier.store.segments import PAGE_BYTES
from memhier.table.cache import Pins
from memhier.table.keep_all import KeepAll
from memhier.table.writer import WriteQueue, batch_rows

__all__ = [
    "TRAINING_ASIDE", "WRITE_BUFFERS_BYTES", "Sizes", "TierNeeds", "batch_within", "check_policy", "divide",
    "log_bytes", "make_policy", "policy_bytes", "rows_within",
]  # fmt: skip

# Training leaves this share of its budget: half for batches known ahead, half for a step's working memory.
TRAINING_ASIDE = 1 / 8

_POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "belady": Belady}

# The write queue and the staging buffer get this share of the budget each, as far as more of it helps.
_SHARE = 16
_BUFFER_MAX = 16 * 2**20
# Longer batches gain nothing, and their working memory is taken from the rows.
_BATCH_MAX = 2**20
# Bytes that a call allocates for a while: per key, and per slot (masks of pinned slots).
_CALL_KEY_BYTES = 80
_CALL_SLOT_BYTES = 3
# The slot map's working memory per key of a batch.
_MAP_KEY_BYTES = 40
# Above this, a map by hashing takes less than one with a place for every possible key.
_DIRECT_KEYS_PER_SLOT = 4
# Bytes that a read allocates for a while per staged row, besides the row: key, place, order, offset, file (36). Half of
# the rows are page mates, with their map and two arrays (24), keys ahead with their pages (8), and hashes of pages (8).
_STAGED_ROW_BYTES = 80
# Bytes per queued row, besides the row: its place in the map; and, while rows are appended, its key and its place.
_QUEUED_ROW_BYTES = 64
_APPEND_ROW_BYTES = 24
# State, dirty, image and stored flags of a slot; key and slot of a row on its way to the reading thread.
_SLOT_BYTES = 4 + 16
# The records and entries of an open transaction that wait to be written.
WRITE_BUFFERS_BYTES = 2 * (2**20 + 2**11)
# Checksums, 4 bytes a page: of a log twice as large as its rows, and as much again while arrays of them grow.
_CHECKSUM_BYTES = 16
# Parts of a log and the reader's files are numbered in tables, which grow with the log and are small.
_TABLES_BYTES = 2**16


@dataclass(frozen=True)
class TierNeeds:
    """The inputs that decide how much DRAM a row takes.

    Attributes
    ----------
    layout
        Of a row in DRAM.
    encoded_bytes, lossless
        Bytes of a row on SSD, and whether they are the bytes of the row in DRAM.
    key_space, batch
        As in :class:`memhier.cache.slots.SlotMap`; None lets the budget decide the batch.
    policy_bytes
        The policy's bytes for each row that is resident or comes with the next call, at most.
    fixed_bytes
        Bytes that do not depend on the capacity: of reader and side log, and of the log once :func:`divide` adds it.
    aside
        Share of the budget that is left to the caller.
    """

    layout: SlabLayout
    encoded_bytes: int
    lossless: bool
    key_space: int | None
    batch: int | None
    policy_bytes: float
    fixed_bytes: int
    aside: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.aside < 1:
            raise ValueError(f"aside={self.aside!r}: expected a share of the budget, 0 or more and below 1")
        if self.batch is not None:
            check_int("batch", self.batch, 1, unit="keys, or None")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in DRAM."""
        return self.layout.row_type.itemsize


class Sizes:
    """A budget of `dram` bytes, divided.

    Attributes
    ----------
    batch
        Most keys in a call.
    staged, queued, outgoing
        Most rows in the staging buffer, in the write queue, and handed to the write queue at a time.
    """

    def __init__(self, needs: TierNeeds, dram: int) -> None:
        self.needs = needs
        self._dram = dram
        share = max(0, dram - needs.fixed_bytes) // _SHARE
        buffer = min(share, _BUFFER_MAX)
        self._staged_bytes = needs.encoded_bytes + (0 if needs.lossless else needs.row_bytes) + _STAGED_ROW_BYTES
        self.staged: int = max(1, buffer // self._staged_bytes)
        self.queued: int = max(1, buffer // (needs.encoded_bytes + _QUEUED_ROW_BYTES))
        self.outgoing: int = batch_rows(self.queued)
        self.batch: int = batch_within(dram - needs.fixed_bytes) if needs.batch is None else int(needs.batch)

    def _map_key_space(self, capacity: int) -> int | None:
        """Return the key space for the map of so many slots; None if a map by hashing takes less."""
        space = self.needs.key_space
        return space if space is not None and space <= _DIRECT_KEYS_PER_SLOT * capacity else None

    def map_of(self, capacity: int) -> SlotMap:
        """Return the map of so many slots."""
        return SlotMap(capacity, key_space=self._map_key_space(capacity), batch=self.batch)

    def total(self, capacity: int) -> int:
        """Return the bytes of DRAM that a tier with so many slots needs at most."""
        needs, layout = self.needs, self.needs.layout
        outgoing_bytes = needs.row_bytes + (0 if needs.lossless else needs.encoded_bytes)
        return (
            Slab.bytes_for(capacity, layout.dtype, layout.shape, versioned=False)
            + SlotMap.bytes_for(capacity, key_space=self._map_key_space(capacity), batch=self.batch)
            + Pins.bytes_for(capacity)
            + int(needs.policy_bytes * (capacity + min(self.batch, capacity)))
            + (_SLOT_BYTES + _CALL_SLOT_BYTES) * capacity
            + self.batch * _CALL_KEY_BYTES
            + self.staged * self._staged_bytes
            + WriteQueue.bytes_for(self.queued, needs.encoded_bytes)
            + self.queued * _APPEND_ROW_BYTES
            + self.outgoing * outgoing_bytes
            + needs.fixed_bytes
            + int(self._dram * needs.aside)
        )

    def enough(self, capacity: int) -> int:
        """Return a budget that has so many slots, with the buffers, which grow with the budget."""
        dram = self.total(capacity)
        while (needed := Sizes(self.needs, dram).total(capacity)) > dram:
            dram = needed
        return dram

    def fits(self, policy: str | Policy) -> bool:
        """Whether the budget has room for the given policy's capacity, or for one slot."""
        return self.total(_least(policy)) <= self._dram

    def solve(self, policy: str | Policy) -> int:
        """Return the number of slots: the most that fit the budget, or the given policy's capacity.

        Raises
        ------
        BudgetError
            When the policy's capacity does not fit, or not even one slot.
        """
        low = _least(policy)
        if not self.fits(policy):
            raise BudgetError(
                f"dram={format_bytes(self._dram)}: too little for {low} rows of {self.needs.row_bytes} bytes beside "
                f"{format_bytes(self.needs.fixed_bytes)} for the log's index and the buffers of log and reader; "
                f"dram={self.enough(low)} would be enough"
            )
        most = min(self._dram, CAPACITY_MAX, self.needs.key_space or CAPACITY_MAX)
        high = most + 1 if isinstance(policy, str) else low + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total(middle) <= self._dram else (low, middle)
        return low


def _least(policy: str | Policy) -> int:
    """Return the fewest slots that serve this policy."""
    return 1 if isinstance(policy, str) else policy.capacity


def divide(needs: TierNeeds, dram: int, rows: int, policy: str | Policy) -> tuple[Sizes, bool]:
    """Return the parts of a budget for `rows` rows, and whether the log's index takes its room at once.

    `needs` are those beside the log. An index does not grow where it is most of the budget, or where no more fits.
    """

    def with_log(at_once: bool) -> tuple[int, Sizes]:
        log = log_bytes(rows, needs.encoded_bytes, needs.key_space, at_once=at_once)
        return log, Sizes(replace(needs, fixed_bytes=needs.fixed_bytes + log), dram)

    log, sizes = with_log(at_once=False)
    at_once = 2 * log > dram or not sizes.fits(policy)
    if at_once:
        sizes = with_log(at_once=True)[1]
    return _for_all_rows(sizes, dram), at_once


def _for_all_rows(sizes: Sizes, dram: int) -> Sizes:
    """Return parts with a slot for every possible row, where some smaller budget has these: buffers grow in steps."""
    rows = sizes.needs.key_space
    if rows is None or rows > CAPACITY_MAX or sizes.total(rows) <= dram:
        return sizes
    least = Sizes(sizes.needs, 0).enough(rows)
    return sizes if least > dram else Sizes(sizes.needs, least)


def batch_within(dram: int) -> int:
    """Return the most keys in a call where the budget, less its fixed part, decides."""
    return max(1, min(max(0, dram) // _SHARE // (_CALL_KEY_BYTES + _MAP_KEY_BYTES), _BATCH_MAX))


def log_bytes(rows: int, row_bytes: int, key_space: int | None = None, *, at_once: bool = False) -> int:
    """Return the DRAM set aside for a log. It does not depend on its rows: a reopened table must have the same slots.

    An index that takes its room `at_once` needs less than one that grows.
    It is enough to write each row once between two checkpoints; more writes take 4 to 12 bytes a page until the second.
    """
    packed = rows_per_page(row_bytes)
    if packed is not None:
        pages = -(-rows // packed)
    elif row_bytes >= LARGE_BYTES:
        pages = rows * page_after(row_bytes) // PAGE_BYTES
    else:
        pages = page_after(rows * row_bytes) // PAGE_BYTES
    pages += page_after(rows * ENTRY.itemsize) // PAGE_BYTES
    index = LogIndex.bytes_for(rows, key_space, at_once)
    tail = LogTail.bytes_for(BLOCK_BYTES, row_bytes)
    return index + tail + WRITE_BUFFERS_BYTES + pages * _CHECKSUM_BYTES + _TABLES_BYTES


def rows_within(dram: int, row_bytes: int, key_space: int) -> int:
    """Return the most rows whose index, with the checksums of their pages, takes no more DRAM; 1 at least."""
    low, high, least = 1, min(key_space, CAPACITY_MAX) + 1, log_bytes(1, row_bytes, 1)
    while high - low > 1:
        middle = (low + high) // 2
        fits = log_bytes(middle, row_bytes, key_space) - least <= dram
        low, high = (middle, high) if fits else (low, middle)
    return low


def make_policy(policy: str | Policy, capacity: int, key_space: int | None) -> Policy:
    """Return the policy of that name, or the one that was given."""
    if policy == "belady" and key_space is not None and key_space <= capacity:
        return KeepAll(capacity)
    return _POLICIES[policy](capacity) if isinstance(policy, str) else policy


def check_policy(policy: str | Policy) -> None:
    """Raise unless this is the name of a policy, or a policy without resident rows."""
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ValueError(f"policy={policy!r}: expected one of {', '.join(map(repr, _POLICIES))}, or a policy")
    elif not hasattr(policy, "access"):
        raise TypeError(f"policy={policy!r}: expected a policy's name, or a policy")
    elif len(policy):
        raise ValueError(f"policy: expected one without resident rows, this one has {len(policy)}")


def policy_bytes(policy: str | Policy) -> float:
    """Return a policy's bytes for each key that is resident or comes with a call: it tries a policy out."""
    names = [name for name, make in _POLICIES.items() if policy == name or type(policy) is make]
    if not names and not isinstance(policy, str):
        return policy.memory_bytes / policy.capacity
    return _trial_bytes(names[0])


@functools.cache
def _trial_bytes(name: str) -> float:
    make, worst = _POLICIES[name], 0.0
    # Without the compiled core policies use Python's tables, which are emptiest just after they have grown.
    for rows in (1400, 2048, 2800):
        trial = make(rows)
        trial.access(np.arange(rows))
        for coming in (rows // 32, rows // 4, rows):
            trial.access(np.arange(rows, rows + coming))
            trial.access(np.arange(rows))
            worst = max(worst, trial.memory_bytes / (rows + coming))
    return worst
