"""The planner on real training data: what look-ahead saves, and what planning costs.

``python -m memhier.benchmarks.workloads.tiers.planner`` prints the tables and, with ``--json``, writes them.
"""

import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.figures import Curves, Figure, Record, Series
from memhier.benchmarks.datasets import data_folder
from memhier.planning.plan import plan
from memhier.planning.simulation import SIMULATED_POLICIES, simulate

__all__ = ["fixed_capacity", "main", "share_to_load"]

Keys = npt.NDArray[np.int64]

BATCH = 512
WINDOWS = (2, 10, 50)
CAPACITIES = (10_000, 20_000, 50_000, 100_000)
ROW_BYTES = 256
ROUNDS = 3


def read_batches(folder: Path) -> list[Keys]:
    """Return the ids of consecutive batches of the Criteo sample, in log order."""
    with np.load(folder / "criteo_dac80k_hashed.npz") as file:
        ids, offset = file["id20"].astype(np.int64), file["offset"]
    last = len(offset) - 1
    return [ids[offset[row] : offset[min(row + BATCH, last)]] for row in range(0, last, BATCH)]


def share_to_load(batches: list[Keys], lookahead: int) -> dict[str, Any]:
    """Keep what the window needs and nothing else, and count loads; beside them, the same counted with plain sets."""
    rows = len(np.unique(np.concatenate(batches)))
    took = []
    for _ in range(ROUNDS):
        started = time.process_time()
        steps = list(plan(batches, rows, lookahead=lookahead, beyond="drop"))
        took.append((time.process_time() - started) / len(batches) * 1e3)
    needed = sum(len(step.needed) for step in steps)
    last: dict[int, int] = {}
    counted = 0
    for index, batch in enumerate(batches):
        keys = set(batch.tolist())
        counted += sum(index - last.get(key, -(10**9)) > lookahead for key in keys)
        last.update(dict.fromkeys(keys, index))
    return {
        "lookahead": lookahead,
        "needed": needed,
        "loads": sum(len(step.load) for step in steps),
        "counted": counted,
        "share": counted / needed,
        "ms_per_batch": float(np.median(took)),
        "ms_per_batch_rounds": took,
    }


def fixed_capacity(batches: list[Keys], capacity: int) -> dict[str, Any]:
    """Return rows loaded at one capacity: by Belady with several windows, and by policies that do not look ahead."""
    row: dict[str, Any] = {"capacity": capacity}
    for lookahead in (0, *WINDOWS, None):
        loads = sum(len(step.load) for step in plan(batches, capacity, lookahead=lookahead))
        row["belady, whole epoch" if lookahead is None else f"belady, {lookahead} ahead"] = loads
    for policy in SIMULATED_POLICIES[1:]:
        row[policy] = simulate(batches, dram=capacity * ROW_BYTES, row_bytes=ROW_BYTES, policy=policy).reads
    return row


def record(shares: list[dict[str, Any]], loads: list[dict[str, Any]]) -> Record:
    """Return shares, planning time and rows loaded as figures, and rows loaded against DRAM as curves."""
    figures = []
    for row in shares:
        ahead = f"{row['lookahead']} batches ahead"
        figures.append(Figure.of(f"rows loaded, {ahead}", row["share"], "of the rows needed", "less", exact=True))
        figures.append(
            Figure.of(f"planning a batch, {ahead}", row["ms_per_batch_rounds"], "ms of processor time", "less")
        )
    names = list(loads[0])[1:]
    for row in loads:
        held = f"{row['capacity']:,} rows in DRAM"
        figures += [Figure.of(f"{name}, {held}", row[name], "rows loaded", "less", exact=True) for name in names]
    lines = [Series(name, [(row["capacity"], row[name]) for row in loads]) for name in names]
    return Record(figures, [Curves("One epoch of the Criteo sample", "rows in DRAM", "rows loaded", lines, log_x=True)])


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures there.")
def main(json_path: str | None) -> None:
    """Plan the Criteo sample ``criteo-dac80k`` in batches of 512."""
    folder = data_folder() / "criteo-dac80k"
    if not folder.is_dir():
        raise click.ClickException(f"no data set at {folder}: put it there, or set MEMHIER_DATA")
    batches = read_batches(folder)
    ids = np.concatenate(batches)
    console = Console()
    console.print(f"{len(batches)} batches of {BATCH} rows, {len(ids):,} ids, {len(np.unique(ids)):,} distinct")
    shares = [share_to_load(batches, lookahead) for lookahead in WINDOWS]
    table = Table("look-ahead", "distinct ids needed", "loaded", "counted with sets", "share", "planning, ms a batch")
    for row in shares:
        table.add_row(
            str(row["lookahead"]), f"{row['needed']:,}", f"{row['loads']:,}", f"{row['counted']:,}",
            f"{row['share']:.3f}", f"{row['ms_per_batch']:.2f}",
        )  # fmt: skip
        if row["loads"] != row["counted"]:
            raise AssertionError("the planner's loads differ from the count with sets")
    console.print(table)
    loads = [fixed_capacity(batches, capacity) for capacity in CAPACITIES]
    table = Table("rows in DRAM", *(f"{row['capacity']:,}" for row in loads))
    for name in list(loads[0])[1:]:
        table.add_row(name, *(f"{row[name]:,}" for row in loads))
    console.print("Rows loaded at a fixed capacity")
    console.print(table)
    if json_path is not None:
        record(shares, loads).write(Path(json_path), shares=shares, loads=loads)


if __name__ == "__main__":
    main()
