"""Rows of a table larger than DRAM: the rows in use lie in a slab, all others in a log on SSD.

One lock makes calls run one after the other. The set of resident rows changes only inside calls, so results, hits,
misses, evictions and writes do not depend on the two threads: one reads rows ahead into slots that already belong to
them, the other appends rows that have left to the log.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from numpy.typing import DTypeLike, NDArray

from memhier.budget import parse_bytes
from memhier.cache.slab_memory import SlabLayout
from memhier.closing import Closing
from memhier.errors import ClosedError
from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.policies import Policy
from memhier.shield import shielded, shielded_giving, shielded_init
from memhier.store.store import Store, Transfer
from memhier.table.cache import PrefetchedSlots
from memhier.table.checkpoints import Checkpoints
from memhier.table.gate import Gate, LentRows, Life
from memhier.table.loader import Initial, Job
from memhier.table.loans import Loan, Pin, Ticket
from memhier.table.side_log import SideLog
from memhier.table.table import KIND, Ints, Options, Table

__all__ = ["KIND", "Tiered"]


class Tiered(Closing):
    """A table of rows by int64 key, as large as the SSD, used through a DRAM budget.

    `initial` gives the first value of a row, without a read. Changed rows leave DRAM through a write queue that serves
    them until the log has them. A :meth:`checkpoint` makes all rows durable; a reopened tier has the rows of the last
    one. Many threads may use a tier, whose calls run one after the other, but only in the process that made it.
    Gathered rows equal those of a dict, for every order of calls and every budget, as long as the codec is lossless;
    another codec rounds rows when they leave DRAM.

    Parameters
    ----------
    store
        A store open for writing, or the path of one, which is made if there is none. Several tiers of one store write
        by turns, with a checkpoint between them; the others get a LockedError and keep their rows. Give each tier a
        store of its own if they write at the same time.
    name
        Name of the table in the store.
    dtype, shape
        Of a row, as in :class:`memhier.cache.slab.Slab`.
    rows
        Most distinct keys that will ever be written. The log's index has room for so many.
    dram
        Bytes for everything: ``"64MiB"``. The index and all buffers take their part, and the rest holds rows. The
        number of resident rows depends on the arguments alone, not on the rows in the table. The log's part is enough
        for as many writes between two checkpoints as the table has rows; each 4 KiB beyond take 4 to 12 bytes more
        until the second one. Values given to checkpoints come on top as well.
    policy
        ``"lru"``, ``"lfu"``, ``"s3fifo"``, ``"belady"``, or a policy, whose capacity is then the number of slots.
        A gather or a prefetch accesses all its keys, except that a gather leaves out rows that a ticket holds: a batch
        that is prefetched and then gathered counts once. A scatter or a pin accesses only keys that are not resident.
        Batches announced to Belady come on top of the budget, and must be accessed as announced.
    initial
        Returns the first values of rows, ``[n, *shape]`` of the table's dtype, for keys, int64 [n]. The tier asks again
        when an evicted row that was never written comes back, so the values must depend on the keys only. Zeros by
        default.
    codec
        Form of rows on SSD; see :func:`memhier.codecs.get_codec`.
    key_space
        States that all keys are 0 to ``key_space - 1``. The maps of slots and of the log then keep a place for each
        possible key, if that takes less memory than a place for each key that may be there.
    batch
        Most keys in one call: the tier sets working memory aside for them. By default as many as a sixteenth of the
        budget allows.
    reader
        Does the reads. It stays the caller's, and its memory is not counted. By default the tier has its own.
    aside
        Share of `dram` that the tier leaves to the caller.
    side
        A log of other rows to keep beside the tier's own, and their DRAM; see :attr:`side`.
    beside
        A tier of the same store, given here as `store`. A checkpoint of either makes both durable at once, they fail
        and close together, and this one reads by the reader of the other.

    Attributes
    ----------
    gate, checkpoints
        Shared with the tiers beside this one. Not for users.

    Raises
    ------
    BudgetError
        When `dram` is too small; the message names a budget that is enough.
    FormatError
        When the table was made with another dtype, shape or codec.
    TypeError, ValueError
        For an unfit argument.
    OSError
        When the store is open for reading.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier import Tiered
    >>> place = tempfile.mkdtemp() + "/table"
    >>> with Tiered(place, "vectors", np.float32, 3, rows=1000, dram="16MiB") as table:
    ...     table.scatter([7, 2], np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    ...     generation = table.checkpoint()
    >>> with Tiered(place, "vectors", np.float32, 3, rows=1000, dram="16MiB") as table:
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
        side: SideLog | None = None,
        beside: "Tiered | None" = None,
    ) -> None:
        gate = Gate(Life()) if beside is None else beside.gate
        layout = SlabLayout.checked(1, dtype, shape)
        options = Options(
            store, name, layout, rows, parse_bytes(dram), policy, initial, codec, key_space, batch, reader, aside,
            side, None if beside is None else gate.tables()[0],
        )  # fmt: skip
        table = Table(options, gate.life.close)
        self._capacity, self._batch = table.cache.capacity, table.batch
        self.gate: Gate = gate
        self._number = gate.join(table)
        self.checkpoints: Checkpoints = Checkpoints(gate) if beside is None else beside.checkpoints

    @property
    def capacity(self) -> int:
        """Rows that may be resident at once."""
        return self._capacity

    @property
    def batch(self) -> int:
        """Most keys in one call."""
        return self._batch

    @property
    def _table(self) -> Table:
        return self.gate.tables()[self._number]

    @property
    def closed(self) -> bool:
        """Whether the tier was closed."""
        return self.gate.closed

    @property
    def policy(self) -> Policy:
        """The policy that decides which rows stay: for announcing batches to Belady."""
        return self._table.cache.policy

    @property
    def refetches(self) -> int:
        """Rows that were read from SSD so far, as :meth:`stats` says."""
        return self._table.loader.counts["refetches"]

    @property
    def side(self) -> RowLog | None:
        """The log beside the tier's own: append to it in the `first` of a checkpoint alone."""
        return self._table.side

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: slab, map, policy, flags, pins, queue, buffers, the log's index; its own reader's."""
        return 0 if self.closed else self._table.memory_bytes

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
            False reads rows that are not resident without making them so, and the policy does not see them: for many
            rows that are needed only once. The distinct keys may then outnumber the slots.

        Returns
        -------
        numpy.ndarray
            ``[*keys.shape, *shape]``; `out` if it was given.

        Raises
        ------
        BudgetError
            When the distinct keys and the rows that are pinned or held by tickets outnumber the slots, or `keys` the
            batch; the message names a size that is enough. Nothing has changed then.
        OSError, CorruptionError
            When this call or an earlier prefetch could not read rows; the next call tries again.
        ClosedError
            After :meth:`close`, in a forked child, or once rows could not be written.
        """
        with self.gate.call(self._number) as table:
            return table.gather(keys, out, keep)

    @shielded
    def scatter(self, keys: Any, rows: Any) -> None:
        """Write rows. They are in DRAM then, and on SSD after an eviction or a flush.

        Parameters
        ----------
        keys
            Integers, any shape. If a key comes twice, its last row stays.
        rows
            ``[*keys.shape, *shape]`` of the table's dtype.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`; BudgetError also when the table has no room for so many new keys.
        ValueError
            For rows that the codec cannot hold.
        """
        with self.gate.call(self._number) as table:
            table.scatter(keys, rows)

    @shielded
    def check_new(self, keys: Any) -> None:
        """Raise BudgetError where distinct keys, int64 [n], are too many to be written: the log's index is full."""
        with self.gate.call(self._number) as table:
            table.loader.check_never_written(keys, table.cache.slots_of(keys))

    @shielded_giving(Ticket.release)
    def prefetch(self, keys: Any, *, distinct: bool = False) -> Ticket:
        """Begin to make rows resident, and return at once, unless rows that leave have to wait for the write queue.

        If another thread keeps the interpreter busy, the reading thread waits ``sys.getswitchinterval()`` for it
        several times per ticket. Prefetch two batches ahead then, not one.

        Parameters
        ----------
        keys
            Integers, any shape; may repeat.
        distinct
            As in :meth:`lend`.

        Returns
        -------
        Ticket
            Holds each row in DRAM until the row is gathered, or the ticket is released or forgotten.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`; BudgetError also when too many tickets are open.
        """
        with self.gate.call(self._number) as table:
            ahead, job = table.prefetch(keys, distinct)
            held = self.gate.lend(partial(table.pins.release, ahead))
            return Ticket(ahead, held, job, self._wait, self._release)

    @shielded
    def lend(self, keys: Any, *, again: bool = False, distinct: bool = False, ticket: Ticket | None = None) -> Loan:
        """Make rows resident, as :meth:`gather` does, and lend them in place, to be read and changed there.

        Parameters
        ----------
        keys
            Integers, any shape.
        again
            The rows are lent or pinned already, and this is no further access of them.
        distinct
            States that no key comes twice, which spares a search for repeats.
        ticket
            Ticket of a prefetch of exactly these keys, all distinct: it spares the look-up, and is released. An array
            of keys that is not writeable counts as unchanged since then: do not change it through a view.

        Returns
        -------
        Loan
            ``rows``, all rows in place, read-only; ``slots``, int64 of the shape of `keys`: the places of these;
            ``changing()``, a context that gives the rows writable; ``release()``, at the end of a ``with`` block too.

        Raises
        ------
        BudgetError, OSError, CorruptionError, ClosedError, ValueError
            As in :meth:`gather`; ValueError with `again`, for a row that is neither lent nor pinned.
        """
        with self.gate.call(self._number) as table:
            unique, slots, of_keys = table.lend(keys, again, distinct, None if ticket is None else ticket.ahead)
            rows = table.rows
            held = self.gate.lend(partial(table.pins.unpin, slots))
        return Loan(of_keys, rows, LentRows(self._number, unique, slots), self.gate, held)

    @shielded_giving(Pin.release)
    def pin(self, keys: Any) -> Pin:
        """Make rows resident, and keep them so until :meth:`unpin` or the end of the returned pin's ``with`` block.

        Parameters
        ----------
        keys
            Integers, any shape; may repeat. A call pins each distinct key once more.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`.
        """
        with self.gate.call(self._number) as table:
            return Pin(table.pin(keys), self.unpin)

    @shielded
    def unpin(self, keys: Any) -> None:
        """Take one :meth:`pin` back from each of the keys.

        Raises
        ------
        BudgetError
            When they outnumber the batch.
        ValueError
            When one is not pinned. Nothing has changed then.
        """
        with self.gate.giving_back(self._number) as table:
            if table is not None:
                table.unpin(keys)

    @shielded
    def flush(self) -> None:
        """Write all changed rows to the log, and wait until it has them; :meth:`checkpoint` makes them durable.

        Raises
        ------
        ClosedError
            When they could not be written.
        """
        with self.checkpoints.settled() as tables:
            for table in tables:
                table.writer.flush()

    @shielded
    def checkpoint(self, values: Mapping[str, bytes] | None = None, first: Callable[[], object] | None = None) -> int:
        """Make the table durable as it is now, with values of the caller's, all or nothing.

        Parameters
        ----------
        values
            Values for the store's catalog, to go on from here: such as the step of the training.
        first
            Called once no other checkpoint is under way: it may append to the log :attr:`side`.

        Returns
        -------
        int
            The store's new generation.

        Raises
        ------
        LockedError
            When another object is changing the store. Nothing is lost: try again.
        OSError
            With ``errno`` ENOSPC, EDQUOT or EFBIG when the disk is full. Nothing is lost, and the tier stays open: make
            room and call again. All calls may raise this, as rows that leave DRAM need room as well.
        OSError, ClosedError
            When another write failed. The tier takes no more calls then; a reopened one has the last checkpoint.
        """
        return self.checkpoints.now(values, first)

    @shielded
    def start_checkpoint(
        self, values: Mapping[str, bytes] | None = None, first: Callable[[], object] | None = None
    ) -> "Future[int]":
        """Make the table durable as it is now, on a thread beside the calls that follow.

        It waits for a checkpoint under way first. A call that changes a row before the thread has come to it copies the
        row first. Until the end, changed rows that leave DRAM wait in the write queue; once that is full, calls that
        let more leave wait too. The future has the result or the error of :meth:`checkpoint`; closing the tier waits
        for it.
        """
        return self.checkpoints.beside(values, first)

    def push(self, url: str, *, keep: int | None = None, verify: bool = False) -> Transfer:
        """Back up the last checkpoint, with all else in its store, to a URL; see :meth:`memhier.Store.push`."""
        return self._table.store.push(url, keep=keep, verify=verify)

    @staticmethod
    @shielded
    def pull(url: str, path: str | os.PathLike[str], *, generation: int | None = None) -> Transfer:
        """Restore a backup into the directory `path`; see :meth:`memhier.Store.pull`."""
        return Store.pull(url, path, generation=generation)

    @shielded
    def keep_way_back(self, further: bool = False) -> None:
        """Let each commit from now on keep the commit before it, so that the store can go back to that one.

        With `further` a commit keeps the one that the last commit kept, and not the last commit.
        """
        log = self.gate.tables()[0].log
        log.way_back, log.way_back_further = True, further

    @shielded
    def stored_keys(self) -> Iterator[Ints]:
        """Return an iterator over the keys whose rows are on SSD, int64 blocks; no row may be written meanwhile."""
        return self._table.log.keys()

    @shielded
    def stats(self) -> dict[str, Any]:
        """Return plain numbers about the work so far.

        ``capacity`` and ``resident`` rows; ``accesses`` (keys gathered or prefetched, and those brought in by a scatter
        or a pin), ``hits`` and ``misses`` of them; sources of missed rows: ``first_touches`` (never written: no read),
        ``queue_hits`` and ``refetches`` (one or the other, as the log had the row or not yet); ``evictions``;
        ``writes`` (changed rows that were evicted or flushed) and ``queued`` (rows on their way to the log); ``reads``
        and ``read_bytes`` of the reader; ``read_s``, seconds that reads have taken, and ``stall_s``, seconds that calls
        have waited for reads or for the write queue.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        """
        return self._table.stats()

    @shielded
    def close(self) -> None:
        """Stop the threads and free all memory; a second call does nothing.

        Rows changed since the last checkpoint are lost.
        """
        self.gate.end_change()
        self.checkpoints.wait()
        self.gate.close()

    @shielded
    def _wait(self, job: Job) -> None:
        # Not the loader's own method: a ticket that outlives its tier would keep the loader.
        self.gate.check_process()
        try:
            table = self._table
        except ClosedError:
            job.wait()
        else:
            table.loader.wait(job)

    @shielded
    def _release(self, ahead: PrefetchedSlots) -> None:
        with self.gate.giving_back(self._number) as table:
            if table is not None:
                table.pins.release(ahead)
