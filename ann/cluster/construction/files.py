"""A Ray Dataset of files of vectors on any file system that fsspec knows: tasks read ranges, none a whole file."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from memhier.ann.cluster.construction.tables import TableColumns, TableSource
from memhier.errors import FormatError

__all__ = ["file_source"]

_PIECE_BYTES = 32 << 20
_IDS = "memhier_row"  # the column of row numbers, where no ids are given


def file_source(
    files: Sequence[str | os.PathLike[str]], column: str | None, ids: str | None, attributes: Sequence[str],
    documents: Sequence[str],
) -> TableSource:  # fmt: skip
    """Return the vectors of ``.npy`` and Parquet files, one after the other.

    Parameters
    ----------
    column, ids, attributes, documents
        Names of columns of Parquet files. Without ids the rows of all files are counted from 0.

    Raises
    ------
    ValueError
        For a file of another kind, or columns of ``.npy`` files.
    """
    from ray import data

    names = [os.fspath(each) for each in files]
    columns = TableColumns(column or "vectors", ids or _IDS, attributes, documents)
    pieces: list[dict[str, Any]] = []
    count = 0
    for name in names:
        for piece in _pieces(name, columns):
            pieces.append(piece | {"first": count})
            count += piece["rows"]
    if not count:
        raise ValueError("vectors: the files are empty; expected at least one row")
    read = data.from_items(pieces, override_num_blocks=len(pieces)).map_batches(
        _table, batch_format="pyarrow", batch_size=1, fn_kwargs={"columns": columns}
    )
    return TableSource(read, columns, count)


def _pieces(name: str, columns: TableColumns) -> list[dict[str, Any]]:
    """Return the ranges of rows of a file, a task each."""
    if name.endswith(".parquet"):
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        with _open(name) as file:
            about = pq.ParquetFile(file).metadata
        there = about.schema.to_arrow_schema().names
        if missing := [each for each in columns.names if each != _IDS and each not in there]:
            raise ValueError(f"{name}: has no column {missing[0]!r}; expected one of {there}")
        return [
            {"file": name, "group": group, "start": 0, "rows": about.row_group(group).num_rows}
            for group in range(about.num_row_groups)
        ]
    if not name.endswith(".npy"):
        raise ValueError(f"vectors holds {name!r}: expected files that end in .npy or .parquet")
    if columns.ids != _IDS or columns.attributes or columns.documents:
        raise ValueError(f"vectors holds {name!r}: a .npy file has no columns for ids, attributes and documents")
    (count, width), dtype, begin = _header(name)
    with _open(name) as file:
        if file.seek(0, os.SEEK_END) < begin + count * width * dtype.itemsize:
            raise FormatError(f"{name}: ends before row {count}")
    step = max(1, _PIECE_BYTES // (width * dtype.itemsize))
    return [
        {"file": name, "group": -1, "start": start, "rows": min(step, count - start)} for start in range(0, count, step)
    ]


def _header(name: str) -> tuple[tuple[int, int], np.dtype[Any], int]:
    """Return shape, dtype, and the place of the first row of a ``.npy`` file."""
    with _open(name) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_column, dtype = read(file)
        except ValueError as error:
            raise FormatError(f"{name}: {error}") from error
        if len(shape) != 2 or by_column or dtype.hasobject:
            raise FormatError(f"{name}: an array {shape} of {dtype}, expected rows of numbers [n, d] in the order of C")
        return (shape[0], shape[1]), dtype, file.tell()


def _table(table: Any, columns: TableColumns) -> Any:
    """Return the rows of one piece."""
    import pyarrow as pa

    (piece,) = table.to_pylist()
    rows = range(piece["first"], piece["first"] + piece["rows"])
    if piece["group"] < 0:
        (_, width), dtype, begin = _header(piece["file"])
        with _open(piece["file"]) as file:
            file.seek(begin + piece["start"] * width * dtype.itemsize)
            raw = file.read(piece["rows"] * width * dtype.itemsize)
        if len(raw) != piece["rows"] * width * dtype.itemsize:
            raise FormatError(f"{piece['file']}: ends before row {piece['start'] + piece['rows']}")
        values = pa.array(np.frombuffer(raw, dtype).astype(dtype.newbyteorder("=")))
        made = pa.table({columns.vectors: pa.FixedSizeListArray.from_arrays(values, width)})
    else:
        import pyarrow.parquet as pq

        wanted = [name for name in columns.names if name != _IDS]
        with _open(piece["file"]) as file:
            made = pq.ParquetFile(file).read_row_group(piece["group"], columns=wanted)
    return made.append_column(_IDS, pa.array(rows, pa.int64())) if columns.ids == _IDS else made


def _open(name: str) -> Any:
    import fsspec

    return fsspec.open(name, "rb").open()
