"""The fields of vectors found: their attributes and documents, read together at the end of a search."""

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import null_values
from memhier.ann.zoom.filters.conditions import is_list
from memhier.ann.zoom.payload.record import decode, unpack
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.storage.documents import records_at
from memhier.ann.zoom.storage.ids import Located, Sightings, locate_all, with_repeats
from memhier.ann.zoom.storage.rows import RowState
from memhier.io.ranges import CountedReads, Reading, read_together
from memhier.io.reader import Reader

__all__ = ["FieldReader", "chosen_fields", "fields_of_ids"]

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
Ints: TypeAlias = npt.NDArray[np.int64]


def chosen_fields(state: RowState, fields: bool | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the fields asked for: attributes, then documents, or those named.

    Raises
    ------
    ValueError
        For a name that is none of a field.
    """
    every = (*state.schema, *state.documents)
    if not fields:
        return ()
    if fields is True:
        return every
    for name in fields:
        if name not in every:
            have = ", ".join(map(repr, every)) or "none: give attributes= or documents= to build() or add()"
            raise ValueError(f"fields holds {name!r}: expected fields of this index, which has {have}")
    return tuple(dict.fromkeys(fields))


class FieldReader:
    """Reads the fields of vectors of one snapshot.

    Parameters
    ----------
    state
        The snapshot.
    reader
        Of its files.
    names
        Of the fields.

    Attributes
    ----------
    reads
        The work done.
    """

    def __init__(self, state: RowState, reader: Reader, names: Sequence[str]) -> None:
        self._state, self._names = state, names
        self.reads: CountedReads = CountedReads(reader)

    def found(self, ids: Ints, sightings: Sightings) -> Columns:
        """Return the fields of vectors that a search found, each of the shape of `ids`, null where these are -1."""
        if not self._names:
            return {}
        wanted, inverse = np.unique(ids, return_inverse=True)
        found = self.of(sightings.places(wanted), inverse.reshape(-1))  # without a place, -1 has null fields
        return {name: column.reshape(ids.shape) for name, column in found.items()}

    def of(self, places: Located, rows: Ints) -> Columns:
        """Return the fields of rows of different places, in any order and with repetitions."""
        return {name: _repeated(column, rows) for name, column in self._at(places).items()}

    def _at(self, places: Located) -> Columns:
        """Return the fields at different places, ``[n]`` each, null where there is no place."""
        state, count = self._state, len(places.positions)
        columns: Columns = {}
        for name in self._names:
            kind = state.schema.get(name)
            columns[name] = np.full(count, None, object) if kind is None else null_values(kind, count)
        attributes = [name for name in self._names if name in state.schema]
        if attributes:
            self._attributes(places, {name: columns[name] for name in attributes})
        documents = {state.documents.index(name): columns[name] for name in self._names if name in state.documents}
        if documents:
            for place, record, path in records_at(state.parts, state.fresh, places, state.scan_bytes, self.reads):
                for number, document in unpack(record, path).items():
                    if number in documents:
                        documents[number][place] = decode(document, path)
        return columns

    def _attributes(self, places: Located, columns: Columns) -> None:
        """Fill columns of attributes."""
        fresh, schema = self._state.fresh, self._state.schema
        for place in np.flatnonzero(places.fresh >= 0).tolist():
            for name, column in columns.items():
                values = fresh.attributes.get(name)
                if values is not None and (value := values[places.fresh[place]]) is not None:
                    column[place] = list(value) if is_list(schema[name]) else value
        numbers, rows = split_positions(places.positions)
        readings: dict[tuple[int, str], Reading[npt.NDArray[Any]]] = {}
        here: dict[int, Ints] = {}
        for which, part in enumerate(self._state.parts):
            here[which] = np.flatnonzero((numbers == which) & (places.positions >= 0))
            if part.attributes is not None and len(here[which]):
                found = part.attributes.readings(rows[here[which]], list(columns))
                readings |= {(which, name): reading for name, reading in found.items()}
        for (which, name), column in read_together(self.reads, readings).items():
            columns[name][here[which]] = column


def fields_of_ids(state: RowState, reader: Reader, ids: object, fields: bool | Sequence[str] | None) -> Columns:
    """Return the fields of ids, which may repeat, in their order; see :meth:`memhier.ann.ZoomIndex.fetch`."""
    wanted, inverse = with_repeats(ids, state.id_kind)
    of = FieldReader(state, reader, chosen_fields(state, fields))
    return of.of(locate_all(state.parts, state.fresh, wanted), inverse)


def _repeated(column: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
    """Return rows of a column, which may repeat; no two values share a list or dict."""
    made: npt.NDArray[Any] = column[rows]
    if column.dtype == object and len(made) > len(column):
        seen: set[int] = set()
        for row, value in enumerate(made):
            if isinstance(value, list | dict):
                if id(value) in seen:
                    made[row] = copy.deepcopy(value)
                seen.add(id(value))
    return made
