"""RM: Rainbow Memory (Bang et al., CVPR 2021, arXiv 2103.17230)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from memhier.recsys.replay.methods.exemplars import rainbow
from memhier.recsys.replay.methods.learner import Learner, blocks, images_of, labels_of

__all__ = ["RM"]


class RM(Learner):
    """Memory keeps samples of all degrees of uncertainty; batches of stream and memory are mixed by CutMix.

    Attributes
    ----------
    mixed
        The share of steps with CutMix.
    noise
        Standard deviation of the noise on inputs that measures how sure the model is of them.
    """

    mixed: float = 0.5
    noise: float = 0.3

    def learn_task(self, images: Tensor, labels: Tensor) -> None:
        """Learn the samples of new classes, then choose which of them memory keeps."""
        first = self.buffer.stats()["arrivals"]
        order = torch.from_numpy(self.random.permutation(len(images)))
        images, labels = images[order], labels[order]
        for some in blocks(torch.arange(len(images)), 1024):
            self.keep(images[some], labels[some])
        super().learn_task(images, labels)
        few = torch.arange(min(len(images), 4000))
        each = self.buffer.capacity // len(self.seen)
        chosen = few[rainbow(lambda: self.predict_noisy(images[few]), labels[few], each)]
        self.buffer.hold((first + chosen).numpy())

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn from a batch of the stream and one of memory, mixed."""
        old = self.buffer.sample(self.batch)
        inputs, targets = self.prepare(torch.cat([images, images_of(old)])), torch.cat([labels, labels_of(old)])
        plain = self.random.random() >= self.mixed
        if plain:
            logits = self.model(inputs)
            loss = cross_entropy(logits, targets)
        else:
            other = torch.from_numpy(self.random.permutation(len(inputs)))
            inputs, share = self.cut_mix(inputs, other)
            logits = self.model(inputs)
            loss = share * cross_entropy(logits, targets) + (1 - share) * cross_entropy(logits, targets[other])
        self.descend(loss)
        self.end_step(old, logits[len(images) :])

    def cut_mix(self, inputs: Tensor, other: Tensor) -> tuple[Tensor, float]:
        """Paste a rectangle of other images; return the images and the share of each that is its own."""
        height, width = inputs.shape[-2:]
        side = (1 - self.random.random()) ** 0.5
        rows, columns = int(height * side), int(width * side)
        top, left = (int(self.random.integers(0, size + 1)) for size in (height - rows, width - columns))
        mixed = inputs.clone()
        area = (..., slice(top, top + rows), slice(left, left + columns))
        mixed[area] = inputs[other][area]
        return mixed, 1 - rows * columns / (height * width)

    def predict_noisy(self, images: Tensor) -> Tensor:
        """Return the predictions of the model for stored images with noise on them."""
        inputs = self.prepare(images)
        noise = torch.from_numpy(self.random.normal(0, self.noise, inputs.shape)).float()
        return self.predict(inputs + noise)
