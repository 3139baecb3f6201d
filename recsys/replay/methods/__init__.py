"""Seven methods of continual learning as small training loops over a `CarouselBuffer`: those of Carousel Memory.

They are written to be read and changed. Each learns tasks with :meth:`Learner.learn_task`, and uses swaps if its buffer
does, so that any of them can be run with and without a storage tier.
"""

from memhier.recsys.replay.methods.bic import BiC
from memhier.recsys.replay.methods.der import DERPlusPlus
from memhier.recsys.replay.methods.er import ER
from memhier.recsys.replay.methods.gdumb import GDumb
from memhier.recsys.replay.methods.icarl import ICaRL
from memhier.recsys.replay.methods.learner import Learner
from memhier.recsys.replay.methods.rm import RM
from memhier.recsys.replay.methods.tiny_er import TinyER

__all__ = ["ER", "METHODS", "RM", "BiC", "DERPlusPlus", "GDumb", "ICaRL", "Learner", "TinyER"]

METHODS: dict[str, type[Learner]] = {
    "ER": ER, "DER++": DERPlusPlus, "GDumb": GDumb, "iCaRL": ICaRL, "BiC": BiC, "RM": RM, "TinyER": TinyER,
}  # fmt: skip
"""By the name that their authors gave them."""
