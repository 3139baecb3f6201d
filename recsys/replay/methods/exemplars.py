"""Which samples of a task are worth keeping in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["herding", "rainbow"]


def herding(features: Tensor, count: int) -> Tensor:
    """Return the samples whose mean stays closest to that of all, the most telling first (Welling, ICML 2009).

    Parameters
    ----------
    features
        float32 [n, d].
    count
        How many.

    Returns
    -------
    torch.Tensor
        int64 [min(count, n)].
    """
    mean, total = features.mean(0), torch.zeros_like(features[0])
    taken: list[int] = []
    free = torch.zeros(len(features))
    for number in range(1, min(count, len(features)) + 1):
        # The sample with which the mean of those taken comes closest to that of all.
        distance = ((total + features) / number - mean).square().sum(1) + free
        best = int(distance.argmin())
        taken.append(best)
        total += features[best]
        free[best] = torch.inf
    return torch.tensor(taken, dtype=torch.int64)


def rainbow(predict: Callable[[], Tensor], labels: Tensor, count: int, views: int = 4) -> Tensor:
    """Return samples of all degrees of uncertainty (Rainbow Memory: Bang et al., CVPR 2021).

    Parameters
    ----------
    predict
        Returns predictions for the samples, int64 [n], under another random augmentation each time.
    labels
        int64 [n]: the right ones.
    count
        How many of each class.

    Returns
    -------
    torch.Tensor
        int64: of every class evenly spaced ones in the order of how often views are predicted wrong.
    """
    wrong = sum((predict() != labels).float() for _ in range(views))
    chosen = []
    for label in sorted(set(labels.tolist())):
        of_class = torch.nonzero(labels == label)[:, 0]
        order = of_class[torch.argsort(torch.as_tensor(wrong)[of_class], stable=True)]
        chosen.append(order[torch.linspace(0, len(order) - 1, min(count, len(order))).long()])
    return torch.cat(chosen)
