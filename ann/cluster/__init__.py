"""A vector index over several machines: shards in Ray actors, each an index on the disk of its node."""

from typing import TYPE_CHECKING

from memhier.lazy import lazy

if TYPE_CHECKING:
    from memhier.ann.cluster.index import ShardedIndex

__all__ = ["ShardedIndex"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__, __dir__ = lazy(__name__, {"ShardedIndex": "memhier.ann.cluster.index"}, [*globals()])
