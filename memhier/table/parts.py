"""What a tier is made of, opened within a budget and closed together."""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memhier.arguments import check_int
from memhier.cache.slab import Slab
from memhier.cache.slab_memory import Layout
from memhier.cache.slots import CAPACITY_MAX
from memhier.codecs import get_codec
from memhier.io.reader import Reader
from memhier.log.compaction import rewriting_bytes
from memhier.log.row_log import RowLog
from memhier.policies import Policy
from memhier.shield import when_gone
from memhier.store.store import Store
from memhier.table.residents import Residents
from memhier.table.row_loader import Initial, RowLoader
from memhier.table.schema import Schema
from memhier.table.sizes import Needs, Sizes, check_policy, log_bytes, policy_bytes
from memhier.table.write_queue import WriteQueue

__all__ = ["KIND", "TieredParts", "store_bytes"]

KIND = "tiered"
# Of a part of the log is alive: the log takes about twice its rows at most, and what the last transaction wrote.
_COMPACT_BELOW = 0.5


class TieredParts:
    """Slab, log, write queue, loader and residents of one tier, and the store and the reader where they are its own.

    Closed by `close`, or when it is forgotten: the threads know the parts, but nobody who knows the whole.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        name: str,
        layout: Layout,
        rows: int,
        dram: int,
        policy: str | Policy,
        initial: Initial | None,
        codec: str,
        key_space: int | None,
        batch: int | None,
        reader: Reader | None,
        aside: float,
    ) -> None:
        check_policy(policy)
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
            raise TypeError(f"rows={rows!r}: expected a number of keys as an int")
        if isinstance(store, Store) and not store.writable:
            raise OSError(errno.EROFS, "the store is open for reading; pass writable=True", str(store.path))
        if not 1 <= rows <= CAPACITY_MAX:
            raise ValueError(f"rows={rows}: expected 1 to {CAPACITY_MAX} keys")
        cold = get_codec(codec)
        encoded_bytes = cold.encoded_bytes(layout.dtype, layout.row_type.itemsize // layout.dtype.itemsize)
        self.key_space = None if key_space is None else check_int("key_space", key_space, 1, 2**63 - 1, "possible keys")
        self._own_reader = self._own_store = None
        with ExitStack() as opened:
            fixed_bytes = log_bytes(int(rows), encoded_bytes, key_space) + rewriting_bytes(encoded_bytes)
            if reader is None:
                reader = self._own_reader = opened.enter_context(Reader())
                fixed_bytes += reader.planned_bytes
            self.reader = reader
            needs = Needs(
                layout, encoded_bytes, cold.lossless, key_space, batch, policy_bytes(policy), fixed_bytes, aside
            )
            sizes = Sizes(needs, dram)
            capacity = sizes.solve(policy)
            self.batch = sizes.batch
            # A budget that is too small leaves nothing behind, and takes nothing first.
            if not isinstance(store, Store):
                store = self._own_store = opened.enter_context(_open_store(Path(store)))
            self.schema = Schema(store, name, layout, codec)
            self.schema.check()
            self.log = RowLog(
                store, name, row_bytes=encoded_bytes, reader=reader, capacity=int(rows), key_space=key_space,
                compact_below=_COMPACT_BELOW,
            )  # fmt: skip
            opened.callback(self.log.close)
            self.log.compact_later()
            self.log.patient = True
            self.slab = opened.enter_context(Slab(capacity, layout.dtype, layout.shape))
            self.queue = WriteQueue(self.log, sizes.queued, encoded_bytes)
            opened.callback(self.queue.close)
            self.loader = RowLoader(self.slab, self.log, self.queue, cold, initial, sizes.staged)
            opened.callback(self.loader.close)
            self.residents = Residents(sizes, capacity, policy, self.slab, self.queue, cold, self.loader.vacate)
            self._end = when_gone(self, partial(_close, opened.pop_all().close, os.getpid()))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        if not self.alive:
            return 0
        held = sum(part.memory_bytes for part in (self.slab, self.residents, self.queue, self.loader, self.log))
        if self._own_store is not None:
            held += store_bytes(self._own_store)
        return held + (0 if self._own_reader is None else self._own_reader.memory_bytes)

    def stats(self) -> dict[str, Any]:
        """Return what all of them have counted."""
        residents, reader = self.residents, self.reader.stats()
        return {
            "capacity": self.slab.slots,
            "resident": len(residents.map),
            "accesses": residents.accesses,
            "hits": residents.accesses - residents.misses,
            "misses": residents.misses,
            "evictions": residents.evictions,
            **self.loader.counts(),
            "writes": residents.writes,
            "queued": len(self.queue),
            "reads": reader["reads"],
            "read_bytes": reader["bytes"],
            "read_s": self.loader.read_s,
            "stall_s": self.loader.stall_s + self.queue.stall_s,
        }

    @property
    def alive(self) -> bool:
        """Whether nobody has closed it."""
        return self._end.due

    def close(self) -> bool:
        """End the threads, then close everything and let go of it; return whether that was still to be done."""
        if not self.alive:
            return False
        self._end.run()
        del self.slab, self.queue, self.loader, self.log, self.residents
        return True


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
