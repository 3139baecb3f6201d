"""ER: experience replay (Chaudhry et al., 2019; Rolnick et al., NeurIPS 2019)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from memhier.recsys.replay.methods.learner import Learner, images_of, labels_of

__all__ = ["ER"]


class ER(Learner):
    """Every step learns from a batch of the stream and one of memory."""

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn from a batch of the stream and as many samples of memory."""
        old = self.buffer.sample(self.batch)
        together = torch.cat([images, images_of(old)])
        logits = self.model(self.prepare(together))
        self.descend(cross_entropy(logits, torch.cat([labels, labels_of(old)])))
        self.end_step(old, logits[len(images) :])
        if keeps:
            self.keep(images, labels)
