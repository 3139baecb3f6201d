"""``memhier index search``: the neighbours of each vector of a file."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann import SearchResult, ZoomIndex
from memhier.ann.files import VectorReader, open_vectors, read_ground_truth, write_vectors
from memhier.benchmarks.cli.index.inputs import (
    cache_bytes_option,
    cache_option,
    column_option,
    fields_option,
    queries_path,
    query_key,
    read_path,
)
from memhier.benchmarks.cli.index.written import TABLES, field_kinds, rows_at_a_time, write_archive, write_table
from memhier.benchmarks.cli.shell import (
    FiniteRange,
    Terminal,
    in_a_folder,
    json_option,
    new_table,
    notes,
    print_figures,
    write_json,
)

__all__ = ["search"]

Ints: TypeAlias = npt.NDArray[np.int64]

_IDS_ONLY = (".ivecs", ".ibin", ".npy")  # those that hold integers wide enough for ids
_OUT_SUFFIXES = (*TABLES, ".npz", *_IDS_ONLY)
_COLUMNS = {"query": "int64", "rank": "int64", "id": "", "distance": "float32"}
_BATCH = 1024  # queries of one call


@dataclass(slots=True)
class _Request:
    """A search for every query of a file, the neighbours to print, and its sums.

    Fields are read for the queries to print, or, where `all_fields` says so, for all.
    """

    opened: ZoomIndex
    source: VectorReader
    k: int
    show: int
    fields: bool | list[str] | None
    options: dict[str, Any]
    truth: Ints | None
    all_fields: bool
    shown: list[list[dict[str, Any]]] = field(default_factory=list)
    queries: int = 0
    seconds: float = 0.0
    reads: int = 0
    pages: int = 0
    stopped_early: int = 0
    hits: int = 0
    true: int = 0

    def found(self) -> Iterator[tuple[int, SearchResult]]:
        """Search batch by batch and yield the number of the first query of each with the result."""
        most = max(1, rows_at_a_time(self.opened) // self.k)
        with tqdm(total=self.source.count, unit=" queries", disable=not sys.stderr.isatty()) as bar:
            for first, block in self.source.blocks():
                start = 0
                while start < len(block):
                    left = self.source.count if self.all_fields else self.show - len(self.shown)
                    with_fields = self.fields is not None and left > 0
                    size = min(_BATCH, left, most) if with_fields else _BATCH
                    batch = block[start : start + size]
                    more = {"fields": self.fields} if with_fields else {}
                    yield first + start, self._search(first + start, batch, more)
                    bar.update(len(batch))
                    start += len(batch)

    def _search(self, first: int, batch: npt.NDArray[Any], more: dict[str, Any]) -> SearchResult:
        started = time.perf_counter()
        result = self.opened.search(batch, self.k, **self.options, **more)
        self.seconds += time.perf_counter() - started
        self.queries += len(batch)
        self.reads += result.stats["reads"]
        self.pages += result.stats["pages"]
        self.stopped_early += result.stats["stopped_early"]
        self.shown += _neighbours(result, self.show - len(self.shown))
        if self.truth is not None:
            true = self.truth[first : first + len(batch), : self.k]
            for found, near in zip(result.ids, true, strict=True):
                self.hits += len(np.intersect1d(found[found != -1], near))
            self.true += int((true >= 0).sum())
        return result

    def figures(self) -> dict[str, Any]:
        """Return the figures by name."""
        recall = {} if self.truth is None else {f"recall@{self.k}": self.hits / max(1, self.true)}
        each = max(1, self.queries)
        return {"queries": self.queries, "k": self.k} | recall | {
            "queries_per_second": self.queries / self.seconds if self.seconds else 0.0,
            "reads_per_query": self.reads / each,
            "pages_per_query": self.pages / each,
            "stopped_early": self.stopped_early,
            "seconds": self.seconds,
        }  # fmt: skip


@click.command()
@read_path
@queries_path
@click.option("-k", type=click.IntRange(1), default=10, show_default=True, help="Neighbours of each query.")
@click.option("--show", type=click.IntRange(0), default=10, show_default=True,
              help="Print the neighbours of this many queries, the first of the file.")  # fmt: skip
@click.option("--key", help="Data set of an HDF5 file.  [default: test]")
@column_option
@click.option("--recall", type=float, help="Share of the true neighbours to find.  [default: 0.99]")
@click.option("--where", help="Only vectors that meet this condition, such as \"price < 10 and lang == 'en'\".")
@fields_option
@click.option("--max-reads", type=click.IntRange(1), help="Pages read for one query at most.")
@click.option("--deadline-ms", type=FiniteRange(0, min_open=True),
              help="Milliseconds after which no further reads start.")  # fmt: skip
@click.option("--truth", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="True neighbours, by id: .ivecs, .hdf5, .h5, or the form of big-ann-benchmarks.")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(), callback=in_a_folder,
              help=f"Write the neighbours of all queries to this new file: {', '.join(_OUT_SUFFIXES)}.")  # fmt: skip
@cache_option
@cache_bytes_option
@json_option
def search(
    path: str, queries: str, k: int, show: int, key: str | None, column: str | None, truth: str | None,
    out: str | None, json_path: str | None, fields: bool | list[str] | None, cache: str | None, cache_bytes: str,
    **limits: Any,
) -> None:  # fmt: skip
    """Search an index for each vector of a file.

    The index is at PATH, a directory or the URL of a backup; the file is QUERIES. The command prints the neighbours of
    the first queries, then queries per second (of the searches alone), reads per query and, with --truth, the recall:
    the share of the true k nearest ids that were found. Of several equally near vectors only those in the truth count.

    The suffix of --out names its format. A .parquet or .jsonl file holds a row for each neighbour: query, rank (from 0
    on), id, distance and the fields. A .npz file holds the arrays ids and distances, others hold ids.
    """
    with notes(), open_vectors(queries, key=query_key(queries, key), column=column) as source:
        suffix = None if out is None else Path(out).suffix.lower()
        if suffix is not None and suffix not in _OUT_SUFFIXES:
            raise ValueError(f"--out {out}: expected a file ending in {', '.join(_OUT_SUFFIXES)}")
        if fields is not None and suffix is not None and suffix not in TABLES:
            raise ValueError(f"--fields: --out {out} has no place for them: expected {' or '.join(TABLES)}")
        true_ids = None if truth is None else _read_truth(truth, source.count, k)
        with ZoomIndex.open(path, cache=cache, cache_bytes=cache_bytes) as opened:
            _check_strings(opened, truth, out)
            options = {name: each for name, each in limits.items() if each is not None}
            request = _Request(opened, source, k, show, fields, options, true_ids, suffix in TABLES)
            if out is None:
                for _ in request.found():
                    pass
            elif suffix in TABLES:
                _write_neighbours(Path(out), request)
            elif suffix == ".npz":
                shape = (source.count, k)
                arrays = {"ids": (np.int64, shape), "distances": (np.float32, shape)}
                write_archive(Path(out), arrays, ((each.ids, each.distances) for _, each in request.found()))
            else:
                write_vectors(out, (each.ids for _, each in request.found()))
        _report(request, path, json_path)


def _write_neighbours(path: Path, request: _Request) -> None:
    """Write a row for each neighbour to a new file."""
    opened, fields = request.opened, request.fields
    names = [] if fields is None else [*opened.fields] if isinstance(fields, bool) else fields
    kinds = _COLUMNS | {"id": opened.stats()["id_kind"]} | field_kinds(opened, names, (*_COLUMNS,))
    with write_table(path, kinds) as write:
        for first, result in request.found():
            columns = result.hit_table().columns()
            columns["query"] = columns["query"] + first
            write(dict(zip(kinds, columns.values(), strict=True)))


def _report(request: _Request, path: str, json_path: str | None) -> None:
    """Print neighbours and figures, or write them as JSON."""
    if write_json(request.figures() | {"neighbours": request.shown}, json_path):
        return
    terminal = Terminal()
    if request.shown:
        found = [each for neighbours in request.shown for each in neighbours]
        names = [name for name in (found[0] if found else ()) if name not in ("id", "distance")]
        table = new_table(
            ("query", "right"), ("id", "right"), ("distance", "right"), *((name, "left") for name in names)
        )
        for query, neighbours in enumerate(request.shown):
            for place, each in enumerate(neighbours):
                more = ["" if each[name] is None else str(each[name]) for name in names]
                table.add_row("" if place else str(query), str(each["id"]), f"{each['distance']:.6g}", *more)
        terminal.print(table)
    if request.show and (rest := request.queries - len(request.shown)) > 0:
        others = "1 more query" if rest == 1 else f"{rest:,} more queries"
        terminal.print(f"and the neighbours of {others}: --show prints them, --out writes them")
    terminal.print(f"Searched {path}")
    print_figures(terminal, request.figures(), ("queries",))


def _neighbours(result: SearchResult, count: int) -> list[list[dict[str, Any]]]:
    """Return the neighbours of the first queries as plain values."""
    first = slice(max(0, count))
    fields = {name: column[first] for name, column in result.fields.items()}
    return SearchResult(result.ids[first], result.distances[first], result.stats, fields).rows()


def _check_strings(opened: ZoomIndex, truth: str | None, out: str | None) -> None:
    """Refuse files of integers for an index of strings, before it is searched."""
    if opened.stats()["id_kind"] == "int64":
        return
    if truth is not None:
        raise ValueError(f"--truth {truth}: holds integers, and the ids of this index are strings: leave it out")
    if out is not None and Path(out).suffix.lower() not in TABLES:
        raise ValueError(f"--out {out}: the ids of this index are strings: expected {' or '.join(TABLES)}")


def _read_truth(path: str, queries: int, k: int) -> Ints:
    ids = read_ground_truth(path).ids
    if len(ids) != queries or ids.shape[1] < k:
        raise ValueError(
            f"--truth {path}: {ids.shape[1]} neighbours of {len(ids):,} queries, expected at least {k} of {queries:,}"
        )
    return ids
