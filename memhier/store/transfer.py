"""The work of a push or a pull."""

from dataclasses import dataclass

__all__ = ["Transfer"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The work of a push or a pull.

    Attributes
    ----------
    generation
        Of the store.
    objects, nbytes
        That the generation consists of on the far side.
    moved_objects, moved_bytes
        Those written there by this push, or read from there by this pull.
    """

    generation: int
    objects: int
    nbytes: int
    moved_objects: int
    moved_bytes: int
