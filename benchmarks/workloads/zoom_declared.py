"""Is a declared recall kept? ZoomIndex on eleven kinds of data, by several seeds: recall declared, found, and reads.

``python -m memhier.benchmarks.workloads.zoom_declared`` prints a table and, with ``--json``, writes it. Real data sets
that are not there are passed over; the others come from a seed. Queries are held out, and answers as near as the true
k-th neighbour count, so that ties do.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.ann.zoom.space import Metric
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.workloads.options import json_option

__all__ = ["SETS", "Kept", "main", "make_set", "measure_declared", "record"]

K = 10
_ROOM = 4 << 20  # bytes of DRAM for buffers, beside a share of the vectors

Vectors: TypeAlias = npt.NDArray[Any]
Points: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kept:
    """One index searched with one declared recall.

    Attributes
    ----------
    data, metric, seed
        What was indexed.
    declared, recall
        Recall@10 as declared and as measured.
    calibrated
        Whether the index says that it knows what the recall takes.
    ranked, pages, slow_pages
        Full vectors compared and pages read for a query, on average; and pages of the slowest of a hundred.
    """

    data: str
    metric: str
    seed: int
    declared: float
    recall: float
    calibrated: bool
    ranked: float
    pages: float
    slow_pages: float


def _clusters(random: np.random.Generator, count: int) -> Points:
    """Fifty clouds, some forty times as wide as others."""
    centres = 3 * random.normal(size=(50, 48))
    member = random.integers(0, 50, count)
    return centres[member] + random.normal(size=(count, 48)) * random.uniform(0.05, 2, 50)[member, None]


def _alike(random: np.random.Generator, count: int) -> Points:
    return random.normal(size=(count, 16))


def _copies(random: np.random.Generator, count: int) -> Points:
    return np.repeat(random.normal(size=(-(-count // 20), 24)), 20, axis=0)[random.permutation(count)]


def _flat(random: np.random.Generator, count: int) -> Points:
    return random.normal(size=(count, 6)) @ random.normal(size=(6, 96)) + 0.01 * random.normal(size=(count, 96))


def _outlier(random: np.random.Generator, count: int) -> Points:
    points = random.normal(size=(count, 24)) * random.lognormal(0, 0.5, (count, 1))
    points[np.linalg.norm(points, axis=1).argmax()] *= 8
    return points


def _whole(random: np.random.Generator, count: int) -> Points:
    """Whole numbers of few values, as bytes."""
    return np.clip(np.rint(_clusters(random, count)[:, :32] * 4 + 128), 0, 255)


_MADE: dict[str, tuple[Metric, str, Callable[[np.random.Generator, int], Points]]] = {
    "clusters": ("l2", "float32", _clusters),
    "alike": ("l2", "float32", _alike),
    "copies": ("l2", "float32", _copies),
    "flat": ("l2", "float16", _flat),
    "bytes": ("l2", "uint8", _whole),
    "outlier": ("ip", "float32", _outlier),
    "directions": ("cosine", "float32", _clusters),
}
_REAL = ("fashion-mnist", "mnist", "sift-imagenet200k")
SETS = ("mixed", *_MADE, *_REAL)


def make_set(name: str, count: int, queries: int, seed: int) -> tuple[Vectors, Vectors, Metric]:
    """Return vectors ``[count, d]``, queries ``[queries, d]`` and the metric of one of :data:`SETS`.

    Raises
    ------
    FileNotFoundError
        For a real data set that is not there.
    """
    random = np.random.default_rng([seed, len(name)])
    if name in _REAL:
        data = load_search_set(name)
        base = data.base[np.sort(random.permutation(len(data.base))[:count])]
        return base, data.queries[random.permutation(len(data.queries))[:queries]], "l2"
    if name == "mixed":
        made = mixed(count, 64, seed)
        return made.array(), made.queries(queries), "l2"
    metric, dtype, make = _MADE[name]
    points = make(random, count + queries).astype(dtype)
    chosen = random.permutation(count + queries)
    return points[chosen[queries:]], points[chosen[:queries]], metric


def measure_declared(
    name: str, count: int, queries: int, seed: int, share: float, recalls: Sequence[float], folder: Path
) -> Iterator[Kept]:
    """Build an index of one data set in `share` of its bytes and 4 MiB of DRAM, and yield what each recall gives."""
    base, asked, metric = make_set(name, count, queries, seed)
    near = exact_neighbours(base, asked, K, metric)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be calibrated is in the figures
        index = ZoomIndex.build(
            folder / f"{name}-{seed}", base, metric=metric, dram=int(share * base.nbytes) + _ROOM, seed=seed
        )
    with index:
        for recall in recalls:
            found, pages, ranked = [], [], 0
            for query in asked:
                result = index.search(query, K, recall=recall)
                found.append(result.distances)
                pages.append(result.stats["page_requests"])
                ranked += result.stats["ranked"]
            yield Kept(
                data=name,
                metric=metric,
                seed=seed,
                declared=recall,
                recall=recall_at_k(np.array(found), near),
                calibrated=result.stats["calibrated"],
                ranked=ranked / len(asked),
                pages=float(np.mean(pages)),
                slow_pages=float(np.quantile(pages, 0.99)),
            )


@click.command()
@click.option("--data", "names", multiple=True, default=SETS, type=click.Choice(SETS), show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Vectors of each set.")
@click.option("--queries", default=1000, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--share", default=0.15, show_default=True, help="DRAM for codes, as a share of the raw vectors.")
@click.option("--recall", "recalls", multiple=True, default=(0.8, 0.9, 0.95, 0.99), show_default=True)
@json_option
def main(
    names: tuple[str, ...],
    count: int,
    queries: int,
    seeds: int,
    share: float,
    recalls: tuple[float, ...],
    out: Path | None,
) -> None:
    """Compare the recall that was declared with the recall that was found."""
    results: list[Kept] = []
    for name in names:
        for seed in range(seeds):
            try:
                with tempfile.TemporaryDirectory() as scratch:
                    results += measure_declared(name, count, queries, seed, share, recalls, Path(scratch))
            except FileNotFoundError as error:
                Console(stderr=True).print(f"skipped: {error}")
                break
    if not results:
        raise click.ClickException("nothing was measured")
    Console().print(_table(results))
    if out is not None:
        record(results).write(out, results=[asdict(result) for result in results])


def record(results: Sequence[Kept]) -> Record:
    """Return what can be held against another run: of every set and recall, over seeds, what was found and read."""
    figures = []
    for data, declared in dict.fromkeys((each.data, each.declared) for each in results):
        of_all = [each for each in results if (each.data, each.declared) == (data, declared)]
        at = f"{data}, {declared:g} declared"
        figures += [
            Figure.of(f"recall@10, {at}", [each.recall for each in of_all], "share", "neither"),
            Figure.of(f"pages, {at}", [each.pages for each in of_all], "4 KiB reads a query", "less"),
        ]
    return Record(figures)


def _table(results: Sequence[Kept]) -> Table:
    table = Table(title=f"ZoomIndex, k = {K}: recall declared and found, over seeds")
    for name in ("data", "declared", "mean", "worst", "worst less declared", "ranked", "pages", "pages p99"):
        table.add_column(name, justify="left" if name == "data" else "right")
    for data, metric, declared in dict.fromkeys((each.data, each.metric, each.declared) for each in results):
        of_all = [each for each in results if (each.data, each.declared) == (data, declared)]
        found = [each.recall for each in of_all]
        known = "" if all(each.calibrated for each in of_all) else " (not calibrated)"
        table.add_row(
            f"{data}, {metric}{known}",
            f"{declared:g}",
            f"{np.mean(found):.4f}",
            f"{min(found):.4f}",
            f"{min(found) - declared:+.4f}",
            f"{np.mean([each.ranked for each in of_all]):.1f}",
            f"{np.mean([each.pages for each in of_all]):.1f}",
            f"{np.mean([each.slow_pages for each in of_all]):.0f}",
        )
    return table


if __name__ == "__main__":
    main()
