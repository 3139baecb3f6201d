"""Embedding tables larger than DRAM, trained bit for bit as if they were in memory."""

from memhier.recsys.embedding.collection import EmbeddingBagCollection, EmbeddingBagConfig, Pooled
from memhier.recsys.embedding.export import (
    export_npy,
    export_parquet,
    export_quantised,
    export_safetensors,
    to_embedding_bag,
    vector_blocks,
)
from memhier.recsys.embedding.ids.hash64 import Hash64, hash64
from memhier.recsys.embedding.initial import Normal, Uniform, initial_weights
from memhier.recsys.embedding.jagged.embedding_collection import EmbeddingCollection, EmbeddingConfig
from memhier.recsys.embedding.jagged.sequences import Jagged
from memhier.recsys.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from memhier.recsys.embedding.reading.forecast import forecast, save_trace
from memhier.recsys.embedding.reading.lookahead import Lookahead, lookahead
from memhier.recsys.embedding.reading.readers import (
    CTRBatch,
    read_amazon,
    read_avazu,
    read_criteo,
    read_criteo_npy,
    read_criteo_parquet,
    read_lightgcn,
    read_movielens,
)
from memhier.recsys.embedding.reading.shared_loader import SharedLoader, split_samples
from memhier.recsys.embedding.reading.traced import trace_ids
from memhier.recsys.embedding.serving.quantised_table import QuantisedTable
from memhier.recsys.embedding.serving.table_reader import TableReader
from memhier.recsys.embedding.sharding.sharded import ShardedEmbeddingBagCollection
from memhier.recsys.embedding.single.bag import EmbeddingBag
from memhier.recsys.embedding.single.embedding import Embedding

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CTRBatch",
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
    "ShardedEmbeddingBagCollection",
    "SharedLoader",
    "TableReader",
    "Uniform",
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
