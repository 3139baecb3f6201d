"""Tables divided among trainers: each rank keeps the rows that are its own, and lends them to the others.

Row r of a table belongs to the rank (where the table begins + r) modulo the number of ranks. A step exchanges ids, rows
and gradients by all-to-all. Gradients come back one for each id and are added in the order of ranks and, within a rank,
of ids: so training on W ranks gives tables with the bits of training on one rank whose batch is theirs one after the
other. What of a batch waits for whom is decided when its ids are known: `lookahead` exchanges them, and reads the rows
they ask for, before their step comes.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from memhier._arrays import as_ints
from memhier.recsys.embedding.agreement import agree, last_checkpoints
from memhier.recsys.embedding.bags import Bags
from memhier.recsys.embedding.collection import FeatureParser, Pooled
from memhier.recsys.embedding.fused import apply_sparse
from memhier.recsys.embedding.kernels import Places, distinct_rows
from memhier.recsys.embedding.module import TableModule, not_compiled
from memhier.recsys.embedding.optimizers import SGD, SparseOptimizer
from memhier.recsys.embedding.tables import Floats, Ints, Rows, Tables, TableSpec

__all__ = ["Shard", "ShardedEmbeddingBagCollection"]


class Shard(Tables):
    """The rows of one rank, under the numbers they have there: key // ranks."""

    def __init__(self, whole: Sequence[TableSpec], rank: int, ranks: int, optimizer: SparseOptimizer, **options: Any):
        self._whole = tuple(whole)
        self._whole_bases = np.cumsum([0, *(spec.rows for spec in whole)])
        self._rank, self._ranks = rank, ranks
        rows = max(1, -(-(int(self._whole_bases[-1]) - rank) // ranks))
        name = f"shard {rank} of {ranks}: " + ", ".join(f"{spec.name} {spec.rows} {spec.initial}" for spec in whole)
        super().__init__([TableSpec(name, rows, whole[0].dim)], optimizer, **options)
        self._tier._parts.log.way_back = True

    def everywhere(self, numbers: Ints) -> Ints:
        """Return the keys that rows have in the whole."""
        return numbers * self._ranks + self._rank

    def has(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys of the whole are this rank's."""
        mine: NDArray[np.bool_] = keys % self._ranks == self._rank
        return mine

    def numbers(self, keys: Ints) -> Ints:
        """Return the numbers that keys of the whole have here."""
        return keys // self._ranks

    def _first_rows(self, keys: Ints) -> Floats:
        dim = self.specs[0].dim
        rows = np.full((len(keys), self.widths[0]), self.optimizer.first_state(), np.float32)
        everywhere = self.everywhere(keys)
        table_of = np.searchsorted(self._whole_bases, everywhere, side="right") - 1
        for table in np.unique(table_of).tolist():
            spec, mine = self._whole[table], table_of == table
            ids = everywhere[mine] - self._whole_bases[table]
            rows[mine, :dim] = spec.initial.weights(self.seed, table, ids, dim, spec.rows)
        return rows


@dataclass(slots=True)
class _Exchange:
    """What a step asks of whom.

    Attributes
    ----------
    ids
        Of each table, what this rank's batch has.
    keys, inverse, ends
        Of this rank's batch: distinct keys, and for every id which of them it is, table after table.
    order
        Places of `keys` by owner.
    sent, received
        How many keys this rank asks of each rank, and each rank of this one.
    asked
        int64: the keys that others ask of this rank, by their numbers here, rank after rank.
    """

    ids: list[Ints]
    keys: Ints
    inverse: Places
    ends: Ints
    order: Ints
    sent: list[int]
    received: list[int]
    asked: Ints


class _Asked(list["Ints | None"]):
    """What a batch to come asks of this rank, with the exchange that said so."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__([exchange.asked])
        self.exchange = exchange


class ShardedEmbeddingBagCollection(TableModule):
    """:class:`EmbeddingBagCollection` over the ranks of `torch.distributed`, each with its own folder and budget.

    The dense part goes under DDP as ever; this module stays outside. All ranks must make the same calls in the same
    order, and leave an epoch of `lookahead` at the same batch. Tables have one width.

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
    optimizer, dram, seed, resume, policy, codec, touched, step_rows
        As in :class:`EmbeddingBag`, for each rank.

    Raises
    ------
    ValueError
        For tables of several widths.
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
        **options: Any,
    ) -> None:
        parser = FeatureParser(tables)
        widths = sorted({spec.dim for spec in parser.specs})
        if len(widths) > 1:
            raise ValueError(f"tables: expected one embedding_dim, got {widths}")
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        folder = Path(path) / f"shard-{self._rank}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        agree(folder, self._of_all(last_checkpoints(folder)))
        self._saving: Future[int] | None = None
        rule = SGD() if optimizer is None else optimizer
        super().__init__(
            Shard(parser.specs, self._rank, self._ranks, rule, dram=dram, path=folder, **options), "backward"
        )
        self._parser = parser
        self._bases = np.cumsum([0, *(spec.rows for spec in parser.specs)])
        self._average = average
        # The thread that looks ahead exchanges ids while the training exchanges rows: each needs a group of its own.
        self._ahead_group = dist.new_group() if group is None else _like(group)

    @not_compiled
    def forward(self, features: Any) -> Pooled:
        """Return pooled rows of every feature of this rank's batch; see :class:`EmbeddingBagCollection`."""
        bags = self._parser.bags_of(features)
        ids = [bag.indices.numpy() for bag in bags]
        exchange = self._expected(ids) or self._exchange(ids, self._group)
        trains = torch.is_grad_enabled() and self.training
        rows = self._rows_of([exchange.asked], trains)
        with torch.set_grad_enabled(trains):
            samples = [bag.weights for bag in bags]
            output: Tensor = _Look.apply(self._anchor, self, rows, exchange, bags, *samples)  # type: ignore[no-untyped-call]
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

    def _from_everywhere(self, read: Callable[[Ints], Tensor], rows: Any, table: int) -> Tensor:
        ids = as_ints("rows", rows)
        self._parser.check_ids(table, ids)
        keys = ids + self._bases[table]
        mine = keys % self._ranks == self._rank
        own = read(keys[mine] // self._ranks)
        found = torch.zeros(*keys.shape, own.shape[-1])
        found[torch.from_numpy(mine)] = own
        dist.all_reduce(found, group=self._group)
        return found

    def initial_weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return what rows hold before they are first trained, float32 [n, dim]."""
        spec, ids = self._parser.specs[table], as_ints("rows", rows)
        self._parser.check_ids(table, ids)
        return torch.from_numpy(spec.initial.weights(self.tables.seed, table, ids, spec.dim, spec.rows))

    def checkpoint(self, extra: Any = None) -> int:
        """Make every rank's rows durable; returns when all are. See :meth:`TableModule.checkpoint`.

        Whenever ranks end, even amid a checkpoint, they go on from the newest that all of them have.

        Raises
        ------
        RuntimeError
            When the checkpoint before could not be written by all ranks. Open the tables again, which finds the last
            one that was.
        """
        self._await_all()
        generation = super().checkpoint(extra)
        dist.barrier(group=self._group)
        return generation

    def start_checkpoint(self, extra: Any = None) -> "Future[int]":
        """Take a checkpoint beside the training, once every rank has the one before; see :meth:`checkpoint`."""
        self._await_all()
        self._saving = super().start_checkpoint(extra)
        return self._saving

    def _await_all(self) -> None:
        """Return once every rank's last checkpoint is durable: two ranks are never more than one apart."""
        failed = self._saving is not None and self._saving.exception() is not None
        ranks = [rank for rank, one in enumerate(self._of_all((int(failed),))) if one[0]]
        if ranks:
            raise RuntimeError(
                f"the last checkpoint could not be written by ranks {ranks}: open the tables again to go on from the "
                "one before"
            )

    def _of_all(self, numbers: tuple[int, ...]) -> list[Any]:
        """Return every rank's numbers."""
        found = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self._ranks)]
        dist.all_gather(found, torch.tensor(numbers), group=self._group)
        return [tuple(one.tolist()) for one in found]

    def _ids_of(self, *arguments: Any) -> list[Ints | None]:
        """Exchange the ids of a batch to come; what is asked of this rank are the ids of its tables."""
        ids = [bag.indices.numpy().copy() for bag in self._parser.bags_of(*arguments)]
        return _Asked(self._exchange(ids, self._ahead_group))

    def _largest(self, size: int) -> int:
        """Return the largest of the sizes of all ranks, which read their loaders in step."""
        found = torch.tensor([size])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._ahead_group)
        return int(found)

    def _weight_names(self) -> list[str]:
        return [f"shard-{self._rank}.weight"]

    def _expected(self, ids: list[Ints]) -> _Exchange | None:
        """Return the exchange that was made ahead for this batch."""
        asked = None if self._planned is None else self._planned[0]
        if not isinstance(asked, _Asked) or not all(map(np.array_equal, asked.exchange.ids, ids)):
            return None
        return asked.exchange

    def _exchange(self, ids: list[Ints], group: Any) -> _Exchange:
        flat = np.concatenate(ids, dtype=np.int64)
        ends = np.cumsum([len(some) for some in ids])
        for table, some in enumerate(ids):
            self._parser.check_ids(table, some)
        keys, _, _, inverse, _ = distinct_rows(flat, ends, self._bases, in_order=False)
        owners = keys % self._ranks
        order = np.argsort(owners, kind="stable")
        sent = np.bincount(owners, minlength=self._ranks)
        received = torch.empty(self._ranks, dtype=torch.int64)
        dist.all_to_all_single(received, torch.from_numpy(sent), group=group)
        counts: list[int] = received.tolist()
        asked = torch.empty(sum(counts), dtype=torch.int64)
        wanted = torch.from_numpy(keys[order])
        dist.all_to_all_single(asked, wanted, counts, sent.tolist(), group=group)
        return _Exchange(ids, keys, inverse, ends, order, sent.tolist(), counts, asked.numpy() // self._ranks)

    def _fetched(self, rows: Rows, exchange: _Exchange) -> Tensor:
        """Return the weights of this rank's keys, from their owners, float32 [u, dim]."""
        own = self.tables.weights(rows)[0]
        dim = own.shape[1]
        lent = torch.from_numpy(np.take(own, rows.places(0), axis=0))
        found = torch.empty(len(exchange.keys), dim)
        dist.all_to_all_single(found, lent, exchange.sent, exchange.received, group=self._group)
        weights = torch.empty_like(found)
        weights[torch.from_numpy(exchange.order)] = found
        return weights

    def _send_gradients(self, rows: Rows, exchange: _Exchange, places: Tensor, values: Tensor) -> None:
        """Bring the gradients of ids, [n, dim], to the owners of their rows, and apply what comes from all ranks."""
        keys = exchange.keys[places.numpy()]
        owners = keys % self._ranks
        order = np.argsort(owners, kind="stable")
        sent = np.bincount(owners, minlength=self._ranks)
        received = torch.empty(self._ranks, dtype=torch.int64)
        dist.all_to_all_single(received, torch.from_numpy(sent), group=self._group)
        counts: list[int] = received.tolist()
        of_keys, of_values = torch.empty(sum(counts), dtype=torch.int64), torch.empty(sum(counts), values.shape[1])
        dist.all_to_all_single(of_keys, torch.from_numpy(keys[order]), counts, sent.tolist(), group=self._group)
        picked = values[torch.from_numpy(order)].contiguous()
        dist.all_to_all_single(of_values, picked, counts, sent.tolist(), group=self._group)
        if self._average:
            of_values /= self._ranks
        mine = np.searchsorted(rows.keys, of_keys.numpy() // self._ranks)
        gradient = _in_order(torch.from_numpy(mine), of_values, len(rows.keys), self.tables.optimizer)
        apply_sparse(self.tables, rows, [(0, gradient)], self.optimizer.param_groups[0])
        rows.release()


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: ShardedEmbeddingBagCollection,
        rows: Rows,
        exchange: _Exchange,
        bags: list[Bags],
        *samples: Tensor | None,
    ) -> Tensor:
        weights = module._fetched(rows, exchange)
        # Gradients of per-sample weights need the rows that were looked up.
        ctx.looked_up = weights if any(ctx.needs_input_grad[5:]) else None
        columns, kept = [], []
        begin = 0
        for bag, end in zip(bags, exchange.ends.tolist(), strict=True):
            bag.indices = torch.from_numpy(exchange.inverse[begin:end].astype(np.int64))
            begin = end
            output, *others = torch.ops.aten._embedding_bag(
                weights, bag.indices, bag.offsets, False, bag.mode, True, bag.weights, bag.last, bag.padding
            )
            columns += output.chunk(bag.features)
            kept.append(others)
        ctx.module, ctx.rows, ctx.exchange, ctx.bags, ctx.kept = module, rows, exchange, bags, kept
        ctx.count = len(weights)
        return torch.cat(columns, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        places, values, of_samples = [], [], []
        dim, start = ctx.module.tables.specs[0].dim, 0
        for bag, kept, needed in zip(ctx.bags, ctx.kept, ctx.needs_input_grad[5:], strict=True):
            parts = [gradient[:, start + dim * part : start + dim * (part + 1)] for part in range(bag.features)]
            of_bags = torch.cat(parts)
            start += dim * bag.features
            sparse = torch.ops.aten._embedding_bag_backward(
                of_bags, bag.indices, bag.offsets, *kept, ctx.count, False, bag.mode, True, bag.weights, bag.padding
            )
            places.append(sparse._indices()[0])
            values.append(sparse._values())
            of_samples.append(
                torch.ops.aten._embedding_bag_per_sample_weights_backward(
                    of_bags, ctx.looked_up, bag.indices, bag.offsets, kept[0], bag.mode, bag.padding
                )
                if needed
                else None
            )
        ctx.module._send_gradients(ctx.rows, ctx.exchange, torch.cat(places), torch.cat(values))
        return None, None, None, None, None, *of_samples


def _like(group: Any) -> Any:
    """Return another group of the same ranks."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)


def _in_order(places: Tensor, values: Tensor, count: int, optimizer: SparseOptimizer) -> Tensor:
    """Return a sparse gradient whose repeats add up in the order in which they came."""
    shape = (count, values.shape[1])
    if isinstance(optimizer, SGD) and not optimizer.momentum and not optimizer.weight_decay:
        # Applied one after the other, as torch does.
        return torch.sparse_coo_tensor(places.unsqueeze(0), values, shape, check_invariants=False)
    distinct, inverse = torch.unique(places, return_inverse=True)
    sums = torch.zeros(len(distinct), values.shape[1]).index_add_(0, inverse, values)
    return torch.sparse_coo_tensor(distinct.unsqueeze(0), sums, shape, is_coalesced=True, check_invariants=False)
