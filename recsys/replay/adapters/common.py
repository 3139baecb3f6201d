"""Helpers of the adapters to other libraries: classes to derive from, values in the dtype of a field, used slots, ids
of earlier samples, scores of replayed samples.

An adapter imports its library when an object is made: it need not be installed before.
"""

from collections import deque
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from memhier.recsys.replay.policies import SwapPolicy

__all__ = ["SeenIds", "UsedSlots", "derived", "fitted", "scores_of"]

Ints = NDArray[np.int64]

_RECENT = 4096
_NUMPYS = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip

_MADE: dict[tuple[Any, str], Any] = {}


def derived(kind: Any, module: str, base: str, package: str) -> Any:
    """Return a class that derives from `kind` and from a class of a module, in this order.

    Raises
    ------
    ImportError
        If the module cannot be imported; it names the package to install.
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

    A caller that never ends a step would collect them for ever: beyond as many slots as memory has, the oldest batches
    are dropped.

    Attributes
    ----------
    dropped
        How many slots were dropped since the last step ended.
    """

    def __init__(self) -> None:
        self._batches: deque[Ints] = deque()
        self._count = 0
        self.dropped: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, slots: Ints, most: int) -> None:
        """Append a batch, and drop the oldest ones while at least `most` slots are left without them."""
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


class SeenIds:
    """The ids that came before: 8 bytes of DRAM for each, and a few thousand that wait to be sorted in.

    Parameters
    ----------
    ids
        int64 [n]: those that came before it was made.
    """

    def __init__(self, ids: Ints) -> None:
        self._sorted = np.unique(ids)
        self._recent: dict[int, None] = {}

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self._sorted.nbytes + 100 * len(self._recent)

    def first(self, ids: Ints) -> NDArray[np.bool_]:
        """Return which of ids, int64 [n], have not come before, nor earlier among these."""
        distinct, where = np.unique(ids, return_index=True)
        places = np.searchsorted(self._sorted, distinct)
        known = np.array([id in self._recent for id in distinct.tolist()], np.bool_)
        inside = places < len(self._sorted)
        known[inside] |= self._sorted[places[inside]] == distinct[inside]
        first: NDArray[np.bool_] = np.zeros(len(ids), np.bool_)
        first[where[~known]] = True
        return first

    def add(self, ids: Ints) -> None:
        """Note that ids have come."""
        self._recent |= dict.fromkeys(ids.tolist())
        if len(self._recent) >= _RECENT:
            self._sorted = np.union1d(self._sorted, np.fromiter(self._recent, np.int64, len(self._recent)))
            self._recent.clear()


def fitted(name: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return values in the dtype of a field that holds every one of them.

    Parameters
    ----------
    name
        Of the values in the caller's words, for the message.
    values
        An array or a tensor of any dtype and device.

    Raises
    ------
    ValueError
        If the dtype would change one.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.dtype not in _NUMPYS:
            values = values.float()  # numpy has none of it, and float32 holds all of them
    array = np.asarray(values)
    if array.dtype == dtype or array.dtype.kind not in "biuf" or dtype.kind not in "biufc":
        return array  # the buffer checks it
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        # Forth, or back: between integers and floats either alone may round the difference away.
        same = (cast == array) & (cast.astype(array.dtype) == array)
    if array.dtype.kind == "f":
        same |= np.isnan(array) & np.isnan(cast)
    if not same.all():
        at = int(np.flatnonzero(~same.reshape(-1))[0])
        lost, kept = array.reshape(-1)[at], cast.reshape(-1)[at]
        raise ValueError(f"{name}: {array.dtype} values do not fit the schema's {dtype}: {lost} would become {kept}; "
                         f"make the field {array.dtype}, or convert the values")  # fmt: skip
    return cast


def scores_of(policy: SwapPolicy | None, logits: Tensor, labels: Tensor) -> NDArray[Any] | None:
    """Return the scores that a policy needs of samples with these logits [n, classes] and labels int64 [n].

    These are the logits for the gate, the cross entropy of each for the loss, None for others.
    """
    if policy is None or policy.name not in ("gate", "loss"):
        return None
    logits = logits.detach()
    scores = logits if policy.name == "gate" else cross_entropy(logits, labels, reduction="none")
    found: NDArray[Any] = scores.cpu().double().numpy()  # numpy has no bfloat16
    return found
