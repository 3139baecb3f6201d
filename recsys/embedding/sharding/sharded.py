"""Tables divided among trainers: each rank keeps the rows that are its own, and lends them to the others.

Row r of a table belongs to the rank (first key of the table + r) modulo the number of ranks. A step exchanges ids, rows
and gradients by all-to-all. Each id has a gradient of its own. Gradients are added feature after feature, in the order
of ranks and, within a rank, of ids: W ranks give tables the bits of one rank that trains on all their batches, one
after the other. `lookahead` exchanges the ids of a batch, and reads the rows that they ask for, before its step comes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memhier.arguments import as_ints
from memhier.recsys.embedding.collection import FeatureParser
from memhier.recsys.embedding.device.crossing import Crossing
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.look_ups import LookUp
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.recsys.embedding.pooling import EVALUATED, Bags, check_first_pass, pool_weights
from memhier.recsys.embedding.sharding.collectives import Collectives
from memhier.recsys.embedding.sharding.exchange import Exchange, refused_together
from memhier.recsys.embedding.sharding.moving import settled
from memhier.recsys.embedding.sharding.shard import Shard
from memhier.recsys.embedding.sharding.shard_look_ups import ShardLookUps
from memhier.recsys.embedding.tables import Ints, StepRows, TableOptions, Update
from memhier.recsys.embedding.torch_internals import indices_of, not_compiled, values_of
from memhier.shield import shielded
from memhier.store.segments import FullError
from memhier.store.store import Transfer
from memhier.table.checkpoints import Saving

__all__ = ["ShardedEmbeddingBagCollection"]


class ShardedEmbeddingBagCollection(TableModule):
    """:class:`EmbeddingBagCollection` over the ranks of `torch.distributed`, each with its own folder and budget.

    Wrap the dense part in DDP as usual, without this module. All ranks must make the same calls in the same order, and
    leave an epoch of `lookahead` at the same batch.

    Parameters
    ----------
    tables
        :class:`EmbeddingBagConfig`, the same on every rank.
    path
        A folder, on one disk for all ranks or on one for each. Each rank keeps its rows in
        ``shard-<rank>-of-<ranks>-since-<checkpoint>`` of it.
    resume
        Go on from the last checkpoint. If another number of ranks made it, or ranks start beside other disks, rows
        move to their owners first, through the group; a rank holds two shards of `dram` bytes meanwhile. Each shard has
        to be on the disk of some rank. If ranks gave that checkpoint different values, :attr:`extra` is
        ``{"shards": [...]}`` of all on every rank.
    average
        Divide gradients by the number of ranks, as DDP does in the dense part.
    group
        The ranks that share the tables; by default all.
    optimizer, dram, seed, update, policy, codec, touched, step_rows, device
        As in :class:`EmbeddingBag`, for each rank.

    Raises
    ------
    FormatError
        When the shards belong to other tables, or to different trainings.
    FileExistsError
        When there is a checkpoint and `resume` is False.
    FileNotFoundError
        When there is none and `resume` is True; when a shard of the newest is on no rank's disk.

    Examples
    --------
    One rank here; ``torchrun`` starts more, and gives ``init_process_group`` its arguments.

    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagConfig, ShardedEmbeddingBagCollection
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> configs = [EmbeddingBagConfig(name="item", num_embeddings=100, embedding_dim=4)]
    >>> with ShardedEmbeddingBagCollection(configs, dram="32MiB", path=tempfile.mkdtemp()) as tables:
    ...     tables(torch.tensor([[1], [7]]))["item"].sum().backward()
    ...     tables.checkpoint({"batch": 1}), tables.extra
    (1, {'batch': 1})
    >>> torch.distributed.destroy_process_group()
    """

    look_ups: ShardLookUps

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
        parser, now = FeatureParser(tables), Collectives(group)
        if isinstance(optimizer, Mapping):
            raise TypeError("optimizer: expected one for all tables, as tables over ranks have; got one by table")
        for spec in parser.specs:
            if spec.id_space is not None:
                raise ValueError(f"tables: {spec.name!r} is for any ids, and tables over ranks need id_space='rows'")
        table_options = TableOptions(optimizer=optimizer, dram=dram, path=path, update=update, **options)
        groups = now, now.like(), now.like()
        Path(path).mkdir(parents=True, exist_ok=True)
        folder = settled(Path(path), parser.specs, table_options, now)
        self._saving: Future[int] | None = None
        self._parser = parser
        self._bases = np.cumsum([0, *(spec.rows for spec in parser.specs)])
        shard = Shard(parser.specs, now.rank, now.ranks, replace(table_options, path=folder))
        super().__init__(ShardLookUps(shard, parser, groups, average))

    @not_compiled
    def forward(self, features: Any) -> Any:
        """Return pooled rows of every feature of this rank's batch; see :class:`EmbeddingBagCollection`.

        Raises
        ------
        RuntimeError
            If another rank raises, because of an id out of range, rows beyond its budget or the like. No rank has taken
            the step then.
        """
        look_ups, trains = self.look_ups, self._trains
        look_up = look_ups.begin(trains)
        # All ranks know already that a batch that was read ahead is in order.
        with nullcontext() if trains and look_ups.planned is not None else refused_together(look_ups.now):
            bags = self._parser.bags_of(features)
        exchange, is_planned = look_ups.exchange_of([bag.indices.numpy() for bag in bags], trains)
        rows = (look_ups.rows_of if is_planned else look_ups.rows_now)(exchange, trains)
        samples = [bag.weights for bag in bags]
        step = _Step(rows, exchange, bags, look_up, trains, self._crossing())
        output: Tensor = _Look.apply(self._anchor, look_ups, step, *samples)  # type: ignore[no-untyped-call]
        if not trains:
            rows.release()
        return self._parser.result(features, output if step.crossing is None else step.crossing.over(output)[0])

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return tuple(self._parser.specs)

    def weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return rows as they are now, float32 [n, dim], from all ranks; all ranks ask for the same."""
        return self._from_everywhere(super().weights, rows, table)

    def optimizer_state(self, rows: Any, table: int = 0) -> Tensor:
        """Return the optimizer's state of rows, float32 [n, width], as :meth:`weights` does."""
        return self._from_everywhere(super().optimizer_state, rows, table)

    def _from_everywhere(self, read: Callable[[Ints, int], Tensor], rows: Any, table: int) -> Tensor:
        ids = as_ints("rows", rows)
        self._parser.check_ids(table, ids)
        self.look_ups.settle()
        keys = ids + self._bases[table]
        mine = self.look_ups.shard.has(keys)
        own = read(self.look_ups.shard.numbers(keys[mine]) - self.tables.bases[table], table)
        found = torch.zeros(*keys.shape, own.shape[-1])
        found[torch.from_numpy(mine)] = own
        return self.look_ups.now.total(found)

    def initial_weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return the first values of rows, float32 [n, dim]."""
        spec, ids = self._parser.specs[table], as_ints("rows", rows)
        self._parser.check_ids(table, ids)
        return torch.from_numpy(spec.initial.weights(self.tables.seed, table, ids, spec.dim, spec.rows))

    @shielded
    def checkpoint(self, extra: Any = None) -> int:
        """Make every rank's rows durable; returns when all are. See :meth:`TableModule.checkpoint`.

        Ranks that end at any moment, even amid a checkpoint, go on from the newest that all of them have.

        Raises
        ------
        OSError
            On all ranks, with ``errno`` ENOSPC, EDQUOT or EFBIG, when the disk of some is full; the message names
            them. Make room there, and let all ranks call again; nothing is lost.
        RuntimeError
            When another failure kept some ranks from writing this checkpoint, or the one before. Open the tables again
            to go on from the last one that all ranks have.
        """
        self._await_all()
        done: Saving[int] = Saving()
        try:
            done.set_result(super().checkpoint(extra))
        except Exception as error:
            done.set_exception(error)  # tell the other ranks first, which wait
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

    def push(self, url: str, *, keep: int | None = None, verify: bool = False) -> Transfer:
        """Back up this rank's part of the last checkpoint, to a folder of `url` with the shard's name.

        Call it on every rank. To restore, :meth:`pull` each folder into the one of its name in `path`, on any rank.
        """
        place = f"{url.rstrip('/')}/{os.path.basename(self.tables.path)}"
        return super().push(place, keep=keep, verify=verify)

    @shielded
    def start_checkpoint(self, extra: Any = None) -> "Future[int]":
        """Take a checkpoint beside the training, once every rank has the one before; see :meth:`checkpoint`.

        If the disk of a rank is full, its result raises; the next checkpoint of all ranks makes up for this one.
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
        """Wait until the last checkpoint of every rank has ended, so that ranks are never more than one apart.

        Return ``errno`` of the ranks whose disk was too full for it.
        """
        failed = None if self._saving is None else self._saving.exception()
        full = failed.errno or 0 if isinstance(failed, FullError) else 0
        told = self.look_ups.now.all([failed is not None, full, self.tables.record.checkpoint])
        ranks = [rank for rank, (one, _, _) in enumerate(told) if one]
        if ranks and len(ranks) < self.look_ups.now.ranks:
            if not all(told[rank][1] for rank in ranks):
                raise RuntimeError(
                    f"the last checkpoint could not be written by ranks {ranks}: open the tables again to go on from "
                    "the one before"
                ) from failed
            if self._saving is not None and failed is None:
                self.look_ups.shard.keep_way_back(further=True)
        elif not ranks and self._saving is not None:
            self.look_ups.shard.keep_way_back(further=False)
        # A rank that could not count takes the number of the others.
        self.tables.record.checkpoint = max(number for _, _, number in told)
        self._saving = None
        return {rank: told[rank][1] for rank in ranks}

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients that wait for a step, on all ranks; with ``update="step"``."""
        return self.look_ups.now.total(super().gradient_norm().square()).sqrt()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: see :meth:`TableModule.stats`.

        Bytes sent to other ranks come on top: ``critical_bytes`` while the training waited, ``deferred_bytes`` while it
        went on, and ``ahead_bytes`` by the thread that looks ahead.
        """
        look_ups = self.look_ups
        sent = {"critical_bytes": look_ups.now, "deferred_bytes": look_ups.beside, "ahead_bytes": look_ups.ahead}
        return super().stats() | {name: ranks.sent_bytes for name, ranks in sent.items()}

    def _weight_names(self) -> list[str]:
        return ["shards.weight"]  # of any rank, for any other


@dataclass(slots=True)
class _Step:
    rows: StepRows  # that all ranks ask of this one
    exchange: Exchange
    bags: list[Bags]
    look_up: LookUp | None
    trains: bool
    crossing: Crossing | None


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, look_ups: ShardLookUps, step: _Step, *samples: Tensor | None) -> Tensor:
        weights = look_ups.weights(step.rows, step.exchange)
        output, ctx.gradient = pool_weights(weights, step.exchange.rows, step.bags)
        # Gradients of per-sample weights need the rows that were looked up.
        ctx.looked_up = weights if any(ctx.needs_input_grad[3:]) else None
        ctx.look_ups, ctx.step, ctx.trains = look_ups, step, step.trains
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.trains and ctx.needs_input_grad[0]:
            raise RuntimeError(EVALUATED)
        of_rows, ctx.gradient = ctx.gradient, None
        step, ctx.step = ctx.step, None
        check_first_pass(of_rows, gradient)
        of_rows.take(gradient, step.crossing)
        of_samples = [
            of_rows.of_samples(number, ctx.looked_up[number]) if needed else None
            for number, needed in enumerate(ctx.needs_input_grad[3:])
        ]
        if step.trains and not ctx.look_ups.anchor.requires_grad:
            step.rows.release()  # frozen since the forward pass
        elif step.trains:
            places, turns, values = [], [], []
            gradients = of_rows.sparse()
            widest = max(sparse.shape[1] for _, sparse in gradients)
            for bag, (table, sparse) in zip(step.bags, gradients, strict=True):
                places.append(indices_of(sparse)[0].numpy() + step.exchange.rows.starts[table])
                turns.append(np.repeat(np.arange(bag.features), bag.lengths.numpy().reshape(bag.features, -1).sum(1)))
                values.append(nn.functional.pad(values_of(sparse), (0, widest - sparse.shape[1])))
            sent = np.concatenate(places), np.concatenate(turns), torch.cat(values)
            ctx.look_ups.send(step.look_up, step.rows, step.exchange, *sent)
        return None, None, None, *of_samples
