"""Every error memhier raises by name.

Each error has two parents: :class:`MemhierError`, to catch anything from this library, and the nearest built-in.
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
    "ShardLostError",
]


class MemhierError(Exception):
    """Root of memhier's own errors.

    Examples
    --------
    >>> from memhier import MemhierError, SlotMap
    >>> try:
    ...     SlotMap(2).insert([7, 8, 9])
    ... except MemhierError as error:
    ...     print(type(error).__name__)
    BudgetError
    """


class CorruptionError(MemhierError, ValueError):
    """Stored bytes are not the bytes that were committed: a checksum, a length or a structure is wrong.

    Examples
    --------
    >>> from memhier.codecs import get_bytes_codec
    >>> get_bytes_codec("none").decode(b"twelve bytes", bytes_max=8)
    Traceback (most recent call last):
        ...
    memhier.errors.CorruptionError: a record of 12 bytes, expected at most 8
    """


class FormatError(MemhierError, ValueError):
    """A path holds no store, a store of another kind, an unfinished one, or a format version not known here.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Store
    >>> Store.open(tempfile.mkdtemp(), kind="example")
    Traceback (most recent call last):
        ...
    memhier.errors.FormatError: ...: not a memhier store (no 'catalog' there)
    """


class BudgetError(MemhierError, ValueError):
    """A budget is too small: DRAM, slots or storage. The message names a sufficient size, or another way.

    Examples
    --------
    >>> from memhier import SlotMap
    >>> SlotMap(2).insert([7, 8, 9])
    Traceback (most recent call last):
        ...
    memhier.errors.BudgetError: keys: 3 of them are new, but 2 of 2 slots are free; erase 1 keys first, or ...
    """


class ClosedError(MemhierError, ValueError):
    """The object was closed, or a failed write closed it for writing.

    Examples
    --------
    >>> from memhier import Slab
    >>> with Slab(4, "float32") as slab:
    ...     pass
    >>> slab.gather([0])
    Traceback (most recent call last):
        ...
    memhier.errors.ClosedError: the slab is closed
    """


class LockedError(MemhierError, BlockingIOError):
    """Another process or object holds the one writer's lock.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Store
    >>> path = tempfile.mkdtemp() + "/store"
    >>> with Store.create(path, kind="example"):
    ...     Store.create(path, kind="example")
    Traceback (most recent call last):
        ...
    memhier.errors.LockedError: ...
    """


class RecallWarning(UserWarning):
    """A search could not keep the recall that it was asked for; the message names a recall that is, and a way to more.

    An open index warns once for each cause; ``stats`` of the results tell it every time.

    Examples
    --------
    >>> import tempfile
    >>> import warnings
    >>> import numpy as np
    >>> from memhier.ann import ZoomIndex
    >>> from memhier.errors import RecallWarning
    >>> vectors = np.random.default_rng(0).normal(size=(1000, 16)).astype("float32")
    >>> with ZoomIndex.build(tempfile.mkdtemp() + "/index", vectors, dram="8MiB") as index:
    ...     with warnings.catch_warnings(action="error", category=RecallWarning):
    ...         index.search(vectors[0], k=3, recall=0.99, max_reads=1)
    Traceback (most recent call last):
        ...
    memhier.errors.RecallWarning: recall=0.99 is not kept: ...
    """


class ShardLostError(MemhierError, RuntimeError):
    """No replica of a shard answers, or changes since the last commit were lost with one.

    Examples
    --------
    >>> from memhier.errors import MemhierError, ShardLostError
    >>> issubclass(ShardLostError, MemhierError)
    True
    """
