"""Objects that a ``with`` block closes."""

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """An object with ``close()`` that is its own context: the end of the block closes it."""

    __slots__ = ()

    def close(self) -> None:
        """Release files and memory. May be called twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
