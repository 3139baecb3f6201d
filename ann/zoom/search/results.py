"""What searches return."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.ids.ids import Sightings
from memhier.ann.zoom.search.range_search import RangeResult, Within
from memhier.ann.zoom.search.search import Found
from memhier.rows.ranking import STOPS

__all__ = ["SearchResult", "iterate", "padded", "range_result", "search_stats"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Nearest vectors of each query, nearest first.

    Attributes
    ----------
    ids
        int64 ``[q, k]``; ``[k]`` for a single query. -1 where there are, or a filter leaves, fewer than `k` vectors. Of
        an index whose ids are strings: those, as objects, and None where there are fewer.
    distances
        float32, of the same shape: squared Euclidean distance for ``l2``, negative inner product for ``ip``,
        1 - cosine similarity for ``cosine``; infinity beside -1. Ties stand in the order of their ids, or of a hash of
        them where they are strings: always the same, but not the alphabet's.
    stats
        Plain numbers of this call: ``queries``; ``probed`` lists and ``scanned`` codes; ``candidates`` that the
        bounds left, ``cut_short``, of how many queries there was no room for all of them, and ``ranked`` ones, whose
        vectors were compared; what was read for them: ``reads`` (I/Os), ``pages``, ``bytes``; ``page_requests``,
        counting a page that several queries share for each, and ``hot_pages``, found in DRAM; ``rounds``, the most that
        a query took; ``stopped``, why the first query ended, and ``stopped_early``, how many a limit on reads or time
        ended; ``calibrated``, whether the effort is known to reach the recall asked for, which with a filter nobody
        knows; ``escalated``, ``"wider"`` or ``"exact"`` where the search did more than was calibrated as that is not
        known to be enough, otherwise ``"no"``; ``recall``, what can be had: the recall asked for, or less where limits
        or codes without bounds forbid it (not with ``nprobe`` and ``candidates``).
    """

    ids: npt.NDArray[Any]
    distances: Floats
    stats: dict[str, Any]


def padded(found: Found, k: int) -> Found:
    """Return what was found with ids of -1 at infinity, to `k` for each query."""
    more = ((0, 0), (0, k - found.ids.shape[1]))
    if not more[1][1]:
        return found
    ids, distances = np.pad(found.ids, more, constant_values=-1), np.pad(found.distances, more, constant_values=np.inf)
    return replace(found, ids=ids, distances=distances)


def search_stats(found: Found, tally: Ints) -> dict[str, Any]:
    """Return what was done, in plain numbers; see :class:`SearchResult`."""
    probed, scanned, cut_short, _ = found.scanned.sum(axis=0).tolist()
    ranked, requests, hot, _, _ = found.ranked.sum(axis=0).tolist()
    rounds, stops = found.ranked[:, 3].tolist(), found.ranked[:, 4].tolist()
    reads, pages, read = tally.tolist()
    early = STOPS.index("max_reads")  # or the deadline
    return {
        "queries": len(found.ids), "probed": probed, "scanned": scanned, "cut_short": cut_short,
        "candidates": sum(found.admitted.tolist()), "ranked": ranked, "reads": reads, "pages": pages, "bytes": read,
        "page_requests": requests, "hot_pages": hot, "rounds": max(rounds, default=0),
        "stopped_early": sum(stop >= early for stop in stops), "stopped": STOPS[stops[0]] if stops else "all_read",
    }  # fmt: skip


def range_result(found: Sequence[Within], seen: Sightings | None, tally: Ints, calibrated: bool) -> RangeResult:
    """Return what was found within the radius of each query, one after the other."""
    ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in found)])
    texts = ids if seen is None else seen.named(ids, tally)
    sums = np.sum([each.tally for each in found], axis=0, initial=0) if found else np.zeros(5, np.int64)
    names = ("probed", "scanned", "ranked", "page_requests", "hot_pages")
    stats: dict[str, Any] = {"queries": len(found)} | dict(zip(names, sums.tolist(), strict=True))
    stats |= dict(zip(("reads", "pages", "bytes"), tally.tolist(), strict=True)) | {"calibrated": calibrated}
    return RangeResult(
        np.concatenate([[0], np.cumsum([len(each.ids) for each in found], dtype=np.int64)]).astype(np.int64),
        texts,
        np.concatenate([np.empty(0, np.float32), *(each.distances for each in found)]),
        stats,
    )


def iterate(search: Callable[[int], SearchResult], batch: int) -> Iterator[SearchResult]:
    """Yield what ever larger searches find, `batch` at a time, each id once."""
    seen: set[int | str] = set()
    k = 2 * batch
    while True:
        found = search(k)
        names = found.ids.tolist()
        there = [name is not None and name != -1 for name in names]
        new = np.array([real and name not in seen for real, name in zip(there, names, strict=True)], np.bool_)
        last = len(names) < k or not all(there) or not new.any()
        ids, distances = found.ids[new], found.distances[new]
        for start in range(0, len(ids) if last else len(ids) // batch * batch, batch):
            part = slice(start, start + batch)
            seen.update(ids[part].tolist())
            yield SearchResult(ids[part], distances[part], found.stats)
        if last:
            return
        k *= 2
