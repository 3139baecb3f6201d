"""The decoder's core: the compiled one, or the same in NumPy."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.decoder.core.python_core import PythonCore
from memhier.ann.decoder.core.python_links import prune_links as prune_in_python

if TYPE_CHECKING:
    from memhier_native._core import DecoderCore

__all__ = ["new_core", "prune_links"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def new_core(projection: Any, blocks: Any, codes: Any, graph: Any, exact: Any) -> "DecoderCore | PythonCore":
    """Return a core over arrays, which it holds on to; see ``memhier_native._core.DecoderCore``."""
    kind = PythonCore if backend.core is None else backend.core.DecoderCore
    return kind(projection=projection, blocks=blocks, codes=codes, graph=graph, exact=exact)


def prune_links(rows: Floats, numbers: Ints, candidates: Ints, degree: int) -> npt.NDArray[np.uint32]:
    """Return links by the MRNG rule: a neighbour stays unless one that stayed is nearer to it than the row is.

    Parameters
    ----------
    rows
        float32 ``[V, width]``, all of one norm, so that the larger product is the nearer.
    numbers
        int64 ``[n]``: of the rows whose links are wanted.
    candidates
        int64 ``[n, c]``: rows near each, -1 for none.

    Returns
    -------
    numpy.ndarray
        uint32 ``[n, degree]``. Places that the rule leaves go to the nearest of the others, then to none.
    """
    links = np.empty((len(numbers), degree), np.uint32)
    prune = prune_in_python if backend.core is None else backend.core.prune_links
    prune(rows=rows, numbers=numbers, candidates=candidates, links=links)
    return links
