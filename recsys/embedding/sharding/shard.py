"""The rows of one rank: the keys that leave its number when divided by the number of ranks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.embedding.initial import FirstRows, TableSpec
from memhier.recsys.embedding.table_rules import rules_in
from memhier.recsys.embedding.tables import Floats, Ints, StepRows, TableOptions, Tables

__all__ = ["Shard"]


class Shard(Tables):
    """Part of every table; here a row has the number key // ranks."""

    adds_by_row = True  # other rows lie on other ranks

    def __init__(self, whole: Sequence[TableSpec], rank: int, ranks: int, options: TableOptions) -> None:
        self._rank, self._ranks = rank, ranks
        bases = np.cumsum([0, *(spec.rows for spec in whole)])
        # The number of keys below each base that are this rank's.
        below = np.maximum(0, -(-(bases - rank) // ranks))
        counts = np.diff(below)
        counts[-1] += below[-1] == 0  # a rank without a row has one that no batch asks for
        specs = [
            replace(spec, name=f"{spec.name}: part {rank} of {ranks} of {spec.rows} rows", rows=count)
            for spec, count in zip(whole, counts.tolist(), strict=True)
        ]
        rules = rules_in(options.optimizer) * len(specs)
        super().__init__(specs, options, FirstRows(whole, rules, int(options.seed), rank, ranks))
        self._tiers[0].keep_way_back()

    def keep_way_back(self, further: bool) -> None:
        """Let checkpoints keep the way to the one before the last, as other ranks may not have the last."""
        self._tiers[0].keep_way_back(further)

    def everywhere(self, numbers: Ints) -> Ints:
        """Return the keys of rows in the whole tables."""
        return numbers * self._ranks + self._rank

    def has(self, keys: Ints) -> NDArray[np.bool_]:
        """Return whether each key of the whole tables is this rank's."""
        mine: NDArray[np.bool_] = keys % self._ranks == self._rank
        return mine

    def numbers(self, keys: Ints) -> Ints:
        """Return the numbers here of keys of the whole tables."""
        return keys // self._ranks

    def tables_of(self, numbers: Ints) -> Ints:
        """Return the table of each row."""
        return np.searchsorted(self.bases, numbers, side="right") - 1

    def rows_of(self, numbers: Ints) -> StepRows:
        """Return the distinct rows among these numbers."""
        keys, inverse = np.unique(numbers, return_inverse=True)
        return StepRows(keys, np.searchsorted(keys, self.bases), inverse=inverse.astype(np.int32))

    def read_numbers(self, numbers: Ints) -> Floats:
        """Return rows with their state, float32 [n, width of the widest]."""
        found = np.zeros((len(numbers), max(self.widths)), np.float32)
        for group, (places, keys) in enumerate(self.groups.split_any(numbers)):
            found[places, : self.groups.widths[group]] = self._gathered(group, keys)
        return found
