"""The MRNG rule without the compiled core."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["prune_links"]

NO_ROW = 0xFFFFFFFF

Ints: TypeAlias = npt.NDArray[np.int64]


def prune_links(
    *, rows: npt.NDArray[np.float32], numbers: Ints, candidates: Ints, links: npt.NDArray[np.uint32]
) -> None:
    """Fill `links`; see :func:`memhier.ann.decoder.core.core.prune_links`."""
    links[:] = NO_ROW
    for place, (own, near) in enumerate(zip(numbers, candidates, strict=True)):
        others = np.unique(near[(near >= 0) & (near != own)])
        products = rows[others] @ rows[own]
        order = np.lexsort((others, -products))
        others, products = others[order], products[order]
        between = rows[others] @ rows[others].T
        kept: list[int] = []
        for i in range(len(others)):
            if len(kept) < links.shape[1] and bool((between[i, kept] <= products[i]).all()):
                kept.append(i)
        kept += [i for i in range(len(others)) if i not in set(kept)][: links.shape[1] - len(kept)]
        links[place, : len(kept)] = others[kept]
