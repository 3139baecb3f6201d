"""Bags of ids: they are looked up and pooled, and their gradients are applied to the rows in DRAM.

There are two ways, with the same bits: the compiled steps, for all tables at once, and torch's own operators on copies
of the step's rows, for everything else. Other rows of a table change no bit, as long as the rows keep their order.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memhier import backend
from memhier.recsys.embedding.device.crossing import Crossing, refuse_graph
from memhier.recsys.embedding.device.link import Arrival
from memhier.recsys.embedding.optimizers import Group
from memhier.recsys.embedding.tables import Floats, Ints, StepRows, Tables
from memhier.recsys.embedding.torch_internals import (
    embedding_bag,
    embedding_bag_backward,
    sample_weights_backward,
    sparse_rows,
)

__all__ = [
    "EVALUATED", "MODES", "ROWS", "Bags", "ComingRows", "Gradient", "Sparse", "StepGradient", "apply_gradient",
    "apply_sparse", "check_first_pass", "pool", "pool_weights",
]  # fmt: skip

Sparse = list[tuple[int, Tensor]]
"""The gradients of a step's rows by table, [rows of the table, dim], not coalesced."""

MODES = {"sum": 0, "mean": 1, "max": 2}
"""The modes of `torch.nn.EmbeddingBag`, and their numbers there."""
Shapes = tuple[tuple[int, int, int], ...]
"""Width, number of features and mode of each table of a step."""
ROWS = 3
"""The mode of bags of one id each whose rows are returned as they are, those of the padding as well."""


@dataclass(slots=True)
class Bags:
    """The bags of one table in a step, feature after feature.

    Attributes
    ----------
    table
        Its number.
    indices
        int64 [n]: the ids; once rows are known, the number of every id among the table's rows in this step.
    offsets
        int64: the beginnings of bags, and the end of the last one if `last`.
    mode
        One of the values of :data:`MODES`, or :data:`ROWS`.
    weights
        float32 [n], or None.
    padding
        The index that is left out, of gradients alone with :data:`ROWS`; -1 for none.
    features
        The number of features that share the table; the first bags are the first feature's.
    length
        The number of ids that every bag is known to have; 0 if that is not known.
    """

    table: int
    indices: Tensor
    offsets: Tensor
    mode: int
    weights: Tensor | None = None
    padding: int = -1
    last: bool = False
    features: int = 1
    length: int = 0

    @property
    def lengths(self) -> Tensor:
        """The number of ids of each bag."""
        ends = self.offsets if self.last else torch.cat([self.offsets, torch.tensor([len(self.indices)])])
        return torch.diff(ends)


class PoolingLayout:
    """The places of bags and of their sums, for the compiled steps.

    All features have the same number of bags.

    Attributes
    ----------
    shape
        Shape of the output: the bags of a feature, and the sum of all widths.
    begins, targets
        int64 [bags + 1] and [bags]: the first id of each bag, and the place of its sum in the output.
    tables
        int64 [tables, 4]: first bag, end of bags, weights of a row, and the mode.
    scales
        float32 [n]: the factor of each id's gradient; None for 1.
    """

    def __init__(self, samples: int, shapes: Shapes, lengths: Ints) -> None:
        self._shapes = shapes
        self.shape: tuple[int, int] = samples, sum(width * features for width, features, _ in shapes)
        self.tables: Ints
        self.targets: Ints
        self.targets, self.tables = _targets(samples, shapes, self.shape[1])
        self.scales: Floats | None = None
        self._lengths = lengths
        self.begins: Ints = np.concatenate(([0], np.cumsum(lengths)))
        self._sources: tuple[int, Ints] = -1, lengths
        # The mean of one is its sum.
        if any(mode == MODES["mean"] for _, _, mode in shapes) and lengths.max(initial=0) > 1:
            means = np.repeat(self.tables[:, 3], self.tables[:, 1] - self.tables[:, 0]) == MODES["mean"]
            scales = np.float32(1) / np.where(means, np.maximum(lengths, 1), 1).astype(np.float32)
            self.scales = np.repeat(scales, lengths)

    def sources(self, stride: int) -> Ints:
        """Return the place of each id's gradient in a gradient whose rows are so many floats apart."""
        of, found = self._sources
        if of != stride:
            found = np.repeat(_targets(self.shape[0], self._shapes, stride)[0], self._lengths)
            self._sources = stride, found
        return found


def layout_of(bags: list[Bags], widths: list[int]) -> PoolingLayout:
    """Return the layout of a step; steps whose bags have the same known lengths share one."""
    samples = (len(bags[0].offsets) - bags[0].last) // bags[0].features
    shapes = tuple((width, bag.features, bag.mode) for width, bag in zip(widths, bags, strict=True))
    if all(bag.length for bag in bags):
        return _regular_layout(samples, shapes, tuple(bag.length for bag in bags))
    return PoolingLayout(samples, shapes, np.concatenate([bag.lengths.numpy() for bag in bags]))


@functools.lru_cache(4)
def _regular_layout(samples: int, shapes: Shapes, lengths: tuple[int, ...]) -> PoolingLayout:
    return PoolingLayout(samples, shapes, np.repeat(lengths, [features * samples for _, features, _ in shapes]))


@functools.lru_cache(4)
def _targets(samples: int, shapes: Shapes, stride: int) -> tuple[Ints, Ints]:
    columns = np.concatenate([[width] * features for width, features, _ in shapes])
    begins = np.cumsum(columns) - columns
    targets = (begins[:, None] + np.arange(samples) * stride).reshape(-1)
    ends = np.cumsum([features * samples for _, features, _ in shapes])
    first = np.concatenate(([0], ends[:-1]))
    tables = np.stack([first, ends, [shape[0] for shape in shapes], [shape[2] for shape in shapes]], 1)
    return targets, tables.astype(np.int64)


class StepGradient:
    """The gradient of a step: of all bags, and of single rows on demand.

    Attributes
    ----------
    layout
        The places of the bags, for the compiled steps; None if torch's operators pooled them.
    """

    def __init__(
        self, rows: StepRows, bags: list[Bags], widths: list[int], layout: PoolingLayout | None, kept: list[Any] | None
    ) -> None:
        self.rows = rows
        self.layout = layout
        self._dense: Tensor | None = None
        self._arrival: Arrival | None = None
        self._bags = bags
        self._widths = widths
        self._kept = kept  # torch's operators want it back; for plain sums and means the lengths of bags are enough

    def take(self, dense: Tensor, crossing: Crossing | None) -> None:
        """Take the gradient of the output, which may still be on its way from a device."""
        self._dense, self._arrival = dense, None if crossing is None else crossing.arrival

    @property
    def is_coming(self) -> bool:
        """Whether the gradient of the output is on its way."""
        return self._arrival is not None and self._arrival.is_coming

    @property
    def dense(self) -> Tensor:
        """The gradient of the output, once it is there."""
        assert self._dense is not None
        if self._arrival is not None:
            self._arrival.wait()
        return self._dense

    def of_bags(self, number: int) -> Tensor:
        """Return the gradient of the bags of one table, feature after feature."""
        dense = self.dense
        start = sum(width * bag.features for width, bag in zip(self._widths[:number], self._bags, strict=False))
        width = self._widths[number]
        parts = [
            dense[:, start + width * part : start + width * (part + 1)] for part in range(self._bags[number].features)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    @property
    def trained(self) -> NDArray[np.bool_] | None:
        """Which ids have a gradient, bool [n]; None for all. Rows that are returned as they are come from one table."""
        bag = self._bags[0]
        return self.rows.places(bag.table) != bag.padding if bag.mode == ROWS and bag.padding >= 0 else None

    def sparse(self) -> Sparse:
        """Return the gradients of rows."""
        found = []
        nothing = torch.empty(0, dtype=torch.int64)
        for number, bag in enumerate(self._bags):
            rows = self.rows.of_table(bag.table)
            bag.indices = torch.from_numpy(self.rows.places(bag.table))
            if bag.mode == ROWS:
                found.append((bag.table, _of_rows(self.of_bags(number), bag, rows.stop - rows.start)))
                continue
            kept = (nothing, bag.lengths, nothing) if self._kept is None else self._kept[number]
            is_sparse = bag.mode != MODES["max"]
            gradient: Tensor = embedding_bag_backward(
                self.of_bags(number), bag.indices, bag.offsets, *kept, rows.stop - rows.start, False, bag.mode,
                is_sparse, bag.weights, bag.padding,
            )  # fmt: skip
            if not is_sparse:
                gradient = sparse_rows(torch.arange(len(gradient)), gradient, gradient.shape, is_coalesced=True)
            found.append((bag.table, gradient))
        return found

    def of_samples(self, number: int, looked_up: Tensor) -> Tensor:
        """Return the gradient of per-sample weights."""
        assert self._kept is not None
        bag = self._bags[number]
        found: Tensor = sample_weights_backward(
            self.of_bags(number), looked_up, bag.indices, bag.offsets, self._kept[number][0], bag.mode, bag.padding
        )
        return found


def _of_rows(gradient: Tensor, bag: Bags, count: int) -> Tensor:
    """Return the gradient of rows that were returned as they are."""
    places = bag.indices
    if bag.padding >= 0:
        trained = places != bag.padding
        places, gradient = places[trained], gradient[trained]
    return sparse_rows(places, gradient, (count, gradient.shape[1]))


class ComingRows:
    """Gradients of rows that are made once those of the output have come from a device."""

    def __init__(self, arrival: Arrival, make: Callable[[], Sparse]) -> None:
        self._arrival = arrival
        self._make = make

    @property
    def is_coming(self) -> bool:
        """Whether the gradient of the output is on its way."""
        return self._arrival.is_coming

    def sparse(self) -> Sparse:
        """Return the gradients of rows."""
        self._arrival.wait()
        return self._make()


Gradient = StepGradient | ComingRows | Sparse
"""The gradient of a look-up."""
Done = Callable[[StepGradient], None]

EVALUATED = (
    "backward pass through a look-up that was made in eval(), which trains no row: call train() on the tables first; "
    "requires_grad_(False) on them to keep them as they are; or torch.autograd.grad(loss, output) for the gradient of "
    "their output"
)
"""The message of a backward pass through such a look-up."""


def pool(
    tables: Tables, rows: StepRows, bags: list[Bags], anchor: Tensor, done: Done | None, crossing: Crossing | None
) -> Tensor:
    """Look bags up and pool them; on the way back the gradient goes to `done`.

    Parameters
    ----------
    anchor
        Autograd comes back here if it requires a gradient.
    done
        None if rows get no gradient; then only weights of samples may have one.
    crossing
        Brings the output to a device; None leaves it on the CPU.

    Returns
    -------
    Tensor
        float32 [bags of a feature, sum of widths]: table after table, feature after feature.
    """
    samples = [bag.weights for bag in bags]
    output: Tensor = _Pool.apply(anchor, tables, rows, bags, done, crossing, *samples)  # type: ignore[no-untyped-call]
    return output if crossing is None else crossing.over(output)[0]


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tables: Tables,
        rows: StepRows,
        bags: list[Bags],
        done: Done | None,
        crossing: Crossing | None,
        *samples: Tensor | None,
    ) -> Tensor:
        plain = all(
            bag.mode == ROWS or (bag.mode != MODES["max"] and bag.weights is None and bag.padding < 0) for bag in bags
        )
        ctx.done, ctx.crossing, ctx.looked_up, ctx.evaluated = done, crossing, None, done is None
        if plain and backend.core is not None and rows.loan is not None:
            widths = [tables.specs[bag.table].dim for bag in bags]
            layout = layout_of(bags, widths)
            output = torch.empty(layout.shape) if crossing is None else crossing.empty(layout.shape)
            of = tables.groups.of[[bag.table for bag in bags]]
            for group, slab in enumerate(rows.loan.slabs):
                mine = layout.tables if len(rows.loan.slabs) == 1 else layout.tables[of == group]
                backend.core.embedding_pool(
                    slab=slab, slots=rows.loan.slots, inverse=rows.inverse, begins=layout.begins,
                    targets=layout.targets, tables=mine, out=output.numpy(),
                )  # fmt: skip
            ctx.gradient = StepGradient(rows, bags, widths, layout, None)
            return output
        weights = [torch.from_numpy(some) for some in tables.weights(rows)]
        output, ctx.gradient = pool_weights(weights, rows, bags)
        # Gradients of per-sample weights need the rows that were looked up.
        if any(ctx.needs_input_grad[6:]):
            ctx.looked_up = [weights[bag.table] for bag in bags]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        step, ctx.gradient = ctx.gradient, None
        done, ctx.done = ctx.done, None
        if ctx.needs_input_grad[0] and ctx.evaluated:
            raise RuntimeError(EVALUATED)
        check_first_pass(step, gradient)
        step.take(gradient, ctx.crossing)
        of_samples = [
            step.of_samples(number, ctx.looked_up[number]) if needed else None
            for number, needed in enumerate(ctx.needs_input_grad[6:])
        ]
        if done is not None:
            done(step)
        return None, None, None, None, None, None, *of_samples


def pool_weights(weights: list[Tensor], rows: StepRows, bags: list[Bags]) -> tuple[Tensor, StepGradient]:
    """Pool copies of a step's rows by torch's operators.

    Parameters
    ----------
    weights
        float32 [rows of the table, dim] of each table.
    """
    columns: list[Tensor] = []
    kept: list[tuple[Tensor, ...]] = []
    for bag in bags:
        bag.indices = torch.from_numpy(rows.places(bag.table))
        if bag.mode == ROWS:
            columns += weights[bag.table][bag.indices].chunk(bag.features)
            kept.append(())
            continue
        output, bag_of, sizes, highest = embedding_bag(
            weights[bag.table], bag.indices, bag.offsets, False, bag.mode, bag.mode != MODES["max"],
            bag.weights, bag.last, bag.padding,
        )  # fmt: skip
        columns += output.chunk(bag.features)
        kept.append((bag_of, sizes, highest))
    widths = [weights[bag.table].shape[1] for bag in bags]
    output = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
    return output, StepGradient(rows, bags, widths, None, kept)


def check_first_pass(step: Any, gradient: Tensor) -> None:
    """Refuse a second backward pass through a look-up, whose `step` is None then, and one that makes a graph."""
    if step is None:
        raise RuntimeError(
            "the rows of this step have gone back: backward runs only once through a look-up; add the losses up, or "
            "look up again"
        )
    refuse_graph(gradient)


def apply_gradient(tables: Tables, step: StepGradient, groups: Sequence[Group]) -> None:
    """Update the rows of a step in place, by the compiled steps if they know the optimizer."""
    layout, rows, counts = step.layout, step.rows, tables.record.steps
    rules = tables.rules.kernels(groups, counts)
    if layout is None or rules is None:
        apply_sparse(tables, rows, step.sparse(), groups)
        return
    assert backend.core is not None
    gradient, stride = _in_place(step.dense)
    sources = layout.sources(stride)
    if (trained := step.trained) is not None:
        sources, padded = sources[trained], rows
        rows = tables.distinct([padded.keys[padded.inverse[trained]]])
        padded.lend(rows)
    assert rows.loan is not None
    # First id, end of ids, first key, end of keys and weights of a row of each table.
    parts = np.zeros((len(rows.ends), 5), np.int64)
    parts[1:, 0], parts[:, 1], parts[:, 2], parts[:, 3] = rows.ends[:-1], rows.ends, rows.starts[:-1], rows.starts[1:]
    parts[:, 4] = [spec.dim for spec in tables.specs]
    rule, numbers = rules[0][0], np.array([numbers for _, numbers in rules], np.float32)
    # Plain descent needs no sums, and only Adagrad and Adam take a root for each weight.
    counted = (parts[:, 3] - parts[:, 2]) * (parts[:, 4] if rule else 0)
    of_groups: list[Any] = tables.groups.tables if len(tables.groups) > 1 else [slice(None)]
    weights = [int(counted[mine].sum()) for mine in of_groups]
    roots = [some if rule in (1, 3) else min(some, len(rows.loan.slots)) for some in weights]
    with tables.changing(rows, max(map(sum, zip(weights, roots, strict=True)))) as (slabs, work):
        for group, (slab, mine) in enumerate(zip(slabs, of_groups, strict=True)):
            updated = backend.core.UpdatedRows(
                rule=rule, slab=slab, slots=rows.loan.slots, tables=parts[mine], numbers=numbers[mine]
            )
            steps, squares = np.split(work[: weights[group] + roots[group]], [weights[group]])
            backend.core.embedding_update(
                rows=updated, inverse=rows.inverse, order=rows.order, sources=sources, scales=layout.scales,
                gradient=gradient, steps=steps, roots=squares,
            )  # fmt: skip
            if rule:
                torch.from_numpy(squares).sqrt_()
                backend.core.embedding_take_steps(rows=updated, steps=steps, roots=squares)
        counts[:] = [count + 1 for count in counts]


def _in_place(gradient: Tensor) -> tuple[Floats, int]:
    """Return a gradient's floats and the distance of its rows in them; part of a wider gradient is not copied."""
    samples, total = gradient.shape
    if gradient.stride(1) != 1 or gradient.stride(0) < total:
        gradient = gradient.contiguous()
    stride = gradient.stride(0) if samples > 1 else total
    floats = gradient.as_strided((max(0, (samples - 1) * stride + total),), (1,))
    return floats.numpy(), stride


def apply_sparse(
    tables: Tables, rows: StepRows, gradients: Sparse, groups: Sequence[Group], late: list[int] | None = None
) -> None:
    """Update the rows of a step in place, by torch's operators.

    Gradients that belong to a step counted before come with its numbers of updates by table, `late`.
    """
    assert rows.loan is not None
    slots = rows.loan.slots
    with tables.changing(rows) as (slabs, _):
        for table, gradient in gradients:
            mine, slab = slots[rows.of_table(table)], slabs[tables.groups.of[table]]
            tables.record.steps[table] += late is None
            step = tables.record.steps[table] if late is None else late[table]
            dim, width = tables.specs[table].dim, tables.widths[table]
            held = torch.from_numpy(np.take(slab, mine, axis=0, mode="clip"))
            weights, state = held[:, :dim].contiguous(), held[:, dim:width].contiguous()
            tables.rules.of[table].update(weights, state, gradient, tables.rules.group(groups, table), step)
            held[:, :dim], held[:, dim:width] = weights, state
            slab[mine] = held.numpy()
