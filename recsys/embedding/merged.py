"""Gradients of several look-ups as those of one step: added up as torch adds them, in parts that fit a call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.fused import Sparse, StepGradient
from memhier.recsys.embedding.optimizers import adds_in_turn
from memhier.recsys.embedding.tables import Rows, Tables

__all__ = ["Pending", "merged_gradients", "parts_of"]


@dataclass(frozen=True, slots=True)
class Pending:
    """The gradient of a look-up that is not applied yet; `graph_pass` numbers the backward pass in which it came."""

    rows: Rows
    gradient: StepGradient | Sparse
    graph_pass: int

    def sparse(self) -> Sparse:
        """Return the gradient of rows."""
        return self.gradient.sparse() if isinstance(self.gradient, StepGradient) else self.gradient


def merged_gradients(tables: Tables, pending: Sequence[Pending]) -> tuple[Rows, Sparse]:
    """Return the rows of several look-ups, which are not lent, and their gradients; those of one as they are."""
    if len(pending) == 1:
        return pending[0].rows, pending[0].sparse()
    held = [
        np.concatenate([one.rows.keys[one.rows.of_table(table)] for one in pending]) - tables.bases[table]
        for table in range(len(tables.specs))
    ]
    together = tables.distinct([*held])
    # torch adds up the look-ups of a pass, and then the sum to that of the passes that ended before.
    passes: dict[int, dict[int, Tensor]] = {}
    for one in pending:
        sums = passes[one.graph_pass] = passes.pop(one.graph_pass, {})
        for table, gradient in one.sparse():
            # In the order of rows, as torch adds them up by; a tensor as long as the table may be none at all.
            of_all = together.keys[together.of_table(table)]
            places = torch.from_numpy(np.searchsorted(of_all, one.rows.keys[one.rows.of_table(table)]))
            shape = (len(of_all), tables.specs[table].dim)
            whole = _sparse(places[gradient._indices()[0]], gradient._values(), shape)
            sums[table] = sums[table] + whole if table in sums else whole
    total: dict[int, Tensor] = {}
    for sums in passes.values():
        for table, whole in sums.items():
            total[table] = total[table] + whole if table in total else whole
    return together, [*total.items()]


def parts_of(tables: Tables, rows: Rows, gradients: Sparse) -> list[tuple[Rows, Sparse]]:
    """Return rows and gradients in parts that are no more rows than a call takes."""
    most = tables.call_rows
    if len(rows.keys) <= most:
        return [(rows, gradients)]
    if not adds_in_turn(tables.optimizer):
        # The order of the sums must not depend on the parts.
        gradients = [(table, gradient.coalesce()) for table, gradient in gradients]
    found = []
    nothing = np.empty(0, np.int32)
    for begin in range(0, len(rows.keys), most):
        keys = rows.keys[begin : begin + most].copy()
        starts = np.clip(rows.starts - begin, 0, len(keys))
        part = Rows(keys, starts, np.empty(0, np.int64), nothing, nothing)
        mine = []
        for table, gradient in gradients:
            count = int(starts[table + 1] - starts[table])
            first = int(begin + starts[table] - rows.starts[table])
            places = gradient._indices()[0]
            inside = (places >= first) & (places < first + count)
            shape = (count, gradient.shape[1])
            mine.append((table, _sparse(places[inside] - first, gradient._values()[inside], shape)))
        found.append((part, mine))
    return found


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, shape, check_invariants=False)
