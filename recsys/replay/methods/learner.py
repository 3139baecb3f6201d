"""The base of the methods: batches of the stream, descent, and calls of the buffer."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from memhier.recsys.replay.adapters.common import scores_of
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.buffer import CarouselBuffer
from memhier.recsys.replay.schema import Field, Schema

__all__ = ["Learner", "Prepare", "blocks", "classes_in", "images_of", "labels_of"]

Prepare = Callable[[Tensor], Tensor]
"""From images as they are stored, uint8 [n, ...], to inputs of the model; may augment."""


class Learner:
    """A learner that meets the classes of a data set task by task, and replays samples that it has seen.

    Parameters
    ----------
    make_model
        Returns a new model: from the result of `prepare` to logits ``[n, classes]``. Its ``features`` turns the same
        into vectors, for methods that compare them.
    buffer
        Made with :meth:`schema`, and the admission of the method.
    prepare
        From stored images to the model's input, while training.
    classes
        Of all tasks.
    rate
        Learning rate of SGD; it falls to a tenth linearly within every task if `decays`.
    batch
        Samples of the stream in a step; as many are replayed.
    epochs
        Passes over each task.
    seed
        Of the order of the stream and of random augmentation.

    Attributes
    ----------
    admit
        The admission that the method's authors use.
    stores_logits
        Whether samples carry the logits that the model gave them. They come to the buffer in the last pass over their
        task then, with the logits of a model that knows them; in the first without.
    """

    admit: ClassVar[str] = "class_balanced"
    stores_logits: ClassVar[bool] = False

    def __init__(
        self, make_model: Callable[[], nn.Module], buffer: CarouselBuffer, prepare: Prepare, *, classes: int,
        rate: float = 0.05, batch: int = 32, epochs: int = 1, decays: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.make_model = make_model
        self.model: Any = make_model()
        self.buffer = buffer
        self.prepare = prepare
        self.classes = classes
        self.decays: bool
        self.epochs: int
        self.batch: int
        self.rate: float
        self.rate, self.batch, self.epochs, self.decays = rate, batch, epochs, decays
        self.random: np.random.Generator = np.random.default_rng(seed)
        self.seen: list[int] = []
        self.start_optimizer()

    @classmethod
    def schema(cls, image_shape: tuple[int, ...], classes: int) -> Schema:
        """Return the schema of a buffer for the method."""
        fields: dict[str, Any] = {"image": ("uint8", image_shape)}
        if cls.stores_logits:
            fields["logits"] = Field("float32", (classes,), mutable=True)
        return Schema(fields)

    def learn_task(self, images: Tensor, labels: Tensor) -> None:
        """Learn the samples of new classes: images uint8 [n, ...], labels int64 [n]."""
        self.seen += [label for label in classes_in(labels) if label not in self.seen]
        keeping = self.epochs - 1 if self.stores_logits else 0
        for some, epoch in self.order(len(images)):
            self.step(images[some], labels[some], keeps=epoch == keeping)

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn from a batch of the stream, which comes once in every pass; the buffer keeps it in one of them."""
        raise NotImplementedError

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the labels of prepared images, among the classes seen, int64 [n]."""
        self.model.eval()
        with torch.no_grad():
            logits: Tensor = self.model(inputs)[:, self.seen]
        self.model.train()
        return torch.tensor(self.seen)[logits.argmax(1)]

    # For the methods.

    def order(self, count: int) -> Iterator[tuple[Tensor, int]]:
        """Yield the samples of every batch with the number of the pass, and let the learning rate fall."""
        steps = self.epochs * -(-count // self.batch)
        done = 0
        for epoch in range(self.epochs):
            for some in blocks(torch.from_numpy(self.random.permutation(count)), self.batch):
                if self.decays:
                    self.optimizer.param_groups[0]["lr"] = self.rate * (1 - 0.9 * done / steps)
                done += 1
                yield some, epoch

    def start_optimizer(self) -> None:
        """Begin to descend with the current model."""
        self.optimizer: torch.optim.SGD = torch.optim.SGD(self.model.parameters(), lr=self.rate)

    def descend(self, loss: Tensor) -> None:
        """Take one step of SGD."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def keep(self, images: Tensor, labels: Tensor, **fields: Any) -> None:
        """Hand samples of the stream to the buffer."""
        self.buffer.add({"image": images.numpy(), **fields}, labels=labels.numpy())

    def end_step(self, batch: Batch, logits: Tensor) -> None:
        """End a step of the buffer with the samples that were used, and the logits of the model for them."""
        self.buffer.feedback(batch, scores=scores_of(self.buffer.swap, logits, labels_of(batch)))


def classes_in(labels: Tensor) -> list[int]:
    """Return which labels there are, in rising order."""
    return sorted(set(labels.tolist()))


def blocks(values: Tensor, size: int) -> list[Tensor]:
    """Return consecutive parts of at most `size` values, in place."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def images_of(batch: Batch) -> Tensor:
    """Return the images of a batch, in place."""
    return torch.from_numpy(batch["image"])


def labels_of(batch: Batch) -> Tensor:
    """Return the labels of a batch, in place."""
    return torch.from_numpy(batch.labels)
