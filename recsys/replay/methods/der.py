"""DER++: dark experience replay (Buzzega et al., NeurIPS 2020, arXiv 2004.07211)."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from memhier.recsys.replay.adapters.common import scores_of
from memhier.recsys.replay.methods.learner import Learner, images_of, labels_of

__all__ = ["DERPlusPlus"]


class DERPlusPlus(Learner):
    """Memory keeps logits with its samples; one batch of it is held to them, another to its labels.

    Samples of both batches are swapped, as in the code of CarM's authors.

    Attributes
    ----------
    alpha, beta
        Weights of the two; small ones suit swapping, since old logits disagree with many hard labels (CarM, 4.4).
    refreshes
        Whether replayed samples are given the logits of now.
    """

    admit = "reservoir"
    stores_logits = True
    alpha: float = 0.2
    beta: float = 0.5
    refreshes = False

    def step(self, images: Tensor, labels: Tensor, keeps: bool) -> None:
        """Learn from a batch of the stream and two of memory."""
        darker, other = self.buffer.sample(self.batch), self.buffer.sample(self.batch)
        parts = [images, images_of(darker), images_of(other)]
        logits = self.model(self.prepare(torch.cat(parts)))
        new, dark, plain = logits.split([len(part) for part in parts])
        loss = cross_entropy(new, labels)
        if len(other):
            loss = loss + self.alpha * mse_loss(dark, torch.from_numpy(darker["logits"]))
            loss = loss + self.beta * cross_entropy(plain, labels_of(other))
        self.descend(loss)
        if self.refreshes and len(darker):
            self.buffer.refresh(darker, {"logits": dark.detach().numpy()})
        labels_used = torch.cat([labels_of(darker), labels_of(other)])
        scores = scores_of(self.buffer.swap, torch.cat([dark, plain]), labels_used)
        self.buffer.feedback(np.concatenate([darker.slots, other.slots]), scores=scores)
        if keeps:
            self.keep(images, labels, logits=new.detach().numpy())
