"""Shard: an index that is open in an actor, one replica of one shard."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.given import Columns, Rows, typed
from memhier.ann.cluster.nodes import shard_folder
from memhier.ann.zoom import RangeResult, SearchResult, ZoomIndex

__all__ = ["NotOpenError", "Shard"]


class NotOpenError(Exception):
    """The actor was started anew since the shard was opened in it."""


class Shard:
    """One replica of one shard. An actor that was started anew has to be opened again.

    Parameters
    ----------
    path, shard, replica
        See :func:`shard_folder`.
    """

    def __init__(self, path: str, shard: int, replica: int) -> None:
        self._folder = shard_folder(path, shard, replica)
        self._opened: ZoomIndex | None = None

    def open(self, epoch: int, writable: bool) -> int:
        """Open the index at the last commit up to an epoch; return the epoch that it is at."""
        if self._opened is None:
            place = self._folder / "index"
            decide = (lambda mark: mark <= epoch) if writable else None
            self._opened = ZoomIndex.open(place, writable=writable, settle=decide)
        return self._opened.mark

    def close(self) -> None:
        """Close the index; changes that were not committed are gone."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def facts(self) -> dict[str, Any]:
        """Return :meth:`ZoomIndex.stats`, with the types of ``fields``."""
        return self._index.stats() | {"fields": self._index.fields}

    def search(
        self, queries: npt.NDArray[np.float32], k: int, fields: Sequence[str], options: Mapping[str, Any]
    ) -> SearchResult:
        """Search the index; of the fields return those that it has."""
        return self._index.search(queries, k, fields=self._known(fields), **options)

    def range_search(
        self, queries: npt.NDArray[np.float32], radius: float, fields: Sequence[str], options: Mapping[str, Any]
    ) -> RangeResult:
        """Search the index within a radius."""
        return self._index.range_search(queries, radius, fields=self._known(fields), **options)

    def contains(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which ids are here."""
        return self._index.contains(ids)

    def fetch(self, ids: npt.NDArray[Any], fields: Sequence[str]) -> Columns:
        """Return fields of ids."""
        return self._index.fetch(ids, self._known(fields))

    def reconstruct(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the vectors of ids."""
        return self._index.reconstruct(ids)

    def add(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], attributes: Columns, documents: Rows | None,
        schema: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Add vectors. Attributes are known from now on also where none of the vectors has a value."""
        columns = {name: typed(attributes[name], kind) for name, kind in schema.items() if name in attributes}
        self._index.add(vectors, ids, columns or None, documents if len(vectors) else None)

    def remove(self, ids: npt.NDArray[Any]) -> None:
        """Remove vectors."""
        self._index.remove(ids)

    def update(
        self, ids: npt.NDArray[Any], vectors: npt.NDArray[Any], attributes: Rows | None, documents: Rows | None
    ) -> None:
        """Replace vectors, and the fields that are given."""
        self._index.update(ids, vectors, attributes, documents)

    def prepare(self, mark: int) -> None:
        """Take the first half of a commit."""
        self._index.prepare(mark)

    def publish(self) -> None:
        """Take the second half of a commit; join the parts that earlier ones left."""
        self._index.publish()
        self._index.commit()

    def withdraw(self) -> None:
        """Take the first half of a commit back, if it was taken."""
        self._index.withdraw()

    def note(self, epoch: int, next_id: int) -> None:
        """Note the last commit over all shards, and the next free id: on shard 0 this makes the commit."""
        replace(ClusterMap.read(self._folder), epoch=epoch, next_id=next_id).renew(self._folder)

    def lay_out(self) -> list[tuple[str, int]]:
        """Copy the last commit for :meth:`read`; return the names of its files, and their bytes."""
        place = self._out
        shutil.rmtree(place, ignore_errors=True)
        self._index.save_to(place)
        files = [each for each in sorted(place.rglob("*")) if each.is_file()]
        return [(str(each.relative_to(place)), each.stat().st_size) for each in files]

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file laid out."""
        with (self._out / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def put_away(self) -> None:
        """Remove the files laid out."""
        shutil.rmtree(self._out, ignore_errors=True)

    def check(self) -> list[str]:
        """Return every inconsistency of the index."""
        return self._index.check()

    @property
    def _out(self) -> Path:
        return self._folder / "out"

    @property
    def _index(self) -> ZoomIndex:
        if self._opened is None:
            raise NotOpenError
        return self._opened

    def _known(self, fields: Sequence[str]) -> list[str]:
        every = self._index.fields
        return [name for name in fields if name in every]
