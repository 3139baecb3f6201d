"""``memhier index export`` and ``ids``: an index as a stream, to files that appear once they are whole, or as lines."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.arguments import counted
from memhier.benchmarks.cli.index.inputs import Fields, cache_bytes_option, cache_option, read_path
from memhier.benchmarks.cli.index.written import (
    TABLES,
    field_kinds,
    rows_at_a_time,
    unfinished,
    write_archive,
    write_header,
    write_table,
)
from memhier.benchmarks.cli.shell import in_a_folder

__all__ = ["export", "ids"]

Blocks: TypeAlias = Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@click.command()
@read_path
@click.argument("out", type=click.Path(dir_okay=False), callback=in_a_folder)
@click.option("--fields", type=Fields(), help="Attributes and documents for a .parquet or .jsonl file: names with "
              "commas between them.  [default: all]")  # fmt: skip
@cache_option
@cache_bytes_option
def export(path: str, out: str, fields: bool | list[str] | None, cache: str | None, cache_bytes: str) -> None:
    """Write all vectors of an index, with their ids, to a new file.

    The index is at PATH, a directory or the URL of a backup. The suffix of OUT names the format. A .npz file holds the
    arrays vectors and ids. A .parquet file holds the columns id and vector, attributes and documents (as bytes, as
    text, or as JSON). A .jsonl file holds the same as an object in each line, bytes as {"base64": text}. Other
    formats (.npy, .fvecs, .bvecs, .fbin, .f16bin, .u8bin, .i8bin) hold vectors; ids lie beside, in OUT.ids.npy, or in
    OUT.ids.txt if they are strings. The order is that of the vectors on SSD. DRAM holds a block at a time.
    """
    target = Path(out)
    with ZoomIndex.open(path, cache=cache, cache_bytes=cache_bytes) as opened:
        strings, suffix = opened.stats()["id_kind"] == "str", target.suffix.lower()
        if fields is not None and suffix not in TABLES:
            raise ValueError(f"--fields: {out} holds vectors and ids only: expected .parquet or .jsonl")
        if suffix == ".npz" and strings:
            raise ValueError(f"{out}: .npz does not hold strings, the ids of this index: use .parquet or .jsonl")
        if suffix in TABLES:
            _write_table(target, opened, fields if isinstance(fields, list) else [*opened.fields])
        elif suffix == ".npz":
            count = len(opened)
            shapes = {"vectors": (opened.stats()["dtype"], (count, opened.dimension)), "ids": (np.int64, (count,))}
            write_archive(target, shapes, ((vectors, ids) for ids, vectors in _blocks(opened)))
        else:
            _write_beside(target, opened, strings)
        click.echo(f"{out}: {counted(len(opened), 'vector')}")


@click.command()
@read_path
@click.option("--where", help='Only those of vectors that fulfil a filter, such as "price < 10".')
@cache_option
@cache_bytes_option
def ids(path: str, where: str | None, cache: str | None, cache_bytes: str) -> None:
    """Print the ids of an index, one on each line, in the order of the vectors on SSD.

    The index is at PATH, a directory or the URL of a backup.
    """
    with ZoomIndex.open(path, cache=cache, cache_bytes=cache_bytes) as opened:
        for block in opened.ids(where):
            click.echo(_lines(Path(path), block), nl=False)


def _blocks(opened: ZoomIndex) -> Blocks:
    with tqdm(total=len(opened), unit=" vectors", disable=not sys.stderr.isatty()) as bar:
        for ids, vectors in opened.blocks():
            yield ids, vectors
            bar.update(len(ids))


def _write_beside(target: Path, opened: ZoomIndex, strings: bool) -> None:
    """Write vectors to one file and ids to another; the vectors appear last."""
    with ExitStack() as stack:
        file = stack.enter_context(unfinished(target.with_name(f"{target.name}.ids.{'txt' if strings else 'npy'}")))
        if not strings:
            write_header(file, np.dtype(np.int64), (len(opened),))

        def vectors() -> Iterator[npt.NDArray[Any]]:
            for ids, block in _blocks(opened):
                file.write(_lines(target, ids) if strings else ids.astype("<i8").tobytes())
                yield block

        write_vectors(target, vectors())


def _lines(target: Path, ids: npt.NDArray[Any]) -> bytes:
    if ids.dtype == object and any("\n" in name for name in ids):
        raise ValueError(f"{target}: an id holds a line break, which lines of text cannot hold: use .parquet or .jsonl")
    return "".join(f"{name}\n" for name in ids).encode()


def _write_table(target: Path, opened: ZoomIndex, fields: list[str]) -> None:
    named = field_kinds(opened, fields, ("id", "vector"))
    kinds = {"id": opened.stats()["id_kind"], "vector": (opened.stats()["dtype"], opened.dimension)} | named
    size = rows_at_a_time(opened)
    with write_table(target, kinds) as write:
        for ids, vectors in _blocks(opened):
            for start in range(0, len(ids), size):
                piece = slice(start, start + size)
                found = opened.fetch(ids[piece], fields).values() if fields else ()
                write({"id": ids[piece], "vector": vectors[piece]} | dict(zip(named, found, strict=True)))
