"""What ranks exchange of a step's gradients, and what a class of rows with a single owner would spare them.

``python -m memhier.benchmarks.workloads.embedding.ranks``: ids with Criteo's table sizes and skew, each batch divided
among ranks. A gradient travels from the rank whose sample it is of to the rank that owns its row, one for each id. It
is waited for where some rank asks for the row in the next step; else it travels beside that step. Bagpipe
(arXiv 2202.12429) has a third class, of rows that only one rank asks for as far as it looks ahead: that rank would keep
them to itself. Counted are the gradients that travel, all of them and those of such rows. Counts, not times.
"""

from collections import deque
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import Ints, samples, table_sizes
from memhier.benchmarks.workloads.options import json_option

__all__ = ["main", "measure"]

Flags = NDArray[np.bool_]


class Asked(NamedTuple):
    """A step's distinct rows, rising; which rank asks for each, -1 for several; and every id's row and rank."""

    rows: Ints
    only: Ints
    row_of_id: Ints
    rank_of_id: Ints


def ask(ids: Ints, ranks: int) -> Asked:
    """Return who asks for what of a batch, int64 [samples, tables], of which each rank has as many samples."""
    rank_of_id = np.repeat(np.arange(len(ids)) * ranks // len(ids), ids.shape[1])
    rows, row_of_id = np.unique(ids.reshape(-1), return_inverse=True)
    least, most = np.full(len(rows), ranks), np.full(len(rows), -1)
    np.minimum.at(least, row_of_id, rank_of_id)
    np.maximum.at(most, row_of_id, rank_of_id)
    return Asked(rows, np.where(least == most, least, -1), row_of_id, rank_of_id)


def single_owner(step: Asked, following: list[Asked]) -> Flags:
    """Return which of a step's rows one rank alone asks for, now and in the steps that follow."""
    alone = step.only >= 0
    for later in following:
        places = np.minimum(np.searchsorted(later.rows, step.rows), len(later.rows) - 1)
        again = later.rows[places] == step.rows
        alone &= ~again | (later.only[places] == step.only)
    return alone


def measure(scale: float, batch: int, steps: int, ranks: int, window: int) -> dict[str, float]:
    """Return shares of all gradients that travel: those waited for, those of single owners, those that are both."""
    sizes = table_sizes(scale)
    bases = np.cumsum([0, *sizes])[:-1]
    known: deque[Asked] = deque()
    counts = dict.fromkeys(("travel", "waited for", "single owner", "both"), 0)
    for sample in samples(sizes, batch, steps + window, 0):
        known.append(ask(sample.ids.numpy() + bases, ranks))
        if len(known) <= window:
            continue
        step, *following = known
        known.popleft()
        travels = step.rows[step.row_of_id] % ranks != step.rank_of_id
        waited = np.isin(step.rows, following[0].rows)[step.row_of_id] & travels
        single = single_owner(step, following)[step.row_of_id] & travels
        for name, which in zip(counts, (travels, waited, single, waited & single), strict=True):
            counts[name] += int(np.count_nonzero(which))
    return {name: count / counts["travel"] for name, count in counts.items() if name != "travel"}


@click.command()
@click.option("--scale", default=1.0, show_default=True, help="Of the large tables.")
@click.option("--batch", default=16384, show_default=True, help="Samples of a step, of all ranks together.")
@click.option("--steps", default=20, show_default=True)
@click.option("--ranks", default=4, show_default=True)
@click.option("--window", default=8, show_default=True, help="Steps known ahead.")
@json_option
def main(scale: float, batch: int, steps: int, ranks: int, window: int, out: Path | None) -> None:
    """Count the gradients that ranks exchange."""
    found = measure(scale, batch, steps, ranks, window)
    where = f"{ranks} ranks, {window} steps ahead"
    figures = [
        Figure.of(f"gradients that travel, {name}, {where}", share, "share", "neither", exact=True)
        for name, share in found.items()
    ]
    for figure in figures:
        Console(width=120).print(f"{figure.name:70} {figure.value:.4f}", highlight=False)
    if out is not None:
        Record(figures).write(out)


if __name__ == "__main__":
    main()
