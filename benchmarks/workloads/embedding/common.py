"""Parts of the workloads of embedding tables: ids with the sizes and skew of Criteo's, timed stretches."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memhier.recsys import SGD, Adagrad, Adam, EmbeddingBagConfig, Uniform

__all__ = [
    "CRITEO_ROWS",
    "RULES",
    "Sample",
    "Stretch",
    "Stretches",
    "TableKind",
    "checkpoint_costs",
    "power_law",
    "samples",
    "stream_of",
    "table_configs",
    "table_sizes",
]

Ints = NDArray[np.int64]

# Distinct values of the 26 columns of Criteo Kaggle, as DLRM's and Bagpipe's scripts have them: 33,762,577 rows.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


# memhier's optimizers of rows, and torch's with the same bits.
RULES: dict[str, tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD, torch.optim.SGD),
    "adagrad": (Adagrad, torch.optim.Adagrad),
    "adam": (Adam, torch.optim.SparseAdam),
}


@dataclass(frozen=True, slots=True)
class TableKind:
    """Tables of one training.

    Attributes
    ----------
    dim
        Floats of a row.
    rule, rate, options
        One of :data:`RULES`, its learning rate, and further parameters of both optimizers.
    sequences
        One table, and any number of ids a sample, whose rows are not summed.
    same_start
        torch's tables begin with memhier's first values, and not with zeros.
    touched
        As of memhier's tables.
    initial
        The first values of a table of sequences.
    """

    dim: int = 32
    rule: str = "sgd"
    rate: float = 0.01
    sequences: bool = False
    same_start: bool = False
    touched: int | None = None
    initial: Any = field(default_factory=Uniform)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch: ids int64 [n, tables], numbers float32 [n, 13], labels float32 [n]."""

    ids: Tensor
    dense: Tensor
    labels: Tensor


class Stretch(NamedTuple):
    """Steps from one checkpoint to the next, in seconds by the clock and of the whole process's processor time.

    `way` is the kind of checkpoint at its beginning, "" for none.
    """

    way: str
    clock: float
    busy: float


class Stretches:
    """Times stretches of a training that take turns: without a checkpoint, and with one, in each way.

    A stretch ends when its checkpoint is durable, so the cost of a checkpoint lies in its own stretch. The log may go
    on rewriting beside the steps of the next stretch; a young log has nothing to rewrite.

    Parameters
    ----------
    ways
        A function that takes a checkpoint, by name; a stretch waits for the future that it returns, if it returns one.
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
    """Return the cost of each checkpoint of a way, by the clock and in processor time.

    The cost is a share of the mean of the two stretches beside its own, which have none. Below 0 it is noise.
    """
    found = []
    for before, own, after in zip(stretches, stretches[1:], stretches[2:], strict=False):
        if own.way == way:
            usual = (before.clock + after.clock) / 2, (before.busy + after.busy) / 2
            found.append((own.clock / usual[0] - 1, own.busy / usual[1] - 1))
    return [clock for clock, _ in found], [busy for _, busy in found]


def table_configs(sizes: Sequence[int], dim: int) -> list[EmbeddingBagConfig]:
    """Return a table of each size, whose first values are uniform."""
    return [
        EmbeddingBagConfig(name=f"t{table}", num_embeddings=rows, embedding_dim=dim, initial=Uniform())
        for table, rows in enumerate(sizes)
    ]


def table_sizes(scale: float) -> list[int]:
    """Return the sizes of Criteo's tables, large ones times `scale`."""
    return [rows if rows <= 1000 else max(1000, int(rows * scale)) for rows in CRITEO_ROWS]


def samples(
    sizes: list[int], batch: int, count: int, seed: int, exponents: Sequence[float] | None = None
) -> Iterator[Sample]:
    """Yield batches whose ids follow a power law in each table; frequent rows are scattered over the table."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        laws = [1.05] * len(sizes) if exponents is None else exponents
        columns = [power_law(rng.random(batch), rows, law) for rows, law in zip(sizes, laws, strict=True)]
        dense = rng.standard_normal((batch, 13), dtype=np.float32)
        labels = (rng.random(batch) < 0.25).astype(np.float32)
        yield Sample(torch.from_numpy(np.stack(columns, 1)), torch.from_numpy(dense), torch.from_numpy(labels))


def stream_of(sizes: list[int], batch: int, count: int) -> tuple[list[Sample], Ints]:
    """Return batches, and their distinct rows numbered through all tables; torch checks no sparse tensor."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    stream = [*samples(sizes, batch, count, 0)]
    bases = np.cumsum([0, *sizes])[:-1]
    return stream, np.unique(np.concatenate([np.unique(sample.ids.numpy() + bases) for sample in stream]))


def power_law(uniform: NDArray[np.float64], rows: int, exponent: float) -> Ints:
    """Return rows in the shape of `uniform`: scattered ranks of density rank^-exponent, by inverting its integral."""
    ranks = ((rows + 1) ** (1 - exponent) - 1) * uniform + 1
    found = np.minimum((ranks ** (1 / (1 - exponent))).astype(np.int64) - 1, rows - 1)
    # A multiplier without a common factor with the number of rows makes a permutation.
    step = 2654435761 % rows or 1
    while np.gcd(step, rows) != 1:
        step += 1
    scattered: Ints = found * step % rows
    return scattered
