"""Tables ten times as large as their DRAM budget, with the many ids a sample of MLPerf's DLRM-DCNv2: time and memory.

``python -m memhier.benchmarks.workloads.embedding.scale --dir /path/on/the/device``: the 26 tables of MLPerf's size
(204 million rows) at a tenth of it, rows of 128 floats with Adagrad's state, 214 ids a sample in bags of MLPerf's
lengths; the dense part is MLPerf's as well. A share of the rows is written first, so the budget is used up and rows
have to be read; then the training looks ahead. Every second stretch of `--every` steps begins with a checkpoint beside
it, and ends when the checkpoint is durable. Memory is the private memory of the process (RssAnon) beyond the most that
it held while the dense part was trained alone on the same batches; batches in waiting count.

Memory that glibc's malloc keeps free is a figure of its own. Each step frees the gradients of the dense part, up to 14
MB each whatever the budget, and allocates them again between longer-lived blocks, so holes come and go. They do so
without tables too, as one figure shows. Beside a small budget they are large.
"""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import Stretch, Stretches, checkpoint_costs, power_law, table_configs
from memhier.benchmarks.workloads.embedding.models.dcn import DCN
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.budget import format_bytes, parse_bytes
from memhier.recsys import Adagrad, EmbeddingBagCollection, lookahead

__all__ = ["main"]

DIM = 128
ROW_BYTES = 2 * 4 * DIM
# Rows of the tables of MLPerf's benchmark of DLRM-DCNv2.
MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
# Ids in a bag of each table, as MLPerf's benchmark of DLRM-DCNv2 has them: 214 in all.
LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
ALONE_STEPS = 30
FILL_ROWS = 2**12

CROSS_LAYERS, CROSS_RANK = 3, 512

Batch = tuple[dict[str, Tensor], Tensor, Tensor]


def batches(sizes: list[int], batch: int, count: int) -> Iterator[Batch]:
    """Yield ids by table, numbers and labels."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        ids = {
            f"t{table}": torch.from_numpy(power_law(rng.random((batch, length)), rows, 1.05))
            for table, (rows, length) in enumerate(zip(sizes, LENGTHS, strict=True))
        }
        dense = rng.standard_normal((batch, 13), dtype=np.float32)
        yield ids, torch.from_numpy(dense), torch.from_numpy((rng.random(batch) < 0.25).astype(np.float32))


class _Mallinfo(ctypes.Structure):
    # Of glibc's malloc.h: ten numbers, of which the last but one is the free memory.
    _fields_ = (("others", 8 * ctypes.c_size_t), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t))


# Of glibc 2.33 and later; elsewhere free memory counts as used.
_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


class Peaks:
    """The peaks of private memory, of the part that malloc keeps free, and of the rest."""

    def __init__(self) -> None:
        self.private = self.free = self.used = 0

    def note(self) -> None:
        """Take the memory of this moment into account."""
        with open("/proc/self/status") as lines:
            private = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
        free = 0 if _mallinfo is None else int(_mallinfo().free)
        self.private, self.free = max(self.private, private), max(self.free, free)
        self.used = max(self.used, private - free)


def measure(folder: Path, dram: str, scale: float, batch: int, steps: int, fill: float, every: int) -> dict[str, Any]:
    """Return seconds of steps and checkpoints, memory, and the tables' counts."""
    budget = parse_bytes(dram)
    sizes = [rows if rows <= 1000 else max(1000, int(rows * scale)) for rows in MLPERF_ROWS]
    torch.manual_seed(0)
    net = DCN(len(sizes), DIM, bottom=(512, 256), top=(1024, 1024, 512, 256), layers=CROSS_LAYERS, rank=CROSS_RANK)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
    alone, peaks = Peaks(), Peaks()
    for _, dense, labels in batches(sizes, batch, ALONE_STEPS):
        _step(net, optimizer, torch.zeros(batch, len(sizes) * DIM, requires_grad=True), dense, labels)
        alone.note()
    configs = table_configs(sizes, DIM)
    found: dict[str, Any] = {
        "rows": sum(sizes),
        "table_bytes": sum(sizes) * ROW_BYTES,
        "budget": budget,
        "every": every,
    }
    with EmbeddingBagCollection(configs, optimizer=Adagrad(lr=0.01), dram=dram, path=folder / "t") as tables:
        started = time.perf_counter()
        for table, rows in enumerate(sizes):
            some = int(fill * rows)
            for start in range(0, some, FILL_ROWS):
                ids = np.arange(start, min(start + FILL_ROWS, some))
                tables.tables.write(table, ids, tables.initial_weights(ids, table).numpy())
        tables.checkpoint()
        found["fill_s"] = time.perf_counter() - started
        filled = tables.stats()
        peaks.note()
        spent, calls = list[float](), list[float]()

        def save() -> Any:
            called = time.perf_counter()
            saving = tables.start_checkpoint()
            calls.append(time.perf_counter() - called)
            return saving

        stretches = Stretches({"beside": save})
        started = time.perf_counter()
        for number, (ids, dense, labels) in enumerate(
            lookahead(batches(sizes, batch, steps), tables, ids=lambda batch: batch[0]), 1
        ):
            _step(net, optimizer, tables(ids).values(), dense, labels)
            spent.append(time.perf_counter() - started)
            if number % every == 0:
                stretches.next()
            peaks.note()
            started = time.perf_counter()
        found |= {"every": every, "steps_s": spent, "calls_s": calls, "used_bytes": peaks.used - alone.used}
        found |= {"private_bytes": peaks.private - alone.private, "free_bytes": peaks.free, "free_alone": alone.free}
        found["stretches"] = [each._asdict() for each in stretches.done]
        found |= {"memory_bytes": tables.memory_bytes, "filled": filled, "stats": tables.stats()}
    return found


def _step(net: DCN, optimizer: torch.optim.Optimizer, pooled: Tensor, dense: Tensor, labels: Tensor) -> None:
    loss = nn.functional.binary_cross_entropy_with_logits(net(dense, pooled), labels)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def record(found: dict[str, Any]) -> Record:
    """Return time and memory."""
    steps, calls = found["steps_s"], found["calls_s"]
    budget = found["budget"]
    reads = (found["stats"]["refetches"] - found["filled"]["refetches"]) / len(steps)
    figures = [
        Figure.of("table over budget", found["table_bytes"] / budget, "times", "neither"),
        Figure.of("private memory over budget", found["used_bytes"] / budget, "times", "less"),
        Figure.of("private memory, what malloc keeps free included", found["private_bytes"] / budget, "times", "less"),
        Figure.of("what malloc keeps free, at most", found["free_bytes"] / budget, "times", "neither"),
        Figure.of("the same, dense part alone", found["free_alone"] / budget, "times", "neither"),
        Figure.of("step", [1e3 * each for each in steps[len(steps) // 4 :]], "ms", "less", clock=True),
        Figure.of("rows read per step", reads, "rows", "less"),
    ]
    clock, busy = checkpoint_costs([Stretch(**each) for each in found["stretches"]], "beside")
    if clock:
        name = f"checkpoints every {found['every']} steps"
        figures.append(Figure.of(name, clock, "share of step time", "less", clock=True))
        figures.append(Figure.of(f"{name}, processor time", busy, "share of the process's", "less"))
        figures.append(Figure.of(f"{name}, the call", calls, "s", "less", clock=True))
    return Record(figures, scale=f"{format_bytes(found['table_bytes'])} of rows, two cores and one SSD")


@workload
@click.option("--dram", default="2GB", show_default=True)
@click.option("--scale", default=0.1, show_default=True, help="Of MLPerf's large tables.")
@click.option("--batch", default=512, show_default=True)
@click.option("--steps", default=400, show_default=True)
@click.option("--every", default=50, show_default=True, help="Steps of a stretch.")
@click.option("--fill", default=0.15, show_default=True, help="Share of the rows to write before training.")
def main(scratch: Path, dram: str, scale: float, batch: int, steps: int, fill: float, every: int) -> Outcome:
    """Train tables larger than their budget, and measure time and memory."""
    found = measure(scratch, dram, scale, batch, steps, fill, every)
    return Outcome(record(found), details=found)


if __name__ == "__main__":
    main()
