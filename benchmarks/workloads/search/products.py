"""Inner products where norms vary: recall declared and found, and reads beside those of the same vectors normalised.

``python -m memhier.benchmarks.workloads.search.products`` prints a table and, with ``--json``, writes it. Items are
indexed, and users ask, who are none of the vectors and for whom nothing was tuned. Made items have log-normal norms;
the factors of real logs are passed over where they are not there.
"""

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.exact import exact_neighbours, id_recall
from memhier.benchmarks.workloads.options import json_option
from memhier.benchmarks.workloads.search.product_data import LOGS, Factors, log_factors, made_factors

__all__ = ["SETS", "Sought", "main", "measure_products", "record"]

K = 10
_ROOM = 1 << 20  # bytes of DRAM for buffers, beside a share of the vectors
_KINDS, _SIGMAS = ("clusters", "spectrum"), (0.0, 0.5, 1.0, 1.5)
SETS = (*(f"{kind}, sigma {sigma:g}" for kind in _KINDS for sigma in _SIGMAS), *LOGS)


@dataclass(frozen=True, slots=True)
class Sought:
    """One index searched with one declared recall.

    Attributes
    ----------
    data, share
        What was indexed, and the DRAM for it, as a share of the raw vectors.
    declared, recall, level_recall
        Recall@10 as declared and as measured, on the vectors as they are and normalised.
    calibrated
        Whether the index says that it knows what the recall takes.
    pages, level_pages
        Pages read for a query, on average, likewise.
    """

    data: str
    share: float
    declared: float
    recall: float
    level_recall: float
    calibrated: bool
    pages: float
    level_pages: float


def make_set(name: str, count: int, users: int) -> Factors:
    """Return one of :data:`SETS`, with at most so many users.

    Raises
    ------
    FileNotFoundError
        For a real log that is not there.
    """
    if name not in LOGS:
        kind, sigma = name.split(", sigma ")
        return made_factors(kind, count, users, float(sigma), 0)
    factors = log_factors(name)
    chosen = np.random.default_rng(0).permutation(len(factors.users))[:users]
    return Factors(factors.items, factors.users[chosen])


def measure_products(
    name: str, factors: Factors, share: float, recalls: Sequence[float], folder: Path
) -> Iterator[Sought]:
    """Build an index of items as they are, and one of them normalised, and yield what each recall gives."""
    varied = _search(factors, share, recalls, folder / "varied")
    level = _search(factors.normalised(), share, recalls, folder / "level")
    for declared, (recall, pages, calibrated), (level_recall, level_pages, _) in zip(
        recalls, varied, level, strict=True
    ):
        yield Sought(name, share, declared, recall, level_recall, calibrated, pages, level_pages)


def _search(factors: Factors, share: float, recalls: Sequence[float], folder: Path) -> list[tuple[float, float, bool]]:
    """Return recall, pages of a query, and whether it was calibrated, of each declared recall."""
    true = exact_neighbours(factors.items, factors.users, K, "ip")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be calibrated is in the figures
        index = ZoomIndex.build(folder, factors.items, metric="ip", dram=int(share * factors.items.nbytes) + _ROOM)
    with index:
        results = [index.search(factors.users, K, recall=declared) for declared in recalls]
    return [
        (id_recall(each.ids, true), each.stats["page_requests"] / len(true), each.stats["calibrated"])
        for each in results
    ]


@click.command(help=__doc__)
@click.option("--data", "names", multiple=True, default=SETS, type=click.Choice(SETS), show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Vectors of each made set.")
@click.option("--users", default=1000, show_default=True, help="Queries, at most.")
@click.option("--share", "shares", multiple=True, default=(0.1, 4.0), show_default=True, help="DRAM, of raw vectors.")
@click.option("--recall", "recalls", multiple=True, default=(0.9, 0.95, 0.99), show_default=True)
@json_option
def main(
    names: tuple[str, ...],
    count: int,
    users: int,
    shares: tuple[float, ...],
    recalls: tuple[float, ...],
    out: Path | None,
) -> None:
    """Compare recall and reads with those of vectors of one norm."""
    results: list[Sought] = []
    for name in names:
        try:
            factors = make_set(name, count, users)
        except FileNotFoundError as error:
            Console(stderr=True).print(f"skipped: {error}")
            continue
        for share in shares:
            with tempfile.TemporaryDirectory() as scratch:
                results += measure_products(name, factors, share, recalls, Path(scratch))
    if not results:
        raise click.ClickException("nothing was measured")
    Console().print(_table(results))
    if out is not None:
        record(results).write(out, results=[asdict(result) for result in results])


def record(results: Sequence[Sought]) -> Record:
    """Return what can be held against another run: recall, and reads by those of the same vectors normalised."""
    figures = []
    for each in results:
        at = f"{each.data}, DRAM {each.share:g} of raw, {each.declared:g} declared"
        figures += [
            Figure.of(f"recall@10, {at}", [each.recall], "share", "neither"),
            Figure.of(f"pages, {at}", [each.pages], "4 KiB reads a query", "less"),
            Figure.of(f"pages by those of equal norms, {at}", [each.pages / each.level_pages], "ratio", "less"),
        ]
    return Record(figures)


def _table(results: Sequence[Sought]) -> Table:
    table = Table(title=f"ZoomIndex, inner product, k = {K}: as they are, and normalised")
    for name in ("data", "DRAM", "declared", "recall", "normalised", "pages", "normalised", "ratio"):
        table.add_column(name, justify="left" if name == "data" else "right")
    for each in results:
        table.add_row(
            each.data if each.calibrated else f"{each.data} (not calibrated)",
            f"{each.share:g}",
            f"{each.declared:g}",
            f"{each.recall:.4f}",
            f"{each.level_recall:.4f}",
            f"{each.pages:.1f}",
            f"{each.level_pages:.1f}",
            f"{each.pages / each.level_pages:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
