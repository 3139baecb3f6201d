"""The efforts that were measured, and which of them a search for a declared recall takes.

A search looks farther than was measured where vectors have changed since, where a filter leaves few, and where it is
asked for more than was measured. It is exact where nothing less is known to do.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.added import excess_beyond, lengths_of_residuals, one_way_error
from memhier.ann.zoom.calibration.needs import EPS
from memhier.ann.zoom.calibration.strays import Strays
from memhier.ann.zoom.preview.preview import Effort, Preview

__all__ = ["NEIGHBOURS", "RECALLS", "SHORT", "TARGET", "Calibration", "Steps", "grown"]

TARGET = 0.99  # the default recall of a search
RECALLS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998)
NEIGHBOURS = (1, 10, 100)
_CHANGES = 0.1  # of the vectors, beyond which a calibration may no longer hold
_WORN = 0.3  # of the vectors, beyond which lists may no longer fit their vectors; a vector replaced is two changes
_DEARER = 1.5  # times the cost measured when lists and codes were made, beyond which these no longer fit
_MEASURED = 0.05  # of the vectors, beyond which a calibration is worth making anew, where there are as many as
_MEASURED_LEAST = 1024  # these
_STRANGE = 0.05  # likewise, of vectors far from their centroids
SHORT = 0.995  # of the neighbours measured that are found, below which a measurement is not trusted
_SPARED = 1  # neighbour that all queries measured may miss beyond that: a single one tells nothing of bounds
_ROUGH, _ROUGH_RECALL = 1.0, 0.9  # standard errors for a recall of the nearest, beyond which codes tell little
_ROUGHER = 1.5  # likewise, of vectors far from their centroids
_ROUGHEST = 3.0  # likewise, of any, beyond which no wider bound is sure to do once many have changed
_EXACT_EPS = 8.0  # standard errors that a bound of recall 1 allows for
_NO_BOUND = 1e6  # likewise, where errors exceed their bounds: everything not known exactly is compared
_STRAYED_SOME = 1.2  # standard errors that codes err one way, beyond which no bound is sure to hold all neighbours
_STRAYED_MUCH = 2.0  # likewise, beyond which searches are exact once many vectors have changed
_USUAL = 0.2  # standard errors that codes seem to err one way where a few vectors tell of each list
_CHANCE = 0.35  # standard errors that codes of added vectors may err one way beyond others by chance
_OF_FEW = 0.5  # likewise, that a single vector tells more; of more vectors by their root less
_STORED = tuple(each.name for each in fields(Effort))[:8]  # without those of filters
# Stored where there is any, and where it is known.
_MOSTLY_NONE = (
    "clear", "strayed", "strange", "earlier", "made_for", "bounds_missed", "cost", "first_cost",
)  # fmt: skip
_MOSTLY_KNOWN = ("one_way", "far")
# Times the loss allowed under a filter, for candidates that are hardly neighbours. The k-th distance is taken as too
# large, so their odds are stated high, and less is lost.
_UNLIKELY = 2.0
_GROWTH = 0.5  # of the lists with the neighbours wanted, at least: a power

Floats: TypeAlias = npt.NDArray[np.float32]
Steps: TypeAlias = list[tuple[float, Effort, float]]  # by ascending recall: recall, its effort, pages of a query


@dataclass(frozen=True, slots=True)
class Calibration:
    """The least effort for each recall, for each number of neighbours.

    Attributes
    ----------
    queries
        The number of queries measured.
    efforts
        By k, then by ascending recall: the recall, its effort, and the pages that a query reads.
    reached
        By k, the highest recall measured, with the greatest effort.
    alone
        By ascending recall: the recall, and the standard errors that it takes if no row is read for another's sake.
    vectors, changes
        The number of vectors measured, and of those added or removed since.
    earlier
        Those added or removed before, since lists and codes were made.
    made_for
        The number of vectors that lists and codes were made for; 0 for those measured.
    bounds_missed
        Whether, since then, bounds have missed too many neighbours (:attr:`bounds_hold`).
    cost
        Of a query for some ten neighbours, in codes scanned, as calibration weighs lists and pages; 0 where it is not
        known.
    first_cost
        The one measured when lists and codes were made, where efforts were measured anew since.
    tuned
        Whether the queries were the user's, so that a rebuild would lose the calibration.
    tried
        As `efforts`, for the numbers of neighbours that searches for the user's queries have tried: the least efforts
        that kept each recall. Searches for other numbers, under a filter or within a radius take `efforts`.
    clear
        By k, then by ascending recall: the recall, and the squared distance of lists that need no scan under a filter,
        in times that of the k-th neighbour. None of inner products.
    one_way
        By how many standard errors the codes of the vectors measured overstate distances; None if that is not known.
    strayed
        By how many more those of some vectors added since do; 0 of usual ones.
    far
        The distance to their centroids beyond which few of the vectors measured lie; None if that is not known.
    strange
        How many of those added since lie beyond it, more than usual.
    strays
        Those added since far from their centroids; None where that is not known.
    """

    queries: int
    efforts: dict[int, Steps]
    reached: dict[int, float]
    alone: list[tuple[float, float]] = field(default_factory=list)
    vectors: int = 0
    changes: int = 0
    tuned: bool = False
    tried: dict[int, Steps] = field(default_factory=dict)
    clear: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    one_way: float | None = None
    strayed: float = 0.0
    far: float | None = None
    strange: float = 0.0
    strays: Strays | None = None
    earlier: int = 0
    made_for: int = 0
    bounds_missed: bool = False
    cost: float = 0.0
    first_cost: float = 0.0

    @property
    def all_changes(self) -> int:
        """The number of vectors added or removed since lists and codes were made."""
        return self.changes + self.earlier

    @property
    def stale(self) -> bool:
        """Whether so much has changed since that it is worth measuring anew; never after queries of the user."""
        of_vectors = self.vectors >= _MEASURED_LEAST and not self.tuned and not self.tried
        return of_vectors and self.changes > _MEASURED * self.vectors

    @property
    def worn(self) -> bool:
        """Whether the index is worth making anew, as much has changed and it no longer fits; never after tuning.

        Changes that can be measured are measured first, such as those since a renewal began that took long.
        """
        unknown = self.stale and self.changes > _WORN * self.vectors
        return not self.tuned and self._outgrown and not (unknown and replace(self, changes=0)._fits)

    @property
    def _outgrown(self) -> bool:
        return self.all_changes > _WORN * self.made_of and not self._fits

    @property
    def made_of(self) -> int:
        """The number of vectors that lists and codes were made for."""
        return self.made_for or self.vectors

    @property
    def _fits(self) -> bool:
        """Whether lists and codes serve as well as at first, by all that was measured of the vectors since."""
        err_one_way = self.strayed > 0 or self.bounds_missed or self._rough > _ROUGHEST
        return self.lists_fit and not err_one_way and 0 < self.cost <= _DEARER * (self.first_cost or self.cost)

    @property
    def lists_fit(self) -> bool:
        """Whether so few vectors have changed since that the lists measured still fit the vectors in them."""
        return self.changes <= _WORN * self.vectors and self.strange <= _STRANGE * self.vectors

    @property
    def changed_much(self) -> bool:
        """Whether so much has changed since that it may no longer hold."""
        return self.changes > _CHANGES * self.vectors or not self.lists_fit

    @property
    def bounds_hold(self) -> bool:
        """Whether the widest bounds measured missed hardly a neighbour; heavy-tailed errors make them miss more.

        So do rough codes of many vectors unlike those measured, whose errors may all point one way.
        """
        rough = self._rough
        one_way = rough > _ROUGH and (self._outgrown or (rough > _ROUGHER and not self.lists_fit))
        return not self._missed and not one_way

    @property
    def _missed(self) -> bool:
        spared = {k: least + _SPARED / (k * max(1, self.queries)) for k, least in self.reached.items()}
        return self.bounds_missed or min(spared.values()) < SHORT

    @property
    def _rough(self) -> float:
        return self._at(min(self.efforts), _ROUGH_RECALL)[0].eps

    @property
    def unknown(self) -> bool:
        """Whether no effort but the exact one is sure: codes tell little of the many changes, or err far one way.

        Codes of an index that began empty have the usual errors, though nothing was measured yet.
        """
        is_rough = self._rough > _ROUGHEST or (self._rough > _ROUGHER and self.strayed > 0)
        return self.queries > 0 and self.changed_much and (is_rough or self.strayed > _STRAYED_MUCH)

    @property
    def exact_eps(self) -> float:
        """Standard errors between an estimate and bounds for exact search; no bound holds where codes err one way."""
        return _EXACT_EPS + self.strayed if self.bounds_hold and self.strayed <= _STRAYED_SOME else _NO_BOUND

    def reached_at(self, k: int) -> float:
        """Return the highest recall measured for `k` neighbours, or for the nearest numbers measured."""
        return min(self.reached[each] for each in self._around(k))

    def changed(self, count: int) -> Self:
        """Return it after `count` vectors were added or removed."""
        return replace(self, changes=self.changes + count)

    def measured_anew(self, found: Self, before: Self) -> Self:
        """Return the calibration `found` for the same lists and codes; it was begun when this one was `before`.

        What is known of errors that point one way stays, and vectors that were far from their centroids stay strays.
        Bounds that have missed neighbours stay distrusted, as a few other queries may not tell.
        """
        return replace(
            found, changes=self.changes - before.changes, strange=max(0.0, self.strange - before.strange),
            earlier=self.earlier + before.changes, one_way=self.one_way, strayed=self.strayed,
            strays=self.strays, tuned=self.tuned, made_for=self.made_of,
            bounds_missed=self._missed, first_cost=self.first_cost if self.made_for else self.cost,
        )  # fmt: skip

    def written(self, some: Floats, preview: Preview, count: int) -> Self:
        """Return it after `count` vectors were written, such as those turned in `some` ``[n, d]``."""
        more = 0.0 if self.one_way is None else one_way_error(some, preview) - max(self.one_way, _USUAL)
        beyond = 0.0 if self.far is None else excess_beyond(self.far, lengths_of_residuals(some, preview), count)
        chance = _CHANCE + _OF_FEW / max(1, len(some)) ** 0.5
        strayed = max(self.strayed, more) if more > chance else self.strayed
        strays = None if self.strays is None else self.strays.written(some, preview)
        strange = max(0.0, self.strange + beyond)
        return replace(self, strayed=strayed, strange=strange, strays=strays)

    @property
    def _wider(self) -> float:
        """Standard errors by which all bounds are wider, as many vectors unlike those measured may have been added."""
        return self.strayed if self.changed_much else 0.0

    def effort(self, k: int, recall: float) -> tuple[Effort, bool]:
        """Return the effort for `recall` at `k`, and whether it is known to reach it."""
        if k not in self.tried or self.changed_much:
            return self.measured(k, recall)
        found = _reaching(self.tried[k], recall)
        return (found, True) if found is not None else (self._at(k, recall)[0], False)

    def measured(self, k: int, recall: float) -> tuple[Effort, bool]:
        """Return the effort for `recall` at `k` from `efforts`, and whether it is known to reach it."""
        known = self._known(k)
        found, reached = self._at(known, recall)
        for less, is_known in (self._at(each, recall) for each in self._around(k)):  # of fewer, more errors count
            eps, nprobe = max(found.eps, less.eps), max(found.nprobe, less.nprobe)
            found = replace(
                found, nprobe=nprobe, eps=eps, least=max(found.least, less.least), gap=max(found.gap, less.gap),
                border=max(found.border, less.border) * bool(found.border and less.border),
            )  # fmt: skip
            reached = reached and is_known
        reached = reached and not self.changed_much
        found = replace(found, border=found.border if reached and k <= known else 0.0)
        if self._wider or not self.lists_fit:  # no row counts on being read for another's sake
            # Unless all errors point one way, the k-th upper bound is as far above as the bounds of others are below.
            alone = self._alone(recall) * (1.0 if self._outgrown or self._wider else 0.5)
            found = replace(found, eps=max(found.eps, alone) + self._wider)
        if not self.lists_fit:
            # The measurements no longer tell how far the k nearest are, nor how many candidates stand before them.
            # Lists do not fit added vectors: the search takes the lists that any number of neighbours needs.
            every = [self._at(each, recall)[0] for each in self.efforts if each >= known]
            least, gap = max(each.least for each in every), max(each.gap for each in every)
            found = replace(found, most=None, least=least, gap=gap)
        if k > known:
            times = -(-k // known)
            if found.most is not None:
                found = replace(found, most=times * found.most, usual=times * found.usual)
            if found.candidates is not None:
                return replace(found, candidates=-(-k * found.candidates // known)), reached
            wide = self.wide(k)
            found, power = self._spread(found, wide, recall)
            found = replace(found, nprobe=grown(found.nprobe, power, k / wide))
        return found, reached and k <= known

    def filtered(self, k: int, recall: float, wide: int) -> tuple[Effort, float, int | None]:
        """Return the effort for `recall` at `k` where a filter leaves as many vectors as :meth:`wide` tells.

        The second value is how its lists grow with the neighbours beyond `wide`: a power (:func:`grown`), the third its
        `least` where the filter leaves few; None if that is not known.

        The k nearest of those left lie as far as some ``k / share`` of all, and farther where the filter correlates
        with the vectors. So the search takes the lists that any number of neighbours needs, and half of the loss is
        allowed. As the selected rows lie scattered, no row counts on being read for another's sake.
        """
        strict = 1 - (1 - recall) / 2
        found, is_known = self.measured(k, strict)
        least = found.least if is_known and self.bounds_hold else None
        every = [self._at(each, strict)[0] for each in self.efforts if each >= min(k, max(self.efforts))]
        found = replace(
            found, eps=max(self._alone(strict), *(each.eps for each in every)) + self._wider,
            gap=max(found.gap, *(each.gap for each in every)), most=None, border=0.0,
            loss=_UNLIKELY * (1 - recall) * k if self.bounds_hold and not self.changed_much else 0.0,
            clear=self._clear_at(strict),
        )  # fmt: skip
        return *self._spread(found, wide, strict), least

    def _clear_at(self, recall: float) -> float:
        """Return the `clear` that any number of neighbours needs; 0 where it is not known."""
        every = self.clear.values()
        known = (next((far for kept, far in each if kept >= recall - 1e-9), each[-1][1]) for each in every)
        return max(known, default=0.0)

    def of_radius(self, found: Effort, recall: float) -> Effort:
        """Return an effort for `recall` where a radius, not the k-th nearest, may decide which vectors are read.

        The radius is the distance of an unknown neighbour, and few rows are read for another's sake. So the bounds are
        the widest that any number of neighbours needs, and half of the loss is allowed.
        """
        strict = 1 - (1 - recall) / 2
        every = [self._at(each, strict)[0].eps for each in self.efforts]
        eps = max(found.eps, self._alone(strict) + self._wider, *every)
        return replace(found, eps=eps, most=None, loss=0.0, border=0.0)

    def _alone(self, recall: float) -> float:
        return next((eps for reached, eps in self.alone if reached >= recall - 1e-9), float(EPS[-1]))

    def widest(self, lists: int) -> Effort:
        """Return the effort of all `lists` and the widest bounds measured."""
        return Effort(lists, eps=float(EPS[-1]) + self.strayed)

    def within(self, k: int, pages: float) -> float:
        """Return the usual recall of a query that reads at most so many pages for `k` neighbours."""
        return max((recall for recall, _, read in self.efforts[self._known(k)] if read <= pages), default=0.0)

    def wide(self, wanted: float) -> int:
        """Return the least number of neighbours measured that is no less than `wanted`, or the most measured."""
        return min((each for each in self.efforts if each >= wanted), default=max(self.efforts))

    def _spread(self, found: Effort, wide: int, recall: float) -> tuple[Effort, float]:
        """Return an effort that is routed to the lists of `wide` neighbours, and how these grow: a power."""
        lists, _ = self._at(wide, recall)
        before = max((each for each in self.efforts if each < wide), default=wide)
        near, _ = self._at(before, recall)
        growth = np.log(max(lists.nprobe / near.nprobe, 1)) / np.log(wide / before) if before < wide else _GROWTH
        found = replace(
            found, nprobe=max(found.nprobe, lists.nprobe), least=max(found.least, lists.least),
            gap=max(found.gap, lists.gap),
        )  # fmt: skip
        return found, max(float(growth), _GROWTH)

    def _known(self, k: int) -> int:
        return min((each for each in self.efforts if each >= k), default=max(self.efforts))

    def _around(self, k: int) -> list[int]:
        """Return the number measured that is no less than `k`, or the most; and the one below where it is more."""
        known = self._known(k)
        return [known, *[each for each in sorted(self.efforts) if each < k < known][-1:]]

    def _at(self, known: int, recall: float) -> tuple[Effort, bool]:
        found = _reaching(self.efforts[known], recall)
        return (found, True) if found is not None else (self.efforts[known][-1][1], False)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        about = {name: getattr(self, name) for name in ("queries", "alone", "vectors", "changes", "tuned")}
        steps = {"efforts": _plain(self.efforts)} | ({"tried": _plain(self.tried)} if self.tried else {})
        rest = {name: value for name in _MOSTLY_NONE if (value := getattr(self, name))}
        rest |= {name: value for name in _MOSTLY_KNOWN if (value := getattr(self, name)) is not None}
        rest |= {} if self.strays is None else {"strays": self.strays.to_json()}
        return about | steps | {"reached": self.reached} | rest

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the calibration from the values of :meth:`to_json`."""
        reached = {int(k): recall for k, recall in values["reached"].items()}
        alone = [(recall, eps) for recall, eps in values["alone"]]
        about = {name: values[name] for name in ("queries", "vectors", "changes", "tuned")}
        efforts, tried = (_of_plain(values.get(name, {})) for name in ("efforts", "tried"))
        clear = {int(k): [(recall, far) for recall, far in every] for k, every in values.get("clear", {}).items()}
        about |= {name: values[name] for name in (*_MOSTLY_KNOWN, *_MOSTLY_NONE[1:]) if name in values}
        about |= {"strays": Strays.from_json(values["strays"])} if "strays" in values else {}
        # Codes of earlier indexes may err along their own vectors by more than bounds allow for.
        odd = values.get("overstated", False) or values.get("own_way", 0.0) > _EXACT_EPS
        about["bounds_missed"] = odd or about.get("bounds_missed", False)
        return cls(efforts=efforts, tried=tried, reached=reached, alone=alone, clear=clear, **about)


def grown(nprobe: int, power: float, times: float) -> int:
    """Return how many lists so many times the neighbours take."""
    return math.ceil(nprobe * times**power) if times > 1 else nprobe


def _reaching(steps: Steps, recall: float) -> Effort | None:
    """Return the effort of the first step that keeps a recall; None if none does."""
    return next((effort for reached, effort, _ in steps if reached >= recall - 1e-9), None)


def _plain(efforts: dict[int, Steps]) -> dict[int, list[Any]]:
    return {
        k: [(recall, [getattr(effort, name) for name in _STORED], round(pages, 1)) for recall, effort, pages in steps]
        for k, steps in efforts.items()
    }


def _of_plain(values: dict[str, Any]) -> dict[int, Steps]:
    """Return the efforts from the values of :func:`_plain`."""
    return {
        int(k): [(recall, Effort(*effort), pages) for recall, effort, pages in steps] for k, steps in values.items()
    }
