"""Avalanche: a buffer as the storage policy of replay, and the plug-in that ends its steps.

``policy = CarouselExemplars(buffer)``, ``plugins=[ReplayPlugin(policy.max_size, storage_policy=policy),
CarouselPlugin(policy)]``. Swaps show in the loader that Avalanche has built for an experience, since its data set reads
memory when an item is asked for. They keep classes, so that the labels that Avalanche has noted stay right. Nothing of
torchvision is imported here.
"""

from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from memhier.recsys.replay._adapters import UsedSlots, derived, scores_of
from memhier.recsys.replay.buffer import CarouselBuffer

__all__ = ["CarouselExemplars", "CarouselPlugin"]


class _Live(torch.utils.data.Dataset[Any]):
    """What memory holds now; notes in `used` what was read."""

    def __init__(self, buffer: CarouselBuffer, field: str, has_tensors: bool, used: UsedSlots) -> None:
        self._has_tensors = has_tensors
        self._reader = buffer.reader()
        self._field = field
        self._slots = buffer.occupied().copy()
        self.targets = self._reader.labels()[self._slots].tolist()
        self._used = used

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int | torch.Tensor]:
        slot = self._slots[index : index + 1]
        self._used.add(slot, len(self._reader))
        batch = self._reader.read(slot)
        label = torch.from_numpy(batch.labels)[0] if self._has_tensors else int(batch.labels[0])
        return torch.from_numpy(batch[self._field][0]), label


class CarouselExemplars:
    """A storage policy that keeps exemplars, not references to the data sets of old experiences.

    Parameters
    ----------
    buffer
        Of a schema with one field, what an item of the stream has first, as a tensor; made with labels.
    with_task
        Whether items of the stream end with a task label; those of replay then end with 0.
    """

    max_size: int
    _buffer: Any

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make an `avalanche.training.storage_policy.ExemplarsBuffer`."""
        kind = derived(cls, "avalanche.training.storage_policy", "ExemplarsBuffer", "avalanche-lib")
        made: Self = object.__new__(kind)
        return made

    def __init__(self, buffer: CarouselBuffer, with_task: bool = False) -> None:
        super().__init__(buffer.capacity)  # type: ignore[call-arg]
        self.carousel = buffer
        self._field = next(iter(buffer.schema.fields))
        self._with_task = with_task
        self._used = UsedSlots()
        self._has_tensors = False  # whether labels of the stream are tensors: a batch can hold only one kind

    @property
    def buffer(self) -> Any:
        """What memory holds, as an AvalancheDataset that stays up to date."""
        if len(self.carousel) == 0:
            return self._buffer
        live = _Live(self.carousel, self._field, self._has_tensors, self._used)
        attribute = import_module("avalanche.benchmarks.utils.data_attribute").DataAttribute
        attributes = [attribute(live.targets, "targets")]
        if self._with_task:
            attributes.append(attribute([0] * len(live), "targets_task_labels", use_in_getitem=True))
        utils = import_module("avalanche.benchmarks.utils")
        return utils.AvalancheDataset([live], data_attributes=attributes)

    @buffer.setter
    def buffer(self, new_buffer: Any) -> None:
        self._buffer = new_buffer

    def post_adapt(self, agent_state: Any, exp: Any) -> None:
        """Take in the samples of an experience."""
        items, labels = [], []
        for item in exp.dataset:
            items.append(np.asarray(item[0]))
            self._has_tensors = isinstance(item[1], torch.Tensor)
            labels.append(int(item[1]))
            if len(items) == 256:
                self._add(items, labels)
        if items:
            self._add(items, labels)

    def _add(self, items: list[Any], labels: list[int]) -> None:
        dtype = self.carousel.schema.columns[self._field].dtype
        self.carousel.add({self._field: np.stack(items).astype(dtype, copy=False)}, labels=labels)
        items.clear()
        labels.clear()

    def resize(self, strategy: Any, new_size: int) -> None:
        """Change how many samples memory holds."""
        self.max_size = new_size
        self.carousel.resize(memory=new_size)

    def take_used(self) -> NDArray[np.int64]:
        """Return the slots that were read since the last call, in order."""
        return self._used.take()


class CarouselPlugin:
    """Ends a buffer's step after every training iteration, with what the model said of the samples replayed.

    Parameters
    ----------
    exemplars
        The storage policy of the strategy's `ReplayPlugin`. The strategy's loader needs ``num_workers=0``: what workers
        have read is not known here.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make an `avalanche.training.plugins.SupervisedPlugin`."""
        made: Self = object.__new__(derived(cls, "avalanche.training.plugins", "SupervisedPlugin", "avalanche-lib"))
        return made

    def __init__(self, exemplars: CarouselExemplars) -> None:
        super().__init__()
        self._exemplars = exemplars

    def before_training_exp(self, strategy: Any, *args: Any, num_workers: int = 0, **kwargs: Any) -> None:
        """Refuse workers."""
        if num_workers:
            raise ValueError(f"num_workers={num_workers}: expected 0; what workers read of memory cannot be followed")

    def after_training_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Choose what is swapped."""
        used = self._exemplars.take_used()
        if len(used):
            # Replayed samples come last in a batch of Avalanche's replay loader.
            logits, labels = strategy.mb_output[-len(used) :], strategy.mb_y[-len(used) :]
            buffer = self._exemplars.carousel
            buffer.feedback(used, scores=scores_of(buffer.swap, logits, labels))
