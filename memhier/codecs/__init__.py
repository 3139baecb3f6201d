"""How cold data is written: rows in fewer bytes each, and records packed by zstd.

A codec of rows gives every row the same number of bytes, so that rows stay where their number says. A codec of
records gives each as many as it takes. Both are stateless, and may be shared by threads.
"""

from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memhier.codecs.bytes import PlainBytesCodec, ZstdCodec
from memhier.codecs.rows import BrainCodec, FeedbackCodec, HalfCodec, PlainCodec, ScaledCodec

__all__ = ["BytesCodec", "Codec", "get_bytes_codec", "get_codec"]


class Codec(Protocol):
    """Rows of one dtype to and from rows of bytes.

    ``none`` keeps any dtype as it is. The others take float32:

    ``fp16``
        IEEE half precision, rounded to nearest even: relative error at most 2**-11 from 6.2e-5 up, below that
        absolute error at most 2**-25. Infinity and NaN stay; a finite number that would become infinite (65520 and
        more) is an error, because such a row could never be trained back.
    ``bf16``
        The upper half of a float32, rounded to nearest even: relative error at most 2**-8 (absolute at most
        2**-134 for subnormal numbers), nearly all of float32's range, else as fp16: overflow starts at 3.3962e38.
    ``int8``
        Integers -127 to 127 and a float32 scale per row, the row's largest magnitude / 127 (at least 2**-126): absolute
        error at most 0.5001 times the scale. A row of zeros is exact. Infinity and NaN are an error.
    ``int8ef``
        As int8, with the error of each integer kept beside it, as another integer, and added back when the row is
        read: absolute error at most the row's largest magnitude / 64000, or 2**-126. Infinity and NaN stay. Takes two
        bytes a number, as fp16 does.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier import get_codec
    >>> rows = np.array([[1.0, 0.3]], np.float32)
    >>> for codec in map(get_codec, ("none", "fp16", "int8")):
    ...     print(codec.name, codec.lossless, codec.encoded_bytes(np.float32, 64), codec.decode(codec.encode(rows)))
    none True 256 [[1.  0.3]]
    fp16 False 128 [[1.         0.30004883]]
    int8 False 68 [[1.        0.2992126]]
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    def encoded_bytes(self, dtype: DTypeLike, dim: int) -> int:
        """Return the bytes of one encoded row of `dim` elements."""

    def encode(self, rows: NDArray[Any], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Turn rows into bytes.

        Parameters
        ----------
        rows
            ``[n, dim]``, any layout in memory.
        out
            uint8 ``[n, encoded_bytes]``, C-contiguous, to fill instead of allocating. Undefined after an error.

        Returns
        -------
        numpy.ndarray
            uint8 ``[n, encoded_bytes]``; `out` where it was given.

        Raises
        ------
        TypeError, ValueError
            For rows of an unfit dtype or shape, or a number that the codec cannot hold: the message names it.
        """

    def decode(
        self, data: NDArray[np.uint8], out: NDArray[Any] | None = None, *, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """Turn bytes into rows.

        Parameters
        ----------
        data
            uint8 ``[n, encoded_bytes]``, any layout in memory.
        out
            ``[n, dim]``, C-contiguous, to fill instead of allocating; its dtype is the one decoded to.
        dtype
            Dtype of the rows, if there is no `out`: for ``none`` the dtype that was encoded.

        Returns
        -------
        numpy.ndarray
            ``[n, dim]``; `out` where it was given.

        Raises
        ------
        TypeError, ValueError
            For data or an `out` of another dtype or shape.
        """


class BytesCodec(Protocol):
    """Records of any length to and from bytes.

    Examples
    --------
    >>> from memhier import get_bytes_codec
    >>> codec = get_bytes_codec("zstd")
    >>> packed = codec.encode(b"again " * 100)
    >>> len(packed) < 30, codec.decode(packed, bytes_max=1000) == b"again " * 100
    (True, True)
    """

    name: ClassVar[str]

    def encode(self, data: Any) -> bytes:
        """Pack a record: bytes, or anything else with a C-contiguous buffer."""

    def decode(self, data: Any, bytes_max: int) -> bytes:
        """Return the record, which must not be longer than `bytes_max`.

        Raises
        ------
        CorruptionError
            When :meth:`encode` did not return these bytes, or they tell of a longer record.
        """


def get_codec(name: str) -> Codec:
    """Return the codec of rows of that name: ``"none"``, ``"fp16"``, ``"bf16"``, ``"int8"`` or ``"int8ef"``.

    Raises
    ------
    ValueError
        For any other name.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier import get_codec
    >>> codec = get_codec("int8")
    >>> codec.encoded_bytes(np.float32, 64)
    68
    >>> codec.decode(codec.encode(np.array([[1.0, -0.5, 0.0]], np.float32))).round(2).tolist()
    [[1.0, -0.5, 0.0]]
    """
    if name not in _CODECS:
        hint = "; zstd packs records of varying length: get_bytes_codec('zstd')" if name == "zstd" else ""
        raise ValueError(f"codec={name!r}: expected one of {', '.join(map(repr, _CODECS))}{hint}")
    return _CODECS[name]


def get_bytes_codec(name: str) -> BytesCodec:
    """Return the codec of records of that name: ``"none"`` or ``"zstd"``.

    Raises
    ------
    ValueError
        For any other name.
    ImportError
        When the package that zstd needs is missing.

    Examples
    --------
    >>> from memhier import get_bytes_codec
    >>> get_bytes_codec("none").encode(b"abc")
    b'abc'
    """
    if name not in _BYTES_CODECS:
        raise ValueError(f"codec={name!r}: expected one of {', '.join(map(repr, _BYTES_CODECS))}")
    return _BYTES_CODECS[name]()


_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (PlainCodec(), HalfCodec(), BrainCodec(), ScaledCodec(), FeedbackCodec())
}
_BYTES_CODECS: dict[str, type[PlainBytesCodec] | type[ZstdCodec]] = {
    codec.name: codec for codec in (PlainBytesCodec, ZstdCodec)
}
