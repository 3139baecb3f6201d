"""SumTree: draws in proportion to priorities, all of which lie in DRAM."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import as_ints, check_int, check_range
from memhier.recsys.replay.transitions.python_sum_tree import FAN, draw_leaves, level_starts, set_leaves

__all__ = ["SumTree"]

_LEAVES_MAX = 2**31

if backend.core is None:
    _set, _draw = set_leaves, draw_leaves
else:
    _set, _draw = backend.core.sum_tree_set, backend.core.sum_tree_draw


class SumTree:
    """Non-negative numbers by place, drawn in proportion to them.

    A node has sixteen children and is the sum of them in order, so the tree is a function of its leaves alone: no error
    builds up over changes. It takes 4.8 bytes of DRAM a leaf: 4 of the leaf, the rest for sums and minima.

    Parameters
    ----------
    leaves
        How many numbers, all zero at first.

    Examples
    --------
    >>> from memhier.recsys.replay.transitions import SumTree
    >>> tree = SumTree(100)
    >>> tree.set([3, 40], [1.0, 3.0])
    >>> tree.total, tree.least, tree.draw([0.0, 0.2, 0.3, 0.99]).tolist()
    (4.0, 1.0, [3, 3, 40, 40])
    """

    def __init__(self, leaves: int) -> None:
        self._count = check_int("leaves", leaves, 1, _LEAVES_MAX)
        padded = -(-self._count // FAN) * FAN
        nodes = level_starts(padded)[-1]
        self._leaves: NDArray[np.float32] = np.zeros(padded, np.float32)
        self._sums: NDArray[np.float64] = np.zeros(nodes, np.float64)
        self._least: NDArray[np.float32] = np.full(nodes, np.inf, np.float32)
        self._root = level_starts(padded)[-2]

    @staticmethod
    def bytes_for(leaves: int) -> int:
        """Return the DRAM for so many leaves."""
        padded = -(-leaves // FAN) * FAN
        return 4 * padded + 12 * level_starts(padded)[-1]

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._leaves.nbytes + self._sums.nbytes + self._least.nbytes

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        return float(self._sums[self._root])

    @property
    def least(self) -> float:
        """The smallest number above zero; infinity for none."""
        return float(self._least[self._root])

    @property
    def leaves(self) -> NDArray[np.float32]:
        """All numbers, float32 [leaves], not to be written to."""
        view = self._leaves[: self._count]
        view.flags.writeable = False
        return view

    def set(self, places: Any, values: Any) -> None:
        """Set numbers; where a place comes twice, its last number stays.

        Parameters
        ----------
        places
            Integers [n].
        values
            float32 [n], finite and not negative.

        Raises
        ------
        ValueError
            For a place out of range, or another value; nothing has changed then.
        """
        where, numbers = as_ints("places", places).reshape(-1), np.asarray(values, np.float32, order="C").reshape(-1)
        if len(where) and int(where.max()) >= self._count:
            check_range("places", where, self._count, f"0 to {self._count - 1}")
        if len(where) != len(numbers):
            raise ValueError(f"values: expected one for each of the {len(where)} places, got {len(numbers)}")
        try:
            _set(leaves=self._leaves, sums=self._sums, least=self._least, places=where, values=numbers)
        except ValueError:
            check_range("places", where, self._count, f"0 to {self._count - 1}")
            at = int(np.flatnonzero(~((numbers >= 0) & (numbers < np.inf)))[0])
            raise ValueError(f"values[{at}]={numbers[at]}: expected a finite number of at least 0") from None

    def draw(self, uniforms: Any) -> NDArray[np.int64]:
        """Return the place that each number in [0, 1) falls on, int64 [n]; -1 if all numbers are zero."""
        return self._drawn(uniforms, False)

    def take(self, uniforms: Any) -> NDArray[np.int64]:
        """Draw places one after the other, and set the number of each to zero: draws without replacement."""
        return self._drawn(uniforms, True)

    def _drawn(self, uniforms: Any, taking: bool) -> NDArray[np.int64]:
        numbers = np.asarray(uniforms, np.float64, order="C").reshape(-1)
        places: NDArray[np.int64] = np.empty(len(numbers), np.int64)
        try:
            _draw(
                leaves=self._leaves, sums=self._sums, least=self._least, uniforms=numbers, places=places, taking=taking
            )
        except ValueError:
            raise ValueError(f"uniforms: expected numbers from 0 to below 1, got {uniforms!r}") from None
        return places
