"""A module over tables that are only read, for a model that is evaluated."""

from collections.abc import Callable
from typing import Any

from torch import nn

from memhier.recsys.embedding.torch_internals import not_compiled

__all__ = ["Served"]


class Served(nn.Module):
    """Calls a look-up. A model's state dict, which has a pointer to the trained table here, loads as it is."""

    def __init__(self, look_up: Callable[..., Any]) -> None:
        super().__init__()
        self._look_up = look_up

    @not_compiled
    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return the rows of a look-up; arguments as of the trained module."""
        return self._look_up(*arguments, **options)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Take nothing."""
