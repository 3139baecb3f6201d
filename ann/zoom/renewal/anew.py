"""An index made anew beside its commits, until one of them takes it over."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from memhier.store.store import Staging

__all__ = ["Anew"]


class MadePart(Protocol):
    """A written part that no transaction has taken over."""

    @property
    def replaced(self) -> Collection[str]:
        """Names of the parts that it replaces."""

    def drop(self) -> None:
        """Remove its segments."""


P = TypeVar("P", bound=MadePart)
B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True)
class Anew(Generic[P, B, C]):
    """An index made anew, as far as its parts are done.

    Attributes
    ----------
    parts
        The new parts, in the order of the old ones.
    book, calibration
        Lists and codes, and the effort for each recall.
    staging
        The segments of lists and codes, finished.
    changes
        Vectors or items added and removed before it began.
    rounds
        How often newer parts were coded for it.
    """

    parts: tuple[P, ...]
    book: B
    calibration: C
    staging: Staging
    changes: int
    rounds: int = 0

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the parts that are replaced."""
        return tuple(name for part in self.parts for name in part.replaced)

    def drop(self) -> None:
        """Remove its segments."""
        self.staging.drop()
        for part in self.parts:
            part.drop()
