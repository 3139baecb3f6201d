"""A TorchRL storage on a `CarouselBuffer`, and the reservoir writer that TorchRL lacks.

``TensorDictReplayBuffer(storage=CarouselStorage(buffer), writer=ReservoirWriter(), collate_fn=lambda data: data)``:
`extend` fills both tiers, `sample` reads memory. `CarouselStorage.end_step` ends a training step.
Nested keys are fields whose names are joined by two underscores: ``("next", "reward")`` is ``next__reward``.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.replay.adapters.common import UsedSlots, derived, fitted
from memhier.recsys.replay.adapters.torchrl_tiered import TieredStorage
from memhier.recsys.replay.buffer import CarouselBuffer

__all__ = ["CarouselStorage", "ReservoirWriter", "TieredStorage"]

_NESTED = "__"


class CarouselStorage:
    """Memory of a buffer, as many items as its slots hold.

    Parameters
    ----------
    buffer
        Its fields are the keys of the items, all of them, those of nested ones joined by ``__``.
    label_key
        The key of integer labels, joined likewise, which is no field; None for no labels.

    Examples
    --------
    With the package torchrl::

        from memhier.recsys import CarouselBuffer
        from memhier.recsys.replay.adapters.torchrl import CarouselStorage, ReservoirWriter
        from torchrl.data import TensorDictReplayBuffer

        with CarouselBuffer("/ssd/replay", memory=1000, schema={"observation": ("float32", 3)}) as buffer:
            storage = CarouselStorage(buffer, label_key="action")
            replay = TensorDictReplayBuffer(
                storage=storage, writer=ReservoirWriter(), batch_size=32, collate_fn=lambda items: items
            )
            for items in collector:  # TensorDicts with "observation" and "action"
                replay.extend(items)
                train(replay.sample())
                storage.end_step()
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make a `torchrl.data.replay_buffers.Storage`."""
        made: Self = object.__new__(derived(cls, "torchrl.data.replay_buffers", "Storage", "torchrl"))
        return made

    def __init__(self, buffer: CarouselBuffer, label_key: str | None = None) -> None:
        super().__init__(buffer.capacity)  # type: ignore[call-arg]
        self.carousel = buffer
        self.label_key = label_key
        self._used = UsedSlots()

    def add(self, data: Any) -> Tensor:
        """Take items in and return the slots of those that are in memory now, -1 for the others, int64 [n].

        Raises
        ------
        TypeError, ValueError
            For keys that the schema lacks or that are missing, and values that the dtype of their field would change.
        """
        items = _flat(data)
        columns = self.carousel.schema.columns
        # TorchRL notes there the slots of data extended before.
        if "index" not in columns and self.label_key != "index":
            items.pop("index", None)
        unknown = sorted(set(items) - set(columns) - {self.label_key})
        if unknown:
            raise ValueError(f"data: the buffer's schema has no field for the keys {unknown} (nested ones joined by "
                             "'__'); add fields, or leave them out with data.exclude(...)")  # fmt: skip
        if self.label_key is not None and self.label_key not in items:
            raise ValueError(f"data: expected the key {self.label_key!r}, which has the labels; got {sorted(items)}")
        labels = None if self.label_key is None else items.pop(self.label_key).reshape(-1)
        batch = {name: fitted(f"data[{name!r}]", value, columns[name].dtype) for name, value in items.items()}
        return torch.from_numpy(self.carousel.add(batch, labels=labels))

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Refuse to write at a place: which samples stay is up to the buffer, and so to its own writer."""
        raise TypeError("use CarouselStorage with writer=ReservoirWriter(): the buffer decides which samples stay")

    def get(self, index: Any) -> Any:
        """Return items of memory by number, 0 to len - 1, as a TensorDict."""
        numbers = np.atleast_1d(np.asarray(torch.as_tensor(index).cpu()))
        slots = self.carousel.occupied()[numbers]
        batch = self.carousel.reader().read(slots)
        self._used.add(slots, self.carousel.capacity)
        found = import_module("tensordict").TensorDict({}, batch_size=[len(slots)])
        for name, values in batch.data.items():
            found.set(tuple(name.split(_NESTED)), torch.from_numpy(values))
        if self.label_key is not None:
            found.set(tuple(self.label_key.split(_NESTED)), torch.from_numpy(batch.labels))
        return found if np.ndim(np.asarray(torch.as_tensor(index))) else found[0]

    def end_step(self, scores: Any = None, update: Mapping[str, Any] | None = None) -> None:
        """End a step: items sampled since the last one may be swapped.

        Scores and updates are those of all sampled items, in that order; only the last count, about as many as memory
        has slots.
        """
        dropped, slots = self._used.dropped, self._used.take()
        if dropped:
            scores = None if scores is None else scores[dropped:]
            update = {name: values[dropped:] for name, values in (update or {}).items()}
        self.carousel.feedback(slots, scores=scores, update=update)

    def contains(self, item: Any) -> Any:
        """Return whether there is an item of a number."""
        return torch.as_tensor(item) < len(self)

    def __len__(self) -> int:
        return len(self.carousel)

    def _empty(self) -> None:
        self.carousel.forget(lambda ids, labels: np.ones(len(ids), np.bool_))

    def state_dict(self) -> dict[str, Any]:
        """Make the buffer durable, and return the number and step of its checkpoint: samples stay in place."""
        return {"generation": self.carousel.checkpoint(), "step": self.carousel.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make sure that the buffer, opened again, is at the step that was saved."""
        if state_dict["step"] != self.carousel.step:
            raise ValueError(f"step={state_dict['step']}: the buffer is at {self.carousel.step}; open its checkpoint")

    def dumps(self, path: Any) -> None:
        """Make the buffer durable in its own directory."""
        self.carousel.checkpoint()

    def loads(self, path: Any) -> None:
        """Do nothing: `CarouselBuffer.open` has brought everything back."""


def _flat(data: Any) -> dict[str, Tensor]:
    """Return the tensors of a TensorDict by their keys, nested ones joined."""
    flat: dict[str, Tensor] = {}
    for key in data.keys(include_nested=True, leaves_only=True):
        parts = key if isinstance(key, tuple) else (key,)
        if any(_NESTED in part for part in parts):
            raise ValueError(f"data: the key {key!r} has '{_NESTED}' in it, which joins nested keys; rename it")
        value = data.get(key)
        if not isinstance(value, Tensor):
            raise TypeError(f"data[{key!r}]: expected a tensor, got {type(value).__name__}, which no field can hold")
        flat[_NESTED.join(parts)] = value
    return flat


class ReservoirWriter:
    """Writes through the admission of a `CarouselStorage`: a reservoir, unless the buffer was made with another.

    Examples
    --------
    With the package torchrl::

        from memhier.recsys.replay.adapters.torchrl import CarouselStorage, ReservoirWriter
        from torchrl.data import TensorDictReplayBuffer

        replay = TensorDictReplayBuffer(
            storage=CarouselStorage(buffer), writer=ReservoirWriter(), batch_size=32, collate_fn=lambda items: items
        )
    """

    _storage: Any

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make a `torchrl.data.replay_buffers.Writer`."""
        made: Self = object.__new__(derived(cls, "torchrl.data.replay_buffers", "Writer", "torchrl"))
        return made

    def add(self, data: Any) -> int:
        """Add one item; return its slot, -1 if it is not in memory."""
        return int(self.extend(data.unsqueeze(0))[0])

    def extend(self, data: Any) -> Tensor:
        """Add items; return a slot for each, -1 for those that are not in memory."""
        storage = self._storage
        if not isinstance(storage, CarouselStorage):
            raise TypeError(f"ReservoirWriter needs a CarouselStorage, got {type(storage).__name__}")
        return storage.add(data)

    def _empty(self, empty_write_count: bool = True) -> None:
        return

    def dumps(self, path: Any) -> None:
        """Do nothing: there is no state."""

    def loads(self, path: Any) -> None:
        """Do nothing: there is no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is the buffer's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing over."""
