"""The rows of one rank: those whose key, modulo the number of ranks, is its number."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.recsys.embedding.tables import Floats, Ints, Rows, Tables, TableSpec

__all__ = ["Shard"]


class Shard(Tables):
    """Part of every table, under the numbers that rows have here: key // ranks."""

    def __init__(
        self, whole: Sequence[TableSpec], rank: int, ranks: int, optimizer: SparseOptimizer | None, **options: Any
    ):
        self._whole = tuple(whole)
        self._whole_bases = np.cumsum([0, *(spec.rows for spec in whole)])
        self._rank, self._ranks = rank, ranks
        # How many of the keys below each bound are this rank's.
        below = np.maximum(0, -(-(self._whole_bases - rank) // ranks))
        counts = np.diff(below)
        counts[-1] += below[-1] == 0  # a rank without a row has one that nobody asks for
        specs = [
            replace(spec, name=f"{spec.name}: part {rank} of {ranks} of {spec.rows} rows", rows=count)
            for spec, count in zip(whole, counts.tolist(), strict=True)
        ]
        super().__init__(specs, optimizer, **options)
        self._tier.keep_way_back()

    def keep_way_back(self, further: bool) -> None:
        """Let checkpoints keep the way to the one before the last, not to the last: which others may not have."""
        self._tier.keep_way_back(further)

    def everywhere(self, numbers: Ints) -> Ints:
        """Return the keys that rows have in the whole."""
        return numbers * self._ranks + self._rank

    def has(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys of the whole are this rank's."""
        mine: NDArray[np.bool_] = keys % self._ranks == self._rank
        return mine

    def numbers(self, keys: Ints) -> Ints:
        """Return the numbers that keys of the whole have here."""
        return keys // self._ranks

    def tables_of(self, numbers: Ints) -> Ints:
        """Return the table of each row."""
        return np.searchsorted(self.bases, numbers, side="right") - 1

    def rows_of(self, numbers: Ints) -> Rows:
        """Return the distinct rows among these numbers."""
        keys, inverse = np.unique(numbers, return_inverse=True)
        nothing = np.empty(0, np.int32)
        return Rows(keys, np.searchsorted(keys, self.bases), np.empty(0, np.int64), inverse.astype(np.int32), nothing)

    def read_numbers(self, numbers: Ints) -> Floats:
        """Return rows with their state, float32 [n, width of the widest]."""
        return self._gathered(numbers)

    def _first_rows(self, keys: Ints) -> Floats:
        everywhere = self.everywhere(keys)
        tables = np.searchsorted(self._whole_bases, everywhere, side="right") - 1
        return self._made(len(keys), tables, everywhere - self._whole_bases[tables], self._whole)
