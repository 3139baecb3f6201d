"""The decoder's core: the compiled one, or the same in NumPy."""

from typing import TYPE_CHECKING, Any

from memhier import backend
from memhier.ann.decoder.core import python_core
from memhier.ann.decoder.core.python_core import PythonCore

if TYPE_CHECKING:
    from memhier_native._core import DecoderCore

__all__ = ["allow_words", "new_core"]


def new_core(
    projection: Any, blocks: Any, codes: Any, graph: Any, exact: Any, digits: Any = None
) -> "DecoderCore | PythonCore":
    """Return a core over arrays, which it holds on to; see ``memhier_native._core.DecoderCore``."""
    kind = PythonCore if backend.core is None else backend.core.DecoderCore
    return kind(projection=projection, blocks=blocks, codes=codes, graph=graph, exact=exact, digits=digits)


def allow_words(allowed: Any, words: int, ends: Any, bits: Any, counts: Any) -> int:
    """Fill zeros of ``bits`` and ``counts`` from a mask, bits or ids.

    Returns -1, the place of the first id out of range, or -2 less the first row that holds no word.

    Parameters
    ----------
    allowed
        C-contiguous: bytes ``[n, words]``, int32 ``[n, ceil(words / 32)]``, or int64 ids with their `ends`.
    ends
        int64 ``[n + 1]``; None but for ids of several rows.
    bits, counts
        uint64 ``[n, padded / 64]`` and int64 ``[n]``.
    """
    made = python_core if backend.core is None else backend.core
    return made.allow_words(allowed=allowed, words=words, ends=ends, bits=bits, counts=counts)
