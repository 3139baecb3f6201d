"""BiC: bias correction (Wu et al., CVPR 2019, arXiv 1905.13260)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from memhier.recsys.replay.methods.learner import Learner, classes_in, images_of, labels_of

__all__ = ["BiC"]


class BiC(Learner):
    """Distillation while learning; then a line through the new classes' logits, fitted on balanced samples.

    Attributes
    ----------
    temperature
        Of distillation.
    weight
        Of distillation at most; small, since swapping brings many hard labels (CarM, 4.4).
    """

    temperature: float = 2.0
    weight: float = 0.2

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before: Any = None
        self.old: list[int] = []
        # Of every task its classes and the line: scale and shift of their logits.
        self.lines: list[tuple[list[int], Tensor]] = []
        self.held_out: dict[int, Tensor] = {}

    def learn_task(self, images: Tensor, labels: Tensor) -> None:
        """Learn the samples of new classes, all but a few, and correct their bias by those."""
        self.old = list(self.seen)
        new = classes_in(labels)
        each = max(2, self.buffer.capacity // self.classes // 10)
        held = torch.zeros(len(labels), dtype=torch.bool)
        for label in new:
            of_class = torch.nonzero(labels == label)[:, 0][:each]
            self.held_out[label] = images[of_class]
            held[of_class] = True
        super().learn_task(images[~held], labels[~held])
        self.lines.append((new, torch.tensor([1.0, 0.0])))
        if self.old:
            self.fit_line()
        self.before = copy.deepcopy(self.model).eval()

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn from labels, and from the logits of the model before for the old classes."""
        replayed = self.buffer.sample(self.batch)
        inputs = self.prepare(torch.cat([images, images_of(replayed)]))
        logits = self.model(inputs)
        loss = cross_entropy(logits, torch.cat([labels, labels_of(replayed)]))
        if self.old:
            with torch.no_grad():
                said = softmax(self.corrected(self.before(inputs))[:, self.old] / self.temperature, 1)
            told = log_softmax(logits[:, self.old] / self.temperature, 1)
            share = self.weight * len(self.old) / len(self.seen)
            loss = (1 - share) * loss - share * (said * told).sum(1).mean()
        self.descend(loss)
        self.end_step(replayed, logits[len(images) :])
        if keeps:
            self.keep(images, labels)

    def fit_line(self) -> None:
        """Find scale and shift of the new classes' logits on samples held out, as many of each class."""
        inputs = self.prepare(torch.cat([self.held_out[label] for label in self.seen]))
        targets = torch.cat([torch.full((len(self.held_out[label]),), label) for label in self.seen])
        self.model.eval()
        with torch.no_grad():
            logits = self.model(inputs)
        self.model.train()
        classes, line = self.lines[-1]
        line = nn.Parameter(line.clone())
        self.lines[-1] = (classes, line)
        optimizer = torch.optim.Adam([line], lr=0.02)
        for _ in range(200):
            optimizer.zero_grad()
            loss = cross_entropy(self.corrected(logits)[:, self.seen], self.rank(targets))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.lines[-1] = (classes, line.detach())

    def rank(self, labels: Tensor) -> Tensor:
        """Return the ranks of labels among the classes seen."""
        ranks = torch.zeros(self.classes, dtype=torch.int64)
        ranks[self.seen] = torch.arange(len(self.seen))
        return ranks[labels]

    def corrected(self, logits: Tensor) -> Tensor:
        """Return logits with the lines of their tasks applied."""
        scale, shift = torch.ones(self.classes), torch.zeros(self.classes)
        for classes, line in self.lines:
            scale = scale.index_put((torch.tensor(classes),), line[0])
            shift = shift.index_put((torch.tensor(classes),), line[1])
        return logits * scale + shift

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the classes of the largest corrected logits."""
        self.model.eval()
        with torch.no_grad():
            logits = self.corrected(self.model(inputs))[:, self.seen]
        self.model.train()
        return torch.tensor(self.seen)[logits.argmax(1)]
