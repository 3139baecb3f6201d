"""The memory tier: the columns of all slots in one slab.

The rows of the slab are cut up anew: first the first column of every slot, then the second, so that a batch is one
gather per field into contiguous arrays. The generation of a slot counts for its values in all columns. Values of a
field whose lengths differ around a mean lie in blocks behind the columns; a column has the number of their first block.
"""

import time
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.cache.slab import Slab
from memhier.errors import CorruptionError
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.codecs.fields import as_bytes
from memhier.recsys.replay.placement.blocks import BLOCK_BYTES, Blocks, BlocksLayout, blocks_of
from memhier.recsys.replay.schema import Column, Columns, Schema

__all__ = ["Memory", "most_blocks"]

_ALIGN = 64
_ATTEMPTS = 10_000
_SPINS = 100  # attempts without a pause between them
_LABEL, _ID = ".label", ".id"
_HEAD = ".head."
_OF_HEAD = Column(np.dtype(np.int32), ())
_OWN = {_LABEL: Column(np.dtype(np.int64), ()), _ID: Column(np.dtype(np.int64), ())}

Ints = NDArray[np.int64]


class Memory:
    """Samples by slot.

    Parameters
    ----------
    schema
        The fields of a sample.
    slab
        Of the rows that `make` gives it; made there, or attached in another process.
    """

    def __init__(self, schema: Schema, slab: Slab) -> None:
        self.schema = schema
        self._columns = _columns(schema)
        self._adopt(slab)

    def _adopt(self, slab: Slab) -> None:
        self.slab = slab
        self._bounds: dict[str, slice] = {}  # of each column in the slab, in bytes
        # Each column as opaque items of the size of a value, to read and to write, and as values.
        self._items: dict[str, NDArray[Any]] = {}
        self._targets: dict[str, NDArray[Any]] = {}
        self.views: Columns = {}
        self._arrays: Any = None
        flat = slab.rows.reshape(-1)
        start = 0
        for name, column in self._columns.items():
            self._bounds[name] = slice(start, start + column.bytes * slab.slots)
            part = flat[self._bounds[name]]
            self.views[name] = part.view(column.dtype).reshape(slab.slots, *column.shape)
            self._items[name] = part.view(np.dtype((np.void, column.bytes)))
            start += _aligned(column.bytes * slab.slots)
        layout = _blocks(self.schema, slab.slots)
        self._pool = slice(start, start + layout.bytes)
        self.blocks: Blocks | None = Blocks(layout, flat[self._pool]) if layout.blocks else None

    @classmethod
    def make(cls, schema: Schema, slots: int) -> Self:
        """Allocate memory of `slots` samples."""
        return cls(schema, Slab(slots, np.uint8, _row_bytes(schema, slots), shared=True))

    @staticmethod
    def bytes_for(schema: Schema, slots: int) -> int:
        """Return the bytes of the slab of `slots` samples."""
        return Slab.bytes_for(slots, np.uint8, _row_bytes(schema, slots)) + 4 * _blocks(schema, slots).blocks

    @staticmethod
    def slot_bytes(schema: Schema) -> int:
        """Return the bytes of a slot, at least."""
        pool = int(_blocks_of_mean(schema) * (BLOCK_BYTES + 8))
        return sum(column.bytes for column in _columns(schema).values()) + 4 + pool

    def arrays(self, core: Any) -> Any:
        """Return the arrays that a step of the compiled core changes, of samples of one column."""
        if self._arrays is None:
            (values,) = self.schema.columns
            values_at, labels_at, ids_at = (self._bounds[name].start for name in (values, _LABEL, _ID))
            flat, generations = self.slab.parts()
            self._arrays = core.MemoryArrays(
                flat=flat, generations=generations, values_at=values_at, labels_at=labels_at, ids_at=ids_at
            )
        return self._arrays

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.slab.memory_bytes + (self.blocks.memory_bytes if self.blocks is not None else 0)

    def close(self) -> None:
        """Free the slab."""
        self._arrays = None
        self.slab.close()

    @property
    def labels(self) -> Ints:
        """int64 [slots]: labels, in place."""
        return self.views[_LABEL]

    @property
    def ids(self) -> Ints:
        """int64 [slots]: ids, in place."""
        return self.views[_ID]

    def read(self, slots: Ints, out: Batch) -> None:
        """Copy samples out, into contiguous arrays; slots must be in range."""
        columns = {_LABEL: out.labels, _ID: out.ids, **out.data}
        for name, items in self._items.items():
            if not name.startswith(_HEAD):
                items.take(slots, out=columns[name].reshape(-1).view(items.dtype), mode="clip")
        if self.blocks is not None:
            for name in self.schema.means:
                array = out.data[name]
                sizes = out.data[f"{name}.length"].astype(np.int64) * _row_of(self.schema, name)
                self.blocks.read(self.views[_head(name)][slots], sizes, as_bytes(array))

    def blocks_at(self, slots: Ints) -> Ints:
        """Return how many blocks the samples of slots take."""
        return self.blocks_for({f"{name}.length": self.views[f"{name}.length"][slots] for name in self.schema.means})

    def blocks_for(self, columns: Columns) -> Ints:
        """Return how many blocks samples take."""
        counts = [
            blocks_of(columns[f"{name}.length"].astype(np.int64) * _row_of(self.schema, name))
            for name in self.schema.means
        ]
        total: Ints = np.sum(counts, axis=0, dtype=np.int64)
        return total

    def read_shared(self, slots: Ints, out: Batch) -> None:
        """Copy samples out while another process changes them: each copy is whole, as of some moment."""
        for attempt in range(_ATTEMPTS):
            if attempt >= _SPINS:
                # The writer may be alive: it does not run now, or writes very much.
                time.sleep(0.001)
            before = self.slab.generations(slots)
            _fence()
            self.read(slots, out)
            _fence()
            if not (before & 1).any() and np.array_equal(before, self.slab.generations(slots)):
                return
        raise CorruptionError("a slot of the memory tier stays half written: the process that owns it has died")

    def write(self, slots: Ints, columns: Columns, labels: Ints | None = None, ids: Ints | None = None) -> None:
        """Set samples, or some columns of them."""
        values = dict(columns)
        if labels is not None and ids is not None:
            values |= {_LABEL: labels, _ID: ids}
        with self.slab.writing(slots) as rows:
            if self.blocks is not None:
                self._write_blocks(self.blocks, rows.reshape(-1)[self._pool], slots, values)
            for name, array in values.items():
                target = self._targets.get(name)
                if target is None:
                    target = self._targets[name] = rows.reshape(-1)[self._bounds[name]].view(self._items[name].dtype)
                target[slots] = _as_items(array, self.views[name], target.dtype)

    def _write_blocks(self, blocks: Blocks, flat: NDArray[np.uint8], slots: Ints, values: Columns) -> None:
        """Move values that lie in blocks there; the numbers of their first blocks take their place."""
        names = [name for name in self.schema.means if name in values]
        for name in names:
            sizes = self.views[f"{name}.length"][slots].astype(np.int64) * _row_of(self.schema, name)
            blocks.free(flat, self.views[_head(name)][slots], sizes)
        for name in names:
            sizes = values[f"{name}.length"].astype(np.int64) * _row_of(self.schema, name)
            values[_head(name)] = blocks.put(flat, as_bytes(np.ascontiguousarray(values.pop(name))), sizes)

    def adopt(self, other: "Memory") -> None:
        """Take over the slab of another memory, which ends, and free the own one."""
        old = self.slab
        self._adopt(other.slab)
        self.blocks = other.blocks  # which knows the free ones
        old.close()

    def clear(self, slots: Ints) -> None:
        """Overwrite samples with zeros."""
        zeros = {name: np.zeros((len(slots), *column.shape), column.dtype) for name, column in self._columns.items()}
        for name in self.schema.means:
            zeros[name] = np.zeros((len(slots), 0), np.uint8)
        self.write(slots, zeros)


def _as_items(array: NDArray[Any], column: NDArray[Any], item: np.dtype[Any]) -> NDArray[Any]:
    """Return values for a column as opaque items: numpy moves them whole, sooner than it moves values of some axes."""
    return np.ascontiguousarray(array, column.dtype).reshape(-1).view(item)


def _fence() -> None:
    """Keep reads before this call before those after it, as other processors see them."""
    if backend.core is not None:
        backend.core.fence()


def _columns(schema: Schema) -> dict[str, Column]:
    heads = {_head(name): _OF_HEAD for name in schema.means}
    return _OWN | {name: column for name, column in schema.columns.items() if name not in schema.means} | heads


def _head(name: str) -> str:
    return f"{_HEAD}{name}"


def _row_of(schema: Schema, name: str) -> int:
    """Return the bytes of a value of length one."""
    return schema.columns[name].bytes // schema.fields[name].longest


def _blocks_of_mean(schema: Schema) -> float:
    """Return how many blocks a sample takes on average: the last block of a value is half full."""
    return sum(mean * _row_of(schema, name) / BLOCK_BYTES + 0.5 for name, mean in schema.means.items())


def most_blocks(schema: Schema) -> int:
    """Return how many blocks a sample takes at most."""
    return sum(-(-schema.columns[name].bytes // BLOCK_BYTES) for name in schema.means)


def _blocks(schema: Schema, slots: int) -> BlocksLayout:
    """Return the layout of the blocks beside so many slots: the longest sample always fits."""
    return BlocksLayout(int(slots * _blocks_of_mean(schema)) + most_blocks(schema))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _row_bytes(schema: Schema, slots: int) -> int:
    total = sum(_aligned(column.bytes * slots) for column in _columns(schema).values()) + _blocks(schema, slots).bytes
    return -(-total // slots)
