"""Is a declared recall kept, and does more of it cost more? Recall declared, found, and reads, by several seeds.

``python -m memhier.benchmarks.workloads.search.declared`` prints a table and, with ``--json``, writes it. Real data
sets that are not there are passed over; the others come from a seed. Queries are held out, and answers as near as the
true k-th neighbour count, so that ties do. Of the factors of real logs, users ask for items: queries of another kind
than the vectors, for which nothing is tuned. Patches are grey squares of photographs, whitened.
"""

import itertools
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
from memhier.ann.zoom.preview.space import Metric
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import exact_neighbours, id_recall, recall_at_k
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.workloads.options import json_option
from memhier.benchmarks.workloads.replay.data import load_images
from memhier.benchmarks.workloads.search.product_data import LOGS, log_factors

__all__ = ["SETS", "Kept", "main", "make_set", "measure_declared", "record"]

_ROOM = 4 << 20  # bytes of DRAM for buffers, beside a share of the vectors
_SIDE = 12  # of a patch, in pixels
_NOISE = 0.01  # of what a query costs, that a higher recall may cost less
_METRICS: tuple[Metric, ...] = ("ip", "cosine")

Vectors: TypeAlias = npt.NDArray[Any]
Points: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kept:
    """One index searched with one declared recall.

    Attributes
    ----------
    data, metric, seed
        What was indexed.
    k, declared, recall
        How many neighbours were asked for, and their recall as declared and as measured.
    calibrated
        Whether the index says that it knows what the recall takes.
    codes, ranked, pages, slow_pages
        Codes scanned, full vectors compared and pages read for a query, on average; and pages of the slowest of a
        hundred.
    """

    data: str
    metric: str
    seed: int
    k: int
    declared: float
    recall: float
    calibrated: bool
    codes: float
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
_USERS = tuple(f"{log}, {metric}" for log in LOGS for metric in _METRICS)
SETS = ("mixed", *_MADE, *_REAL, "patches", *_USERS)


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
    if name == "patches":
        return *_patches(random, count, queries), "l2"
    if name in _USERS:
        log, metric = name.split(", ")
        factors = log_factors(log)
        some, asking = random.permutation(len(factors.items))[:count], random.permutation(len(factors.users))[:queries]
        return factors.items[some], factors.users[asking], "ip" if metric == "ip" else "cosine"
    if name == "mixed":
        made = mixed(count, 64, seed)
        return made.array(), made.queries(queries), "l2"
    metric, dtype, make = _MADE[name]
    points = make(random, count + queries).astype(dtype)
    chosen = random.permutation(count + queries)
    return points[chosen[queries:]], points[chosen[:queries]], metric


def _patches(random: np.random.Generator, count: int, queries: int) -> tuple[Vectors, Vectors]:
    """Return whitened patches, and others of other photographs."""
    images = load_images("cifar10")
    some, asked = (
        _cut(random, photographs.mean(axis=3), wanted)
        for photographs, wanted in ((images.train, count), (images.test, queries))
    )
    variances, axes = np.linalg.eigh(np.cov(some.T))
    white = axes[:, 1:] / np.sqrt(variances[1:])  # the mean was taken off
    return (some @ white).astype(np.float32), (asked @ white).astype(np.float32)


def _cut(random: np.random.Generator, photographs: Points, count: int) -> Points:
    """Return so many squares of photographs ``[n, side, side]``, less the mean of each."""
    which = random.integers(0, len(photographs), count)
    across, down = random.integers(0, photographs.shape[1] - _SIDE + 1, (2, count, 1, 1))
    steps = np.arange(_SIDE)
    cut: Points = photographs[which[:, None, None], across + steps[:, None], down + steps].reshape(count, -1)
    cut -= cut.mean(axis=1, keepdims=True)
    return cut


def measure_declared(
    name: str,
    count: int,
    queries: int,
    seed: int,
    k: int,
    dram: Callable[[int], int],
    recalls: Sequence[float],
    folder: Path,
) -> Iterator[Kept]:
    """Build an index of one data set in `dram` of its bytes, and yield what each recall gives."""
    base, asked, metric = make_set(name, count, queries, seed)
    rows, near = exact_neighbours(base, asked, k, metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be calibrated is in the figures
        index = ZoomIndex.build(folder / f"{name}-{seed}", base, metric=metric, dram=dram(base.nbytes), seed=seed)
    with index:
        for recall in recalls:
            answers = [index.search(query, k, recall=recall) for query in asked]
            pages = [each.stats["page_requests"] for each in answers]
            if name in _USERS:  # products are small beside what counts as a tie
                found = id_recall(np.array([each.ids for each in answers]), rows)
            else:
                found = recall_at_k(np.array([each.distances for each in answers]), near)
            yield Kept(
                data=name,
                metric=metric,
                seed=seed,
                k=k,
                declared=recall,
                recall=found,
                calibrated=all(each.stats["calibrated"] for each in answers),
                codes=float(np.mean([each.stats["scanned"] for each in answers])),
                ranked=float(np.mean([each.stats["ranked"] for each in answers])),
                pages=float(np.mean(pages)),
                slow_pages=float(np.quantile(pages, 0.99)),
            )


@click.command()
@click.option("--data", "names", multiple=True, default=SETS, type=click.Choice(SETS), show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Vectors of each set.")
@click.option("--queries", default=1000, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("-k", "k", default=10, show_default=True, help="Neighbours of a query.")
@click.option("--share", default=0.15, show_default=True, help="DRAM, as a share of the raw vectors.")
@click.option("--room", default=_ROOM, show_default=True, help="Bytes of DRAM beside that share.")
@click.option("--recall", "recalls", multiple=True, default=(0.8, 0.9, 0.95, 0.99), show_default=True)
@json_option
def main(
    names: tuple[str, ...],
    count: int,
    queries: int,
    seeds: int,
    k: int,
    share: float,
    room: int,
    recalls: tuple[float, ...],
    out: Path | None,
) -> None:
    """Compare the recall that was declared with the recall that was found, and what more of it costs."""

    def dram(raw: int) -> int:
        return int(share * raw) + room

    results: list[Kept] = []
    for name in names:
        for seed in range(seeds):
            try:
                with tempfile.TemporaryDirectory() as scratch:
                    results += measure_declared(name, count, queries, seed, k, dram, recalls, Path(scratch))
            except FileNotFoundError as error:
                Console(stderr=True).print(f"skipped: {error}")
                break
    if not results:
        raise click.ClickException("nothing was measured")
    Console().print(_table(results))
    for data, fall in _falls(results).items():
        rises = "costs no less" if fall <= _NOISE else f"costs up to {fall:.1%} less"
        Console().print(f"{data}: a higher recall {rises}, in pages or codes")
    if out is not None:
        record(results).write(out, results=[asdict(result) for result in results])


def _falls(results: Sequence[Kept]) -> dict[str, float]:
    """Return by data set the largest share of its pages, or codes, by which a query costs less for a higher recall."""
    falls = dict.fromkeys((each.data for each in results), 0.0)
    for data, seed in dict.fromkeys((each.data, each.seed) for each in results):
        ladder = sorted((each for each in results if (each.data, each.seed) == (data, seed)), key=lambda e: e.declared)
        for less, more in itertools.pairwise(ladder):
            fall = max(1 - more.pages / less.pages, 1 - more.codes / less.codes)
            falls[data] = max(falls[data], fall)
    return falls


def record(results: Sequence[Kept]) -> Record:
    """Return what can be held against another run: of every set and recall, over seeds, what was found and read."""
    figures = [
        Figure.of(f"cost less for more recall, {data}", fall, "share of pages or codes", "less")
        for data, fall in _falls(results).items()
    ]
    for data, declared in dict.fromkeys((each.data, each.declared) for each in results):
        of_all = [each for each in results if (each.data, each.declared) == (data, declared)]
        at = f"{data}, {declared:g} declared"
        figures += [
            Figure.of(f"recall@{of_all[0].k}, {at}", [each.recall for each in of_all], "share", "neither"),
            Figure.of(f"pages, {at}", [each.pages for each in of_all], "4 KiB reads a query", "less"),
            Figure.of(f"codes, {at}", [each.codes for each in of_all], "scanned a query", "less"),
        ]
    return Record(figures)


def _table(results: Sequence[Kept]) -> Table:
    table = Table(title=f"ZoomIndex, k = {results[0].k}: recall declared and found, over seeds")
    for name in ("data", "declared", "mean", "worst", "codes", "ranked", "pages", "pages p99"):
        table.add_column(name, justify="left" if name == "data" else "right")
    for data, metric, declared in dict.fromkeys((each.data, each.metric, each.declared) for each in results):
        of_all = [each for each in results if (each.data, each.declared) == (data, declared)]
        found = [each.recall for each in of_all]
        known = "" if all(each.calibrated for each in of_all) else " (not calibrated)"
        table.add_row(
            f"{data if data in _USERS else f'{data}, {metric}'}{known}",
            f"{declared:g}",
            f"{np.mean(found):.4f}",
            f"{min(found):.4f}",
            f"{np.mean([each.codes for each in of_all]):,.0f}",
            f"{np.mean([each.ranked for each in of_all]):.1f}",
            f"{np.mean([each.pages for each in of_all]):.1f}",
            f"{np.mean([each.slow_pages for each in of_all]):.0f}",
        )
    return table


if __name__ == "__main__":
    main()
