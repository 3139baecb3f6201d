"""The DRAM view of a layer: its projection, codes, graph, norms and hashes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.coding.codes import BlockCodes, RowCodes
from memhier.ann.decoder.coding.digits import DigitCodes
from memhier.ann.decoder.coding.graph import Graph
from memhier.ann.decoder.coding.projection import Projection
from memhier.ann.decoder.core.core import new_core
from memhier.ann.decoder.core.python_core import PythonCore
from memhier.ann.decoder.layer import Floats

if TYPE_CHECKING:
    from memhier_native._core import DecoderCore

__all__ = ["Codes"]

_PARTS = {"projection": Projection, "blocks": BlockCodes, "rows": RowCodes, "graph": Graph, "digits": DigitCodes}


@dataclass(frozen=True, slots=True)
class Codes:
    """The DRAM view of a layer.

    Attributes
    ----------
    graph
        Links, and seeds by group of contexts; needs `rows`.
    norms
        float32 ``[V]``: upper bounds of the norms of the layer's rows.
    hashes
        uint64 ``[V]``: hashes of the rows; they tell which rows training has changed.
    digits
        The same codes in fewer bytes, for a large preview.
    """

    projection: Projection
    blocks: BlockCodes
    rows: RowCodes | None
    graph: Graph | None
    norms: Floats
    hashes: npt.NDArray[np.uint64]
    digits: DigitCodes | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Words and dimension."""
        return len(self.norms), len(self.projection.mean)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return sum(array.nbytes for array in self.arrays().values())

    @property
    def variance(self) -> float:
        """Variance of a logit per squared norm, if the part outside the width spreads evenly over its directions."""
        return 1 / max(1, len(self.projection.mean) - self.blocks.width)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by part and field, such as ``"graph/links"``."""
        parts = ((name, getattr(self, name)) for name in _PARTS)
        found = {
            f"{name}/{field}": getattr(part, field)
            for name, part in parts
            if part is not None
            for field in part.__dataclass_fields__
        }
        return found | {"codes/norms": self.norms, "codes/hashes": self.hashes}

    @classmethod
    def of(cls, arrays: dict[str, npt.NDArray[Any]]) -> Self:
        """Return the view that :meth:`arrays` lists."""
        parts: dict[str, Any] = {}
        for name, kind in _PARTS.items():
            fields = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
            parts[name] = kind(**fields) if fields else None
        return cls(**parts, norms=arrays["codes/norms"], hashes=arrays["codes/hashes"])

    def core(self, exact: Any) -> "DecoderCore | PythonCore":
        """Return a core over these codes and, unless `exact` is None, over the exact rows in DRAM."""
        projection, blocks, rows = self.projection, self.blocks, self.rows
        graph, digits = self.graph, self.digits
        return new_core(
            (projection.mean, projection.turn, projection.common, len(self.norms)),
            (blocks.codes, blocks.numbers, blocks.width),
            None if rows is None else (rows.codes, rows.numbers),
            None if graph is None else (graph.links, graph.centres, graph.halves, graph.starts, graph.seeds),
            exact,
            None if digits is None else (digits.codes, digits.directions, digits.values),
        )
