"""Gradients on their way to rows: looked up, pooled, and on the way back applied to the rows where they lie."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.optimizers import Group
from memhier.recsys.embedding.tables import Rows, Tables

__all__ = ["MODES", "Bags", "apply_gradients", "pool"]

MODES = {"sum": 0, "mean": 1, "max": 2}


@dataclass(slots=True)
class Bags:
    """The bags of one table in a step, feature after feature.

    Attributes
    ----------
    table
        Its number.
    indices
        int64 [n]: for every id which of the table's rows in this step it is.
    offsets
        int64: where bags begin, and where the last one ends if `last`.
    mode
        One of the values of :data:`MODES`.
    weights
        float32 [n], or None.
    padding
        Of `indices` those that are left out; -1 for none.
    features
        How many features share the table: the first bags are the first feature's.
    """

    table: int
    indices: Tensor
    offsets: Tensor
    mode: int
    weights: Tensor | None = None
    padding: int = -1
    last: bool = False
    features: int = 1


Done = Callable[[Rows, list[tuple[int, Tensor]]], None]
"""Takes the rows of a step and the sparse gradients of its tables."""


def pool(tables: Tables, rows: Rows, bags: list[Bags], anchor: Tensor, done: Done) -> Tensor:
    """Look bags up and pool them; on the way back gradients go to `done`.

    Parameters
    ----------
    anchor
        Requires a gradient, so that autograd comes back here.

    Returns
    -------
    Tensor
        float32 [bags of a feature, sum of widths]: table after table, feature after feature.
    """
    samples = [bag.weights for bag in bags]
    output: Tensor = _Pool.apply(anchor, tables, rows, bags, done, *samples)  # type: ignore[no-untyped-call]
    return output


class _Pool(torch.autograd.Function):
    """torch's own kernels on the rows of one step: which rows these are among all changes no bit."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tables: Tables, rows: Rows, bags: list[Bags], done: Done, *samples: Tensor | None
    ) -> Tensor:
        weights = [torch.from_numpy(some) for some in tables.weights(rows)]
        columns, kept = [], []
        for bag in bags:
            output, *others = torch.ops.aten._embedding_bag(
                weights[bag.table], bag.indices, bag.offsets, False, bag.mode, bag.mode != MODES["max"],
                bag.weights, bag.last, bag.padding,
            )  # fmt: skip
            columns += output.chunk(bag.features)
            kept.append(others)
        ctx.rows, ctx.bags, ctx.kept, ctx.done = rows, bags, kept, done
        ctx.shapes = [some.shape for some in weights]
        # Gradients of per-sample weights need the rows that were looked up.
        ctx.looked_up = weights if any(ctx.needs_input_grad[5:]) else None
        return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[tuple[int, Tensor]] = []
        of_samples: list[Tensor | None] = []
        start = 0
        for number, (bag, kept) in enumerate(zip(ctx.bags, ctx.kept, strict=True)):
            count, dim = ctx.shapes[bag.table]
            parts = [gradient[:, start + dim * part : start + dim * (part + 1)] for part in range(bag.features)]
            start += dim * bag.features
            mine = (parts[0] if bag.features == 1 else torch.cat(parts)).contiguous()
            bag_of, sizes, highest = kept
            found.append((bag.table, _backward(mine, bag, bag_of, sizes, highest, count)))
            of_samples.append(None)
            if ctx.needs_input_grad[5 + number]:
                of_samples[-1] = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                    mine, ctx.looked_up[bag.table], bag.indices, bag.offsets, bag_of, bag.mode, bag.padding
                )
        rows, ctx.rows = ctx.rows, None
        ctx.done(rows, found)
        return None, None, None, None, None, *of_samples


def _backward(gradient: Tensor, bag: Bags, bag_of: Tensor, sizes: Tensor, highest: Tensor, count: int) -> Tensor:
    """Return the sparse gradient of a table's rows in this step, not coalesced."""
    sparse = bag.mode != MODES["max"]
    found: Tensor = torch.ops.aten._embedding_bag_backward(
        gradient, bag.indices, bag.offsets, bag_of, sizes, highest, count, False, bag.mode, sparse,
        bag.weights, bag.padding,
    )  # fmt: skip
    if sparse:
        return found
    indices = torch.arange(count).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, found, found.shape, is_coalesced=True, check_invariants=False)


def apply_gradients(tables: Tables, rows: Rows, gradients: list[tuple[int, Tensor]], group: Group) -> None:
    """Update the rows of a step where they lie; `gradients` are sparse, [u, dim] of each table's rows in this step."""
    if rows.loan is None:
        raise RuntimeError("the rows of this step have gone back: backward runs only once through a lookup")
    of_table: dict[int, Tensor] = {}
    for table, gradient in gradients:
        of_table[table] = of_table[table] + gradient if table in of_table else gradient
    slots = rows.loan.slots
    with rows.loan.changing() as slab:
        for table, gradient in of_table.items():
            mine = slots[rows.starts[table] : rows.starts[table + 1]]
            tables.record.steps[table] += 1
            dim, width = tables.specs[table].dim, tables.widths[table]
            held = torch.from_numpy(np.take(slab, mine, axis=0, mode="clip"))
            weights, state = held[:, :dim].contiguous(), held[:, dim:width].contiguous()
            tables.optimizer.update(weights, state, gradient, group, tables.record.steps[table])
            held[:, :dim], held[:, dim:width] = weights, state
            slab[mine] = held.numpy()
