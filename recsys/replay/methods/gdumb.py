"""GDumb: greedily balanced memory, and a model trained on nothing else (Prabhu et al., ECCV 2020)."""

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from memhier.recsys.replay.methods.learner import Learner, images_of, labels_of

__all__ = ["GDumb"]


class GDumb(Learner):
    """The stream only fills the buffer; after a task a new model is trained on memory, which swaps keep changing.

    Attributes
    ----------
    steps
        Of the training after each task.
    """

    steps = 800

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Hand samples to the buffer."""
        if keeps:
            self.keep(images, labels)

    def learn_task(self, images: Tensor, labels: Tensor) -> None:
        """Take samples in, and train a model on memory."""
        super().learn_task(images, labels)
        self.model: Any = self.make_model()
        self.start_optimizer()
        for step in range(self.steps):
            self.optimizer.param_groups[0]["lr"] = self.rate * (0.505 + 0.495 * math.cos(math.pi * step / self.steps))
            batch = self.buffer.sample(self.batch)
            logits = self.model(self.prepare(images_of(batch)))
            self.descend(cross_entropy(logits, labels_of(batch)))
            self.end_step(batch, logits)
