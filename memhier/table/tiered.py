"""Rows of a table larger than DRAM: those in use lie in a slab, all others in a log on SSD.

One lock makes calls run one after the other. Which rows are resident changes only inside calls, so results, hits,
misses, evictions and writes do not depend on the two threads: one reads rows ahead into slots that are already theirs,
the other appends rows that have left to the log.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memhier.arrays import as_ints, check_array, check_range
from memhier.budget import parse_bytes
from memhier.cache.slab_memory import Layout
from memhier.io.reader import Reader
from memhier.policies import Policy
from memhier.shield import ShieldedContext, shielded, shielded_giving, shielded_init
from memhier.store.store import Store
from memhier.table.calls import Calls
from memhier.table.commit import Commits
from memhier.table.loans import Loan, change
from memhier.table.parts import KIND, TieredParts
from memhier.table.row_loader import EMPTY, Initial, Job, RowLoader
from memhier.table.shortage import Shortage
from memhier.table.tickets import Ahead, Pin, Ticket, fixed_keys

__all__ = ["KIND", "Tiered"]

Ints = NDArray[np.int64]


class Tiered:
    """A table of rows by int64 key, as large as the SSD, used through a DRAM budget.

    A row that was never written is what `initial` says, without a read. Changed rows leave DRAM through a write queue
    that serves them until the log has them. What is on SSD becomes durable with :meth:`checkpoint`; without one, a
    reopened tier is as of the last. Safe to use from many threads, whose calls run one after the other, but only by
    the process that made it. Whatever order calls come in, gathered rows equal those of a dict, however small the
    budget, as long as the codec is lossless; with another, rows are rounded when they leave DRAM.

    Parameters
    ----------
    store
        A store open for writing, or the path of one, which is made if there is none. Several tiers of one store write
        by turns, a checkpoint between them; others are told with a LockedError and keep what they have. Give those
        that write at the same time a store each.
    name
        Of the table in the store.
    dtype, shape
        Of a row, as in :class:`memhier.cache.slab.Slab`.
    rows
        Most distinct keys that will ever be written: the log's index is made for so many.
    dram
        Bytes for everything: ``"64MiB"``. What is left after the index and all buffers holds rows; how many these are
        depends on the arguments alone, not on what the table holds. Set aside is what the log needs when no more rows
        are written between two checkpoints than the table has; each 4 KiB beyond take 4 to 12 bytes more until the
        second one. Values given to checkpoints come on top as well.
    policy
        ``"lru"``, ``"lfu"``, ``"s3fifo"``, ``"belady"``, or a policy, whose capacity is then the number of slots.
        A gather or a prefetch accesses all its keys, except that a gather leaves out rows a ticket holds: prefetching a
        batch and gathering it count once. A scatter or a pin accesses only keys that are not resident. Batches
        announced to Belady come on top of the budget, and must be accessed as announced.
    initial
        From keys, int64 [n], to the rows ``[n, *shape]`` of the same dtype that they have before they are first
        written. Asked again when such a row comes back without having been written, so it must depend on the keys only.
        Zeros by default.
    codec
        How rows are kept on SSD; see :func:`memhier.codecs.get_codec`.
    key_space
        Where all keys are 0 to ``key_space - 1``, which makes for smaller maps of slots and of the log, where a place
        for each possible key takes less than one for each that may be there.
    batch
        Most keys in one call, for which working memory is set aside; by default what a sixteenth of the budget allows.
    reader
        Does the reads and stays the caller's, who counts its memory. By default the tier has its own.
    aside
        The share of `dram` that the tier leaves alone, for what the caller holds beside it.

    Raises
    ------
    BudgetError
        When `dram` is too small; the message says what would be enough.
    FormatError
        When the table was made with another dtype, shape or codec.
    TypeError, ValueError
        For an unfit argument.
    OSError
        When the store is open for reading.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> place = pathlib.Path(tempfile.mkdtemp()) / "table"
    >>> with Tiered(place, "vectors", np.float32, 3, rows=1000, dram="8MiB") as table:
    ...     table.scatter([7, 2], np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    ...     generation = table.checkpoint()
    >>> with Tiered(place, "vectors", np.float32, 3, rows=1000, dram="8MiB") as table:
    ...     table.gather([2, 5, 2]).tolist()
    [[4.0, 5.0, 6.0], [0.0, 0.0, 0.0], [4.0, 5.0, 6.0]]
    """

    @shielded_init
    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        name: str,
        dtype: DTypeLike,
        shape: int | tuple[int, ...] = (),
        *,
        rows: int,
        dram: int | str = "64MiB",
        policy: str | Policy = "lru",
        initial: Initial | None = None,
        codec: str = "none",
        key_space: int | None = None,
        batch: int | None = None,
        reader: Reader | None = None,
        aside: float = 0.0,
    ) -> None:
        layout = Layout.checked(1, dtype, shape)
        parts = TieredParts(
            store, name, layout, rows, parse_bytes(dram), policy, initial, codec, key_space, batch, reader, aside
        )
        self._parts = parts
        self._calls = Calls(parts)
        self._commits = Commits(parts, self._calls)
        self._capacity = parts.slab.slots
        self._slab, self._residents, self._loader, self._log = parts.slab, parts.residents, parts.loader, parts.log

    @property
    def capacity(self) -> int:
        """Rows that may be resident at once."""
        return self._capacity

    @property
    def batch(self) -> int:
        """Most keys in one call."""
        return self._parts.batch

    @property
    def closed(self) -> bool:
        """Whether the tier was closed."""
        return not self._parts.alive

    @property
    def policy(self) -> Policy:
        """Who decides what stays: for announcing batches to Belady."""
        self._calls.check_open()
        return self._residents.policy

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: slab, map, policy, flags, pins, queue, buffers, the log's index; its own reader's."""
        return self._parts.memory_bytes

    @shielded
    def gather(self, keys: Any, out: NDArray[Any] | None = None, *, keep: bool = True) -> NDArray[Any]:
        """Copy rows out, making them resident.

        Parameters
        ----------
        keys
            Integers, any shape; may repeat.
        out
            Of the table's dtype and shape ``[*keys.shape, *shape]``, C-contiguous, to fill instead of allocating.
        keep
            False reads rows that are not resident without making them so, unseen by the policy: for passing through
            much that is needed only once. The distinct keys may then outnumber the slots.

        Returns
        -------
        numpy.ndarray
            ``[*keys.shape, *shape]``; `out` where it was given.

        Raises
        ------
        BudgetError
            When the distinct keys and the rows that are pinned or held by tickets outnumber the slots, or `keys` the
            batch; the message says what would be enough. Nothing has changed then.
        OSError, CorruptionError
            When rows could not be read now, or by an earlier prefetch; the next call tries again.
        ClosedError
            After :meth:`close`, in a forked child, or once rows could not be written.
        """
        with self._calls.call():
            index = self._as_keys(keys)
            if out is not None:
                check_array("out", out, self._slab.dtype, index.shape + self._slab.shape)
            unique, inverse, slots = self._residents.map.unique_find(index)
            if not keep:
                return np.take(self._loader.copies(unique, slots), inverse, axis=0, out=out)
            self._residents.admit(unique, slots, self._residents.not_ahead(index, inverse, slots))
            self._loader.ensure(unique, slots)
            rows = self._slab.gather(slots[inverse], out)
            self._residents.pins.gathered(slots)
            self._residents.served()
            return rows

    @shielded
    def scatter(self, keys: Any, rows: Any) -> None:
        """Write rows. They are in DRAM then, and on SSD after they were evicted or flushed.

        Parameters
        ----------
        keys
            Integers, any shape. Where one comes twice, its last row stays.
        rows
            ``[*keys.shape, *shape]`` of the table's dtype.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`; BudgetError also when the table has no room for so many new keys.
        ValueError
            For rows that the codec cannot hold.
        """
        with self._calls.call():
            index = self._as_keys(keys)
            rows = self._residents.as_rows(rows, index)
            unique, inverse, slots = self._residents.map.unique_find(index)
            never_written = self._loader.check_never_written(unique, slots)
            self._residents.admit(unique, slots, unique[slots < 0])
            self._loader.settle(slots)
            self._residents.keep_image(slots)
            self._slab.scatter(slots[inverse], rows)
            self._residents.dirty[slots] = True
            self._loader.wrote(slots, never_written)
            self._residents.served()

    @shielded_giving(Ticket.release)
    def prefetch(self, keys: Any) -> Ticket:
        """Begin to make rows resident, and return at once, unless rows that leave have to wait for the write queue.

        Next to computing that keeps the interpreter to itself, the reading thread waits ``sys.getswitchinterval()``
        for it several times per ticket: prefetch two batches ahead then, not one.

        Parameters
        ----------
        keys
            Integers, any shape; may repeat.

        Returns
        -------
        Ticket
            Holds the rows in DRAM until they are gathered, each on its own, or the ticket is released or forgotten.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`; BudgetError also when too many tickets are open.
        """
        with self._calls.call():
            index = self._as_keys(keys)
            unique, _, slots = self._residents.map.unique_find(index)
            self._residents.pins.check_room(len(unique))
            self._residents.admit(unique, slots, index.reshape(-1))
            empty = self._loader.states[slots] == EMPTY
            job = Job(*self._loader.prepare(unique[empty], slots[empty]))
            ahead = Ahead(slots.astype(np.int32))
            held = self._calls.lend(partial(self._residents.pins.let_go, ahead))
            ticket = Ticket(ahead, held, job, self._wait, self._release, fixed_keys(index, unique))
            self._residents.pins.open(ticket)
            self._loader.submit(job, slots)
            self._residents.served()
            return ticket

    @shielded
    def lend(self, keys: Any, *, again: bool = False, ticket: Ticket | None = None) -> Loan:
        """Make rows resident, as :meth:`gather` does, and lend them where they lie, to be read and changed in place.

        Parameters
        ----------
        keys
            Integers, any shape.
        again
            The rows are lent or pinned already, and this is no further access of them.
        ticket
            Of a prefetch of just these keys, where they are distinct: spares looking them up, and is released. Keys in
            an array that is not writeable are taken to be what they were then: do not change them through a view.

        Raises
        ------
        BudgetError, OSError, CorruptionError, ClosedError, ValueError
            As in :meth:`gather`; ValueError with `again`, for a row that is neither lent nor pinned.
        """
        with self._calls.call():
            index = self._as_keys(keys)
            if ticket is not None and self._residents.is_for(ticket, index):
                unique, slots = index, ticket.slots
                self._loader.ensure(unique, slots)
                self._residents.pins.pin(slots)
                self._residents.pins.release(ticket)
                return self._loan(unique, slots, slots)
            unique, inverse, slots = self._residents.map.unique_find(index)
            if again:
                self._residents.check_pinned(unique, slots)
                self._residents.pins.pin(slots)
            else:
                self._residents.admit(unique, slots, self._residents.not_ahead(index, inverse, slots))
                self._loader.ensure(unique, slots)
                self._residents.pins.pin(slots)
                self._residents.pins.gathered(slots)
            self._residents.served()
            return self._loan(unique, slots, slots[inverse])

    @shielded_giving(Pin.release)
    def pin(self, keys: Any) -> Pin:
        """Make rows resident, and keep them so until :meth:`unpin` or the end of the returned pin's ``with`` block.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`.
        """
        with self._calls.call():
            unique, _, slots = self._residents.map.unique_find(self._as_keys(keys))
            self._residents.admit(unique, slots, unique[slots < 0])
            self._loader.ensure(unique, slots)
            self._residents.pins.pin(slots)
            self._residents.served()
            return Pin(unique, self.unpin)

    @shielded
    def unpin(self, keys: Any) -> None:
        """Take back one :meth:`pin` of each of the keys.

        Raises
        ------
        BudgetError
            When they outnumber the batch.
        ValueError
            When one is not pinned. Nothing has changed then.
        """
        with self._calls.giving_back() as alive:
            if alive:
                unique, _, slots = self._residents.map.unique_find(self._as_keys(keys))
                self._residents.check_pinned(unique, slots)
                self._residents.pins.unpin(slots)

    @shielded
    def flush(self) -> None:
        """Write all changed rows to the log, and wait until it has them; :meth:`checkpoint` makes them durable.

        Raises
        ------
        ClosedError
            When they could not be written.
        """
        with self._commits.settled():
            self._residents.flush()

    @shielded
    def checkpoint(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make the table durable as it is now, with values of the caller's, all or nothing.

        Parameters
        ----------
        values
            For the store's catalog: what else must be known to go on from here, such as the step of the training.

        Returns
        -------
        int
            The store's new generation.

        Raises
        ------
        LockedError
            When somebody else is changing the store. Nothing is lost: try again.
        OSError
            With ``errno`` ENOSPC, EDQUOT or EFBIG, when the disk is full and the tier not closed: nothing is lost.
            Make room and call again; that holds for all calls, as rows that leave DRAM need room as well.
        OSError, ClosedError
            When it could not be written otherwise. The tier takes no more calls then; reopening it finds the last
            checkpoint.
        """
        with self._commits.settled():
            checked = self._commits.checked(values)
            self._residents.flush()
            return self._commits.now(checked)

    @shielded
    def start_checkpoint(self, values: Mapping[str, bytes] | None = None) -> "Future[int]":
        """Make the table durable as it is now on a thread, beside the calls that follow, after any that is under way.

        A row that a call changes before the thread has come to it is copied first. Until the end changed rows that
        leave DRAM wait in the write queue; once that is full, so do calls that let more leave. The result is what
        :meth:`checkpoint` returns, or raises; closing the tier waits for it.
        """
        with self._commits.settled():
            checked = self._commits.checked(values)
            return self._commits.beside(checked)

    @shielded
    def keep_way_back(self, further: bool = False) -> None:
        """Let each commit from now on keep the commit before it, so that the store can go back to that one.

        With `further` a commit keeps the one that the last commit kept, and not the last commit.
        """
        self._calls.check_open()
        self._log.way_back, self._log.way_back_further = True, further

    @shielded
    def stored_keys(self) -> Iterator[Ints]:
        """Return an iterator over the keys whose rows are on SSD, in blocks; no row may be written meanwhile."""
        self._calls.check_open()
        return self._log.keys()

    @shielded
    def stats(self) -> dict[str, Any]:
        """Return plain numbers about what was done so far.

        ``capacity`` and ``resident`` rows; ``accesses`` (keys gathered or prefetched, and those brought in by a scatter
        or a pin), ``hits`` and ``misses`` of them; where missed rows came from: ``first_touches`` (never written: no
        read); ``queue_hits`` and ``refetches`` (which of the two depends on how soon the log had them); ``evictions``;
        ``writes`` (changed rows that were evicted or flushed) and ``queued`` (rows on their way to the log); ``reads``
        and ``read_bytes`` of the reader; ``read_s``, seconds that reads have taken, and ``stall_s``, seconds that calls
        have waited for reads or for the write queue.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        """
        self._calls.check_open()
        return self._parts.stats()

    @shielded
    def close(self) -> None:
        """Stop the threads and free all memory; a second call does nothing.

        Rows changed since the last checkpoint are lost.
        """
        self._calls.end_change()
        self._commits.wait()
        if self._calls.close():
            del self._slab, self._residents, self._loader, self._log

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @shielded
    def _wait(self, job: Job) -> None:
        # Not the loader's own method: a ticket that somebody keeps would keep all that belongs to a closed tier.
        self._calls.check_process()
        loader: RowLoader | None = vars(self).get("_loader")
        if loader is None:
            job.wait()
        else:
            loader.wait(job)

    @shielded
    def _release(self, ticket: Ticket) -> None:
        with self._calls.giving_back() as alive:
            if alive:
                self._residents.pins.release(ticket)

    def _changing(self, keys: Ints, slots: Ints) -> AbstractContextManager[NDArray[Any]]:
        return ShieldedContext(partial(self._change, keys, slots))

    @contextmanager
    def _change(self, keys: Ints, slots: Ints) -> Iterator[NDArray[Any]]:
        with self._calls.changing() as under_way:
            yield under_way.enter_context(change(keys, slots, self._slab, self._residents, self._loader))

    def _loan(self, unique: Ints, slots: Ints, of_keys: Ints) -> Loan:
        changing = partial(self._changing, unique, slots)
        held = self._calls.lend(partial(self._residents.pins.unpin, slots))
        return Loan(of_keys, self._slab.rows, changing, self._calls.check_open, held)

    def _as_keys(self, keys: Any) -> Ints:
        index = as_ints("keys", keys)
        if index.size > self._parts.batch:
            raise Shortage(
                f"keys: {index.size} in one call, but working memory is set aside for batch={self._parts.batch}; make "
                f"the tier with batch={index.size}, or pass fewer at a time",
                "batch", needed=index.size, room=self._parts.batch, enough=index.size,
            )  # fmt: skip
        if self._parts.key_space is not None:
            check_range("keys", index.reshape(-1), self._parts.key_space, "below the tier's key_space")
        return index
