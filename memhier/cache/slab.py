"""Rows in DRAM by slot number, private to a process or shared read-only with others."""

import contextlib
import errno
import mmap
import os
import threading
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memhier import backend
from memhier.arguments import as_ints, check_array, check_range
from memhier.cache.slab_memory import SlabLayout, open_shared_memory, private_memory, shared_memory
from memhier.closing import Closing
from memhier.errors import ClosedError
from memhier.files import close_descriptor, close_with

__all__ = ["Slab"]

_INT64, _ONE = np.dtype(np.int64), np.uint32(1)


class Slab(Closing):
    """A fixed number of equal rows in page-aligned memory, read and written many at a time.

    Each slot has a generation, even while its row is whole and odd while a write is under way. Reads take no lock; one
    that overlaps a write may return a mixture, which :meth:`gather_versioned` reports. Writes of several threads run
    one after the other.

    A shared slab lies in a memory file without a name in any folder, so nothing is left behind however its owner ends.
    Other processes of the same user and machine open it by :attr:`name`, or by receiving the slab itself (it pickles
    as its name); they cannot write. A forked child of the owner reads it as it is. Without the compiled core, versions
    read in another process can be relied on only where the processor keeps stores in order, as x86-64 does.

    Parameters
    ----------
    slots
        Number of rows, at least 1.
    dtype
        The type of a row's elements; may have fields, may not hold objects.
    shape
        The shape of a row: ``(64,)`` or ``64`` for a vector, ``()`` for a single element or one with fields.
    shared
        Let other processes read it. Linux only. All memory is taken at once then; else as rows are first written.
    versioned
        Keep generations. Without them, reads and writes must not overlap.

    Raises
    ------
    TypeError, ValueError
        For an unfit argument.
    OSError
        When the memory cannot be had.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier import Slab
    >>> with Slab(100, np.float32, 3) as slab:
    ...     slab.scatter([7, 2], np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    ...     slab.gather([2, 7, 7]).tolist()
    [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """

    def __init__(
        self,
        slots: int,
        dtype: DTypeLike,
        shape: int | tuple[int, ...] = (),
        *,
        shared: bool = False,
        versioned: bool = True,
    ) -> None:
        if shared and not versioned:
            raise ValueError("versioned=False: expected True beside shared=True, as other processes read meanwhile")
        layout = SlabLayout.checked(slots, dtype, shape, versioned)
        name: str | None = None
        fd = -1
        if shared:
            mapping, fd, name = shared_memory(layout.total_bytes)
            close_with(self, fd)
        else:
            mapping = private_memory(layout.total_bytes)
        mapping[: len(layout.header)] = layout.header
        self._set_up(mapping, layout, name, os.getpid(), fd)

    @classmethod
    def attach(cls, name: str) -> Self:
        """Open another process's shared slab, read-only.

        Parameters
        ----------
        name
            The :attr:`name` of the slab, whose owner still has it open. An attached slab outlives the owner.

        Raises
        ------
        ValueError
            When the name is not one of a slab.
        OSError
            When there is no such slab (its owner closed it, or ended), or it belongs to another user.
        FormatError
            When it was made by a memhier that lays out slabs differently.
        """
        mapping = open_shared_memory(name)
        slab = cls.__new__(cls)
        slab._set_up(mapping, SlabLayout.parsed(mapping, name), name, None, -1)
        return slab

    def _set_up(self, mapping: mmap.mmap, layout: SlabLayout, name: str | None, owner: int | None, fd: int) -> None:
        self._layout = layout
        self._name = name
        self._owner = owner  # the process that may write; None where this slab is attached
        self._fd = fd  # of shared memory of its own, to be closed with it
        self._lock = threading.RLock()  # a block of writing may scatter
        self._closed = False
        self._generations: NDArray[np.uint32] | None = (
            np.frombuffer(mapping, np.uint32, layout.slots, layout.generations_at)
            if layout.rows_at > layout.generations_at
            else None
        )
        self._rows: NDArray[Any] = np.frombuffer(mapping, layout.row_type, layout.slots, layout.rows_at)

    @property
    def slots(self) -> int:
        """Number of rows."""
        return self._layout.slots

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a row's elements."""
        return self._layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self._layout.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._layout.row_type.itemsize

    @property
    def name(self) -> str | None:
        """The name for :meth:`attach`; None if the slab is not shared."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: rows, 4 bytes of generation per slot, and a header, each in whole pages.

        0 for an attached slab, whose memory its owner counts, and once closed.
        """
        return 0 if self._closed or self._owner is None else self._layout.total_bytes

    @staticmethod
    def bytes_for(slots: int, dtype: DTypeLike, shape: int | tuple[int, ...] = (), *, versioned: bool = True) -> int:
        """Return the `memory_bytes` that a slab of these arguments will have.

        Examples
        --------
        >>> import numpy as np
        >>> from memhier import Slab
        >>> Slab.bytes_for(1000, np.float32, 64) == 4096 + 4096 + 63 * 4096
        True
        """
        return SlabLayout.checked(slots, dtype, shape, versioned).total_bytes

    @property
    def rows(self) -> NDArray[Any]:
        """All rows in place, ``[slots, *shape]``, read-only; :meth:`writing` gives them to be changed."""
        self._check_open()
        view = self._rows.view(self.dtype).reshape(self.slots, *self.shape)
        view.flags.writeable = False
        return view

    def generations(self, slots: Any) -> NDArray[np.uint32]:
        """Return how often each slot has been written, times two; odd while it is being written.

        Parameters
        ----------
        slots
            Integers, any shape.

        Returns
        -------
        numpy.ndarray
            uint32, of the shape of `slots`; starts at 0 and wraps round.
        """
        self._check_open()
        if self._generations is None:
            raise ValueError("this slab keeps no generations: make it with versioned=True")
        return self._generations[self._as_slots(slots)]

    def gather(self, slots: Any, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Copy rows out.

        Parameters
        ----------
        slots
            Integers, any shape; may repeat.
        out
            Of the slab's dtype and shape ``[*slots.shape, *shape]``, C-contiguous: filled instead of allocating, which
            for large batches costs as much as the copy.

        Returns
        -------
        numpy.ndarray
            ``[*slots.shape, *shape]``; `out` where it was given.

        Raises
        ------
        TypeError, ValueError
            For slots that are no integers or out of range, or an unfit `out`.
        """
        self._check_open()
        index = self._as_slots(slots)
        shape = index.shape + self.shape
        if out is None:
            out = np.empty(shape, self.dtype)
        else:
            check_array("out", out, self.dtype, shape)
        # The slots are in range: "clip" only spares numpy a copy of out that it could restore after an error.
        np.take(self._rows, index.reshape(-1), out=self._flat(out), mode="clip")
        return out

    def gather_versioned(self, slots: Any, out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[np.uint32]]:
        """Copy rows out, and tell which are whole.

        Parameters
        ----------
        slots, out
            As in :meth:`gather`.

        Returns
        -------
        rows : numpy.ndarray
            ``[*slots.shape, *shape]``.
        generations : numpy.ndarray
            uint32, of the shape of `slots`. Even: the row is exactly that generation's. Odd: it was written meanwhile
            and may be a mixture; read it again.
        """
        before = self.generations(slots)
        _fence()
        rows = self.gather(slots, out)
        _fence()
        after = self.generations(slots)
        return rows, before | (before != after)

    def scatter(self, slots: Any, rows: Any) -> None:
        """Write rows.

        Parameters
        ----------
        slots
            Integers, any shape. Where one comes twice, its last row stays.
        rows
            Of the slab's dtype, shape ``[*slots.shape, *shape]``.

        Raises
        ------
        TypeError, ValueError
            For slots that are no integers or out of range, or rows of another dtype or shape. Nothing is written then.
        PermissionError
            When the slab belongs to another process.
        """
        index = self._as_slots(slots)
        rows = np.asarray(rows)
        if rows.dtype != self.dtype:
            raise TypeError(f"rows: expected an array of {self.dtype}, got {rows.dtype}")
        if rows.shape != index.shape + self.shape:
            raise ValueError(f"rows: expected shape {index.shape + self.shape}, got {rows.shape}")
        flat = self._flat(np.ascontiguousarray(rows))
        with self.writing(index):
            np.put(self._rows, index.reshape(-1), flat, mode="clip")

    def writing(self, slots: Any) -> contextlib.AbstractContextManager[NDArray[Any]]:
        """Write rows in place, for updates that need not copy them out and back.

        Parameters
        ----------
        slots
            Integers, any shape: the rows that the block will change. Changing others goes unnoticed by readers.

        Returns
        -------
        contextlib.AbstractContextManager
            Of all rows, ``[slots, *shape]``, writable. Other writers wait until the block ends. If an exception ends
            it, the generations of these slots stay odd until they are written again.

        Raises
        ------
        TypeError, ValueError, PermissionError
            As in :meth:`scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from memhier import Slab
        >>> slab = Slab(10, np.float32, 2)
        >>> with slab.writing([3, 4]) as rows:
        ...     rows[3:5] += 1
        >>> slab.gather([3]).tolist(), slab.generations([2, 3]).tolist()
        ([[1.0, 1.0]], [0, 2])
        """
        self._check_writer()
        rows = self._rows.view(self.dtype).reshape(self.slots, *self.shape)
        return _Writing(self._lock, self._generations, self._as_slots(slots).reshape(-1), rows)

    def parts(self) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Return the bytes of all rows, writable, and all generations, for a writer in the compiled core."""
        self._check_writer()
        assert self._generations is not None
        return self._rows.view(np.uint8), self._generations

    def close(self) -> None:
        """Let go of the memory; it is freed when no array from :attr:`rows` and no attached slab uses it."""
        self._closed = True
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_descriptor(fd)
        self._rows = np.empty(0, self._layout.row_type)
        self._generations = None

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        if self._name is None:
            raise TypeError("cannot pickle a slab of private memory; make it with shared=True to hand it to processes")
        return Slab.attach, (self._name,)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the slab is closed")

    def _check_writer(self) -> None:
        self._check_open()
        if self._name is not None and self._owner != os.getpid():
            raise PermissionError(errno.EACCES, "this process reads the slab, only its owner writes it", self._name)

    def _flat(self, rows: NDArray[Any]) -> NDArray[Any]:
        # One opaque item a row: numpy then moves rows whole, twice as fast as it scatters rows of elements.
        return rows.reshape(-1).view(self._layout.row_type)

    def _as_slots(self, slots: Any) -> NDArray[np.int64]:
        ready = type(slots) is np.ndarray and slots.dtype == _INT64 and slots.flags.c_contiguous and slots.flags.aligned
        index: NDArray[np.int64] = slots if ready else as_ints("slots", slots)
        # A negative slot is a large one here.
        if index.size and index.view(np.uint64).max() >= self.slots:
            check_range("slots", index, self.slots, f"a slot, 0 to {self.slots - 1}")
        return index


class _Writing(contextlib.AbstractContextManager[NDArray[Any]]):
    """Holds the generations of slots odd while their rows are written."""

    __slots__ = ("_generations", "_index", "_lock", "_odd", "_rows")

    def __init__(
        self, lock: Any, generations: NDArray[np.uint32] | None, index: NDArray[np.int64], rows: NDArray[Any]
    ) -> None:
        self._lock, self._generations, self._index, self._rows = lock, generations, index, rows
        self._odd: Any = None

    def __enter__(self) -> NDArray[Any]:
        self._lock.acquire()
        if self._generations is not None:
            # The last write of a slot may have broken off and left it odd already.
            self._odd = self._generations[self._index] | _ONE
            self._generations[self._index] = self._odd
            _fence()
        return self._rows

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._generations is not None and kind is None:
            _fence()
            self._generations[self._index] = self._odd + _ONE
        self._lock.release()


def _fence() -> None:
    """Keep the reads and writes of memory before this call before those after it, as other processors see them."""
    if backend.core is not None:
        backend.core.fence()
