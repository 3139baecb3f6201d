"""Storage as a data set: mixed with another at a ratio, as a stream, and in and out of Hugging Face ``datasets``.

A `memhier.recsys.replay.StoredSamples` is a map-style data set by itself; `CarouselBuffer.dataset` makes one.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch.utils.data

from memhier.arguments import check_int, check_number
from memhier.lazy import extra_for
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.buffer import CarouselBuffer
from memhier.recsys.replay.stored import StoredSamples

__all__ = ["MapDataset", "MixedDataset", "ShuffledStream", "add_rows", "to_huggingface"]

_BLOCK = 256


class MapDataset(Protocol):
    """Items by number, 0 to len - 1; with a method ``__getitems__`` if it reads several at once.

    Examples
    --------
    >>> from memhier.recsys.replay.datasets import MixedDataset
    >>> class Squares:
    ...     def __len__(self):
    ...         return 4
    ...     def __getitem__(self, index):
    ...         return index**2
    >>> mixed = MixedDataset(["new"] * 4, Squares(), share=0.5)
    >>> [mixed[index] for index in range(4)], sorted(mixed[index] for index in range(4, 8))
    (['new', 'new', 'new', 'new'], [0, 1, 4, 9])
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def _items(dataset: MapDataset, indices: Sequence[int]) -> list[Any]:
    """Return several items, read at once where the data set can."""
    many = getattr(dataset, "__getitems__", None)
    return list(many(indices)) if many is not None else [dataset[index] for index in indices]


class _Epoch:
    """The number of a pass, 0 at first: the workers of a process share it with that, and other ranks have their own."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._number, self._pid = torch.zeros((), dtype=torch.int64), os.getpid()
        self._number.share_memory_()  # type: ignore[no-untyped-call]

    def __int__(self) -> int:
        return int(self._number)

    def set(self, epoch: int) -> None:
        """Start a pass of this process and of its workers."""
        epoch = check_int("epoch", epoch, 0, 2**40)
        if self._pid != os.getpid():  # a rank that was given the data set
            self._begin()
        self._number.fill_(epoch)


class MixedDataset(torch.utils.data.Dataset[Any]):
    """A data set with stored samples behind its own items, so many that they are a share of all.

    A loader that shuffles mixes them. Each pass replays other samples: those of pass *e* are the *e*-th part of the
    stored samples in an order that depends on the seed; once all had their turn, they come again in another order.

    Parameters
    ----------
    base
        The data set to train on.
    replayed
        Stored samples, or any map-style data set. Items of both have to fit together: give a `transform` for that.
    share
        Of the replayed samples among all, 0 to below 1.
    seed
        0 to 2**62.
    transform
        Makes an item of a replayed sample; None for the identity.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer
    >>> from memhier.recsys.replay.datasets import MixedDataset
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=4, schema={"x": "int64"}) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     _ = buffer.checkpoint()
    ...     with buffer.dataset() as stored:
    ...         mixed = MixedDataset([-1] * 9, stored, share=0.25, transform=lambda sample: int(sample["x"]))
    ...         len(mixed), sum(mixed[index] >= 0 for index in range(len(mixed)))
    (12, 3)
    """

    def __init__(
        self, base: MapDataset, replayed: MapDataset, share: float, seed: int = 0, transform: Any = None
    ) -> None:
        self._base = base
        self._replayed = replayed
        share = check_number("share", share, 0, 1)
        if share == 1:
            raise ValueError("share=1: expected less than 1; for stored samples alone, use these")
        self._seed = check_int("seed", seed, 0, 2**62)
        self._transform = transform
        self._count = round(len(base) * share / (1 - share)) if len(replayed) else 0
        self._epoch = _Epoch()
        self._chosen_for = -1

    def set_epoch(self, epoch: int) -> None:
        """Choose the samples that a pass replays; call it before the pass. Workers that stay alive follow."""
        self._epoch.set(epoch)

    def _choose(self, epoch: int) -> None:
        begin = epoch * self._count
        chosen: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        missing, size = self._count, len(self._replayed)
        while missing:
            turn, offset = divmod(begin, size)
            some = np.random.default_rng([self._seed, turn]).permutation(size)[offset : offset + missing]
            chosen.append(some)
            begin, missing = begin + len(some), missing - len(some)
        self._chosen: np.ndarray[Any, np.dtype[np.int64]] = np.concatenate([np.empty(0, np.int64), *chosen])
        self._chosen_for = epoch

    def __len__(self) -> int:
        return len(self._base) + self._count

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items; those that are stored are read at once."""
        own = len(self._base)
        if any(not 0 <= index < len(self) for index in indices):
            raise IndexError(f"there are {len(self)} items, 0 to {len(self) - 1}; got {[*indices]}")
        if (epoch := int(self._epoch)) != self._chosen_for:
            self._choose(epoch)
        replayed = iter(_items(self._replayed, [int(self._chosen[index - own]) for index in indices if index >= own]))
        base = iter(_items(self._base, [index for index in indices if index < own]))
        if self._transform is not None:
            replayed = map(self._transform, replayed)
        return [next(base) if index < own else next(replayed) for index in indices]


class ShuffledStream(torch.utils.data.IterableDataset[Any]):
    """The items of a map-style data set in shuffled order, as a stream; workers of a loader share them out.

    Parameters
    ----------
    dataset
        Such as stored samples, or a `MixedDataset`.
    seed
        0 to 2**62; with the number of the pass, it decides the order.

    Examples
    --------
    >>> from memhier.recsys.replay.datasets import ShuffledStream
    >>> stream = ShuffledStream(range(5), seed=1)
    >>> first, second = [*stream], [*stream]
    >>> sorted(first) == sorted(second) == [0, 1, 2, 3, 4], first == second
    (True, True)
    """

    def __init__(self, dataset: MapDataset, seed: int = 0) -> None:
        self._dataset = dataset
        self._seed = check_int("seed", seed, 0, 2**62)
        self._epoch = _Epoch()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of a pass; call it before the pass. Workers that stay alive follow."""
        self._epoch.set(epoch)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = np.random.default_rng([self._seed, int(self._epoch)]).permutation(len(self._dataset))[number::workers]
        for start in range(0, len(order), _BLOCK):
            yield from _items(self._dataset, order[start : start + _BLOCK].tolist())


def add_rows(buffer: CarouselBuffer, rows: Any, *, labels: str | None = None, batch: int = 1000) -> int:
    """Add the rows of a Hugging Face data set to a buffer, in order.

    Parameters
    ----------
    buffer
        Its fields are the columns to take; other columns are left out.
    rows
        A ``datasets.Dataset`` or ``datasets.IterableDataset``.
    labels
        The column of labels; None for none.
    batch
        Rows added together.

    Returns
    -------
    int
        How many rows came.

    Raises
    ------
    ValueError, TypeError
        For a column that is missing or does not fit its field. Earlier batches stay in the buffer.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys.replay import CarouselBuffer
    >>> from memhier.recsys.replay.datasets import add_rows
    >>> class Rows:  # as a Hugging Face data set has it
    ...     def iter(self, batch_size):
    ...         yield {"x": [1.0, 2.0], "y": ["a", "b"], "class": [3, 4]}
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=4, schema={"x": "float32"}) as buffer:
    ...     add_rows(buffer, Rows(), labels="class"), buffer.sample(2)["x"].sum().item()
    (2, 3.0)
    """
    names = [*buffer.schema.fields, *([] if labels is None else [labels])]
    count = 0
    for some in rows.iter(batch_size=check_int("batch", batch, 1, 2**31)):
        if missing := [name for name in names if name not in some]:
            raise ValueError(f"rows: have no columns {missing}; they have {[*some]}")
        columns = {name: _column(buffer, name, some[name]) for name in buffer.schema.fields}
        buffer.add(columns, labels=None if labels is None else np.asarray(some[labels], np.int64))
        count += len(some[names[0]])
    return count


def _column(buffer: CarouselBuffer, name: str, values: Any) -> Any:
    """Return a column of Python's numbers and lists as a field takes it."""
    field = buffer.schema.fields[name]
    if field.varies:
        return [value if isinstance(value, bytes) else np.asarray(value, field.dtype) for value in values]
    return np.asarray(values, field.dtype)


def to_huggingface(stored: StoredSamples) -> Any:
    """Return stored samples as a ``datasets.Dataset``, in DRAM: ``labels``, ``ids`` and a column for each field.

    A field of that name takes the place of labels or ids. Values of different lengths keep their own.

    Raises
    ------
    ImportError
        Without the package ``datasets``.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer
    >>> from memhier.recsys.replay.datasets import to_huggingface
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=4, schema={"x": "int64"}) as buffer:
    ...     _ = buffer.add({"x": np.arange(3)})
    ...     _ = buffer.checkpoint()
    ...     with buffer.dataset() as stored:
    ...         to_huggingface(stored)["x"][:]
    [0, 1, 2]
    """
    with extra_for("to_huggingface"):
        datasets = importlib.import_module("datasets")
    parts = [datasets.Dataset.from_dict(_columns(stored, batch)) for batch in stored.blocks()]
    if not parts:
        return datasets.Dataset.from_dict({name: [] for name in ("labels", "ids", *stored.schema.fields)})
    return datasets.concatenate_datasets(parts)


def _columns(stored: StoredSamples, batch: Batch) -> dict[str, Any]:
    fields = stored.schema.fields.items()
    columns = {name: batch.ragged(name) if field.varies else batch[name] for name, field in fields}
    return {"labels": batch.labels, "ids": batch.ids} | columns
