"""``memhier index search``: the neighbours of each vector of a file."""

import json
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
from memhier.benchmarks.cli.index.inputs import column_option, fields_option, index_path, query_key
from memhier.benchmarks.cli.shell import Terminal, json_option, new_table, notes, print_figures, write_json

__all__ = ["search"]

Ints: TypeAlias = npt.NDArray[np.int64]

_OUT_SUFFIXES = (".ivecs", ".ibin", ".npy", ".jsonl")  # those that hold integers wide enough for ids
_BATCH = 1024  # queries of one call


@dataclass(slots=True)
class _Request:
    """A search for every query of a file, the neighbours to print, and its sums."""

    opened: ZoomIndex
    source: VectorReader
    k: int
    show: int
    fields: bool | list[str] | None
    options: dict[str, Any]
    truth: Ints | None
    shown: list[list[dict[str, Any]]] = field(default_factory=list)
    queries: int = 0
    seconds: float = 0.0
    reads: int = 0
    pages: int = 0
    stopped_early: int = 0
    hits: int = 0
    true: int = 0

    def found(self) -> Iterator[npt.NDArray[Any]]:
        """Search batch by batch and yield the ids of each, ``[queries, k]``."""
        with tqdm(total=self.source.count, unit=" queries", disable=not sys.stderr.isatty()) as bar:
            for first, block in self.source.blocks():
                start = 0
                while start < len(block):
                    # Fields are read for the queries shown only.
                    with_fields = self.fields is not None and self.show > len(self.shown)
                    size = min(_BATCH, self.show - len(self.shown)) if with_fields else _BATCH
                    batch = block[start : start + size]
                    yield self._search(first + start, batch, {"fields": self.fields} if with_fields else {})
                    bar.update(len(batch))
                    start += len(batch)

    def _search(self, first: int, batch: npt.NDArray[Any], more: dict[str, Any]) -> npt.NDArray[Any]:
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
        return result.ids

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
@index_path
@click.argument("queries", type=click.Path(exists=True, dir_okay=False))
@click.option("-k", type=click.IntRange(1), default=10, show_default=True, help="Neighbours of each query.")
@click.option("--show", type=click.IntRange(0), default=10, show_default=True,
              help="Print the neighbours of this many queries, the first of the file.")  # fmt: skip
@click.option("--key", help="Data set of an HDF5 file.  [default: test]")
@column_option
@click.option("--recall", type=float, help="Share of the true neighbours to find.  [default: 0.99]")
@click.option("--where", help="Only vectors that meet this condition, such as \"price < 10 and lang == 'en'\".")
@fields_option
@click.option("--max-reads", type=click.IntRange(1), help="Pages read for one query at most.")
@click.option("--deadline-ms", type=click.FloatRange(0, min_open=True),
              help="Milliseconds after which no further reads start.")  # fmt: skip
@click.option("--truth", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="True neighbours, by id: .ivecs, .hdf5, .h5, or the form of big-ann-benchmarks.")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(),
              help=f"Write the ids of all queries to this new file: {', '.join(_OUT_SUFFIXES)} (for strings).",
)  # fmt: skip
@json_option
def search(
    path: str, queries: str, k: int, show: int, key: str | None, column: str | None, truth: str | None,
    out: str | None, json_path: str | None, fields: bool | list[str] | None, **limits: Any,
) -> None:  # fmt: skip
    """Search the index at PATH for each vector of a file.

    The file is QUERIES. The command prints the neighbours of the first queries, then queries per second (of the
    searches alone), reads per query and, with --truth, the recall: the share of the true k nearest ids that were found.
    Of several equally near vectors only those in the truth count.
    """
    with notes(), open_vectors(queries, key=query_key(queries, key), column=column) as source:
        if out is not None and Path(out).suffix.lower() not in _OUT_SUFFIXES:
            raise ValueError(f"--out {out}: expected a file ending in {', '.join(_OUT_SUFFIXES)}")
        true_ids = None if truth is None else _read_truth(truth, source.count, k)
        with ZoomIndex.open(path) as opened:
            _check_strings(opened, truth, out)
            options = {name: each for name, each in limits.items() if each is not None}
            request = _Request(opened, source, k, show, fields, options, true_ids)
            if out is None:
                for _ in request.found():
                    pass
            elif Path(out).suffix.lower() == ".jsonl":
                _write_lines(Path(out), request.found())
            else:
                write_vectors(out, request.found())
        _report(request, path, json_path)


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
        terminal.print(f"and the neighbours of {rest:,} more queries: --show prints them, --out writes them")
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
