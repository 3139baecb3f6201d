"""Samples of one rank as a message, and those of several ranks as one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints
from memhier.recsys.replay.schema import Schema, as_array

__all__ = ["Part", "joined_arrays", "joined_parts", "part_of"]

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Part:
    """Samples as `CarouselBuffer.add` takes them.

    Attributes
    ----------
    count
        How many.
    batch
        By field: an array [n, *shape], or a list of n arrays of different lengths.
    labels, ids
        int64 [n], or None.
    """

    count: int
    batch: dict[str, Any]
    labels: Ints | None
    ids: Ints | None

    def chosen(self, which: Ints) -> "Part":
        """Return some of the samples."""
        batch = {
            name: [values[one] for one in which.tolist()] if isinstance(values, list) else values[which]
            for name, values in self.batch.items()
        }
        marks, names = (None if one is None else one[which] for one in (self.labels, self.ids))
        return Part(len(which), batch, marks, names)


def part_of(schema: Schema, batch: Any, labels: Any, ids: Any) -> Part:
    """Return samples as a message; raise for unfit ones, as `CarouselBuffer.add` does."""
    count, columns = schema.check(batch)
    marks, names = (
        None if value is None else as_ints(name, value) for name, value in (("labels", labels), ("ids", ids))
    )
    for name, value in (("labels", marks), ("ids", names)):
        if value is not None and value.shape != (count,):
            raise ValueError(f"{name}: expected shape [{count}], got {list(value.shape)}")
    plain: dict[str, Any] = {}
    for name, field in schema.fields.items():
        values = columns[name]
        if field.varies:
            lengths = columns[f"{name}.length"].tolist()
            plain[name] = [value[:length] for value, length in zip(values, lengths, strict=True)]
        else:
            plain[name] = values
    return Part(count, plain, marks, names)


def _numbers(name: str, values: Any, count: int) -> Ints | None:
    if values is None:
        return None
    found = as_ints(name, as_array(name, values))
    if found.shape != (count,):
        raise ValueError(f"{name}: expected shape [{count}], got {list(found.shape)}")
    return found


def joined_parts(schema: Schema, parts: Sequence[Part]) -> Part:
    """Return the samples of several ranks, in the order of ranks; raise when only some have labels or ids."""
    some = [part for part in parts if part.count] or [*parts[:1]]
    batch: dict[str, Any] = {}
    for name, field in schema.fields.items():
        values = [part.batch[name] for part in some]
        batch[name] = [value for one in values for value in one] if field.varies else np.concatenate(values)
    return Part(
        sum(part.count for part in some),
        batch,
        joined_arrays("labels", [part.labels for part in some]),
        joined_arrays("ids", [part.ids for part in some]),
    )


def joined_arrays(name: str, arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return the arrays of several ranks as one, None if no rank has one."""
    given = [array for array in arrays if array is not None]
    if not given:
        return None
    if len(given) < len(arrays):
        without = [rank for rank, array in enumerate(arrays) if array is None]
        raise ValueError(f"{name}: {len(given)} of {len(arrays)} ranks with samples gave some, those at {without} "
                         "did not; expected all or none")  # fmt: skip
    return np.concatenate(given)
