"""How the values of a field become bytes, and back: as they are, in fewer bits, or packed."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memhier.codecs import get_bytes_codec, get_codec
from memhier.errors import CorruptionError
from memhier.recsys.replay.schema import Column

__all__ = ["Encoded", "FieldCodec", "PackedCodec", "RawCodec", "RoundedCodec", "as_bytes"]

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
        return as_bytes(np.ascontiguousarray(values))

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        as_bytes(out)[:] = data


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
        for row, record in zip(as_bytes(out), data, strict=True):
            value = self._codec.decode(record, self._bytes)
            if len(value) != self._bytes:
                raise CorruptionError(f"zstd: a value of {len(value)} bytes, expected {self._bytes}")
            row[:] = np.frombuffer(value, np.uint8)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a C-contiguous array ``[n, ...]`` as bytes, uint8 ``[n, bytes]``, in place."""
    size = math.prod(array.shape[1:])
    return array.reshape(len(array), size).view(np.uint8)
