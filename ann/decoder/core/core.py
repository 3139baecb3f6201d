"""The decoder's core: the compiled one, or the same in NumPy."""

from typing import TYPE_CHECKING, Any

from memhier import backend
from memhier.ann.decoder.core.python_core import PythonCore

if TYPE_CHECKING:
    from memhier_native._core import DecoderCore

__all__ = ["new_core"]


def new_core(projection: Any, blocks: Any, codes: Any, graph: Any, exact: Any) -> "DecoderCore | PythonCore":
    """Return a core over arrays, which it holds on to; see ``memhier_native._core.DecoderCore``."""
    kind = PythonCore if backend.core is None else backend.core.DecoderCore
    return kind(projection=projection, blocks=blocks, codes=codes, graph=graph, exact=exact)
