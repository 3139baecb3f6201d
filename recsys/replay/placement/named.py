"""Admissions by name, and those of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from memhier.arguments import by_name
from memhier.recsys.replay.placement.admit import Admission, Everything, Reservoir, Ring
from memhier.recsys.replay.placement.balanced import Balanced, ClassBalanced
from memhier.recsys.replay.placement.weighted import Weighted

__all__ = ["admission", "stored_admission"]

_ADMISSIONS: dict[str, type[Reservoir] | type[Balanced]] = {
    kind.name: kind for kind in (Reservoir, ClassBalanced, Ring, Everything)
}


def admission(admit: str | Admission) -> Admission:
    """Return the admission of a name: ``"reservoir"``, ``"class_balanced"``, ``"ring"`` or ``"everything"``.

    Raises
    ------
    ValueError
        For any other name.
    TypeError
        For a class.
    """
    found: Admission = by_name("admit", admit, _ADMISSIONS, "an admission, such as {}()")
    return found


def stored_admission(meta: Mapping[str, Any], given: Admission | None) -> Admission:
    """Return the admission of a checkpoint, or the one given in its place.

    Raises
    ------
    ValueError
        For one of the caller's own, if none is given; and for one given that goes by something else.
    """
    there = meta.get("admission", {})
    by, beside = there.get("by", "label"), there.get("beside")
    decoded: Admission | None = given
    if given is None and meta["admit"] == Balanced.name:
        decoded = Balanced.decoded(there)
    elif given is None and meta["admit"] == Weighted.name:
        decoded = Weighted(by)
    found = admission(meta["admit"]) if decoded is None else decoded
    if (found.by, found.beside) != (by, beside):
        raise ValueError(f"admit={found.name!r}: goes by {found.by!r}; this buffer was made with {meta['admit']!r}, "
                         f"which goes by {by!r}")  # fmt: skip
    return found
