"""Vectors in a list column of a Parquet file, read by row groups in batches."""

from collections.abc import Iterator
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.files._lists import holds_vectors, list_matrix
from memhier.ann.files._reader import Block, VectorReader, block_rows
from memhier.ann.files._remote import is_local, open_remote
from memhier.errors import FormatError
from memhier.lazy import extra_for

__all__ = ["ParquetVectors"]

_BUFFER_BYTES = 1 << 20  # of a column's pages; without a limit a whole row group of it would be read ahead
_DECODING = 4  # arrow takes several times the memory of a batch; smaller batches are no slower


class ParquetVectors(VectorReader):
    """One column of lists, all of the same length, of floats or small integers, in a file or behind a URL.

    Raises
    ------
    ImportError
        When pyarrow is not installed.
    ValueError
        When there is no such column, or `column` is None and there are several.
    FormatError
        When the file is not Parquet, or the column holds no vectors.
    """

    def __init__(self, path: str, column: str | None) -> None:
        if is_local(path):  # the error of arrow for a directory has no number
            with open(path, "rb"):
                pass
        with extra_for(f"{path}: Parquet"):
            self._arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        self._remote = None if is_local(path) else open_remote(path)
        self._opened: Any = None
        self._turn = Lock()  # arrow does not promise that threads may share a file's reader
        try:
            self._opened = parquet.ParquetFile(
                self._remote or path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            self._column = _choose(self._opened.schema_arrow, path, column)
            kind = self._opened.schema_arrow.field(self._column).type
            name, count = f"{path}[{self._column!r}]", self._opened.metadata.num_rows
            dtype = np.dtype(kind.value_type.to_pandas_dtype())
            fixed = self._arrow.types.is_fixed_size_list(kind)
            super().__init__(name, count, kind.list_size if fixed else 0, dtype)
            if not fixed:
                self.dimension = self._first_length()
            if self.dimension < 1:
                raise FormatError(f"{name}: holds vectors of dimension {self.dimension}, expected at least 1")
        except (OSError, self._arrow.ArrowException) as error:
            self._close_file()
            raise self._translated(path, error) from error
        except BaseException:
            self._close_file()
            raise

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield ``(first row, block)`` in order; see :class:`VectorReader`. Blocks end where a row group does."""
        start = 0
        for group in range(self._opened.metadata.num_row_groups):
            for block in self._group(group, start):
                yield start, block
                start += len(block)

    def close(self) -> None:
        """Close the file. May be called twice."""
        super().close()
        self._close_file()

    def _close_file(self) -> None:
        if self._opened is not None:
            self._opened.close()
        if self._remote is not None:  # arrow leaves a file that it did not open to its owner
            self._remote.close()

    def _take(self, rows: npt.NDArray[np.int64]) -> Block:
        out = np.empty((len(rows), self.dimension), self.dtype)
        start, first = 0, 0
        for group in range(self._opened.metadata.num_row_groups):
            stop = start + self._opened.metadata.row_group(group).num_rows
            end = int(np.searchsorted(rows, stop))
            at = start
            for block in self._group(group, start) if first < end else ():
                last = int(np.searchsorted(rows, at + len(block)))
                out[first:last] = block[rows[first:last] - at]
                at, first = at + len(block), last
                if first == end:
                    break
            start = stop
        return out

    def _group(self, group: int, start: int) -> Iterator[Block]:
        """Yield the blocks of a row group that begins at row `start`."""
        rows = max(1, block_rows(self.dimension, self.dtype) // _DECODING)
        for batch in self._batches(group, rows):
            try:
                block = list_matrix(batch.column(0), self.name, start, self.dimension)
            except ValueError as error:
                raise FormatError(str(error)) from None
            yield np.array(block, self.dtype)  # a copy: arrow's memory goes back to its pool, and is read-only
            start += len(block)

    def _batches(self, group: int, rows: int) -> Iterator[Any]:
        batches: Any = None
        while True:
            self._check_open()
            try:
                with self._turn:
                    if batches is None:
                        batches = self._opened.iter_batches(
                            rows, row_groups=[group], columns=[self._column], use_threads=False
                        )
                    batch = next(batches, None)
            except (OSError, self._arrow.ArrowException) as error:
                raise self._translated(self.name, error) from error
            if batch is None:
                return
            if len(batch):
                yield batch

    def _first_length(self) -> int:
        for group in range(self._opened.metadata.num_row_groups):
            for batch in self._batches(group, 1):
                try:
                    return int(list_matrix(batch.column(0), self.name).shape[1])
                except ValueError as error:
                    raise FormatError(str(error)) from None
        raise FormatError(f"{self.name}: no rows, expected at least one: their length is the dimension")

    def _translated(self, name: str, error: Exception) -> Exception:
        """Arrow reports damage as an `OSError` without a number, or as an error of its own."""
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, error.strerror, name)
        return FormatError(f"{name}: {error}")


def _choose(schema: Any, path: str, column: str | None) -> str:
    if column is not None and column not in schema.names:
        raise ValueError(f"column={column!r}: {path} has no such column, expected one of {', '.join(schema.names)}")
    if column is not None:
        kind = schema.field(column).type
        if not holds_vectors(kind):
            raise FormatError(f"{path}[{column!r}]: a column of {kind}, expected lists of numbers")
        return column
    found = [field.name for field in schema if holds_vectors(field.type)]
    if len(found) > 1:
        raise ValueError(f"column=None: {path} has several columns of vectors, expected one of {', '.join(found)}")
    if not found:
        raise FormatError(f"{path}: columns {', '.join(schema.names)}, expected one of lists of numbers")
    return str(found[0])
