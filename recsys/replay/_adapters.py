"""What the adapters to other libraries share: classes to derive from, slots that were used, scores of samples replayed.

Other libraries are imported when an object is made: they need not be there before.
"""

from collections import deque
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from memhier.recsys.replay.swap import SwapPolicy

__all__ = ["UsedSlots", "derived", "scores_of"]

Ints = NDArray[np.int64]

_MADE: dict[tuple[Any, str], Any] = {}


def derived(kind: Any, module: str, base: str, package: str) -> Any:
    """Return a class that derives from `kind` and from a class of a module, in this order.

    Raises
    ------
    ImportError
        When the module cannot be imported; it says which package to install.
    """
    try:
        parent = getattr(import_module(module), base)
    except ImportError as error:
        raise ImportError(f"{kind.__name__} needs the package {package} ({error}): pip install {package}") from error
    if issubclass(kind, parent):
        return kind
    if (kind, base) not in _MADE:
        about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        _MADE[kind, base] = type(parent)(kind.__name__, (kind, parent), about)
    return _MADE[kind, base]


class UsedSlots:
    """The slots that were read since the last step ended.

    Somebody who never ends a step would collect them for ever: of what was read long before, all that lies before as
    many reads as memory has slots is dropped, batch by batch.

    Attributes
    ----------
    dropped
        How many that is since the last step ended.
    """

    def __init__(self) -> None:
        self._batches: deque[Ints] = deque()
        self._count = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._count

    def add(self, slots: Ints, most: int) -> None:
        """Append a batch, and drop the oldest whose absence leaves `most`."""
        if len(slots):
            self._batches.append(slots)
            self._count += len(slots)
        while self._batches and self._count - len(self._batches[0]) >= most:
            gone = len(self._batches.popleft())
            self._count -= gone
            self.dropped += gone

    def take(self) -> Ints:
        """Return all in the order in which they were read, and forget them."""
        taken = np.concatenate([np.empty(0, np.int64), *self._batches])
        self._batches.clear()
        self._count = self.dropped = 0
        return taken


def scores_of(policy: SwapPolicy | None, logits: Tensor, labels: Tensor) -> NDArray[Any] | None:
    """Return what a policy goes by, of samples with these logits [n, classes] and labels int64 [n].

    Logits for the gate, the cross entropy of each for the loss, nothing for others.
    """
    if policy is None or policy.name not in ("gate", "loss"):
        return None
    logits = logits.detach()
    scores = logits if policy.name == "gate" else cross_entropy(logits, labels, reduction="none")
    found: NDArray[Any] = scores.cpu().numpy()
    return found
