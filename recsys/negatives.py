"""Negatives of a training step: a tile of rows that stays for some steps, so that DRAM and caches hold it already."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memhier.arguments import check_int

__all__ = ["TiledNegatives"]


@dataclass(frozen=True, kw_only=True)
class TiledNegatives:
    """Draws a tile of rows at random, and keeps it for a number of steps (HEAT, arXiv 2304.07334).

    All samples of a step have the rows of the tile as their negatives. A table reads a new tile once, in one
    submission, and its rows are needed again in each step, so Belady's rule keeps them in DRAM; a product of two
    matrices takes the place of a gather for each sample. The tile depends on the seed and on the number of the step
    alone, never on the rows that happen to be in DRAM: results are the same at any budget.

    Parameters
    ----------
    rows
        Rows of the table to draw from.
    tile
        Distinct rows in a tile.
    steps
        Steps that have the same tile.
    seed
        Of the draws.

    Raises
    ------
    ValueError, TypeError
        For numbers below 1, a negative seed, and tiles larger than the table.

    Examples
    --------
    >>> from memhier.recsys import TiledNegatives
    >>> negatives = TiledNegatives(rows=10**9, tile=4, steps=8, seed=0)
    >>> len(negatives.at(0)), bool((negatives.at(0) == negatives.at(7)).all())
    (4, True)
    >>> bool((negatives.at(7) == negatives.at(8)).all())
    False
    """

    rows: int
    tile: int
    steps: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("rows", self.rows, 1, 2**62)
        check_int("tile", self.tile, 1, self.rows)
        check_int("steps", self.steps, 1, 2**62)
        check_int("seed", self.seed, 0, 2**63 - 1)

    def at(self, step: int) -> Tensor:
        """Return the negatives of a step, which count from 0: distinct rows, int64 [tile], ascending.

        Examples
        --------
        >>> from memhier.recsys import TiledNegatives
        >>> TiledNegatives(rows=3, tile=3, steps=1).at(5).tolist()
        [0, 1, 2]
        """
        check_int("step", step, 0, 2**62)
        drawn = np.random.default_rng([self.seed, step // self.steps]).choice(self.rows, self.tile, replace=False)
        return torch.from_numpy(np.sort(drawn))
