"""Shard: an index that is open in an actor, one replica of one shard."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.construction.dealing import Builders, Dealer, sampled
from memhier.ann.cluster.given import Columns, Rows, as_values, typed
from memhier.ann.cluster.nodes import shard_folder
from memhier.ann.zoom import Explanation, RangeResult, SearchResult, ZoomIndex
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.storage.ids import as_ids
from memhier.store.transfer import Transfer

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

    def process(self) -> int:
        """Return the number of the actor's process."""
        return os.getpid()

    def close(self) -> None:
        """Close the index; changes that were not committed are gone."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def facts(self) -> dict[str, Any]:
        """Return :meth:`ZoomIndex.stats`, the types of ``fields``, and the ``process``."""
        return self._index.stats() | {"fields": self._index.fields, "process": os.getpid()}

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

    def explain(self, query: npt.NDArray[np.float32], k: int, options: Mapping[str, Any]) -> Explanation:
        """Search for one query and tell the steps."""
        return self._index.explain(query, k, **options)

    def nearest(self, queries: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return ids and distances of the true neighbours of queries, ``[q, k]``."""
        found = self._index.search(queries, k, recall=1.0)
        return found.ids, found.distances

    def tune(self, queries: npt.NDArray[np.float32]) -> None:
        """Calibrate recall for queries like these, if there are vectors."""
        if len(self._index):
            self._index.tune(queries)

    def sample(self, share: float, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return a share of the vectors, and their ids."""
        about = self._index.stats()
        vectors = [np.empty((0, about["dimension"]), about["dtype"])]
        ids: list[npt.NDArray[Any]] = [np.empty(0, object if about["id_kind"] == "str" else np.int64)]
        for names, block in self._index.blocks():
            rows = sampled(as_ids(names, None), share, seed)
            vectors.append(block[rows])
            ids.append(names[rows])
        return np.concatenate(vectors), np.concatenate(ids)

    def deal(self, cells: Cells, builders: Builders, schema: Mapping[str, str]) -> npt.NDArray[np.int64]:
        """Send all vectors with their fields to the builders of other shards; return how many each has."""
        dealer = Dealer(self._folder.name, cells, builders)
        texts = [name for name, kind in self._index.fields.items() if kind == "document"]
        for ids, block in self._index.blocks():
            fields = self._index.fetch(ids)
            rows = [dict(zip(texts, row, strict=True)) for row in zip(*(fields[name] for name in texts), strict=True)]
            dealer.send(block, ids, as_values(fields, schema, len(ids)), rows or None)
        return dealer.finish()

    def contains(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which ids are here."""
        return self._index.contains(ids)

    def ids(self, where: str | None) -> npt.NDArray[Any]:
        """Return all ids, or those of the vectors that fulfil a filter."""
        none = np.empty(0, object if self._index.stats()["id_kind"] == "str" else np.int64)
        return np.concatenate([none, *self._index.ids(where)])

    def fetch(self, ids: npt.NDArray[Any], fields: Sequence[str]) -> Columns:
        """Return fields of ids."""
        return self._index.fetch(ids, self._known(fields))

    def reconstruct(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the vectors of ids."""
        return self._index.reconstruct(ids)

    def add(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], attributes: Columns, documents: Rows | None,
        schema: Schema,
    ) -> None:  # fmt: skip
        """Add vectors. Attributes are known from now on also where none of the vectors has a value."""
        columns = {name: typed(name, attributes[name], kind) for name, kind in schema.items() if name in attributes}
        self._index.add(vectors, ids, columns or None, documents if len(vectors) else None)

    def remove(self, ids: npt.NDArray[Any]) -> None:
        """Remove vectors."""
        self._index.remove(ids)

    def remove_selected(self, where: str) -> int:
        """Remove the vectors that fulfil a filter, and return their number."""
        return self._index.remove(where=where)

    def update(
        self, ids: npt.NDArray[Any], vectors: npt.NDArray[Any] | None, attributes: Rows | None, documents: Rows | None
    ) -> None:
        """Replace the vectors and the fields that are given."""
        self._index.update(ids, vectors, attributes, documents)

    def update_selected(self, where: str, attributes: Columns, schema: Schema) -> int:
        """Give the vectors that fulfil a filter one value of each attribute, and return their number."""
        values = {name: attributes[name].tolist()[0] for name in schema}
        return self._index.update(where=where, attributes=values)

    def apply(self, changes: Sequence[tuple[str, tuple[Any, ...]]]) -> tuple[int, Exception | None]:
        """Make changes in their order, each the name of a method and its arguments; return how many were made.

        The second value is the error of the one that was refused.
        """
        for number, (method, arguments) in enumerate(changes):
            try:
                getattr(self, method)(*arguments)
            except NotOpenError:
                raise
            except Exception as error:
                return number, error
        return len(changes), None

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

    def note(self, facts: Mapping[str, Any]) -> None:
        """Note facts of the whole, such as the last commit: on shard 0 this makes it."""
        replace(ClusterMap.read(self._folder), **facts).renew(self._folder)

    def noted(self) -> ClusterMap:
        """Return the facts of the whole as they were noted last."""
        return ClusterMap.read(self._folder)

    def push(self, url: str, number: int) -> tuple[int, int, Transfer]:
        """Back the last commit up; return the number of the far folder, the commit, and the work.

        The commits of two replicas do not follow each other as generations of a store. A folder that holds those of
        another replica is left for the next.
        """
        while True:
            try:
                return number, self._index.mark, self._index.push(f"{url}-{number}")
            except FileExistsError:
                number += 1

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
