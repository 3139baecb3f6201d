"""The graph decoder (FGD, arXiv 1806.04189): the largest logits of an output layer without the full product."""

from typing import TYPE_CHECKING

from memhier.lazy import lazy

if TYPE_CHECKING:
    from memhier.ann.decoder.answers import LogProb, Partition, TopK
    from memhier.ann.decoder.coding.fgd import FGD, FGDAnswer
    from memhier.ann.decoder.index import LogitIndex
    from memhier.ann.decoder.module.decoder import SparseLogits, TopKSoftmax
    from memhier.ann.decoder.module.head import open_head

__all__ = ["FGD", "FGDAnswer", "LogProb", "LogitIndex", "Partition", "SparseLogits", "TopK", "TopKSoftmax", "open_head"]

# Names load on use: SparseLogits and TopKSoftmax need torch, which takes seconds to load.
_HOMES = {
    "answers": ("LogProb", "Partition", "TopK"),
    "coding.fgd": ("FGD", "FGDAnswer"),
    "index": ("LogitIndex",),
    "module.decoder": ("SparseLogits", "TopKSoftmax"),
    "module.head": ("open_head",),
}
if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__, __dir__ = lazy(
        __name__,
        {name: f"memhier.ann.decoder.{home}" for home, names in _HOMES.items() for name in names},
        [*globals()],
    )
