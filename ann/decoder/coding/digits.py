"""Rows as digits of two bits, few or many of them for a direction by its share of the rows' norms.

A scan of digits reads a third to a half of the bytes of signed bytes, and ranks more candidates exactly for that.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.coding.codes import CHUNK_ROWS, BlockCodes, Bytes, pack_blocks
from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["DIGITS", "DigitCodes"]

DIGITS = 16  # in four bytes of a row
# Of a normal number of variance 1, coded by 0 to 4 digits: the squared error, and the range of all levels.
_ERRORS = np.array([1.0, 0.1188, 0.01154, 0.00104, 0.000087])
_RANGES = np.array([0.0, 3.98, 5.36, 6.6, 7.8])
_LEAST = 1e-12  # keeps the steps of a direction that no row has above zero
_CHUNKS = 32  # coded at a time
_SAMPLE = 128  # chunks that tell the size of a direction


@dataclass(frozen=True, slots=True)
class DigitCodes:
    """Digits of all rows; they share the offsets and the norms of block codes.

    Attributes
    ----------
    codes
        uint8 ``[padded / 256, digits / 16, 256, 4]``: byte b of a row's four holds the digits b, b + 4, b + 8 and
        b + 12 of sixteen, from its lowest bits on.
    directions
        uint32 ``[digits]``: the direction of each.
    values
        float32 ``[digits]``, descending: the value of one, as a share of a row's norm as coded. A digit stands for its
        number less one and a half.
    """

    codes: Bytes
    directions: npt.NDArray[np.uint32]
    values: Floats

    @property
    def count(self) -> int:
        """Digits of a row."""
        return len(self.directions)

    @classmethod
    def of(cls, blocks: BlockCodes, count: int) -> "DigitCodes":
        """Return so many digits of block codes, a multiple of 16, shared out so that the squared error is least."""
        chunks = np.arange(len(blocks.codes))
        sample = _shares(blocks, chunks[:: -(-len(chunks) // _SAMPLE)])
        sizes = np.maximum(np.sqrt(np.square(sample).mean(0)), _LEAST)
        each = _share_out(np.square(sizes.astype(np.float64)), count)
        steps = sizes * _RANGES[each] / 4.0**each
        directions = np.repeat(np.arange(len(each)), each)
        powers = np.concatenate([np.arange(most) for most in each])
        values = steps[directions] * 4.0**powers
        order = np.argsort(-values, kind="stable")
        made = cls(
            np.empty((len(chunks), count // DIGITS, CHUNK_ROWS, 4), np.uint8),
            directions[order].astype(np.uint32), values[order].astype(np.float32),
        )  # fmt: skip
        _fill(made, blocks, chunks)
        return made

    def again(self, blocks: BlockCodes, rows: Ints) -> "DigitCodes":
        """Return codes in which the chunks of these rows are coded again."""
        made = DigitCodes(self.codes.copy(), self.directions, self.values)
        _fill(made, blocks, np.unique(rows // CHUNK_ROWS))
        return made


def _fill(made: DigitCodes, blocks: BlockCodes, chunks: Ints) -> None:
    """Code the rows of some chunks."""
    each = np.bincount(made.directions, minlength=blocks.width)
    step = np.full(blocks.width, np.inf, np.float32)
    np.minimum.at(step, made.directions, made.values)
    # A direction's digits in ascending order of their values: the first is its lowest.
    powers = np.rint(np.log(made.values / step[made.directions]) / np.log(4)).astype(np.uint8)
    for start in range(0, len(chunks), _CHUNKS):
        some = chunks[start : start + _CHUNKS]
        levels = np.floor(_shares(blocks, some) / step + (4**each / 2).astype(np.float32))
        whole = np.clip(levels, 0, 4**each - 1).astype(np.uint8)
        digits = (whole[:, made.directions] >> (2 * powers)) & 3
        four = digits.reshape(len(digits), -1, 4, 4)
        packed = four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6
        made.codes[some] = pack_blocks(packed.reshape(len(digits), -1))


def _shares(blocks: BlockCodes, chunks: Ints) -> Floats:
    """Return the coordinates of the rows of chunks as coded, as shares of their norms, float32 ``[n, width]``."""
    rows = (chunks[:, None] * CHUNK_ROWS + np.arange(CHUNK_ROWS)).reshape(-1)
    signed = (blocks.codes[chunks] ^ 128).view(np.int8).transpose(0, 2, 1, 3).reshape(len(rows), blocks.width)
    scales, norms = blocks.numbers[1, rows], blocks.numbers[4, rows]
    ratio = np.divide(scales, norms, out=np.zeros_like(scales), where=norms > 0)
    return np.asarray(signed * ratio[:, None], np.float32)


def _share_out(squares: npt.NDArray[np.float64], count: int) -> Ints:
    """Return the digits of each direction: one after the other goes where it takes most from the squared error."""
    gains = squares[:, None] * -np.diff(_ERRORS)
    best = np.argsort(-gains, axis=None, kind="stable")[:count]
    return np.bincount(best // gains.shape[1], minlength=len(squares))
