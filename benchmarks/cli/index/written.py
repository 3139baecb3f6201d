"""New files of vectors, neighbours and fields, which have their names once they are whole: .npz, .parquet, .jsonl."""

import errno
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.cli.index.inputs import parquet_of
from memhier.benchmarks.cli.shell import plain_value

__all__ = ["TABLES", "field_kinds", "rows_at_a_time", "unfinished", "write_archive", "write_header", "write_table"]

TABLES = (".parquet", ".jsonl")
"""Suffixes of files that hold columns by name, fields among them."""

_PLAIN = ("int64", "float64", "float32", "bool", "datetime", "str")  # other fields become bytes or text
_PIECE_BYTES = 8 << 20  # of vectors and documents, held at a time
_PIECE_ROWS = 8192

Column: TypeAlias = npt.NDArray[Any]
TableWriter: TypeAlias = Callable[[Mapping[str, Column]], object]


@contextmanager
def unfinished(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that has its name once the block is over, and goes with an error."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, "exists already, and is never written over", str(path))
    under = path.with_name(f"{path.name}.unfinished")
    try:
        with under.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        under.rename(path)
    except BaseException:
        with suppress(OSError):
            under.unlink()
        raise


def rows_at_a_time(opened: ZoomIndex) -> int:
    """Return how many rows with all fields DRAM takes, by the mean of the index."""
    each: int = opened.stats()["file_bytes"] // max(1, len(opened))
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(1, each)))


def field_kinds(opened: ZoomIndex, fields: Iterable[str], taken: tuple[str, ...]) -> dict[str, str]:
    """Return the types of fields by their names in a table, none of which is one of those taken.

    A document's is that of the first value found: bytes, or else text, which holds JSON as well.
    """
    names = [*fields]
    if unknown := [name for name in names if name not in opened.fields]:
        raise ValueError(
            f"--fields {unknown[0]!r}: expected some of {', '.join(opened.fields) or 'no field, as it has none'}"
        )
    found, kinds = opened.fields | _documents(opened, names), dict[str, str]()
    for name in names:
        shown = name
        while shown in taken or shown in kinds:
            shown += "_"
        kinds[shown] = found[name]
    return kinds


def _documents(opened: ZoomIndex, names: Iterable[str]) -> dict[str, str]:
    """Return which of the documents are bytes, by the first vectors of the index."""
    left = [name for name in names if opened.fields[name] == "document"]
    found, size = dict[str, str](), rows_at_a_time(opened)
    ids = next(opened.blocks(), ((), ()))[0] if left else ()
    for start in range(0, len(ids), size):
        for name, column in opened.fetch(ids[start : start + size], left).items():
            if values := [value for value in column if value is not None]:
                found[name] = "bytes" if isinstance(values[0], bytes) else "document"
        left = [name for name in left if name not in found]
        if not left:
            break
    return found


@contextmanager
def write_table(target: Path, kinds: Mapping[str, Any]) -> Iterator[TableWriter]:
    """Open a new .parquet or .jsonl file of columns; `kinds` gives the type of each, or the dtype of a matrix."""
    with unfinished(target) as file, ExitStack() as stack:
        if target.suffix.lower() == ".jsonl":
            yield partial(_write_lines, file)
            return
        arrow, parquet = parquet_of(str(target))
        schema = arrow.schema([(name, _arrow_type(arrow, kind)) for name, kind in kinds.items()])
        writer = stack.enter_context(parquet.ParquetWriter(file, schema))
        yield lambda columns: writer.write_table(_arrow_table(arrow, schema, kinds, columns))


def _write_lines(file: IO[bytes], columns: Mapping[str, Column]) -> None:
    values = [[None if each != each else each for each in column.tolist()] for column in columns.values()]
    for row in zip(*values, strict=True):
        line = json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, default=plain_value)
        file.write(f"{line}\n".encode(errors="backslashreplace"))  # half a surrogate pair becomes its escape in JSON


def _arrow_type(arrow: Any, kind: Any) -> Any:
    if isinstance(kind, tuple):
        return arrow.list_(arrow.from_numpy_dtype(kind[0]), kind[1])
    types = {
        "int64": arrow.int64(), "float64": arrow.float64(), "float32": arrow.float32(), "bool": arrow.bool_(),
        "datetime": arrow.timestamp("us"), "bytes": arrow.binary(),
    }  # fmt: skip
    if kind.startswith("list["):
        return arrow.list_(_arrow_type(arrow, kind[len("list[") : -1]))
    return types.get(kind, arrow.string())


def _arrow_table(arrow: Any, schema: Any, kinds: Mapping[str, Any], columns: Mapping[str, Column]) -> Any:
    arrays = []
    for field, (name, column) in zip(schema, columns.items(), strict=True):
        if column.ndim == 2:
            flat = arrow.array(np.ascontiguousarray(column).reshape(-1), field.type.value_type)
            arrays.append(arrow.FixedSizeListArray.from_arrays(flat, column.shape[1]))
            continue
        if kinds[name] not in _PLAIN and not kinds[name].startswith("list["):
            column = _of_one_kind(name, column, kinds[name])
        missing = np.ma.getmaskarray(column) if isinstance(column, np.ma.MaskedArray) else None
        try:
            arrays.append(arrow.array(np.ma.getdata(column), field.type, mask=missing, from_pandas=True))
        except UnicodeEncodeError:
            raise ValueError(f"{name!r} holds text that is no Unicode: use .jsonl, where .parquet fails") from None
    return arrow.Table.from_arrays(arrays, schema=schema)


def _of_one_kind(name: str, values: Column, kind: str) -> Column:
    """Return values as bytes, or as text: other values than text as JSON."""
    made = np.empty(len(values), np.object_)
    for row, value in enumerate(values):
        if value is not None and isinstance(value, bytes) != (kind == "bytes"):
            raise ValueError(f"document {name!r} holds bytes and other values: use .jsonl, where .parquet fails")
        made[row] = value if value is None or isinstance(value, str | bytes) else json.dumps(value, ensure_ascii=False)
    return made


def write_header(file: IO[bytes], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file."""
    about = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)


def write_archive(
    target: Path, arrays: Mapping[str, tuple[Any, tuple[int, ...]]], pieces: Iterable[tuple[Column, ...]]
) -> None:
    """Write a .npz file of arrays, whose dtypes and shapes are known, from pieces of their rows."""
    with unfinished(target) as whole, zipfile.ZipFile(whole, "w") as archive, ExitStack() as stack:
        folder = target.absolute().parent
        first, *others = arrays
        aside = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in others]
        with archive.open(f"{first}.npy", "w", force_zip64=True) as file:
            write_header(file, *arrays[first])
            for piece in pieces:
                for into, part, (dtype, _) in zip((file, *aside), piece, arrays.values(), strict=True):
                    into.write(np.ascontiguousarray(part, dtype).tobytes())
        for name, kept in zip(others, aside, strict=True):
            kept.seek(0)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                write_header(file, *arrays[name])
                shutil.copyfileobj(kept, file)
