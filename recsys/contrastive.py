"""The cosine contrastive loss of SimpleX, whose work follows the negatives that have a gradient."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memhier.arguments import check_number

__all__ = ["cosine_contrastive_loss"]

_CHUNK = 2**18
"""Floats of the negatives of some samples that are gathered at a time: a megabyte, which caches hold."""


def cosine_contrastive_loss(
    users: Tensor,
    items: Tensor,
    negatives: Tensor,
    *,
    margin: float,
    weight: float,
    picks: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Return the mean of SimpleX's loss over samples (arXiv 2109.12613, equation 2).

    Of a sample it is ``1 - cos(user, item)``, plus `weight` times the mean of ``max(0, cos(user, negative) - margin)``
    over its negatives. Few negatives lie above the margin; only these take part in the backward pass.

    Parameters
    ----------
    users, items
        Rows of the samples and of the items that belong to them, float [n, dim].
    negatives
        Rows of items, float [m, dim], such as those of :class:`TiledNegatives`.
    margin
        Negatives of a smaller cosine have no loss, from -1 to 1.
    weight
        Of the negatives, 0 or more.
    picks
        int64 [n, k]: the negatives of each sample, as places in `negatives`. None for all of them, which takes a
        product of two matrices instead of a gather.
    known
        int64 [p, 2]: samples and places in `negatives` that belong to them, such as items that a user has. These have
        no loss; the mean is still over all negatives.

    Raises
    ------
    ValueError, TypeError
        For tensors that do not fit together, no sample or no negative, and unfit numbers.

    Examples
    --------
    >>> import torch
    >>> from memhier.recsys import cosine_contrastive_loss
    >>> users, items = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    >>> cosine_contrastive_loss(users, items, torch.tensor([[3.0, 0.0], [0.0, 1.0]]), margin=0.5, weight=2.0).item()
    1.5
    """
    check_number("margin", margin, -1, 1)
    check_number("weight", weight, 0)
    _check(users, items, negatives, picks, known)
    users, items, negatives = (nn.functional.normalize(rows) for rows in (users, items, negatives))
    excess = _excess(users, negatives, picks, known, margin)
    return (1 - (users * items).sum(1)).mean() + weight * excess


def _excess(users: Tensor, negatives: Tensor, picks: Tensor | None, known: Tensor | None, margin: float) -> Tensor:
    """Return the mean of max(0, product - margin) over samples and their negatives, 0 for known ones."""
    found: Tensor = _Excess.apply(users, negatives, picks, known, margin)  # type: ignore[no-untyped-call]
    return found


class _Excess(torch.autograd.Function):
    """Products above a margin, found in one pass; their rows alone make the gradients."""

    @staticmethod
    def forward(
        ctx: Any, users: Tensor, negatives: Tensor, picks: Tensor | None, known: Tensor | None, margin: float
    ) -> Tensor:
        if picks is None:
            products = users @ negatives.T
            samples, places = (products > margin).nonzero(as_tuple=True)
            above, count = products[samples, places], products.numel()
        else:
            samples, places, above = _above(users, negatives, picks, margin)
            count = picks.numel()
        if known is not None:
            wide = len(negatives)
            kept = ~torch.isin(samples * wide + places, known[:, 0] * wide + known[:, 1])
            samples, places, above = samples[kept], places[kept], above[kept]
        ctx.save_for_backward(users, negatives, samples, places)
        ctx.count = count
        return (above - margin).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        users, negatives, samples, places = ctx.saved_tensors
        scale = gradient / ctx.count
        found = [
            torch.zeros_like(rows).index_add_(0, at, others[of]).mul_(scale) if needed else None
            for rows, at, others, of, needed in (
                (users, samples, negatives, places, ctx.needs_input_grad[0]),
                (negatives, places, users, samples, ctx.needs_input_grad[1]),
            )
        ]
        return found[0], found[1], None, None, None


def _above(users: Tensor, negatives: Tensor, picks: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples, places in `negatives` and products of those above the margin, some samples at a time."""
    width, dim = picks.shape[1], negatives.shape[1]
    size = max(1, _CHUNK // (width * dim))
    gathered = negatives.new_empty(size * width, dim)
    found = []
    for start in range(0, len(users), size):
        mine, some = picks[start : start + size], users[start : start + size]
        rows = torch.index_select(negatives, 0, mine.reshape(-1), out=gathered[: mine.numel()])
        products = torch.bmm(rows.view(len(mine), width, dim), some[:, :, None])[:, :, 0]
        samples, columns = (products > margin).nonzero(as_tuple=True)
        found.append((samples + start, mine[samples, columns], products[samples, columns]))
    samples, places, above = (torch.cat(part) for part in zip(*found, strict=True))
    return samples, places, above


def _check(users: Tensor, items: Tensor, negatives: Tensor, picks: Tensor | None, known: Tensor | None) -> None:
    for name, rows in (("users", users), ("items", items), ("negatives", negatives)):
        if rows.dim() != 2 or not rows.is_floating_point():
            raise TypeError(f"{name}: expected floats [n, dim], got {rows.dtype} {list(rows.shape)}")
        if not len(rows) or rows.dtype != users.dtype or rows.shape[1] != users.shape[1]:
            raise ValueError(
                f"{name}: expected {users.dtype} [n, {users.shape[1]}], as users are, with n of 1 or more, got "
                f"{rows.dtype} {list(rows.shape)}"
            )
    if len(items) != len(users):
        raise ValueError(f"items: expected {len(users)} rows, one for each of users, got {len(items)}")
    if picks is not None:
        if picks.dtype != torch.int64 or picks.dim() != 2 or len(picks) != len(users) or not picks.shape[1]:
            raise ValueError(
                f"picks: expected int64 [{len(users)}, k] with k of 1 or more, got {picks.dtype} {list(picks.shape)}"
            )
        _check_numbers("picks", picks, len(negatives), "negatives")
    if known is not None:
        if known.dtype != torch.int64 or known.dim() != 2 or known.shape[1] != 2:
            raise ValueError(f"known: expected int64 [p, 2], got {known.dtype} {list(known.shape)}")
        _check_numbers("known", known[:, 0], len(users), "samples")
        _check_numbers("known", known[:, 1], len(negatives), "negatives")


def _check_numbers(name: str, numbers: Tensor, count: int, of: str) -> None:
    if not len(numbers):
        return
    low, high = (int(end) for end in numbers.aminmax())
    if low < 0 or high >= count:
        raise ValueError(f"{name}: {low if low < 0 else high} is no row of the {count} {of}")
