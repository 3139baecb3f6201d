"""The compiled steps: distinct rows, sums and updates for all tables at once, with the bits of torch's operators.

Without the compiled core distinct rows come from numpy, and `fused` does the rest with torch's own operators.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from memhier import backend

__all__ = ["distinct_rows", "is_compiled", "pool_rows", "update_rows"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# The rules with a root for each weight: Adagrad, Adam.
_ROOT_EACH = (1, 3)
# From so many ids on torch sorts with several threads where it may, and equal ids come in another order.
_TORCH_SORTS_ALONE = 32768


def is_compiled() -> bool:
    """Whether the compiled core is there."""
    return backend.core is not None


def distinct_rows(
    ids: Ints, ends: Ints, bases: Ints, *, like_torch: bool = True
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return keys, starts, ends, inverse and order of the ids of all tables, as `Rows` has them.

    Parameters
    ----------
    ids
        int64 [n], table after table.
    ends
        int64 [tables]: where the ids of each table end.
    bases
        int64 [tables or more]: what is added to a table's ids to make keys.
    like_torch
        Whether the order of equal ids has to be torch's own. Where nobody adds gradients up by it, it need not.
    """
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    if backend.core is None or (like_torch and (longest >= _TORCH_SORTS_ALONE or not _sorts_like_torch())):
        return _distinct_rows_by_torch(ids, ends, bases)
    keys, inverse, order = (np.empty(len(ids), np.int64) for _ in range(3))
    starts = np.empty(len(ends) + 1, np.int64)
    count = backend.core.embedding_distinct(ids, ends, bases, like_torch, keys, starts, inverse, order)
    return keys[:count].copy(), starts, ends, inverse, order


def _distinct_rows_by_torch(ids: Ints, ends: Ints, bases: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    keys, starts, inverse, order = [], [0], [], []
    begin = 0
    for end, base in zip(ends.tolist(), bases.tolist(), strict=False):
        mine = ids[begin:end]
        distinct, places = np.unique(mine, return_inverse=True)
        keys.append(distinct + base)
        inverse.append(places.reshape(-1) + starts[-1])
        order.append(torch.sort(torch.from_numpy(mine))[1].numpy() + begin)
        starts.append(starts[-1] + len(distinct))
        begin = end
    return np.concatenate(keys), np.array(starts), ends, np.concatenate(inverse), np.concatenate(order)


@functools.cache
def _sorts_like_torch() -> bool:
    """Whether the core leaves equal ids in the order in which this torch does: another may sort in another way."""
    rng = np.random.default_rng(0)
    for count, distinct in ((17, 3), (100, 7), (5000, 50), (5000, 4000)):
        ids, ends, bases = rng.integers(0, distinct, count), np.array([count]), np.zeros(1, np.int64)
        keys, inverse, order = (np.empty(count, np.int64) for _ in range(3))
        backend.core.embedding_distinct(ids, ends, bases, True, keys, np.empty(2, np.int64), inverse, order)  # type: ignore[union-attr]
        if not np.array_equal(order, torch.sort(torch.from_numpy(ids))[1].numpy()):
            return False
    return True


def pool_rows(slab: Floats, slots: Ints, inverse: Ints, begins: Ints, targets: Ints, tables: Ints, out: Floats) -> None:
    """Fill `out` with the sums of bags.

    Parameters
    ----------
    slab
        float32 [rows, width]: weights, and state behind them.
    slots
        int64 [u]: where each of a step's keys lies.
    inverse
        int64 [n]: for every id, which key it is.
    begins, targets
        int64 [bags + 1] and [bags]: where the ids of each bag begin, and where in `out` its sum goes.
    tables
        int64 [tables, 4]: first bag, end of bags, weights of a row, and 1 for means.
    out
        float32.
    """
    assert backend.core is not None
    backend.core.embedding_pool(slab, slots, inverse, begins, targets, tables, out)


def update_rows(
    rule: int,
    slab: Floats,
    slots: Ints,
    tables: Ints,
    numbers: Floats,
    inverse: Ints,
    order: Ints,
    sources: Ints,
    scales: Floats | None,
    gradient: Floats,
) -> None:
    """Apply gradients to rows where they lie.

    Parameters
    ----------
    rule, numbers
        As `SparseOptimizer.kernel` says; numbers float32 [tables, 4].
    slab, slots, inverse
        As in :func:`pool_rows`.
    tables
        int64 [tables, 5]: first id, end of ids, first key, end of keys, weights of a row.
    order
        int64 [n]: each table's ids, sorted.
    sources, scales
        int64 [n] and float32 [n]: where in `gradient` the gradient of each id's bag begins, and what it is multiplied
        by; None for 1.
    gradient
        float32.
    """
    assert backend.core is not None
    weights = 0 if rule == 0 else int(((tables[:, 3] - tables[:, 2]) * tables[:, 4]).sum())
    steps = np.empty(weights, np.float32)
    roots = np.empty(weights if rule in _ROOT_EACH else min(weights, len(slots)), np.float32)
    backend.core.embedding_update(
        rule, slab, slots, tables, numbers, inverse, order, sources, scales, gradient, steps, roots
    )
    if rule:
        torch.from_numpy(roots).sqrt_()
        backend.core.embedding_take_steps(rule, slab, slots, tables, numbers, steps, roots)
