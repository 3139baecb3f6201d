"""The bytes that a storage tier may take on SSD, and how its logs keep within them.

The samples of the last checkpoint stay until the next one is durable, since a crash goes back to them. So there is room
for every sample twice: as of the last checkpoint, and as it is now. All other bytes are dead, and logs use their space
again without a checkpoint: they write small parts, and can rewrite a part of the open transaction at any time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memhier.io.page_file import PAGE_BYTES
from memhier.log.row_log import RowLog
from memhier.log.samples import Samples
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.storage.index import INDEX_ROW_BYTES, POSITIONS, SLOTS, IndexTable
from memhier.recsys.replay.storage.records import SampleCodec
from memhier.rows.rows import rows_per_page
from memhier.store.store import Store

__all__ = ["ENTRY_BYTES", "Copies", "Growth", "Room", "reclaim", "samples_within", "storage_bytes"]

ENTRY_BYTES = 12
"""Of a record in the list of its part."""
# The least share of live bytes after a checkpoint; and of those written since, if room is short.
_KEPT_ALIVE, _FRESH_ALIVE = 0.8, 0.9
_PART_BYTES = 2**16  # at least
_PARTS = 64  # that room is divided into
_GROWING_BYTES = 2**20  # of a part of a log without a budget, at least
_GROWING_PARTS = 32  # of such a log in parts of equal size: few, since each is an open file
_CATALOG_BYTES = 2**17  # of a small store; a larger one has some more, for checksums
_LARGE_BYTES = 2**16  # records of as many bytes begin and end on a page


class Copies(NamedTuple):
    """The copies of samples that storage may have beside those of the last checkpoint, and how large they are.

    Attributes
    ----------
    replaces
        Whether samples replace others; else each is written once.
    way_back
        Whether the checkpoint before the last one is kept.
    packed
        Whether samples count by their mean lengths; else each counts as the longest.
    """

    replaces: bool
    way_back: bool
    packed: bool = False


def part_bytes(budget: int) -> int:
    """Return how much a part of a log holds."""
    return max(_PART_BYTES, budget // _PARTS)


class Room:
    """Keeps the logs of a store within a number of bytes.

    Parameters
    ----------
    store, logs
        They change in one transaction.
    budget
        From `storage_bytes`: the logs can always keep within it.
    """

    def __init__(self, store: Store, logs: Sequence[RowLog | Samples], budget: int) -> None:
        self._store = store
        self._logs = logs
        self._limit = budget - _catalog_bytes(budget) - part_bytes(budget)
        self.piece_bytes: int = part_bytes(budget)
        self._generation = -1
        self._committed = 0
        for log in logs:
            log.part_bytes = self.piece_bytes

    @property
    def taken(self) -> int:
        """Bytes of all segments, including those that the next commit removes."""
        if self._generation != self._store.generation:
            self._committed = sum(info.length for info in self._store.segments().values())
            self._generation = self._store.generation
        return self._committed + sum(log.fresh_bytes for log in self._logs)

    def make(self, size: int) -> None:
        """Free space for `size` more bytes, as far as there is any."""
        while self.taken + size > self._limit and any(log.reclaim() for log in self._by_size()):
            continue

    def settle(self) -> None:
        """Rewrite the parts that the next commit would leave sparse, as there is room for each."""
        for log in self._logs:
            self.make(2 * self.piece_bytes)
            while log.bytes_above(_KEPT_ALIVE) > 0:
                self.make(self.piece_bytes)
                if not (log.reclaim() or log.rewrite_sparsest()):
                    break

    def _by_size(self) -> list[RowLog | Samples]:
        return sorted(self._logs, key=lambda log: -log.fresh_bytes)


class Growth:
    """Lets the parts of a log without a budget grow with it: to be rid of a sample, its whole part is rewritten.

    Parameters
    ----------
    log
        Of samples, or of the index.
    """

    def __init__(self, log: RowLog | Samples) -> None:
        self._log = log
        self._until = 0  # bytes to be written before parts may be larger
        self.note(0)

    def note(self, size: int) -> None:
        """Count bytes that were written."""
        self._until -= size
        if self._until <= 0:
            self._until = self._log.part_bytes = max(_GROWING_BYTES, self._log.disk_bytes // _GROWING_PARTS)


def reclaim(log: RowLog) -> None:
    """Rewrite the parts of a log in the open transaction until their dead bytes are few beside the live ones.

    For logs without a budget whose rows change again and again between rare checkpoints.
    """
    alive = log.live_bytes
    log.part_bytes = part_bytes(alive)
    while log.fresh_bytes > 2 * alive + 4 * log.part_bytes and log.reclaim():
        continue


def storage_bytes(limit: int, schema: Schema, codecs: Mapping[str, str], slots: int, copies: Copies) -> int:
    """Return the bytes on SSD that `limit` samples take at most, beside a memory of `slots`."""
    twice = (2 if copies.way_back else 1) / _KEPT_ALIVE + 1 / _FRESH_ALIVE
    fixed, side, longest = _sample_bytes(schema, codecs, copies.packed)
    once = twice if copies.replaces else 1 / _KEPT_ALIVE
    # The index has an entry for each slot in use: no more than slots, and no more than samples.
    index = limit * _entry_bytes(POSITIONS) + min(slots, limit) * _entry_bytes(SLOTS)
    held = limit * (fixed * once + side * twice) + (index + 2 * INDEX_ROW_BYTES) * twice
    if copies.packed:
        held += 2 * longest * twice  # until samples have gone for those that turn out longer
    total = int(held)
    for _ in range(20):  # the parts set aside depend on the total
        part = part_bytes(total)
        padded = held * (1 + 2 * PAGE_BYTES / part)
        total = int(padded) + _catalog_bytes(total) + 3 * part
    return total


def samples_within(budget: int, schema: Schema, codecs: Mapping[str, str], slots: int, copies: Copies) -> int:
    """Return how many samples fit into `budget` bytes; 0 if none does."""
    low, high = 0, budget + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = storage_bytes(middle, schema, codecs, slots, copies) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return low


def _sample_bytes(schema: Schema, codecs: Mapping[str, str], packed: bool) -> tuple[float, float, float]:
    """Return the bytes of a sample in the log of fixed fields, in the log of mutable ones, and at most."""
    fixed = SampleCodec(schema, [name for name in schema.fields if name not in schema.mutable], codecs)
    side = SampleCodec(schema, schema.mutable, codecs)
    sizes = [0.0, 0.0, 0.0]
    whole = fixed.longest >= _LARGE_BYTES
    for index, (format, longest) in enumerate(((fixed, fixed.mean if packed else fixed.longest), (side, 0),
                                               (fixed, fixed.longest))):  # fmt: skip
        size = longest if format.row_bytes is None else max(1, format.row_bytes)
        per_page = None if format.row_bytes is None else rows_per_page(size)
        # Pages are not full, since rows do not straddle them; large records begin and end on a page.
        large = min(size / _LARGE_BYTES, 1) * whole
        padded = PAGE_BYTES / per_page if per_page else size + 2 * PAGE_BYTES * large
        sizes[index] = padded + ENTRY_BYTES
    return sizes[0], sizes[1] if schema.mutable else 0.0, sizes[2]


def _entry_bytes(table: IndexTable) -> float:
    return (INDEX_ROW_BYTES + ENTRY_BYTES) / table.per_row


def _catalog_bytes(budget: int) -> int:
    return _CATALOG_BYTES + budget // 256
