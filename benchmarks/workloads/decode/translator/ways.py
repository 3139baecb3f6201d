"""The two ways of an output layer to log Z, for beams by proof."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

__all__ = ["Bounds", "Ways"]

Bounds: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Ways:
    """The two ways of a layer to log Z.

    Attributes
    ----------
    bounds
        Maps hidden states ``[n, D]`` to the K largest logits and their words, ``[n, K]``, and to bounds of log Z
        ``[n]``, the lower one first.
    exact
        Maps hidden states to log Z itself.
    """

    bounds: Callable[[Tensor], Bounds]
    exact: Callable[[Tensor], Tensor]
