"""The engines: answers from the codes of a layer and its exact rows, in DRAM or on SSD."""

from memhier.ann.decoder.engine.engine import Engine

__all__ = ["Engine"]
