"""The members of torch without a public name that the tables use, and sparse tensors of rows.

They are plain names for torch's own functions, so a call costs nothing more.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable

__all__ = [
    "current_pass", "embedding_bag", "embedding_bag_backward", "indices_of", "not_compiled", "row_sums",
    "sample_weights_backward", "sparse_rows", "values_of", "when_pass_ends",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that runs on this thread; -1 outside of any."""
when_pass_ends: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Has a function called at the end of the backward pass that runs on this thread."""

indices_of: Callable[[Tensor], Tensor] = Tensor._indices
"""Returns the indices of a sparse tensor that need not be coalesced, [1, n]."""
values_of: Callable[[Tensor], Tensor] = Tensor._values
"""Returns its values, [n, dim]; a change of them changes the tensor."""

embedding_bag: Callable[..., Any] = torch.ops.aten._embedding_bag
embedding_bag_backward: Callable[..., Any] = torch.ops.aten._embedding_bag_backward
sample_weights_backward: Callable[..., Any] = torch.ops.aten._embedding_bag_per_sample_weights_backward
"""The operators of `torch.nn.functional.embedding_bag`."""


def sparse_rows(rows: Tensor, values: Tensor, shape: tuple[int, ...], *, is_coalesced: bool | None = None) -> Tensor:
    """Return a sparse tensor with `values`, [n, dim], in `rows`, int64 [n]; torch does not check it."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=is_coalesced, check_invariants=False)


def row_sums(rows: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a coalesced sparse tensor, for which repeats of a row were added in their order."""
    distinct, inverse = torch.unique(rows, return_inverse=True)
    sums = torch.zeros(len(distinct), values.shape[1]).index_add_(0, inverse, values)
    return sparse_rows(distinct, sums, shape, is_coalesced=True)


def not_compiled(forward: Callable[P, T]) -> Callable[P, T]:
    """Let `torch.compile` leave a method as it is and compile the code around it: the method loads and evicts rows."""
    # The public name would load the whole compiler at import.
    disabled: Callable[P, T] = _disable_dynamo(forward)
    return disabled
