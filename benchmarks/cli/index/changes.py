"""``memhier index add``, ``remove``, ``update``, ``tune`` and ``compact`` change an index as a whole, or not at all."""

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.ann.files import VectorReader, open_vectors
from memhier.benchmarks.cli.index.inputs import (
    column_option,
    given_ids,
    id_column_option,
    ids_option,
    index_path,
    key_option,
    queries_path,
    query_key,
    vectors_path,
)
from memhier.benchmarks.cli.index.tables import (
    TableFile,
    attributes_option,
    documents_option,
    read_attributes,
    read_documents,
)
from memhier.benchmarks.cli.shell import json_option, notes, report, working

__all__ = ["add", "compact", "remove", "tune", "update"]

_FIGURES = ("vectors", "lists", "parts", "memory_bytes", "dram", "vector_bytes", "file_bytes")
_ALWAYS = ("vectors", "added", "removed", "updated")  # in the table with 0 as well
_EACH = "expected one for each"
_PIECE = 512  # vectors whose documents are in DRAM
_TUNING_MOST = 10_000  # queries: a thousand are enough, and all are in DRAM


@click.command()
@index_path
@vectors_path
@key_option
@column_option
@ids_option
@id_column_option
@attributes_option
@documents_option
@json_option
def add(
    path: str,
    vectors: str,
    key: str | None,
    column: str | None,
    ids_path: str | None,
    id_column: str | None,
    attributes: TableFile | None,
    documents: TableFile | None,
    json_path: str | None,
) -> None:
    """Add the vectors of the file VECTORS to an index.

    The index at PATH takes all of them, or none if there is an error.
    """
    with (
        notes(),
        open_vectors(vectors, key=key, column=column) as source,
        ZoomIndex.open(path, writable=True) as opened,
    ):
        ids = given_ids(vectors, ids_path, id_column, opened.stats()["id_kind"])
        columns = {} if attributes is None else read_attributes(attributes)
        lengths = [("--ids", ids), *(("--attributes", column) for column in columns.values())]
        for name, given in lengths:
            if given is not None and len(given) != source.count:
                raise ValueError(f"{name}: {len(given):,} rows for {source.count:,} vectors, {_EACH}")
        rows = None if documents is None else read_documents(documents)
        started = time.perf_counter()
        with tqdm(total=source.count, unit=" vectors", disable=not sys.stderr.isatty()) as bar:
            for first, block in _pieces(source, rows is not None):
                part = slice(first, first + len(block))
                taken = {name: column[part] for name, column in columns.items()}
                told = None if rows is None else [*islice(rows, len(block))]
                if told is not None and len(told) < len(block):
                    raise ValueError(f"--documents: {first + len(told):,} rows for {source.count:,} vectors, {_EACH}")
                opened.add(block, None if ids is None else ids[part], taken or None, told)
                bar.update(len(block))
        if rows is not None and next(rows, None) is not None:
            raise ValueError(f"--documents: more than {source.count:,} rows for as many vectors, {_EACH}")
        opened.commit()
        report(f"Added {vectors} to {path}", _figures(opened, source.count, "added", started), json_path, _ALWAYS)


@click.command()
@index_path
@click.argument("ids", type=click.Path(exists=True, dir_okay=False), required=False)
@id_column_option
@click.option("--where", help='Instead of IDS: remove the vectors that fulfil a filter, such as "price < 10".')
@json_option
def remove(path: str, ids: str | None, id_column: str | None, where: str | None, json_path: str | None) -> None:
    """Remove vectors from the index at PATH by their ids or by a filter.

    IDS is a file of ids: .npy, .parquet, or text with one on each line.
    """
    if (ids is None) == (where is None):
        raise click.UsageError("expected either a file of IDS or --where")
    with notes(), ZoomIndex.open(path, writable=True) as opened:
        names = None if ids is None else given_ids(ids, ids, id_column, opened.stats()["id_kind"])
        started = time.perf_counter()
        count = opened.remove(names, where=where)
        opened.commit()
        report(f"Removed from {path}", _figures(opened, count, "removed", started), json_path, _ALWAYS)


@click.command()
@index_path
@click.option("--where", required=True, help='Of the vectors that fulfil a filter, such as "price < 10".')
@click.option("--set", "values", required=True, help="""Values as JSON by attribute, such as '{"sold": true}'.""")
@json_option
def update(path: str, where: str, values: str, json_path: str | None) -> None:
    """Set attributes of vectors in the index at PATH, the same values for all vectors of a filter."""
    try:
        given = json.loads(values)
    except ValueError as error:
        raise click.UsageError(f"--set: {values} is no JSON: {error}") from None
    with notes(), ZoomIndex.open(path, writable=True) as opened:
        started = time.perf_counter()
        count = opened.update(where=where, attributes=given)
        opened.commit()
        report(f"Updated {path}", _figures(opened, count, "updated", started), json_path, _ALWAYS)


@click.command()
@index_path
@queries_path
@click.option("--key", help="Data set of an HDF5 file.  [default: test]")
@column_option
@json_option
def tune(path: str, queries: str, key: str | None, column: str | None, json_path: str | None) -> None:
    """Make searches of the index at PATH cheaper for queries like those of a file.

    The file QUERIES holds at least 64 vectors; a thousand are enough, and of more than 10,000 the first are taken. They
    are compared with every vector. A declared recall is kept for queries of this kind from now on.
    """
    with (
        notes(),
        open_vectors(queries, key=query_key(queries, key), column=column) as source,
        ZoomIndex.open(path, writable=True) as opened,
    ):
        taken = source.take(np.arange(min(source.count, _TUNING_MOST)))
        before, started = opened.stats(), time.perf_counter()
        with working(f"Comparing {len(taken):,} queries with {len(opened):,} vectors ..."):
            opened.tune(taken)
        figures = _figures(opened, len(taken), "queries", started)
        figures |= {"lists_probed_before": before["nprobe"], "lists_probed": opened.stats()["nprobe"]}
        report(f"Tuned {path} with {queries}", figures, json_path, _ALWAYS)


@click.command()
@index_path
@json_option
def compact(path: str, json_path: str | None) -> None:
    """Build the index at PATH anew without removed vectors.

    Its lists and codes then fit the vectors that are left.
    """
    with notes():
        started = time.perf_counter()
        with ZoomIndex.open(path, writable=True) as opened:
            before = opened.stats()["file_bytes"]
            opened.compact()
            figures = _figures(opened, before - opened.stats()["file_bytes"], "freed_bytes", started)
            report(f"Compacted {path}", figures, json_path, _ALWAYS)


def _pieces(source: VectorReader, small: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield blocks of vectors with their first row, small ones if documents lie beside them."""
    for first, block in source.blocks():
        size = _PIECE if small else len(block)
        for start in range(0, len(block), size):
            yield first + start, block[start : start + size]


def _figures(opened: ZoomIndex, changed: int, name: str, started: float) -> dict[str, Any]:
    stats = opened.stats()
    return {name: changed, "seconds": time.perf_counter() - started} | {each: stats[each] for each in _FIGURES}
