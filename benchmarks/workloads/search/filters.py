"""Filters that do and do not go with the vectors, of falling selectivity: recall stays, and what a query costs falls.

``python -m memhier.benchmarks.workloads.search.filters`` prints a table: of real data sets (those that are not there
are passed over), of tight clusters, and of heavy tails. A made-up price is independent of the vectors, a label goes
with them: a query asks for its own label, for any other, and for another one. Recall is against exact search among the
vectors that the filter leaves.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import faiss
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.machine import describe_machine
from memhier.benchmarks.workloads.options import FOLDER, json_option
from memhier.benchmarks.workloads.replay.data import load_images

__all__ = ["SETS", "Filtered", "LabelledSet", "main", "make_labelled", "measure", "record"]

K = 10
SHARES = (1.0, 0.5, 0.05, 0.005, 0.0005, 0.0001)
_LABELS = 10
_ROOM = 4 << 20  # bytes of DRAM for buffers, beside a share of the vectors
_IMAGES = ("cifar10", "fashion-mnist", "mnist")

Matrix: TypeAlias = npt.NDArray[Any]
Labels: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """Vectors ``[n, d]`` and queries ``[q, d]``, and a label of each that goes with where it lies."""

    base: Matrix
    labels: Labels
    queries: Matrix
    asked: Labels


@dataclass(frozen=True, slots=True)
class Filtered:
    """One filter.

    Attributes
    ----------
    data, filter
        What was searched, and how the filter chooses.
    share
        Of the vectors that it leaves, on average.
    declared, recall
        Recall@10.
    scanned, pages
        Codes compared and pages read for a query, on average.
    cpu_ms
        CPU time of a query, on average.
    """

    data: str
    filter: str
    share: float
    declared: float
    recall: float
    scanned: float
    pages: float
    cpu_ms: float


def _clusters(random: np.random.Generator, count: int) -> tuple[Matrix, Labels]:
    """A hundred tight clusters, ten of each label."""
    member = random.integers(0, 100, count)
    points = 3 * random.normal(size=(100, 32))[member] + 0.2 * random.normal(size=(count, 32))
    return points.astype(np.float32), member % _LABELS


def _heavy(random: np.random.Generator, count: int) -> tuple[Matrix, Labels]:
    """Axes and lengths with heavy tails; the label is the longest axis."""
    points = random.standard_t(2.5, (count, 24)) * random.lognormal(0, 0.5, (count, 1))
    return points.astype(np.float32), np.abs(points).argmax(axis=1) % _LABELS


_MADE: dict[str, Callable[[np.random.Generator, int], tuple[Matrix, Labels]]] = {"clusters": _clusters, "heavy": _heavy}
SETS = ("sift-imagenet200k", *_IMAGES, *_MADE)


def make_labelled(name: str, count: int, queries: int, seed: int) -> LabelledSet:
    """Return at most `count` vectors of one of :data:`SETS`, with `queries` held out.

    Raises
    ------
    FileNotFoundError
        For a real data set that is not there.
    """
    random = np.random.default_rng([seed, len(name)])
    if name in _MADE:
        points, labels = _MADE[name](random, count + queries)
        return LabelledSet(points[queries:], labels[queries:], points[:queries], labels[:queries])
    if name in _IMAGES:
        images = load_images(name)
        some, held = random.permutation(len(images.train))[:count], random.permutation(len(images.test))[:queries]
        flat = images.train[some].reshape(len(some), -1), images.test[held].reshape(len(held), -1)
        return LabelledSet(flat[0], images.train_labels[some], flat[1], images.test_labels[held])
    data = load_search_set(name)
    some, held = random.permutation(len(data.base))[:count], random.permutation(len(data.queries))[:queries]
    base, asked = data.base[some], data.queries[held]
    return LabelledSet(base, _strongest(base), asked, _strongest(asked))


def _strongest(descriptors: Matrix) -> Labels:
    """Return the strongest of eight directions of gradient descriptors ``[n, 128]``."""
    found: Labels = descriptors.reshape(len(descriptors), -1, 8).sum(axis=1, dtype=np.int64).argmax(axis=1)
    return found


def measure(name: str, data: LabelledSet, dram: int, declared: float, folder: Path) -> Iterator[Filtered]:
    """Yield what each filter costs on a data set, with an index in `dram` bytes."""
    price = np.random.default_rng(0).random(len(data.base))
    queries = data.queries.astype(np.float32)
    with ZoomIndex.build(
        folder / "index", data.base, dram=dram, attributes={"price": price, "label": data.labels}
    ) as index:
        for share in SHARES:
            where = None if share == 1 else f"price < {share}"
            if (price < share).any():
                yield _measure(name, "price", index, data.base, declared, [(where, price < share, queries)])
        kinds: dict[str, Callable[[int], tuple[str, Mask]]] = {
            "own label": lambda own: (f"label == {own}", data.labels == own),
            "not own label": lambda own: (f"label != {own}", data.labels != own),
            "another label": lambda own: (f"label == {_other(own)}", data.labels == _other(own)),
        }
        for kind, choose in kinds.items():
            asked = [(*choose(own), queries[data.asked == own]) for own in np.unique(data.asked).tolist()]
            yield _measure(name, kind, index, data.base, declared, [each for each in asked if each[1].any()])


def _other(label: int) -> int:
    return (label + 4) % _LABELS


def _measure(
    name: str,
    kind: str,
    index: ZoomIndex,
    base: Matrix,
    declared: float,
    asked: Sequence[tuple[str | None, Mask, npt.NDArray[np.float32]]],
) -> Filtered:
    """Return what filters cost together, each with the queries that ask for it."""
    total = sum(len(queries) for _, _, queries in asked)
    right = scanned = pages = spent = share = 0.0
    for where, left, queries in asked:
        k = min(K, int(left.sum()))
        _, true = exact_neighbours(base[left], queries, k)
        index.search(queries[:1], K, where=where)  # the bitmap is made once
        before = time.process_time()
        found = index.search(queries, K, recall=declared, where=where)
        spent += time.process_time() - before
        right += recall_at_k(found.distances[:, :k], true) * len(queries)
        scanned += found.stats["scanned"]
        pages += found.stats["page_requests"]
        share += float(left.mean()) * len(queries)
    return Filtered(
        data=name,
        filter=kind,
        share=share / total,
        declared=declared,
        recall=right / total,
        scanned=scanned / total,
        pages=pages / total,
        cpu_ms=1e3 * spent / total,
    )


@click.command(help=__doc__)
@click.option("--data", "names", multiple=True, default=SETS, type=click.Choice(SETS), show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Vectors of each set, at most.")
@click.option("--share", default=0.15, show_default=True, help="DRAM for codes, as a share of the raw vectors.")
@click.option("--recall", default=0.95, show_default=True, help="Declared.")
@click.option("--queries", default=500, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--dir", "place", type=FOLDER, help="Where to build; a temporary folder otherwise.")
@json_option
def main(
    names: tuple[str, ...],
    count: int,
    share: float,
    recall: float,
    queries: int,
    seed: int,
    place: Path | None,
    out: Path | None,
) -> None:
    """Print a table."""
    faiss.omp_set_num_threads(1)
    rows: list[Filtered] = []
    for name in names:
        try:
            data = make_labelled(name, count, queries, seed)
        except FileNotFoundError as error:
            Console(stderr=True).print(f"skipped: {error}")
            continue
        with tempfile.TemporaryDirectory(dir=place) as folder:
            rows += measure(name, data, int(share * data.base.nbytes) + _ROOM, recall, Path(folder))
    if not rows:
        raise click.ClickException("nothing was measured")
    table = Table(title=f"recall {recall} declared; {describe_machine()}", title_style="")
    for heading in ("data", "filter", "vectors left", "recall@10", "codes scanned", "pages read", "CPU ms"):
        table.add_column(heading, justify="left" if heading in ("data", "filter") else "right")
    for row in rows:
        cells = f"{row.share:.2%}", f"{row.recall:.4f}", f"{row.scanned:,.0f}", f"{row.pages:.1f}", f"{row.cpu_ms:.3f}"
        table.add_row(row.data, row.filter, *cells)
    Console().print(table)
    if out is not None:
        record(rows).write(out, results=[asdict(row) for row in rows])


def record(rows: Sequence[Filtered]) -> Record:
    """Return what can be held against another run."""
    figures = []
    for row in rows:
        at = f"{row.data}, {row.share:.2%} left" if row.filter == "price" else f"{row.data}, {row.filter}"
        figures += [
            Figure.of(f"recall@10, {at}", row.recall, "share", "neither"),
            Figure.of(f"codes, {at}", row.scanned, "compared a query", "less"),
            Figure.of(f"pages, {at}", row.pages, "4 KiB reads a query", "less"),
            Figure.of(f"CPU, {at}", row.cpu_ms, "ms a query", "less"),
        ]
    return Record(figures)


if __name__ == "__main__":
    main()
