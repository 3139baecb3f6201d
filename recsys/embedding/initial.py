"""First values of rows, made when a row is first touched; they depend on seed, table and row alone.

A counter-based generator makes them (SplitMix64's finalizer over a counter, as in Steele, Lea and Flood, OOPSLA 2014;
the idea of counters is Salmon et al., SC 2011). No row's values need those of another row, so a row needs no read or
write before it is trained, and a table of any size is created at once. Integer arithmetic and exactly rounded products
and sums make the values the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.recsys.embedding.ids.hash64 import Hash64, IdSpace, as_id_space
from memhier.recsys.embedding.optimizers import SparseOptimizer

__all__ = ["FirstRows", "Initial", "Normal", "TableSpec", "Uniform", "initial_weights"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# The sum of so many 16-bit numbers is close enough to normal for weights, and needs no logarithm, which machines round
# in different ways.
_HALVES = 8
_HALF_MEAN = _HALVES * 65535 / 2
_HALF_STD = (_HALVES * (65536**2 - 1) / 12) ** 0.5


@dataclass(frozen=True, slots=True)
class Uniform:
    """Values spread evenly between two bounds, without the upper one.

    Attributes
    ----------
    low, high
        None stands for 1 / sqrt(num_embeddings) on each side of zero, as in TorchRec and DLRM.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, Uniform
    >>> with EmbeddingBag(1000, 4, initial=Uniform(-0.1, 0.1), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     bool((bag.weights([0, 999]).abs() <= 0.1).all())
    True
    """

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low={self.low}, high={self.high}: expected both bounds, or neither")
        if self.low is None or self.high is None:
            return
        with np.errstate(over="ignore"):
            if not np.float32(self.low) < np.float32(self.high):
                raise ValueError(f"low={self.low}, high={self.high}: expected low < high as float32")
            if not np.isfinite(np.float32(self.high - self.low)):
                raise ValueError(f"low={self.low}, high={self.high}: expected a difference that float32 can hold")

    def weights(self, seed: int, table: int, rows: NDArray[np.int64], dim: int, count: int) -> NDArray[np.float32]:
        """Return the first values of rows, float32 [n, dim]; arguments as of :func:`initial_weights`."""
        bound = 1 / count**0.5
        low, high = (-bound, bound) if self.low is None or self.high is None else (self.low, self.high)
        words = _words(seed, table, rows, -(-dim // 2))
        halves = words.view("<u4")[:, :dim]
        unit = (halves >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
        values: NDArray[np.float32] = unit * np.float32(high - low) + np.float32(low)
        # The sum may round up to the bound.
        np.minimum(values, _below(high), out=values)
        return values


@dataclass(frozen=True, slots=True)
class Normal:
    """Normally distributed values, as in `torch.nn.EmbeddingBag`; none is farther out than 4.9 deviations.

    Attributes
    ----------
    mean, std
        Mean and standard deviation; `std` is 0 or more.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.recsys import EmbeddingBag, Normal
    >>> with EmbeddingBag(1000, 4, initial=Normal(std=0.01), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     bool((bag.weights([0, 999]).abs() < 0.05).all())
    True
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"std={self.std}: expected 0 or more")

    def weights(self, seed: int, table: int, rows: NDArray[np.int64], dim: int, count: int) -> NDArray[np.float32]:
        """Return the first values of rows, float32 [n, dim]; arguments as of :func:`initial_weights`."""
        words = _words(seed, table, rows, dim * _HALVES // 4)
        sums = words.view("<u2").reshape(len(rows), dim, _HALVES).sum(axis=2, dtype=np.int64)
        values: NDArray[np.float32] = ((sums - _HALF_MEAN) * (self.std / _HALF_STD) + self.mean).astype(np.float32)
        return values


Initial = Uniform | Normal


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table.

    Attributes
    ----------
    name
        Unique among the tables of a collection.
    rows, dim
        Number of rows, and of weights in each.
    initial
        Weights of rows before they are first trained.
    id_space, padding_id
        The options of a table for any ids, None if ids are rows; and the id of the padding, if it has one.
    """

    name: str
    rows: int
    dim: int
    initial: Initial = field(default_factory=Normal)
    id_space: Hash64 | None = None
    padding_id: int | None = None

    @classmethod
    def of(
        cls, name: str, rows: int, dim: int, initial: Initial, id_space: IdSpace = "rows", padding_id: int | None = None
    ) -> "TableSpec":
        """Return the table for `rows` ids: for any ids, it has a row more for unknown ones and one for the padding."""
        options = as_id_space(id_space)
        if options is not None:
            check_int("num_embeddings", rows, 1, 2**31 - 3, "ids with a row at a time, for any ids")
        return cls(name, rows if options is None else rows + 2, dim, initial, options, padding_id)

    @property
    def capacity(self) -> int:
        """The number of rows that ids have of their own."""
        return self.rows if self.id_space is None else self.rows - 2

    @property
    def unknown_row(self) -> int:
        """The row of ids without one of their own, in a table for any ids."""
        return self.rows - 2

    @property
    def padding_row(self) -> int:
        """The row of the padding, in a table for any ids."""
        return self.rows - 1


class FirstRows:
    """Makes the untrained rows of tables by key, with the first state of their optimizer.

    Parameters
    ----------
    specs
        The tables, whole.
    rules
        The optimizer of each.
    seed
        As the tables were given.
    rank, ranks
        A store that holds every `ranks`-th key from `rank` on numbers them 0, 1, 2 ...
    """

    def __init__(
        self, specs: Sequence[TableSpec], rules: Sequence[SparseOptimizer], seed: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._specs = specs
        self._bases = np.cumsum([0, *(spec.rows for spec in specs)])
        self._widths = [spec.dim + rule.state_width(spec.dim) for spec, rule in zip(specs, rules, strict=True)]
        self._first_states = [rule.first_state() for rule in rules]
        self._seed = seed
        self._rank, self._ranks = rank, ranks

    def __call__(self, numbers: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        """Return rows, float32 [n, width], of tables that are no wider."""
        keys = numbers * self._ranks + self._rank
        tables = np.searchsorted(self._bases, keys, side="right") - 1
        rows = np.zeros((len(keys), width), np.float32)
        for table in np.unique(tables).tolist():
            spec, mine = self._specs[table], tables == table
            # A row for any ids has its weights when an id gets it.
            ids = keys[mine] - self._bases[table]
            rows[mine, : self._widths[table]] = self.of_ids(table, ids, made=spec.id_space is None)
        return rows

    def of_ids(self, table: int, ids: NDArray[np.int64], made: bool = True) -> NDArray[np.float32]:
        """Return rows of ids of one table, float32 [n, its width]; their weights are zeros unless `made`."""
        spec = self._specs[table]
        rows = np.full((len(ids), self._widths[table]), self._first_states[table], np.float32)
        rows[:, : spec.dim] = spec.initial.weights(self._seed, table, ids, spec.dim, spec.capacity) if made else 0
        return rows


def _below(bound: float) -> np.float32:
    """Return the largest float32 that is less."""
    nearest = np.float32(bound)
    return nearest if nearest < bound else np.nextafter(nearest, np.float32(-np.inf))


def initial_weights(
    initial: Initial, seed: int, table: int, rows: NDArray[np.int64], dim: int, count: int
) -> NDArray[np.float32]:
    """Return the first values of rows: for making the same table in memory.

    Parameters
    ----------
    initial, seed
        As the table was given.
    table
        Its number in the collection; 0 for a table alone.
    rows
        int64 [n].
    dim, count
        The table's width and number of rows.

    Returns
    -------
    numpy.ndarray
        float32 [n, dim].

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.recsys import Uniform, initial_weights
    >>> some = initial_weights(Uniform(-1, 1), 0, 0, np.array([5, 10**12]), 3, 10**13)
    >>> bool((initial_weights(Uniform(-1, 1), 0, 0, np.array([10**12]), 3, 10**13) == some[1]).all())
    True
    """
    return initial.weights(seed, table, np.asarray(rows, np.int64), dim, count)


def _words(seed: int, table: int, rows: NDArray[np.int64], width: int) -> NDArray[np.uint64]:
    """Return random words, little-endian uint64 [n, width], by seed, table, row and column."""
    start = _mix_one(_mix_one(seed & _MASK) + table * _GOLDEN)
    of_rows = _mix(np.uint64(start) + rows.astype(np.uint64) * np.uint64(_GOLDEN))
    columns = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mix(of_rows[:, None] + columns).astype("<u8", copy=False)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _mix_one(word: int) -> int:
    return int(_mix(np.array([word & _MASK], np.uint64))[0])
