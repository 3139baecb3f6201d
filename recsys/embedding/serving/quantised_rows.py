"""Rows of weights in fewer bytes, for serving.

A row of int8 is its codes, then its step and its least weight as float32, little-endian: the fused 8-bit rows of FBGEMM
and of torch's `quantized.embedding_bag_byte`.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memhier.codecs import get_codec

__all__ = ["Quantised", "decode_rows", "encode_rows", "encoded_bytes"]

Quantised = Literal["int8", "fp16"]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_STEPS = np.float32(255)


def encoded_bytes(dtype: Quantised, dim: int) -> int:
    """Return the bytes of a row."""
    return 2 * dim if dtype == "fp16" else dim + 8


def encode_rows(rows: Floats, dtype: Quantised, first: int = 0) -> Bytes:
    """Return rows as bytes, uint8 [n, encoded_bytes]; ValueError for weights that they cannot hold.

    `first` is the number of the first row, for messages.
    """
    if dtype == "fp16":
        return get_codec("fp16").encode(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        least, span = rows.min(axis=1), np.ptp(rows, axis=1)
    if not np.isfinite(span).all():
        row = int(np.flatnonzero(~np.isfinite(span))[0])
        raise ValueError(
            f"row {first + row}: has a NaN or infinity, or weights that are too far apart for int8; its largest is "
            f"{rows[row].max()}; use dtype='fp16', or other weights"
        )
    step = span / _STEPS
    encoded = np.empty((len(rows), rows.shape[1] + 8), np.uint8)
    codes = np.rint((rows - least[:, None]) / np.where(step > 0, step, np.float32(1))[:, None])
    encoded[:, :-8] = np.minimum(codes, _STEPS)  # a step that lost bits may lead to 256
    encoded[:, -8:] = np.stack([step, least], axis=1).astype("<f4").view(np.uint8)
    return encoded


def decode_rows(encoded: Bytes, dtype: Quantised) -> Floats:
    """Return the weights of rows, float32 [n, dim]."""
    if dtype == "fp16":
        weights: NDArray[Any] = np.ascontiguousarray(encoded).view("<f2")
        return weights.astype(np.float32)
    ends = np.ascontiguousarray(encoded[:, -8:]).view("<f4").astype(np.float32)
    return encoded[:, :-8] * ends[:, :1] + ends[:, 1:]
