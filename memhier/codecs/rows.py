"""The codecs of rows behind :mod:`memhier.codecs`."""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memhier.arguments import check_array, check_int

__all__ = ["BrainCodec", "FeedbackCodec", "HalfCodec", "PlainCodec", "ScaledCodec"]

_BLOCK_FLOATS = 1 << 16  # rows are worked in blocks of 256 KiB, so that what lies between fits the cache
_SCALE_MIN = np.float32(2.0**-126)  # below it a scale loses bits, and with them the error bound
_ERRORS = np.float32(254)  # steps of an error to one of the integers
_NO_NUMBER = -128
_NO_NUMBERS = np.array([-np.inf, np.nan, np.inf], np.float32)
_SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times more is infinite


class PlainCodec:
    """Rows as they are."""

    name: ClassVar[str] = "none"
    lossless: ClassVar[bool] = True

    def encoded_bytes(self, dtype: DTypeLike, dim: int) -> int:
        return _plain_dtype(dtype).itemsize * _check_dim(dim)

    def encode(self, rows: NDArray[Any], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        count, dim = _check_rows("rows", rows)
        out = _room("out", out, np.dtype(np.uint8), (count, self.encoded_bytes(rows.dtype, dim)))
        out.view(rows.dtype)[:] = rows
        return out

    def decode(
        self, data: NDArray[np.uint8], out: NDArray[Any] | None = None, *, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        count, width = _check_data(data)
        dtype = _plain_dtype(dtype if out is None else getattr(out, "dtype", dtype))
        if width % dtype.itemsize:
            raise ValueError(f"data: expected rows of a multiple of {dtype.itemsize} bytes ({dtype}), got {width}")
        out = _room("out", out, dtype, (count, width // dtype.itemsize))
        out.view(np.uint8)[:] = data
        return out


class _Float32Codec:
    """What the codecs of float32 rows have in common: checks, and work in blocks."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    element_bytes: ClassVar[int]
    row_extra_bytes: ClassVar[int] = 0

    def encoded_bytes(self, dtype: DTypeLike, dim: int) -> int:
        if np.dtype(dtype) != np.float32:
            raise TypeError(f"dtype={np.dtype(dtype)}: codec {self.name!r} takes float32; convert, or use 'none'")
        return self.element_bytes * _check_dim(dim) + self.row_extra_bytes

    def encode(self, rows: NDArray[Any], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        count, dim = _check_rows("rows", rows)
        out = _room("out", out, np.dtype(np.uint8), (count, self.encoded_bytes(rows.dtype, dim)))
        for block in _blocks(count, dim):
            part = np.ascontiguousarray(rows[block])
            # What overflows, or is no number, is found below and told with its place, or is meant to stay.
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                bad = self._encode_block(part, out[block])
            if bad.any():
                row, column = (int(at[0]) for at in np.nonzero(bad))
                raise ValueError(f"rows[{block.start + row}, {column}]={part[row, column]}: {self._why}")
        return out

    def decode(
        self, data: NDArray[np.uint8], out: NDArray[Any] | None = None, *, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        count, width = _check_data(data)
        if np.dtype(dtype) != np.float32:
            raise TypeError(f"dtype={np.dtype(dtype)}: codec {self.name!r} decodes to float32")
        dim, rest = divmod(width - self.row_extra_bytes, self.element_bytes)
        if dim < 1 or rest:
            raise ValueError(f"data: {width} bytes are not the length of any row of codec {self.name!r}")
        out = _room("out", out, np.dtype(np.float32), (count, dim))
        for block in _blocks(count, dim):
            self._decode_block(np.ascontiguousarray(data[block]), out[block])
        return out

    _why: ClassVar[str]

    def _encode_block(self, rows: NDArray[np.float32], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Fill `out`, and return which elements cannot be encoded."""
        raise NotImplementedError

    def _decode_block(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        raise NotImplementedError


class HalfCodec(_Float32Codec):
    name = "fp16"
    element_bytes = 2
    _why = "overflows fp16, whose largest number is 65504; use 'bf16' or 'none'"

    def _encode_block(self, rows: NDArray[np.float32], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        out.view("<f2")[:] = rows
        overflown: NDArray[np.bool_] = ((out.view("<u2") & 0x7FFF) == 0x7C00) & ~np.isinf(rows)
        return overflown

    def _decode_block(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        out[:] = data.view("<f2")


class BrainCodec(_Float32Codec):
    name = "bf16"
    element_bytes = 2
    _why = "overflows bf16, whose largest number is 3.3895e38; use 'none'"

    def _encode_block(self, rows: NDArray[np.float32], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        bits = rows.view(np.uint32)
        upper = bits >> 16
        # Adding just under half of the last place that stays, and the oddness of that place, rounds ties to even.
        rounded = (bits + 0x7FFF + (upper & 1)) >> 16
        # A NaN with few low bits set would round to infinity: it keeps its upper bits, and one that makes it a NaN.
        out.view("<u2")[:] = np.where(np.isnan(rows), upper | 0x40, rounded)
        overflown: NDArray[np.bool_] = ((rounded & 0x7FFF) == 0x7F80) & np.isfinite(rows)
        return overflown

    def _decode_block(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        np.left_shift(data.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


class ScaledCodec(_Float32Codec):
    name = "int8"
    element_bytes = 1
    row_extra_bytes = 4  # the scale, little-endian, after the elements
    _why = "int8 holds no infinity and no NaN; use 'none', 'fp16' or 'bf16'"

    def _encode_block(self, rows: NDArray[np.float32], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        largest = np.abs(rows).max(axis=1, keepdims=True)
        scale = np.clip(largest / np.float32(127), _SCALE_MIN, _SCALE_MAX)
        out[:, :-4].view(np.int8)[:] = np.rint(rows / scale)
        scale[largest == 0] = 0
        out[:, -4:] = scale.astype("<f4").view(np.uint8)
        return ~np.isfinite(rows) if not np.isfinite(largest).all() else np.zeros(0, np.bool_)

    def _decode_block(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        scale = np.ascontiguousarray(data[:, -4:]).view("<f4")
        np.multiply(data[:, :-4].view(np.int8), scale, out=out, dtype=np.float32)


class FeedbackCodec(_Float32Codec):
    name = "int8ef"
    element_bytes = 2
    row_extra_bytes = 4  # integers, then the integers of their errors, then the scale, little-endian
    _why = ""  # every float32 can be encoded

    def _encode_block(self, rows: NDArray[np.float32], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        dim, finite = rows.shape[1], np.isfinite(rows)
        rows = np.where(finite, rows, np.copysign(np.isinf(rows), rows).astype(np.float32))
        largest = np.abs(rows, where=finite, out=np.zeros_like(rows)).max(axis=1, keepdims=True)
        scale = np.clip(largest / np.float32(127), _ERRORS * _SCALE_MIN, _SCALE_MAX)
        whole = np.rint(rows / scale)
        error = np.clip(np.rint((rows - whole * scale) / (scale / _ERRORS)), -127, 127)
        # What is no number is marked by an integer that no number has, and told apart by the one of the error.
        out[:, :dim].view(np.int8)[:] = np.where(finite, whole, _NO_NUMBER)
        out[:, dim:-4].view(np.int8)[:] = np.where(finite, error, rows)
        out[:, -4:] = scale.astype("<f4").view(np.uint8)
        return np.zeros(0, np.bool_)

    def _decode_block(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        dim = out.shape[1]
        scale = np.ascontiguousarray(data[:, -4:]).view("<f4")
        whole, error = data[:, :dim].view(np.int8), data[:, dim:-4].view(np.int8)
        with np.errstate(over="ignore"):  # what marks no number may be beyond the largest, and is replaced
            np.multiply(whole, scale, out=out, dtype=np.float32)
        out += error * (scale / _ERRORS)
        none = whole == _NO_NUMBER
        if none.any():
            out[none] = _NO_NUMBERS[np.sign(error[none]) + 1]


def _blocks(count: int, dim: int) -> Iterator[slice]:
    rows = max(1, _BLOCK_FLOATS // dim)
    for start in range(0, count, rows):
        yield slice(start, min(count, start + rows))


def _room(name: str, out: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if out is None:
        return np.empty(shape, dtype)
    check_array(name, out, dtype, shape)
    checked: NDArray[Any] = out
    return checked


def _plain_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    plain = np.dtype(dtype)
    if plain.hasobject or plain.itemsize == 0:
        raise TypeError(f"dtype={plain}: expected plain bytes of fixed size")
    return plain


def _check_dim(dim: int) -> int:
    return check_int("dim", dim, 1)


def _check_rows(name: str, rows: Any) -> tuple[int, int]:
    if not isinstance(rows, np.ndarray):
        raise TypeError(f"{name}: expected an array, got {type(rows).__name__}")
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"{name}: expected shape [n, dim] with dim at least 1, got {rows.shape}")
    return rows.shape[0], rows.shape[1]


def _check_data(data: Any) -> tuple[int, int]:
    count, width = _check_rows("data", data)
    if data.dtype != np.uint8:
        raise TypeError(f"data: expected uint8, got {data.dtype}")
    return count, width
