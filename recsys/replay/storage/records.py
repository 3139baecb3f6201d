"""How the fields of a sample become the bytes of a record, and back: as they are, in fewer bits, or packed.

These are the codecs of storage alone: memory holds plain values, and the thread that reads a swap decodes them. A lossy
codec changes a sample before it first enters memory, so that the sample is the same before and after it was away. A
field that has a codec of its own comes here as bytes: see `memhier.recsys.replay.codecs.encoding`.

If every field takes the same number of bytes in every sample, a record is a row of a `RowLog`; else it is a record of
`Samples`: the lengths of the fields as uint32, then their bytes.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.recsys.replay.codecs.choice import field_codec, longest_of
from memhier.recsys.replay.codecs.fields import FieldCodec, RawCodec, RoundedCodec, as_bytes
from memhier.recsys.replay.schema import Column, Columns, Schema

__all__ = ["SampleCodec"]


class SampleCodec:
    """Packs the columns of samples that storage keeps together.

    Parameters
    ----------
    schema
        Of the samples. A value of a field of different lengths is cut to its own, unless a codec packs the field.
    names
        Of the fields.
    codecs
        By field; fields that are not named are written as they are.
    """

    def __init__(self, schema: Schema, names: Sequence[str], codecs: Mapping[str, str]) -> None:
        self._codecs: dict[str, FieldCodec] = {}
        self._varying: dict[str, Column] = {}
        self._longest: dict[str, int] = {}
        for name in names:
            field = schema.fields[name]
            for column_name, column in field.columns(name).items():
                codec = codecs.get(name, "none") if column_name == name else "none"
                self._codecs[column_name] = field_codec(codec, column)
            if field.varies:
                self._longest[f"{name}.length"] = field.longest
            if field.varies and codecs.get(name, "none") == "none":
                self._varying[name] = field.columns(name)[name]
        widths = [codec.row_bytes for name, codec in self._codecs.items() if name not in self._varying]
        fixed = not self._varying and None not in widths
        # Bytes of every record; None if they differ.
        self.row_bytes: int | None = sum(width or 0 for width in widths) if fixed else None
        # Whether a record is the bytes of one field.
        self.is_plain: bool = len(self._codecs) == 1 and all(
            isinstance(codec, RawCodec) for codec in self._codecs.values()
        )
        columns = schema.columns
        most = {name: longest_of(codec, columns[name]) for name, codec in self._codecs.items()}
        self.longest: int = 4 * len(self._codecs) + sum(most.values())
        # Bytes of an element of each field that is cut to its length.
        self._elements = {name: most[name] // schema.fields[name].longest for name in self._varying}
        means = {name: schema.means[name] * size for name, size in self._elements.items() if name in schema.means}
        # Of a record of mean lengths.
        self.mean: int = 4 * len(self._codecs) + sum((most | means).values())

    def in_place(self, out: Columns) -> NDArray[np.uint8] | None:
        """Return the field of plain records as rows to be filled; None for any other records."""
        return as_bytes(out[next(iter(self._codecs))]) if self.is_plain else None

    @property
    def lossless(self) -> bool:
        """Whether samples come back as they were."""
        return all(codec.lossless for codec in self._codecs.values())

    def check(self, columns: Columns, argument: str) -> None:
        """Raise ValueError for values, of some fields or all, that a codec cannot hold."""
        for name, codec in self._codecs.items():
            if not isinstance(codec, RoundedCodec) or name not in columns:
                continue  # the others hold everything
            try:
                codec.encode(columns[name])
            except ValueError as error:
                raise ValueError(f"{argument}[{name!r}]: {error}") from None

    def rows(self, columns: Columns) -> NDArray[np.uint8]:
        """Return samples as rows, uint8 [n, row_bytes]."""
        encoded = [np.asarray(codec.encode(columns[name])) for name, codec in self._codecs.items()]
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)

    def unpack_rows(self, rows: NDArray[np.uint8], out: Columns) -> None:
        """Fill columns from rows."""
        start = 0
        for name, codec in self._codecs.items():
            stop = start + (codec.row_bytes or 0)
            codec.decode(rows[:, start:stop], out[name])
            start = stop
        self._check_lengths(out)

    def most_bytes(self, columns: Columns) -> NDArray[np.int64]:
        """Return how many bytes the record of each sample takes at most, int64 [n]: by its own lengths."""
        rest = self.longest - sum(size * self._longest[f"{name}.length"] for name, size in self._elements.items())
        most: NDArray[np.int64] = np.full(len(next(iter(columns.values()))), rest)
        for name, size in self._elements.items():
            most += size * columns[f"{name}.length"].astype(np.int64)
        return most

    def records(self, columns: Columns) -> list[bytes]:
        """Return samples as records of their own lengths."""
        parts = [self._parts(name, codec, columns) for name, codec in self._codecs.items()]
        heads = np.array([[len(part) for part in column] for column in parts], "<u4").T
        return [head.tobytes() + b"".join(pieces) for head, pieces in zip(heads, zip(*parts, strict=True), strict=True)]

    def _parts(self, name: str, codec: FieldCodec, columns: Columns) -> list[bytes]:
        if name in self._varying:
            lengths = columns[f"{name}.length"].tolist()
            return [value[:length].tobytes() for value, length in zip(columns[name], lengths, strict=True)]
        encoded = codec.encode(columns[name])
        return encoded if isinstance(encoded, list) else [row.tobytes() for row in encoded]

    def unpack_records(self, records: Sequence[memoryview], out: Columns) -> None:
        """Fill columns from records.

        Raises
        ------
        CorruptionError
            If `records` cannot have made one.
        """
        head = 4 * len(self._codecs)
        pieces: list[list[memoryview]] = []
        for record in records:
            lengths = np.frombuffer(record[:head], "<u4").tolist() if len(record) >= head else []
            if len(lengths) != len(self._codecs) or sum(lengths) + head != len(record):
                raise CorruptionError(f"a record of {len(record)} bytes is not one of these fields")
            ends = np.cumsum([head, *lengths]).tolist()
            pieces.append([record[start:stop] for start, stop in pairwise(ends)])
        for index, (name, codec) in enumerate(self._codecs.items()):
            column = [piece[index] for piece in pieces]
            if name in self._varying:
                _fill(column, out[name])
            elif isinstance(codec, RawCodec) or codec.row_bytes is not None:
                codec.decode(_stacked(column, codec.row_bytes or 0), out[name])
            else:
                codec.decode(column, out[name])

        self._check_lengths(out)

    def _check_lengths(self, out: Columns) -> None:
        for name, longest in self._longest.items():
            if not ((out[name] >= 0) & (out[name] <= longest)).all():
                raise CorruptionError(f"{name}: expected 0 to {longest}, got {out[name].tolist()}")

    def round_trip(self, columns: Columns) -> Columns:
        """Return samples as they come back from storage."""
        if self.lossless:
            return columns
        back = dict(columns)
        for name, codec in self._codecs.items():
            if not codec.lossless and name in columns:
                back[name] = np.empty_like(columns[name], order="C")
                data: Any = codec.encode(columns[name])
                codec.decode([memoryview(record) for record in data] if isinstance(data, list) else data, back[name])
        return back


def _fill(pieces: list[memoryview], out: NDArray[Any]) -> None:
    flat = as_bytes(out)
    flat[:] = 0
    for row, piece in zip(flat, pieces, strict=True):
        if len(piece) > len(row):
            raise CorruptionError(f"a value of {len(piece)} bytes, expected at most {len(row)}")
        row[: len(piece)] = np.frombuffer(piece, np.uint8)


def _stacked(pieces: list[memoryview], width: int) -> NDArray[np.uint8]:
    if any(len(piece) != width for piece in pieces):
        raise CorruptionError(f"a value that has not the {width} bytes of its field")
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(pieces), width)
