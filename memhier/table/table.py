"""The table of a tier: a cache of rows over a log. Calls reach it one at a time, through the gate."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_array, check_int, check_range
from memhier.cache.slab import Slab
from memhier.cache.slab_memory import SlabLayout
from memhier.cache.slots import CAPACITY_MAX
from memhier.codecs import get_codec
from memhier.io.reader import Reader
from memhier.log.compaction import rewriting_bytes
from memhier.log.row_log import RowLog
from memhier.policies import Policy
from memhier.shield import when_gone
from memhier.store.store import Store
from memhier.table.cache import Cache, Pins, PrefetchedSlots
from memhier.table.loader import Initial, Job, Loader
from memhier.table.schema import RowSchema
from memhier.table.shortage import Shortage
from memhier.table.side_log import SideLog
from memhier.table.sizes import WRITE_BUFFERS_BYTES, TierNeeds, check_policy, divide, make_policy, policy_bytes
from memhier.table.writer import WriteQueue, Writer

__all__ = ["KIND", "Ints", "Options", "Table", "needs_of", "store_bytes"]

Ints = NDArray[np.int64]

_NONE = np.empty(0, np.int64)
_EACH = slice(None)  # the place of each key among distinct ones

KIND = "tiered"
# A part of the log with a smaller share alive is rewritten: the log takes about twice its rows at most, and the rows
# written by the last transaction.
_COMPACT_BELOW = 0.5


@dataclass(frozen=True)
class Options:
    """The arguments of a tier, checked before it opens a file; see :class:`memhier.table.tiered.Tiered`."""

    store: Store | str | os.PathLike[str]
    name: str
    layout: SlabLayout
    rows: int
    dram: int
    policy: str | Policy
    initial: Initial | None
    codec: str
    key_space: int | None
    batch: int | None
    reader: Reader | None
    aside: float
    side: SideLog | None = None
    beside: "Table | None" = None

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_int("rows", self.rows, 1, CAPACITY_MAX, "keys")
        if isinstance(self.store, Store) and not self.store.writable:
            raise self.store.not_writable("the store is open for reading; pass writable=True")
        if self.key_space is not None:
            check_int("key_space", self.key_space, 1, 2**63 - 1, "possible keys")


class Table:
    """Cache, slab, loader, writer and log of one tier; and store and reader if they are its own.

    It serves one call at a time. It closes by `close`, or by itself once it is forgotten or the process ends: the
    threads know its parts, but not the whole.

    Parameters
    ----------
    options
        The arguments of the tier.
    closed
        Called when the table closes. It must not know the table.
    """

    def __init__(self, options: Options, closed: Callable[[], None]) -> None:
        layout, codec = options.layout, get_codec(options.codec)
        row_bytes = codec.encoded_bytes(layout.dtype, layout.row_type.itemsize // layout.dtype.itemsize)
        key_space = None if options.key_space is None else int(options.key_space)
        rows = int(options.rows)
        self._own_reader = self._own_store = None
        beside = options.beside
        with ExitStack() as opened:
            reader = options.reader if beside is None else beside.reader
            if reader is None:
                reader = self._own_reader = opened.enter_context(Reader())
            needs = needs_of(options, is_beside=beside is not None)
            sizes, at_once = divide(needs, options.dram, rows, options.policy)
            capacity = sizes.solve(options.policy)
            # Only now: a budget that is too small leaves no store behind.
            store = options.store
            if not isinstance(store, Store):
                store = self._own_store = opened.enter_context(_open_store(Path(store)))
            self.store: Store = store
            self._schema = RowSchema(store, options.name, layout, options.codec)
            self._schema.check()
            self.log: RowLog = RowLog(
                store, options.name, row_bytes=row_bytes, reader=reader, capacity=rows, key_space=key_space,
                compact_below=_COMPACT_BELOW, at_once=at_once, beside=None if beside is None else beside.log,
            )  # fmt: skip
            opened.callback(self.log.close)
            self.log.compact_later()
            self.log.patient = True
            self.side: RowLog | None = None
            if options.side is not None:
                self.side = opened.enter_context(self._beside(options.side, reader))
            self._slab = opened.enter_context(Slab(capacity, layout.dtype, layout.shape, versioned=False))
            self._queue = WriteQueue(self.log, sizes.queued, row_bytes)
            opened.callback(self._queue.close)
            self.cache: Cache = Cache(make_policy(options.policy, capacity, key_space), sizes.map_of, sizes.enough)
            self.loader: Loader = Loader(
                self._slab, self.log, self._queue, codec, options.initial, sizes.staged, self.cache.policy,
            )  # fmt: skip
            opened.callback(self.loader.close)
            self.pins: Pins = self.cache.pins
            self.writer: Writer = Writer(
                self._slab, self._queue, codec, sizes.outgoing, self.cache.keys_of,
                None if beside is None else beside.writer,
            )  # fmt: skip
            opened.callback(closed)
            self._end = when_gone(self, partial(_close, opened.pop_all().close, os.getpid()))
        self.batch: int
        self.reader: Reader
        self.batch, self._key_space, self.reader = sizes.batch, key_space, reader
        self._dtype, self._shape = layout.dtype, layout.shape

    @property
    def rows(self) -> NDArray[Any]:
        """All rows in place, read-only, by slot."""
        return self._slab.rows

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        parts = (self._slab, self.cache, self.writer, self._queue, self.loader, self.log)
        held = sum(part.memory_bytes for part in parts)
        if self._own_store is not None:
            held += store_bytes(self._own_store)
        if self.side is not None:
            held += self.side.memory_bytes
        return held + (0 if self._own_reader is None else self._own_reader.memory_bytes)

    def stats(self) -> dict[str, Any]:
        """Return the counts of all parts; see :meth:`memhier.table.tiered.Tiered.stats`."""
        cache, loader, reader = self.cache, self.loader, self.reader.stats()
        return {
            "capacity": cache.capacity,
            "resident": len(cache),
            "accesses": cache.accesses,
            "hits": cache.accesses - cache.misses,
            "misses": cache.misses,
            "evictions": cache.evictions,
            **loader.counts,
            "writes": self.writer.writes,
            "queued": len(self._queue),
            "reads": reader["reads"],
            "read_bytes": reader["bytes"],
            "read_s": loader.read_s,
            "stall_s": loader.stall_s + self._queue.stall_s,
        }

    def check(self) -> None:
        """Raise the errors of the threads: an append's for good, a prefetch's once."""
        if self._queue.failure is not None:
            self._queue.check()
        if self.loader.failed is not None:
            self.loader.check()

    def gather(self, keys: Any, out: NDArray[Any] | None, keep: bool) -> NDArray[Any]:
        """Copy rows out."""
        index, unique, inverse, slots = self._find(keys)
        if out is not None:
            check_array("out", out, self._dtype, index.shape + self._shape)
        if not keep:
            return np.take(self.loader.copies(unique, slots), inverse, axis=0, out=out)
        if self.cache.access(unique, slots, self.cache.not_ahead(index, inverse, slots)):
            self._exchange(slots)
        self.loader.ensure(unique, slots)
        rows = self._slab.gather(slots[inverse], out)
        self.pins.gathered(slots)
        self.cache.served()
        return rows

    def scatter(self, keys: Any, rows: Any) -> None:
        """Write rows."""
        index, unique, inverse, slots = self._find(keys)
        rows = self.writer.as_rows(rows, index)
        never_written = self.loader.check_never_written(unique, slots)
        if self.cache.access(unique, slots, unique[slots < 0]):
            self._exchange(slots)
        self.loader.settle(slots)
        self.writer.change(slots)
        self._slab.scatter(slots[inverse], rows)
        self.loader.wrote(slots, never_written)
        self.cache.served()

    def prefetch(self, keys: Any, distinct: bool) -> tuple[PrefetchedSlots, Job]:
        """Begin to make rows resident, and hold their slots; return these, and the job that reads the rows."""
        index, unique, _, slots = self._find(keys, distinct)
        self.pins.check_room(len(unique))
        if self.cache.access(unique, slots, index.reshape(-1)):
            self._exchange(slots)
        job = self.loader.prepare(unique, slots)
        self.loader.submit(job, slots)
        ahead = PrefetchedSlots(index, unique, slots)
        self.pins.hold(ahead)
        self.cache.served()
        return ahead, job

    def lend(self, keys: Any, again: bool, distinct: bool, ahead: PrefetchedSlots | None) -> tuple[Ints, Ints, Ints]:
        """Make rows resident and pin them; return the distinct keys, their slots, and the slot of each key."""
        if ahead is not None:
            index = self._as_keys(keys)
            if self.cache.is_for(ahead, index):
                slots = ahead.slots.astype(np.int64)
                self.loader.ensure(index, slots)
                self.pins.lend(slots)
                self.pins.release(ahead)
                return index, slots, slots
        index, unique, inverse, slots = self._find(keys, distinct)
        if again:
            self.cache.check_pinned(unique, slots)
            self.pins.lend(slots)
        else:
            if self.cache.access(unique, slots, self.cache.not_ahead(index, inverse, slots)):
                self._exchange(slots)
            self.loader.ensure(unique, slots)
            self.pins.lend(slots)
            self.pins.gathered(slots)
        self.cache.served()
        return unique, slots, slots[inverse]

    def pin(self, keys: Any) -> Ints:
        """Make rows resident and pin them; return the distinct keys."""
        _, unique, _, slots = self._find(keys)
        if self.cache.access(unique, slots, unique[slots < 0]):
            self._exchange(slots)
        self.loader.ensure(unique, slots)
        self.pins.pin(slots)
        self.cache.served()
        return unique

    def unpin(self, keys: Any) -> None:
        """Take one pin from each of the keys."""
        unique, _, slots = self.cache.find(self._as_keys(keys))
        self.cache.check_pinned(unique, slots)
        self.pins.unpin(slots)

    @contextmanager
    def changing(self, keys: Ints, slots: Ints) -> Iterator[NDArray[Any]]:
        """Yield all rows of the slab; the block may change those of these slots, which hold the distinct keys."""
        never_written = self.loader.check_never_written(keys, slots)
        self.writer.change(slots)
        try:
            with self._slab.writing(slots) as rows:
                yield rows
        finally:
            self.loader.wrote(slots, never_written)

    def checked_values(self, values: Mapping[str, bytes] | None) -> dict[str, bytes]:
        """Return the values of a commit, with the tier's own."""
        checked = self.log.check_values(values)
        if self._schema.key in checked:
            raise ValueError(f"values: {self._schema.key!r} is the tier's own")
        return checked | self._schema.missing()

    def close(self) -> None:
        """End the threads, then close everything."""
        self._end.run()

    def _beside(self, side: SideLog, reader: Reader) -> RowLog:
        log = RowLog(
            self.store, side.name, row_bytes=side.row_bytes, reader=reader, capacity=side.rows,
            key_space=side.key_space, compact_below=_COMPACT_BELOW, beside=self.log,
        )  # fmt: skip
        log.compact_later()
        log.patient = True
        return log

    def _as_keys(self, keys: Any) -> Ints:
        index = as_ints("keys", keys)
        if index.size > self.batch:
            raise Shortage(
                f"keys: {index.size} in one call, but working memory is set aside for batch={self.batch}; make "
                f"the tier with batch={index.size}, or pass fewer at a time",
                "batch", needed=index.size, room=self.batch, enough=index.size,
            )  # fmt: skip
        if self._key_space is not None:
            check_range("keys", index.reshape(-1), self._key_space, "below the tier's key_space")
        return index

    def _find(self, keys: Any, distinct: bool = False) -> tuple[Ints, Ints, Any, Ints]:
        """Check a call's keys; return them, the distinct ones, the place of each key among these, and their slots."""
        index = self._as_keys(keys)
        if self.cache.unfinished:
            self._exchange(_NONE)
        if distinct and index.ndim == 1:
            return index, index, _EACH, self.cache.slots_of(index)
        return index, *self.cache.find(index)

    def _exchange(self, slots: Ints) -> None:
        """Do as the policy has decided; give the slots of the keys that enter to `slots`, which is -1 for each."""
        leaving, emptied = self.cache.victims()
        if len(leaving):
            self.writer.write_out(leaving, emptied)
            self.loader.vacate(emptied)
        entered = self.cache.exchange()
        if len(slots):
            slots[np.flatnonzero(slots < 0)] = entered


def needs_of(options: Options, *, is_beside: bool) -> TierNeeds:
    """Return the needs of a tier, of one that is beside another or not, without those of its log."""
    layout, codec = options.layout, get_codec(options.codec)
    row_bytes = codec.encoded_bytes(layout.dtype, layout.row_type.itemsize // layout.dtype.itemsize)
    fixed_bytes = rewriting_bytes(row_bytes)
    if is_beside:
        fixed_bytes -= WRITE_BUFFERS_BYTES  # of the one transaction
    elif options.reader is None:
        with Reader() as reader:
            fixed_bytes += reader.planned_bytes
    if options.side is not None:
        fixed_bytes += options.side.planned_bytes
    key_space = None if options.key_space is None else int(options.key_space)
    return TierNeeds(
        layout, row_bytes, codec.lossless, key_space, options.batch, policy_bytes(options.policy), fixed_bytes,
        options.aside,
    )  # fmt: skip


def store_bytes(store: Store) -> int:
    """Return the DRAM that a store holds beside its open transaction, which a log counts."""
    names = store.keys()
    values = sum(len(name) + len(store.get(name) or b"") for name in names)
    return values + sum(info.memory_bytes for info in store.segments().values())


def _open_store(path: Path) -> Store:
    try:
        return Store.create(path, KIND)
    except FileExistsError:
        return Store.open(path, KIND, writable=True)


def _close(close: Callable[[], None], pid: int) -> None:
    # A forked child has neither the threads nor, perhaps, the state of the locks that closing would need.
    if pid == os.getpid():
        close()
