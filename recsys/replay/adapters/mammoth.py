"""Mammoth: the `Buffer` of its models on a `CarouselBuffer`.

Replace the class before models are imported: ``utils.buffer.Buffer = lambda size, *rest, **options:
MammothBuffer(...)``. Images are kept as they come (Mammoth keeps float32 of everything), and nothing is copied to draw.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.replay.adapters.common import SeenIds, UsedSlots, fitted
from memhier.recsys.replay.buffer import CarouselBuffer

__all__ = ["MammothBuffer"]

ATTRIBUTES = ("examples", "labels", "logits", "task_labels", "true_labels")
Transform = Callable[[Tensor], Tensor]


def _names(examples: Any, labels: Any) -> Any:
    """Return ids made from the bytes and the label of each sample, int64 [n]: two samples of one id are the same."""
    marks = np.full(len(examples), -1) if labels is None else labels
    ids = np.empty(len(examples), np.int64)
    for index, (example, label) in enumerate(zip(np.ascontiguousarray(examples), marks.tolist(), strict=True)):
        digest = hashlib.blake2b(example.tobytes(), digest_size=8, salt=str(label).encode()[:16]).digest()
        ids[index] = int.from_bytes(digest, "little") >> 1
    return ids


class MammothBuffer:
    """The interface of Mammoth's `utils.buffer.Buffer` (v0.2).

    A sample is kept once, however many epochs hand it over: two samples of the same bytes and label are one. If it is
    in memory and comes again, its mutable fields, such as logits, get their new values. Each sample seen takes 8 bytes
    of DRAM; a buffer that was opened knows the samples in storage.

    Every `add_data` ends a step of the buffer: samples drawn since the last one may be swapped.

    Parameters
    ----------
    buffer
        Whose fields are ``examples`` and any of ``logits``, ``task_labels`` and ``true_labels``; labels are its labels.
        Its swap policy has to do without scores.
    device
        The device of batches.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import CarouselBuffer
    >>> from memhier.recsys.replay.adapters.mammoth import MammothBuffer
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=4, schema={"examples": ("float32", 2)}) as carousel:
    ...     buffer = MammothBuffer(carousel)
    ...     buffer.add_data(examples=torch.rand(10, 2), labels=torch.arange(10) % 2)
    ...     inputs, labels = buffer.get_data(3)
    ...     buffer.num_seen_examples, len(buffer), inputs.shape
    (10, 4, torch.Size([3, 2]))
    """

    def __init__(self, buffer: CarouselBuffer, device: Any = "cpu") -> None:
        unknown = set(buffer.schema.fields) - set(ATTRIBUTES)
        if unknown or "examples" not in buffer.schema.fields:
            raise ValueError(f"buffer: expected fields 'examples' and of {ATTRIBUTES[2:]}, got {buffer.schema}")
        if buffer.swap is not None:
            try:
                buffer.swap.check_scores(None, 0)
            except ValueError as error:
                raise ValueError(f"buffer: Mammoth passes no scores, which {buffer.swap!r} needs") from error
        self.carousel = buffer
        self.device: Any = device
        self.attributes: list[str] = list(ATTRIBUTES)
        self._used = UsedSlots()
        self._seen = SeenIds(buffer.stored_ids())

    @property
    def buffer_size(self) -> int:
        """Samples that memory holds."""
        return self.carousel.capacity

    @property
    def num_seen_examples(self) -> int:
        """Samples that came, each counted once, without those that were removed again."""
        return int(self.carousel.stats()["seen"])

    @property
    def used_attributes(self) -> list[str]:
        """The attributes of a sample, in the order of a batch."""
        return [name for name in ATTRIBUTES if name == "labels" or name in self.carousel.schema.fields]

    def __len__(self) -> int:
        return len(self.carousel)

    def __getattr__(self, name: str) -> Tensor:
        """Return ``examples``, ``labels`` and so on of all memory by slot, as a tensor: a copy."""
        if name not in ATTRIBUTES or name not in self.used_attributes:
            raise AttributeError(name)
        everything = self._read(self._slots())
        return everything[self.used_attributes.index(name)]

    def is_empty(self) -> bool:
        """Whether memory holds nothing."""
        return len(self) == 0

    def is_full(self) -> bool:
        """Whether memory holds as much as it can."""
        return len(self) == self.buffer_size

    def add_data(
        self, examples: Tensor, labels: Tensor | None = None, logits: Tensor | None = None,
        task_labels: Tensor | None = None, attention_maps: Any = None, true_labels: Tensor | None = None,
        sample_selection_scores: Any = None,
    ) -> None:  # fmt: skip
        """Take samples in that did not come before, and end a step; arguments are tensors ``[n, ...]``, as in Mammoth.

        Raises
        ------
        TypeError, ValueError
            For values that the schema has no field for, or whose dtype would change them. Nothing has changed then.
        """
        for name, value in (("attention_maps", attention_maps), ("sample_selection_scores", sample_selection_scores)):
            if value is not None:
                raise ValueError(f"{name}: not kept; expected None")
        given = {"examples": examples, "logits": logits, "task_labels": task_labels, "true_labels": true_labels}
        columns = self.carousel.schema.columns
        batch: dict[str, Any] = {}
        for name, value in given.items():
            if value is not None and name not in columns:
                raise ValueError(f"{name}: the buffer's schema {self.carousel.schema} has no such field; add it there")
            if value is not None:
                batch[name] = fitted(name, value, columns[name].dtype)
        self.carousel.schema.check(batch)
        marks = None if labels is None else fitted("labels", labels, np.dtype(np.int64))
        if marks is not None and marks.shape != (len(batch["examples"]),):
            raise ValueError(f"labels: expected shape [{len(batch['examples'])}], got {list(marks.shape)}")
        ids = _names(batch["examples"], marks)
        first = self._seen.first(ids)
        new = np.flatnonzero(first)
        self.carousel.add(
            {name: values[new] for name, values in batch.items()}, labels=None if marks is None else marks[new],
            ids=ids[new],
        )  # fmt: skip
        self._seen.add(ids)
        self._renew(ids, np.flatnonzero(~first), batch)
        self.carousel.feedback(self._used.take())

    def _renew(self, ids: Any, again: Any, batch: dict[str, Any]) -> None:
        """Give samples that came again, and are in memory, the new values of mutable fields."""
        mutable = [name for name in self.carousel.schema.mutable if name in batch]
        if len(again) == 0 or not mutable:
            return
        newest = {int(ids[index]): index for index in again.tolist()}
        slots = self.carousel.occupied()
        held = self.carousel.reader().ids()[slots].tolist()
        there = [(slot, newest[id]) for slot, id in zip(slots.tolist(), held, strict=True) if id in newest]
        if there:
            where, which = np.array(there, np.int64).T
            self.carousel.refresh(where, {name: batch[name][which] for name in mutable})

    def get_data(
        self, size: int, transform: Transform | None = None, return_index: bool = False, device: Any = None,
        mask_task_out: int | None = None, cpt: int | None = None, return_not_aug: bool = False,
        not_aug_transform: Transform | None = None, force_indexes: Any = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Draw samples: examples, then labels, logits, task labels and true labels, if there are any."""
        if force_indexes is not None:
            slots = np.asarray(force_indexes, np.int64)
        elif mask_task_out is not None:
            slots = self._outside_task(size, mask_task_out, cpt)
        else:
            slots = self.carousel.sample(size).slots
        self._used.add(slots, self.buffer_size)
        return self._batch(slots, transform, return_index, device, return_not_aug, not_aug_transform)

    def _outside_task(self, size: int, task: int, classes: int | None) -> Any:
        """Draw slots whose samples are of other tasks."""
        drawn = self.carousel.sample(len(self))
        if "task_labels" in self.carousel.schema.fields:
            tasks = drawn["task_labels"]
        elif classes is not None:
            tasks = drawn.labels // classes
        else:
            raise ValueError("cpt: expected the classes per task with mask_task_out, since there are no task labels")
        return drawn.slots[tasks != task][:size]

    def get_balanced_data(self, size: int, transform: Transform | None = None, n_classes: int = -1) -> Any:
        """Draw samples of `n_classes` classes, -1 for all, evenly from each class."""
        drawn = self.carousel.sample(len(self))
        first = np.sort(np.unique(drawn.labels, return_index=True)[1])  # where each class was drawn first
        classes = drawn.labels[first if n_classes < 0 else first[:n_classes]]
        chosen = np.flatnonzero(np.isin(drawn.labels, classes))
        labels, slots = drawn.labels[chosen], drawn.slots[chosen]
        order = np.argsort(labels, kind="stable")
        starts = np.searchsorted(labels[order], labels[order])
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order)) - starts
        slots = slots[np.argsort(ranks, kind="stable")[:size]]
        self._used.add(slots, self.buffer_size)
        return self._batch(slots, transform)

    def get_data_by_index(self, indexes: Any, transform: Transform | None = None, device: Any = None) -> Any:
        """Return the samples of slots."""
        return self._batch(np.asarray(indexes, np.int64), transform, device=device)

    def get_all_data(self, transform: Transform | None = None, device: Any = None) -> Any:
        """Return everything in memory."""
        return self._batch(self._slots(), transform, device=device)

    def get_dataloader(
        self, args: Any = None, batch_size: int | None = None, shuffle: bool = False, drop_last: bool = False,
        transform: Transform | None = None, sampler: Any = None,
    ) -> Any:  # fmt: skip
        """Return a loader over a copy of memory."""
        tensors = torch.utils.data.TensorDataset(*self.get_all_data(transform))
        size = batch_size if batch_size is not None else args.batch_size
        return torch.utils.data.DataLoader(
            tensors, batch_size=size, shuffle=shuffle and sampler is None, drop_last=drop_last, sampler=sampler
        )

    def empty(self) -> None:
        """Remove everything, from storage as well."""
        self.carousel.forget(lambda ids, labels: np.ones(len(ids), np.bool_))
        self._seen = SeenIds(np.empty(0, np.int64))

    def to(self, device: Any) -> "MammothBuffer":
        """Let batches go to another device."""
        self.device = device
        return self

    def serialize(self, out_device: Any = "cpu") -> dict[str, Any]:
        """Make the buffer durable, and return the number and step of its checkpoint: samples stay in place."""
        return {"generation": self.carousel.checkpoint(), "step": self.carousel.step}

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """Return the sample of a slot, or the samples of several, without counting them as used."""
        slots = np.asarray(index, np.int64)
        found = self._read(slots.reshape(-1))
        return found if slots.ndim else tuple(tensor[0] for tensor in found)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield every sample in memory."""
        return (self[slot] for slot in self._slots())

    def _slots(self) -> Any:
        """Return the slots in use in rising order: if memory is full, each sample's number is its slot."""
        return np.sort(self.carousel.occupied())

    def _read(self, slots: Any) -> tuple[Tensor, ...]:
        batch = self.carousel.reader().read(slots)
        return tuple(torch.from_numpy(batch.labels if name == "labels" else batch[name])
                     for name in self.used_attributes)  # fmt: skip

    def _batch(
        self, slots: Any, transform: Transform | None, return_index: bool = False, device: Any = None,
        return_not_aug: bool = False, not_aug_transform: Transform | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        where = self.device if device is None else device
        examples, *rest = self._read(slots)
        shown = examples if transform is None else torch.stack([transform(example) for example in examples])
        plain = () if not return_not_aug else (
            examples if not_aug_transform is None else torch.stack([not_aug_transform(one) for one in examples]),
        )  # fmt: skip
        found = [*plain, shown, *rest]
        if return_index:
            found.insert(0, torch.from_numpy(slots))
        return tuple(tensor.to(where) for tensor in found)
