"""Embedding tables larger than DRAM, trained bit for bit as if they were in memory."""

from memhier.recsys.embedding.bag import EmbeddingBag
from memhier.recsys.embedding.initial import Normal, Uniform, initial_weights
from memhier.recsys.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingBag",
    "Normal",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Uniform",
    "initial_weights",
]
