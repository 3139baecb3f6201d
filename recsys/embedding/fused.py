"""Gradients on their way to rows: looked up, pooled, and on the way back applied to the rows where they lie.

Two ways with the same bits: the compiled steps, for all tables at once; and torch's own operators on copies of the
step's rows, for what those do not know. Which other rows a table has changes no bit, as long as these keep their order.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.bags import MODES, Bags, Layout, lay_out
from memhier.recsys.embedding.kernels import is_compiled, pool_rows, update_rows
from memhier.recsys.embedding.optimizers import Group
from memhier.recsys.embedding.tables import Floats, Rows, Tables

__all__ = ["EVALUATED", "Sparse", "StepGradient", "apply_gradient", "apply_sparse", "check_first_pass", "pool"]

Sparse = list[tuple[int, Tensor]]
"""Of some tables the gradient of a step's rows, [rows of the table, dim], not coalesced."""


class StepGradient:
    """The gradient of a step: of all bags, and of single rows when asked for.

    Attributes
    ----------
    layout
        Of the bags, for the compiled steps; None where they cannot do it.
    """

    def __init__(
        self, rows: Rows, bags: list[Bags], widths: list[int], layout: Layout | None, kept: list[Any] | None
    ) -> None:
        self.rows = rows
        self.layout = layout
        self.dense: Tensor | None = None
        self._bags = bags
        self._widths = widths
        # What torch's own operators want to have back; plain sums and means need no more than the lengths of bags.
        self._kept = kept

    def of_bags(self, number: int) -> Tensor:
        """Return the gradient of the bags of one table, feature after feature."""
        assert self.dense is not None
        start = sum(width * bag.features for width, bag in zip(self._widths[:number], self._bags, strict=False))
        width = self._widths[number]
        parts = [
            self.dense[:, start + width * part : start + width * (part + 1)]
            for part in range(self._bags[number].features)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def sparse(self) -> Sparse:
        """Return the gradients of rows."""
        found = []
        for number, bag in enumerate(self._bags):
            count = int(np.diff(self.rows.starts)[bag.table])
            bag.indices = torch.from_numpy(self.rows.places(bag.table))
            nothing = torch.empty(0, dtype=torch.int64)
            kept = (nothing, bag.lengths, nothing) if self._kept is None else self._kept[number]
            found.append((bag.table, _backward(self.of_bags(number), bag, kept, count)))
        return found

    def of_samples(self, number: int, looked_up: Tensor) -> Tensor:
        """Return the gradient of per-sample weights."""
        assert self._kept is not None
        bag = self._bags[number]
        found: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            self.of_bags(number), looked_up, bag.indices, bag.offsets, self._kept[number][0], bag.mode, bag.padding
        )
        return found


Done = Callable[[StepGradient], None]

EVALUATED = (
    "backward pass through a look-up that was made in eval(), which trains no row: call train() on the tables first; "
    "requires_grad_(False) on them where they are to stay as they are; or torch.autograd.grad(loss, output) for the "
    "gradient of what they returned"
)
"""What a backward pass through such a look-up says."""


def pool(tables: Tables, rows: Rows, bags: list[Bags], anchor: Tensor, done: Done | None) -> Tensor:
    """Look bags up and pool them; on the way back the gradient goes to `done`.

    Parameters
    ----------
    anchor
        Where it requires a gradient, autograd comes back here.
    done
        None where rows are to have no gradient: only weights of samples may have one then.

    Returns
    -------
    Tensor
        float32 [bags of a feature, sum of widths]: table after table, feature after feature.
    """
    samples = [bag.weights for bag in bags]
    output: Tensor = _Pool.apply(anchor, tables, rows, bags, done, *samples)  # type: ignore[no-untyped-call]
    return output


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tables: Tables,
        rows: Rows,
        bags: list[Bags],
        done: Done | None,
        *samples: Tensor | None,
    ) -> Tensor:
        widths = [tables.specs[bag.table].dim for bag in bags]
        plain = all(bag.mode != MODES["max"] and bag.weights is None and bag.padding < 0 for bag in bags)
        ctx.done, ctx.looked_up, ctx.evaluated = done, None, done is None
        if plain and is_compiled() and rows.loan is not None:
            layout = lay_out(bags, widths)
            output = torch.empty(layout.shape)
            slab, slots = rows.loan.rows, rows.loan.slots
            pool_rows(slab, slots, rows.inverse, layout.begins, layout.targets, layout.tables, output.numpy())
            ctx.gradient = StepGradient(rows, bags, widths, layout, None)
            return output
        weights = [torch.from_numpy(some) for some in tables.weights(rows)]
        columns, kept = [], []
        for bag in bags:
            bag.indices = torch.from_numpy(rows.places(bag.table))
            output, bag_of, sizes, highest = torch.ops.aten._embedding_bag(
                weights[bag.table], bag.indices, bag.offsets, False, bag.mode, bag.mode != MODES["max"],
                bag.weights, bag.last, bag.padding,
            )  # fmt: skip
            columns += output.chunk(bag.features)
            kept.append((bag_of, sizes, highest))
        ctx.gradient = StepGradient(rows, bags, widths, None, kept)
        # Gradients of per-sample weights need the rows that were looked up.
        if any(ctx.needs_input_grad[5:]):
            ctx.looked_up = [weights[bag.table] for bag in bags]
        return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        step, ctx.gradient = ctx.gradient, None
        done, ctx.done = ctx.done, None
        if ctx.needs_input_grad[0] and ctx.evaluated:
            raise RuntimeError(EVALUATED)
        check_first_pass(step, gradient)
        step.dense = gradient
        of_samples = [
            step.of_samples(number, ctx.looked_up[number]) if needed else None
            for number, needed in enumerate(ctx.needs_input_grad[5:])
        ]
        if done is not None:
            done(step)
        return None, None, None, None, None, *of_samples


def check_first_pass(step: Any, gradient: Tensor) -> None:
    """Refuse a second backward pass through a look-up, whose `step` is None then, and one that makes a graph."""
    if step is None:
        raise RuntimeError(
            "the rows of this step have gone back: backward runs only once through a look-up; add the losses up, or "
            "look up again"
        )
    if gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) through a look-up: there are no gradients of gradients of rows; take "
            "torch.autograd.grad(..., create_graph=True) with respect to what the tables returned"
        )


def _backward(gradient: Tensor, bag: Bags, kept: Any, count: int) -> Tensor:
    """Return the sparse gradient of a table's rows in this step, not coalesced."""
    sparse = bag.mode != MODES["max"]
    found: Tensor = torch.ops.aten._embedding_bag_backward(
        gradient, bag.indices, bag.offsets, *kept, count, False, bag.mode, sparse, bag.weights, bag.padding
    )  # fmt: skip
    if sparse:
        return found
    indices = torch.arange(count).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, found, found.shape, is_coalesced=True, check_invariants=False)


def apply_gradient(tables: Tables, step: StepGradient, group: Group) -> None:
    """Update the rows of a step where they lie."""
    layout, rows = step.layout, step.rows
    steps = tables.record.steps
    kernels = None if layout is None else [tables.optimizer.kernel(group, count + 1) for count in steps]
    if layout is None or kernels is None or None in kernels:
        apply_sparse(tables, rows, step.sparse(), group)
        return
    assert step.dense is not None
    assert rows.loan is not None
    gradient, stride = _in_place(step.dense)
    first = np.concatenate(([0], rows.ends[:-1]))
    dims = np.array([spec.dim for spec in tables.specs])
    parts = np.stack([first, rows.ends, rows.starts[:-1], rows.starts[1:], dims], axis=1)
    numbers = np.array([kernel[1] for kernel in kernels if kernel is not None], np.float32)
    rule = next(kernel[0] for kernel in kernels if kernel is not None)
    with tables.changing(rows) as slab:
        update_rows(
            rule, slab, rows.loan.slots, parts, numbers, rows.inverse, rows.order, layout.sources(stride),
            layout.scales, gradient, tables.scratch,
        )  # fmt: skip
        steps[:] = [count + 1 for count in steps]


def _in_place(gradient: Tensor) -> tuple[Floats, int]:
    """Return a gradient's floats, and how many its rows are apart: without a copy where it is part of a wider one."""
    samples, total = gradient.shape
    if gradient.stride(1) != 1 or gradient.stride(0) < total:
        gradient = gradient.contiguous()
    stride = gradient.stride(0) if samples > 1 else total
    floats = gradient.as_strided((max(0, (samples - 1) * stride + total),), (1,))
    return floats.numpy(), stride


def apply_sparse(tables: Tables, rows: Rows, gradients: Sparse, group: Group, late: list[int] | None = None) -> None:
    """Update the rows of a step where they lie, by torch's operators.

    `late` has the numbers of updates of the tables as of a step that was counted, of which these gradients are a part.
    """
    assert rows.loan is not None
    slots = rows.loan.slots
    with tables.changing(rows) as slab:
        for table, gradient in gradients:
            mine = slots[rows.of_table(table)]
            tables.record.steps[table] += late is None
            step = tables.record.steps[table] if late is None else late[table]
            dim, width = tables.specs[table].dim, tables.widths[table]
            held = torch.from_numpy(np.take(slab, mine, axis=0, mode="clip"))
            weights, state = held[:, :dim].contiguous(), held[:, dim:width].contiguous()
            tables.optimizer.update(weights, state, gradient, group, step)
            held[:, :dim], held[:, dim:width] = weights, state
            slab[mine] = held.numpy()
