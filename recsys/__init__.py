"""Training systems on the tiers: embedding tables larger than DRAM, and the replay buffer."""

from typing import TYPE_CHECKING

from memhier.lazy import lazy

if TYPE_CHECKING:
    from memhier.recsys.contrastive import cosine_contrastive_loss
    from memhier.recsys.embedding import (
        SGD,
        Adagrad,
        Adam,
        CTRBatch,
        Embedding,
        EmbeddingBag,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        Hash64,
        Jagged,
        Lookahead,
        Normal,
        Pooled,
        QuantisedTable,
        RowWiseAdagrad,
        RowWiseAdam,
        ShardedEmbeddingBagCollection,
        SharedLoader,
        TableReader,
        Uniform,
        export_npy,
        export_parquet,
        export_quantised,
        export_safetensors,
        forecast,
        hash64,
        initial_weights,
        lookahead,
        read_amazon,
        read_avazu,
        read_criteo,
        read_criteo_npy,
        read_criteo_parquet,
        read_lightgcn,
        read_movielens,
        save_trace,
        split_samples,
        to_embedding_bag,
        trace_ids,
        vector_blocks,
    )
    from memhier.recsys.negatives import TiledNegatives
    from memhier.recsys.replay import CarouselBuffer
    from memhier.recsys.replay.ranks import ShardedBuffer, SharedBuffer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CTRBatch",
    "CarouselBuffer",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Hash64",
    "Jagged",
    "Lookahead",
    "Normal",
    "Pooled",
    "QuantisedTable",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ShardedBuffer",
    "ShardedEmbeddingBagCollection",
    "SharedBuffer",
    "SharedLoader",
    "TableReader",
    "TiledNegatives",
    "Uniform",
    "cosine_contrastive_loss",
    "export_npy",
    "export_parquet",
    "export_quantised",
    "export_safetensors",
    "forecast",
    "hash64",
    "initial_weights",
    "lookahead",
    "read_amazon",
    "read_avazu",
    "read_criteo",
    "read_criteo_npy",
    "read_criteo_parquet",
    "read_lightgcn",
    "read_movielens",
    "save_trace",
    "split_samples",
    "to_embedding_bag",
    "trace_ids",
    "vector_blocks",
]

_ELSEWHERE = {
    "CarouselBuffer": "replay", "ShardedBuffer": "replay.ranks", "SharedBuffer": "replay.ranks",
    "TiledNegatives": "negatives", "cosine_contrastive_loss": "contrastive",
}  # fmt: skip

# Names load on use: the embedding tables need torch, the replay buffer of one trainer does not.
if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__, __dir__ = lazy(
        __name__,
        {name: f"memhier.recsys.{_ELSEWHERE.get(name, 'embedding')}" for name in __all__},
        [*globals()],
    )
