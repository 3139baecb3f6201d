"""How a search keeps the recall that was asked for: by the calibrated effort, by more, or exactly."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np

from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.calibration.calibration import TARGET, Calibration, grown
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.search.search import Selection
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.arguments import check_int

__all__ = ["Escalation", "Plan", "keep_plan", "plan_search"]

_FEW = 2048  # rows left by a filter, up to which a search may look at all of them
_FEW_OF_K = 32  # likewise, by k
_FEWEST = 256  # likewise, up to which their bounds are wide
_FEW_EPS = 3.0  # standard errors of these
_ROUGH_EPS = 8.0  # likewise of any rows, where errors exceed their bounds: of far rows they do so more often
_NORMAL = NormalDist()
_NORMAL_AXES = 32  # from which on the errors of codes, sums over axes, are taken as normal
_FEW_LISTS, _FEW_AXES = 128, 128 * 128  # that are scanned sooner than put in order, and their axes in all
_PLANS_MOST = 64  # under filters that are kept
_NEARLY = 4  # times the lists routed to at first, up to which a search is routed to all that hold rows left

Escalation: TypeAlias = Literal["no", "wider", "exact"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How hard a search looks.

    Attributes
    ----------
    effort
        Lists, bounds and candidates.
    calibrated
        Whether calibration knows that the effort reaches the recall.
    escalation
        Whether the search does more than was calibrated, because that is not known to be enough: ``"wider"`` lists and
        bounds, or ``"exact"``, a comparison with everything that may be as near as the vectors found.
    kept
        The recall that the search can keep: the one asked for, or less with product-quantised codes, which have no
        bounds.
    """

    effort: Effort
    calibrated: bool
    escalation: Escalation
    kept: float


def plan_search(state: IndexSnapshot, k: int, count: int, options: SearchOptions, selection: Selection) -> Plan:
    """Return how to search for `k` neighbours among the `count` vectors of a snapshot.

    Raises
    ------
    ValueError, TypeError
        When `candidates` is no number of at least `k`.
    """
    recall = TARGET if options.recall is None else float(options.recall)
    if options.nprobe is None and options.candidates is None:
        plan = _planned(state, k, recall, selection)
        if options.radius is not None and plan.escalation == "no":
            usual = plan.effort if selection.left is not None else state.calibration.measured(k, recall)[0]
            plan = replace(plan, effort=state.calibration.of_radius(usual, recall), calibrated=False)
        if (found := plan.effort.candidates) is None:
            return plan
        return replace(plan, effort=replace(plan.effort, candidates=min(max(k, found), max(k, count))))
    effort, _ = state.calibration.effort(k, recall)
    if options.nprobe is not None:
        effort = Effort(int(min(options.nprobe, state.preview.lists)), effort.eps, effort.candidates)
    wanted = effort.candidates
    if options.candidates is not None:
        wanted = check_int("candidates", options.candidates, k)
    if wanted is not None:
        effort = replace(effort, candidates=min(max(k, wanted), max(k, count)))
    return Plan(effort, False, "no", 0.0)


def _planned(state: IndexSnapshot, k: int, recall: float, selection: Selection) -> Plan:
    """Return how to keep `recall` for `k` neighbours among the selected vectors."""
    if selection.left is not None:
        return _plan_filtered(state, k, recall, selection)
    plan: Plan | None = state.plans.get((k, recall))
    return plan or keep_plan(state.plans, (k, recall), _plan_recall(state, k, recall))


def _plan_recall(state: IndexSnapshot, k: int, recall: float) -> Plan:
    """Return how to keep `recall` for `k` neighbours among all vectors."""
    calibration = state.calibration
    effort, known = calibration.effort(k, recall)
    if state.preview.coding == "pq":
        best = max(reached for reached, _, _ in calibration.efforts[max(calibration.efforts)])
        return Plan(effort, known, "no", recall if known else min(recall, best))
    if known:
        if effort.most is not None and calibration.changes:
            # Codes of unknown errors stand before all others, and calibration has seen none of those added since.
            before = min(calibration.changes, sum(part.arrays.unbounded for part in state.parts))
            effort = replace(effort, most=effort.most + before)
        return Plan(effort, True, "no", recall)
    exact = recall == 1 or calibration.unknown or calibration.reached_at(k) < recall
    if not exact and not calibration.changed_much and k > max(calibration.efforts):
        # The neighbours lie beyond those measured: half of the loss is allowed, and the bounds alone decide.
        found = calibration.effort(k, 1 - (1 - recall) / 2)[0]
        eps = found.eps if calibration.bounds_hold else max(found.eps, _ROUGH_EPS)
        found = replace(found, eps=eps, most=None)
        return Plan(_every_list(state, found) if _radii_are_old(state) else found, False, "wider", recall)
    widest = calibration.widest(state.preview.lists)
    return Plan(effort if recall == 1 else widest, False, "exact" if exact else "wider", recall)


def _plan_filtered(state: IndexSnapshot, k: int, recall: float, selection: Selection) -> Plan:
    """Return how to keep `recall` for `k` neighbours among the rows that a filter leaves."""
    assert selection.left is not None
    calibration, lists, plans = state.calibration, state.preview.lists, state.plans
    held, wanted = selection.rows.held, k / max(selection.share, 1e-9)
    held = lists if held is None else held
    usual = k, recall, calibration.wide(wanted)
    if (known := plans.get(usual)) is None:
        known = keep_plan(plans, usual, calibration.filtered(*usual))
    effort, power, few_lists = known
    nprobe = grown(effort.nprobe, power, wanted / usual[2])
    if held <= _NEARLY * nprobe:
        nprobe = lists
    left = "few" if selection.left > _FEWEST else "fewest"
    if selection.left > max(_FEW, _FEW_OF_K * k):
        left = "many"
    in_order = held > min(_FEW_LISTS, _FEW_AXES // state.space.padded)
    key = usual, nprobe, left, in_order
    plan: Plan | None = plans.get(key)
    if plan is None:
        effort = _filtered(state, replace(effort, nprobe=nprobe), recall)
        if left != "many":
            if few_lists is None or left == "fewest":
                effort = replace(effort, eps=max(effort.eps, _eps_of_few(calibration, k, recall)))
            # All are looked at if their lists are few, too, or if it is not known how far to look.
            if few_lists is not None and in_order and state.preview.cautious(effort.gap)[1] < np.inf:
                effort = replace(effort, least=few_lists)
            else:
                effort = _every_list(state, effort)
        exact = recall == 1 or calibration.reached_at(k) < recall
        plan = keep_plan(plans, key, Plan(effort, False, "exact" if exact else "no", recall))
    return plan


def keep_plan(plans: dict[Hashable, Any], key: Hashable, made: Any) -> Any:
    """Keep a plan, or an effort, for searches to come; return it."""
    if len(plans) >= _PLANS_MOST:
        plans.clear()
    plans[key] = made
    return made


def _radii_are_old(state: IndexSnapshot) -> bool:
    """Return whether the radii of lists, by which a search of inner products leaves lists out, no longer hold."""
    return state.preview.inner and not state.calibration.lists_fit


def _every_list(state: IndexSnapshot, effort: Effort) -> Effort:
    return replace(effort, nprobe=state.preview.lists, gap=np.inf)


def _filtered(state: IndexSnapshot, effort: Effort, recall: float) -> Effort:
    """Return an effort for the rows that a filter leaves, wherever they lie.

    Where it leaves far rows alone, many are almost as near as the nearest: no distance to the next makes up for an
    error. So the bounds hold by themselves but for a quarter of the loss.
    """
    if recall < 1:
        effort = replace(effort, eps=max(effort.eps, _NORMAL.inv_cdf(1 - (1 - recall) / 4)))
    if _radii_are_old(state):
        effort = _every_list(state, effort)
    gap, sure = state.preview.cautious(effort.gap)
    eps = effort.eps if state.calibration.bounds_hold else max(effort.eps, _ROUGH_EPS)
    loss = 0.0 if state.space.padded < _NORMAL_AXES else effort.loss
    return replace(effort, eps=eps, gap=gap, clear=max(effort.clear, sure if sure < np.inf else 0.0), loss=loss)


def _eps_of_few(calibration: Calibration, k: int, recall: float) -> float:
    """Return how wide bounds have to be, in standard errors, to keep a recall among any few rows."""
    if calibration.bounds_hold:
        return _FEW_EPS
    # Three quarters of the loss may lie beyond the widest bounds measured: those here are wider.
    strict, known = 1 - 0.75 * (1 - recall), min(k, max(calibration.reached))
    holds = all(reached >= strict for each, reached in calibration.reached.items() if each >= known)
    return _ROUGH_EPS if holds else calibration.exact_eps
