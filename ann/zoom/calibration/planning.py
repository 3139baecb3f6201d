"""How a search keeps the recall that was asked for: by the effort that calibration knows, by more, or exactly."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from memhier.ann.zoom.calibration.calibrate import Calibration
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.search.search import Selection, Snapshot

__all__ = ["Escalation", "Plan", "plan_search"]

_FEW = 2048  # rows that a filter leaves, all of which are looked at
_FEW_OF_K = 32  # likewise, by k
_FEW_EPS = 3.0  # standard errors that their bounds allow for

Escalation: TypeAlias = Literal["no", "wider", "exact"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How hard a search looks.

    Attributes
    ----------
    effort
        What it does.
    calibrated
        Whether that is known to reach the recall.
    escalation
        Whether it does more than was calibrated because that is not known to be enough: ``"wider"`` lists and bounds,
        or ``"exact"``, everything that may be as near as what those find.
    kept
        The recall that can be had: what was asked for, or what product-quantised codes, which have no bounds, reach.
    """

    effort: Effort
    calibrated: bool
    escalation: Escalation
    kept: float


def plan_search(state: Snapshot, k: int, recall: float, selection: Selection) -> Plan:
    """Return how to keep `recall` for `k` neighbours among what is selected."""
    calibration = state.calibration
    effort, known = calibration.effort(k, recall)
    if state.preview.coding == "pq":
        best = max(reached for reached, _, _ in calibration.efforts[max(calibration.efforts)])
        return Plan(effort, known, "no", recall if known else min(recall, best))
    if selection.left is not None:
        return Plan(_filtered(state, k, recall, selection), False, "exact" if recall == 1 else "no", recall)
    if known:
        return Plan(effort, True, "no", recall)
    if recall < 1 and not _measured(calibration, k):
        # The neighbours are others than were measured: half of the loss is allowed, and the bounds alone decide.
        return Plan(replace(calibration.effort(k, 1 - (1 - recall) / 2)[0], most=None), False, "wider", recall)
    widest = calibration.widest(state.preview.lists)
    exact = recall == 1 or calibration.reached_at(k) < recall
    return Plan(effort if recall == 1 else widest, False, "exact" if exact else "wider", recall)


def _measured(calibration: Calibration, k: int) -> bool:
    """Return whether what was measured still says something of so many neighbours."""
    return k <= max(calibration.efforts) and not calibration.changed_much


def _filtered(state: Snapshot, k: int, recall: float, selection: Selection) -> Effort:
    """Return the effort for what a filter leaves: all of it where that is little."""
    effort = state.calibration.filtered(k, recall, selection.share)
    assert selection.left is not None
    if selection.left > max(_FEW, _FEW_OF_K * k):
        return effort
    return replace(
        effort, nprobe=state.preview.lists, gap=np.inf, eps=max(effort.eps, _eps_of_few(state.calibration, k, recall))
    )


def _eps_of_few(calibration: Calibration, k: int, recall: float) -> float:
    """Return how wide bounds have to be, in standard errors, to keep a recall among few rows, whichever these are."""
    if calibration.bounds_hold:
        return _FEW_EPS
    # Half of the loss allowed may lie beyond the widest bounds that were measured, of as many neighbours or more.
    strict, known = 1 - (1 - recall) / 2, min(k, max(calibration.reached))
    holds = all(reached >= strict for each, reached in calibration.reached.items() if each >= known)
    return calibration.widest(1).eps if holds else calibration.exact_eps
