"""Checkpoints: an image of an array in DRAM, saved to a store while the array goes on changing."""

import struct
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arrays import as_ints, check_range
from memhier.budget import parse_bytes
from memhier.errors import ClosedError, CorruptionError, FormatError, LockedError
from memhier.log.parts import page_after
from memhier.log.record_log import committed_keys
from memhier.log.row_log import RowLog
from memhier.rows.rows import ROW_BYTES_MAX
from memhier.shield import ShieldedContext, shielded, shielded_init
from memhier.store.store import Store
from memhier.table.checkpoint_blocks import BlockTracker
from memhier.table.saving import Saving

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["Checkpoint", "CheckpointWriter", "read_checkpoint"]

_RECORD = struct.Struct("<QQQ")  # rows, row bytes, rows per block
_BATCH_BYTES = 2**20
_READ_BYTES = 2**24
_LIVE_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved.

    Attributes
    ----------
    generation
        Of the store.
    blocks, bytes
        Blocks that had changed, and their bytes.
    seconds
        From the moment the image shows to its commit.
    """

    generation: int
    blocks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Geometry:
    rows: int
    row_bytes: int
    block_rows: int

    @property
    def block_bytes(self) -> int:
        return self.row_bytes * self.block_rows

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def open_log(self, store: Store, name: str, reader: "Reader") -> RowLog:
        """Blocks fill whole pages, so that none shares one with its neighbour."""
        if committed_keys(store, name) not in (0, self.blocks):
            raise CorruptionError(f"{store.path}: checkpoint {name!r} has not the {self.blocks} blocks that it should")
        return RowLog(store, name, page_after(self.block_bytes), reader, self.blocks, direct=True)


class CheckpointWriter:
    """Saves an array of rows, block by block, and afterwards only the blocks that changed.

    An image shows the array at the moment of :meth:`start`, whatever is changed while a thread saves it: whoever
    changes rows says so before, and a row that the image still needs is copied first. It is committed as a whole, so
    a crash leaves the last one or the new one. Writes go past the page cache. Space on SSD stays near twice the array
    or below, as blocks that were saved again free their old place.

    Until an image is committed it holds the store's one transaction.

    Parameters
    ----------
    store
        Open for writing.
    name
        Of the checkpoint in the store: 1 to 70 letters, digits, ``-`` or ``_``.
    rows
        The array, C-contiguous, ``[rows, ...]``, such as ``Slab.rows``; it is only read.
    reader
        Moves old blocks when their space is reclaimed; stays the caller's.
    block_bytes
        How much is saved where one row changed: bytes or text, rounded down to whole rows, at least one.
    spare
        DRAM for copies of rows that change while an image still needs them; whoever changes more waits for the
        device. With as much as the array, nobody ever waits.
    clean
        Whether `rows` holds just what the last checkpoint does, as after :func:`read_checkpoint`. Otherwise the
        first image has every block.

    Raises
    ------
    FormatError
        When the store has a checkpoint of this name and another geometry.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from memhier.io.reader import Reader
    >>> place = pathlib.Path(tempfile.mkdtemp()) / "store"
    >>> table = np.zeros((1000, 16), np.float32)
    >>> with Store.create(place, kind="example") as store, Reader() as reader:
    ...     with CheckpointWriter(store, "table", table, reader, block_bytes="4KiB") as writer:
    ...         first = writer.write()
    ...         with writer.changing([7, 8]):
    ...             table[7:9] = 1
    ...         saving = writer.start({"step": b"2"})
    ...         with writer.changing([9]):
    ...             table[9] = 5
    ...         second = saving.result()
    ...     image = read_checkpoint(store, "table", reader).view(np.float32)
    >>> first.blocks, second.blocks, image[6:10, 0].tolist()
    (16, 1, [0.0, 1.0, 1.0, 0.0])
    """

    @shielded_init
    def __init__(
        self,
        store: Store,
        name: str,
        rows: NDArray[Any],
        reader: "Reader",
        *,
        block_bytes: int | str = "64KiB",
        spare: int | str = "8MiB",
        clean: bool = False,
    ) -> None:
        if not isinstance(rows, np.ndarray) or rows.dtype.hasobject:
            raise TypeError(
                f"rows: expected an array without objects, got {getattr(rows, 'dtype', type(rows).__name__)}"
            )
        if rows.ndim == 0 or rows.size == 0 or not rows.flags.c_contiguous:
            raise ValueError(f"rows: expected a C-contiguous array with rows, got shape {list(rows.shape)}")
        row_bytes = rows.nbytes // len(rows)
        block_rows = max(1, parse_bytes(block_bytes, "block_bytes") // row_bytes)
        self._geometry = _Geometry(len(rows), row_bytes, min(block_rows, len(rows)))
        self._record_key = f"checkpoint/{name}"
        found = _read_geometry(store, name)
        if found is not None and found != self._geometry:
            raise FormatError(
                f"{store.path}: checkpoint {name!r} has {found.rows} rows of {found.row_bytes} bytes in blocks of "
                f"{found.block_rows}, expected {self._geometry.rows} of {row_bytes} in blocks of "
                f"{self._geometry.block_rows}"
            )
        if clean and found is None:
            raise ValueError(f"clean=True: there is no checkpoint {name!r} yet that the rows could equal")
        size = self._geometry.block_bytes
        spares = max(1, parse_bytes(spare, "spare") // row_bytes)
        source = rows.reshape(-1).view(np.uint8).reshape(len(rows), row_bytes)
        self._tracker = BlockTracker(source, self._geometry.block_rows, min(spares, len(rows)), clean)
        batch = max(1, _BATCH_BYTES // size)
        self._batch: NDArray[np.uint8] = np.zeros((batch, page_after(size)), np.uint8)
        self._open_log = partial(self._geometry.open_log, store, name, reader)
        self._log = self._open_log()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[Checkpoint] | None = None
        self._closed = False

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides the array, in bytes."""
        return self._log.memory_bytes + self._tracker.memory_bytes + self._batch.nbytes

    def changing(self, rows: Any) -> AbstractContextManager[None]:
        """Return a context in which rows may be changed. Changing rows outside of one damages images.

        Costs some microseconds, and while an image is being saved a copy of each row that it still needs. An image
        begins only when no thread is in such a context.

        Parameters
        ----------
        rows
            Integers, any shape; may repeat.
        """
        numbers = as_ints("rows", rows).reshape(-1)
        check_range("rows", numbers, self._geometry.rows, f"a row, 0 to {self._geometry.rows - 1}")
        return ShieldedContext(partial(self._tracker.changing, numbers))

    @shielded
    def start(self, values: Mapping[str, bytes] | None = None) -> Future[Checkpoint]:
        """Take an image of this moment and save it in a thread.

        Parameters
        ----------
        values
            Values of the store's catalog to commit with it, such as the step.

        Returns
        -------
        concurrent.futures.Future
            Its result is a :class:`Checkpoint`, or the error: the blocks are then saved with the next image. After a
            failed write that can be at once; after a failed commit the store has to be opened again, and with it a
            new writer made.

        Raises
        ------
        TypeError, ValueError
            When a value is no bytes, or its key is unfit or the checkpoint's own. No image is taken then.
        LockedError
            When the last image is still being saved.
        """
        if self._closed:
            raise ClosedError("the checkpoint writer is closed")
        if self._saving is not None and not self._saving.done():
            raise LockedError("the last checkpoint is still being saved; wait for its result")
        changes = self._log.check_values(values)
        if self._record_key in changes:
            raise ValueError(f"values: {self._record_key!r} is the checkpoint's own")
        begun = time.perf_counter()
        blocks = self._tracker.capture()
        self._saving = Saving[Checkpoint]()
        self._thread.submit(self._save_for, self._saving, changes, blocks, begun)
        return self._saving

    def write(self, values: Mapping[str, bytes] | None = None) -> Checkpoint:
        """Take an image and wait until it is saved."""
        return self.start(values).result()

    @shielded
    def close(self) -> None:
        """Wait for an image that is being saved, then let go of everything; the store and the reader stay open."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _save_for(self, saving: Saving[Checkpoint], values: dict[str, bytes], blocks: int, begun: float) -> None:
        try:
            saved = self._save(values, blocks, begun)
        except BaseException as error:
            saving.set_exception(error)
        else:
            saving.set_result(saved)

    def _save(self, values: dict[str, bytes], blocks: int, begun: float) -> Checkpoint:
        try:
            if self._log.failed:
                # What the log held of the image before is gone, and its blocks are in this one.
                self._log.close()
                self._log = self._open_log()
            while len(numbers := self._tracker.take(self._batch)):
                self._log.append(numbers, self._batch[: len(numbers)])
            self._log.compact(_LIVE_BELOW)
            geometry = self._geometry
            record = _RECORD.pack(geometry.rows, geometry.row_bytes, geometry.block_rows)
            generation = self._log.commit({**values, self._record_key: record})
        except BaseException:
            self._tracker.give_up()
            raise
        return Checkpoint(generation, blocks, blocks * geometry.block_bytes, time.perf_counter() - begun)


def read_checkpoint(store: Store, name: str, reader: "Reader", out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Read the image that `CheckpointWriter` last committed.

    Parameters
    ----------
    store
        Open; not the one that a writer of this process saves to meanwhile: open it once more to read.
    name
        What the writer was given.
    reader
        Does the reads.
    out
        A writable, C-contiguous array of as many bytes, of any dtype and shape, to fill instead of allocating.

    Returns
    -------
    numpy.ndarray
        uint8 [rows, row_bytes]; `out` where it was given.

    Raises
    ------
    FormatError
        When there is no such checkpoint.
    CorruptionError
        When a page does not match its checksum.
    """
    geometry = _read_geometry(store, name)
    if geometry is None:
        raise FormatError(f"{store.path}: no checkpoint named {name!r}; its values are {store.keys()}")
    if out is None:
        out = np.empty((geometry.rows, geometry.row_bytes), np.uint8)
    elif not isinstance(out, np.ndarray) or not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out: expected a writable, C-contiguous array")
    elif out.nbytes != geometry.bytes:
        raise ValueError(f"out: expected {geometry.bytes} bytes, got {out.nbytes}")
    flat = out.reshape(-1).view(np.uint8)
    size = geometry.block_bytes
    step = max(1, _READ_BYTES // size)
    with geometry.open_log(store, name, reader) as log:
        for start in range(0, geometry.blocks, step):
            blocks, found = log.read(np.arange(start, min(start + step, geometry.blocks)))
            if not found.all():
                raise CorruptionError(f"{store.path}: checkpoint {name!r} lacks block {start + int(np.argmin(found))}")
            part = flat[start * size : (start + len(blocks)) * size]
            whole = len(part) // size
            part[: whole * size].reshape(whole, size)[:] = blocks[:whole, :size]
            part[whole * size :] = blocks[whole:, : len(part) - whole * size].reshape(-1)
    return out


def _read_geometry(store: Store, name: str) -> _Geometry | None:
    record = store.get(f"checkpoint/{name}")
    if record is None:
        return None
    if len(record) != _RECORD.size:
        raise CorruptionError(f"{store.path}: the record of checkpoint {name!r} has {len(record)} bytes")
    geometry = _Geometry(*_RECORD.unpack(record))
    stored = sum(info.payload for segment, info in store.segments().items() if segment.startswith(f"{name}-"))
    if (
        not 1 <= page_after(geometry.block_bytes) <= ROW_BYTES_MAX
        or geometry.block_rows > max(1, geometry.rows)
        or geometry.bytes > stored
    ):
        raise CorruptionError(
            f"{store.path}: checkpoint {name!r} is said to have {geometry.rows} rows of {geometry.row_bytes} bytes, "
            f"{geometry.block_rows} in a block; {stored} bytes are stored"
        )
    return geometry
