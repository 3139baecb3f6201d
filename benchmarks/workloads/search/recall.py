"""The declared recall beside the recall found, and the cost of a query: by data set, form of codes, DRAM and filter.

``python -m memhier.benchmarks.workloads.search.recall --workload search-recall`` prints every setting.
``[parameters.options]`` in the workload's TOML file sets the defaults of the options. Queries are held out and asked
one at a time, cold, or in one batch. The truth is exact search. An answer as near as the true k-th neighbour counts, so
ties count; ids count where products are too small to tell. Missing data sets are skipped.

With ``--filters`` a made-up price is independent of the vectors, a place is that among the vectors nearest to the first
query, far from most others, and a label goes with them: queries ask for their own label, for any other label, and for
one other label. The truth is then exact search among the vectors that are left.
"""

import itertools
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.ann.zoom.preview.preview import Coding
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.bench.workload import load_workloads
from memhier.benchmarks.exact import exact_neighbours, id_recall, recall_at_k
from memhier.benchmarks.workloads.harness import (
    Measure,
    Outcome,
    Row,
    bars_of,
    figures_of,
    grouped,
    rows_table,
    skip,
    workload,
)
from memhier.benchmarks.workloads.search.sets import FAMILIES, SearchCase
from memhier.errors import BudgetError

__all__ = ["Ask", "Sweep", "main", "measure"]

FORMS: dict[str, Coding] = {"bounds": "rabitq", "paper": "pq"}
PRICES = (1.0, 0.5, 0.1, 0.05, 0.01, 0.005, 0.001, 0.0002)
READS = "4 KiB reads a query"
MEASURES = {
    "recall": Measure("recall", "recall@{k}", "share", "neither"),
    "pages": Measure("pages", "pages", READS),
    "requests": Measure("requests", "pages", READS),
    "codes": Measure("scanned", "codes", "compared a query"),
    "cpu": Measure("cpu_ms", "CPU", "ms a query"),
    "p50": Measure("p50_ms", "p50", "ms", clock=True),
    "p99": Measure("p99_ms", "p99", "ms", clock=True),
}
_COUNTED = {"scanned": "scanned", "ranked": "ranked", "requests": "page_requests", "pages": "pages", "reads": "reads"}

Mask: TypeAlias = npt.NDArray[np.bool_]
Shares: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The settings of a run; the command describes each of its options."""

    family: str
    data: Sequence[str]
    count: int
    queries: int
    seeds: int
    k: int
    shares: Sequence[float]
    room: int
    recalls: Sequence[float]
    forms: Sequence[str]
    filters: bool
    batch: bool
    figures: Sequence[str]
    at: str

    def __post_init__(self) -> None:
        """Refuse a data set that the family lacks."""
        for name in self.data:
            if self.family != "whole" and name not in FAMILIES[self.family][0]:
                known = ", ".join(FAMILIES[self.family][0])
                raise click.BadParameter(f"{name!r}: expected one of {known}", param_hint="--data")


@dataclass(frozen=True, slots=True)
class Ask:
    """Queries with one condition, and their exact answers among the vectors that the condition leaves.

    Attributes
    ----------
    where, left
        The condition, and the share of the vectors that it leaves.
    ids, distances
        ``[q, k]``, or fewer columns if fewer vectors are left.
    """

    where: str | None
    left: float
    queries: Matrix
    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]

    @classmethod
    def of(cls, case: SearchCase, k: int, queries: Matrix, where: str | None = None, mask: Mask | None = None) -> "Ask":
        """Search exactly for `queries` among the vectors of `mask`; their ids are the row numbers in `case`."""
        if mask is None:
            return cls(None, 1.0, queries, *exact_neighbours(case.base, queries, k, case.metric))
        rows = np.flatnonzero(mask)
        ids, distances = exact_neighbours(case.base[mask], queries, min(k, len(rows)), case.metric)
        return cls(where, float(mask.mean()), queries, rows[ids], distances)


def filter_asks(case: SearchCase, k: int, price: Shares, place: Shares) -> Iterator[tuple[str, list[Ask]]]:
    """Yield the name of each filter with its conditions."""
    assert case.labels is not None
    assert case.asked is not None
    for share in PRICES:
        mask = price < share
        if mask.any():
            where = None if share == 1 else f"price < {share}"
            yield f"{mask.mean():.2%} left", [Ask.of(case, k, case.queries, where, mask)]
    for share in PRICES[1:]:
        mask = place < share
        yield f"nearest {mask.mean():.2%} left", [Ask.of(case, k, case.queries, f"place < {share}", mask)]
    for kind in ("own label", "not own label", "another label"):
        asks = []
        for own in np.unique(case.asked).tolist():
            label = (own + 4) % 10 if kind == "another label" else own
            sign = "!=" if kind == "not own label" else "=="
            mask = (case.labels != label) if sign == "!=" else (case.labels == label)
            if mask.any():
                asks.append(Ask.of(case, k, case.queries[case.asked == own], f"label {sign} {label}", mask))
        yield kind, asks


def measure(index: ZoomIndex, asks: Sequence[Ask], declared: float, k: int, *, batch: bool, by_id: bool = False) -> Row:
    """Search with a declared recall; return the recall found and the mean cost of a query."""
    total = sum(len(ask.queries) for ask in asks)
    hits = same = spent = left = 0.0
    seconds: list[float] = []
    stats: list[dict[str, Any]] = []
    for ask in asks:
        if ask.where is not None:
            index.search(ask.queries[:1], k, where=ask.where)  # makes the filter's bitmap, once
        before, results = time.process_time(), []
        for call in [ask.queries] if batch else ask.queries:
            started = time.perf_counter()
            results.append(index.search(call, k, recall=declared, where=ask.where))
            seconds.append(time.perf_counter() - started)
        spent += time.process_time() - before
        count, near = ask.distances.shape
        hits += count * recall_at_k(np.vstack([each.distances for each in results])[:, :near], ask.distances)
        same += count * id_recall(np.vstack([each.ids for each in results])[:, :near], ask.ids)
        left += count * ask.left
        stats += [each.stats for each in results]
    return {
        "declared": declared,
        "recall": (same if by_id else hits) / total,
        "id_recall": same / total,
        "calibrated": all(each["calibrated"] for each in stats),
        "left": left / total,
        **{column: sum(each[name] for each in stats) / total for column, name in _COUNTED.items()},
        "slow_pages": float(np.quantile([each["page_requests"] for each in stats], 0.99)),
        "rounds": sum(each["rounds"] for each in stats) / len(stats),
        "p50_ms": 1e3 * float(np.percentile(seconds, 50)),
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "cpu_ms": 1e3 * spent / total,
    }


def measure_case(sweep: Sweep, name: str, seed: int, folder: Path) -> Iterator[Row]:
    """Build an index of a data set for each share of DRAM and each form, and yield a row for each filter and recall."""
    case = FAMILIES[sweep.family][1](name, sweep.count, sweep.queries, seed)
    if sweep.filters:
        price = np.random.default_rng(0).random(len(case.base))
        near = np.argsort(exact_neighbours(case.base, case.queries[:1], len(case.base), case.metric)[0][0])
        place = near / len(near)
        attributes: dict[str, Any] | None = {"price": price, "label": case.labels, "place": place}
        asks = [*filter_asks(case, sweep.k, price, place)]
    else:
        attributes, asks = None, [("", [Ask.of(case, sweep.k, case.queries)])]
    for share, form in itertools.product(sweep.shares, sweep.forms):
        path, raw = folder / f"{name}-{seed}-{share}-{form}", case.base.nbytes
        cpu = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the rows tell whether the index is calibrated
                ZoomIndex.build(
                    path, case.base, metric=case.metric, dram=int(share * raw) + sweep.room, preview=FORMS[form],
                    seed=seed, attributes=attributes,
                ).close()  # fmt: skip
        except BudgetError as error:
            skip(f"{name}, {form}: {error}")
            continue
        cpu = time.process_time() - cpu
        with ZoomIndex.open(path) as index:
            stats = index.stats()
            held = {"dram_share": index.memory_bytes / raw, "file_share": stats["file_bytes"] / raw}
            held |= {"code_bytes": stats["code_bytes"], "build_cpu_s": cpu}
            where = {"data": name, "seed": seed, "share": share, "form": form, "k": sweep.k}
            for (kind, some), declared in itertools.product(asks, sweep.recalls):
                found = measure(index, some, declared, sweep.k, batch=sweep.batch, by_id=case.by_id)
                yield where | {"filter": kind} | found | held
        shutil.rmtree(path)


def falls(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield for each data set the largest share of pages, or codes, that a higher declared recall saves."""
    for (data,), some in grouped(rows, "data").items():
        largest = 0.0
        for ladder in grouped(some, "seed").values():
            for less, more in itertools.pairwise(sorted(ladder, key=lambda row: float(row["declared"]))):
                largest = max(largest, *(1 - more[name] / less[name] for name in ("requests", "scanned")))
        yield Figure.of(f"cost less for more recall, {data}", largest, "share of pages or codes", "less")


def level_ratios(rows: Sequence[Row], at: str) -> Iterator[Figure]:
    """Yield the pages of each set of factors over those of the same items at length one."""
    places = grouped(rows, "data", "share", "declared")
    for (data, share, declared), (row,) in places.items():
        level = places.get((f"{data}, normalised", share, declared))
        if level is not None:
            ratio = row["requests"] / level[0]["requests"]
            yield Figure.of(f"pages by those of equal norms, {at.format(**row)}", ratio, "ratio", "less")


def record(rows: Sequence[Row], sweep: Sweep) -> Record:
    """Return the figures that the sweep names."""
    measures = [MEASURES[name] for name in sweep.figures if name in MEASURES]
    titled = [Measure(m.column, m.title.format(k=sweep.k), m.unit, m.better, m.clock) for m in measures]
    figures = figures_of(rows, titled, f"{{title}}, {sweep.at}")
    if "falls" in sweep.figures:
        figures += falls(rows)
    if "level" in sweep.figures:
        figures += level_ratios(rows, sweep.at)
    if len(sweep.forms) == 1:
        return Record(figures)
    bars = {"{data}, {form}, {declared}".format(**row): row["pages"] for row in rows}
    return Record(figures, bars=[bars_of("pages a query at a declared recall", "4 KiB reads", bars)])


def _take_defaults(context: click.Context, parameter: click.Parameter, name: str) -> None:
    """Make the options of a workload's file the defaults of this command."""
    known = {load.name: load.parameters["options"] for load in load_workloads() if "options" in load.parameters}
    if name not in known:
        raise click.BadParameter(f"{name!r}: expected one of {', '.join(known)}")
    context.default_map = known[name]


@workload
@click.option("--workload", default="search-declared", show_default=True, is_eager=True, expose_value=False,
              callback=_take_defaults, help="The TOML file that gives the defaults of all other options.")  # fmt: skip
@click.option("--family", type=click.Choice([*FAMILIES]), help="Of data sets.")
@click.option("--data", multiple=True, help="A data set of the family; may be repeated.")
@click.option("--count", "--vectors", "count", type=click.IntRange(0), help="Vectors of a set, at most; 0 for all.")
@click.option("--queries", "--users", "queries", type=click.IntRange(1), help="Queries, at most.")
@click.option("--seeds", type=click.IntRange(1), default=1)
@click.option("-k", "k", type=click.IntRange(1), default=10, help="Neighbours of a query.")
@click.option("--share", "shares", multiple=True, type=float, help="DRAM as a share of the raw vectors.")
@click.option("--room", type=int, default=0, help="Bytes of DRAM beside that share, for buffers.")
@click.option("--recall", "recalls", multiple=True, type=float, help="A declared recall; may be repeated.")
@click.option("--form", "forms", multiple=True, type=click.Choice([*FORMS]), default=("bounds",), help="Of the codes.")
@click.option("--filters/--no-filters", default=False, help="Search with filters; the family has to be labelled.")
@click.option("--batch/--single", default=False, help="All queries in one call, or one at a time.")
@click.option(
    "--figure", "figures", multiple=True, type=click.Choice([*MEASURES, "falls", "level"]), default=("recall",)
)
@click.option("--name", "at", default="{data}, {declared:g} declared", help="The end of the figures' names.")
def main(scratch: Path, **settings: Any) -> Outcome:
    """Run a sweep."""
    sweep, rows = Sweep(**settings), list[Row]()
    levels = ("", ", normalised") if "level" in sweep.figures else ("",)
    for name in (name + level for name in sweep.data for level in levels):
        try:
            for seed in range(sweep.seeds):
                rows += measure_case(sweep, name, seed, scratch)
        except FileNotFoundError as error:
            skip(error)
    if not rows:
        raise click.ClickException("nothing was measured")
    columns = (
        "data",
        "seed",
        "share",
        "form",
        "filter",
        "declared",
        "recall",
        "scanned",
        "ranked",
        "requests",
        "slow_pages",
        "cpu_ms",
    )
    shown = [{column: row[column] for column in columns} for row in rows]
    return Outcome(record(rows, sweep), [rows_table("declared and found", shown)], {"results": rows})


if __name__ == "__main__":
    main()
