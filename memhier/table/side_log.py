"""A log of other rows that a tier keeps beside its own."""

from dataclasses import dataclass

from memhier.log.compaction import rewriting_bytes
from memhier.table.sizes import log_bytes

__all__ = ["SideLog"]


@dataclass(frozen=True, slots=True)
class SideLog:
    """A log beside a tier's own: each checkpoint makes both durable at once.

    Attributes
    ----------
    name
        Of the log in the store.
    row_bytes, rows
        Bytes of a row, and the most rows.
    key_space
        Keys are 0 to ``key_space - 1``.
    aside_bytes
        DRAM of the budget that is left to the caller, which holds these rows in a form of its own.
    """

    name: str
    row_bytes: int
    rows: int
    key_space: int
    aside_bytes: int

    @property
    def planned_bytes(self) -> int:
        """DRAM set aside for the log and the caller."""
        return log_bytes(self.rows, self.row_bytes, self.key_space) + rewriting_bytes(self.row_bytes) + self.aside_bytes
