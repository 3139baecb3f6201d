"""Training systems on the tiers: embedding tables larger than DRAM; the replay buffer comes here."""

from memhier.recsys.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Lookahead,
    Normal,
    Pooled,
    RowWiseAdagrad,
    RowWiseAdam,
    Uniform,
    initial_weights,
    lookahead,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "Lookahead",
    "Normal",
    "Pooled",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Uniform",
    "initial_weights",
    "lookahead",
]
