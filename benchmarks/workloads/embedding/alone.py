"""A table alone next to torch's: histories of ids, one linear layer on top, processor and wall time of a step.

``python -m memhier.benchmarks.workloads.embedding.alone --dir /path/on/the/device``: batches of 1,024 histories of 10
ids over a million rows of 32 floats, one thread, one linear layer. Nothing hides the costs of the table here.
``--ids FILE`` takes the ids of a log in its order in place of Zipf's law; ``--sweep`` varies batch, width and skew one
at a time. The ways take turns over the same batches, round after round; a ratio is that of two ways in one round. Every
row that is needed was written before, so a step reads rows and makes none. Processor time is that of the whole
process, with the threads that read and write. ``as many reads as ... and nothing else`` is the floor on this device: as
many single pages as the steps with lookahead have read, through the same reader, from a file as large as the rows.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import power_law
from memhier.benchmarks.workloads.harness import Outcome, Row, rows_table, workload
from memhier.io.random_file import random_file
from memhier.io.reader import PAGE_BYTES, Reader
from memhier.policies import Belady
from memhier.recsys import SGD, Adagrad, Embedding, EmbeddingBag, lookahead

__all__ = ["main"]

Ints = NDArray[np.int64]

RATE = 0.01
_ROUND_NAMES = ("cpu_ms", "wall_ms")
_WRITTEN = 8192  # rows at a time
_FILE_UNIT = 2**20
_RULES: dict[str, tuple[Any, Any]] = {
    "SGD": (SGD(lr=RATE), torch.optim.SGD),
    "Adagrad": (Adagrad(lr=RATE), torch.optim.Adagrad),
}


@dataclass(frozen=True)
class Case:
    """Histories [batch, length] of ids of a table [rows, dim]; `exponent` of Zipf's law, 0 for ids from a file."""

    rows: int
    dim: int
    batch: int
    length: int
    exponent: float

    @property
    def name(self) -> str:
        """The case in words."""
        law = f"exponent {self.exponent:g}" if self.exponent else "from a file"
        return f"{self.batch} x {self.length} ids of {self.rows:,} rows of {self.dim}, {law}"


@dataclass(frozen=True)
class Setting:
    """The share of the rows that DRAM holds, and whether batches are known ahead."""

    share: float
    ahead: bool

    @property
    def name(self) -> str:
        """The setting in words."""
        held = "all rows in DRAM" if self.share == 1 else f"{self.share:.0%} of the rows in DRAM"
        return f"{held}, {'lookahead' if self.ahead else 'no lookahead'}"


class Model:
    """A table, torch's or ours, and a linear layer on the mean of each history."""

    def __init__(self, table: nn.Module, step: Callable[[], None], close: Callable[[], None], ahead: bool) -> None:
        self.table: nn.Module = table
        self.close = close
        self._step = step
        self._ahead = ahead
        self._top = nn.Linear(table.embedding_dim, 1)  # type: ignore[arg-type]
        self._top_step = torch.optim.SGD(self._top.parameters(), lr=RATE)
        self._pools = isinstance(table, nn.EmbeddingBag | EmbeddingBag)

    def train(self, batches: Sequence[Tensor]) -> Row:
        """Train on batches; return milliseconds of a step."""
        some: Iterator[Tensor] = iter(batches)
        started = _now()
        if self._ahead:
            some = iter(lookahead(batches, self.table, ids=lambda batch: batch))
        for batch in some:
            rows = self.table(batch)
            logits = self._top(rows if self._pools else rows.sum(1))[:, 0]
            torch.autograd.backward(nn.functional.softplus(logits).mean())
            self._step()
            self._top_step.step()
            self._top_step.zero_grad()
        return _spent(started, len(batches))

    @property
    def reads(self) -> int:
        """The reads of the device so far."""
        return int(self.table.stats()["reads"]) if isinstance(self.table, EmbeddingBag | Embedding) else 0


def read_pages(file: Path, row_bytes: int, counts: Sequence[int]) -> Row:
    """Read so many pages of a file in each step, a row of each, and nothing else; return milliseconds of a step."""
    rng = np.random.default_rng(0)
    with Reader() as reader:
        handle, pages = reader.add(file), file.stat().st_size // PAGE_BYTES
        places = [PAGE_BYTES * rng.permutation(pages)[:count] for count in counts]
        out = np.empty((max(counts), row_bytes), np.uint8)
        reader.read(handle, places[0], row_bytes, out[: len(places[0])])
        started = _now()
        for some in places:
            reader.read(handle, some, row_bytes, out[: len(some)])
        return _spent(started, len(counts))


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _spent(started: tuple[float, float], steps: int) -> Row:
    """Return milliseconds of a step since then."""
    both = zip(_ROUND_NAMES, started, _now(), strict=True)
    return {name: 1e3 * (end - begin) / steps for name, begin, end in both}


def torch_model(case: Case, pools: bool, rule: str) -> Model:
    """Return torch's table."""
    weights = torch.zeros(case.rows, case.dim)
    table = (
        nn.EmbeddingBag(case.rows, case.dim, mode="sum", sparse=True, _weight=weights)
        if pools
        else nn.Embedding(case.rows, case.dim, sparse=True, _weight=weights)
    )
    optimizer = _RULES[rule][1](table.parameters(), lr=RATE)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Model(table, step, _nothing, False)


def our_model(folder: Path, case: Case, pools: bool, rule: str, setting: Setting, needed: Ints) -> Model:
    """Return our table, its rows written."""
    options: dict[str, Any] = {"optimizer": _RULES[rule][0], "dram": "4GiB", "path": folder}
    if setting.share < 1:
        options["policy"] = Belady(max(1, int(setting.share * case.rows)))
    table = (
        EmbeddingBag(case.rows, case.dim, mode="sum", **options) if pools else Embedding(case.rows, case.dim, **options)
    )
    for start in range(0, len(needed), _WRITTEN):
        some = needed[start : start + _WRITTEN]
        table.tables.write(0, some, table.initial_weights(some).numpy())
    table.checkpoint()

    def close() -> None:
        table.close()
        shutil.rmtree(folder)

    return Model(table, _nothing, close, setting.ahead)


def _nothing() -> None:
    """Do no more."""


def histories(case: Case, count: int, ids: Ints | None) -> list[Tensor]:
    """Return batches, int64 [batch, length], by Zipf's law or from a log in its order, which begins anew at its end."""
    size = case.batch * case.length
    rng = np.random.default_rng(0)
    if ids is None:
        flat = [power_law(rng.random(size), case.rows, case.exponent) for _ in range(count)]
    else:
        flat = [np.take(ids, np.arange(start * size, (start + 1) * size), mode="wrap") for start in range(count)]
    return [torch.from_numpy(one.reshape(case.batch, case.length)) for one in flat]


def measure(
    scratch: Path,
    case: Case,
    pools: bool,
    rule: str,
    settings: list[Setting],
    steps: int,
    rounds: int,
    ids: Ints | None,
) -> list[Row]:
    """Return a row for each way and each round but the first."""
    stream = histories(case, steps * (rounds + 1), ids)
    needed = np.unique(np.concatenate([batch.numpy().reshape(-1) for batch in stream]))
    models = {"torch": torch_model(case, pools, rule)} | {
        setting.name: our_model(scratch / str(number), case, pools, rule, setting, needed)
        for number, setting in enumerate(settings)
    }
    module = "EmbeddingBag" if pools else "Embedding"
    found: list[Row] = []
    row_bytes = 4 * case.dim
    read_most = [setting for setting in settings if setting.share < 1 and setting.ahead]
    size = -(-len(needed) * row_bytes // _FILE_UNIT) * _FILE_UNIT
    with random_file(scratch, size, 0) if read_most else nullcontext() as file:
        for number in range(rounds + 1):
            spent, reads = {}, {}
            for name, model in [*models.items()][:: 1 if number % 2 else -1]:  # none is always the first
                os.sync()  # no way pays for the writes of the way before
                before = model.reads
                spent[name] = model.train(stream[number * steps : (number + 1) * steps])
                reads[name] = model.reads - before
            for setting in read_most:
                assert file is not None
                each = [max(1, reads[setting.name] // steps)] * steps
                spent[f"as many reads as {setting.name}, and nothing else"] = read_pages(file, row_bytes, each)
            if number:
                found += [
                    {"case": case.name, "module": module, "rule": rule, "way": name, **row,
                     "times": row["cpu_ms"] / spent["torch"]["cpu_ms"]}
                    for name, row in spent.items()
                ]  # fmt: skip
    for model in models.values():
        model.close()
    return found


def medians(rows: list[Row]) -> list[Row]:
    """Return the median over rounds of each way."""
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        together.setdefault((row["case"], row["module"], row["rule"], row["way"]), []).append(row)
    return [
        dict(zip(("case", "module", "rule", "way"), names, strict=True))
        | {column: float(np.median([row[column] for row in some])) for column in (*_ROUND_NAMES, "times")}
        for names, some in together.items()
    ]


def figures(rows: list[Row]) -> list[Figure]:
    """Return the processor time of each way over torch's, and the wall time with lookahead over that without."""
    ratios: dict[str, list[float]] = {}
    walls: dict[str, list[float]] = {}
    for row in rows:
        name = f"{row['module']}, {row['rule']}, {row['case']}: {row['way']}"
        if row["way"] != "torch":
            ratios.setdefault(f"{name}, processor time over torch's", []).append(row["times"])
        walls.setdefault(name, []).append(row["wall_ms"])
    found = [Figure.of(name, each, "times", "less", clock=True) for name, each in ratios.items()]
    for name, each in walls.items():
        without = walls.get(name.replace(", lookahead", ", no lookahead"))
        if ", lookahead" in name and without is not None:
            both = [mine / other for mine, other in zip(each, without, strict=True)]
            found.append(Figure.of(f"{name}, wall time over that without", both, "times", "less", clock=True))
    return found


def cases_of(base: Case, sweep: bool) -> list[Case]:
    """Return the cases to measure: one, or with each of batch, width and skew varied alone."""
    if not sweep:
        return [base]
    varied: list[dict[str, Any]] = [{"batch": 256}, {"batch": 4096}, {"dim": 8}, {"dim": 64}]
    varied += [{"exponent": 0.8}, {"exponent": 1.3}] if base.exponent else []
    return [base, *(replace(base, **each) for each in varied)]


@workload
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--dim", default=32, show_default=True)
@click.option("--batch", default=1024, show_default=True, help="Histories.")
@click.option("--length", default=10, show_default=True, help="Ids of a history.")
@click.option("--exponent", default=1.05, show_default=True, help="Of Zipf's law.")
@click.option("--ids", "log", type=click.Path(exists=True, path_type=Path), help="int64 [n], .npy: ids of a log.")
@click.option("--share", default=0.05, show_default=True, help="Of the rows in DRAM.")
@click.option("--rule", "rules", multiple=True, type=click.Choice([*_RULES]), help="Measure these alone.")
@click.option("--module", "modules", multiple=True, type=click.Choice(["EmbeddingBag", "Embedding"]))
@click.option("--sweep", is_flag=True, help="Vary batch, width and skew, too.")
@click.option("--steps", default=20, show_default=True, help="In a round.")
@click.option("--rounds", default=5, show_default=True)
def main(
    scratch: Path, log: Path | None, share: float, rules: tuple[str, ...], modules: tuple[str, ...], sweep: bool,
    steps: int, rounds: int, **sizes: Any,
) -> Outcome:  # fmt: skip
    """Measure a table alone next to torch's."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    ids = None if log is None else np.load(log).astype(np.int64)
    base = Case(**sizes)
    if ids is not None:
        base = replace(base, rows=int(ids.max()) + 1, exponent=0.0)
    settings = [Setting(part, ahead) for part in (1.0, share) for ahead in (False, True)]
    spent: list[Row] = []
    for case in cases_of(base, sweep):
        for module in modules or ("EmbeddingBag", "Embedding"):
            for rule in rules or tuple(_RULES):
                spent += measure(scratch, case, module == "EmbeddingBag", rule, settings, steps, rounds, ids)
    shown = rows_table("Medians of rounds", medians(spent))
    return Outcome(Record(figures(spent), scale=f"{base.name}, one thread"), [shown], {"spent": spent})


if __name__ == "__main__":
    main()
