"""Short models on real logs, with memhier's tables and with torch's in the same run.

``python -m memhier.benchmarks.workloads.embedding.models.training --log gowalla --model two-tower --dir
/path/on/the/device``. Logs of clicks (``criteo-sample``, ``made-clicks``, and ``criteo`` and ``avazu`` with ``--path``)
train DLRM, DCN V2, Wide & Deep and DeepFM; logs of pairs (``gowalla``, ``ml-1m``, ``made-pairs``, and ``movielens``,
``amazon`` and ``lightgcn`` with ``--path``) two towers and SASRec. ``made-clicks`` has the sizes of Criteo's tables and
the skew of its log.

Every way trains its own copy of the model on the same batches, round after round, one thread, so losses can be
compared: those of another number of bits than torch's are counted. Rows lie on SSD at the start. Throughput is samples
by a second of the process's processor time, all threads and the kernel's part counted; wall time stands beside it.
"""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.embedding.common import RULES, Ints, Sample, TableKind
from memhier.benchmarks.workloads.embedding.models.dcn import DCN
from memhier.benchmarks.workloads.embedding.models.deep_fm import DeepFM
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.benchmarks.workloads.embedding.models.logs import LOGS, Log, LogOptions, open_log
from memhier.benchmarks.workloads.embedding.models.sasrec import SASRec
from memhier.benchmarks.workloads.embedding.models.two_tower import TwoTower
from memhier.benchmarks.workloads.embedding.models.wide_deep import WideDeep
from memhier.benchmarks.workloads.embedding.speed import Memhier, Torch, Way
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, skip, workload
from memhier.policies import Belady

__all__ = ["MODELS", "main", "measure"]

WINDOW = 8

# Models by the kind of log: each of the log, the width of rows and the length of a history.
MODELS: dict[str, tuple[str, Callable[[int, int, int], nn.Module]]] = {
    "dlrm": ("clicks", lambda tables, dim, length: DLRM(tables, dim)),
    "dcn": ("clicks", lambda tables, dim, length: DCN(tables, dim)),
    "wide-deep": ("clicks", lambda tables, dim, length: WideDeep(tables, dim)),
    "deep-fm": ("clicks", lambda tables, dim, length: DeepFM(tables, dim)),
    "two-tower": ("pairs", lambda tables, dim, length: TwoTower(dim)),
    "sasrec": ("histories", lambda tables, dim, length: SASRec(length, dim)),
}


class Trainee:
    """A copy of the model on one kind of tables."""

    def __init__(self, way: Way, net: nn.Module, rate: float) -> None:
        self.way = way
        self._net: Any = copy.deepcopy(net)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=rate)
        self.losses: list[Tensor] = []

    def train(self, some: list[Sample]) -> tuple[float, float]:
        """Train on batches; return the seconds of processor and wall time."""
        os.sync()  # no way pays for the writes of the way before
        started = time.process_time(), time.perf_counter()
        for batch in self.way.batches(some):
            loss = self._net.loss(batch, self.way.look(batch.ids))
            self._optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.way.step()
            self._optimizer.step()
            self.losses.append(loss.detach())
        return time.process_time() - started[0], time.perf_counter() - started[1]


def distinct_rows(log: Log) -> tuple[Ints, int]:
    """Return the distinct rows of all batches, numbered through all tables, and the most of one batch."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    bases = np.cumsum([0, *log.sizes])[:-1]
    each = [np.unique(batch.ids.numpy() + (bases if log.kind != "histories" else 0)) for batch in log.batches]
    return np.unique(np.concatenate(each)), max(map(len, each))


def measure(
    folder: Path, name: str, log: Log, shares: list[float], kind: TableKind, length: int, rounds: int
) -> list[Row]:
    """Return a row for each way and round but the first; shares that hold no batch are left out, in words."""
    needed, most = distinct_rows(log)
    torch.manual_seed(0)
    net = MODELS[name][1](len(log.sizes), kind.dim, length)
    ways: dict[str, Way] = {"torch": Torch(log.sizes, kind)}
    for share in shares:
        slots = int(share * sum(log.sizes))
        if slots < most:
            skip(f"{name} with {share:.0%} of the rows in DRAM: {slots:,} rows, but a batch has {most:,}")
            continue
        policy = Belady(min(slots, len(needed)))
        ways[f"{share:.0%} in DRAM"] = Memhier(folder / f"{share}", log.sizes, needed, policy, WINDOW, kind)
    trainees = {title: Trainee(way, net, kind.rate) for title, way in ways.items()}
    steps = len(log.batches) // (rounds + 1)
    rows: list[Row] = []
    for number in range(rounds + 1):
        some = log.batches[number * steps : (number + 1) * steps]
        spent = {title: trainee.train(some) for title, trainee in trainees.items()}
        if number:
            rows += [
                {
                    "model": name, "way": title, "rate": len(some) * len(some[0].ids) / busy, "rows": most,
                    "speed": spent["torch"][0] / busy, "wall": spent["torch"][1] / wall,
                }
                for title, (busy, wall) in spent.items()
            ]  # fmt: skip
    wanted = torch.stack(trainees["torch"].losses)
    for row in rows:
        row["other"] = float((torch.stack(trainees[row["way"]].losses) != wanted).sum())
        row["loss"] = float(wanted[-steps:].mean())
    for way in ways.values():
        way.close()
    return rows


def figures_by_model(spent: list[Row]) -> Record:
    """Return throughput, its ratios to torch's and losses of other bits."""
    ours = [row for row in spent if row["way"] != "torch"]
    figures = [
        *figures_of(spent, [Measure("rate", "", "samples/s", "more", clock=True)], "{model}, {way}"),
        *figures_of(ours, [
            Measure("speed", "", "times", "more", clock=True, paper="Bagpipe"),
        ], "{model}, {way}: throughput over torch's, processor time"),
        *figures_of(ours, [Measure("wall", "", "times", "more", clock=True)], "{model}, {way}: by the clock"),
        *figures_of(ours, [Measure("other", "", "steps")], "{model}, {way}: losses of other bits than torch's"),
    ]  # fmt: skip
    return Record(figures)


@workload
@click.option("--log", "name", type=click.Choice([*LOGS]), default="criteo-sample", show_default=True)
@click.option("--path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File of a published log.")
@click.option("--model", "models", multiple=True, type=click.Choice([*MODELS]), help="By default all that fit the log.")
@click.option("--share", "shares", multiple=True, type=float, default=(0.05, 1.0), show_default=True)
@click.option("--scale", default=0.1, show_default=True, help="Of the tables, where the log does not give their sizes.")
@click.option("--rows", default=1_000_000, show_default=True, help="Of each table, for such logs but Criteo's.")
@click.option("--dim", default=32, show_default=True)
@click.option("--rule", type=click.Choice([*RULES]), default="sgd", show_default=True)
@click.option("--rate", default=0.05, show_default=True)
@click.option("--length", default=20, show_default=True, help="Items of a history.")
@click.option("--batch", default=256, show_default=True)
@click.option("--steps", default=12, show_default=True, help="In a round.")
@click.option("--rounds", default=5, show_default=True)
def main(
    scratch: Path, name: str, path: Path | None, models: tuple[str, ...], shares: tuple[float, ...], dim: int,
    rule: str, rate: float, steps: int, rounds: int, **sizes: Any,
) -> Outcome:  # fmt: skip
    """Train models on a log, with tables in memory and beyond."""
    options = LogOptions(name, path, count=steps * (rounds + 1), **sizes)
    spent: list[Row] = []
    for sequences in (False, True):
        log: Log | None = None
        for model, (kind, _) in MODELS.items():
            if (models and model not in models) or sequences != (kind == "histories"):
                continue
            if log is None:
                log = open_log(options, sequences)
            if log.kind == kind:
                tables = TableKind(dim, rule, rate, sequences, same_start=True)
                (scratch / model).mkdir()
                spent += measure(scratch / model, model, log, [*shares], tables, options.length, rounds)
    if not spent:
        raise click.UsageError(f"no model of {models or [*MODELS]} fits the log {name!r}")
    return Outcome(figures_by_model(spent), details={"spent": spent})


if __name__ == "__main__":
    main()
