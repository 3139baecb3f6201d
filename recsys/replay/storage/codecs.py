"""How the fields of a sample are written to storage: as they are, in fewer bits, or packed as images or by zstd.

Memory always holds plain values, so that training never decodes: what is swapped in is decoded by the thread that read
it. What a lossy codec changes is changed before a sample first enters memory, so that a sample is the same before and
after it was away.
"""

import importlib
import io
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memhier.codecs import get_bytes_codec, get_codec
from memhier.errors import CorruptionError
from memhier.recsys.replay.schema import Column, as_bytes

__all__ = ["FieldCodec", "ImageCodec", "PackedCodec", "PlainCodec", "RoundedCodec", "field_codec"]

Encoded = NDArray[np.uint8] | list[bytes]
"""uint8 ``[n, row_bytes]``; or n records, where their lengths differ."""


class FieldCodec(Protocol):
    """Turns the values of a column into bytes and back; stateless, used by several threads.

    Attributes
    ----------
    name
        What `field_codec` makes it from.
    lossless
        Whether values come back as they were.
    row_bytes
        Bytes of an encoded value; None where they differ.
    """

    name: str
    lossless: bool
    row_bytes: int | None

    def check(self, values: NDArray[Any]) -> None:
        """Raise ValueError for values that it cannot hold, so that :meth:`encode` never fails."""

    def encode(self, values: NDArray[Any]) -> Encoded:
        """Return values ``[n, *shape]`` as bytes."""

    def decode(self, data: NDArray[np.uint8] | Sequence[memoryview], out: NDArray[Any]) -> None:
        """Fill `out`, ``[n, *shape]``, C-contiguous.

        Raises
        ------
        CorruptionError
            When the bytes are not what :meth:`encode` returned.
        """


class PlainCodec:
    """Values as they are."""

    name = "none"
    lossless = True

    def __init__(self, column: Column) -> None:
        self.row_bytes: int | None = column.bytes

    def check(self, values: NDArray[Any]) -> None:
        return

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

    def check(self, values: NDArray[Any]) -> None:
        self.encode(values)

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

    def check(self, values: NDArray[Any]) -> None:
        return

    def encode(self, values: NDArray[Any]) -> list[bytes]:
        return [self._codec.encode(np.ascontiguousarray(value).reshape(-1).view(np.uint8)) for value in values]

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        for row, record in zip(as_bytes(out), data, strict=True):
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
        Of shape ``[height, width]``, ``[height, width, 3]`` or ``[3, height, width]``, where the 3 may be a 1.
    """

    lossless = False
    row_bytes: int | None = None

    def __init__(self, name: str, column: Column) -> None:
        kind, _, quality = name.partition(":")
        if not (quality or "90").isdigit() or not 1 <= int(quality or 90) <= 100:
            raise ValueError(f"codec={name!r}: expected a quality of 1 to 100, such as '{kind}:90'")
        try:
            self._image: Any = importlib.import_module("PIL.Image")
        except ImportError as error:
            raise ImportError(f"codec={name!r} needs the package Pillow: pip install 'memhier[images]'") from error
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

    def check(self, values: NDArray[Any]) -> None:
        return

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
        When the package that it needs is missing.
    """
    kind = name.partition(":")[0] if isinstance(name, str) else name
    if kind in ("jpeg", "webp"):
        return ImageCodec(name, column)
    if name == "none":
        return PlainCodec(column)
    if name == "zstd":
        return PackedCodec(column)
    if name in ("fp16", "bf16", "int8"):
        return RoundedCodec(name, column)
    known = "'none', 'fp16', 'bf16', 'int8', 'zstd', 'jpeg', 'webp', 'jpeg:<quality>' or 'webp:<quality>'"
    raise ValueError(f"codec={name!r}: expected {known}")
