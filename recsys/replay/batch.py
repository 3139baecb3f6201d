"""A batch of samples, and their slots of memory."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Column, Columns, Schema

__all__ = ["Batch", "room"]

_INT64 = Column(np.dtype(np.int64), ())


@dataclass(slots=True)
class Batch:
    """Samples drawn from memory.

    Attributes
    ----------
    data
        An array ``[n, *shape]`` for each field. Values of different lengths are padded to the longest of the schema,
        and ``<field>.length``, int32 ``[n]``, holds their lengths.
    labels
        int64 ``[n]``; -1 for samples without one.
    ids
        int64 ``[n]``: those given to `add`, else the number of earlier samples.
    slots
        int64 ``[n]``: their slots of memory, which `feedback` reads.
    weights
        float64 ``[n]`` of a balanced batch: the mean of ``weights * loss`` is, on average, the mean loss of all samples
        in memory. None of any other: all are 1.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys import CarouselBuffer
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=4, schema={"x": ("float32", 2)}) as buffer:
    ...     _ = buffer.add({"x": np.ones((10, 2), np.float32)}, labels=[3] * 10)
    ...     batch = buffer.sample(2)
    >>> len(batch), batch["x"].shape, batch.labels.tolist(), sorted(batch.tensors())
    (2, (2, 2), [3, 3], ['ids', 'labels', 'x'])
    """

    data: Columns
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    weights: NDArray[np.float64] | None = None

    @classmethod
    def empty(cls, schema: Schema, count: int) -> "Batch":
        """Return a batch to be filled."""
        numbers = np.empty((3, count), np.int64)
        return cls(schema.empty(count), *numbers)

    @classmethod
    def over(cls, schema: Schema, out: Mapping[str, Any]) -> "Batch":
        """Return a batch to be filled that lies in memory of the caller's, such as pinned tensors.

        Parameters
        ----------
        schema
            Of the buffer.
        out
            As `tensors` names them: for every column an array or a torch tensor on the CPU ``[n, *shape]``, contiguous,
            of its dtype; ``labels`` and ``ids``, int64 ``[n]``, may be left out.

        Raises
        ------
        TypeError, ValueError
            For a column that is missing or unknown, or memory that does not fit it.
        """
        if not isinstance(out, Mapping):
            raise TypeError(f"out: expected a Batch, or a dict of arrays or tensors, got {type(out).__name__}")
        labels, ids = _own_names(schema.columns)
        columns = schema.columns | {name: _INT64 for name in (labels, ids) if name in out}
        if set(out) != set(columns):
            raise ValueError(f"out: expected the columns {list(schema.columns)}, got {list(out)}")
        arrays = {name: _as_array(name, column, out[name]) for name, column in columns.items()}
        count = min(map(len, arrays.values()))
        for name, array in arrays.items():
            if len(array) != count:
                raise ValueError(f"out[{name!r}]: has room for {len(array)} samples, another column for {count}")
        spare = np.empty((3, count), np.int64)
        return cls(arrays, arrays.pop(labels, spare[0]), arrays.pop(ids, spare[1]), spare[2])

    def tensors(self) -> dict[str, Any]:
        """Return the columns, ``labels`` and ``ids`` as torch tensors, in place.

        A field of that name keeps it; labels or ids are ``buffer.labels`` or ``buffer.ids`` then.

        Raises
        ------
        ImportError
            Without torch.
        TypeError
            For a column of a dtype that torch does not have.
        """
        torch = importlib.import_module("torch")
        own = dict(zip(_own_names(self.data), (self.labels, self.ids), strict=True))
        tensors: dict[str, Any] = {}
        for name, array in (self.data | own).items():
            try:
                tensors[name] = torch.from_numpy(array)
            except TypeError as error:
                raise TypeError(f"{name!r}: torch has no tensors of {array.dtype}") from error
        return tensors

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def samples(self) -> list[dict[str, Any]]:
        """Return the values of each sample, in place: by column, and ``labels`` and ``ids``, named as by `tensors`."""
        own = dict(zip(_own_names(self.data), (self.labels, self.ids), strict=True))
        columns = self.data | own
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def first(self, count: int) -> "Batch":
        """Return the first samples, in place."""
        data = {name: values[:count] for name, values in self.data.items()}
        weights = None if self.weights is None else self.weights[:count]
        return Batch(data, self.labels[:count], self.ids[:count], self.slots[:count], weights)

    def ragged(self, name: str) -> list[NDArray[Any]]:
        """Return the values of a field whose lengths differ, each cut to its length, in place."""
        lengths = self.data[f"{name}.length"].tolist()
        return [value[:length] for value, length in zip(self.data[name], lengths, strict=True)]

    def packed(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the values of a field whose lengths differ end to end, and where each begins, int64 ``[n + 1]``.

        For kernels that take sequences of any length; `memhier.recsys.replay.packing.pack_rows` makes rows of them.
        """
        values, lengths = self.data[name], self.data[f"{name}.length"].astype(np.int64)
        inside = np.arange(values.shape[1]) < lengths[:, None]
        return values[inside], np.concatenate([[0], np.cumsum(lengths)])


def room(schema: Schema, out: Batch | Mapping[str, Any] | None, n: int) -> Batch:
    """Return a batch of n samples to be filled: a new one, or the first of `out`."""
    if out is None:
        return Batch.empty(schema, n)
    batch = out if isinstance(out, Batch) else Batch.over(schema, out)
    if len(batch) < n:
        raise ValueError(f"out: holds {len(batch)} samples, expected at least n={n}")
    return batch if len(batch) == n else batch.first(n)


def _own_names(columns: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of labels and ids beside these columns: no name of a field has a dot."""
    labels, ids = (f"buffer.{name}" if name in columns else name for name in ("labels", "ids"))
    return labels, ids


def _as_array(name: str, column: Column, value: Any) -> NDArray[Any]:
    """Return an array or a tensor as an array, in place, or say why a column cannot be put there."""
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        if value.requires_grad or value.device.type != "cpu":
            raise ValueError(f"out[{name!r}]: expected a tensor on the CPU that needs no gradient, got one on "
                             f"{value.device}, requires_grad={value.requires_grad}")  # fmt: skip
        value = value.numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"out[{name!r}]: expected an array or a torch tensor, got {type(value).__name__}")
    if value.dtype != column.dtype:
        raise TypeError(f"out[{name!r}]: expected {column.dtype}, got {value.dtype}")
    if value.ndim == 0 or value.shape[1:] != column.shape:
        raise ValueError(f"out[{name!r}]: expected shape [n{''.join(f', {n}' for n in column.shape)}], got "
                         f"{list(value.shape)}")  # fmt: skip
    if not (value.flags.c_contiguous and value.flags.writeable):
        raise ValueError(f"out[{name!r}]: expected contiguous memory that can be written to")
    return value
