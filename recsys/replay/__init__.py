"""The replay buffer: a learner's memory in two tiers (Carousel Memory, arXiv 2110.07276)."""

from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.buffer import CarouselBuffer
from memhier.recsys.replay.placement.admit import Admission, Everything, Reservoir, Ring
from memhier.recsys.replay.placement.balanced import Balanced, ClassBalanced
from memhier.recsys.replay.placement.weighted import Weighted
from memhier.recsys.replay.policies import (
    AgeSwap,
    DeckSwap,
    FixedRatio,
    GateSwap,
    LossSwap,
    Pool,
    RandomSwap,
    Ratio,
    SteeredRatio,
    SwapPolicy,
    Used,
)
from memhier.recsys.replay.product import ProductCodes
from memhier.recsys.replay.reader import MemoryReader
from memhier.recsys.replay.schema import Field, Schema
from memhier.recsys.replay.stored import StoredSamples

__all__ = [
    "Admission",
    "AgeSwap",
    "Balanced",
    "Batch",
    "CarouselBuffer",
    "ClassBalanced",
    "DeckSwap",
    "Everything",
    "Field",
    "FixedRatio",
    "GateSwap",
    "LossSwap",
    "MemoryReader",
    "Pool",
    "ProductCodes",
    "RandomSwap",
    "Ratio",
    "Reservoir",
    "Ring",
    "Schema",
    "SteeredRatio",
    "StoredSamples",
    "SwapPolicy",
    "Used",
    "Weighted",
]
