"""Avalanche: a buffer as the storage policy of replay, and the plug-in that ends its steps.

``policy = CarouselExemplars(buffer)``, ``plugins=[ReplayPlugin(policy.max_size, storage_policy=policy),
CarouselPlugin(policy)]``. Swaps show in the loader that Avalanche has built for an experience, since its data set reads
memory when an item is asked for. They have to keep classes (``same_class=True``), so that the labels that Avalanche has
noted stay right. Nothing of torchvision is imported here.
"""

from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from memhier.recsys.replay.adapters.common import UsedSlots, derived, fitted, scores_of
from memhier.recsys.replay.buffer import CarouselBuffer

__all__ = ["CarouselExemplars", "CarouselPlugin"]

_READ = 256  # items at a time


class _Live(torch.utils.data.Dataset[Any]):
    """The samples in memory now; notes in `used` the slots that were read."""

    def __init__(self, buffer: CarouselBuffer, are_tensors: list[bool], used: UsedSlots) -> None:
        self._are_tensors = are_tensors
        self._reader = buffer.reader()
        self._fields = list(buffer.schema.fields)
        self._slots = buffer.occupied().copy()
        self.targets = self._reader.labels()[self._slots].tolist()
        self._used = used

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        slot = self._slots[index : index + 1]
        self._used.add(slot, len(self._reader))
        batch = self._reader.read(slot)
        first, *rest = self._fields
        values = [batch.labels, *(batch[name] for name in rest)]
        shown = [torch.from_numpy(value)[0] if is_tensor else value[0].item()
                 for value, is_tensor in zip(values, self._are_tensors, strict=True)]  # fmt: skip
        return torch.from_numpy(batch[first])[0], *shown

    def column(self, name: str) -> list[int]:
        """Return a field of integers of all samples, read in parts: a sample may be large."""
        parts = [self._slots[start : start + _READ] for start in range(0, len(self), _READ)]
        return [int(value) for part in parts for value in self._reader.read(part)[name]]


class CarouselExemplars:
    """A storage policy that keeps exemplars, not references to the data sets of old experiences.

    Parameters
    ----------
    buffer
        Made with labels, and with classes kept. The first field of its schema holds the first entry of an item of the
        stream, as a tensor; others hold in their order the entries after the label, the task label last: ``{"image":
        ("uint8", (32, 32, 3)), "task": "int64"}`` for items of image, label and task label. Numbers come back as
        tensors if those of the stream are tensors.

    Raises
    ------
    ValueError
        If swaps of the buffer bring in samples of other classes, and from `post_adapt` for items that have more or
        fewer entries than the schema, or values that the dtype of their field would change.

    Examples
    --------
    With the package avalanche-lib::

        from avalanche.training.plugins import ReplayPlugin
        from avalanche.training.supervised import Naive
        from memhier.recsys import CarouselBuffer
        from memhier.recsys.replay.adapters.avalanche import CarouselExemplars, CarouselPlugin

        schema = {"image": ("float32", (3, 32, 32))}
        with CarouselBuffer("/ssd/replay", memory=500, schema=schema, same_class=True) as buffer:
            exemplars = CarouselExemplars(buffer)
            replay = ReplayPlugin(exemplars.max_size, storage_policy=exemplars)
            strategy = Naive(model=model, optimizer=optimizer, plugins=[replay, CarouselPlugin(exemplars)])
            for experience in benchmark.train_stream:
                strategy.train(experience, num_workers=0)
    """

    max_size: int
    _buffer: Any

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make an `avalanche.training.storage_policy.ExemplarsBuffer`."""
        kind = derived(cls, "avalanche.training.storage_policy", "ExemplarsBuffer", "avalanche-lib")
        made: Self = object.__new__(kind)
        return made

    def __init__(self, buffer: CarouselBuffer) -> None:
        if buffer.swap is not None and not buffer.keeps_classes:
            raise ValueError("buffer: its swaps bring in samples of any class, but Avalanche notes labels of memory "
                             "once; make it with same_class=True or swap=None")  # fmt: skip
        super().__init__(buffer.capacity)  # type: ignore[call-arg]
        self.carousel = buffer
        self._used = UsedSlots()
        # Whether the stream's entries after the first are tensors: a batch can hold only one kind. Where a run goes on
        # none has come yet; replayed ones follow those of the stream, and torch takes tensors behind numbers as well.
        self._are_tensors = [True] * len(buffer.schema.fields)

    @property
    def buffer(self) -> Any:
        """The samples in memory, as an AvalancheDataset that stays up to date."""
        if len(self.carousel) == 0:
            return self._buffer
        live = _Live(self.carousel, self._are_tensors, self._used)
        attribute = import_module("avalanche.benchmarks.utils.data_attribute").DataAttribute
        attributes, kind = [attribute(live.targets, "targets")], "AvalancheDataset"
        last = [*self.carousel.schema.columns.items()][-1]
        if len(self.carousel.schema.fields) > 1 and last[1].dtype.kind in "iu" and last[1].shape == ():
            # Items have it already, as it is now; this is for loaders that group by task.
            attributes.append(attribute(live.column(last[0]), "targets_task_labels"))
            kind = "TaskAwareSupervisedClassificationDataset"
        return getattr(import_module("avalanche.benchmarks.utils"), kind)([live], data_attributes=attributes)

    @buffer.setter
    def buffer(self, new_buffer: Any) -> None:
        self._buffer = new_buffer

    def post_adapt(self, agent_state: Any, exp: Any) -> None:
        """Take in the samples of an experience."""
        items: list[Any] = []
        for item in exp.dataset:
            items.append(item)
            if len(items) == _READ:
                self._add(items)
                items.clear()
        if items:
            self._add(items)

    def _add(self, items: list[Any]) -> None:
        fields, columns = self.carousel.schema.fields, self.carousel.schema.columns
        for item in items:
            if len(item) != len(fields) + 1:
                raise ValueError(
                    f"items of the stream have {len(item)} entries, but the buffer's schema has {list(fields)} beside "
                    "the label: expected a field for each other entry, in their order, such as 'task': 'int64' for a "
                    "task label"
                )
        values, labels, *rest = zip(*items, strict=True)
        batch = {
            name: fitted(f"entry {entry} of the stream's items", _stacked(column), columns[name].dtype)
            for entry, name, column in zip((0, *range(2, len(items[0]))), fields, (values, *rest), strict=True)
        }
        self._are_tensors = [isinstance(entry, torch.Tensor) for entry in items[0][1:]]
        self.carousel.add(batch, labels=[int(label) for label in labels])

    def resize(self, strategy: Any, new_size: int) -> None:
        """Change how many samples memory holds."""
        self.max_size = new_size
        self.carousel.resize(memory=new_size)

    def take_used(self) -> NDArray[np.int64]:
        """Return the slots that were read since the last call, in order."""
        return self._used.take()


def _stacked(values: tuple[Any, ...]) -> Any:
    """Return entries of many items as one tensor or array."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return np.stack([np.asarray(value) for value in values])


class CarouselPlugin:
    """Ends a buffer's step after every training iteration, with the outputs of the model for replayed samples.

    Parameters
    ----------
    exemplars
        The storage policy of the strategy's `ReplayPlugin`. The strategy's loader needs ``num_workers=0``: reads of
        workers are not known here.

    Examples
    --------
    With the package avalanche-lib::

        from avalanche.training.plugins import ReplayPlugin
        from avalanche.training.supervised import Naive
        from memhier.recsys.replay.adapters.avalanche import CarouselExemplars, CarouselPlugin

        exemplars = CarouselExemplars(buffer)
        plugins = [ReplayPlugin(exemplars.max_size, storage_policy=exemplars), CarouselPlugin(exemplars)]
        strategy = Naive(model=model, optimizer=optimizer, plugins=plugins)
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
            raise ValueError(f"num_workers={num_workers}: expected 0; reads of workers cannot be followed")

    def before_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Leave out the samples that were read since the last epoch, which nobody trained on."""
        self._exemplars.take_used()

    def after_training_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """End a step of the buffer."""
        used = self._exemplars.take_used()
        if len(used):
            # Replayed samples come last in a batch of Avalanche's replay loader.
            logits, labels = strategy.mb_output[-len(used) :], strategy.mb_y[-len(used) :]
            buffer = self._exemplars.carousel
            buffer.feedback(used, scores=scores_of(buffer.swap, logits, labels))
