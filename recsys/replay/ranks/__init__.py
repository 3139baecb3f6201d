"""Replay by several trainers: one buffer that they share, or a shard for each; needs torch."""

from memhier.recsys.replay.ranks.sharded import ShardedBuffer
from memhier.recsys.replay.ranks.shared import SharedBuffer

__all__ = ["ShardedBuffer", "SharedBuffer"]
