"""How the account of a search for items is made, of the decisions taken down."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.explanation import ItemExplanation, ItemRecord
from memhier.ann.multivector.results import ItemResult
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.multivector.trace import ItemTrace
from memhier.ann.zoom.preview.scan_arguments import positions_of
from memhier.ann.zoom.storage.ids import Located, texts_at

__all__ = ["explain"]

_RECORDS = 4096

Ints: TypeAlias = npt.NDArray[np.int64]


def explain(state: ItemSnapshot, result: ItemResult, trace: ItemTrace) -> ItemExplanation:
    """Return the account of a search of one query that `trace` took down."""
    stats, k = result.stats, result.ids.shape[1]
    kth = float(result.scores[0, -1])
    waiting = _of_waiting(state, result)
    return ItemExplanation(
        lists=state.book.lists, probed=stats["probed"], items=state.count, candidates=stats["candidates"],
        estimated=stats["estimated"], ranked=stats["ranked"], pages=stats["pages"], rounds=stats["rounds"],
        stopped=stats["stopped"], exact=stats["escalated"] == "exact", calibrated=stats["calibrated"],
        kth=kth if np.isfinite(kth) else None, records=waiting + _of_stored(state, trace, max(_RECORDS, 2 * k)),
    )  # fmt: skip


def _of_stored(state: ItemSnapshot, trace: ItemTrace, most: int) -> list[ItemRecord]:
    """Return the records of items on SSD, those that the search came closest to first."""
    nearest = np.where(np.isnan(trace.scores), trace.estimated, trace.scores)
    is_near = ~np.isnan(nearest)
    value = np.where(is_near, nearest, trace.listed)
    seen = np.flatnonzero(~np.isnan(value) | ~np.isnan(trace.upper))
    chosen = seen[np.lexsort((seen, -np.nan_to_num(value[seen], nan=-np.inf), ~is_near[seen]))[:most]]
    columns = (trace.listed, trace.estimated, trace.upper, trace.rounds, trace.scores)
    rows = zip(_names(state, chosen), *(column[chosen].tolist() for column in columns), strict=True)
    return [
        ItemRecord(name, _known(listed), _known(estimate), _known(upper), turn or None, _known(score))
        for name, listed, estimate, upper, turn, score in rows
    ]


def _of_waiting(state: ItemSnapshot, result: ItemResult) -> list[ItemRecord]:
    """Return the records of the items found that wait in DRAM."""
    fresh = state.fresh
    names: list[Any] = (fresh.ids if fresh.texts is None else fresh.texts.objects()).tolist()
    there = set(names)
    pairs = zip(result.ids[0].tolist(), result.scores[0].tolist(), strict=True)
    return [ItemRecord(name, None, None, None, None, score) for name, score in pairs if name in there]


def _names(state: ItemSnapshot, numbers: Ints) -> list[Any]:
    """Return the ids of items on SSD."""
    ids, positions = np.empty((2, len(numbers)), np.int64)
    for number, part, here, rows in state.numbered(numbers):
        ids[here], positions[here] = part.arrays.ids[rows], positions_of(np.full(len(rows), number), rows)
    if state.id_kind == "int64":
        return list(ids.tolist())
    places = Located(positions, np.full(len(numbers), -1, np.int64))
    return list(texts_at(state.parts, state.fresh, places).objects().tolist())


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None
