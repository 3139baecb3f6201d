"""Samples as both tiers hold them: fields that have a codec of their own are bytes in memory as well as on SSD.

`add` encodes a sample once, as it comes; a batch is decoded as it is drawn. All between them, swaps, logs and the
index, moves bytes and knows nothing of the codec.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.codecs.choice import field_codec, longest_of
from memhier.recsys.replay.codecs.fields import FieldCodec
from memhier.recsys.replay.schema import Columns, Field, Schema

__all__ = ["Encoding", "check_storage_codecs"]


class Encoding:
    """The way from samples of a schema to those that the tiers hold, and back.

    Parameters
    ----------
    schema
        Of the samples.

    Attributes
    ----------
    held
        The schema of the samples that the tiers hold; the same one if no field has a codec.

    Raises
    ------
    TypeError, ValueError, ImportError
        For a codec that does not fit its field, or whose package is missing.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._codecs: dict[str, FieldCodec] = {}
        for name, field in schema.fields.items():
            if field.codec is not None:
                self._codecs[name] = _codec(name, field, schema)
        fields = {name: self._field(name, field) for name, field in schema.fields.items()}
        self.held: Schema = Schema(fields) if self._codecs else schema
        self._encoded = Schema({name: fields[name] for name in self._codecs}) if self._codecs else None

    def _field(self, name: str, field: Field) -> Field:
        codec = self._codecs.get(name)
        if codec is None:
            return field
        if codec.row_bytes is not None:
            return Field("uint8", (codec.row_bytes,), mutable=field.mutable)
        most = longest_of(codec, self.schema.columns[name])
        return Field("uint8", (None,), longest=most, mean=min(field.mean, most))

    def encode(self, columns: Columns, argument: str = "batch") -> Columns:
        """Return columns, some or all, of an argument as the tiers hold them.

        Raises
        ------
        ValueError
            For values that a codec cannot hold.
        """
        if not self._codecs:
            return columns
        held: Columns = {}
        for name, values in columns.items():
            codec = self._codecs.get(name)
            if codec is None:
                held[name] = values
                continue
            try:
                encoded = codec.encode(values)
            except ValueError as error:
                raise ValueError(f"{argument}[{name!r}]: {error}") from None
            held |= self._padded(name, encoded) if isinstance(encoded, list) else {name: encoded}
        return held

    def _padded(self, name: str, records: list[bytes]) -> Columns:
        column, lengths = self.held.columns[name], f"{name}.length"
        padded: NDArray[Any] = np.zeros((len(records), *column.shape), column.dtype)
        for row, record in zip(padded, records, strict=True):
            row[: len(record)] = np.frombuffer(record, np.uint8)
        return {name: padded, lengths: np.array([len(record) for record in records], np.int32)}

    def fill(self, out: Columns, read: Callable[[Columns], None]) -> None:
        """Fill columns of samples from a function that fills those that the tiers hold."""
        if self._encoded is None:
            read(out)
            return
        encoded = self._encoded.empty(len(next(iter(out.values()))))
        held = {name: encoded[name] if name in encoded else out[name] for name in self.held.columns}
        read(held)
        for name, codec in self._codecs.items():
            if codec.row_bytes is not None:
                codec.decode(held[name], out[name])
            else:
                _decode_records(codec, held[name], held[f"{name}.length"], out[name])

    def fill_batch(self, out: Batch, read: Callable[[Batch], None]) -> None:
        """Fill a batch from a function that fills one of the samples that the tiers hold."""
        if self._codecs:
            self.fill(out.data, lambda held: read(Batch(held, out.labels, out.ids, out.slots)))
        else:
            read(out)


def _codec(name: str, field: Field, schema: Schema) -> FieldCodec:
    if field.varies:
        raise ValueError(f"schema[{name!r}]: codec={field.codec!r}: a field whose lengths differ takes no codec here; "
                         "give it to the buffer, as codec={...}, for storage")  # fmt: skip
    codec = field_codec(field.codec or "none", schema.columns[name])
    if codec.row_bytes is not None and field.mean:
        raise ValueError(f"schema[{name!r}]: mean={field.mean}: codec={field.codec!r} packs every value into "
                         f"{codec.row_bytes} bytes; expected 0")  # fmt: skip
    if codec.row_bytes is None and field.mutable:
        raise ValueError(f"schema[{name!r}]: codec={field.codec!r}: a mutable field needs one of fixed width")
    return codec


def _decode_records(codec: FieldCodec, padded: NDArray[Any], lengths: NDArray[Any], out: NDArray[Any]) -> None:
    """Decode records of their own lengths; an empty one, of a slot that was never used, becomes zeros."""
    for index, length in enumerate(lengths.tolist()):
        if length > padded.shape[1] or length < 0:
            raise CorruptionError(f"a value of {length} bytes, expected at most {padded.shape[1]}")
        if length:
            codec.decode([padded[index, :length].data], out[index : index + 1])
        else:
            out[index] = 0


def check_storage_codecs(schema: Schema, codecs: Mapping[str, str]) -> None:
    """Refuse a codec of storage for a field that is not there, or has one of its own."""
    for name in codecs:
        if name not in schema.fields:
            raise ValueError(f"codec: {name!r} is no field of {schema}")
        if schema.fields[name].codec is not None:
            raise ValueError(f"codec[{name!r}]={codecs[name]!r}: the field has a codec of its own, for both tiers")
