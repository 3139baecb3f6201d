"""The order of codes in DRAM and on SSD: blocks of 16 rows; a scan loads the same bytes of all 16 at once.

A block holds the first four bytes of each chunk of a code (`memhier.ann.zoom.preview.codes.chunks`) for all its rows,
then the next four, at last the two bytes and the one byte left. Rows after the last whole block are not interleaved.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.codes import chunks

__all__ = ["BLOCK_ROWS", "codes_of", "interleave"]

BLOCK_ROWS = 16
_TOGETHER = 4096  # blocks, turned at a time

Bytes: TypeAlias = npt.NDArray[np.uint8]
Dimensions: TypeAlias = tuple[int, int, int, int]


def interleave(codes: Bytes, dimensions: Dimensions) -> None:
    """Put codes ``[n, code_bytes]``, one row after the other, into the order of blocks, in place."""
    order = np.argsort(_places(dimensions).ravel())
    blocks = _blocks(codes)
    for start in range(0, len(blocks), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        blocks[part] = blocks[part, order]


def codes_of(codes: Bytes, rows: npt.NDArray[np.int64], dimensions: Dimensions) -> Bytes:
    """Return the codes of some rows, uint8 ``[len(rows), code_bytes]``, from the order of blocks."""
    places = _places(dimensions)
    blocks = _blocks(codes)
    found: Bytes = codes[rows]
    inside = rows < len(blocks) * BLOCK_ROWS
    chosen = rows[inside]
    found[inside] = blocks[(chosen // BLOCK_ROWS)[:, None], places[chosen % BLOCK_ROWS]]
    return found


def _blocks(codes: Bytes) -> Bytes:
    """Return the whole blocks of codes, a row each."""
    count, code_bytes = codes.shape
    whole = codes[: count // BLOCK_ROWS * BLOCK_ROWS]
    return whole.reshape(-1, BLOCK_ROWS * code_bytes)


def _places(dimensions: Dimensions) -> npt.NDArray[np.int64]:
    """Return where in a block each byte of each row lies, int64 ``[16, code_bytes]``."""
    row = np.arange(BLOCK_ROWS)[:, None]
    places = []
    for first, _, width, axes in chunks(dimensions):
        at, count = 0, -(-axes * width // 8)
        while at < count:
            taken = 4 if count - at >= 4 else 2 if count - at >= 2 else 1
            places.append((first + at) * BLOCK_ROWS + row * taken + np.arange(taken))
            at += taken
    return np.hstack(places)
