"""A batch of samples, and where in memory they came from."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Columns, Schema

__all__ = ["Batch"]


@dataclass(slots=True)
class Batch:
    """Samples drawn from memory.

    Attributes
    ----------
    data
        An array ``[n, *shape]`` for each field. Where lengths differ, values are padded to the longest of the schema,
        and ``<field>.length``, int32 ``[n]``, tells how much of each counts.
    labels
        int64 ``[n]``; -1 for samples without one.
    ids
        int64 ``[n]``: those given to `add`, else the number of samples that had come before.
    slots
        int64 ``[n]``: where they lie in memory; what `feedback` goes by.
    """

    data: Columns
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]
    slots: NDArray[np.int64]

    @classmethod
    def empty(cls, schema: Schema, count: int) -> "Batch":
        """Return a batch to be filled."""
        numbers = np.empty((3, count), np.int64)
        return cls(schema.empty(count), *numbers)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def first(self, count: int) -> "Batch":
        """Return the first samples, in place."""
        data = {name: values[:count] for name, values in self.data.items()}
        return Batch(data, self.labels[:count], self.ids[:count], self.slots[:count])

    def ragged(self, name: str) -> list[NDArray[Any]]:
        """Return the values of a field whose lengths differ, each cut to its length, in place."""
        lengths = self.data[f"{name}.length"].tolist()
        return [value[:length] for value, length in zip(self.data[name], lengths, strict=True)]
