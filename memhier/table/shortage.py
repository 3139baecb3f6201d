"""The error for a budget that is too small, with its numbers, for callers that use words of their own."""

from typing import Literal

from memhier.errors import BudgetError

__all__ = ["Shortage"]


class Shortage(BudgetError):
    """Too many rows for one of a tier's bounds.

    Attributes
    ----------
    of
        The bound: ``"slots"``, rows in DRAM at once; ``"batch"``, keys of a call; ``"rows"``, keys ever written;
        ``"ids"``, ids with a row of their own.
    needed, held, room
        Rows that the call asks for, rows that stay beside them, and the bound's number.
    enough
        The argument that is enough: bytes of ``dram``, or the bound itself.
    """

    def __init__(
        self,
        message: str,
        of: Literal["slots", "batch", "rows", "ids"],
        *,
        needed: int,
        held: int = 0,
        room: int,
        enough: int,
    ) -> None:
        super().__init__(message)
        self.of = of
        self.enough: int
        self.room: int
        self.held: int
        self.needed: int
        self.needed, self.held, self.room, self.enough = needed, held, room, enough
