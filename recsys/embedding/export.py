"""Whole tables written to files, block by block, so that DRAM stays bounded at any size.

Untrained rows are written with their first values. Of a table for any ids, the rows of its ids are written, in the
order of ``module.ids()``, and at last the row that unknown ids share. A file appears under its name once it is whole.
If tables are divided among trainers, every rank writes all rows, to a path of its own.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import IO, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from memhier.arguments import as_ints, check_int
from memhier.lazy import extra_for
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.serving.quantised_rows import Quantised, encode_rows, encoded_bytes
from memhier.recsys.embedding.serving.row_source import OpenedRows, RowSource
from memhier.recsys.embedding.tables import check_ids

__all__ = [
    "export_npy",
    "export_parquet",
    "export_quantised",
    "export_safetensors",
    "to_embedding_bag",
    "vector_blocks",
]

Path = str | os.PathLike[str]
Floats = NDArray[np.float32]

_BLOCK_BYTES = 2**22
_HEADER = struct.Struct("<Q")


def to_embedding_bag(module: TableModule, table: int = 0, mode: str = "sum") -> nn.EmbeddingBag:
    """Return a table as torch's module, in memory: for small tables.

    Parameters
    ----------
    module
        The tables.
    table
        Number of the table in its collection.
    mode
        ``"sum"``, ``"mean"`` or ``"max"``, as in torch.

    Raises
    ------
    ValueError
        For a table for any ids.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, to_embedding_bag
    >>> with EmbeddingBag(10, 4, mode="sum", dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     copy = to_embedding_bag(bag)
    ...     bool((copy(torch.tensor([[7, 9]])) == bag(torch.tensor([[7, 9]]))).all())
    True
    """
    _check_rows(module, table, "torch's module")
    spec = module.specs[table]
    weight = torch.empty(spec.rows, spec.dim)
    for start, _, rows in _blocks(module, table):
        weight[start : start + len(rows)] = torch.from_numpy(rows)
    return nn.EmbeddingBag(spec.rows, spec.dim, mode=mode, sparse=True, _weight=weight)


def export_npy(module: TableModule, path: Path, table: int = 0) -> None:
    """Write a table's weights as a .npy file, float32 [rows, dim].

    Parameters
    ----------
    module
        The tables.
    path
        The file to write; one that is there is replaced.
    table
        Number of the table in its collection.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys import EmbeddingBag, export_npy
    >>> folder = tempfile.mkdtemp()
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=folder + "/bag") as bag:
    ...     export_npy(bag, folder + "/weights.npy")
    >>> np.load(folder + "/weights.npy", mmap_mode="r").shape
    (10, 4)
    """
    spec = module.specs[table]
    header = {"descr": "<f4", "fortran_order": False, "shape": (_count(module, table), spec.dim)}
    with _whole_file(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, rows in _blocks(module, table):
            file.write(rows.astype("<f4", copy=False).data)


def export_safetensors(module: TableModule, path: Path) -> None:
    """Write the weights of all tables as one .safetensors file, each under its table's name.

    The ids of a table for any ids are int64, under its name and ``.ids``.

    Parameters
    ----------
    module, path
        As in :func:`export_npy`.

    Examples
    --------
    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig, export_safetensors
    >>> folder, config = tempfile.mkdtemp(), EmbeddingBagConfig(name="item", num_embeddings=10, embedding_dim=4)
    >>> with EmbeddingBagCollection([config], dram="32MiB", path=folder + "/tables") as tables:
    ...     export_safetensors(tables, folder + "/weights.safetensors")
    >>> load_file(folder + "/weights.safetensors")["item"].shape
    torch.Size([10, 4])
    """
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for table, spec in enumerate(module.specs):
        count = _count(module, table)
        shapes[spec.name] = "F32", (count, spec.dim), 4 * count * spec.dim
        if spec.id_space is not None:
            shapes[f"{spec.name}.ids"] = "I64", (count - 1,), 8 * (count - 1)
    with _whole_file(path) as file:
        _write_header(file, shapes, {})
        for table, spec in enumerate(module.specs):
            for _, _, rows in _blocks(module, table):
                file.write(rows.astype("<f4", copy=False).data)
            for ids in module.ids(table) if spec.id_space is not None else ():
                file.write(ids.numpy().astype("<i8", copy=False).data)


def export_parquet(module: TableModule, path: Path, table: int = 0) -> None:
    """Write a table's weights as a Parquet file: columns ``id`` and ``embedding``, a list of fixed length.

    The row that unknown ids share, in a table for any ids, has no id (null).

    Parameters
    ----------
    module, path, table
        As in :func:`export_npy`.

    Raises
    ------
    ImportError
        If pyarrow is not installed.

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow.parquet
    >>> from memhier.recsys import EmbeddingBag, export_parquet
    >>> folder = tempfile.mkdtemp()
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=folder + "/bag") as bag:
    ...     export_parquet(bag, folder + "/weights.parquet")
    >>> pyarrow.parquet.read_table(folder + "/weights.parquet").slice(9)["id"].to_pylist()
    [9]
    """
    with extra_for("Parquet"):
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    dim = module.specs[table].dim
    schema = arrow.schema([("id", arrow.int64()), ("embedding", arrow.list_(arrow.float32(), dim))])
    with _whole_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for _, ids, rows in _blocks(module, table):
            column = arrow.array(ids if len(ids) else [None], arrow.int64())
            lists = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), dim)
            writer.write_table(arrow.table([column, lists], schema=schema))


def export_quantised(module: TableModule, path: Path, table: int = 0, dtype: Quantised = "int8") -> None:
    """Write a table's weights for serving, as a .safetensors file that :class:`QuantisedTable` reads.

    Parameters
    ----------
    module, path, table
        As in :func:`export_npy`.
    dtype
        ``"int8"``: a row's range is divided into 255 steps; with each row its step and its least weight. No weight is
        off by more than 0.501 steps and 2**-22 times the row's largest magnitude. ``"fp16"``: half precision; relative
        error at most 2**-11 from 6.2e-5 up, below that absolute error at most 2**-25.

    Raises
    ------
    ValueError
        For a weight that is NaN or infinite, or too large.

    Notes
    -----
    A file is one tensor ``weight``, and of a table for any ids a tensor ``ids`` beside it: the ids of its rows, after
    which come the row of unknown ids and that of the padding. Rows of int8 are codes, step and least weight: the fused
    8-bit rows that ``torch.ops.quantized.embedding_bag_byte_unpack`` and FBGEMM take.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, QuantisedTable, export_quantised
    >>> folder = tempfile.mkdtemp()
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=folder + "/bag") as bag:
    ...     export_quantised(bag, folder + "/serving.safetensors")
    ...     weights = bag.weights([7, 9])
    >>> with QuantisedTable(folder + "/serving.safetensors", dram="8MiB") as table:
    ...     bool((table.rows([7, 9]) - weights).abs().max() < 0.01)
    True
    """
    if dtype not in get_args(Quantised):
        raise ValueError(f"dtype={dtype!r}: expected 'int8' or 'fp16'")
    spec = module.specs[table]
    width, count, any_ids = encoded_bytes(dtype, spec.dim), _count(module, table), spec.id_space is not None
    about = {"padding": str(spec.padding_id)} if spec.padding_id is not None and any_ids else {}
    # A row lies in one place, so that one read brings it.
    kind, stored, cells = ("F16", "fp16", spec.dim) if dtype == "fp16" else ("U8", "int8 rows", width)
    ids: dict[str, tuple[str, tuple[int, ...], int]] = {"ids": ("I64", (count - 1,), 8 * (count - 1))}
    written = count + any_ids
    shapes = (ids if any_ids else {}) | {"weight": (kind, (written, cells), width * written)}
    with _whole_file(path) as file:
        _write_header(file, shapes, {"memhier": f"quantised {stored}"} | about)
        for some in module.ids(table) if any_ids else ():
            file.write(some.numpy().astype("<i8", copy=False).data)
        for start, _, rows in _blocks(module, table):
            file.write(encode_rows(rows, dtype, start).data)
        if any_ids:
            file.write(encode_rows(module.tables.read_padding(table)[:, : spec.dim], dtype, count).data)


def vector_blocks(
    tables: TableModule | RowSource, table: int = 0, *, ids: Any = None, rows: int = 65_536
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Return an iterator of a table's rows in blocks, for an index of vectors: the whole table is never in DRAM.

    Parameters
    ----------
    tables
        A module of tables; or a :class:`TableReader`, whose checkpoint it stays at, or a :class:`QuantisedTable`.
    table
        Number of the table in its collection.
    ids
        The rows to give, integers [n], rising; by default all. ``np.flatnonzero(reader.trained(ids))`` leaves out those
        that were never trained.
    rows
        Most rows of a block.

    Yields
    ------
    ids : numpy.ndarray
        int64 [b].
    vectors : numpy.ndarray
        float32 [b, dim].

    Raises
    ------
    IndexError
        For a row that the table does not have.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, vector_blocks
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     [(ids.tolist(), vectors.shape) for ids, vectors in vector_blocks(bag, ids=[2, 3, 9], rows=2)]
    [([2, 3], (2, 4)), ([9], (1, 4))]
    """
    spec, rows = tables.specs[table], check_int("rows", rows, 1)
    wanted = None if ids is None else as_ints("ids", ids)
    if wanted is not None:
        if spec.id_space is None:
            check_ids(spec, wanted, "ids")
        if wanted.ndim != 1 or (np.diff(wanted) <= 0).any():
            raise ValueError(f"ids: expected rising numbers [n], got shape {list(wanted.shape)}")
    if isinstance(tables, RowSource):
        opened = tables.opened()
        read, rows = partial(_served, tables, opened, table), min(rows, tables.call_rows)
        if spec.id_space is not None and wanted is None:
            wanted = opened.ids(table)
    else:
        read, rows = partial(_weights, tables, table), min(rows, tables.tables.call_rows)
        if spec.id_space is not None and wanted is None:
            return ((some, read(some)) for some in _id_blocks(tables, table, rows))
    return _vector_blocks(spec.rows, wanted, rows, read)


def _vector_blocks(
    count: int, wanted: NDArray[np.int64] | None, rows: int, read: Callable[[NDArray[np.int64]], Floats]
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    for start in range(0, count if wanted is None else len(wanted), rows):
        stop = start + rows
        some = np.arange(start, min(stop, count)) if wanted is None else wanted[start:stop].copy()
        yield some, read(some)


def _served(tables: RowSource, opened: OpenedRows, table: int, ids: NDArray[np.int64]) -> Floats:
    found: Floats = tables.found(opened, table, ids).numpy()
    return found


def _weights(module: TableModule, table: int, ids: NDArray[np.int64]) -> Floats:
    found: Floats = module.weights(ids, table).numpy()
    return found


def _count(module: TableModule, table: int) -> int:
    """Return the number of rows that are written."""
    spec = module.specs[table]
    return spec.rows if spec.id_space is None else 1 + sum(len(ids) for ids in module.ids(table))


def _blocks(module: TableModule, table: int) -> Iterator[tuple[int, NDArray[np.int64], Floats]]:
    """Yield a table's weights in blocks, with the number of each block's first row, and their ids.

    The last block of a table for any ids is the row of unknown ids alone, without an id.
    """
    spec, width = module.specs[table], max(module.tables.widths)
    step = max(1, min(_BLOCK_BYTES // (4 * width), module.tables.call_rows))
    start = 0
    for some in _id_blocks(module, table, step):
        yield start, some, _weights(module, table, some)
        start += len(some)
    if spec.id_space is not None:
        yield start, np.empty(0, np.int64), module.tables.read_unknown(table)[:, : spec.dim]


def _id_blocks(module: TableModule, table: int, step: int) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of a table in blocks of at most so many."""
    spec = module.specs[table]
    if spec.id_space is None:
        for start in range(0, spec.rows, step):
            yield np.arange(start, min(start + step, spec.rows))
        return
    for block in module.ids(table):
        for start in range(0, len(block), step):
            yield block[start : start + step].numpy()


def _check_rows(module: TableModule, table: int, call: str) -> None:
    spec = module.specs[table]
    if spec.id_space is not None:
        raise ValueError(
            f"table={table}: {spec.name!r} is for any ids, which {call} does not take; export_parquet and "
            "export_safetensors write rows with their ids"
        )


def _write_header(
    file: IO[bytes], shapes: Mapping[str, tuple[str, tuple[int, ...], int]], about: dict[str, str]
) -> int:
    """Write the head of a .safetensors file; return the offset of the tensors."""
    header: dict[str, Any] = {"__metadata__": about} if about else {}
    end = 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(_HEADER.pack(len(text)) + text)
    return _HEADER.size + len(text)


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to be written; it takes its name if the block ends well, and is deleted otherwise."""
    final = os.fspath(path)
    part = f"{final}.part"
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, final)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise
