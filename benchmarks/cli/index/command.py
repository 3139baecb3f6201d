"""``memhier index``: builds, searches, changes, shows and checks a vector index from the shell."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.ann.files import VectorReader, open_vectors, read_ground_truth, write_vectors
from memhier.ann.zoom.preview.space import METRICS
from memhier.benchmarks.cli.index.changes import add, compact, remove
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
from memhier.benchmarks.cli.plain_errors import PlainGroup, plain_errors
from memhier.benchmarks.cli.shell import json_option, notes, report, terminable

__all__ = ["index"]

Ints: TypeAlias = npt.NDArray[np.int64]

_OUT_SUFFIXES = (".ivecs", ".ibin", ".npy", ".jsonl")  # those that hold integers wide enough for ids
_BATCH = 1024  # queries of one call


@click.group(cls=PlainGroup)
def index() -> None:
    """Build, search, change, show and check a vector index on SSD.

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
    with plain_errors(), terminable(), notes(), open_vectors(vectors, key=key, column=column) as source:
        ids = given_ids(vectors, ids_path, id_column, "str" if string_ids else "int64")
        options: dict[str, Any] = {"metric": metric, "dram": dram, "grow_to": grow_to, "seed": seed}
        if table_path is not None:
            options["attributes"] = read_table(table_path)
        started = time.perf_counter()
        with ZoomIndex.build(path, source, ids=ids, progress=sys.stderr.isatty(), **options) as built:
            figures = {"seconds": time.perf_counter() - started} | built.stats()
            report(f"Built {path}", figures, json_path)


@index.command()
@index_path
@click.argument("queries", type=click.Path(exists=True, dir_okay=False))
@click.option("-k", type=click.IntRange(1), default=10, show_default=True, help="Neighbours of each query.")
@click.option("--key", help="Data set of an HDF5 file.  [default: test]")
@column_option
@click.option("--recall", type=float, help="Share of the true neighbours to find.  [default: 0.99]")
@click.option("--where", help="Only vectors that meet this condition, such as \"price < 10 and lang == 'en'\".")
@click.option("--truth", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="True neighbours, by id: .ivecs, .hdf5, .h5, or the form of big-ann-benchmarks.")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(),
              help=f"Write the ids found to this new file: {', '.join(_OUT_SUFFIXES)} (for strings).")  # fmt: skip
@json_option
def search(
    path: str,
    queries: str,
    k: int,
    key: str | None,
    column: str | None,
    recall: float | None,
    where: str | None,
    truth: str | None,
    out: str | None,
    json_path: str | None,
) -> None:
    """Search the index at PATH for each vector of a file.

    The file is QUERIES. The command prints queries per second (of the searches alone), reads per query and, with
    --truth, the recall: the share of the true k nearest ids that were found. Of several equally near vectors only those
    in the truth count.
    """
    if key is None and Path(queries).suffix.lower() in (".hdf5", ".h5"):
        key = "test"
    with plain_errors(), notes(), open_vectors(queries, key=key, column=column) as source:
        if out is not None and Path(out).suffix.lower() not in _OUT_SUFFIXES:
            raise ValueError(f"--out {out}: expected a file ending in {', '.join(_OUT_SUFFIXES)}")
        true_ids = None if truth is None else _read_truth(truth, source.count, k)
        with ZoomIndex.open(path) as opened:
            _check_strings(opened, truth, out)
            options = {"recall": recall, "where": where}
            run = _Run(opened, source, k, {name: each for name, each in options.items() if each is not None}, true_ids)
            if out is None:
                for _ in run.found():
                    pass
            elif Path(out).suffix.lower() == ".jsonl":
                _write_lines(Path(out), run.found())
            else:
                write_vectors(out, run.found())
        report(f"Searched {path}", run.figures(), json_path)


@index.command()
@index_path
@json_option
def info(path: str, json_path: str | None) -> None:
    """Print the contents and the sizes of the index at PATH."""
    with plain_errors(), ZoomIndex.open(path) as opened:
        report(path, opened.stats(), json_path)


@index.command()
@index_path
def check(path: str) -> None:
    """Read the whole index at PATH and print every error.

    The exit code is 1 if there is any.
    """
    with plain_errors(), ZoomIndex.open(path) as opened:
        problems = opened.check()
        for problem in problems:
            click.echo(problem)
        if problems:
            raise click.ClickException(f"{path}: {len(problems)} problems found")
        click.echo(f"{path}: {len(opened):,} vectors, no problem found")


for _change in (add, remove, compact):
    index.add_command(_change)


@dataclass(slots=True)
class _Run:
    """A search for every query of a file, and its sums."""

    opened: ZoomIndex
    source: VectorReader
    k: int
    options: dict[str, Any]
    truth: Ints | None
    queries: int = 0
    seconds: float = 0.0
    reads: int = 0
    pages: int = 0
    hits: int = 0
    true: int = 0

    def found(self) -> Iterator[npt.NDArray[Any]]:
        """Search batch by batch and yield the ids of each, ``[queries, k]``."""
        with tqdm(total=self.source.count, unit=" queries", disable=not sys.stderr.isatty()) as bar:
            for first, block in self.source.blocks():
                for start in range(0, len(block), _BATCH):
                    batch = block[start : start + _BATCH]
                    yield self._search(first + start, batch)
                    bar.update(len(batch))

    def _search(self, first: int, batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
        started = time.perf_counter()
        result = self.opened.search(batch, self.k, **self.options)
        self.seconds += time.perf_counter() - started
        self.queries += len(batch)
        self.reads += result.stats["reads"]
        self.pages += result.stats["pages"]
        if self.truth is not None:
            true = self.truth[first : first + len(batch), : self.k]
            for found, near in zip(result.ids, true, strict=True):
                self.hits += len(np.intersect1d(found[found != -1], near))
            self.true += int((true >= 0).sum())
        return result.ids

    def figures(self) -> dict[str, Any]:
        """Return the figures by name."""
        recall = {} if self.truth is None else {f"recall@{self.k}": self.hits / max(1, self.true)}
        each = max(1, self.queries)
        return {"queries": self.queries, "k": self.k} | recall | {
            "queries_per_second": self.queries / self.seconds if self.seconds else 0.0,
            "reads_per_query": self.reads / each,
            "pages_per_query": self.pages / each,
            "seconds": self.seconds,
        }  # fmt: skip


def _check_strings(opened: ZoomIndex, truth: str | None, out: str | None) -> None:
    """Refuse files of integers for an index of strings, before it is searched."""
    if opened.stats()["id_kind"] == "int64":
        return
    if truth is not None:
        raise ValueError(f"--truth {truth}: holds integers, and the ids of this index are strings: leave it out")
    if out is not None and Path(out).suffix.lower() != ".jsonl":
        raise ValueError(f"--out {out}: the ids of this index are strings: expected a file ending in .jsonl")


def _write_lines(path: Path, found: Iterator[npt.NDArray[Any]]) -> None:
    """Write the ids of each query as a JSON list in a line, null for none, to a new file."""
    with path.open("x", encoding="utf-8") as file:
        try:
            for ids in found:
                for row in ids.tolist():
                    names = [None if name == -1 else name for name in row]
                    file.write(json.dumps(names, ensure_ascii=False) + "\n")
        except BaseException:
            path.unlink()
            raise


def _read_truth(path: str, queries: int, k: int) -> Ints:
    ids = read_ground_truth(path).ids
    if len(ids) != queries or ids.shape[1] < k:
        raise ValueError(
            f"--truth {path}: {ids.shape[1]} neighbours of {len(ids):,} queries, expected at least {k} of {queries:,}"
        )
    return ids
