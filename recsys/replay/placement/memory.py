"""The memory tier: the columns of all slots in one slab.

The rows of the slab are cut up anew: first the first column of every slot, then the second, so that a batch is one
gather per field into contiguous arrays. The generation of a slot counts for its values in all columns.
"""

import time
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.cache.slab import Slab
from memhier.errors import CorruptionError
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.schema import Column, Columns, Schema

__all__ = ["Memory"]

_ALIGN = 64
_ATTEMPTS = 10_000
_SPINS = 100  # attempts without a pause between them
_LABEL, _ID = ".label", ".id"
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
        # Each column as opaque items of the size of a value, and as values.
        self._items: dict[str, NDArray[Any]] = {}
        self.views: Columns = {}
        flat = slab.rows.reshape(-1)
        start = 0
        for name, column in self._columns.items():
            self._bounds[name] = slice(start, start + column.bytes * slab.slots)
            part = flat[self._bounds[name]]
            self.views[name] = part.view(column.dtype).reshape(slab.slots, *column.shape)
            self._items[name] = part.view(np.dtype((np.void, column.bytes)))
            start += _aligned(column.bytes * slab.slots)

    @classmethod
    def make(cls, schema: Schema, slots: int) -> Self:
        """Allocate memory of `slots` samples."""
        return cls(schema, Slab(slots, np.uint8, _row_bytes(schema, slots), shared=True))

    @staticmethod
    def bytes_for(schema: Schema, slots: int) -> int:
        """Return the bytes of the slab of `slots` samples."""
        return Slab.bytes_for(slots, np.uint8, _row_bytes(schema, slots))

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.slab.memory_bytes

    def close(self) -> None:
        """Free the slab."""
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
        for name, items in self._items.items():
            array = out.labels if name == _LABEL else out.ids if name == _ID else out.data[name]
            items.take(slots, out=array.reshape(-1).view(items.dtype), mode="clip")

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
            flat = rows.reshape(-1)
            for name, array in values.items():
                view = self.views[name]
                flat[self._bounds[name]].view(view.dtype).reshape(view.shape)[slots] = array

    def adopt(self, other: "Memory") -> None:
        """Take over the slab of another memory, which ends, and free the own one."""
        old = self.slab
        self._adopt(other.slab)
        old.close()

    def clear(self, slots: Ints) -> None:
        """Overwrite samples with zeros."""
        zeros = {name: np.zeros((len(slots), *column.shape), column.dtype) for name, column in self._columns.items()}
        self.write(slots, zeros)


def _fence() -> None:
    """Keep reads before this call before those after it, as other processors see them."""
    if backend.core is not None:
        backend.core.fence()


def _columns(schema: Schema) -> dict[str, Column]:
    return _OWN | schema.columns


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _row_bytes(schema: Schema, slots: int) -> int:
    total = sum(_aligned(column.bytes * slots) for column in _columns(schema).values())
    return -(-total // slots)
