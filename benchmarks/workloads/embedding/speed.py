"""The time of a step of a DLRM with its tables in DRAM, beyond it, and in other stores of rows by number.

``python -m memhier.benchmarks.workloads.embedding.speed --dir /path/on/the/device``: 26 tables with Criteo's sizes and
skew, rows of 32 floats, SGD. The ways take turns over the same batches, round after round, so a neighbour on the
machine disturbs all of them. Every row that is needed lies on SSD at the start, of memhier and of its peers, so a step
measures reads and not first values. A step's time is wall time; beside it stands the processor time of the thread that
trains, which neighbours disturb less.

FBGEMM and rocksdict take part if Python finds them; the program lists those that are missing. Peers that map a file
lose their pages after every step, as the page cache would otherwise hold the whole table: a budget of 1 % keeps fewer
rows than one step needs.
"""

import importlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import torch
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Paper, Record
from memhier.benchmarks.workloads.embedding.common import (
    RULES,
    Ints,
    Sample,
    TableKind,
    stream_of,
    table_configs,
    table_sizes,
)
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.benchmarks.workloads.harness import Outcome, bars_of, workload
from memhier.policies import LFU, LRU, Belady, Policy
from memhier.recsys import Embedding, EmbeddingBagCollection, initial_weights, lookahead

__all__ = ["main"]

DIM, RATE = 32, 0.01
KIND = TableKind(DIM, rate=RATE)
_BLOCK = 2**16  # rows whose first values are made at a time


class Way:
    """A place for rows."""

    def batches(self, some: list[Sample]) -> Iterator[Sample]:
        """Return the batches of a round, known ahead if that is of use."""
        return iter(some)

    def look(self, ids: Tensor) -> Tensor:
        """Return the rows of a batch side by side, [n, tables * dim], as part of autograd's graph."""
        raise NotImplementedError

    def step(self) -> None:
        """Do the work after the backward pass."""

    def set_rate(self, rate: float) -> None:
        """Change the learning rate."""
        raise NotImplementedError

    def weights(self) -> Tensor:
        """Return all rows of the first table."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the place."""


class Memhier(Way):
    """memhier's tables with so many rows in DRAM."""

    def __init__(
        self, folder: Path, sizes: list[int], needed: Ints, policy: Policy, window: int | None,
        kind: TableKind = KIND,
    ) -> None:  # fmt: skip
        folder.mkdir()
        options: dict[str, Any] = {
            "optimizer": RULES[kind.rule][0](lr=kind.rate, **kind.options), "dram": "16GiB", "path": folder,
            "policy": policy, "touched": kind.touched,
        }  # fmt: skip
        self.tables: Embedding | EmbeddingBagCollection = (
            Embedding(sizes[0], kind.dim, initial=kind.initial, **options)
            if kind.sequences
            else EmbeddingBagCollection(table_configs(sizes, kind.dim), **options)
        )
        self._window = window
        bases = self.tables.tables.bases
        for table in range(len(sizes)):
            mine = needed[(needed >= bases[table]) & (needed < bases[table + 1])] - bases[table]
            self.tables.tables.write(table, mine, self.tables.initial_weights(mine, table).numpy())
        self.tables.checkpoint()
        # The slab holds the rows that were written last: the first round brings in its own rows, and does not count.

    def batches(self, some: list[Sample]) -> Iterator[Sample]:
        if self._window is None:
            return iter(some)
        return iter(lookahead(some, self.tables, ids=lambda batch: batch.ids, window=self._window))

    def look(self, ids: Tensor) -> Tensor:
        found = self.tables(ids)
        return found.flatten(1) if isinstance(found, Tensor) else found.values()

    def set_rate(self, rate: float) -> None:
        self.tables.optimizer.param_groups[0]["lr"] = rate

    def weights(self) -> Tensor:
        return self.tables.weights(range(self.tables.tables.specs[0].rows))

    def close(self) -> None:
        self.tables.close()


class Torch(Way):
    """`torch.nn.EmbeddingBag(sparse=True)` in memory, or `torch.nn.Embedding` for sequences."""

    def __init__(self, sizes: list[int], kind: TableKind = KIND) -> None:
        weights = [torch.zeros(rows, kind.dim) for rows in sizes]
        if kind.same_start:
            for table, some in enumerate(weights):
                for start in range(0, len(some), _BLOCK):
                    rows = np.arange(start, min(start + _BLOCK, len(some)))
                    first = initial_weights(kind.initial, 0, table, rows, kind.dim, len(some))
                    some[start : start + _BLOCK] = torch.from_numpy(first)
        self._bags = [
            nn.Embedding(len(some), kind.dim, sparse=True, _weight=some)
            if kind.sequences
            else nn.EmbeddingBag(len(some), kind.dim, mode="sum", sparse=True, _weight=some)
            for some in weights
        ]
        self._sequences = kind.sequences
        self._optimizer = RULES[kind.rule][1]([bag.weight for bag in self._bags], lr=kind.rate, **kind.options)

    def look(self, ids: Tensor) -> Tensor:
        if self._sequences:
            return self._bags[0](ids).flatten(1)  # type: ignore[no-any-return]
        offsets = torch.arange(len(ids))
        return torch.cat(
            [bag(column, offsets) for bag, column in zip(self._bags, ids.t().contiguous(), strict=True)], 1
        )

    def set_rate(self, rate: float) -> None:
        self._optimizer.param_groups[0]["lr"] = rate

    def weights(self) -> Tensor:
        return self._bags[0].weight.detach()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Fbgemm(Way):
    """FBGEMM's table-batched embedding on the CPU, in memory."""

    def __init__(self, sizes: list[int]) -> None:
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        config = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        place, device = common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU
        self._tables = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, place, device) for rows in sizes],
            optimizer=config.EmbOptimType.EXACT_SGD,
            learning_rate=RATE,
        )
        self._offsets: dict[int, Tensor] = {}

    def look(self, ids: Tensor) -> Tensor:
        flat = ids.t().reshape(-1).contiguous()
        offsets = self._offsets.setdefault(len(flat), torch.arange(len(flat) + 1))
        return self._tables(flat, offsets)  # type: ignore[no-any-return]


class Stored(Way):
    """Rows by key in a store: the rows of a batch come into memory, and go back changed."""

    def __init__(self, sizes: list[int], rows: "Rows") -> None:
        self._bases = torch.from_numpy(np.cumsum([0, *sizes])[:-1])
        self._rows = rows
        self._weights: Tensor | None = None
        self._keys: Ints = np.empty(0, np.int64)

    def look(self, ids: Tensor) -> Tensor:
        keys = (ids + self._bases).numpy()
        self._keys, places = np.unique(keys, return_inverse=True)
        self._weights = torch.from_numpy(self._rows.get(self._keys)).requires_grad_()
        found = nn.functional.embedding(torch.from_numpy(places.reshape(keys.shape)), self._weights)
        return found.view(len(ids), -1)

    def step(self) -> None:
        assert self._weights is not None
        assert self._weights.grad is not None
        self._rows.put(self._keys, (self._weights.detach() - RATE * self._weights.grad).numpy())


class Rows(Protocol):
    """Rows of float32 by key, on disk."""

    def get(self, keys: Ints) -> Any:
        """Return rows [n, DIM]."""

    def put(self, keys: Ints, rows: Any) -> None:
        """Replace rows."""


class MappedRows:
    """A memory-mapped file."""

    def __init__(self, folder: Path, total: int, needed: Ints) -> None:
        folder.mkdir()
        self._path = folder / "mapped"
        with self._path.open("w+b") as file:
            file.truncate(4 * DIM * total)
            self._map = mmap.mmap(file.fileno(), 0)
        self._rows: Any = np.frombuffer(self._map, np.float32).reshape(total, DIM)
        for start in range(0, len(needed), 2**16):
            self._rows[needed[start : start + 2**16]] = 1
        self._forget()

    def get(self, keys: Ints) -> Any:
        return self._rows[keys]

    def put(self, keys: Ints, rows: Any) -> None:
        self._rows[keys] = rows
        self._forget()

    def _forget(self) -> None:
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)  # no page stays mapped, so that the cache can drop them
        with self._path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class LmdbRows:
    """An LMDB store."""

    def __init__(self, folder: Path, total: int, needed: Ints) -> None:
        lmdb = importlib.import_module("lmdb")
        folder.mkdir()
        self._path = folder / "lmdb"
        self._store = lmdb.open(str(self._path), map_size=2**35, readahead=False, sync=False)
        self.put(needed, np.ones((len(needed), DIM), np.float32))

    def get(self, keys: Ints) -> Any:
        with self._store.begin(buffers=True) as view:
            return np.frombuffer(
                b"".join(view.get(key) for key in map(bytes, keys.astype(">i8")[:, None])), np.float32
            ).reshape(-1, DIM).copy()  # fmt: skip

    def put(self, keys: Ints, rows: Any) -> None:
        with self._store.begin(write=True) as change:
            for key, row in zip(map(bytes, keys.astype(">i8")[:, None]), rows, strict=True):
                change.put(key, row.tobytes())
        self._store.sync(True)
        with open(self._path / "data.mdb", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class RocksRows:
    """A RocksDB store, through rocksdict."""

    def __init__(self, folder: Path, total: int, needed: Ints) -> None:
        self._rocks = importlib.import_module("rocksdict")
        folder.mkdir()
        options = self._rocks.Options(raw_mode=True)
        options.set_use_direct_reads(True)
        options.create_if_missing(True)
        self._store = self._rocks.Rdict(str(folder / "rocks"), options)
        self.put(needed, np.ones((len(needed), DIM), np.float32))
        self._store.flush()

    def get(self, keys: Ints) -> Any:
        found = self._store.get([*map(bytes, keys.astype(">i8")[:, None])])
        return np.frombuffer(b"".join(found), np.float32).reshape(-1, DIM).copy()

    def put(self, keys: Ints, rows: Any) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key, row in zip(map(bytes, keys.astype(">i8")[:, None]), rows, strict=True):
            batch.put(key, row.tobytes())
        self._store.write(batch)


def run_round(way: Way, some: list[Sample], net: DLRM, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Train on batches; return wall and processor seconds of each step, the wait for the batch included."""
    spent = []
    started, busy = time.perf_counter(), time.thread_time()
    for batch in way.batches(some):
        logits = net(batch.dense, way.look(batch.ids))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, batch.labels))
        way.step()
        optimizer.step()
        now, now_busy = time.perf_counter(), time.thread_time()
        spent.append((now - started, now_busy - busy))
        started, busy = now, now_busy
    return spent


def make_ways(
    folder: Path, sizes: list[int], share: float, needed: Ints, names: Sequence[str]
) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the ways that are installed, and the errors of the others."""
    slots, total = int(share * sum(sizes)), sum(sizes)
    makers: dict[str, Any] = {
        "memhier, all in DRAM": lambda at: Memhier(at, sizes, needed, Belady(len(needed)), 8),
        "memhier": lambda at: Memhier(at, sizes, needed, Belady(slots), 8),
        "memhier, LRU": lambda at: Memhier(at, sizes, needed, LRU(slots), None),
        "memhier, LFU": lambda at: Memhier(at, sizes, needed, LFU(slots), None),
        "torch in memory": lambda at: Torch(sizes),
        "FBGEMM in memory": lambda at: Fbgemm(sizes),
        "memmap": lambda at: Stored(sizes, MappedRows(at, total, needed)),
        "LMDB": lambda at: Stored(sizes, LmdbRows(at, total, needed)),
        "RocksDB": lambda at: Stored(sizes, RocksRows(at, total, needed)),
    }
    ways, missing = {}, {}
    for name in names:
        if name not in makers:
            raise click.BadParameter(f"{name!r}: expected one of {', '.join(map(repr, makers))}", param_hint="--way")
    for number, name in enumerate(names or makers):
        place = folder / str(number)
        try:
            ways[name] = makers[name](place)
        except (ImportError, OSError) as error:
            missing[name] = str(error)
    return ways, missing


def measure(
    folder: Path, sizes: list[int], share: float, batch: int, steps: int, rounds: int, names: Sequence[str]
) -> dict[str, Any]:
    """Return, for each way, the steps of every round but the first."""
    stream, needed = stream_of(sizes, batch, steps * (rounds + 1))
    ways, missing = make_ways(folder, sizes, share, needed, names)
    torch.manual_seed(0)
    net = DLRM(len(sizes), DIM)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    spent: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        some = stream[number * steps : (number + 1) * steps]
        for name, way in ways.items():
            # A store that takes seconds a step need not take many.
            few = some if number and not isinstance(way, Stored) else some[: max(1, steps // 4)]
            few = some if isinstance(way, Memhier) else few
            os.sync()  # no way pays for the writes of the way before
            spent[name].append(run_round(way, few, net, optimizer))
    stats = {name: way.tables.stats() for name, way in ways.items() if isinstance(way, Memhier)}
    for way in ways.values():
        way.close()
    return {"spent": {name: each[1:] for name, each in spent.items()}, "missing": missing, "stats": stats}


def record(spent: dict[str, Any], share: float, batch: int, rows: int) -> Record:
    """Return medians over rounds: milliseconds of a step, and memhier's speed against the others."""
    wall, busy = (
        {name: [1e3 * float(np.median([step[part] for step in one])) for one in each] for name, each in spent.items()}
        for part in (0, 1)
    )
    figures = [Figure.of(f"step, {name}", each, "ms", "less", clock=True) for name, each in wall.items()]
    for name, each in busy.items():
        figures.append(Figure.of(f"processor time of the training thread, {name}", each, "ms", "less"))
    for name in wall:
        if name != "memhier" and "memhier" in wall:
            ratios = [other / mine for other, mine in zip(wall[name], wall["memhier"], strict=True)]
            title = f"speed with {share:.0%} of the rows in DRAM against {name}"
            paper: Paper = "" if name == "memhier, all in DRAM" else "Bagpipe"
            figures.append(Figure.of(title, ratios, "times", "more", clock=True, paper=paper))
    bars = [bars_of(f"A step of DLRM, {batch} samples, 26 tables", "ms", wall)]
    return Record(figures, bars=bars, scale=f"{rows:,} rows of {DIM} floats on two cores and one SSD")


@workload
@click.option("--scale", default=1.0, show_default=True, help="Of the large tables.")
@click.option("--share", default=0.01, show_default=True, help="Of the rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--steps", default=12, show_default=True, help="In a round.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--way", "names", multiple=True, help="Measure these alone.")
def main(
    scratch: Path, scale: float, share: float, batch: int, steps: int, rounds: int, names: tuple[str, ...]
) -> Outcome:
    """Measure a step of DLRM with its tables in different places."""
    sizes = table_sizes(scale)
    found = measure(scratch, sizes, share, batch, steps, rounds, names)
    missing = [f"{name} is missing: {why}" for name, why in found["missing"].items()]
    return Outcome(record(found["spent"], share, batch, sum(sizes)), missing, found)


if __name__ == "__main__":
    main()
