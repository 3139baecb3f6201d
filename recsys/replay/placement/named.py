"""Admissions by name, and those of a checkpoint."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from memhier.arguments import by_name
from memhier.fields import described
from memhier.recsys.replay.placement.admit import Admission, Everything, Reservoir, Ring
from memhier.recsys.replay.placement.balanced import Balanced, ClassBalanced
from memhier.recsys.replay.placement.weighted import Weighted
from memhier.recsys.replay.schema import Schema

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


def stored_admission(meta: Mapping[str, Any], given: str | Admission | None, schema: Schema, path: Any) -> Admission:
    """Return the admission of a checkpoint of samples at a path, or the one given in its place.

    Raises
    ------
    ValueError
        For one given that goes by something else.
    CorruptionError
        For one of the caller's own, if none is given.
    """
    with nullcontext() if given is not None else described(f"{path}: the admission"):
        there = meta.get("admission", {})
        by, beside = there.get("by", "label"), there.get("beside")
        decoded: str | Admission = meta["admit"] if given is None else given
        if given is None and decoded == Balanced.name:
            decoded = Balanced.decoded(there)
        elif given is None and decoded == Weighted.name:
            decoded = Weighted(by)
        found = admission(decoded)
        if (found.by, found.beside) != (by, beside):
            raise ValueError(
                f"admit={found.name!r}: goes by {found.by!r}; this buffer was made with {meta['admit']!r}, which goes "
                f"by {by!r}"
            )
        found.check_schema(schema)
    return found
