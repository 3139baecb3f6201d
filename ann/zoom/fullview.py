"""The fullview: every vector with its id on SSD, in list order, and exact distances to a few of them.

A vector's row number is the position of its code, so no map from id to address is held in DRAM; the id travels
with the vector and comes with the same read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.space import Metric
from memhier.kernels import distances
from memhier.rows import Rows, RowsWriter

__all__ = ["Fullview", "record_dtype", "workspace_bytes", "write_records"]

ID_BYTES = 8
_BUCKET_BYTES = 64 << 20

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def record_dtype(dtype: np.dtype[Any], dimension: int) -> np.dtype[Any]:
    """Return the layout of a record on SSD: the vector, then its int64 id, little-endian, unpadded."""
    return np.dtype([("vector", dtype.newbyteorder("<"), (dimension,)), ("id", "<i8")])


def workspace_bytes(record_bytes: int) -> int:
    """Return the DRAM for the rows of one round of reads: 256 KiB, or 128 rows where those take more."""
    return max(256 << 10, 128 * record_bytes)


class Fullview:
    """Exact ranking of rows on SSD.

    Parameters
    ----------
    rows
        Records of :func:`record_dtype` in list order.
    """

    def __init__(self, rows: Rows, dtype: np.dtype[Any], dimension: int, metric: Metric) -> None:
        self._rows = rows
        self._record = record_dtype(dtype, dimension)
        self._metric = metric

    @property
    def memory_bytes(self) -> int:
        """DRAM held beside the store and the reader, in bytes."""
        return self._rows.memory_bytes

    def rank(self, queries: Floats, positions: Ints, k: int, tally: Ints) -> tuple[Ints, Floats]:
        """Return ids and exact distances of the `k` nearest among `positions`, int64 and float32 ``[q, k]``.

        Parameters
        ----------
        queries
            float32 ``[q, d]``.
        positions
            int64 ``[q, c]``, -1 for none; at least `k` of each row are not -1.
        tally
            int64 ``[3]`` to which the I/Os, pages and bytes read are added.
        """
        query_of_row, column = np.nonzero(positions >= 0)
        # In the order of the file, so that pages that many want are read once where they take several pieces.
        order = np.argsort(positions[query_of_row, column], kind="stable")
        query_of_row, column = query_of_row[order], column[order]
        exact = np.full(positions.shape, np.inf, np.float32)
        ids = np.full(positions.shape, np.iinfo(np.int64).max)
        step = max(1, workspace_bytes(self._record.itemsize) // self._record.itemsize)
        buffer = np.empty((min(step, len(order)), self._record.itemsize), np.uint8)
        for start in range(0, len(order), step):
            where = query_of_row[start : start + step], column[start : start + step]
            rows = self._rows.read(positions[where], out=buffer[: len(where[0])], tally=tally)
            records = rows.view(self._record)[:, 0]
            near = distances(queries, records["vector"], self._metric, query_of_row=where[0].astype(np.int32))
            exact[where], ids[where] = near, records["id"]
        if self._metric == "cosine":
            np.maximum(exact, 0, out=exact)  # rounding takes equal directions just below
        # Ties by id, so that the answer does not depend on where the build happened to put a vector.
        order = np.lexsort((ids, exact), axis=1)[:, :k]
        return np.take_along_axis(ids, order, 1), np.take_along_axis(exact, order, 1)


def write_records(writer: RowsWriter, source: VectorSource, ids: Ints, positions: Ints, scratch: Path) -> Iterator[int]:
    """Write every vector with its id at its position, yielding the number of vectors after each step.

    An external sort by position: records are first appended to buckets of neighbouring positions, each small enough
    to be put in order in DRAM, so that the source and the disk are both read and written forward.
    """
    record = record_dtype(source.dtype, source.dimension)
    staged = np.dtype([("position", "<i8"), ("record", record)])
    per_bucket = max(1, _BUCKET_BYTES // staged.itemsize)
    paths = [scratch / f"bucket-{b}" for b in range(-(-source.count // per_bucket))]
    for start, block in source.blocks():
        rows = np.empty(len(block), staged)
        rows["position"] = positions[start : start + len(block)]
        rows["record"]["vector"] = block
        rows["record"]["id"] = ids[start : start + len(block)]
        bucket = rows["position"] // per_bucket
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(len(paths) + 1))
        for path, low, high in zip(paths, bounds[:-1], bounds[1:], strict=True):
            if low < high:
                with path.open("ab") as file:
                    file.write(rows[order[low:high]].data)
        yield len(block)
    for path in paths:
        rows = np.fromfile(path, staged)
        path.unlink()
        ordered = np.empty(len(rows), record)
        ordered[rows["position"] - rows["position"].min()] = rows["record"]
        writer.append(ordered.view(np.uint8).reshape(len(ordered), record.itemsize))
        yield 0
