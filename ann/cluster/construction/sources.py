"""Sources of a build: a sample of the vectors, then all of them, dealt to the builders of shards."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.construction.dealing import Builders, Dealer
from memhier.ann.cluster.construction.files import file_source
from memhier.ann.cluster.construction.tables import TableColumns, TableSource
from memhier.ann.cluster.given import Columns
from memhier.ann.zoom.filters.attributes import merge_schema
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.payload.given import GivenDocuments
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.storage.ids import IdKind, Ids, as_ids, refuse_clashes

__all__ = ["LocalSource", "Source", "source_of"]


class Source(Protocol):
    """Vectors with their ids and fields, for a build.

    Attributes
    ----------
    dtype, dimension
        Of the vectors as stored.
    id_kind, schema
        Of the ids; types of attributes by name.
    next_id
        The next free id; known once the vectors were dealt.
    """

    dtype: str
    dimension: int
    id_kind: IdKind
    schema: dict[str, Any]
    next_id: int

    def sample(self, count: int, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return at most `count` vectors and their ids; equal ones for an equal seed."""

    def deal(self, cells: Cells, builders: Builders) -> npt.NDArray[np.int64]:
        """Send all vectors to the builders of their shards; return how many each shard has."""


class LocalSource:
    """Vectors that this process reads. Ids and attributes lie in its DRAM."""

    def __init__(self, vectors: VectorSource, ids: Ids | None, attributes: Any, documents: Any) -> None:
        count = vectors.count
        if ids is not None and len(ids) != count:
            raise ValueError(f"ids has {len(ids)} entries for {count} vectors: expected one for each")
        self._vectors = vectors
        self._ids = np.arange(count, dtype=np.int64) if ids is None else ids.values()
        self.dtype: str = vectors.dtype.name
        self.dimension: int = vectors.dimension
        self.id_kind: IdKind = "int64" if ids is None or ids.texts is None else "str"
        self.next_id: int = 0 if self.id_kind == "str" else int(self._ids.max(initial=-1)) + 1
        self._columns: Columns = {}
        self.schema: dict[str, Any] = {}
        if attributes is not None:
            given = as_columns(attributes, count)
            self.schema = merge_schema({}, given, count)
            self._columns = as_objects(given, self.schema)
        self._documents = None if documents is None else GivenDocuments(documents)
        if self._documents is not None:
            self._documents.check_length(count)

    def sample(self, count: int, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return random vectors and their ids."""
        every = self._vectors.count
        rows = np.sort(np.random.default_rng(seed).choice(every, min(every, count), replace=False))
        return self._vectors.take(rows), self._ids[rows]

    def deal(self, cells: Cells, builders: Builders) -> npt.NDArray[np.int64]:
        """Send all vectors to their shards."""
        dealer = Dealer(0, cells, builders)
        for start, block in self._vectors.blocks():
            stop = start + len(block)
            rows = None if self._documents is None else self._documents.take(len(block))
            columns = {name: values[start:stop] for name, values in self._columns.items()}
            dealer.send(block, self._ids[start:stop], columns, rows)
        if self._documents is not None:
            self._documents.check_ended()
        return dealer.finish()


@contextmanager
def source_of(vectors: Any, ids: Any, attributes: Any, documents: Any, column: str | None) -> Iterator[Source]:
    """Give the source of a build; see :meth:`ShardedIndex.build`."""
    files = isinstance(vectors, list | tuple) and len(vectors) > 0
    files = files and all(isinstance(each, str | os.PathLike) for each in vectors)
    if not files and not type(vectors).__module__.startswith("ray.data"):
        if column is not None:
            raise ValueError(f"column={column!r}: is for a Ray Dataset and for lists of files")
        names = None if ids is None else as_ids(ids, None)
        if names is not None:
            refuse_clashes(names)
        with tempfile.TemporaryDirectory() as scratch, open_source(vectors, Path(scratch)) as source:
            yield LocalSource(source, names, attributes, documents)
        return
    if ids is not None and not isinstance(ids, str):
        raise TypeError(f"ids={type(ids).__name__}: expected the name of a column beside files and Ray Datasets")
    named = _names("attributes", attributes), _names("documents", documents)
    if files:
        yield file_source(vectors, column, ids, *named)
        return
    if ids is None:
        raise ValueError("ids=None: expected the name of a column, as rows of a Ray Dataset have no lasting order")
    yield TableSource(vectors, TableColumns(column or "vectors", ids, *named))


def _names(argument: str, value: Any) -> list[str]:
    """Return the names of columns given."""
    if value is None:
        return []
    if isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{argument}={value!r}: expected a list of names of columns beside files and Ray Datasets")
    return [*value]
