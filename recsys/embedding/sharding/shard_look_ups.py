"""Look-ups over ranks: ids go to the owners of rows, rows come back, and gradients follow.

Gradients of rows that no rank needs in the next step (Bagpipe's `sync_later`, arXiv 2202.12429) travel while that step
runs, and are added before the one after it begins.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.collection import FeatureParser
from memhier.recsys.embedding.look_ups import LookUp, LookUps
from memhier.recsys.embedding.pooling import Sparse, apply_sparse
from memhier.recsys.embedding.sharding.collectives import Collectives
from memhier.recsys.embedding.sharding.contributions import Contributions, Late, in_order
from memhier.recsys.embedding.sharding.exchange import (
    Exchange,
    Packing,
    StepPlan,
    ask,
    check_all_hold,
    refused_together,
    say_what_can_wait,
)
from memhier.recsys.embedding.sharding.shard import Shard
from memhier.recsys.embedding.tables import Ints, StepRows
from memhier.recsys.embedding.torch_internals import current_pass, values_of
from memhier.shield import shielded

__all__ = ["ShardLookUps"]


class ShardLookUps(LookUps):
    """The look-ups of one rank; an :class:`Exchange` stands for the ids of a batch.

    Parameters
    ----------
    shard
        The rows of this rank.
    parser
        The tables, whole.
    groups
        Exchanges that the training waits for, that go on beside it, and of the thread that looks ahead: `now`, `beside`
        and `ahead`. Each has a group of its own.
    average
        Whether gradients are divided by the number of ranks.
    """

    reads_in_turn = True

    def __init__(
        self,
        shard: Shard,
        parser: FeatureParser,
        groups: tuple[Collectives, Collectives, Collectives],
        average: bool,
    ) -> None:
        super().__init__(shard, parser.ids_of)
        self.ahead: Collectives
        self.beside: Collectives
        self.now: Collectives
        self.now, self.beside, self.ahead = groups
        self.shard = shard
        self._parser = parser
        self._bases = np.cumsum([0, *(spec.rows for spec in parser.specs)])
        self._dims = np.array([spec.dim for spec in parser.specs])
        # Features of a table add up one after the other.
        self._turns = max(len(config.feature_names) for config in parser.configs)
        self._average = average
        self._previous: Exchange | None = None  # the last one that was made ahead
        self._late: Late | None = None

    # Rows.

    def ids_of(self, *arguments: Any) -> Exchange:
        """Exchange the ids of a batch to come, and the rows that can wait in the step before it.

        The one argument may be the plan of a reader, which has done so.
        """
        plan = arguments[0] if isinstance(arguments[0], StepPlan) else None
        if plan is None:
            with self.reading():
                ids = super().ids_of(*arguments)
            exchange = self._ask(ids, self.ahead)
        else:
            exchange = plan.exchange
        previous = self._previous if self.now.ranks > 1 and self.update == "backward" else None
        with refused_together(self.ahead):
            if len(exchange.asked) > min(self.shard.capacity, self.shard.call_rows):
                self.shard.check_fits(self.distinct(exchange))
            if previous is not None and plan is not None and plan.asked_later is not None:
                # Known here before any rank holds gradients back for it.
                previous.asked_later, previous.following = plan.asked_later, ref(exchange)
        check_all_hold(self.ahead)
        if previous is not None and plan is None:
            say_what_can_wait(previous, exchange, self.ahead)
        elif previous is not None and plan is not None:
            previous.later = plan.later
        self._previous = exchange
        return exchange

    def ids_of_all(self, look_ups: Sequence[tuple[Any, ...]]) -> Exchange:
        """Refuse several look-ups of a batch: ranks exchange the ids of one."""
        raise ValueError(f"ids: expected the arguments of one look-up a batch with ranks, got those of {len(look_ups)}")

    def distinct(self, ids: Exchange) -> StepRows:
        """Return the distinct rows that all ranks ask of this one."""
        return self.shard.rows_of(ids.asked)

    def are_equal(self, ids: Exchange, others: Exchange) -> bool:
        """Whether two exchanges ask the same of this rank."""
        return np.array_equal(ids.asked, others.asked)

    def reading(self) -> AbstractContextManager[None]:
        """Return a context to read a loader in; it tells other ranks of a failure."""
        return refused_together(self.ahead)

    def agree(self, size: int) -> int:
        """Return the largest of the sizes of all ranks, which read their loaders in step."""
        return max(largest for (largest,) in self.ahead.all([size]))

    def exchange_of(self, ids: list[Ints], trains: bool) -> tuple[Exchange, bool]:
        """Return the exchange of a look-up, and whether it was made ahead."""
        # Without training all ranks ask: ids may equal those of the step on some of them alone.
        is_planned = trains and self.planned is not None and all(map(np.array_equal, self.planned[0].ids, ids))
        exchange: Exchange = self.planned[0] if self.planned and is_planned else self._ask(ids, self.now)
        late = self._late
        if late is not None and (late.following is None or late.following() is not exchange):
            self.take_late()
        return exchange, is_planned

    def rows_now(self, exchange: Exchange, trains: bool) -> StepRows:
        """Return the rows of a step that was not read ahead, once all ranks have theirs."""
        with refused_together(self.now):
            rows = self.rows_of(exchange, trains)
        try:
            check_all_hold(self.now)
        except BaseException:
            rows.release()
            raise
        return rows

    def weights(self, rows: StepRows, exchange: Exchange) -> list[Tensor]:
        """Return the weights of the rows that this rank's batch needs, from their owners, of each table [u, dim]."""
        lent = torch.from_numpy(np.take(self.shard.whole(rows), rows.inverse, axis=0))
        theirs = Packing(self._dims[self.shard.tables_of(exchange.asked)])
        starts = exchange.rows.starts
        table_of = np.repeat(np.arange(len(self._dims)), np.diff(starts))
        mine = Packing(self._dims[table_of[exchange.order]])
        sent, received = theirs.floats(exchange.received), mine.floats(exchange.sent)
        vector = self.now.exchange(theirs.joined(lent), sent, received)
        found = mine.parted(vector, max(self._dims))
        weights = torch.empty_like(found)
        weights[torch.from_numpy(exchange.order)] = found
        bounds = zip(starts.tolist(), starts[1:].tolist(), self._dims.tolist(), strict=False)
        return [weights[start:stop, :dim].contiguous() for start, stop, dim in bounds]

    def _ask(self, ids: list[Ints], ranks: Collectives) -> Exchange:
        with refused_together(ranks):
            for table, some in enumerate(ids):
                self._parser.check_ids(table, some)
        return ask(ids, self._bases, ranks)

    # Gradients.

    def send(
        self, look_up: LookUp | None, rows: StepRows, exchange: Exchange, places: Ints, turns: Ints, values: Tensor
    ) -> None:
        """Send the gradients of a step's ids to the owners of their rows, and take those that come from all ranks.

        Parameters
        ----------
        rows
            The rows that ranks have asked of this one.
        places, values
            int64 [n] and float32 [n, widest]: the row of each id among this rank's, and its gradient.
        turns
            int64 [n]: the number of each id's feature among those of its table.
        """
        keys, later = exchange.rows.keys[places], exchange.later
        owners, dims = keys % self.now.ranks, self._dims[np.searchsorted(self._bases, keys, side="right") - 1]
        waits = np.zeros(len(keys), np.bool_) if later is None else later[places]
        parts = [np.flatnonzero(~waits), np.flatnonzero(waits)]
        parts = [part[np.argsort(owners[part] * self._turns + turns[part], kind="stable")] for part in parts]
        counts = [self._counts(owners[part], turns[part]) for part in parts]
        sizes = [some.sum(1).tolist() for some in counts]
        packings = [Packing(dims[part]) for part in parts]
        floats = [packing.floats(size) for packing, size in zip(packings, sizes, strict=True)]
        vectors = [one.joined(values[torch.from_numpy(part)]) for one, part in zip(packings, parts, strict=True)]
        knows = np.full((self.now.ranks, 1), later is not None)
        columns = [*counts, np.array(floats).T, knows]
        told = self.now.of_each(torch.from_numpy(np.concatenate(columns, axis=1).astype(np.int64))).numpy()
        now_in, late_in = told[:, : self._turns], told[:, self._turns : 2 * self._turns]
        now_floats, late_floats, known = told[:, 2 * self._turns :].T.tolist()
        came = self.now.exchange(torch.from_numpy(keys[parts[0]]), sizes[0], now_in.sum(1).tolist())
        vector = self.now.exchange(vectors[0], floats[0], now_floats)
        self.take_late()
        found = self._contributions(came, vector, now_in)
        if not any(known):
            self.take(look_up, rows, self._gradients(rows, found))
            return
        can_wait = np.zeros(len(rows.keys), np.bool_)
        if exchange.asked_later is not None:
            can_wait[rows.inverse] = exchange.asked_later
        held = can_wait[np.searchsorted(rows.keys, found.numbers)]
        of_keys = self.beside.start(torch.from_numpy(keys[parts[1]]), sizes[1], late_in.sum(1).tolist())
        of_values = self.beside.start(vectors[1], floats[1], late_floats)
        late = rows.share()
        groups, alone = [dict(group) for group in self.optimizer.param_groups], not self.waiting
        self.take(look_up, rows, self._gradients(rows, found.only(~held)))
        here, graph_pass = found.only(held), current_pass()
        self._late = Late(late, exchange.following, here, late_in, of_keys, of_values, groups, graph_pass)
        if not alone:
            self.take_late()  # a step of several look-ups has no rest

    def settle(self) -> None:
        """Apply all gradients that need not wait, and those that travel beside a step."""
        super().settle()
        self.take_late()

    def take_late(self) -> None:
        """Add the gradients that travelled beside a step to its rows; to those of the step if they wait still."""
        late, self._late = self._late, None
        if late is None:
            return
        came = self._contributions(late.keys.wait(), late.values.wait(), late.counts)
        gradients = self._gradients(late.rows, late.here.then(came))
        if late.steps is None:
            self.add(late.rows, gradients, late.graph_pass)
            return
        some = [(table, gradient) for table, gradient in gradients if len(values_of(gradient))]
        apply_sparse(self.tables, late.rows, some, late.groups, late.steps)
        late.rows.release()

    def apply(self) -> None:
        """Apply the gradients that wait; those under way belong to this update."""
        super().apply()
        if self._late is not None and self._late.steps is None:
            self._late.steps = list(self.tables.record.steps)

    @shielded
    def drop(self, first: int = 0) -> None:
        """Drop the gradients that wait, and those under way that belong to them."""
        if self._late is not None and self._late.steps is None:
            self.take_late()
        super().drop(first)

    def close(self) -> None:
        """Drop all gradients."""
        late, self._late = self._late, None
        if late is not None:
            late.rows.release()
        self.drop()

    def _counts(self, owners: Ints, turns: Ints) -> Ints:
        """Return the number of gradients for each rank, of each turn: [ranks, turns]."""
        ranks = self.now.ranks
        return np.bincount(owners * self._turns + turns, minlength=ranks * self._turns).reshape(ranks, -1)

    def _contributions(self, keys: Tensor, vector: Tensor, counts: Ints) -> Contributions:
        numbers = self.shard.numbers(keys.numpy())
        values = Packing(self._dims[self.shard.tables_of(numbers)]).parted(vector, max(self._dims))
        if self._average:
            values /= self.now.ranks
        turns = np.arange(self._turns) * self.now.ranks + np.arange(self.now.ranks)[:, None]
        return Contributions.in_turn(numbers, values, np.repeat(turns.reshape(-1), counts.reshape(-1)))

    def _gradients(self, rows: StepRows, found: Contributions) -> Sparse:
        """Return the gradients of a step's rows, of each table."""
        places = np.searchsorted(rows.keys, found.numbers)
        table_of = np.searchsorted(rows.starts, places, side="right") - 1
        gradients = []
        for table, dim in enumerate(self._dims.tolist()):
            mine, of_table = np.flatnonzero(table_of == table), rows.of_table(table)
            values = found.values[torch.from_numpy(mine), :dim]
            count = of_table.stop - of_table.start
            at = torch.from_numpy(places[mine] - of_table.start)
            gradients.append((table, in_order(at, values, count, self.tables.rules.of[table])))
        return gradients
