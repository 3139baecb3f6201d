"""Batches drawn before the steps that use them, so that the workers of a loader can transform them.

A step sees the batch drawn for it, even in a run resumed before the step: a checkpoint keeps the batches that no step
has used. It keeps positions, since storage has the samples. It keeps values only of mutable fields, which may change
until then, and of samples that storage has replaced.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.codecs.encoding import Encoding
from memhier.recsys.replay.placement.placement import Placement
from memhier.recsys.replay.schema import Columns
from memhier.recsys.replay.storage.storage import Storage

__all__ = ["BatchQueue"]

Ints = NDArray[np.int64]


@dataclass(slots=True)
class _Drawn:
    """A batch, and the positions of its samples in storage, int64 [n]; -1 for samples that it has no more."""

    batch: Batch
    positions: Ints


class BatchQueue:
    """Batches that wait for their steps, the next one first.

    Attributes
    ----------
    asked
        How many were handed out, from the first on; the next step to end uses the first.
    turn
        The number of samplers that began to take batches; each begins with the batch of the next step to end.
    """

    def __init__(self, encoding: Encoding, placement: Placement) -> None:
        self._encoding = encoding
        self._schema = encoding.schema
        self._placement = placement
        self._drawn: deque[_Drawn] = deque()
        self.asked: int = 0
        self.turn: int = 0

    def __len__(self) -> int:
        return len(self._drawn)

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        arrays = [(drawn.positions, *_numbers(drawn.batch), *drawn.batch.data.values()) for drawn in self._drawn]
        return sum(array.nbytes for batch in arrays for array in batch)

    def begin(self) -> int:
        """Begin anew with the batch of the next step to end; return the number of the turn."""
        self.asked = 0
        self.turn += 1
        return self.turn

    def put(self, batch: Batch) -> None:
        """Append a batch that was drawn just now."""
        self._drawn.append(_Drawn(batch, self._placement.visible[batch.slots]))

    def take(self) -> Batch:
        """Hand out a copy of the next batch: a transform may work in place, and the batch come again."""
        self.asked += 1
        return _chosen(self._drawn[self.asked - 1].batch, slice(None))

    def end_step(self) -> None:
        """Let go of the first batch, which a step has used."""
        self.asked -= 1
        self._drawn.popleft()

    # Changes of storage.

    def replaced(self, positions: Ints) -> None:
        """Note that storage has replaced or removed the samples at positions."""
        for drawn in self._drawn:
            drawn.positions[np.isin(drawn.positions, positions)] = -1

    def renamed(self, position: int, old: int) -> None:
        """Note that the sample at position `old` has moved to another."""
        for drawn in self._drawn:
            drawn.positions[drawn.positions == old] = position

    def forget(self, positions: Ints) -> None:
        """Drop samples at positions, which are to be forgotten, and all that storage has no more."""
        for drawn in self._drawn:
            stays = (drawn.positions >= 0) & ~np.isin(drawn.positions, positions)
            if not stays.all():
                _keep(drawn, stays)

    # Checkpoints.

    def records(self) -> list[bytes]:
        """Return a record of each batch, from which `restore` makes it again."""
        records: list[bytes] = []
        for drawn in self._drawn:
            numbers = np.stack([*_numbers(drawn.batch), drawn.positions]).astype("<i8")
            values = [drawn.batch.data[name][rows].tobytes() for name, rows in self._kept(drawn.positions).items()]
            records.append(b"".join([len(drawn.positions).to_bytes(8, "little"), numbers.tobytes(), *values]))
        return records

    def restore(self, records: Sequence[memoryview], storage: Storage) -> list[int]:
        """Make the batches of `records` again without damaged samples; return the ids of these."""
        damaged: list[int] = []
        for record in records:
            count = int.from_bytes(record[:8], "little")
            if 8 + 32 * count > len(record):
                raise CorruptionError(f"{storage.path}: a batch of {count} samples drawn ahead is cut short")
            labels, ids, slots, positions = (
                np.frombuffer(record, "<i8", 4 * count, 8).reshape(4, count).astype(np.int64)
            )
            if (positions < -1).any() or (positions >= len(storage.samples)).any():
                raise CorruptionError(f"{storage.path}: a batch drawn ahead names positions that there are not")
            batch = Batch(self._schema.empty(count), labels, ids, slots)
            readable = self._read(storage, positions, batch.data)
            rest = np.frombuffer(record, np.uint8)[8 + 32 * count :]
            for name, rows in self._kept(positions).items():
                values = batch.data[name][rows]
                taken, rest = rest[: values.nbytes], rest[values.nbytes :]
                batch.data[name][rows] = taken.view(values.dtype).reshape(values.shape)
            drawn = _Drawn(batch, positions)
            if not readable.all():
                damaged += batch.ids[~readable].tolist()
                _keep(drawn, readable)
            self._drawn.append(drawn)
        return damaged

    def _kept(self, positions: Ints) -> dict[str, Any]:
        """Return the columns to keep values of, and the samples: all, or those that storage has no more."""
        gone = np.flatnonzero(positions < 0)
        return {name: slice(None) if name in self._schema.mutable else gone for name in self._schema.columns}

    def _read(self, storage: Storage, positions: Ints, out: Columns) -> NDArray[np.bool_]:
        """Read the samples that storage has; return False for damaged ones and True for all others, bool [n]."""
        readable: NDArray[np.bool_] = np.ones(len(positions), np.bool_)
        stored = np.flatnonzero(positions >= 0)
        columns, whole = storage.read_whole(positions[stored], self._encoding)
        readable[stored] = whole
        for name, values in columns.items():
            out[name][stored[whole]] = values
        return readable


def _numbers(batch: Batch) -> tuple[Ints, Ints, Ints]:
    return batch.labels, batch.ids, batch.slots


def _chosen(batch: Batch, which: Any) -> Batch:
    """Return a copy of some of a batch."""
    data = {name: values[which].copy() for name, values in batch.data.items()}
    return Batch(data, *(numbers[which].copy() for numbers in _numbers(batch)))


def _keep(drawn: _Drawn, which: NDArray[np.bool_]) -> None:
    """Keep some samples."""
    drawn.batch = _chosen(drawn.batch, which)
    drawn.positions = drawn.positions[which]
