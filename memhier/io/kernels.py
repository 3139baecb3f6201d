"""Checksums and distances over batches of rows: the loops that follow a page read."""

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.io import python_kernels
from memhier.io.page_file import PAGE_BYTES
from memhier.io.python_kernels import METRICS, ROW_DTYPES

__all__ = ["METRICS", "ROW_DTYPES", "crc32c", "crc32c_each", "crc32c_pages", "distances"]

_CARRIERS = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in ROW_DTYPES}


def crc32c(data: Any, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli) of bytes.

    Parameters
    ----------
    data
        Anything with a C-contiguous buffer: bytes, memoryview, mmap, a numpy array of any dtype.
    value
        The CRC32C of the bytes before these, to checksum in pieces.

    Examples
    --------
    >>> from memhier.io.kernels import crc32c
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    >>> crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
    True
    """
    if not 0 <= value < 2**32:
        raise ValueError(f"value={value!r}: expected an earlier CRC32C, 0 to 2**32 - 1")
    return (backend.core or python_kernels).crc32c(data=_as_bytes("data", data), value=value)


def crc32c_each(pieces: Iterable[Any], values: Iterable[int] = repeat(0)) -> list[int]:
    """Return the CRC32C of each of several pieces of bytes.

    Parameters
    ----------
    pieces, values
        The arguments of `crc32c`.

    Examples
    --------
    >>> from memhier.io.kernels import crc32c, crc32c_each
    >>> crc32c_each([b"6789"], crc32c_each([b"12345"])) == [crc32c(b"123456789")]
    True
    """
    return list(map(crc32c, pieces, values))


def crc32c_pages(buffer: Any) -> NDArray[np.uint32]:
    """Return the CRC32C of each 4096-byte page.

    Parameters
    ----------
    buffer
        Anything with a C-contiguous buffer whose length is a multiple of 4096 bytes.

    Returns
    -------
    numpy.ndarray
        uint32 ``[pages]``.

    Examples
    --------
    >>> from memhier.io.kernels import crc32c_pages
    >>> [hex(crc) for crc in crc32c_pages(bytes(8192)).tolist()]
    ['0x98f94189', '0x98f94189']
    """
    view = _as_bytes("buffer", buffer)
    if len(view) % PAGE_BYTES:
        raise ValueError(f"buffer: expected a multiple of 4096 bytes, got {len(view)}; pad the last page with zeros")
    out = np.empty(len(view) // PAGE_BYTES, np.uint32)
    (backend.core or python_kernels).crc32c_pages(data=view, out=out)
    return out


def distances(
    queries: NDArray[np.float32],
    rows: NDArray[Any],
    metric: str,
    *,
    dtype: str | None = None,
    query_of_row: NDArray[np.int32] | None = None,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Compare each row with its query; smaller is nearer.

    Parameters
    ----------
    queries
        float32 ``[nq, d]``, or ``[d]`` for one; copied unless C-contiguous.
    rows
        ``[n, d]`` of float32, float16, int8 or uint8, or of uint16 with ``dtype="bfloat16"``. The elements of a row are
        adjacent; the rows may lie any number of bytes apart and at any alignment, so a field of a record will do.
    metric
        ``"l2"``: squared Euclidean distance. ``"ip"``: minus the inner product. ``"cosine"``: 1 minus the cosine
        similarity, 1 where either vector is zero.
    dtype
        The elements' type, if the array's dtype does not name it.
    query_of_row
        int32 ``[n]``: the query each row is compared with. None compares all with the only query.
    out
        float32 ``[n]`` to fill instead of allocating.

    Returns
    -------
    numpy.ndarray
        float32 ``[n]``. Sums are accumulated in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.io.kernels import distances
    >>> distances(np.float32([[0, 0]]), np.uint8([[3, 4], [0, 1]]), "l2").tolist()
    [25.0, 1.0]
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    queries = _check_queries(queries)
    name = _check_rows(rows, dtype, queries.shape[1])
    count = len(rows)
    if query_of_row is None:
        if len(queries) != 1:
            raise ValueError(f"query_of_row=None: expected the query of each row, as there are {len(queries)} queries")
    else:
        _check_query_of_row(query_of_row, count, len(queries))
    if out is None:
        out = np.empty(count, np.float32)
    elif not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != (count,):
        raise ValueError(f"out: expected float32 [{count}]")
    elif not out.flags.carray:
        raise ValueError("out: expected a contiguous, aligned array that may be written to")
    (backend.core or python_kernels).distances(
        queries=queries, rows=rows, dtype=ROW_DTYPES.index(name), metric=METRICS.index(metric),
        query_of_row=query_of_row, out=out,
    )  # fmt: skip
    return out


def _as_bytes(name: str, data: Any) -> memoryview:
    try:
        view = memoryview(data)
    except TypeError as error:
        raise TypeError(f"{name}: expected bytes or an object with a buffer, got {type(data).__name__}") from error
    if not view.c_contiguous:
        raise ValueError(f"{name}: expected contiguous bytes; numpy.ascontiguousarray makes them")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _check_queries(queries: NDArray[np.float32]) -> NDArray[np.float32]:
    if not isinstance(queries, np.ndarray) or queries.dtype != np.float32:
        raise TypeError(f"queries: expected a numpy array of float32, got {getattr(queries, 'dtype', type(queries))}")
    if queries.ndim == 1:
        queries = queries[None]
    if queries.ndim != 2:
        raise ValueError(f"queries: expected shape [nq, d], got {list(queries.shape)}")
    return queries if queries.flags.c_contiguous and queries.flags.aligned else queries.copy()


def _check_rows(rows: NDArray[Any], dtype: str | None, dimension: int) -> str:
    """Return the name of the rows' type in :data:`ROW_DTYPES`."""
    if not isinstance(rows, np.ndarray):
        raise TypeError(f"rows: expected a numpy array, got {type(rows).__name__}")
    name = rows.dtype.name if dtype is None else dtype
    if name not in _CARRIERS or rows.dtype != _CARRIERS[name]:
        raise TypeError(
            f"rows: expected one of float32, float16, int8, uint8, or uint16 with dtype='bfloat16'; "
            f"got {rows.dtype} with dtype={dtype!r}"
        )
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise ValueError(f"rows: expected shape [n, {dimension}] as the queries have, got {list(rows.shape)}")
    if rows.strides[1] != rows.itemsize and rows.shape[1] > 1 and len(rows):
        raise ValueError(
            "rows: expected the elements of a row next to each other; numpy.ascontiguousarray makes them so"
        )
    return name


def _check_query_of_row(query_of_row: NDArray[np.int32], count: int, queries: int) -> None:
    if not isinstance(query_of_row, np.ndarray) or query_of_row.dtype != np.int32:
        got = getattr(query_of_row, "dtype", type(query_of_row))
        raise TypeError(f"query_of_row: expected a numpy array of int32, got {got}")
    flags = query_of_row.flags
    if query_of_row.shape != (count,) or not (flags.c_contiguous and flags.aligned):
        raise ValueError(f"query_of_row: expected shape [{count}], contiguous, aligned; got {list(query_of_row.shape)}")
    if count and (int(query_of_row.min()) < 0 or int(query_of_row.max()) >= queries):
        index = int(np.flatnonzero((query_of_row < 0) | (query_of_row >= queries))[0])
        raise ValueError(f"query_of_row[{index}]={int(query_of_row[index])}: expected 0 to {queries - 1}")
