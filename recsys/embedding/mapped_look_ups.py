"""Look-ups of tables for any ids: a step's ids get their rows before these are looked up."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np

from memhier.errors import ClosedError
from memhier.recsys.embedding.groups.step_loan import StepTicket
from memhier.recsys.embedding.look_ups import LookUps
from memhier.recsys.embedding.tables import Ints, StepRows, Tables
from memhier.recsys.embedding.vocabularies import Added, Mapped, Vocabularies
from memhier.shield import shielded

__all__ = ["BatchIds", "MappedLookUps", "look_ups_of"]


class BatchIds:
    """The ids of a batch to come, of each look-up and table.

    Attributes
    ----------
    mapped
        Their rows, once the batch was read.
    made
        The numbers of the look-ups that were made.
    """

    __slots__ = ("look_ups", "made", "mapped")

    def __init__(self, look_ups: list[list[Ints]]) -> None:
        self.look_ups = look_ups
        self.mapped: Mapped | None = None
        self.made: set[int] = set()

    def make(self, ids: list[Ints]) -> int | None:
        """Return the number of the look-up of these ids: the first that was not made; None if there is none."""
        same = [at for at, look_up in enumerate(self.look_ups) if all(map(np.array_equal, look_up, ids))]
        number = next((at for at in same if at not in self.made), same[-1] if same else None)
        if number is not None:
            self.made.add(number)
        return number


class MappedLookUps(LookUps):
    """The look-ups of a module with tables for any ids.

    A look-up in training admits ids. Lookahead maps the batches in the order of the loader, ahead of the training; the
    rows that a batch is first to use begin anew when its first look-up is made, once the steps before have ended.
    """

    reads_in_turn = True

    def __init__(self, tables: Tables, vocabularies: Vocabularies, ids_of: Callable[..., list[Ints]]) -> None:
        super().__init__(tables, ids_of)
        self._vocabularies = vocabularies
        self._maps_ahead = True

    # Batches to come; on the thread that reads ahead.

    def ids_of(self, *arguments: Any) -> BatchIds:
        """Return the ids of a batch to come, from the arguments that the module will get."""
        return self.ids_of_all([arguments])

    def ids_of_all(self, look_ups: Sequence[tuple[Any, ...]]) -> BatchIds:
        """Return the ids of several look-ups of a batch to come, from the arguments of each."""
        if len(look_ups) > self._vocabularies.pending:
            raise ValueError(
                f"ids: {len(look_ups)} look-ups of one batch, but tables for any ids keep the rows of "
                f"{self._vocabularies.pending}; open them with id_space=Hash64(pending={len(look_ups)})"
            )
        return BatchIds([super(MappedLookUps, self).ids_of(*arguments) for arguments in look_ups])

    def distinct(self, ids: BatchIds) -> StepRows:
        """Return the distinct rows of a batch, after those before."""
        if self._maps_ahead:
            ids.mapped = self.tables.map_ids(ids.look_ups)
            return self.tables.distinct(ids.mapped.rows)
        parts = [self._vocabularies.find(some) for some in ids.look_ups]
        return self.tables.distinct([np.concatenate(of_table) for of_table in zip(*parts, strict=True)])

    def bytes_of(self, ids: BatchIds) -> int:
        """Return the DRAM that a batch to come takes beside its ids and rows."""
        return 0 if ids.mapped is None else ids.mapped.bytes

    def map_ahead(self, trains: bool) -> None:
        """Say whether the batches that are read from now on are for training."""
        self._maps_ahead = trains and self.anchor.requires_grad

    @shielded
    def drop_ahead(self) -> None:
        """Forget the batches that were read ahead."""
        planned = self._planned_batch
        if planned is not None:
            planned.frames = 0
        self._vocabularies.drop()

    # The batch that is handed out.

    def plan(self, ids: BatchIds, rows: StepRows, ticket: StepTicket | None) -> None:
        """Load the rows of a batch that lookahead hands out, unless the index has no room for its new ones."""
        super().plan(ids, rows, ticket)
        if ids.mapped is not None:
            self.tables.check_new(rows)

    def end_plan(self) -> None:
        """Release the rows of the batch that was handed out last, which counts as looked up."""
        try:
            planned = self._planned_batch
            if planned is not None and planned.frames and self.planned is not None:
                with suppress(ClosedError):
                    self._begin(planned, self.planned[1])
        finally:
            super().end_plan()

    @property
    def _planned_batch(self) -> Mapped | None:
        return None if self.planned is None else self.planned[0].mapped

    # A look-up.

    @shielded
    def rows_of(self, ids: Any, trains: bool, admits: bool = False) -> StepRows:
        """Return the rows of a look-up, in DRAM; of one that admits no ids while batches are announced, maybe not."""
        if not admits:
            return self._lent(self._vocabularies.find(ids), trains)
        if self.planned is not None and self._planned_batch is not None:
            return self._planned_rows(self.planned[0], self.planned[1], ids, trains)
        if self.planned is not None or self._vocabularies.frames:
            raise RuntimeError(
                "input: a look-up in training, but the batches that lookahead has read are not of training, or its "
                "loop was left: begin its loop with the module in train() and not frozen, or call close() to go on "
                "without it"
            )
        mapped = self.tables.map_ids([ids])
        rows = None
        try:
            rows = self._lent(mapped.rows, trains)
            self._begin(mapped, rows)
        except BaseException:
            self._vocabularies.drop()
            if rows is not None:
                rows.release()
            raise
        return rows

    def _planned_rows(self, batch: BatchIds, planned: StepRows, ids: list[Ints], trains: bool) -> StepRows:
        assert batch.mapped is not None
        if batch.mapped.frames:
            self._begin(batch.mapped, planned)
        number = batch.make(ids)
        if number is None:
            return self._lent(self._vocabularies.find(ids), trains)  # part of a look-up
        if len(batch.look_ups) == 1:
            return planned.share()
        found = []
        for table, rows in enumerate(batch.mapped.rows):
            ends = np.cumsum([0, *(len(one[table]) for one in batch.look_ups)])
            found.append(rows[ends[number] : ends[number + 1]])
        return self._lent(found, trains)

    def _lent(self, wanted: list[Ints], trains: bool) -> StepRows:
        rows = self.tables.distinct(wanted)
        self.lend(rows, trains)
        return rows

    def _begin(self, mapped: Mapped, rows: StepRows) -> None:
        """Let a batch begin whose rows are lent: those that it is first to use begin anew."""
        self._check_unused(mapped.added)
        self.tables.begin_anew(rows, mapped.added)
        mapped.added = []
        self._vocabularies.begin(mapped)

    def _check_unused(self, added: list[Added]) -> None:
        """Raise RuntimeError if gradients of rows may come that other ids have by now."""
        for rows, one in product(self.rows_awaited(), added):
            if np.isin(one.rows + self.tables.bases[one.table], rows.keys).any():
                raise RuntimeError(
                    f"the rows of ids whose gradients wait went to other ids, as more than "
                    f"{self._vocabularies.pending} look-ups wait: open the tables with a larger pending= of Hash64, or "
                    "take steps more often"
                )


def look_ups_of(tables: Tables, ids_of: Callable[..., list[Ints]]) -> LookUps:
    """Return the look-ups of tables."""
    if tables.vocabularies is None:
        return LookUps(tables, ids_of)
    return MappedLookUps(tables, tables.vocabularies, ids_of)
