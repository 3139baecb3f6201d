"""Data sets of recommendation, read from the published files as a stream of batches, in constant memory.

Text becomes ids by hashing (CRC-32 of the text, modulo the rows of a table), so there is no vocabulary in memory. Row 0
stands for a missing value; hashed values get the other rows.
"""

import csv
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memhier.arguments import check_int
from memhier.errors import FormatError
from memhier.io.outside import npy_header, reading
from memhier.lazy import extra_for

__all__ = [
    "CTRBatch",
    "read_amazon",
    "read_avazu",
    "read_criteo",
    "read_criteo_npy",
    "read_criteo_parquet",
    "read_lightgcn",
    "read_movielens",
]

Path = str | os.PathLike[str]
T = TypeVar("T")
U = TypeVar("U")

CRITEO_NUMBERS, CRITEO_IDS = 13, 26
AVAZU_COLUMNS = 22  # those after id and click


@dataclass(frozen=True, slots=True)
class CTRBatch:
    r"""Samples of a data set of clicks.

    Attributes
    ----------
    labels
        float32 [n].
    dense
        float32 [n, numbers]: log(x + 3) of each number x, with x + 3 at least 0.001; 0 if it is missing.
    ids
        int64 [n, tables]: a row of each table.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import read_criteo
    >>> path = tempfile.mkdtemp() + "/day.tsv"
    >>> with open(path, "w") as file:
    ...     print(1, *[0] * 13, *["68fd1e64"] * 26, sep="\t", file=file)
    >>> batch = next(read_criteo(path, rows=[1000] * 26))
    >>> batch.labels.tolist(), batch.dense.shape, batch.ids.shape
    ([1.0], torch.Size([1, 13]), torch.Size([1, 26]))
    """

    labels: Tensor
    dense: Tensor
    ids: Tensor


def read_criteo(path: Path, rows: Sequence[int], batch: int = 4096) -> Iterator[CTRBatch]:
    r"""Read Criteo's TSV (label, 13 integers, 26 hashes; no header; cells may be empty), plain, .gz or .xz.

    Parameters
    ----------
    path
        The file.
    rows
        The number of rows of each of the 26 tables. Row 0 stands for a missing value.
    batch
        Samples at a time; the last batch may have fewer.

    Yields
    ------
    CTRBatch
        Of at most `batch` samples.

    Raises
    ------
    FormatError
        For a line of another shape; the message has its number.
    ValueError, TypeError
        For another number of tables, and numbers below 1.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import read_criteo
    >>> path = tempfile.mkdtemp() + "/day.tsv"
    >>> with open(path, "w") as file:
    ...     print(0, *[0] * 13, *["68fd1e64"] * 26, sep="\t", file=file)
    ...     print(1, *[0] * 13, *["68fd1e64"] * 26, sep="\t", file=file)
    >>> [(batch.labels.tolist(), batch.ids[0, 0].item()) for batch in read_criteo(path, rows=[1000] * 26, batch=1)]
    [([0.0], 653), ([1.0], 653)]
    """
    _check(rows, CRITEO_IDS, batch)
    with _lines(path) as lines:
        for start, part in _chunks(lines, batch):
            cells = [line.rstrip("\n").split("\t") for line in part]
            _check_widths(path, cells, start, 1 + CRITEO_NUMBERS + CRITEO_IDS)
            yield _click_batch(path, start, cells, rows, 1 + CRITEO_NUMBERS)


def read_avazu(path: Path, rows: Sequence[int], batch: int = 4096) -> Iterator[CTRBatch]:
    """Read Avazu's CSV (header; id, click, hour, 21 columns), plain, .gz or .xz.

    The ids are the 22 columns from ``hour`` on, of which the hour of the day is kept; there are no numbers. Arguments,
    results and errors as in :func:`read_criteo`, for 22 tables.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import read_avazu
    >>> path = tempfile.mkdtemp() + "/train.csv"
    >>> with open(path, "w") as file:
    ...     print("id,click,hour", *[f"C{column}" for column in range(21)], sep=",", file=file)
    ...     print(1000, 1, 14102100, *["1fbe01fe"] * 21, sep=",", file=file)
    >>> batch = next(read_avazu(path, rows=[1000] * 22))
    >>> batch.labels.tolist(), batch.dense.shape, batch.ids.shape
    ([1.0], torch.Size([1, 0]), torch.Size([1, 22]))
    """
    _check(rows, AVAZU_COLUMNS, batch)
    with _lines(path) as lines:
        if not next(lines, "").startswith("id,click,hour,"):
            raise FormatError(f"{os.fspath(path)}: expected a header that begins with id,click,hour")
        for start, part in _chunks(lines, batch):
            with reading(path, f"lines {start + 2} to {start + 1 + len(part)}"):
                cells = [*csv.reader(part)]
            _check_widths(path, cells, start + 1, 2 + AVAZU_COLUMNS)
            clicks = [[line[1], line[2][-2:], *line[3:]] for line in cells]
            yield _click_batch(path, start + 1, clicks, rows, 1)


def read_criteo_npy(
    labels: Path, dense: Path, sparse: Path, rows: Sequence[int], batch: int = 4096
) -> Iterator[CTRBatch]:
    """Read one of Criteo's days as TorchRec's scripts write it: three .npy files, the numbers logarithms already.

    Parameters
    ----------
    labels, dense, sparse
        int32 [n] or [n, 1], float32 [n, 13], int32 [n, 26]. Mapped, not loaded.
    rows
        The number of rows of each table; ids are taken modulo it.
    batch
        As in :func:`read_criteo`, as are results.

    Raises
    ------
    FormatError
        For arrays of other shapes.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys import read_criteo_npy
    >>> folder = tempfile.mkdtemp()
    >>> day = {"label": np.ones(1), "dense": np.zeros((1, 13)), "sparse": np.full((1, 26), 1007)}
    >>> for name, array in day.items():
    ...     np.save(f"{folder}/{name}.npy", array)
    >>> paths = [f"{folder}/{name}.npy" for name in day]
    >>> next(read_criteo_npy(*paths, rows=[1000] * 26)).ids[0, :3].tolist()
    [7, 7, 7]
    """
    _check(rows, CRITEO_IDS, batch)
    parts = [_mapped(path) for path in (labels, dense, sparse)]
    wanted = parts[1].shape[:1]
    fits = parts[1].shape == (*wanted, CRITEO_NUMBERS) and parts[2].shape == (*wanted, CRITEO_IDS)
    if not fits or parts[0].shape[:1] != wanted or parts[0].size != wanted[0]:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise FormatError(
            f"{os.fspath(sparse)}: expected [n], [n, {CRITEO_NUMBERS}] and [n, {CRITEO_IDS}], got {shapes}"
        )
    for start in range(0, wanted[0], batch):
        cut = slice(start, start + batch)
        ids = parts[2][cut].astype(np.int64) % np.asarray(rows)
        numbers = parts[1][cut].astype(np.float32)
        clicks = parts[0][cut].reshape(-1).astype(np.float32)
        yield CTRBatch(torch.from_numpy(clicks), torch.from_numpy(numbers), torch.from_numpy(ids))


def read_criteo_parquet(path: Path, rows: Sequence[int], batch: int = 4096) -> Iterator[CTRBatch]:
    """Read Parquet with TorchRec's columns: ``label``, ``int_0`` to ``int_12`` and ``cat_0`` to ``cat_25``.

    Ids that are text are hashed, others are 1 + id modulo ``rows - 1``; row 0 stands for a missing one. Arguments,
    results and numbers are as in :func:`read_criteo`.

    Raises
    ------
    ImportError
        If pyarrow is not installed.
    FormatError
        When a column is missing, or the file is damaged.

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow.parquet
    >>> from memhier.recsys import read_criteo_parquet
    >>> path = tempfile.mkdtemp() + "/day.parquet"
    >>> names = ["label", *[f"int_{at}" for at in range(13)], *[f"cat_{at}" for at in range(26)]]
    >>> pyarrow.parquet.write_table(pyarrow.table({name: [1] for name in names}), path)
    >>> next(read_criteo_parquet(path, rows=[1000] * 26)).ids[0, :3].tolist()
    [2, 2, 2]
    """
    _check(rows, CRITEO_IDS, batch)
    with extra_for("Parquet"):
        parquet = import_module("pyarrow.parquet")
    numbers = [f"int_{at}" for at in range(CRITEO_NUMBERS)]
    ids = [f"cat_{at}" for at in range(CRITEO_IDS)]
    done = 0
    with reading(path, lambda: f"after {done:,} samples"), parquet.ParquetFile(path) as file:
        missing = {"label", *numbers, *ids} - set(file.schema_arrow.names)
        if missing:
            raise FormatError(f"{os.fspath(path)}: no column {min(missing)!r}")
        for part in file.iter_batches(batch, columns=["label", *numbers, *ids]):
            columns = part.to_pydict()
            cells = zip(*(columns[name] for name in numbers), strict=True)
            dense = np.array([[_number(cell) for cell in line] for line in cells], np.float32)
            found = [_column(columns[name], count) for name, count in zip(ids, rows, strict=True)]
            labels = torch.tensor(columns["label"], dtype=torch.float32)
            yield CTRBatch(labels, torch.from_numpy(dense), torch.from_numpy(np.stack(found, 1)))
            done += len(labels)


def read_movielens(path: Path, batch: int = 4096) -> Iterator[tuple[Tensor, Tensor]]:
    """Read MovieLens' ratings: ``ratings.csv`` (with a header) or ``ratings.dat`` (``::`` between cells).

    Plain, .gz or .xz.

    Parameters
    ----------
    path
        The file.
    batch
        Ratings at a time.

    Yields
    ------
    tuple of Tensor
        int64 [n, 2] of user and item; float32 [n] of ratings. The files' numbers begin at 1.

    Raises
    ------
    FormatError
        For a line of another shape.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import read_movielens
    >>> path = tempfile.mkdtemp() + "/ratings.dat"
    >>> with open(path, "w") as file:
    ...     print(1, 1193, 5, 978300760, sep="::", file=file)
    >>> pairs, ratings = next(read_movielens(path))
    >>> pairs.tolist(), ratings.tolist()
    ([[1, 1193]], [5.0])
    """
    check_int("batch", batch, 1, 2**31)
    with _lines(path) as lines:
        for start, part in _chunks(lines, batch):
            cells = [line.rstrip("\n").split("::" if "::" in line else ",") for line in part]
            if start == 0 and cells[0][0] == "userId":
                cells = cells[1:]
                start = 1
            _check_widths(path, cells, start, 4)
            found = [_parsed(path, number, _rating, line) for number, line in enumerate(cells, start + 1)]
            pairs = np.array([pair for pair, _ in found], np.int64).reshape(-1, 2)
            ratings = np.array([rating for _, rating in found], np.float32)
            yield torch.from_numpy(pairs), torch.from_numpy(ratings)


def read_amazon(
    path: Path, rows: Sequence[int], batch: int = 4096, *, item_first: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Read Amazon's reviews: JSON of a review a line, or CSV of ratings alone. Plain, .gz or .xz.

    The keys are those of 2014 and 2018 (``reviewerID``, ``asin``, ``overall``) or of 2023 (``user_id``,
    ``parent_asin``, ``rating``). CSV of 2023 has a header; that of earlier years has none.

    Parameters
    ----------
    path
        The file.
    rows
        The number of rows of the tables of users and items. Row 0 stands for a missing value.
    batch
        Reviews at a time; the last batch may have fewer.
    item_first
        CSV without a header begins with the item, as that of 2018 does; that of 2014 begins with the user.

    Yields
    ------
    tuple of Tensor
        int64 [n, 2] of the rows of user and item; float32 [n] of ratings.

    Raises
    ------
    FormatError
        For a line of another shape; the message has its number.
    ValueError, TypeError
        For another number of tables, and numbers below 1.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import read_amazon
    >>> path = tempfile.mkdtemp() + "/Books_5.json"
    >>> with open(path, "w") as file:
    ...     print('{"reviewerID": "A10000012B7CGYKOMPQ4L", "asin": "000100039X", "overall": 5.0}', file=file)
    >>> pairs, ratings = next(read_amazon(path, rows=[1000, 500]))
    >>> pairs.tolist(), ratings.tolist()
    ([[69, 76]], [5.0])
    """
    _check(rows, 2, batch)
    order = (1, 0, 2) if item_first else (0, 1, 2)
    with _lines(path) as lines:
        for start, part in _chunks(lines, batch):
            if start == 0 and part[0].startswith("user_id,"):
                names = part.pop(0).rstrip("\n").split(",")
                order, start = _parsed(path, 1, _amazon_order, names), 1
                if not part:
                    continue
            parse = _amazon_review if part[0].startswith("{") else partial(_amazon_rating, order)
            found = [_parsed(path, number, parse, line) for number, line in enumerate(part, start + 1)]
            columns = [_column([cells[at] for cells in found], count) for at, count in enumerate(rows)]
            ratings = torch.tensor([rating for _, _, rating in found], dtype=torch.float32)
            yield torch.from_numpy(np.stack(columns, 1)), ratings


def read_lightgcn(path: Path, batch: int = 4096) -> Iterator[Tensor]:
    r"""Read a file of LightGCN's: on each line a user and the items that belong to it. Plain, .gz or .xz.

    Parameters
    ----------
    path
        The file.
    batch
        Pairs at a time; the last batch may have fewer.

    Yields
    ------
    Tensor
        int64 [n, 2] of user and item, n at most `batch`.

    Raises
    ------
    FormatError
        For a line that is not of numbers.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import read_lightgcn
    >>> path = tempfile.mkdtemp() + "/train.txt"
    >>> with open(path, "w") as file:
    ...     print("0 5 8\n1 5", file=file)
    >>> [pairs.tolist() for pairs in read_lightgcn(path)]
    [[[0, 5], [0, 8], [1, 5]]]
    """
    check_int("batch", batch, 1, 2**31)
    waiting: list[NDArray[np.int64]] = []
    count = 0
    with _lines(path) as lines:
        for number, line in enumerate(lines, 1):
            cells = _parsed(path, number, _whole_numbers, line.split())
            if len(cells) > 1:
                waiting.append(np.stack([np.full(len(cells) - 1, cells[0]), cells[1:]], 1))
                count += len(cells) - 1
            while count >= batch:
                pairs = np.concatenate(waiting)
                yield torch.from_numpy(pairs[:batch].copy())
                waiting, count = [pairs[batch:]], count - batch
    if count:
        yield torch.from_numpy(np.concatenate(waiting))


def _click_batch(path: Path, start: int, cells: list[list[str]], rows: Sequence[int], first_id: int) -> CTRBatch:
    def numbers(line: list[str]) -> tuple[float, list[float]]:
        return float(line[0]), [_number(cell) for cell in line[1:first_id]]

    parsed = [_parsed(path, number, numbers, line) for number, line in enumerate(cells, start + 1)]
    labels = np.array([label for label, _ in parsed], np.float32)
    dense = np.array([line for _, line in parsed], np.float32)
    found = [_column([line[first_id + at] for line in cells], count) for at, count in enumerate(rows)]
    return CTRBatch(
        torch.from_numpy(labels), torch.from_numpy(dense.reshape(len(cells), -1)), torch.from_numpy(np.stack(found, 1))
    )


def _parsed(path: Path, number: int, parse: Callable[[U], T], cells: U) -> T:
    """Parse a line; an error names its number."""
    try:
        return parse(cells)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise FormatError(f"{os.fspath(path)}: line {number}: {error}") from error


def _whole_numbers(cells: list[str]) -> NDArray[np.int64]:
    numbers = [int(cell) for cell in cells]
    for number in numbers:
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{number}: expected a number of 64 bits")
    return np.array(numbers, np.int64)


def _rating(cells: list[str]) -> tuple[NDArray[np.int64], float]:
    return _whole_numbers(cells[:2]), float(cells[2])


def _amazon_order(names: list[str]) -> tuple[int, int, int]:
    item = names.index("parent_asin") if "parent_asin" in names else names.index("asin")
    return 0, item, names.index("rating")


def _amazon_rating(order: tuple[int, int, int], line: str) -> tuple[str, str, float]:
    cells = line.rstrip("\n").split(",")
    if len(cells) < 4:
        raise ValueError(f"{len(cells)} cells, expected at least 4")
    user, item, rating = (cells[at] for at in order)
    return user, item, float(rating)


def _amazon_review(line: str) -> tuple[str, str, float]:
    review = json.loads(line)
    for user, item, rating in (("reviewerID", "asin", "overall"), ("user_id", "parent_asin", "rating")):
        if rating in review:
            return str(review.get(user) or ""), str(review.get(item) or ""), float(review[rating])
    raise ValueError("no key 'overall' or 'rating'")


def _number(cell: Any) -> float:
    # The smallest number there is is -3 but for a few outliers.
    return 0.0 if cell in ("", None) else float(np.log(max(float(cell) + 3, 1e-3)))


def _column(cells: Iterable[Any], rows: int) -> NDArray[np.int64]:
    """Return the ids of a column: 0 for a missing value, 1 to rows - 1 for the others."""
    others = max(1, rows - 1)

    def row(cell: Any) -> int:
        if cell in ("", None):
            return 0
        number = zlib.crc32(cell.encode()) if isinstance(cell, str) else int(cell)
        return min(rows - 1, 1 + number % others)

    return np.array([row(cell) for cell in cells], np.int64)


def _check(rows: Sequence[int], tables: int, batch: int) -> None:
    check_int("batch", batch, 1, 2**31)
    if len(rows) != tables:
        raise ValueError(f"rows: expected {tables} numbers, one for each table, got {len(rows)}")
    for at, count in enumerate(rows):
        check_int(f"rows[{at}]", count, 1, 2**62)


def _check_widths(path: Path, cells: list[list[str]], start: int, width: int) -> None:
    for number, line in enumerate(cells, start + 1):
        if len(line) != width:
            raise FormatError(f"{os.fspath(path)}: line {number} has {len(line)} cells, expected {width}")


def _chunks(lines: Iterator[str], batch: int) -> Iterator[tuple[int, list[str]]]:
    """Yield so many lines at a time, and how many came before."""
    start = 0
    part: list[str] = []
    for line in lines:
        part.append(line)
        if len(part) == batch:
            yield start, part
            start, part = start + batch, []
    if part:
        yield start, part


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    """Give the lines of a file; damage is named with the number of the line."""
    name = os.fspath(path)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(name[-3:], open)
    with opener(name, "rb") as opened:
        yield _texts(name, opened)


def _texts(name: str, lines: Iterator[bytes]) -> Iterator[str]:
    number = 0
    while True:
        with reading(name, f"line {number + 1}"):
            raw = next(lines, None)
            text = None if raw is None else raw.decode()
        if text is None:
            return
        number += 1
        yield text


def _mapped(path: Path) -> NDArray[Any]:
    """Return the array of a .npy file, mapped."""
    with open(path, "rb") as file:
        shape, by_column, dtype = npy_header(file, path, os.fstat(file.fileno()).st_size)
        if dtype.kind not in "fiu":
            raise FormatError(f"{os.fspath(path)}: holds {dtype}, expected numbers")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(os.fspath(path), dtype, "r", file.tell(), shape, "F" if by_column else "C")
