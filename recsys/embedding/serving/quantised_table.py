"""QuantisedTable: a table for inference alone, in a file of quantised rows."""

import os
import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError
from memhier.fields import decode_json, integer, one_of, record, row, sequence, text
from memhier.io.reader import Reader
from memhier.recsys.embedding.ids.hash64 import Hash64
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.serving.call_rows import CALL_ID_BYTES, call_rows_of, reader_bytes
from memhier.recsys.embedding.serving.quantised_rows import Quantised, decode_rows
from memhier.recsys.embedding.serving.row_cache import RowCache
from memhier.recsys.embedding.serving.row_source import OpenedRows, RowSource
from memhier.recsys.embedding.serving.served_ids import ServedIds
from memhier.recsys.embedding.tables import Floats, Ints
from memhier.shield import shielded, shielded_init

__all__ = ["QuantisedTable"]

Bytes = NDArray[np.uint8]
Path = str | os.PathLike[str]

_HEADER = struct.Struct("<Q")
_SIZES = {"U8": 1, "F16": 2, "F32": 4, "I64": 8}
_BLOCK_BYTES = 2**20
_TENSOR = record({
    "dtype": one_of(*_SIZES), "shape": sequence(integer(0, 2**48), 1, 2),
    "data_offsets": row(integer(0, 2**62), integer(0, 2**62)),
})  # fmt: skip
_CHECK = record(
    {
        "__metadata__": record({"memhier": text("quantised (int8|fp16|int8 rows)")}, {"padding": text(r"-?\d{1,19}")}),
        "weight": _TENSOR,
    },
    {"scale": _TENSOR, "least": _TENSOR, "ids": _TENSOR},
)


class QuantisedTable(RowSource):
    """A table that :func:`export_quantised` wrote, looked up on SSD through a DRAM budget.

    Any number of threads and processes may read a file. An export that replaces it is there for tables opened later.

    Parameters
    ----------
    path
        The file.
    dram
        Bytes for everything: working memory, and a cache of rows as they lie in the file.
    threads
        Threads that look up at a time, for which working memory is set aside.

    Attributes
    ----------
    specs
        One table, ``"weight"``.

    Raises
    ------
    BudgetError
        When `dram` is too small; the message says how much would be enough.
    FormatError
        For any other file.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, QuantisedTable, export_quantised
    >>> folder = tempfile.mkdtemp()
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=folder + "/bag") as bag:
    ...     export_quantised(bag, folder + "/serving.safetensors", dtype="fp16")
    >>> with QuantisedTable(folder + "/serving.safetensors", dram="8MiB") as table:
    ...     table.shape, table.rows([7, 9]).dtype
    ((10, 4), torch.float32)
    """

    @shielded_init
    def __init__(self, path: Path, *, dram: int | str = "64MiB", threads: int = 1) -> None:
        budget, threads = parse_bytes(dram), check_int("threads", threads, 1, 4096)
        self._dtype: Quantised
        self._dtype, rows, dim, self._parts, end, ids = _layout(path)
        padding = None if ids is None else ids.padding
        self.specs = (TableSpec("weight", rows, dim, id_space=None if ids is None else Hash64(), padding_id=padding),)
        self._ids: dict[int, ServedIds] = {}
        self._reader = Reader()
        self._closed = False
        try:
            self._file = self._reader.add(path, end)
            width = sum(size for _, size in self._parts)
            fixed = reader_bytes(self._reader, threads) + (0 if ids is None else ServedIds.bytes_for(rows - 2))
            self.call_rows, call_bytes = call_rows_of(budget - fixed, threads, 3 * width + 12 * dim)
            of_row = RowCache.row_bytes(width, "u1")
            if (room := budget - fixed - call_bytes) < of_row:
                enough = fixed + 2 * (of_row + threads * (3 * width + 12 * dim + CALL_ID_BYTES))
                raise BudgetError(
                    f"dram={format_bytes(budget)}: too little beside {format_bytes(fixed)} for buffers; "
                    f"dram={enough} would be enough"
                )
            if ids is not None:
                self._ids[0] = ServedIds(self.specs[0], ids.read(path), np.arange(rows - 2), os.fspath(path))
            self._cache = RowCache(min(room, of_row * rows), width, "u1", self.call_rows)
        except BaseException:
            self._reader.close()
            raise

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and weights in each."""
        return self.specs[0].rows, self.specs[0].dim

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; a look-up takes working memory beside it, for which the budget has room."""
        ids = sum(one.memory_bytes for one in self._ids.values())
        return 0 if self._closed else self._cache.memory_bytes + self._reader.memory_bytes + ids

    def stats(self) -> dict[str, Any]:
        """Return plain numbers, as :meth:`TableReader.stats` does."""
        self._check_open()
        cache, reader = self._cache, self._reader.stats()
        return {
            "capacity": cache.capacity,
            "hits": cache.hits,
            "misses": cache.misses,
            "reads": reader["reads"],
            "read_bytes": reader["bytes"],
        }

    def opened(self) -> OpenedRows:
        """Return the rows for a call."""
        self._check_open()
        return OpenedRows(self.specs, self._ids, self._rows)

    def _rows(self, table: int, ids: Ints) -> Floats:
        return decode_rows(self._cache.rows(ids, partial(self._read, ids)), self._dtype)

    def _read(self, ids: Ints, missing: Ints) -> Bytes:
        wanted = ids[missing]
        parts = [self._reader.read(self._file, begin + size * wanted, size) for begin, size in self._parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    @shielded
    def close(self) -> None:
        """Free memory and the file."""
        self._closed = True
        self._reader.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the table was closed")


@dataclass(frozen=True)
class _Ids:
    """The place of the ids in a file, their number, and the id of the padding."""

    start: int
    count: int
    padding: int | None

    def read(self, path: Path) -> Ints:
        found = np.empty(self.count, "<i8")
        with open(path, "rb") as file:
            file.seek(self.start)
            for begin in range(0, found.nbytes, _BLOCK_BYTES):
                part = found.view(np.uint8)[begin : begin + _BLOCK_BYTES].data
                if file.readinto(part) != len(part):
                    raise FormatError(f"{os.fspath(path)}: ends before its ids do")
        return found.astype(np.int64, copy=False)


def _layout(path: Path) -> tuple[Quantised, int, int, list[tuple[int, int]], int, _Ids | None]:
    """Return the type of a file's rows, number and width, each part's place and bytes of a row, the end, and its ids.

    Files of the first version have the codes, the steps and the least weights of all rows one after the other.
    """
    place = os.fspath(path)
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
        length = _HEADER.unpack(head)[0] if len(head) == _HEADER.size else 2**40
        raw = file.read(length) if length < 2**20 else b""
        size = os.fstat(file.fileno()).st_size
    try:
        header = decode_json(raw, place, _CHECK)
    except CorruptionError as error:
        raise FormatError(f"{place}: not a table that export_quantised wrote: {error}") from error
    kind = header["__metadata__"]["memhier"].removeprefix("quantised ")
    tensors = {name: header[name] for name in ("weight", "scale", "least") if name in header}
    expected = {"int8": ["U8", "F32", "F32"], "int8 rows": ["U8"], "fp16": ["F16"]}[kind]
    shapes = [part["shape"] for part in tensors.values()]
    count = shapes[0][0]
    spans = [part["data_offsets"] for part in tensors.values()]
    widths = [_SIZES[part["dtype"]] * (part["shape"][1] if len(part["shape"]) == 2 else 1) for part in tensors.values()]
    if (
        [part["dtype"] for part in tensors.values()] != expected
        or [len(shape) for shape in shapes] != [2, 1, 1][: len(shapes)]
        or any(shape[0] != count for shape in shapes)
        or any(end - begin != count * width for (begin, end), width in zip(spans, widths, strict=True))
        or (dim := shapes[0][1] - 8 * (kind == "int8 rows")) < 1
        or count < 1
    ):
        raise FormatError(f"{place}: tensors of shapes {shapes} are no table")
    start = _HEADER.size + length
    last = start + max(end for _, end in spans)
    ids = None
    if (named := header.get("ids")) is not None:
        begin, end = named["data_offsets"]
        if (named["dtype"], named["shape"]) != ("I64", [count - 2]) or end - begin != 8 * (count - 2):
            raise FormatError(f"{place}: ids of shape {named['shape']} are not those of {count} rows")
        padding = header["__metadata__"].get("padding")
        ids, last = _Ids(start + begin, count - 2, None if padding is None else int(padding)), max(last, start + end)
    if size < last:
        raise FormatError(f"{place}: has {size} bytes, expected {last} of a table")
    parts = [(start + begin, width) for (begin, _), width in zip(spans, widths, strict=True)]
    return "fp16" if kind == "fp16" else "int8", count, dim, parts, last, ids
