"""What the workloads of embedding tables share: a DLRM, ids with the sizes and skew of Criteo's tables, real data."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier.benchmarks.datasets import data_folder
from memhier.io.outside import reading

__all__ = [
    "CRITEO_ROWS",
    "DLRM",
    "Sample",
    "Stretch",
    "Stretches",
    "checkpoint_costs",
    "criteo_dac",
    "gowalla",
    "power_law",
    "samples",
    "table_sizes",
]

Ints = NDArray[np.int64]

# Distinct values of the 26 columns of Criteo Kaggle, as DLRM's and Bagpipe's scripts have them: 33,762,577 rows.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch: ids int64 [n, tables], numbers float32 [n, 13], labels float32 [n]."""

    ids: Tensor
    dense: Tensor
    labels: Tensor


class DLRM(nn.Module):
    """The dense part of DLRM (Naumov et al., arXiv 1906.00091): two perceptrons, and products of all pairs between."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, dim), nn.ReLU())
        features = tables + 1
        rows, columns = torch.tril_indices(features, features, -1)
        self._pairs = rows * features + columns
        self._dim = dim
        self.top = nn.Sequential(
            nn.Linear(dim + features * (features - 1) // 2, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [n]; `pooled` is [n, tables * dim]."""
        below = self.bottom(dense)
        features = torch.cat([below, pooled], 1).view(len(dense), -1, self._dim)
        products = torch.bmm(features, features.transpose(1, 2)).view(len(dense), -1)[:, self._pairs]
        logits: Tensor = self.top(torch.cat([below, products], 1)).squeeze(1)
        return logits


class Stretch(NamedTuple):
    """Steps from one checkpoint to the next, in seconds by the clock and of the whole process's processor time.

    `way` is the kind of checkpoint at its beginning, "" for none.
    """

    way: str
    clock: float
    busy: float


class Stretches:
    """Times stretches of a training that take turns: without a checkpoint, and with one, in each way.

    A checkpoint's cost lies in its stretch, however long it lasts: where it is not durable at the end, that is waited
    for. What it leaves the log to rewrite beside the steps that follow is not waited for, and where the stretch is too
    short for it, goes on in the next; a young log has nothing to rewrite.

    Parameters
    ----------
    ways
        What takes a checkpoint, by name; what it returns is waited for where it is a future.
    """

    def __init__(self, ways: dict[str, Callable[[], Any]]) -> None:
        self._ways = ways
        self._turns = itertools.cycle([turn for way in ways for turn in ("", way)])
        self._way: str | None = None
        self._begun = (0.0, 0.0)
        self._saving: Any = None
        self.done: list[Stretch] = []

    def next(self) -> None:
        """End the stretch that is under way, if one is, and begin the next."""
        if isinstance(self._saving, Future):
            self._saving.result()
        now = time.perf_counter(), time.process_time()
        if self._way is not None:
            clock, busy = (end - begin for begin, end in zip(self._begun, now, strict=True))
            self.done.append(Stretch(self._way, clock, busy))
        self._way, self._begun = next(self._turns), now
        self._saving = self._ways[self._way]() if self._way else None


def checkpoint_costs(stretches: Sequence[Stretch], way: str) -> tuple[list[float], list[float]]:
    """Return what each checkpoint of a way costs, by the clock and in processor time.

    A share of the stretches beside its own, which have none: more than their mean. Below 0 it is the machine's noise.
    """
    found = []
    for before, own, after in zip(stretches, stretches[1:], stretches[2:], strict=False):
        if own.way == way:
            usual = (before.clock + after.clock) / 2, (before.busy + after.busy) / 2
            found.append((own.clock / usual[0] - 1, own.busy / usual[1] - 1))
    return [clock for clock, _ in found], [busy for _, busy in found]


def table_sizes(scale: float) -> list[int]:
    """Return the sizes of Criteo's tables, large ones times `scale`."""
    return [rows if rows <= 1000 else max(1000, int(rows * scale)) for rows in CRITEO_ROWS]


def samples(sizes: list[int], batch: int, count: int, seed: int, exponent: float = 1.05) -> Iterator[Sample]:
    """Yield batches whose ids follow a power law in each table; which rows are frequent is scattered over the table."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        columns = [power_law(rng.random(batch), rows, exponent) for rows in sizes]
        dense = rng.standard_normal((batch, 13), dtype=np.float32)
        labels = (rng.random(batch) < 0.25).astype(np.float32)
        yield Sample(torch.from_numpy(np.stack(columns, 1)), torch.from_numpy(dense), torch.from_numpy(labels))


def power_law(uniform: NDArray[np.float64], rows: int, exponent: float) -> Ints:
    """Return rows like `uniform`: ranks with density rank^-exponent by inverting its integral, scattered."""
    ranks = ((rows + 1) ** (1 - exponent) - 1) * uniform + 1
    found = np.minimum((ranks ** (1 / (1 - exponent))).astype(np.int64) - 1, rows - 1)
    # A multiplier without a common factor with the number of rows makes a permutation.
    step = 2654435761 % rows or 1
    while np.gcd(step, rows) != 1:
        step += 1
    scattered: Ints = found * step % rows
    return scattered


def criteo_dac(tables: int = 39) -> tuple[Ints, NDArray[np.float32], list[int]]:
    """Return the 80,000 samples of Criteo in the order of the log: ids [n, tables], labels [n], sizes of tables.

    A sample's column that is empty gets row 0 of its table.

    Raises
    ------
    FileNotFoundError
        When the data set is not there.
    """
    folder = data_folder() / "criteo-dac80k"
    if not folder.is_dir():
        raise FileNotFoundError(f"no data set 'criteo-dac80k' at {folder}: put it there, or set MEMHIER_DATA")
    path = folder / "criteo_dac80k_hashed.npz"
    with reading(path), np.load(path) as files:
        labels, offsets, hashed, field = (files[name] for name in ("label", "offset", "id20", "field"))
    ids = np.zeros((len(labels), tables), np.int64)
    sample = np.repeat(np.arange(len(labels)), np.diff(offsets))
    sizes = []
    for column in range(tables):
        mine = field == column
        values, numbers = np.unique(hashed[mine], return_inverse=True)
        ids[sample[mine], column] = numbers + 1
        sizes.append(len(values) + 1)
    return ids, labels.astype(np.float32), sizes


def gowalla() -> tuple[Ints, dict[int, Ints], int, int]:
    """Return Gowalla as LightGCN splits it: pairs [n, 2] of user and item, held-out items by user, users, items.

    Raises
    ------
    FileNotFoundError
        When the data set is not there.
    """
    import lzma

    folder = data_folder() / "gowalla"
    if not folder.is_dir():
        raise FileNotFoundError(f"no data set 'gowalla' at {folder}: put it there, or set MEMHIER_DATA")
    users, items = 29858, 40981
    path = folder / "s_adj_mat.npz"
    with reading(path), np.load(path) as files:
        begins, columns = files["indptr"], files["indices"]
    row = np.repeat(np.arange(users), np.diff(begins[: users + 1]))
    pairs = np.stack([row, columns[: begins[users]].astype(np.int64) - users], 1)
    held_out: dict[int, Ints] = {}
    path = folder / "test.txt.xz"
    with reading(path, lambda: f"after {len(held_out)} lines"), lzma.open(path, "rt") as lines:
        for line in lines:
            numbers = np.array(line.split(), np.int64)
            held_out[int(numbers[0])] = numbers[1:]
    return pairs, held_out, users, items
