"""Vectors just added: they wait in DRAM, searched by brute force, until there are enough to write."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.ids.texts import Texts
from memhier.io.kernels import distances

__all__ = ["Fresh", "fresh_row_bytes", "value_bytes"]

_VALUE_BYTES = 64  # of an attribute, as a Python object
_RECORD_BYTES = 48  # of a record of documents, beside its own bytes

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Immutable vectors with their ids: an addition makes another object.

    Attributes
    ----------
    vectors
        ``[n, d]`` of the index's dtype.
    ids
        int64 ``[n]``.
    attributes
        Values by name, each object ``[n]``, None for null, lists as sequences; empty where the index has none.
    texts
        The strings that `ids` are hashes of; None where the index has integers.
    records
        The record of each vector's documents, bytes as objects ``[n]``; None where no vector has any.
    record_bytes
        Their bytes in all.
    value_bytes
        Those of the values of attributes beyond 64 for each; see :func:`value_bytes`.
    """

    vectors: npt.NDArray[Any]
    ids: Ints
    attributes: dict[str, npt.NDArray[Any]]
    texts: Texts | None = None
    records: npt.NDArray[np.object_] | None = None
    record_bytes: int = 0
    value_bytes: int = 0

    @classmethod
    def empty(cls, dimension: int, dtype: np.dtype[Any], texts: bool = False) -> Self:
        """Return no vectors; `texts` tells whether ids are strings."""
        return cls(np.empty((0, dimension), dtype), np.empty(0, np.int64), {}, Texts.none() if texts else None)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        held = self.vectors.nbytes + self.ids.nbytes + _VALUE_BYTES * sum(map(len, self.attributes.values()))
        held += self.value_bytes
        held += 0 if self.records is None else self.record_bytes + _RECORD_BYTES * len(self)
        return held + (0 if self.texts is None else self.texts.memory_bytes)

    def emptied(self) -> "Fresh":
        """Return the same without vectors."""
        return Fresh.empty(self.vectors.shape[1], self.vectors.dtype, self.texts is not None)

    def without(self, ids: Ints) -> "Fresh":
        """Return the rest after removing `ids`."""
        kept = ~np.isin(self.ids, ids)
        records = None if self.records is None else self.records[kept]
        attributes = {name: each[kept] for name, each in self.attributes.items()}
        texts = None if self.texts is None else self.texts.take(kept)
        beyond = int(value_bytes(attributes, int(kept.sum())).sum())
        return Fresh(self.vectors[kept], self.ids[kept], attributes, texts, records, _sum_of(records), beyond)

    def with_records(self, records: Sequence[bytes]) -> "Fresh":
        """Return the same vectors with the records of their documents."""
        made = np.empty(len(records), np.object_)
        made[:] = records
        return replace(self, records=made, record_bytes=_sum_of(made))

    def changed(self, name: str, rows: Ints, values: npt.NDArray[np.object_]) -> "Fresh":
        """Return the same with other values of an attribute in some rows."""
        column = self.attributes[name].copy()
        before = value_bytes({name: column[rows]}, len(rows))
        column[rows] = values
        more = int((value_bytes({name: values}, len(rows)) - before).sum())
        return replace(self, attributes=self.attributes | {name: column}, value_bytes=self.value_bytes + more)

    def widened(self, names: Collection[str]) -> "Fresh":
        """Return the same with the attributes of these names, null where they were unknown."""
        empty = np.full(len(self), None, object)
        return replace(self, attributes={name: self.attributes.get(name, empty) for name in names})

    def joined(self, more: "Fresh", names: Collection[str]) -> "Fresh":
        """Return both together; `names` are the attributes of the index."""
        both = [each.widened(names).attributes for each in (self, more)]
        attributes = {name: np.concatenate([each[name] for each in both]) for name in names}
        texts = None
        if self.texts is not None and more.texts is not None:
            texts = Texts.joined([self.texts, more.texts])
        records = None
        if self.records is not None or more.records is not None:
            every = (np.full(len(each), b"", object) if each.records is None else each.records for each in (self, more))
            records = np.concatenate([*every])
        vectors, ids = np.concatenate([self.vectors, more.vectors]), np.concatenate([self.ids, more.ids])
        sizes = self.record_bytes + more.record_bytes, self.value_bytes + more.value_bytes
        return Fresh(vectors, ids, attributes, texts, records, *sizes)

    def nearest(
        self, queries: Floats, metric: str, k: int, selected: npt.NDArray[np.bool_] | None
    ) -> tuple[Ints, Floats]:
        """Return ids and distances of the `k` nearest that are selected, ``[q, min(k, n)]``; ties by id."""
        ids = self.ids if selected is None else self.ids[selected]
        kept = min(k, len(ids))
        found, near = np.empty((len(queries), kept), np.int64), np.empty((len(queries), kept), np.float32)
        for row, query in enumerate(queries if kept else ()):
            away = distances(query, self.vectors, metric)  # to all, as a selection would copy vectors
            away = away if selected is None else away[selected]
            if metric == "cosine":
                np.maximum(away, 0, out=away)
            rows = np.flatnonzero(away <= np.partition(away, kept - 1)[kept - 1])
            order = rows[np.lexsort((ids[rows], away[rows]))[:kept]]
            found[row], near[row] = ids[order], away[order]
        return found, near


def fresh_row_bytes(row_bytes: int, attributes: Collection[str], *texts: Texts | None, documents: bool = False) -> int:
    """Return the DRAM of a vector of `row_bytes` that waits with its id, at most as long as the longest of `texts`.

    On top come the bytes of its record, with `documents`, and those of :func:`value_bytes`.
    """
    text_bytes = max([0 if each is None else 8 + each.longest for each in texts])
    return row_bytes + 8 + _VALUE_BYTES * len(attributes) + text_bytes + _RECORD_BYTES * documents


def value_bytes(attributes: Mapping[str, npt.NDArray[Any]], count: int) -> Ints:
    """Return the DRAM of the values of each row beyond 64 bytes for each value, int64 ``[count]``."""
    beyond = np.zeros(count, np.int64)
    for values in attributes.values():
        for row, value in enumerate(values):
            if isinstance(value, str | list | tuple):
                items = () if isinstance(value, str) else value
                beyond[row] += max(0, sys.getsizeof(value) + sum(map(sys.getsizeof, items)) - _VALUE_BYTES)
    return beyond


def _sum_of(records: npt.NDArray[np.object_] | None) -> int:
    return 0 if records is None else sum(map(len, records.tolist()))
