"""A batch of transitions, and their numbers."""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Columns
from memhier.recsys.replay.transitions.layout import nested

__all__ = ["TransitionBatch"]


@dataclass(slots=True)
class TransitionBatch:
    """Transitions drawn from a `TransitionBuffer`.

    Attributes
    ----------
    data
        An array ``[n, *shape]`` for each field by its name, those of nested ones joined by dots; with `Slices`
        ``[n, length, *shape]``.
    numbers
        int64 ``[n]``: how many transitions were added before each, or before the first of its slice.
        `TransitionBuffer.update_priorities` takes them.
    probabilities
        float64 ``[n]``: with which each was drawn, when it was.
    weights
        float32 ``[n]``, at most 1: importance weights; 1 for uniform draws.
    steps
        int32 ``[n]``: the rewards in a sum, or the real transitions of a slice; 1 otherwise.
    discounts
        float32 ``[n]``: the discount to the power of `steps`, for the value after the last transition; with `NStep`.
    mask
        bool ``[n, length]``: the real transitions of slices; with `Slices`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay.transitions import TransitionBuffer
    >>> schema = {"observation": ("float32", 2), "next": {"reward": "float32"}}
    >>> with TransitionBuffer(tempfile.mkdtemp() + "/replay", capacity=100, schema=schema, batch=4) as buffer:
    ...     rewards = {"reward": np.ones(9, np.float32)}
    ...     _ = buffer.add({"observation": np.zeros((9, 2), np.float32), "next": rewards})
    ...     batch = buffer.sample()
    >>> len(batch), batch["next.reward"].tolist(), batch.nested()["next"]["reward"].shape, batch.weights.tolist()
    (4, [1.0, 1.0, 1.0, 1.0], (4,), [1.0, 1.0, 1.0, 1.0])
    """

    data: Columns
    numbers: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float32]
    steps: NDArray[np.int32]
    discounts: NDArray[np.float32] | None = None
    mask: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def nested(self) -> dict[str, Any]:
        """Return the fields as nested dicts of arrays."""
        return nested(self.data)

    def tensors(self) -> dict[str, Any]:
        """Return fields, and all attributes but ``probabilities``, as torch tensors over the same memory.

        A field of such a name takes the place of the attribute.
        """
        from_numpy = importlib.import_module("torch").from_numpy
        own = {"numbers": self.numbers, "weights": self.weights, "steps": self.steps, "discounts": self.discounts,
               "mask": self.mask}  # fmt: skip
        return {name: from_numpy(values) for name, values in (own | self.data).items() if values is not None}
