"""The time of a step of DLRM as its tables grow, at a fixed batch and a fixed number of rows in DRAM.

``python -m memhier.benchmarks.workloads.embedding.models.growth --dir /path/on/the/device``: 26 tables in the
proportions of Criteo's, from a million rows to a billion, which are sparse on disk. Ids follow a power law with the
exponent that each table's column has in the sample of Criteo's log. Rows that the batches need lie on SSD at the start.
Larger tables have a longer tail, so a batch has more distinct rows; their number and the number of those that were read
stand beside the processor time of a step. With ``--spread`` the batch is fixed: ids are drawn as of the least tables
and spread over the larger ones, so batches have as many distinct rows at all sizes. Sizes take turns, round by round.
"""

import os
import time
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.embedding.common import CRITEO_ROWS, Sample, TableKind, samples
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.benchmarks.workloads.embedding.models.logs import Log, criteo_exponents
from memhier.benchmarks.workloads.embedding.models.training import distinct_rows
from memhier.benchmarks.workloads.embedding.speed import DIM, Memhier
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, workload
from memhier.policies import Belady

__all__ = ["main"]


def sizes_of(total: int) -> list[int]:
    """Return tables in the proportions of Criteo's, of so many rows in all."""
    scale = total / sum(CRITEO_ROWS)
    return [max(4, int(rows * scale)) for rows in CRITEO_ROWS]


class Grown:
    """Tables of one size, with their batches, taken round after round."""

    def __init__(self, folder: Path, total: int, drawn: int, slots: int, batch: int, steps: int, rounds: int) -> None:
        self.total = total
        self._steps = steps
        sizes, small = sizes_of(total), sizes_of(drawn)
        self._batches = [*samples(small, batch, steps * (rounds + 1), 0, criteo_exponents())]
        for each in self._batches:
            each.ids.mul_(torch.tensor(sizes) // torch.tensor(small))
        needed, _ = distinct_rows(Log("clicks", sizes, self._batches))
        kind = TableKind(touched=min(sum(sizes), len(needed)))
        self._way = Memhier(folder, sizes, needed, Belady(min(slots, len(needed))), 8, kind)
        torch.manual_seed(0)
        self._net = DLRM(len(sizes), DIM)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01)

    def run(self, number: int) -> Row:
        """Train on the batches of a round; return figures of a step."""
        some = self._batches[number * self._steps : (number + 1) * self._steps]
        os.sync()
        before, started = self._way.tables.stats(), time.process_time()
        for batch in self._way.batches(some):
            self._step(batch)
        spent, after = time.process_time() - started, self._way.tables.stats()
        return {
            "rows": f"{self.total:.0e}".replace("e+0", "e"), "ms": 1e3 * spent / len(some),
            "distinct": (after["accesses"] - before["accesses"]) / len(some),
            "read": (after["refetches"] - before["refetches"]) / len(some),
            "dram": self._way.tables.memory_bytes / 2**20,
        }  # fmt: skip

    def close(self) -> None:
        """Free the tables."""
        self._way.close()

    def _step(self, batch: Sample) -> None:
        logits = self._net(batch.dense, self._way.look(batch.ids))
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, batch.labels))
        self._way.step()
        self._optimizer.step()


@workload
@click.option("--rows", "totals", multiple=True, type=int, default=(10**6, 10**7, 10**8, 10**9), show_default=True)
@click.option("--slots", default=100_000, show_default=True, help="Rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--steps", default=8, show_default=True, help="In a round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--spread", is_flag=True, help="Spread the ids of the least tables over the others.")
def main(scratch: Path, totals: tuple[int, ...], slots: int, spread: bool, **stretch: int) -> Outcome:
    """Measure a step at each size of the tables."""
    least = min(totals)
    grown = [Grown(scratch / f"{total}", total, least if spread else total, slots, **stretch) for total in totals]
    spent: list[Row] = []
    for number in range(stretch["rounds"] + 1):
        found = [each.run(number) for each in grown]
        if number:
            spent += [row | {"times": row["ms"] / found[0]["ms"]} for row in found]
    for each in grown:
        each.close()
    measures = [
        Measure("ms", "step, processor time", "ms", clock=True),
        Measure("times", "step over that of the least", "times", clock=True),
        Measure("distinct", "distinct rows of a batch", "rows", "neither"),
        Measure("read", "rows read a step", "rows", "neither"),
        Measure("dram", "counted memory of the tables", "MiB"),
    ]
    figures = figures_of(spent, measures, "{title}, {rows} rows")
    skew = np.median(criteo_exponents())
    scale = f"rows of {DIM} floats, batches of {stretch['batch']}, {slots:,} rows in DRAM, median exponent {skew:.2f}"
    return Outcome(Record(figures, scale=scale), details={"spent": spent})


if __name__ == "__main__":
    main()
