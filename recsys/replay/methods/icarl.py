"""iCaRL: incremental classifier and representation learning (Rebuffi et al., CVPR 2017, arXiv 1611.07725)."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize, one_hot

from memhier.recsys.replay.methods.exemplars import herding
from memhier.recsys.replay.methods.learner import Learner, blocks, classes_in, images_of, labels_of

__all__ = ["ICaRL"]


class ICaRL(Learner):
    """Exemplars by herding, distillation from the model before, and the nearest class mean decides."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before: Any = None
        self.old: list[int] = []

    def learn_task(self, images: Tensor, labels: Tensor) -> None:
        """Learn the samples of new classes, then choose exemplars of them."""
        self.old = list(self.seen)
        first = self.buffer.stats()["arrivals"]
        order = torch.from_numpy(self.random.permutation(len(images)))
        images, labels = images[order], labels[order]
        for some in blocks(torch.arange(len(images)), 1024):
            self.keep(images[some], labels[some])
        super().learn_task(images, labels)
        self.before = copy.deepcopy(self.model).eval()
        each = self.buffer.capacity // len(self.seen)
        for label in classes_in(labels):
            of_class = torch.nonzero(labels == label)[:, 0][:2000]
            chosen = of_class[herding(self.features(images[of_class]), each)]
            self.buffer.hold((first + chosen).numpy())

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn new classes from their labels, old ones from the outputs of the model before."""
        replayed = self.buffer.sample(self.batch)
        inputs = self.prepare(torch.cat([images, images_of(replayed)]))
        logits = self.model(inputs)
        targets = one_hot(torch.cat([labels, labels_of(replayed)]), self.classes).float()
        if self.before is not None:
            with torch.no_grad():
                targets[:, self.old] = self.before(inputs)[:, self.old].sigmoid()
        loss = binary_cross_entropy_with_logits(logits[:, self.seen], targets[:, self.seen], reduction="sum")
        self.descend(loss / len(logits))
        self.end_step(replayed, logits[len(images) :])

    def features(self, images: Tensor) -> Tensor:
        """Return unit vectors of stored images."""
        self.model.eval()
        with torch.no_grad():
            found = torch.cat([self.model.features(self.prepare(some)) for some in blocks(images, 512)])
        self.model.train()
        return normalize(found)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the classes whose exemplars have the nearest mean."""
        everything = self.buffer.sample(len(self.buffer))
        features, labels = self.features(images_of(everything)), labels_of(everything)
        means = normalize(torch.stack([features[labels == label].mean(0) for label in self.seen]))
        self.model.eval()
        with torch.no_grad():
            vectors = normalize(self.model.features(inputs))
        self.model.train()
        return torch.tensor(self.seen)[(vectors @ means.T).argmax(1)]
