"""The compiled steps: distinct rows, sums and updates for all tables at once, with the bits of torch's operators.

Without the compiled core distinct rows come from numpy, and `fused` does the rest with torch's own operators.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from memhier import backend

__all__ = ["distinct_rows", "is_compiled", "pool_rows", "update_rows"]

Ints = NDArray[np.int64]
Places = NDArray[np.int32]
Floats = NDArray[np.float32]

# The rules with a root for each weight: Adagrad, Adam.
_ROOT_EACH = (1, 3)
# From so many ids on torch sorts with several threads where it may, and equal ids come in another order.
_TORCH_SORTS_ALONE = 32768
_IDS_MAX = 2**31


def is_compiled() -> bool:
    """Return whether the compiled core is in use."""
    return backend.core is not None


def distinct_rows(
    ids: Ints, ends: Ints, bases: Ints, *, in_order: bool = True
) -> tuple[Ints, Ints, Ints, Places, Places]:
    """Return keys, starts, ends, inverse and order of the ids of all tables, as `Rows` has them.

    Parameters
    ----------
    ids
        int64 [n], table after table.
    ends
        int64 [tables]: where the ids of each table end.
    bases
        int64 [tables or more]: added to a table's ids to make keys.
    in_order
        Whether gradients will be added up in torch's order. Otherwise the order is left out: it is empty.
    """
    if len(ids) >= _IDS_MAX:
        raise ValueError(f"ids: {len(ids)} in one step, expected fewer than {_IDS_MAX}")
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    if backend.core is None or (in_order and (longest >= _TORCH_SORTS_ALONE or not _sorts_like_torch())):
        return _distinct_rows_by_torch(ids, ends, bases, in_order)
    keys, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
    order = np.empty(len(ids) if in_order else 0, np.int32)
    starts = np.empty(len(ends) + 1, np.int64)
    count = backend.core.embedding_distinct(
        ids=ids, ends=ends, bases=bases, like_torch=in_order, keys=keys, starts=starts, inverse=inverse, order=order
    )
    return keys[:count].copy(), starts, ends, inverse, order


def _distinct_rows_by_torch(
    ids: Ints, ends: Ints, bases: Ints, in_order: bool
) -> tuple[Ints, Ints, Ints, Places, Places]:
    keys, starts = [], [0]
    inverse, order = np.empty(len(ids), np.int32), np.empty(len(ids) if in_order else 0, np.int32)
    begin = 0
    for end, base in zip(ends.tolist(), bases.tolist(), strict=False):
        mine = ids[begin:end]
        distinct, places = np.unique(mine, return_inverse=True)
        keys.append(distinct + base)
        inverse[begin:end] = places.reshape(-1) + starts[-1]
        if in_order:
            order[begin:end] = torch.sort(torch.from_numpy(mine))[1].numpy() + begin
        starts.append(starts[-1] + len(distinct))
        begin = end
    return np.concatenate(keys), np.array(starts), ends, inverse, order


@functools.cache
def _sorts_like_torch() -> bool:
    """Whether the core leaves equal ids in the order in which this torch does: another may sort in another way."""
    assert backend.core is not None
    rng = np.random.default_rng(0)
    for count, distinct in ((17, 3), (100, 7), (5000, 50), (5000, 4000)):
        ids, ends, bases = rng.integers(0, distinct, count), np.array([count]), np.zeros(1, np.int64)
        keys, inverse, order = np.empty(count, np.int64), np.empty(count, np.int32), np.empty(count, np.int32)
        starts = np.empty(2, np.int64)
        backend.core.embedding_distinct(
            ids=ids, ends=ends, bases=bases, like_torch=True, keys=keys, starts=starts, inverse=inverse, order=order
        )
        if not np.array_equal(order, torch.sort(torch.from_numpy(ids))[1].numpy()):
            return False
    return True


def pool_rows(
    slab: Floats, slots: Ints, inverse: Places, begins: Ints, targets: Ints, tables: Ints, out: Floats
) -> None:
    """Fill `out` with the sums of bags.

    Parameters
    ----------
    slab
        float32 [rows, width]: weights, and state behind them.
    slots
        int64 [u]: where each of a step's keys lies.
    inverse
        int32 [n]: for every id, which key it is.
    begins, targets
        int64 [bags + 1] and [bags]: where the ids of each bag begin, and where in `out` its sum goes.
    tables
        int64 [tables, 4]: first bag, end of bags, weights of a row, and 1 for means.
    out
        float32.
    """
    assert backend.core is not None
    backend.core.embedding_pool(
        slab=slab, slots=slots, inverse=inverse, begins=begins, targets=targets, tables=tables, out=out
    )


def update_rows(
    rule: int,
    slab: Floats,
    slots: Ints,
    tables: Ints,
    numbers: Floats,
    inverse: Places,
    order: Places,
    sources: Ints,
    scales: Floats | None,
    gradient: Floats,
    scratch: Callable[[int], Floats],
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
        int32 [n]: each table's ids, sorted; empty for rule 0.
    sources, scales
        int64 [n] and float32 [n]: where in `gradient` the gradient of each id's bag begins, and the factor that
        multiplies it; None for 1.
    gradient
        float32.
    scratch
        Gives so many floats to work with.
    """
    assert backend.core is not None
    weights = 0 if rule == 0 else int(((tables[:, 3] - tables[:, 2]) * tables[:, 4]).sum())
    work = scratch(weights + (weights if rule in _ROOT_EACH else min(weights, len(slots))))
    steps, roots = work[:weights], work[weights:]
    rows = backend.core.UpdatedRows(rule=rule, slab=slab, slots=slots, tables=tables, numbers=numbers)
    backend.core.embedding_update(
        rows=rows, inverse=inverse, order=order, sources=sources, scales=scales, gradient=gradient, steps=steps,
        roots=roots,
    )  # fmt: skip
    if rule:
        torch.from_numpy(roots).sqrt_()
        backend.core.embedding_take_steps(rows=rows, steps=steps, roots=roots)
