"""A vector index over several machines: shards in Ray actors, each an index on the disk of its node."""

from memhier.ann.cluster.index import ShardedIndex

__all__ = ["ShardedIndex"]
