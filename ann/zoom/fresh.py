"""Vectors that were just added: in DRAM, searched by brute force, until they are many enough to be written."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.kernels import distances

__all__ = ["Fresh"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

_PAIRS = 1 << 16  # of query and vector, compared at a time


@dataclass(frozen=True, slots=True)
class Fresh:
    """Vectors with their ids, never changed: adding makes another.

    Attributes
    ----------
    vectors
        ``[n, d]`` of the index's dtype.
    ids
        int64 ``[n]``.
    attributes
        Values by name, each object ``[n]``, None for null; empty where the index has none.
    """

    vectors: npt.NDArray[Any]
    ids: Ints
    attributes: dict[str, npt.NDArray[Any]]

    @classmethod
    def empty(cls, dimension: int, dtype: np.dtype[Any]) -> Self:
        """Return one without vectors."""
        return cls(np.empty((0, dimension), dtype), np.empty(0, np.int64), {})

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; 64 for every attribute's value."""
        return self.vectors.nbytes + self.ids.nbytes + 64 * sum(map(len, self.attributes.values()))

    def without(self, ids: Ints) -> "Fresh":
        """Return the rest after removing `ids`."""
        kept = ~np.isin(self.ids, ids)
        return Fresh(self.vectors[kept], self.ids[kept], {name: each[kept] for name, each in self.attributes.items()})

    def joined(self, more: "Fresh", names: Iterable[str]) -> "Fresh":
        """Return these and those; `names` are the attributes of the index."""
        attributes = {}
        for name in names:
            both = [each.attributes.get(name, np.full(len(each), None, object)) for each in (self, more)]
            attributes[name] = np.concatenate(both)
        return Fresh(np.concatenate([self.vectors, more.vectors]), np.concatenate([self.ids, more.ids]), attributes)

    def nearest(
        self, queries: Floats, metric: str, k: int, selected: npt.NDArray[np.bool_] | None
    ) -> tuple[Ints, Floats]:
        """Return ids and distances of the `k` nearest that are selected, ``[q, min(k, n)]``; ties by id."""
        vectors, ids = self.vectors, self.ids
        if selected is not None:
            vectors, ids = vectors[selected], ids[selected]
        kept = min(k, len(ids))
        found, near = np.empty((len(queries), kept), np.int64), np.empty((len(queries), kept), np.float32)
        step = max(1, _PAIRS // max(1, len(ids)))
        for start in range(0, len(queries), step):
            part = queries[start : start + step]
            query_of_row = np.repeat(np.arange(len(part), dtype=np.int32), len(ids))
            rows = np.tile(vectors, (len(part), 1))
            away = distances(part, rows, metric, query_of_row=query_of_row).reshape(len(part), len(ids))
            if metric == "cosine":
                away = np.maximum(away, 0)
            names = np.broadcast_to(ids, away.shape)
            order = np.lexsort((names, away), axis=1)[:, :kept]
            found[start : start + step] = np.take_along_axis(names, order, 1)
            near[start : start + step] = np.take_along_axis(away, order, 1)
        return found, near
