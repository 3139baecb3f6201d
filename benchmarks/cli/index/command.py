"""``memhier index``: builds, searches, changes, exports, backs up and checks a vector index from the shell."""

import sys
import time
from typing import Any

import click

from memhier import check_backup
from memhier.ann import ZoomIndex
from memhier.ann.files import open_vectors
from memhier.ann.zoom.preview.space import METRICS
from memhier.arguments import counted, is_url
from memhier.benchmarks.cli.index.backup import existing_backups, list_backups, prune, pull, push
from memhier.benchmarks.cli.index.changes import add, compact, remove, tune, update
from memhier.benchmarks.cli.index.export import export, ids
from memhier.benchmarks.cli.index.inputs import (
    cache_bytes_option,
    cache_option,
    column_option,
    given_ids,
    id_column_option,
    ids_option,
    key_option,
    read_path,
    vectors_path,
)
from memhier.benchmarks.cli.index.search import search
from memhier.benchmarks.cli.index.tables import (
    TableFile,
    attributes_option,
    documents_option,
    read_attributes,
    read_documents,
)
from memhier.benchmarks.cli.shell import json_option, notes, report

__all__ = ["index"]


@click.group()
def index() -> None:
    """Build, search, change, export, back up and check a vector index on SSD.

    Vectors and queries are read as a stream from .fvecs, .bvecs, .fbin, .f16bin, .u8bin, .i8bin, .npy, .hdf5, .h5 (with
    the extra hdf5) and .parquet (with the extra parquet; a path or a URL). Commands that only read an index take the
    URL of a backup, too, such as s3://bucket/index. The exit code is 2 for bad arguments and 1 for any other failure.
    All commands but check, export, ids and prune take --json.
    """


@index.command()
@click.argument("path", type=click.Path())
@vectors_path
@key_option
@column_option
@ids_option
@id_column_option
@click.option("--string-ids", is_flag=True, help="Take the lines of a text file of ids as strings, not as integers.")
@attributes_option
@documents_option
@click.option("--metric", type=click.Choice(METRICS), default="l2", show_default=True)
@click.option("--dram", default="64MiB", show_default=True, help="DRAM of the open index.")
@click.option("--grow-to", type=click.IntRange(0), default=0, help="Vectors that this DRAM must hold later.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of every random choice.")
@json_option
def build(
    path: str,
    vectors: str,
    key: str | None,
    column: str | None,
    ids_path: str | None,
    id_column: str | None,
    string_ids: bool,
    attributes: TableFile | None,
    documents: TableFile | None,
    metric: Any,
    dram: str,
    grow_to: int,
    seed: int,
    json_path: str | None,
) -> None:
    """Build an index of the file VECTORS in the new directory PATH."""
    with notes(), open_vectors(vectors, key=key, column=column) as source:
        ids = given_ids(vectors, ids_path, id_column, "str" if string_ids else "int64")
        options: dict[str, Any] = {"metric": metric, "dram": dram, "grow_to": grow_to, "seed": seed}
        if attributes is not None:
            options["attributes"] = read_attributes(attributes)
        if documents is not None:
            options["documents"] = read_documents(documents)
        started = time.perf_counter()
        with ZoomIndex.build(path, source, ids=ids, progress=sys.stderr.isatty(), **options) as built:
            figures = {"seconds": time.perf_counter() - started} | built.stats()
            report(f"Built {path}", figures, json_path, ("vectors",))


@index.command()
@read_path
@cache_option
@cache_bytes_option
@json_option
def info(path: str, cache: str | None, cache_bytes: str, json_path: str | None) -> None:
    """Print the contents and the sizes of an index.

    The index is at PATH, a directory or the URL of a backup.
    """
    with ZoomIndex.open(path, cache=cache, cache_bytes=cache_bytes) as opened:
        report(path, opened.stats(), json_path, ("vectors",))


@index.command()
@read_path
def check(path: str) -> None:
    """Read the whole index at PATH and print every error.

    The exit code is 1 if there is any. Of a backup, whose URL is PATH, every generation is read.
    """
    if is_url(path):
        found = existing_backups(path)
        problems, told = check_backup(path), counted(len(found), "generation")
    else:
        with ZoomIndex.open(path) as opened:
            problems, told = opened.check(), counted(len(opened), "vector")
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.ClickException(f"{path}: {counted(len(problems), 'problem')} found")
    click.echo(f"{path}: {told}, no problem found")


for _command in (search, add, remove, update, tune, compact, export, ids, push, pull, list_backups, prune):
    index.add_command(_command)
