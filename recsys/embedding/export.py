"""Whole tables written to files, block by block, so that DRAM stays bounded at any size.

Untrained rows are written with their first values. A file appears under its name once it is whole. If tables
are divided among trainers, every rank writes all rows, to a path of its own.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier.errors import CorruptionError, FormatError
from memhier.fields import decode_json, integer, one_of, record, row, sequence, text
from memhier.io.outside import reading
from memhier.lazy import extra_for
from memhier.recsys.embedding.module import TableModule

__all__ = [
    "QuantisedTable",
    "export_npy",
    "export_parquet",
    "export_quantised",
    "export_safetensors",
    "to_embedding_bag",
]

Quantised = Literal["int8", "fp16"]
Path = str | os.PathLike[str]
Floats = NDArray[np.float32]

_BLOCK_BYTES = 2**22
_HEADER = struct.Struct("<Q")
_TENSOR = record({
    "dtype": one_of("U8", "F16", "F32"), "shape": sequence(integer(0, 2**48), 1, 2),
    "data_offsets": row(integer(0, 2**62), integer(0, 2**62)),
})  # fmt: skip
_HEADER_CHECK = record(
    {"__metadata__": record({"memhier": text("quantised (int8|fp16)")}), "weight": _TENSOR},
    {"scale": _TENSOR, "least": _TENSOR},
)


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
    spec = module.specs[table]
    weight = torch.empty(spec.rows, spec.dim)
    for start, rows in _blocks(module, table):
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
    header = {"descr": "<f4", "fortran_order": False, "shape": (spec.rows, spec.dim)}
    with _whole_file(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, rows in _blocks(module, table):
            file.write(rows.astype("<f4", copy=False).data)


def export_safetensors(module: TableModule, path: Path) -> None:
    """Write the weights of all tables as one .safetensors file, each under its table's name.

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
    shapes = {spec.name: ("F32", (spec.rows, spec.dim), 4 * spec.rows * spec.dim) for spec in module.specs}
    with _whole_file(path) as file:
        _write_header(file, shapes, {})
        for table in range(len(module.specs)):
            for _, rows in _blocks(module, table):
                file.write(rows.astype("<f4", copy=False).data)


def export_parquet(module: TableModule, path: Path, table: int = 0) -> None:
    """Write a table's weights as a Parquet file: columns ``id`` and ``embedding``, a list of fixed length.

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
        for start, rows in _blocks(module, table):
            ids = arrow.array(np.arange(start, start + len(rows)))
            lists = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), dim)
            writer.write_table(arrow.table([ids, lists], schema=schema))


def export_quantised(module: TableModule, path: Path, table: int = 0, dtype: Quantised = "int8") -> None:
    """Write a table's weights for serving, as a .safetensors file that :class:`QuantisedTable` reads.

    Parameters
    ----------
    module, path, table
        As in :func:`export_npy`.
    dtype
        ``"int8"``: a row's range is divided into 255 steps; with each row its scale and its least value, so no weight
        is off by more than half a step. ``"fp16"``: rounded to half precision.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, QuantisedTable, export_quantised
    >>> folder = tempfile.mkdtemp()
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=folder + "/bag") as bag:
    ...     export_quantised(bag, folder + "/serving.safetensors")
    ...     weights = bag.weights([7, 9])
    >>> bool((QuantisedTable(folder + "/serving.safetensors").rows([7, 9]) - weights).abs().max() < 0.01)
    True
    """
    if dtype not in get_args(Quantised):
        raise ValueError(f"dtype={dtype!r}: expected 'int8' or 'fp16'")
    spec = module.specs[table]
    cells = spec.rows * spec.dim
    shape: tuple[int, ...] = (spec.rows, spec.dim)
    shapes: dict[str, tuple[str, tuple[int, ...], int]]
    if dtype == "fp16":
        shapes = {"weight": ("F16", shape, 2 * cells)}
    else:
        row = ("F32", (spec.rows,), 4 * spec.rows)
        shapes = {"weight": ("U8", shape, cells), "scale": row, "least": row}
    with _whole_file(path) as file:
        begin = _write_header(file, shapes, {"memhier": f"quantised {dtype}"})
        for start, rows in _blocks(module, table):
            if dtype == "fp16":
                file.write(rows.astype("<f2").data)
                continue
            least, step = rows.min(axis=1), np.ptp(rows, axis=1) / np.float32(255)
            codes = np.rint((rows - least[:, None]) / np.where(step > 0, step, 1)[:, None]).astype(np.uint8)
            for at, values in (
                (start * spec.dim, codes),
                (cells + 4 * start, step),
                (cells + 4 * (spec.rows + start), least),
            ):
                file.seek(begin + at)
                file.write(np.ascontiguousarray(values).data)


class QuantisedTable:
    """A table that :func:`export_quantised` wrote, read through the page cache and never changed.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    FormatError
        For any other file.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, QuantisedTable, export_quantised
    >>> folder = tempfile.mkdtemp()
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=folder + "/bag") as bag:
    ...     export_quantised(bag, folder + "/serving.safetensors", dtype="fp16")
    >>> table = QuantisedTable(folder + "/serving.safetensors")
    >>> table.shape, table.rows([7, 9]).dtype
    ((10, 4), torch.float32)
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
            length = _HEADER.unpack(head)[0] if len(head) == _HEADER.size else 2**40
            raw = file.read(length) if length < 2**20 else b""
            size = os.fstat(file.fileno()).st_size
        try:
            header = decode_json(raw, os.fspath(path), _HEADER_CHECK)
        except CorruptionError as error:
            raise FormatError(f"{os.fspath(path)}: not a table that export_quantised wrote: {error}") from error
        types: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
        start = _HEADER.size + length
        tensors = {name: header[name] for name in ("weight", "scale", "least") if name in header}
        end = start + max(part["data_offsets"][1] for part in tensors.values())
        if size < end:
            raise FormatError(f"{os.fspath(path)}: has {size} bytes, expected {end}")
        with reading(path):
            self._parts: dict[str, NDArray[Any]] = {
                name: np.memmap(
                    os.fspath(path), types[part["dtype"]], "r", start + part["data_offsets"][0], tuple(part["shape"])
                )
                for name, part in tensors.items()
            }
        shapes = {name: part.shape for name, part in self._parts.items()}
        numbers = {name: shape[:1] for name, shape in shapes.items()}
        if (
            len(tensors) == 2
            or len(shapes["weight"]) != 2
            or any(shape != shapes["weight"][:1] for shape in numbers.values())
        ):
            raise FormatError(f"{os.fspath(path)}: tensors of shapes {shapes} are no table")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and weights in each."""
        rows, dim = self._parts["weight"].shape
        return rows, dim

    def rows(self, ids: Any) -> Tensor:
        """Return rows, float32 [n, dim].

        Parameters
        ----------
        ids
            Integers [n].

        Raises
        ------
        IndexError
            For a row that the table does not have.
        """
        wanted = np.asarray(ids, np.int64)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= self.shape[0]):
            raise IndexError(f"ids: expected rows 0 to {self.shape[0] - 1}, got {wanted.min()} to {wanted.max()}")
        found = self._parts["weight"][wanted].astype(np.float32)
        if "scale" in self._parts:
            found = found * self._parts["scale"][wanted][..., None] + self._parts["least"][wanted][..., None]
        return torch.from_numpy(np.ascontiguousarray(found, np.float32))


def _blocks(module: TableModule, table: int) -> Iterator[tuple[int, Floats]]:
    """Yield a table's weights in blocks, and the number of each block's first row."""
    spec, width = module.specs[table], max(module.tables.widths)
    step = max(1, min(_BLOCK_BYTES // (4 * width), module.tables.call_rows))
    for start in range(0, spec.rows, step):
        yield start, module.weights(np.arange(start, min(start + step, spec.rows)), table).numpy()


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
