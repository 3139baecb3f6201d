"""Tables divided among trainers: each rank keeps the rows that are its own, and lends them to the others.

Row r of a table belongs to the rank (where the table begins + r) modulo the number of ranks. A step exchanges ids, rows
and gradients by all-to-all. Gradients come back one for each id and are added feature after feature, in the order of
ranks and, within a rank, of ids: so training on W ranks gives tables with the bits of training on one rank whose batch
is theirs one after the other. What of a batch waits for whom is decided when its ids are known: `lookahead` exchanges
them, and reads the rows they ask for, before their step comes. Gradients of rows that no rank needs in the next step
(Bagpipe's `sync_later`, arXiv 2202.12429) travel while that runs, and are added before the one after it begins.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memhier.arrays import as_ints
from memhier.recsys.embedding.bags import Bags
from memhier.recsys.embedding.collection import FeatureParser, Pooled
from memhier.recsys.embedding.fused import EVALUATED, Sparse, apply_sparse, check_first_pass
from memhier.recsys.embedding.merged import Pending
from memhier.recsys.embedding.module import TableModule, Update, not_compiled
from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.recsys.embedding.passes import LookUp
from memhier.recsys.embedding.sharding.agreement import agree, last_checkpoints
from memhier.recsys.embedding.sharding.collectives import Collectives
from memhier.recsys.embedding.sharding.contributions import Contributions, Late, in_order
from memhier.recsys.embedding.sharding.exchange import (
    Asked,
    Exchange,
    Layout,
    ask,
    check_all_hold,
    refused_together,
    say_what_can_wait,
)
from memhier.recsys.embedding.sharding.shard import Shard
from memhier.recsys.embedding.tables import Ints, Rows, TableSpec
from memhier.shield import shielded
from memhier.store.patient_segment import FullError
from memhier.table.checkpoints import Saving

__all__ = ["ShardedEmbeddingBagCollection"]


class ShardedEmbeddingBagCollection(TableModule):
    """:class:`EmbeddingBagCollection` over the ranks of `torch.distributed`, each with its own folder and budget.

    The dense part goes under DDP as ever; this module stays outside. All ranks must make the same calls in the same
    order, and leave an epoch of `lookahead` at the same batch.

    Parameters
    ----------
    tables
        :class:`EmbeddingBagConfig`, the same on every rank.
    path
        A folder; each rank keeps its rows in ``shard-<rank>`` of it.
    average
        Divide gradients by the number of ranks, as DDP does with those of the dense part.
    group
        Ranks among which the tables are divided; by default all.
    update
        As in :class:`EmbeddingBag`. Where a step adds up several backward passes, the sums' last bits depend on the
        number of ranks.
    optimizer, dram, seed, resume, policy, codec, touched, step_rows
        As in :class:`EmbeddingBag`, for each rank.

    Raises
    ------
    FormatError
        When the shards are of another number of ranks, see :func:`reshard`, or not of one training.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        optimizer: SparseOptimizer | None = None,
        dram: int | str,
        path: str | os.PathLike[str],
        average: bool = True,
        group: Any = None,
        update: Update = "backward",
        **options: Any,
    ) -> None:
        parser = FeatureParser(tables)
        # What the training waits for, what travels beside it, and what the thread that looks ahead asks: each needs a
        # group of its own.
        self._now = Collectives(group)
        self._beside, self._ahead = self._now.like(), self._now.like()
        self._rank, self._ranks = self._now.rank, self._now.ranks
        folder = Path(path) / f"shard-{self._rank}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        agree(folder, [(last, before) for last, before in self._now.all(last_checkpoints(folder))])
        self._saving: Future[int] | None = None
        super().__init__(
            Shard(parser.specs, self._rank, self._ranks, optimizer, dram=dram, path=folder, **options), update
        )
        self._parser = parser
        self._bases = np.cumsum([0, *(spec.rows for spec in parser.specs)])
        self._dims = np.array([spec.dim for spec in parser.specs])
        # Features of a table add up one after the other.
        self._turns = max(len(config.feature_names) for config in parser.configs)
        self._average = average
        self._previous: Exchange | None = None  # the last one that was made ahead
        self._late: Late | None = None

    @not_compiled
    def forward(self, features: Any) -> Pooled:
        """Return pooled rows of every feature of this rank's batch; see :class:`EmbeddingBagCollection`.

        Raises
        ------
        RuntimeError
            Where other ranks raise, because of an id out of range, rows beyond their budget or the like. No rank has
            taken the step then.
        """
        look_up = self._begin_look_up()
        # Of a batch that was read ahead all have heard already.
        with refused_together(self._now) if self._planned is None else nullcontext():
            bags = self._parser.bags_of(features)
        ids = [bag.indices.numpy() for bag in bags]
        planned = self._expected(ids)
        exchange = planned or self._ask(ids, self._now)
        late = self._late
        if late is not None and (late.following is None or late.following() is not exchange):
            self._settle()
        trains = self._trains
        rows = self._rows_of(Asked(exchange), trains) if planned else self._rows_now(exchange, trains)
        samples = [bag.weights for bag in bags]
        step = _Step(rows, exchange, bags, look_up) if trains else _Step(rows, exchange, bags, look_up, evaluated=True)
        output: Tensor = _Look.apply(self._anchor, self, step, *samples)  # type: ignore[no-untyped-call]
        if not trains:
            rows.release()
        return Pooled(self._parser.features, self._parser.widths, output)

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables, as they are in the whole."""
        return tuple(self._parser.specs)

    def weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return rows as they are now, float32 [n, dim], from wherever they are; all ranks ask for the same."""
        return self._from_everywhere(super().weights, rows, table)

    def optimizer_state(self, rows: Any, table: int = 0) -> Tensor:
        """Return the optimizer's state of rows, float32 [n, width], as :meth:`weights` does."""
        return self._from_everywhere(super().optimizer_state, rows, table)

    def _from_everywhere(self, read: Callable[[Ints, int], Tensor], rows: Any, table: int) -> Tensor:
        ids = as_ints("rows", rows)
        self._parser.check_ids(table, ids)
        self._close_step()
        self._settle()
        keys = ids + self._bases[table]
        mine = self._shard.has(keys)
        own = read(self._shard.numbers(keys[mine]) - self.tables.bases[table], table)
        found = torch.zeros(*keys.shape, own.shape[-1])
        found[torch.from_numpy(mine)] = own
        return self._now.total(found)

    def initial_weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return what rows hold before they are first trained, float32 [n, dim]."""
        spec, ids = self._parser.specs[table], as_ints("rows", rows)
        self._parser.check_ids(table, ids)
        return torch.from_numpy(spec.initial.weights(self.tables.seed, table, ids, spec.dim, spec.rows))

    @shielded
    def checkpoint(self, extra: Any = None) -> int:
        """Make every rank's rows durable; returns when all are. See :meth:`TableModule.checkpoint`.

        Whenever ranks end, even amid a checkpoint, they go on from the newest that all of them have.

        Raises
        ------
        OSError
            On all ranks, with ``errno`` ENOSPC, EDQUOT or EFBIG, when the disk of some is full, which the message
            names: make room there, and let all ranks call again; nothing is lost.
        RuntimeError
            When some ranks could not write this checkpoint, or the one before, otherwise. Open the tables again, which
            finds the last one that all could.
        """
        self._await_all()
        done: Saving[int] = Saving()
        try:
            done.set_result(super().checkpoint(extra))
        except Exception as error:
            done.set_exception(error)  # the other ranks are told first: they wait
        self._saving = done
        full = self._await_all()
        if full and done.exception() is None:
            raise OSError(
                full[min(full)],
                f"the disk of ranks {sorted(full)} is full: make room there, and let all ranks call again; nothing is "
                "lost",
                self.tables.path,
            )
        return done.result()

    @shielded
    def start_checkpoint(self, extra: Any = None) -> "Future[int]":
        """Take a checkpoint beside the training, once every rank has the one before; see :meth:`checkpoint`.

        Where the disk of a rank is full, its result says so; the next checkpoint of all ranks makes up for this one.
        """
        self._await_all()
        try:
            self._saving = super().start_checkpoint(extra)
        except Exception as error:
            self._saving = Saving()
            self._saving.set_exception(error)
            raise
        return self._saving

    def _await_all(self) -> dict[int, int]:
        """Return once every rank's last checkpoint has ended: those that all have are never more than one apart.

        Returned is ``errno`` of the ranks whose disk was too full for it.
        """
        failed = None if self._saving is None else self._saving.exception()
        full = failed.errno or 0 if isinstance(failed, FullError) else 0
        told = self._now.all([failed is not None, full, self.tables.record.checkpoint])
        ranks = [rank for rank, (one, _, _) in enumerate(told) if one]
        if ranks and len(ranks) < self._ranks:
            if not all(told[rank][1] for rank in ranks):
                raise RuntimeError(
                    f"the last checkpoint could not be written by ranks {ranks}: open the tables again to go on from "
                    "the one before"
                ) from failed
            if self._saving is not None and failed is None:
                self._shard.keep_way_back(further=True)
        elif not ranks and self._saving is not None:
            self._shard.keep_way_back(further=False)
        # Whoever could not count is where the others are.
        self.tables.record.checkpoint = max(number for _, _, number in told)
        self._saving = None
        return {rank: told[rank][1] for rank in ranks}

    def _checkpoint_values(self, extra: Any) -> dict[str, bytes]:
        self._close_step()
        self._settle()
        return super()._checkpoint_values(extra)

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients that wait for a step, on all ranks; with ``update="step"``."""
        return self._now.total(super().gradient_norm().square()).sqrt()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: see :meth:`TableModule.stats`.

        Besides, bytes sent to other ranks: ``critical_bytes`` while the training waited, ``deferred_bytes`` while it
        went on, and ``ahead_bytes`` by the thread that looks ahead.
        """
        sent = {"critical_bytes": self._now, "deferred_bytes": self._beside, "ahead_bytes": self._ahead}
        return super().stats() | {name: ranks.sent_bytes for name, ranks in sent.items()}

    @shielded
    def close(self) -> None:
        """Let go of threads, memory and files; what was trained since the last checkpoint is lost."""
        late, self._late = self._late, None
        if late is not None:
            late.rows.release()
        super().close()

    @property
    def _shard(self) -> Shard:
        assert isinstance(self.tables, Shard)
        return self.tables

    def _distinct(self, ids: list[Ints | None]) -> Rows:
        assert isinstance(ids, Asked)
        return self._shard.rows_of(ids.exchange.asked)

    def _make_room(self) -> None:
        super()._make_room()
        self._settle()

    def _ids_of(self, *arguments: Any) -> list[Ints | None]:
        """Exchange the ids of a batch to come; what is asked of this rank are the ids of its tables."""
        with self._reading():
            ids = [bag.indices.numpy().copy() for bag in self._parser.bags_of(*arguments)]
        exchange, previous = self._ask(ids, self._ahead), self._previous
        with refused_together(self._ahead):
            if len(exchange.asked) > min(self.tables.capacity, self.tables.call_rows):
                self.tables.check_fits(self._shard.rows_of(exchange.asked))
        check_all_hold(self._ahead)
        if previous is not None and self._ranks > 1 and self._update == "backward":
            say_what_can_wait(previous, exchange, self._ahead)
        self._previous = exchange
        return Asked(exchange)

    def _rows_now(self, exchange: Exchange, trains: bool) -> Rows:
        """Return the rows of a step that was not read ahead, once all ranks have theirs."""
        with refused_together(self._now):
            rows = self._rows_of(Asked(exchange), trains)
        try:
            check_all_hold(self._now)
        except BaseException:
            rows.release()
            raise
        return rows

    def _reading(self) -> AbstractContextManager[None]:
        return refused_together(self._ahead)

    def _largest(self, size: int) -> int:
        """Return the largest of the sizes of all ranks, which read their loaders in step."""
        return max(largest for (largest,) in self._ahead.all([size]))

    def _weight_names(self) -> list[str]:
        return [f"shard-{self._rank}.weight"]

    def _expected(self, ids: list[Ints]) -> Exchange | None:
        """Return the exchange that was made ahead for this batch."""
        asked = None if self._planned is None else self._planned[0]
        if not isinstance(asked, Asked) or not all(map(np.array_equal, asked.exchange.ids, ids)):
            return None
        return asked.exchange

    def _ask(self, ids: list[Ints], ranks: Collectives) -> Exchange:
        with refused_together(ranks):
            for table, some in enumerate(ids):
                self._parser.check_ids(table, some)
        return ask(ids, self._bases, ranks)

    def _fetched(self, rows: Rows, exchange: Exchange) -> list[Tensor]:
        """Return the weights of this rank's keys, from their owners, of each table float32 [u, dim]."""
        lent = torch.from_numpy(np.take(self.tables.whole(rows), rows.inverse, axis=0))
        theirs = Layout(self._dims[self._shard.tables_of(exchange.asked)])
        table_of = np.repeat(np.arange(len(self._dims)), np.diff(exchange.starts))
        mine = Layout(self._dims[table_of[exchange.order]])
        sent, received = theirs.floats(exchange.received), mine.floats(exchange.sent)
        vector = self._now.exchange(theirs.joined(lent), sent, received)
        found = mine.parted(vector, max(self._dims))
        weights = torch.empty_like(found)
        weights[torch.from_numpy(exchange.order)] = found
        bounds = zip(exchange.starts.tolist(), exchange.starts[1:].tolist(), self._dims.tolist(), strict=False)
        return [weights[start:stop, :dim].contiguous() for start, stop, dim in bounds]

    def _send_gradients(self, step: "_Step", places: Ints, turns: Ints, values: Tensor) -> None:
        """Bring the gradients of ids, [n, widest], to the owners of their rows, and take what comes from all ranks.

        `turns` say of which feature of its table each is.
        """
        exchange, rows = step.exchange, step.rows
        keys, later = exchange.keys[places], exchange.later
        owners, dims = keys % self._ranks, self._dims[np.searchsorted(self._bases, keys, side="right") - 1]
        waits = np.zeros(len(keys), np.bool_) if later is None else later[places]
        parts = [np.flatnonzero(~waits), np.flatnonzero(waits)]
        parts = [part[np.argsort(owners[part] * self._turns + turns[part], kind="stable")] for part in parts]
        counts = [self._counts(owners[part], turns[part]) for part in parts]
        layouts = [Layout(dims[part]) for part in parts]
        sizes = [some.sum(1).tolist() for some in counts]
        floats = [layout.floats(size) for layout, size in zip(layouts, sizes, strict=True)]
        vectors = [layout.joined(values[torch.from_numpy(part)]) for layout, part in zip(layouts, parts, strict=True)]
        knows = np.full((self._ranks, 1), later is not None)
        columns = [*counts, np.array(floats).T, knows]
        told = self._now.of_each(torch.from_numpy(np.concatenate(columns, axis=1).astype(np.int64))).numpy()
        now_in, late_in = told[:, : self._turns], told[:, self._turns : 2 * self._turns]
        now_floats, late_floats, known = told[:, 2 * self._turns :].T.tolist()
        came = self._now.exchange(torch.from_numpy(keys[parts[0]]), sizes[0], now_in.sum(1).tolist())
        vector = self._now.exchange(vectors[0], floats[0], now_floats)
        self._settle()
        found = self._contributions(came, vector, now_in)
        if not any(known):
            self._await(step.look_up, rows, self._gradients(rows, found))
            return
        can_wait = np.zeros(len(rows.keys), np.bool_)
        if exchange.asked_later is not None:
            can_wait[rows.inverse] = exchange.asked_later
        held = can_wait[np.searchsorted(rows.keys, found.numbers)]
        of_keys = self._beside.start(torch.from_numpy(keys[parts[1]]), sizes[1], late_in.sum(1).tolist())
        of_values = self._beside.start(vectors[1], floats[1], late_floats)
        late = rows.share()
        group, alone = dict(self.optimizer.param_groups[0]), not self._pending
        self._await(step.look_up, rows, self._gradients(rows, found.only(~held)))
        graph_pass = self._passes.current()
        self._late = Late(late, exchange.following, found.only(held), late_in, of_keys, of_values, group, graph_pass)
        if not alone:
            self._settle()  # a step of several look-ups has no rest

    def _counts(self, owners: Ints, turns: Ints) -> Ints:
        """Return how many gradients go to each rank, of each turn: [ranks, turns]."""
        return np.bincount(owners * self._turns + turns, minlength=self._ranks * self._turns).reshape(self._ranks, -1)

    def _contributions(self, keys: Tensor, vector: Tensor, counts: Ints) -> Contributions:
        numbers = self._shard.numbers(keys.numpy())
        values = Layout(self._dims[self._shard.tables_of(numbers)]).parted(vector, max(self._dims))
        if self._average:
            values /= self._ranks
        turns = np.arange(self._turns) * self._ranks + np.arange(self._ranks)[:, None]
        return Contributions.in_turn(numbers, values, np.repeat(turns.reshape(-1), counts.reshape(-1)))

    def _settle(self) -> None:
        """Add what travelled beside a step to its rows, or to the gradients of the step where these wait still."""
        late, self._late = self._late, None
        if late is None:
            return
        came = self._contributions(late.keys.wait(), late.values.wait(), late.counts)
        gradients = self._gradients(late.rows, late.here.then(came))
        if late.steps is None:
            self._pending.append(Pending(late.rows, gradients, late.graph_pass))
            return
        some = [(table, gradient) for table, gradient in gradients if gradient._nnz()]
        apply_sparse(self.tables, late.rows, some, late.group, late.steps)
        late.rows.release()

    def _apply_pending(self) -> None:
        super()._apply_pending()
        if self._late is not None and self._late.steps is None:
            self._late.steps = list(self.tables.record.steps)

    def _pass_failed(self, before: int) -> None:
        if self._late is not None and self._late.steps is None:
            self._settle()  # it goes with the others
        super()._pass_failed(before)

    def _gradients(self, rows: Rows, found: Contributions) -> Sparse:
        """Return the gradients of a step's rows, of each table."""
        places = np.searchsorted(rows.keys, found.numbers)
        table_of = np.searchsorted(rows.starts, places, side="right") - 1
        gradients = []
        for table, dim in enumerate(self._dims.tolist()):
            mine, of_table = np.flatnonzero(table_of == table), rows.of_table(table)
            values = found.values[torch.from_numpy(mine), :dim]
            count = of_table.stop - of_table.start
            at = torch.from_numpy(places[mine] - of_table.start)
            gradients.append((table, in_order(at, values, count, self.tables.optimizer)))
        return gradients


@dataclass(slots=True)
class _Step:
    """A look-up: its rows, who asked whom for which, its bags; and whether it trains nothing."""

    rows: Rows
    exchange: Exchange
    bags: list[Bags]
    look_up: LookUp | None
    evaluated: bool = False


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, module: ShardedEmbeddingBagCollection, step: _Step, *samples: Tensor | None
    ) -> Tensor:
        exchange, bags = step.exchange, step.bags
        weights = module._fetched(step.rows, exchange)
        # Gradients of per-sample weights need the rows that were looked up.
        ctx.looked_up = weights if any(ctx.needs_input_grad[3:]) else None
        columns, kept = [], []
        begin = 0
        for bag, mine, start, end in zip(bags, weights, exchange.starts.tolist(), exchange.ends.tolist(), strict=False):
            bag.indices = torch.from_numpy(exchange.inverse[begin:end].astype(np.int64) - start)
            begin = end
            output, *others = torch.ops.aten._embedding_bag(
                mine, bag.indices, bag.offsets, False, bag.mode, True, bag.weights, bag.last, bag.padding
            )
            columns += output.chunk(bag.features)
            kept.append(others)
        ctx.module, ctx.step, ctx.kept = module, step, kept
        ctx.counts = [len(mine) for mine in weights]
        return torch.cat(columns, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        step, ctx.step = ctx.step, None
        if step is not None and step.evaluated and ctx.needs_input_grad[0]:
            ctx.step = step  # the same is said again
            raise RuntimeError(EVALUATED)
        check_first_pass(step, gradient)
        places, turns, values, of_samples = [], [], [], []
        dims, starts = ctx.module._dims.tolist(), step.exchange.starts.tolist()
        start = 0
        for table, (bag, kept, needed) in enumerate(zip(step.bags, ctx.kept, ctx.needs_input_grad[3:], strict=True)):
            dim = dims[table]
            parts = [gradient[:, start + dim * part : start + dim * (part + 1)] for part in range(bag.features)]
            of_bags = torch.cat(parts)
            start += dim * bag.features
            count = ctx.counts[table]
            sparse = torch.ops.aten._embedding_bag_backward(
                of_bags, bag.indices, bag.offsets, *kept, count, False, bag.mode, True, bag.weights, bag.padding
            )
            places.append(sparse._indices()[0] + starts[table])
            turns.append(np.repeat(np.arange(bag.features), bag.lengths.numpy().reshape(bag.features, -1).sum(1)))
            values.append(nn.functional.pad(sparse._values(), (0, max(dims) - dim)))
            of_samples.append(
                torch.ops.aten._embedding_bag_per_sample_weights_backward(
                    of_bags, ctx.looked_up[table], bag.indices, bag.offsets, kept[0], bag.mode, bag.padding
                )
                if needed
                else None
            )
        if not step.evaluated:
            if ctx.module._anchor.requires_grad:
                ctx.module._send_gradients(step, torch.cat(places).numpy(), np.concatenate(turns), torch.cat(values))
            else:
                step.rows.release()  # frozen since the forward pass
        return None, None, None, *of_samples
