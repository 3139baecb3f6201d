"""Sparse optimizers that keep their state beside each row.

An update uses torch's own operations on the rows of one step, in the order of `torch.optim`: SGD, Adagrad and Adam give
the bits of `torch.optim.SGD`, `Adagrad` and `SparseAdam` on a table in memory. torch has no sparse form of momentum,
weight decay and the row-wise optimizers; a step applies these to the rows that it touches.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from memhier.recsys.embedding.torch_internals import indices_of, sparse_rows, values_of

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Group",
    "Kernel",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "SparseOptimizer",
    "adds_in_turn",
    "check_group",
]

Group = dict[str, Any]
Kernel = tuple[int, tuple[float, float, float, float]]
"""The number of a rule in `embedding.cpp`; rate, eps, and 1 - beta for each beta."""


class SparseOptimizer(Protocol):
    """Hyperparameters, and the update of one table's rows."""

    @property
    def lr(self) -> float:
        """The learning rate to begin with."""

    def state_width(self, dim: int) -> int:
        """Return the number of float32 of state of a row of `dim` weights."""

    def first_state(self) -> float:
        """Return the value of all state of an untrained row."""

    def kernel(self, group: Group, step: int) -> Kernel | None:
        """Return the rule of the compiled core that does the same, and its numbers; None if it has none."""

    def update(self, weights: Tensor, state: Tensor, gradient: Tensor, group: Group, step: int) -> None:
        """Change rows in place.

        Parameters
        ----------
        weights, state
            float32 [u, dim] and [u, state_width]: the rows of one table that the step touched.
        gradient
            Sparse [u, dim], not coalesced.
        group
            The hyperparameters as they are now.
        step
            The number of updates of this table, this one included.
        """


def _check(name: str, value: float, low: float = 0.0, high: float = math.inf) -> None:
    if not low <= value < high:
        raise ValueError(f"{name}={value!r}: expected at least {low:g}" + (f", below {high:g}" if high < 1e9 else ""))


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent; without momentum and weight decay equal to `torch.optim.SGD` on sparse gradients.

    Parameters
    ----------
    lr
        Learning rate, 0 or more.
    momentum
        Share of the last step that the next one repeats, from 0 to below 1. It costs a float for each weight.
    weight_decay
        Multiple of the weights that is added to their gradient, 0 or more.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import SGD, EmbeddingBag
    >>> with EmbeddingBag(10, 4, optimizer=SGD(lr=0.5), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     before = bag.weights([7])
    ...     bag(torch.tensor([[7]])).sum().backward()
    ...     (bag.weights([7]) - before).round(decimals=3).tolist()
    [[-0.5, -0.5, -0.5, -0.5]]
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr)
        _check("momentum", self.momentum, 0, 1)
        _check("weight_decay", self.weight_decay)

    def state_width(self, dim: int) -> int:
        """Return the floats of state of a row: its momentum, if there is any."""
        return dim if self.momentum else 0

    def first_state(self) -> float:
        """Return 0."""
        return 0.0

    def kernel(self, group: Group, step: int) -> Kernel | None:
        """Return the compiled rule; see :class:`SparseOptimizer`."""
        plain = not group["momentum"] and not group["weight_decay"]
        return (0, (-group["lr"], 0.0, 0.0, 0.0)) if plain else None

    def update(self, weights: Tensor, state: Tensor, gradient: Tensor, group: Group, step: int) -> None:
        """Change rows in place; see :class:`SparseOptimizer`."""
        if not group["momentum"] and not group["weight_decay"]:
            # Repeats are not summed first: torch adds one after the other.
            weights.add_(gradient, alpha=-group["lr"])
            return
        rows, values = _coalesced(gradient)
        if group["weight_decay"]:
            values = values.add(weights[rows], alpha=group["weight_decay"])
        if group["momentum"]:
            values = state[rows].mul_(group["momentum"]).add_(values)
            state[rows] = values
        weights[rows] = weights[rows].add_(values, alpha=-group["lr"])


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Adagrad (Duchi, Hazan and Singer, JMLR 2011), equal to `torch.optim.Adagrad` on sparse gradients.

    Parameters
    ----------
    lr, lr_decay, eps, initial_accumulator_value
        As in torch, 0 or more.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import Adagrad, EmbeddingBag
    >>> with EmbeddingBag(10, 4, optimizer=Adagrad(lr=0.1), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     bag(torch.tensor([[7]])).sum().backward()
    ...     bag.optimizer_state([7]).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "eps", "initial_accumulator_value"):
            _check(name, getattr(self, name))

    def state_width(self, dim: int) -> int:
        """Return the floats of state of a row: sums of squares, one for each weight."""
        return dim

    def first_state(self) -> float:
        """Return the first sum of squares."""
        return self.initial_accumulator_value

    def kernel(self, group: Group, step: int) -> Kernel | None:
        """Return the compiled rule; see :class:`SparseOptimizer`."""
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        return 1, (-rate, group["eps"], 0.0, 0.0)

    def update(self, weights: Tensor, state: Tensor, gradient: Tensor, group: Group, step: int) -> None:
        """Change rows in place; see :class:`SparseOptimizer`."""
        rows, values = _coalesced(gradient)
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        state.add_(sparse_rows(rows, values.pow(2), state.shape))
        root = state[rows].sqrt_().add_(group["eps"])
        weights.add_(sparse_rows(rows, values / root, weights.shape), alpha=-rate)


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad:
    """Adagrad with one sum for each row, of the mean square of its gradient, as in FBGEMM and TorchRec.

    Parameters
    ----------
    lr
        Learning rate, 0 or more.
    eps
        Added to the root of the sum, 0 or more.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, RowWiseAdagrad
    >>> with EmbeddingBag(10, 4, optimizer=RowWiseAdagrad(lr=0.1), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     bag(torch.tensor([[7]])).sum().backward()
    ...     bag.optimizer_state([7]).tolist()
    [[1.0]]
    """

    lr: float = 0.01
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check("lr", self.lr)
        _check("eps", self.eps)

    def state_width(self, dim: int) -> int:
        """Return 1."""
        return 1

    def first_state(self) -> float:
        """Return 0."""
        return 0.0

    def kernel(self, group: Group, step: int) -> Kernel | None:
        """Return the compiled rule; see :class:`SparseOptimizer`."""
        return 2, (-group["lr"], group["eps"], 0.0, 0.0)

    def update(self, weights: Tensor, state: Tensor, gradient: Tensor, group: Group, step: int) -> None:
        """Change rows in place; see :class:`SparseOptimizer`."""
        rows, values = _coalesced(gradient)
        total = state[rows] + _mean_square(values)
        state[rows] = total
        weights[rows] = weights[rows].sub_(values.mul(group["lr"]).div_(total.sqrt().add_(group["eps"])))


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba, ICLR 2015) on the rows that a step touches, equal to `torch.optim.SparseAdam`.

    Parameters
    ----------
    lr, betas, eps
        As in torch.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import Adam, EmbeddingBag
    >>> with EmbeddingBag(10, 4, optimizer=Adam(lr=0.1), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     bag.optimizer.param_groups[0]["lr"] = 0.05  # from this step on
    ...     bag(torch.tensor([[7]])).sum().backward()
    ...     bag.optimizer_state([7]).shape
    torch.Size([1, 8])
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check("lr", self.lr)
        _check("eps", self.eps)
        for beta in self.betas:
            _check("betas", beta, 0, 1)

    def state_width(self, dim: int) -> int:
        """Return the floats of state of a row: two moments of each weight."""
        return 2 * dim

    def first_state(self) -> float:
        """Return 0."""
        return 0.0

    def kernel(self, group: Group, step: int) -> Kernel | None:
        """Return the compiled rule; see :class:`SparseOptimizer`."""
        return 3, _adam_numbers(group, step)

    def update(self, weights: Tensor, state: Tensor, gradient: Tensor, group: Group, step: int) -> None:
        """Change rows in place; see :class:`SparseOptimizer`."""
        rows, values = _coalesced(gradient)
        if not len(rows):
            return
        dim, (beta1, beta2) = weights.shape[1], group["betas"]
        first, second = state[rows, :dim], state[rows, dim:]
        first = first.add_(values.sub(first).mul_(1 - beta1))
        second = second.add_(self._squares(values).sub_(second).mul_(1 - beta2))
        state[rows, :dim], state[rows, dim:] = first, second
        rate = _adam_numbers(group, step)[0]
        weights[rows] = weights[rows].add_(rate * first.div(second.sqrt().add_(group["eps"])))

    def _squares(self, values: Tensor) -> Tensor:
        """Return the squares that the second moment follows."""
        return values.pow(2)


@dataclass(frozen=True, kw_only=True)
class RowWiseAdam(Adam):
    """Adam with one second moment for each row, of its gradient's mean square: FBGEMM's partial row-wise Adam.

    Parameters
    ----------
    lr, betas, eps
        As in :class:`Adam`.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, RowWiseAdam
    >>> with EmbeddingBag(10, 4, optimizer=RowWiseAdam(lr=0.1), dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     bag(torch.tensor([[7]])).sum().backward()
    ...     bag.optimizer_state([7]).shape
    torch.Size([1, 5])
    """

    def state_width(self, dim: int) -> int:
        """Return the floats of state of a row: a moment of each weight, and one of the row."""
        return dim + 1

    def kernel(self, group: Group, step: int) -> Kernel | None:
        """Return the compiled rule; see :class:`SparseOptimizer`."""
        return 4, _adam_numbers(group, step)

    def _squares(self, values: Tensor) -> Tensor:
        return _mean_square(values)


def adds_in_turn(optimizer: SparseOptimizer) -> bool:
    """Whether gradients of a row are applied one after the other, in their order, and not added up first."""
    return isinstance(optimizer, SGD) and not optimizer.momentum and not optimizer.weight_decay


# Hyperparameters of torch's optimizers that change no update at these values.
_ABSENT = {"momentum": 0, "dampening": 0, "weight_decay": 0, "lr_decay": 0, "nesterov": False, "amsgrad": False,
           "maximize": False}  # fmt: skip


def check_group(optimizer: SparseOptimizer, group: Group, number: int = 0) -> None:
    """Raise ValueError for present hyperparameters that an optimizer does not have or cannot take.

    `number` is that of the group, for messages.
    """
    known, name = vars(optimizer), type(optimizer).__name__
    for key, absent in _ABSENT.items():
        if key not in known and group.get(key, absent) != absent:
            raise ValueError(f"param_groups[{number}][{key!r}]={group[key]!r}: {name} of tables has none; set it back")
    for beta in group.get("betas", ()):
        _check(f"param_groups[{number}]['betas']", beta, 0, 1)
    _check(f"param_groups[{number}]['lr_decay']", group.get("lr_decay", 0))
    if isinstance(optimizer, SGD) and bool(group["momentum"]) != bool(optimizer.momentum):
        raise ValueError(
            f"param_groups[{number}]['momentum']={group['momentum']!r}: the tables were opened with SGD(momentum="
            f"{optimizer.momentum!r}), which says whether rows have the room for it; open them with SGD(momentum="
            f"{group['momentum']!r}) if you want it, or cycle_momentum=False in the schedule"
        )


def _adam_numbers(group: Group, step: int) -> tuple[float, float, float, float]:
    beta1, beta2 = group["betas"]
    size = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return -size, group["eps"], 1 - beta1, 1 - beta2


def _coalesced(gradient: Tensor) -> tuple[Tensor, Tensor]:
    gradient = gradient.coalesce()
    return indices_of(gradient)[0], values_of(gradient)


def _mean_square(values: Tensor) -> Tensor:
    """Return the mean square of each row, [n, 1]; sums begin with the first column, as in all kernels."""
    total = torch.zeros(len(values), dtype=values.dtype)
    for column in values.pow(2).unbind(1):
        total += column
    return total.div_(max(1, values.shape[1])).unsqueeze(1)
