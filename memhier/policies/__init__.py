"""Which keys stay in DRAM: one protocol, and the policies that follow it."""

from memhier.policies._base import Access, Policy
from memhier.policies.belady import Belady
from memhier.policies.lfu import LFU
from memhier.policies.lru import LRU
from memhier.policies.s3fifo import S3FIFO
from memhier.policies.static import Static

__all__ = ["LFU", "LRU", "S3FIFO", "Access", "Belady", "Policy", "Static"]
