"""How the fields of a sample become the bytes of a record, and back: as they are, in fewer bits, or packed.

Memory always holds plain values, so that training never decodes: the thread that reads a swap decodes it. A lossy codec
changes a sample before it first enters memory, so that the sample is the same before and after it was away.

If every field takes the same number of bytes in every sample, a record is a row of a `RowLog`; else it is a record of
`Samples`: the lengths of the fields as uint32, then their bytes.
"""

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memhier.codecs import get_bytes_codec, get_codec
from memhier.errors import CorruptionError
from memhier.lazy import extra_for
from memhier.recsys.replay.schema import Column, Columns, Schema

__all__ = ["FieldCodec", "ImageCodec", "PackedCodec", "RawCodec", "RoundedCodec", "SampleCodec", "field_codec"]

Encoded = NDArray[np.uint8] | list[bytes]
"""uint8 ``[n, row_bytes]``; or n records, if their lengths differ."""


class FieldCodec(Protocol):
    """Turns the values of a column into bytes and back; stateless, so that several threads use it.

    Attributes
    ----------
    name
        Its name for `field_codec`.
    lossless
        Whether values come back unchanged.
    row_bytes
        Bytes of an encoded value; None if they differ.
    """

    name: str
    lossless: bool
    row_bytes: int | None

    def encode(self, values: NDArray[Any]) -> Encoded:
        """Return values ``[n, *shape]`` as bytes."""

    def decode(self, data: NDArray[np.uint8] | Sequence[memoryview], out: NDArray[Any]) -> None:
        """Fill `out`, ``[n, *shape]``, C-contiguous.

        Raises
        ------
        CorruptionError
            If :meth:`encode` cannot have returned the bytes.
        """


class RawCodec:
    """Values as they are."""

    name = "none"
    lossless = True

    def __init__(self, column: Column) -> None:
        self.row_bytes: int | None = column.bytes

    def encode(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        return _as_bytes(np.ascontiguousarray(values))

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        _as_bytes(out)[:] = data


class RoundedCodec:
    """float32 values in 16 or 8 bits; see `memhier.codecs.Codec` for the error of each."""

    lossless = False

    def __init__(self, name: str, column: Column) -> None:
        self._codec = get_codec(name)
        self.name = name
        self._dim = max(1, int(np.prod(column.shape, dtype=np.int64)))
        self.row_bytes: int | None = self._codec.encoded_bytes(column.dtype, self._dim)

    def encode(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        return self._codec.encode(np.ascontiguousarray(values).reshape(len(values), self._dim))

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        self._codec.decode(np.ascontiguousarray(data), out=out.reshape(len(out), self._dim))


class PackedCodec:
    """Values of any type packed by zstd: for text, tables and masks; it gains nothing on photographs."""

    name = "zstd"
    lossless = True
    row_bytes: int | None = None

    def __init__(self, column: Column) -> None:
        self._codec = get_bytes_codec("zstd")
        self._bytes = column.bytes

    def encode(self, values: NDArray[Any]) -> list[bytes]:
        return [self._codec.encode(np.ascontiguousarray(value).reshape(-1).view(np.uint8)) for value in values]

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        for row, record in zip(_as_bytes(out), data, strict=True):
            value = self._codec.decode(record, self._bytes)
            if len(value) != self._bytes:
                raise CorruptionError(f"zstd: a value of {len(value)} bytes, expected {self._bytes}")
            row[:] = np.frombuffer(value, np.uint8)


class ImageCodec:
    """uint8 images packed as JPEG or WebP by Pillow; lossy.

    Parameters
    ----------
    name
        ``"jpeg"`` or ``"webp"``, with a quality after a colon: ``"jpeg:90"``. 90 by default.
    column
        Of shape ``[height, width]``, ``[height, width, 3]`` or ``[3, height, width]``; 1 for 3 is possible.
    """

    lossless = False
    row_bytes: int | None = None

    def __init__(self, name: str, column: Column) -> None:
        kind, _, quality = name.partition(":")
        if not (quality or "90").isdigit() or not 1 <= int(quality or 90) <= 100:
            raise ValueError(f"codec={name!r}: expected a quality of 1 to 100, such as '{kind}:90'")
        with extra_for(f"codec={name!r}"):
            self._image: Any = importlib.import_module("PIL.Image")
        self.name = name
        self._format, self._quality = kind.upper(), int(quality or 90)
        shape = column.shape
        plain, last, first = len(shape) == 2, len(shape) == 3 and shape[-1] in (1, 3), len(shape) == 3
        if column.dtype != np.uint8 or not (plain or last or (first and shape[0] in (1, 3))):
            raise ValueError(
                f"codec={name!r}: expected uint8 of shape [height, width], [height, width, 1 or 3] or "
                f"[1 or 3, height, width], got {column.dtype}{list(shape)}"
            )
        self._first = not plain and not last
        try:
            # Formats have limits of their own: WebP takes 16,383 pixels a side, and not every Pillow has it.
            self.encode(np.zeros((1, *shape), np.uint8))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"codec={name!r}: Pillow cannot pack images of shape {list(shape)}: {error}") from error

    def encode(self, values: NDArray[Any]) -> list[bytes]:
        return [self._encode_one(value) for value in self._channels_last(values)]

    def _encode_one(self, value: NDArray[np.uint8]) -> bytes:
        packed = io.BytesIO()
        plain = value[..., 0] if value.shape[2:] == (1,) else value
        self._image.fromarray(np.ascontiguousarray(plain)).save(packed, self._format, quality=self._quality)
        return packed.getvalue()

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        for target, record in zip(self._channels_last(out), data, strict=True):
            try:
                with self._image.open(io.BytesIO(record)) as image:
                    mode = "RGB" if target.shape[2:] == (3,) else "L"
                    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
                target[:] = pixels.reshape(target.shape)
            except (OSError, ValueError, SyntaxError) as error:
                raise CorruptionError(f"{self._format}: {error}") from error

    def _channels_last(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.moveaxis(values, 1, -1) if self._first else values


def field_codec(name: str, column: Column) -> FieldCodec:
    """Return the codec of that name for a column.

    Parameters
    ----------
    name
        ``"none"``, ``"fp16"``, ``"bf16"`` or ``"int8"`` (of float32), ``"zstd"``, ``"jpeg"`` or ``"webp"``, the last
        two also with a quality: ``"jpeg:75"``.

    Raises
    ------
    ValueError, TypeError
        For any other name, or a column that it cannot hold.
    ImportError
        If the package that it needs is missing.
    """
    kind = name.partition(":")[0] if isinstance(name, str) else name
    if kind in ("jpeg", "webp"):
        return ImageCodec(name, column)
    if name == "none":
        return RawCodec(column)
    if name == "zstd":
        return PackedCodec(column)
    if name in ("fp16", "bf16", "int8"):
        return RoundedCodec(name, column)
    known = "'none', 'fp16', 'bf16', 'int8', 'zstd', 'jpeg', 'webp', 'jpeg:<quality>' or 'webp:<quality>'"
    raise ValueError(f"codec={name!r}: expected {known}")


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
        for name in names:
            field = schema.fields[name]
            for column_name, column in field.columns(name).items():
                codec = codecs.get(name, "none") if column_name == name else "none"
                self._codecs[column_name] = field_codec(codec, column)
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
        self.longest: int = 4 * len(self._codecs) + sum(
            _longest(codec, columns[name]) for name, codec in self._codecs.items()
        )

    def in_place(self, out: Columns) -> NDArray[np.uint8] | None:
        """Return the field of plain records as rows to be filled; None for any other records."""
        return _as_bytes(out[next(iter(self._codecs))]) if self.is_plain else None

    @property
    def lossless(self) -> bool:
        """Whether samples come back as they were."""
        return all(codec.lossless for codec in self._codecs.values())

    def check(self, columns: Columns) -> None:
        """Raise ValueError for values that a codec cannot hold."""
        for name, codec in self._codecs.items():
            if not isinstance(codec, RoundedCodec):
                continue  # the others hold everything
            try:
                codec.encode(columns[name])
            except ValueError as error:
                raise ValueError(f"batch[{name!r}]: {error}") from None

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


def _longest(codec: FieldCodec, column: Column) -> int:
    """Return how many bytes a value takes at most."""
    if codec.row_bytes is not None:
        return codec.row_bytes
    if codec.lossless:
        return column.bytes + column.bytes // 128 + 512  # zstd of noise
    return 2 * column.bytes + 4096


def _fill(pieces: list[memoryview], out: NDArray[Any]) -> None:
    flat = _as_bytes(out)
    flat[:] = 0
    for row, piece in zip(flat, pieces, strict=True):
        if len(piece) > len(row):
            raise CorruptionError(f"a value of {len(piece)} bytes, expected at most {len(row)}")
        row[: len(piece)] = np.frombuffer(piece, np.uint8)


def _stacked(pieces: list[memoryview], width: int) -> NDArray[np.uint8]:
    if any(len(piece) != width for piece in pieces):
        raise CorruptionError(f"a value that has not the {width} bytes of its field")
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(pieces), width)


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a C-contiguous array ``[n, ...]`` as bytes, uint8 ``[n, bytes]``, in place."""
    size = math.prod(array.shape[1:])
    return array.reshape(len(array), size).view(np.uint8)
