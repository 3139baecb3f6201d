"""``memhier index``: a vector index built, searched, looked at and checked from the shell."""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.ann.files import VectorReader, open_vectors, read_ground_truth, write_vectors
from memhier.ann.zoom.space import METRICS
from memhier.benchmarks.index.plain_errors import PlainGroup, plain_errors
from memhier.budget import format_bytes

__all__ = ["index"]

Ints: TypeAlias = npt.NDArray[np.int64]

_OUT_SUFFIXES = (".ivecs", ".ibin", ".npy")  # those that hold integers wide enough for ids
_BATCH = 1024  # queries of one call


def _in_a_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a FILE that could not be written before a long build, not after it."""
    if value not in (None, "-") and not os.access(Path(value).absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value}: its folder does not exist or cannot be written to")
    return value


_index_path = click.argument("path", type=click.Path(exists=True, file_okay=False))
_key = click.option("--key", help="Data set of an HDF5 file.")
_column = click.option("--column", help="Column of a Parquet file.  [default: the only one of vectors]")
_json = click.option("--json", "json_path", metavar="FILE", callback=_in_a_folder,
                     type=click.Path(dir_okay=False, writable=True, allow_dash=True),
                     help="Write the figures as JSON to FILE; '-' prints them in place of the table.")  # fmt: skip


@click.group(cls=PlainGroup)
def index() -> None:
    """Build, search, look at and check a vector index on SSD.

    Vectors and queries are read from .fvecs, .bvecs, .fbin, .f16bin, .u8bin, .i8bin, .npy, .hdf5, .h5 (with the extra
    hdf5) and .parquet (with the extra parquet), as a stream. The exit code is 2 for bad arguments and 1 for any other
    failure; build, search and info take --json.
    """


@index.command()
@click.argument("path", type=click.Path())
@click.argument("vectors", type=click.Path(exists=True, dir_okay=False))
@_key
@_column
@click.option("--ids", "ids_path", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="Ids of the vectors: .npy [n], or text with one a line.  [default: 0 to n - 1]")  # fmt: skip
@click.option("--metric", type=click.Choice(METRICS), default="l2", show_default=True)
@click.option("--dram", default="64MiB", show_default=True, help="DRAM of the open index.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of every random choice.")
@_json
def build(
    path: str,
    vectors: str,
    key: str | None,
    column: str | None,
    ids_path: str | None,
    metric: Any,
    dram: str,
    seed: int,
    json_path: str | None,
) -> None:
    """Build an index of the file VECTORS in the new directory PATH."""
    with plain_errors(), _terminable(), _notes(), open_vectors(vectors, key=key, column=column) as source:
        ids = None if ids_path is None else _read_ids(ids_path)
        started = time.perf_counter()
        shown = sys.stderr.isatty()
        with ZoomIndex.build(path, source, ids=ids, metric=metric, dram=dram, seed=seed, progress=shown) as built:
            figures = {"seconds": time.perf_counter() - started} | built.stats()
            _report(f"Built {path}", figures, json_path)


@index.command()
@_index_path
@click.argument("queries", type=click.Path(exists=True, dir_okay=False))
@click.option("-k", type=click.IntRange(1), default=10, show_default=True, help="Neighbours of each query.")
@click.option("--key", help="Data set of an HDF5 file.  [default: test]")
@_column
@click.option("--truth", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="True neighbours, by id: .ivecs, .hdf5, .h5, or the form of big-ann-benchmarks.")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(),
              help=f"Write the ids found to this new file: {', '.join(_OUT_SUFFIXES)}.")  # fmt: skip
@_json
def search(
    path: str,
    queries: str,
    k: int,
    key: str | None,
    column: str | None,
    truth: str | None,
    out: str | None,
    json_path: str | None,
) -> None:
    """Search the index at PATH for every vector of the file QUERIES.

    Prints queries per second (of the searches alone), reads per query and, with --truth, the recall: the share of the
    true k nearest that was found, by id, so that of several equally near vectors only those in the truth count.
    """
    if key is None and Path(queries).suffix.lower() in (".hdf5", ".h5"):
        key = "test"
    with plain_errors(), _notes(), open_vectors(queries, key=key, column=column) as source:
        if out is not None and Path(out).suffix.lower() not in _OUT_SUFFIXES:
            raise ValueError(f"--out {out}: expected a file ending in {', '.join(_OUT_SUFFIXES)}")
        true_ids = None if truth is None else _read_truth(truth, source.count, k)
        with ZoomIndex.open(path) as opened:
            run = _Run(opened, source, k, true_ids)
            if out is None:
                for _ in run.found():
                    pass
            else:
                write_vectors(out, run.found())
        _report(f"Searched {path}", run.figures(), json_path)


@index.command()
@_index_path
@_json
def info(path: str, json_path: str | None) -> None:
    """Print what the index at PATH holds, and what it takes in DRAM and on SSD."""
    with plain_errors(), ZoomIndex.open(path) as opened:
        _report(path, opened.stats(), json_path)


@index.command()
@_index_path
def check(path: str) -> None:
    """Read all of the index at PATH and print every inconsistency; the exit code is 1 if there is any."""
    with plain_errors(), ZoomIndex.open(path) as opened:
        problems = opened.check()
        for problem in problems:
            click.echo(problem)
        if problems:
            raise click.ClickException(f"{path}: {len(problems)} problems found")
        click.echo(f"{path}: {len(opened):,} vectors, no problem found")


@dataclass(slots=True)
class _Run:
    """A search for every query of a file, and what it added up to."""

    opened: ZoomIndex
    source: VectorReader
    k: int
    truth: Ints | None
    queries: int = 0
    seconds: float = 0.0
    reads: int = 0
    pages: int = 0
    hits: int = 0
    true: int = 0

    def found(self) -> Iterator[Ints]:
        """Search batch by batch and yield the ids of each, ``[queries, k]``."""
        with tqdm(total=self.source.count, unit=" queries", disable=not sys.stderr.isatty()) as bar:
            for first, block in self.source.blocks():
                for start in range(0, len(block), _BATCH):
                    batch = block[start : start + _BATCH]
                    yield self._search(first + start, batch)
                    bar.update(len(batch))

    def _search(self, first: int, batch: npt.NDArray[Any]) -> Ints:
        started = time.perf_counter()
        result = self.opened.search(batch, self.k)
        self.seconds += time.perf_counter() - started
        self.queries += len(batch)
        self.reads += result.stats["reads"]
        self.pages += result.stats["pages"]
        if self.truth is not None:
            true = self.truth[first : first + len(batch), : self.k]
            for found, near in zip(result.ids, true, strict=True):
                self.hits += len(np.intersect1d(found[found >= 0], near))
            self.true += int((true >= 0).sum())
        return result.ids

    def figures(self) -> dict[str, Any]:
        """Return what was measured, by name."""
        recall = {} if self.truth is None else {f"recall@{self.k}": self.hits / max(1, self.true)}
        each = max(1, self.queries)
        return {"queries": self.queries, "k": self.k} | recall | {
            "queries_per_second": self.queries / self.seconds if self.seconds else 0.0,
            "reads_per_query": self.reads / each,
            "pages_per_query": self.pages / each,
            "seconds": self.seconds,
        }  # fmt: skip


def _read_ids(path: str) -> npt.NDArray[Any]:
    if Path(path).suffix.lower() == ".npy":
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        return array
    numbers = []
    for line, text in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            numbers.append(int(text))
        except ValueError:
            raise ValueError(f"--ids {path}: line {line} is {text[:40]!r}, expected an integer") from None
    return np.array(numbers, np.int64)


def _read_truth(path: str, queries: int, k: int) -> Ints:
    ids = read_ground_truth(path).ids
    if len(ids) != queries or ids.shape[1] < k:
        raise ValueError(
            f"--truth {path}: {ids.shape[1]} neighbours of {len(ids):,} queries, expected at least {k} of {queries:,}"
        )
    return ids


def _report(title: str, figures: dict[str, Any], json_path: str | None) -> None:
    if json_path == "-":
        click.echo(json.dumps(figures, indent=2))
        return
    if json_path is not None:
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _plain(name, value))
    console = Console()
    console.print(title, markup=False, highlight=False)
    console.print(table)


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if name == "dram" or name.endswith("bytes"):
        return format_bytes(value)
    return f"{value:,.4f}" if "recall" in name else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


@contextmanager
def _notes() -> Iterator[None]:
    """Print warnings as notes, without the place in the code that they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for note in dict.fromkeys(str(warning.message) for warning in caught):
        click.echo(f"note: {note}", err=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """Leave by an exception when terminated, so that what is half built is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
