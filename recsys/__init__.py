"""Training systems on the tiers: embedding tables larger than DRAM; the replay buffer comes here."""

from memhier.recsys.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBag,
    Normal,
    RowWiseAdagrad,
    RowWiseAdam,
    Uniform,
    initial_weights,
)

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
