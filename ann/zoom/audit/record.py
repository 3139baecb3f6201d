"""Counts of an audit, and the recall found by declared recall and number of neighbours."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from memhier.ann.interval import recall_interval
from memhier.ann.zoom.calibration.calibration import NEIGHBOURS, RECALLS
from memhier.ann.zoom.storage.catalog import AUDIT_KEY
from memhier.fields import boolean, decode_json, integer, real, record, row, sequence

__all__ = ["AuditRecord"]

_SHORT, _SHORT_QUERIES = 0.005, 1000  # a mean wrong by so much after so many queries calls for tuning, too
_MOST = 2 * _SHORT_QUERIES  # of a class; a weighted mean has the interval of as many queries as its weights add up to
_COUNTS = ("searched", "chosen", "audited", "dropped", "failed", "retuned")
_LEVEL = row(real(0, 1), integer(1, NEIGHBOURS[-1]), boolean, integer(1), real(0, 2**53), real(0, 2**53))
_LEVELS_MOST = 2 * (len(RECALLS) + 1) * len(NEIGHBOURS)
_CHECK = record(
    {name: integer() for name in _COUNTS}
    | {"efforts": integer(0, 2**32), "levels": sequence(_LEVEL, most=_LEVELS_MOST)}
)


@dataclass(slots=True)
class _Level:
    """Queries of one class: the sums of their weights, and of the recalls declared and found."""

    queries: int = 0
    declared: float = 0.0
    found: float = 0.0


@dataclass(slots=True)
class AuditRecord:
    """What an audit keeps from one opening of the index to the next.

    Attributes
    ----------
    searched
        Queries that might have been chosen.
    chosen, audited, dropped, failed
        Queries chosen; those checked; those not checked, for lack of room or as the index changed; failures.
    retuned
        How often the index was tuned.
    sums
        Of the queries by recall, number of neighbours, and whether a filter was given.
    efforts
        Those that the sums are of.
    plain
        Returns efforts as plain values.
    """

    searched: int = 0
    chosen: int = 0
    audited: int = 0
    dropped: int = 0
    failed: int = 0
    retuned: int = 0
    sums: dict[tuple[float, int, bool], _Level] = field(default_factory=dict)
    efforts: Any = None
    plain: Callable[[Any], Any] = lambda efforts: efforts

    @classmethod
    def load(cls, raw: bytes | None, efforts: Any, plain: Callable[[Any], Any], path: object) -> Self:
        """Return the record from a catalog; without levels where these are of other efforts.

        Raises
        ------
        CorruptionError
            When it is no such record.
        """
        found = cls(efforts=efforts, plain=plain)
        if raw is not None:
            values = decode_json(raw, f"{path}: the value {AUDIT_KEY!r}", _CHECK)
            found = cls(**{name: values[name] for name in _COUNTS}, efforts=efforts, plain=plain)
            found.dropped = max(0, found.chosen - found.audited - found.failed)  # with those that waited
            if values["efforts"] == found.mark:
                found.sums = {(level, k, filtered): _Level(*sums) for level, k, filtered, *sums in values["levels"]}
        return found

    def encode(self) -> bytes:
        """Return it as JSON."""
        levels = [[*key, each.queries, each.declared, each.found] for key, each in [*self.sums.items()]]
        counts = {name: getattr(self, name) for name in _COUNTS}
        return json.dumps(counts | {"efforts": self.mark, "levels": levels}).encode()

    @property
    def mark(self) -> int:
        """A checksum of the efforts."""
        return zlib.crc32(json.dumps(self.plain(self.efforts)).encode())

    def follow(self, efforts: Any) -> None:
        """Begin anew where the recalls noted are of other efforts."""
        if self.efforts is not efforts:
            self.sums, self.efforts = {}, efforts

    def note(self, declared: float, k: int, found: float, *, filtered: bool) -> None:
        """Note the recall of one query."""
        level = next((each for each in RECALLS if each >= declared), 1.0)
        of_k = next((each for each in NEIGHBOURS if each >= k), NEIGHBOURS[-1])
        sums = self.sums.setdefault((level, of_k, filtered), _Level())
        if sums.queries >= _MOST:  # those so far count half from now on, so that a change shows however many they are
            share = _MOST / 2 / sums.queries
            sums.queries, sums.declared, sums.found = _MOST // 2, share * sums.declared, share * sums.found
        sums.queries, sums.declared, sums.found = sums.queries + 1, sums.declared + declared, sums.found + found
        self.audited += 1

    @property
    def short(self) -> bool:
        """Whether queries without filters find less than declared; tuning does not measure those with filters."""
        for each in self.levels():
            lacking = each["declared"] - each["recall"]
            if not each["filtered"] and (
                each["high"] < each["declared"] or (each["queries"] >= _SHORT_QUERIES and lacking > _SHORT)
            ):
                return True
        return False

    @property
    def ample(self) -> bool:
        """Whether queries without filters find clearly more than declared, so that tuning may save reads."""
        rows = [each for each in self.levels() if not each["filtered"] and each["queries"] >= _SHORT_QUERIES]
        return any(each["recall"] - each["declared"] > _SHORT for each in rows)

    def levels(self) -> list[dict[str, Any]]:
        """Return the recall found, with its interval, for each class of queries."""
        rows = []
        for (_, k, filtered), each in sorted(self.sums.items()):
            mean = each.found / each.queries
            low, high = recall_interval(mean, each.queries)
            about = {"declared": round(each.declared / each.queries, 6), "k": k, "filtered": filtered}
            rows.append(about | {"queries": each.queries, "recall": mean, "low": low, "high": high})
        return rows

    def stats(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: getattr(self, name) for name in _COUNTS} | {"levels": self.levels()}
