"""Rows of tables that are only read: looked up one by one, pooled, and as torch's modules."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memhier.arguments import as_ints
from memhier.closing import Closing
from memhier.errors import BudgetError
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.pooling import MODES, Bags
from memhier.recsys.embedding.serving.served import Served
from memhier.recsys.embedding.serving.served_ids import ServedIds
from memhier.recsys.embedding.single.bag import Mode, as_bags
from memhier.recsys.embedding.tables import Floats, Ints, check_ids
from memhier.recsys.embedding.torch_internals import embedding_bag

__all__ = ["DistinctRows", "OpenedRows", "RowSource"]

DistinctRows = Callable[[int, Ints], Floats]
"""Returns rows of a table by its number and their distinct numbers, float32 [n, dim]."""


class OpenedRows:
    """Rows of tables as they are at one moment.

    Parameters
    ----------
    specs
        The tables.
    ids
        The ids of each table for any ids, by its number.
    read
        Reads distinct rows.
    """

    def __init__(self, specs: tuple[TableSpec, ...], ids: Mapping[int, ServedIds], read: DistinctRows) -> None:
        self._specs = specs
        self._ids = ids
        self._read = read

    def __call__(self, table: int, rows: Ints) -> Floats:
        """Return distinct rows of a table, float32 [n, dim]."""
        return self._read(table, rows)

    def rows_of(self, table: int, ids: Ints, asked: str) -> Ints:
        """Return the row of each id, int64 [n]; IndexError for one that the table does not have, in `asked`."""
        if table in self._ids:
            return self._ids[table].rows_of(ids)
        check_ids(self._specs[table], ids, asked)
        return ids

    def padding_row(self, table: int, padding: int) -> int:
        """Return the row of the padding; ValueError for another one than a table for any ids was trained with."""
        spec = self._specs[table]
        if spec.id_space is None:
            return padding % spec.rows
        if padding != spec.padding_id:
            raise ValueError(f"padding_idx={padding}: table {spec.name!r} was trained with {spec.padding_id}")
        return spec.padding_row

    def ids(self, table: int) -> Ints:
        """Return the ids of a table for any ids, int64 [n], in the order of their rows."""
        return self._ids[table].in_order()


class RowSource(Closing):
    """The base of tables that are only read; a subclass has `specs` and `call_rows`, and `opened`.

    Attributes
    ----------
    specs
        The tables.
    call_rows
        Most rows at once, for which working memory is set aside.
    """

    specs: tuple[TableSpec, ...]
    call_rows: int

    def opened(self) -> OpenedRows:
        """Return the rows for a call, which reads `call_rows` at a time at most, all as they are now."""
        raise NotImplementedError

    def rows(self, ids: Any, table: int = 0) -> Tensor:
        """Return a row for each id, float32 ``[*ids.shape, dim]``.

        Parameters
        ----------
        ids
            Integers of any shape: a tensor, an array or a list. Of a table for any ids, those without a row of their
            own have the one that unknown ids share.
        table
            Number of the table in its collection.

        Raises
        ------
        IndexError
            For a row that the table does not have.
        CorruptionError
            When a page does not match its checksum.
        """
        wanted = as_ints("ids", ids)
        found = self.found(self.opened(), table, wanted.reshape(-1))
        return found.view(*wanted.shape, self.specs[table].dim)

    def found(self, read: OpenedRows, table: int, ids: Ints) -> Tensor:
        """Return the row of each id, float32 [n, dim], from those of :meth:`opened`."""
        spec, flat = self.specs[table], read.rows_of(table, ids, "ids")
        found = np.empty((len(flat), spec.dim), np.float32)
        for start in range(0, len(flat), self.call_rows):
            part = slice(start, start + self.call_rows)
            distinct, inverse = np.unique(flat[part], return_inverse=True)
            np.take(read(table, distinct), inverse.reshape(-1), axis=0, out=found[part], mode="clip")
        return torch.from_numpy(found)

    def bags(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        table: int = 0,
        mode: Mode = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> Tensor:
        """Return pooled rows, float32 [bags, dim], with the bits of the trained module in ``eval()``.

        Parameters
        ----------
        input, offsets, per_sample_weights, mode, padding_idx, include_last_offset
            As of `torch.nn.functional.embedding_bag`; integers on the CPU.
        table
            Number of the table in its collection.

        Raises
        ------
        IndexError, CorruptionError
            As in :meth:`rows`.
        BudgetError
            For a bag of more ids than working memory is set aside for.
        ValueError
            For another `padding_idx` than a table for any ids was trained with.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        flat, begins, weights = as_bags(input, offsets, per_sample_weights, mode)
        read = self.opened()
        padding = -1 if padding_idx is None else read.padding_row(table, int(padding_idx))
        return self.pooled(read, table, Bags(table, flat, begins, MODES[mode], weights, padding, include_last_offset))

    def pooled(self, read: OpenedRows, table: int, bags: Bags) -> Tensor:
        """Return pooled rows of a table, float32 [bags, dim], for its ids, from those of :meth:`opened`."""
        ids, lengths = read.rows_of(table, bags.indices.numpy(), "input"), bags.lengths.numpy()
        ends = np.concatenate(([0], np.cumsum(lengths)))
        found = torch.empty(len(lengths), self.specs[table].dim)
        start = 0
        room = self.call_rows - (bags.padding >= 0)
        while start < len(lengths):
            stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
            if stop == start:
                raise BudgetError(
                    f"a bag of {lengths[start]} ids, but working memory is set aside for {room}; open the table with "
                    f"{lengths[start] // max(1, room) + 1} times as much dram, or make bags shorter"
                )
            part = slice(int(ends[start]), int(ends[stop]))
            weights = None if bags.weights is None else bags.weights[part]
            begins = torch.from_numpy(ends[start:stop] - ends[start])
            found[start:stop] = _pooled_part(partial(read, table), ids[part], begins, weights, bags)
            start = stop
        return found

    def embedding_bag(
        self,
        *,
        table: int = 0,
        mode: Mode = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> Served:
        """Return a module in place of :class:`EmbeddingBag` in a model that is evaluated; arguments of :meth:`bags`.

        It has no parameters, and takes and gives nothing in state dicts.
        """

        def look_up(input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
            return self.bags(
                input, offsets, per_sample_weights, table=table, mode=mode, padding_idx=padding_idx,
                include_last_offset=include_last_offset,
            )  # fmt: skip

        return Served(look_up)

    def embedding(self, *, table: int = 0) -> Served:
        """Return a module in place of :class:`Embedding` in a model that is evaluated; see :meth:`embedding_bag`."""

        def look_up(input: Tensor) -> Tensor:
            return self.rows(input, table)

        return Served(look_up)


def _pooled_part(
    read: Callable[[Ints], Floats], ids: Ints, begins: Tensor, weights: Tensor | None, bags: Bags
) -> Tensor:
    # The padding is among the rows, so that it has a place even if no id of this part names it.
    named = ids if bags.padding < 0 else np.append(ids, bags.padding)
    distinct, inverse = np.unique(named, return_inverse=True)
    places = torch.from_numpy(inverse.reshape(-1))
    padding = -1 if bags.padding < 0 else int(places[-1])
    rows = torch.from_numpy(read(distinct))
    found: Tensor = embedding_bag(
        rows, places[: len(ids)], begins, False, bags.mode, False, weights, False, padding
    )[0]  # fmt: skip
    return found
