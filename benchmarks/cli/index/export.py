"""``memhier index export``: all vectors and ids of an index, streamed to files that appear once they are whole."""

import errno
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.benchmarks.cli.index.inputs import Fields, index_path, parquet_of

__all__ = ["export"]

Blocks: TypeAlias = Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@click.command()
@index_path
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--fields", type=Fields(), help="Attributes and documents for a .parquet file: names with commas between "
              "them.  [default: all]")  # fmt: skip
def export(path: str, out: str, fields: bool | list[str] | None) -> None:
    """Write all vectors of the index at PATH, with their ids, to the new file OUT.

    The suffix of OUT names its format. A .npz file holds the arrays vectors and ids; a .parquet file holds the columns
    id and vector, attributes and documents (as text, or JSON). Other formats (.npy, .fvecs, .bvecs, .fbin, .f16bin,
    .u8bin, .i8bin) hold vectors; ids lie beside, in OUT.ids.npy, or in OUT.ids.txt if they are strings. The order is
    that of the vectors on SSD. DRAM holds a block at a time.
    """
    target = Path(out)
    with ZoomIndex.open(path) as opened:
        strings, suffix = opened.stats()["id_kind"] == "str", target.suffix.lower()
        if fields is not None and suffix != ".parquet":
            raise ValueError(f"--fields: {out} holds vectors and ids only: expected a file ending in .parquet")
        if suffix == ".npz" and strings:
            raise ValueError(f"{out}: the ids of this index are strings, which .npz does not hold: use .parquet")
        if suffix == ".parquet":
            _write_parquet(target, opened, fields if isinstance(fields, list) else [*opened.fields])
        elif suffix == ".npz":
            _write_archive(target, opened)
        else:
            _write_beside(target, opened, strings)
        click.echo(f"{out}: {len(opened):,} vectors")


def _blocks(opened: ZoomIndex) -> Blocks:
    with tqdm(total=len(opened), unit=" vectors", disable=not sys.stderr.isatty()) as bar:
        for ids, vectors in opened.blocks():
            yield ids, vectors
            bar.update(len(ids))


def _write_beside(target: Path, opened: ZoomIndex, strings: bool) -> None:
    """Write vectors to one file and ids to another; the vectors appear last."""
    with ExitStack() as stack:
        file = stack.enter_context(_unfinished(target.with_name(f"{target.name}.ids.{'txt' if strings else 'npy'}")))
        if not strings:
            _write_header(file, np.dtype(np.int64), (len(opened),))

        def vectors() -> Iterator[npt.NDArray[Any]]:
            for ids, block in _blocks(opened):
                file.write(_lines(target, ids) if strings else ids.astype("<i8").tobytes())
                yield block

        write_vectors(target, vectors())


def _lines(target: Path, ids: npt.NDArray[Any]) -> bytes:
    if any("\n" in name for name in ids):
        raise ValueError(f"{target}: an id holds a line break, which lines of text cannot hold: use .parquet")
    return "".join(f"{name}\n" for name in ids).encode()


def _write_archive(target: Path, opened: ZoomIndex) -> None:
    shape = (len(opened), opened.dimension)
    with (
        _unfinished(target) as whole,
        zipfile.ZipFile(whole, "w") as archive,
        tempfile.TemporaryFile(dir=target.absolute().parent) as aside,
    ):
        _write_header(aside, np.dtype(np.int64), shape[:1])
        with archive.open("vectors.npy", "w", force_zip64=True) as file:
            _write_header(file, np.dtype(opened.stats()["dtype"]), shape)
            for ids, vectors in _blocks(opened):
                aside.write(ids.astype("<i8").tobytes())
                file.write(np.ascontiguousarray(vectors).tobytes())
        aside.seek(0)
        with archive.open("ids.npy", "w", force_zip64=True) as file:
            shutil.copyfileobj(aside, file)


def _write_parquet(target: Path, opened: ZoomIndex, fields: list[str]) -> None:
    arrow, parquet = parquet_of(str(target))
    value = arrow.from_numpy_dtype(np.dtype(opened.stats()["dtype"]))
    types = {
        "int64": arrow.int64(), "float64": arrow.float64(), "bool": arrow.bool_(), "datetime": arrow.timestamp("us"),
        "str": arrow.string(),
    }  # fmt: skip
    types |= {f"list[{kind}]": arrow.list_(item) for kind, item in types.items()}
    names = arrow.string() if opened.stats()["id_kind"] == "str" else arrow.int64()
    columns = [("id", names), ("vector", arrow.list_(value, opened.dimension))]
    for name in fields:
        shown = f"{name}_" if name in ("id", "vector") else name
        columns += [(shown, types.get(opened.fields.get(name, ""), arrow.string()))]
    schema = arrow.schema(columns)
    with _unfinished(target) as file, parquet.ParquetWriter(file, schema) as writer:
        for ids, vectors in _blocks(opened):
            flat = arrow.array(np.ascontiguousarray(vectors).reshape(-1), value)
            arrays = [arrow.array(ids, names), arrow.FixedSizeListArray.from_arrays(flat, opened.dimension)]
            for (_, kind), (name, column) in zip(columns[2:], opened.fetch(ids, fields).items(), strict=True):
                if opened.fields[name] == "document":
                    column = _texts(name, column)
                missing = np.ma.getmaskarray(column) if isinstance(column, np.ma.MaskedArray) else None
                arrays.append(arrow.array(np.ma.getdata(column), kind, mask=missing, from_pandas=True))
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def _texts(name: str, documents: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return documents as text: other values than text as JSON."""
    texts = [each if each is None or isinstance(each, str) else _json(name, each) for each in documents]
    return np.array(texts, np.object_)


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        raise ValueError(
            f"document {name!r} holds bytes, which this file does not take: name others by --fields"
        ) from None


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)


@contextmanager
def _unfinished(path: Path) -> Iterator[IO[bytes]]:
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
