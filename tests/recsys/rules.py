"""Optimizers of tables, each with torch's own of the same numbers."""

from typing import Any

import torch

from memhier.recsys import SGD, Adagrad, Adam

__all__ = ["RULES"]

RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (Adagrad(lr=0.1, lr_decay=0.01), lambda weights: torch.optim.Adagrad(weights, lr=0.1, lr_decay=0.01)),
    "adam": (Adam(lr=0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
}
