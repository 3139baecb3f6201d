"""The graph decoder (FGD, arXiv 1806.04189): the largest logits of an output layer without the full product."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memhier.ann.decoder.answers import LogProb, Partition, TopK
from memhier.ann.decoder.coding.fgd import FGD, FGDAnswer
from memhier.ann.decoder.index import LogitIndex

if TYPE_CHECKING:
    from memhier.ann.decoder.module.decoder import SparseLogits, TopKSoftmax

__all__ = ["FGD", "FGDAnswer", "LogProb", "LogitIndex", "Partition", "SparseLogits", "TopK", "TopKSoftmax"]


def __getattr__(name: str) -> Any:
    # Only these need PyTorch, which takes seconds to load.
    if name not in ("SparseLogits", "TopKSoftmax"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("memhier.ann.decoder.module.decoder"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{name} needs PyTorch: pip install 'memhier[torch]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
