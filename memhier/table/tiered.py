"""Rows of a table larger than DRAM: the rows in use lie in a slab, all others in a log on SSD.

One lock makes calls run one after the other. The set of resident rows changes only inside calls, so results, hits,
misses, evictions and writes do not depend on the two threads: one reads rows ahead into slots that already belong to
them, the other appends rows that have left to the log.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self

from numpy.typing import DTypeLike, NDArray

from memhier.budget import parse_bytes
from memhier.cache.slab_memory import Layout
from memhier.errors import ClosedError
from memhier.io.reader import Reader
from memhier.policies import Policy
from memhier.shield import ShieldedContext, shielded, shielded_giving, shielded_init
from memhier.store.store import Store
from memhier.table.cache import Ahead
from memhier.table.checkpoints import Checkpoints
from memhier.table.gate import Gate, Life
from memhier.table.loader import Initial, Job
from memhier.table.loans import Loan, Pin, Ticket
from memhier.table.table import KIND, Ints, Options, Table

__all__ = ["KIND", "Tiered"]


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
        life = Life()
        layout = Layout.checked(1, dtype, shape)
        options = Options(
            store, name, layout, rows, parse_bytes(dram), policy, initial, codec, key_space, batch, reader, aside
        )
        table = Table(options, life.close)
        self._capacity, self._batch = table.cache.capacity, table.batch
        self._gate = Gate(table, life)
        self._checkpoints = Checkpoints(self._gate)

    @property
    def capacity(self) -> int:
        """Rows that may be resident at once."""
        return self._capacity

    @property
    def batch(self) -> int:
        """Most keys in one call."""
        return self._batch

    @property
    def closed(self) -> bool:
        """Whether the tier was closed."""
        return self._gate.closed

    @property
    def policy(self) -> Policy:
        """The policy that decides which rows stay: for announcing batches to Belady."""
        return self._gate.table().cache.policy

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: slab, map, policy, flags, pins, queue, buffers, the log's index; its own reader's."""
        return 0 if self.closed else self._gate.table().memory_bytes

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
        with self._gate.call() as table:
            return table.gather(keys, out, keep)

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
        with self._gate.call() as table:
            table.scatter(keys, rows)

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
        with self._gate.call() as table:
            ahead, job = table.prefetch(keys)
            held = self._gate.lend(partial(table.cache.pins.release, ahead))
            return Ticket(ahead, held, job, self._wait, self._release)

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
        with self._gate.call() as table:
            unique, slots, of_keys = table.lend(keys, again, None if ticket is None else ticket.ahead)
            held = self._gate.lend(partial(table.cache.pins.unpin, slots))
            return Loan(of_keys, table.rows, partial(self._changing, unique, slots), self._gate.table, held)

    @shielded_giving(Pin.release)
    def pin(self, keys: Any) -> Pin:
        """Make rows resident, and keep them so until :meth:`unpin` or the end of the returned pin's ``with`` block.

        Raises
        ------
        BudgetError, OSError, ClosedError
            As in :meth:`gather`.
        """
        with self._gate.call() as table:
            return Pin(table.pin(keys), self.unpin)

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
        with self._gate.giving_back() as table:
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
        with self._checkpoints.settled() as table:
            table.writer.flush()

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
        return self._checkpoints.now(values)

    @shielded
    def start_checkpoint(self, values: Mapping[str, bytes] | None = None) -> "Future[int]":
        """Make the table durable as it is now on a thread, beside the calls that follow, after any that is under way.

        A row that a call changes before the thread has come to it is copied first. Until the end changed rows that
        leave DRAM wait in the write queue; once that is full, so do calls that let more leave. The result is what
        :meth:`checkpoint` returns, or raises; closing the tier waits for it.
        """
        return self._checkpoints.beside(values)

    @shielded
    def keep_way_back(self, further: bool = False) -> None:
        """Let each commit from now on keep the commit before it, so that the store can go back to that one.

        With `further` a commit keeps the one that the last commit kept, and not the last commit.
        """
        log = self._gate.table().log
        log.way_back, log.way_back_further = True, further

    @shielded
    def stored_keys(self) -> Iterator[Ints]:
        """Return an iterator over the keys whose rows are on SSD, in blocks; no row may be written meanwhile."""
        return self._gate.table().log.keys()

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
        return self._gate.table().stats()

    @shielded
    def close(self) -> None:
        """Stop the threads and free all memory; a second call does nothing.

        Rows changed since the last checkpoint are lost.
        """
        self._gate.end_change()
        self._checkpoints.wait()
        self._gate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @shielded
    def _wait(self, job: Job) -> None:
        # Not the loader's own method: a ticket that outlives a closed tier would keep all that belonged to it.
        self._gate.check_process()
        try:
            table = self._gate.table()
        except ClosedError:
            job.wait()
        else:
            table.loader.wait(job)

    @shielded
    def _release(self, ahead: Ahead) -> None:
        with self._gate.giving_back() as table:
            if table is not None:
                table.cache.pins.release(ahead)

    def _changing(self, keys: Ints, slots: Ints) -> AbstractContextManager[NDArray[Any]]:
        return ShieldedContext(partial(self._gate.changing, keys, slots))
