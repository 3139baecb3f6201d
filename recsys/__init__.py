"""Training systems on the tiers: embedding tables larger than DRAM, and the replay buffer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memhier.recsys.embedding import (
        SGD,
        Adagrad,
        Adam,
        CTRBatch,
        EmbeddingBag,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        Lookahead,
        Normal,
        Pooled,
        QuantisedTable,
        RowWiseAdagrad,
        RowWiseAdam,
        ShardedEmbeddingBagCollection,
        Uniform,
        export_npy,
        export_parquet,
        export_quantised,
        export_safetensors,
        forecast,
        initial_weights,
        lookahead,
        read_avazu,
        read_criteo,
        read_criteo_npy,
        read_criteo_parquet,
        read_lightgcn,
        read_movielens,
        reshard,
        save_trace,
        to_embedding_bag,
    )
    from memhier.recsys.replay import CarouselBuffer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CTRBatch",
    "CarouselBuffer",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "Lookahead",
    "Normal",
    "Pooled",
    "QuantisedTable",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ShardedEmbeddingBagCollection",
    "Uniform",
    "export_npy",
    "export_parquet",
    "export_quantised",
    "export_safetensors",
    "forecast",
    "initial_weights",
    "lookahead",
    "read_avazu",
    "read_criteo",
    "read_criteo_npy",
    "read_criteo_parquet",
    "read_lightgcn",
    "read_movielens",
    "reshard",
    "save_trace",
    "to_embedding_bag",
]

# Loaded when first asked for: the embedding tables need torch, the replay buffer does not.
_REPLAY = ("CarouselBuffer",)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'memhier.recsys' has no attribute {name!r}")
    return getattr(import_module(f"memhier.recsys.{'replay' if name in _REPLAY else 'embedding'}"), name)
