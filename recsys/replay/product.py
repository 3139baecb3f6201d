"""Product codes: a byte for each part of a vector, the number of its nearest centre (Jegou et al., PAMI 2011)."""

import hashlib
import io
import tokenize
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int

__all__ = ["ProductCodes"]

_CENTRES = 256
_TRAINED = 64 * _CENTRES  # most vectors that a training looks at
_ROUNDS = 12  # of Lloyd's algorithm
_BLOCK = 4096  # vectors coded together
_LARGEST = 1e15  # a number; squares add up within float32

Floats = NDArray[np.float32]


class ProductCodes:
    """A codec of float32 fields: a value is cut into parts, and each part becomes one byte.

    Give it to a `Field` as its codec. The buffer keeps it with its samples, and finds it again when it is opened.

    Parameters
    ----------
    centres
        float32 ``[parts, 256, width]``; `train` finds them.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, Field, ProductCodes
    >>> latents = np.random.default_rng(0).standard_normal((1000, 64), np.float32)
    >>> codes = ProductCodes.train(latents[:500], parts=16, seed=0)
    >>> schema = {"latent": Field("float32", (64,), codec=codes)}
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=100, schema=schema) as buffer:
    ...     _ = buffer.add({"latent": latents})
    ...     buffer.sample(10)["latent"].shape, codes.row_bytes
    ((10, 64), 16)
    """

    name = "product"
    lossless = False

    def __init__(self, centres: Any) -> None:
        self.centres: Floats = np.array(centres, np.float32, order="C")
        self.centres.flags.writeable = False
        if self.centres.ndim != 3 or self.centres.shape[1] != _CENTRES or 0 in self.centres.shape:
            raise ValueError(f"centres: expected shape [parts, {_CENTRES}, width], got {list(self.centres.shape)}")
        if not _can_be_coded(self.centres):
            raise ValueError(f"centres: expected finite numbers of at most {_LARGEST:g}")
        self.row_bytes: int | None = len(self.centres)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.centres,)

    @classmethod
    def train(cls, values: Any, parts: int, *, seed: int) -> Self:
        """Find centres for values like these, by Lloyd's algorithm on each part.

        Parameters
        ----------
        values
            float32 ``[n, *shape]``, at least 256: the first of a stream, say. It looks at 16,384 of them at most,
            drawn by the seed.
        parts
            Bytes of a coded value; divides the numbers of a value.
        seed
            0 to 2**63 - 1: of the sample, and of the centres to begin with.

        Raises
        ------
        TypeError, ValueError
            For other values, or a number of parts that does not divide theirs.
        """
        rows = np.asarray(values)
        if rows.dtype != np.float32:
            raise TypeError(f"values: expected an array of float32, got {rows.dtype}")
        if rows.ndim < 2 or len(rows) < _CENTRES or not _can_be_coded(rows):
            raise ValueError(f"values: expected finite numbers of at most {_LARGEST:g}, of shape [n, ...] with n of "
                             f"{_CENTRES} or more, got {list(rows.shape)}")  # fmt: skip
        rows = rows.reshape(len(rows), -1)
        parts = check_int("parts", parts, 1, max(1, rows.shape[1]))
        if rows.shape[1] % parts:
            raise ValueError(f"parts={parts}: expected a divisor of the {rows.shape[1]} numbers of a value")
        random = np.random.default_rng(check_int("seed", seed, 0, 2**63 - 1))
        if len(rows) > _TRAINED:
            rows = rows[np.sort(random.choice(len(rows), _TRAINED, replace=False))]
        cut = rows.reshape(len(rows), parts, -1)
        return cls(np.stack([_centres(np.ascontiguousarray(cut[:, part]), random) for part in range(parts)]))

    @classmethod
    def decoded(cls, value: bytes) -> Self:
        """Return the codes of a `value`.

        Raises
        ------
        ValueError
            If it is none.
        """
        try:
            return cls(np.lib.format.read_array(io.BytesIO(value), allow_pickle=False))
        except tokenize.TokenError as error:
            raise ValueError(f"the header of an array ends too soon: {error}") from error

    @property
    def value(self) -> bytes:
        """Bytes from which `decoded` makes the codes again: a .npy file."""
        written = io.BytesIO()
        np.save(written, self.centres.astype("<f4", copy=False))
        return written.getvalue()

    @cached_property
    def digest(self) -> str:
        """``"product:"`` and the BLAKE2b of `value` in hexadecimal."""
        return f"product:{hashlib.blake2b(self.value, digest_size=16).hexdigest()}"

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.centres.nbytes

    def check_column(self, column: Any) -> None:
        """Raise for a column whose values they do not fit."""
        size = int(np.prod(column.shape, dtype=np.int64))
        coded = self.centres.shape[0] * self.centres.shape[2]
        if column.dtype != np.float32 or size != coded:
            raise ValueError(f"codec: product codes of float32[{coded}], but the field is "
                             f"{column.dtype}{list(column.shape)}")  # fmt: skip

    def encode(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return values ``[n, *shape]`` as codes, uint8 ``[n, parts]``.

        Raises
        ------
        ValueError
            For infinity, NaN, or a number beyond 1e15.
        """
        parts, _, width = self.centres.shape
        codes: NDArray[np.uint8] = np.empty((len(values), parts), np.uint8)
        cut = np.ascontiguousarray(values, np.float32).reshape(len(values), parts, width)
        if not _can_be_coded(cut):
            raise ValueError(f"product codes hold no infinity, no NaN and no number beyond {_LARGEST:g}; use 'bf16'")
        for start in range(0, len(cut), _BLOCK):
            block = slice(start, start + _BLOCK)
            for part in range(parts):
                codes[block, part] = _nearest(cut[block, part], self.centres[part])
        return codes

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        """Fill `out`, ``[n, *shape]``, C-contiguous, with the centres of codes."""
        parts, _, width = self.centres.shape
        out.reshape(len(out), parts, width)[:] = self.centres[np.arange(parts), data]

    def __repr__(self) -> str:
        parts, _, width = self.centres.shape
        return f"ProductCodes({parts} parts of {width} numbers)"


def _can_be_coded(values: NDArray[Any]) -> bool:
    """Whether all numbers are finite and not too large."""
    return bool((np.abs(values) <= _LARGEST).all())


def _nearest(rows: Floats, centres: Floats) -> NDArray[np.int64]:
    """Return the number of the nearest centre of each row."""
    middle = centres.mean(axis=0)  # far from zero, products would round away the differences
    centres = centres - middle
    halves = np.square(centres).sum(axis=1) / 2
    found: NDArray[np.int64] = np.argmin(halves - (rows - middle) @ centres.T, axis=1)
    return found


def _centres(rows: Floats, random: np.random.Generator) -> Floats:
    """Return 256 centres of rows ``[n, width]``."""
    centres = rows[random.choice(len(rows), _CENTRES, replace=False)].copy()
    for _ in range(_ROUNDS):
        nearest = _nearest(rows, centres)
        counts = np.bincount(nearest, minlength=_CENTRES)
        for column in range(rows.shape[1]):
            sums = np.bincount(nearest, rows[:, column], minlength=_CENTRES)
            centres[:, column] = np.where(counts, sums / np.maximum(counts, 1), centres[:, column])
        empty = np.flatnonzero(counts == 0)
        centres[empty] = rows[random.choice(len(rows), len(empty), replace=False)]
    return centres
