"""``memhier index``: builds, searches, changes, exports, shows and checks a vector index from the shell."""

import sys
import time
from typing import Any

import click

from memhier.ann import ZoomIndex
from memhier.ann.files import open_vectors
from memhier.ann.zoom.preview.space import METRICS
from memhier.benchmarks.cli.index.changes import add, compact, remove, tune
from memhier.benchmarks.cli.index.export import export
from memhier.benchmarks.cli.index.inputs import (
    attributes_option,
    column_option,
    given_ids,
    id_column_option,
    ids_option,
    index_path,
    key_option,
    read_table,
)
from memhier.benchmarks.cli.index.search import search
from memhier.benchmarks.cli.shell import json_option, notes, report

__all__ = ["index"]


@click.group()
def index() -> None:
    """Build, search, change, export, show and check a vector index on SSD.

    Vectors and queries are read as a stream from .fvecs, .bvecs, .fbin, .f16bin, .u8bin, .i8bin, .npy, .hdf5, .h5 (with
    the extra hdf5) and .parquet (with the extra parquet). The exit code is 2 for bad arguments and 1 for any other
    failure. All commands but check take --json.
    """


@index.command()
@click.argument("path", type=click.Path())
@click.argument("vectors", type=click.Path(exists=True, dir_okay=False))
@key_option
@column_option
@ids_option
@id_column_option
@click.option("--string-ids", is_flag=True, help="Take the lines of a text file of ids as strings, not as integers.")
@attributes_option
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
    table_path: str | None,
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
        if table_path is not None:
            options["attributes"] = read_table(table_path)
        started = time.perf_counter()
        with ZoomIndex.build(path, source, ids=ids, progress=sys.stderr.isatty(), **options) as built:
            figures = {"seconds": time.perf_counter() - started} | built.stats()
            report(f"Built {path}", figures, json_path, ("vectors",))


@index.command()
@index_path
@json_option
def info(path: str, json_path: str | None) -> None:
    """Print the contents and the sizes of the index at PATH."""
    with ZoomIndex.open(path) as opened:
        report(path, opened.stats(), json_path, ("vectors",))


@index.command()
@index_path
def check(path: str) -> None:
    """Read the whole index at PATH and print every error.

    The exit code is 1 if there is any.
    """
    with ZoomIndex.open(path) as opened:
        problems = opened.check()
        for problem in problems:
            click.echo(problem)
        if problems:
            raise click.ClickException(
                f"{path}: {len(problems)} {'problem' if len(problems) == 1 else 'problems'} found"
            )
        click.echo(f"{path}: {len(opened):,} vectors, no problem found")


for _command in (search, add, remove, tune, compact, export):
    index.add_command(_command)
