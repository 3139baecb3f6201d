"""The arguments of a transition buffer, checked, and how its budget is divided."""

from dataclasses import dataclass

from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.io.page_file import PAGE_BYTES
from memhier.recsys.replay.schema import Column
from memhier.recsys.replay.transitions.draws import Draw, Prioritised, Uniform, has_tree
from memhier.recsys.replay.transitions.layout import Layout
from memhier.recsys.replay.transitions.runs import NStep, Runs, Slices
from memhier.recsys.replay.transitions.sum_tree import SumTree

__all__ = ["Sizes", "TransitionSettings", "pending_columns"]

# Checksums of twice the rows, 4 bytes a page, and as much again while arrays of them grow.
_CHECKSUM_BYTES = 16
# The catalog, and buffers that do not depend on the budget.
_CATALOG_BYTES = 2**17
_RUN_MAX = 2**20
_RUN_SHARE = 64
_PARTS = 32


@dataclass(frozen=True)
class TransitionSettings:
    """Everything that decides which transitions are drawn.

    Attributes
    ----------
    layout, capacity, draw, runs, batch, ahead, ends, seed
        As the arguments of `TransitionBuffer`; `ends` are names of fields.
    """

    layout: Layout
    capacity: int
    draw: Draw
    runs: Runs | None
    batch: int
    ahead: int
    ends: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.draw, Uniform | Prioritised):
            raise TypeError(f"draw={self.draw!r}: expected Uniform(...) or Prioritised(...)")
        if self.runs is not None and not isinstance(self.runs, NStep | Slices):
            raise TypeError(f"runs={self.runs!r}: expected NStep(...), Slices(...) or None")
        names = list(self.layout.columns)
        unknown = [name for name in self.ends if name not in names]
        if unknown:
            raise ValueError(f"ends: {unknown} are no fields; those are {names}")
        if self.runs is not None and self.runs.length > self.capacity:
            raise ValueError(f"capacity={self.capacity}: expected at least the {self.runs.length} transitions of a run")
        if isinstance(self.runs, NStep):
            self.runs.fields(names, self.ends)
            reward = self.runs.fields(names, self.ends)[0]
            if self.layout.columns[reward].dtype.kind not in "fiu":
                raise ValueError(f"reward={reward!r}: expected a field of numbers, got "
                                 f"{self.layout.columns[reward].dtype}")  # fmt: skip
        if isinstance(self.runs, Slices) and isinstance(self.draw, Uniform) and not self.draw.replace:
            raise ValueError("draw=Uniform(replace=False): slices overlap, so they are drawn with replacement; leave "
                             "replace out")  # fmt: skip

    @property
    def slices(self) -> Slices | None:
        """The slices, if they are drawn."""
        return self.runs if isinstance(self.runs, Slices) else None

    def batch_bytes(self, batch: int) -> int:
        """Return the DRAM of a batch of so many."""
        bytes_of = {name: column.bytes for name, column in self.layout.columns.items()}
        if isinstance(self.runs, Slices):
            return batch * (self.runs.length * sum(bytes_of.values()) + 48)
        if isinstance(self.runs, NStep):
            reward = self.runs.fields(list(bytes_of), self.ends)[0]
            return batch * (sum(bytes_of.values()) + self.runs.steps * bytes_of[reward] + 48)
        return batch * (sum(bytes_of.values()) + 48)

    def rows_read(self, batch: int) -> int:
        """Return the most rows that a batch of so many reads."""
        return batch * (1 if self.runs is None else self.runs.length)


class Sizes:
    """A budget of `dram` bytes, divided.

    Attributes
    ----------
    newest
        Transitions that DRAM holds.
    run
        Transitions that wait to be written together, at most.
    run_bytes
        Of the writer's buffer: whole pages.
    part
        Transitions of a part on SSD.
    """

    def __init__(self, settings: TransitionSettings, dram: int, reader_bytes: int) -> None:
        layout, capacity = settings.layout, settings.capacity
        wanted = min(dram // _RUN_SHARE, _RUN_MAX) // PAGE_BYTES * PAGE_BYTES
        self.run_bytes: int = min(max(wanted, PAGE_BYTES), 2**20)
        self.run: int = min(max(1, self.run_bytes // layout.row_bytes), capacity)
        self.part: int = max(1, -(-capacity // _PARTS))
        fixed = self._fixed(settings) + reader_bytes
        self.newest: int = min((dram - fixed) // max(1, layout.column_bytes), capacity)
        least = min(capacity, 2 * self.run + -(-PAGE_BYTES // layout.row_bytes) + 1)
        if self.newest < least:
            enough = int(1.1 * (fixed + least * layout.column_bytes))
            raise BudgetError(
                f"dram={format_bytes(dram)}: too little for the newest {least} transitions of {layout.column_bytes} "
                f"bytes beside {format_bytes(fixed)} for priorities, checksums and batches read ahead; dram={enough} "
                "would be enough"
            )

    def _fixed(self, settings: TransitionSettings) -> int:
        layout, capacity = settings.layout, settings.capacity
        tree = SumTree.bytes_for(capacity) if has_tree(settings.draw, settings.slices is not None) else 0
        ends = 0 if settings.runs is None else capacity
        checksums = -(-capacity * layout.row_bytes // PAGE_BYTES) * _CHECKSUM_BYTES
        row = max(layout.row_bytes, PAGE_BYTES)
        writing = 3 * max(self.run_bytes, self.run * layout.row_bytes) + row
        batches = (settings.ahead + 2) * settings.batch_bytes(settings.batch)
        reading = 2 * settings.rows_read(settings.batch) * layout.row_bytes
        return tree + ends + checksums + writing + batches + reading + _CATALOG_BYTES


def pending_columns(settings: TransitionSettings, count: int) -> dict[str, tuple[Column, tuple[int, ...]]]:
    """Return the columns of a batch as it is read, with the shape of the numbers of each."""
    columns = settings.layout.columns
    if isinstance(settings.runs, Slices):
        return {name: (column, (count, settings.runs.length)) for name, column in columns.items()}
    if isinstance(settings.runs, NStep):
        reward = settings.runs.fields(list(columns), settings.ends)[0]
        return {
            name: (column, (count, settings.runs.steps) if name == reward else (count,))
            for name, column in columns.items()
        }
    return {name: (column, (count,)) for name, column in columns.items()}
