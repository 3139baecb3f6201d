"""The keys that ranks ask of each other for a step, and rows of different widths as one vector."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memhier.recsys.embedding.sharding.collectives import Collectives
from memhier.recsys.embedding.tables import Ints, StepRows, distinct_rows

__all__ = [
    "Exchange", "Packing", "StepPlan", "ask", "check_all_hold", "plan_step", "refused_together", "say_what_can_wait",
    "tell_counts",
]  # fmt: skip

Flags = NDArray[np.bool_]

_NO_BATCH = -1  # in place of how many keys a rank asks for


class Packing:
    """Packs rows of given widths into a vector of floats, one after the other."""

    def __init__(self, widths: Ints) -> None:
        self.widths = widths
        self._ends = np.cumsum(widths)
        self._of_width = [(width, np.flatnonzero(widths == width)) for width in np.unique(widths).tolist()]

    def floats(self, counts: list[int]) -> list[int]:
        """Return the number of floats of each part, for parts of so many rows."""
        ends = np.concatenate(([0], self._ends))[np.cumsum([0, *counts])]
        found: list[int] = np.diff(ends).tolist()
        return found

    def joined(self, rows: Tensor) -> Tensor:
        """Return the vector of rows, float32 [n, the widest or more]."""
        if len(self._of_width) == 1:
            return rows[:, : self._of_width[0][0]].reshape(-1)
        vector = torch.empty(int(self.widths.sum()))
        for width, mine in self._of_width:
            vector[self._places(width, mine)] = rows[torch.from_numpy(mine), :width]
        return vector

    def parted(self, vector: Tensor, widest: int) -> Tensor:
        """Return rows, float32 [n, widest]; floats beyond a row's width are undefined."""
        if [width for width, _ in self._of_width] == [widest]:
            return vector.view(-1, widest)
        rows = torch.empty(len(self.widths), widest)
        for width, mine in self._of_width:
            rows[torch.from_numpy(mine), :width] = vector[self._places(width, mine)]
        return rows

    def _places(self, width: int, mine: Ints) -> Tensor:
        return torch.from_numpy((self._ends[mine] - width)[:, None] + np.arange(width))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Exchange:
    """The keys that ranks ask of each other for a step.

    Attributes
    ----------
    ids
        The ids of each table in this rank's batch.
    rows
        The distinct rows of this rank's batch, wherever they lie.
    order
        The places of their keys by owner.
    sent, received
        The number of keys that this rank asks of each rank, and each rank of this one.
    asked
        int64: the keys that others ask of this rank, by their numbers here, rank after rank.
    later, asked_later
        Whether no rank needs a row in the next step, so that its gradients may take their time: of the keys of `rows`,
        and of `asked`. None as long as the next step is not known.
    following
        The next step; it is not kept alive.
    """

    ids: list[Ints]
    rows: StepRows
    order: Ints
    sent: list[int]
    received: list[int]
    asked: Ints
    later: Flags | None = field(default=None)
    asked_later: Flags | None = field(default=None)
    following: "ReferenceType[Exchange] | None" = field(default=None)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The exchange of a step that a reader has planned for one rank.

    Attributes
    ----------
    later, asked_later
        As of the exchange of the step before; None where there is none.
    """

    exchange: Exchange
    later: Flags | None
    asked_later: Flags | None


def _wanted(ids: list[Ints], bases: Ints, ranks: int) -> tuple[StepRows, Ints, Ints]:
    """Return the distinct rows of a batch, the places of their keys by owner, and the number that each owner has."""
    rows = distinct_rows(ids, bases, in_order=False)
    owners = rows.keys % ranks
    return rows, np.argsort(owners, kind="stable"), np.bincount(owners, minlength=ranks)


def plan_step(ids: list[list[Ints]], bases: Ints, before: list[StepPlan] | None) -> list[StepPlan]:
    """Return the plan of a step for each rank, of the ids of each rank's batch: the same as ranks find out by `ask`.

    `before` are the plans of the step before it.
    """
    wanted = [_wanted(mine, bases, len(ids)) for mine in ids]
    asked = _for_owners([rows.keys[order] for rows, order, _ in wanted], [sent for *_, sent in wanted])
    received = np.array([sent for *_, sent in wanted]).T.tolist()
    exchanges = [
        Exchange(mine, rows, order, sent.tolist(), received[rank], asked[rank] // len(ids))
        for rank, (mine, (rows, order, sent)) in enumerate(zip(ids, wanted, strict=True))
    ]
    if before is None:
        return [StepPlan(exchange, None, None) for exchange in exchanges]
    needed = np.unique(np.concatenate([rows.keys for rows, *_ in wanted]))
    last = [plan.exchange for plan in before]
    later = [~np.isin(each.rows.keys, needed) for each in last]
    of_asked = _for_owners(
        [flags[each.order] for flags, each in zip(later, last, strict=True)], [np.array(each.sent) for each in last]
    )
    return [StepPlan(*each) for each in zip(exchanges, later, of_asked, strict=True)]


def _for_owners(values: list[NDArray[Any]], sent: list[Ints]) -> list[NDArray[Any]]:
    """Return for each owner the values that all ranks send it, of the values of each rank by owner."""
    parts = [np.split(some, np.cumsum(counts)[:-1]) for some, counts in zip(values, sent, strict=True)]
    return [np.concatenate(mine) for mine in zip(*parts, strict=True)]


def ask(ids: list[Ints], bases: Ints, ranks: Collectives) -> Exchange:
    """Tell the owners of rows which of them this rank's batch needs.

    Raises
    ------
    RuntimeError
        When other ranks have no batch.
    """
    rows, order, sent = _wanted(ids, bases, ranks.ranks)
    received = tell_counts(
        ranks,
        sent,
        "have no batch for this step, as they say themselves: their loader ended before others', or failed, or gave a "
        "batch that the tables refuse; no rank takes the step",
    )
    asked: Any = ranks.exchange(torch.from_numpy(rows.keys[order]), sent.tolist(), received).numpy()
    return Exchange(ids, rows, order, sent.tolist(), received, asked // ranks.ranks)


def check_all_hold(ranks: Collectives) -> None:
    """Say that this rank holds the rows that a step asks of it, and wait until all ranks have said so.

    Raises
    ------
    RuntimeError
        When other ranks cannot.
    """
    tell_counts(
        ranks,
        np.zeros(ranks.ranks, np.int64),
        "cannot hold the rows that all ask of them for this step, and say why themselves; no rank takes the step",
    )


def tell_counts(ranks: Collectives, counts: Ints, refusal: str) -> list[int]:
    """Tell each rank a number; return those that ranks tell this one.

    Raises
    ------
    RuntimeError
        When ranks fail inside `refused_together` instead; `refusal` says the rest of the message.
    """
    told: list[int] = ranks.of_each(torch.from_numpy(counts[:, None]))[:, 0].tolist()
    if failed := [rank for rank, number in enumerate(told) if number == _NO_BATCH]:
        raise RuntimeError(f"ranks {failed} {refusal}")
    return told


@contextmanager
def refused_together(ranks: Collectives) -> Iterator[None]:
    """Tell ranks that wait for this one in `tell_counts` of a failure inside the block."""
    try:
        yield
    except Exception:
        ranks.of_each(torch.full((ranks.ranks, 1), _NO_BATCH))
        raise


def say_what_can_wait(step: Exchange, following: Exchange, ranks: Collectives) -> None:
    """Tell ranks which of the rows that they asked for in a step no rank asks for in the next."""
    # Set before others know: gradients that they hold back have to wait here as well.
    step.asked_later, step.following = ~np.isin(step.asked, following.asked), ref(following)
    flags = ranks.exchange(torch.from_numpy(step.asked_later.astype(np.uint8)), step.received, step.sent).numpy()
    later = np.empty(len(step.rows.keys), np.bool_)
    later[step.order] = flags != 0
    step.later = later
