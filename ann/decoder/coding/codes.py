"""Rows as signed bytes of their leading coordinates, by block for the scan and by row for the walk."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.coding.projection import Coordinates, Projection, row_coordinates
from memhier.ann.decoder.layer import Floats, OutputLayer, as_floats

__all__ = ["CHUNK_ROWS", "BlockCodes", "RowCodes", "encode", "encode_rows", "hash_rows", "pack_blocks"]

CHUNK_ROWS = 256
_PADDING = -1e30  # the offset of padding: below every logit, and finite, so that bounds stay numbers
_SOME = 8192  # rows coded or hashed at a time
_UP = 1 + 1e-6  # keeps norms upper bounds in single precision

Bytes: TypeAlias = npt.NDArray[np.uint8]
Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Codes for the scan of all rows.

    Attributes
    ----------
    codes
        uint8 ``[padded / 256, width / 4, 256, 4]``: signed bytes with 128 added.
    numbers
        float32 ``[5, padded]``: the logit at the mean context; the value of one step of a byte; and upper bounds of
        three norms: of a row's coordinates beyond the width, of the rounding loss, and of the coordinates as coded.
    """

    codes: Bytes
    numbers: Floats

    @property
    def width(self) -> int:
        """Directions coded."""
        return int(self.codes.shape[1]) * 4


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Codes for a walk from row to row.

    Attributes
    ----------
    codes
        uint8 ``[V, width]``.
    numbers
        float32 ``[2, V]``: offsets, and the values of one step of a byte.
    """

    codes: Bytes
    numbers: Floats

    @classmethod
    def of(cls, blocks: BlockCodes, words: int) -> "RowCodes":
        """Return the same codes by row."""
        codes = blocks.codes.transpose(0, 2, 1, 3).reshape(-1, blocks.width)
        return cls(codes[:words], np.ascontiguousarray(blocks.numbers[:2, :words]))


def encode(layer: OutputLayer, projection: Projection, width: int) -> BlockCodes:
    """Return the codes of all rows of a layer, from one pass over its weights.

    Parameters
    ----------
    width
        A multiple of 4, at most the dimension rounded up to it; directions beyond the dimension are zero.
    """
    words = layer.shape[0]
    padded = -(-words // CHUNK_ROWS) * CHUNK_ROWS
    codes = np.full((padded, width), 128, np.uint8)
    numbers = np.zeros((5, padded), np.float32)
    numbers[0] = _PADDING
    inverse = projection.inverse()
    for start, block in layer.blocks():
        stop = start + len(block)
        found = row_coordinates(projection, inverse, block, layer.bias[start:stop], words)
        codes[start:stop], numbers[:, start:stop] = _code(found, width)
    return BlockCodes(pack_blocks(codes), numbers)


def encode_rows(
    layer: OutputLayer, projection: Projection, blocks: BlockCodes, numbers: npt.NDArray[np.int64]
) -> BlockCodes:
    """Return codes in which the rows with these numbers are coded again from a layer."""
    packed, five = blocks.codes.copy(), blocks.numbers.copy()
    words, width, inverse = layer.shape[0], blocks.width, projection.inverse()
    for start in range(0, len(numbers), _SOME):
        some = numbers[start : start + _SOME]
        rows = as_floats(layer.weight[some], layer.dtype)
        found = row_coordinates(projection, inverse, rows, layer.bias[some], words)
        codes, five[:, some] = _code(found, width)
        packed[some // CHUNK_ROWS, :, some % CHUNK_ROWS] = codes.reshape(len(some), width // 4, 4)
    return BlockCodes(packed, five)


def hash_rows(layer: OutputLayer) -> Hashes:
    """Return a hash of the weights and bias of every row, uint64 ``[V]``; it tells which rows have changed.

    The hash is multilinear with odd multipliers: a row in which one number changes never keeps its hash, another
    changed row keeps it one time in about 2**32.
    """
    words, dimension = layer.shape
    hashes = np.empty(words, np.uint64)
    carriers = np.dtype(f"u{layer.weight.itemsize}")
    odd = np.random.default_rng(0).integers(0, 2**63, dimension + 1, np.uint64) * np.uint64(2) + np.uint64(1)
    for start in range(0, words, _SOME):
        rows = layer.weight[start : start + _SOME].view(carriers).astype(np.uint64)
        biases = layer.bias[start : start + _SOME].view(np.uint32).astype(np.uint64)
        hashes[start : start + len(rows)] = rows @ odd[:-1] + biases * odd[-1]
    return hashes


def pack_blocks(codes: Bytes) -> Bytes:
    """Return codes ``[padded, width]`` as ``[padded / 256, width / 4, 256, 4]``."""
    blocks = codes.reshape(-1, CHUNK_ROWS, codes.shape[1] // 4, 4).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks)


def _code(found: Coordinates, width: int) -> tuple[Bytes, npt.NDArray[Any]]:
    """Return the bytes ``[n, width]`` of rows, and their five numbers."""
    kept = found.rows[:, :width]
    if kept.shape[1] < width:
        kept = np.pad(kept, ((0, 0), (0, width - kept.shape[1])))
    scale = (np.abs(kept).max(1) / 127).astype(np.float32)
    # A row too small for its scale to be a number codes as zero; its norm counts as lost.
    inverse = np.divide(1.0, scale, out=np.zeros(len(scale)), where=scale > 0)
    rounded = np.clip(np.rint(kept * inverse[:, None]), -127, 127)
    coded = rounded * scale[:, None].astype(np.float64)
    lost = np.linalg.norm(kept - coded, axis=1) + found.slack
    outside = np.linalg.norm(found.rows[:, width:], axis=1) + found.slack
    norms = np.linalg.norm(coded, axis=1)
    five = np.stack([found.offsets, scale, outside * _UP, lost * _UP, norms * _UP])
    return (rounded + 128).astype(np.uint8), five
