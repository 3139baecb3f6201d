"""TinyER: experience replay with a tiny memory, one pass, tasks known (Chaudhry et al., 2019, arXiv 1902.10486)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from memhier.recsys.replay.methods.learner import Learner, classes_in, images_of, labels_of

__all__ = ["TinyER"]


class TinyER(Learner):
    """Every sample is compared with the classes of its own task only, while learning and in use."""

    admit = "reservoir"

    def learn_task(self, images: Tensor, labels: Tensor) -> None:
        """Learn the samples of a task, whose classes belong together."""
        self.task_of: dict[int, int] = getattr(self, "task_of", {})
        task = len(set(self.task_of.values()))
        self.task_of |= dict.fromkeys(classes_in(labels), task)
        super().learn_task(images, labels)

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn from a batch of the stream and as many samples of memory."""
        old = self.buffer.sample(self.batch)
        logits = self.model(self.prepare(torch.cat([images, images_of(old)])))
        targets = torch.cat([labels, labels_of(old)])
        logits = logits.masked_fill(~self.own_task(targets), -1e9)
        self.descend(cross_entropy(logits, targets))
        self.end_step(old, logits[len(images) :])
        if keeps:
            self.keep(images, labels)

    def own_task(self, labels: Tensor) -> Tensor:
        """Return which classes belong to the task of each label, bool [n, classes]."""
        tasks = torch.tensor([self.task_of.get(label, -1) for label in range(self.classes)])
        own: Tensor = tasks[labels][:, None] == tasks
        return own

    def predict_in_task(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the labels of prepared images among those of their tasks, which the true labels tell."""
        self.model.eval()
        with torch.no_grad():
            logits: Tensor = self.model(inputs).masked_fill(~self.own_task(labels), -1e9)
        self.model.train()
        return logits.argmax(1)
