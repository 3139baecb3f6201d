"""Results of searches for items."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ItemResult"]


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The items with the largest MaxSim for each query, best first.

    It unpacks in the order of faiss: ``scores, ids = index.search(queries, k)``.

    Attributes
    ----------
    ids
        int64 ``[q, k]``; ``[k]`` for a single query. -1 stands where the index, or the filter, leaves fewer than `k`
        items.
    scores
        float32, of the same shape: MaxSim, minus infinity beside -1. Ties stand in the order of their ids.
    stats
        Plain numbers of this call, sums over its queries. ``queries``: their number. ``probed``: lists looked at.
        ``candidates``: items with a token there, scored by their lists; ``estimated``: those scored by their codes;
        ``ranked``: those scored exactly. ``reads``, ``pages`` and ``bytes``: the I/Os for them; ``rounds``:
        submissions.
        ``calibrated``: whether the effort is known to reach the recall asked for (never with a filter). ``recall``: the
        recall asked for; 1.0 where the search was exact.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import MultiVectorIndex
    >>> items = [np.eye(4)[:2], np.eye(4)[1:]]
    >>> with MultiVectorIndex.build(tempfile.mkdtemp() + "/index", items, dram="4MiB") as index:
    ...     scores, ids = index.search(np.eye(4)[2:], k=2)
    >>> ids, scores
    (array([1, 0]), array([2., 0.], dtype=float32))
    """

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    stats: dict[str, Any]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """Yield scores, then ids."""
        yield self.scores
        yield self.ids

    def rows(self) -> list[Any]:
        """Return the items found as a list of dicts, ``{"id", "score"}``; for a batch, such a list for each query."""
        if self.ids.ndim == 2:
            return [ItemResult(*pair, {}).rows() for pair in zip(self.ids, self.scores, strict=True)]
        pairs = zip(self.ids.tolist(), self.scores.tolist(), strict=True)
        return [{"id": name, "score": score} for name, score in pairs if name != -1]
