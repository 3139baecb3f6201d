"""Results of searches for items."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.payload.table import Hits, HitTable, are_there

__all__ = ["ItemResult"]


@dataclass(frozen=True, slots=True)
class ItemResult(Hits):
    """The items with the largest MaxSim for each query, best first.

    It unpacks in the order of faiss: ``scores, ids = index.search(queries, k)``.

    Attributes
    ----------
    ids
        int64 ``[q, k]``; ``[k]`` for a single query. -1 stands where the index, or the filter, leaves fewer than `k`
        items. An index with strings as ids gives these as objects, and None where there are fewer.
    scores
        float32, of the same shape: MaxSim, minus infinity beside -1. Ties stand in the order of their ids, and those
        of strings in the order of a hash.
    stats
        Plain numbers of this call, sums over its queries. ``queries``: their number. ``probed``: lists looked at.
        ``candidates``: items with a token there, scored by their lists; ``estimated``: those scored by their codes;
        ``ranked``: those scored exactly. ``reads``, ``pages`` and ``bytes``: the I/Os for them; ``rounds``:
        submissions. ``stopped``: why the first query ended; ``stopped_early``: queries that a limit on reads or time
        ended.
        ``calibrated``: whether the effort is known to reach the recall asked for (never with a filter). ``recall``: the
        recall asked for, or less where limits forbid it; 1.0 where the search was exact. ``escalated``: ``"exact"``
        where some query was compared with all items by bounds that hold for certain, as it is unlike those calibrated
        or the recall is too high; ``"no"`` elsewhere.
        ``payload_reads``, ``payload_pages`` and ``payload_bytes``:
        the I/Os for fields and for strings, which are none of the others.
    fields
        Attributes and documents by name, each of the shape of `ids`, as :class:`memhier.ann.SearchResult` has them;
        empty where ``fields=`` asked for none.

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

    ids: npt.NDArray[Any]
    scores: npt.NDArray[np.float32]
    stats: dict[str, Any]
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """Yield scores, then ids."""
        yield self.scores
        yield self.ids

    def rows(self) -> list[Any]:
        """Return the items found as a list of dicts, ``{"id", "score", field: value, ...}``.

        For a batch, return such a list for each query. Missing items are left out, and null values are None.
        """
        return self.rows_of(None if self.ids.ndim == 1 else np.cumsum(are_there(self.ids).sum(axis=1)))

    def hit_table(self) -> HitTable:
        """Return the items found, with the missing ones left out."""
        return HitTable.of_grid(self.ids, self.scores, self.fields, "score")
