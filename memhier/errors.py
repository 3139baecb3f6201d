"""Every error memhier raises by name.

Each class has two parents: :class:`MemhierError`, to catch anything from this library, and the nearest built-in.
Faults of the operating system stay :class:`OSError` with ``errno`` and path; bad arguments raise
:class:`ValueError` or :class:`TypeError`.
"""

__all__ = [
    "BudgetError",
    "ClosedError",
    "CorruptionError",
    "FormatError",
    "LockedError",
    "MemhierError",
    "RecallWarning",
]


class MemhierError(Exception):
    """Root of memhier's own errors."""


class CorruptionError(MemhierError, ValueError):
    """Stored bytes are not the bytes that were committed: a checksum, a length or a structure is wrong."""


class FormatError(MemhierError, ValueError):
    """A path holds no store, a store of another kind, an unfinished one, or a format version not known here."""


class BudgetError(MemhierError, ValueError):
    """A DRAM budget is too small; the message says what would be enough."""


class ClosedError(MemhierError, ValueError):
    """The object was closed, or a failed write closed it for writing."""


class LockedError(MemhierError, BlockingIOError):
    """Another process or object holds the one writer's lock."""


class RecallWarning(UserWarning):
    """A search could not keep the recall that it was asked for; the message says what can be had, and how to have more.

    Said once of an open index for each cause; the results' ``stats`` say it every time.
    """
