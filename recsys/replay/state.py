"""What a checkpoint keeps besides the samples, and how a buffer comes back from it."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.fields import described
from memhier.recsys.replay.parts import Parts, Settings
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.storage.described import VERSION
from memhier.recsys.replay.storage.storage import META
from memhier.recsys.replay.swap.policies import SwapPolicy, swap_class
from memhier.recsys.replay.swap.ratio import FixedRatio, SteeredRatio

__all__ = ["USER", "commit", "policy_of", "restore", "settings_of"]

USER = "user/"
_READ_BYTES = 32 * 2**20  # of samples that are brought back together

Ints = NDArray[np.int64]


def commit(parts: Parts, values: Mapping[str, bytes]) -> int:
    """Make everything durable as it is, and values with it."""
    residents = parts.tiers.residents
    stale = np.flatnonzero(residents.refreshed)
    parts.write_back(residents.visible[stale], stale)
    residents.refreshed[stale] = False
    ahead = parts.ahead.records()
    values = {**state_values(parts, [len(record) for record in ahead]), **values}
    return parts.storage.commit(residents, ahead, values)


def state_values(parts: Parts, ahead: list[int]) -> dict[str, bytes]:
    """Return the state of a buffer as values of the store's catalog, with the bytes of each batch drawn ahead."""
    residents, settings = parts.tiers.residents, parts.settings
    meta = {
        "version": VERSION,
        "schema": settings.schema.encode(),
        "codecs": settings.codecs,
        "seed": settings.seed,
        "delay": settings.delay,
        "same_class": settings.same_class,
        "by_class": parts.tiers.members.by_class,
        "admit": parts.admission.name,
        "swap": _policy_spec(parts.policy),
        "slots": residents.slots,
        "size": parts.tiers.members.size,
        "ahead": ahead,
        "step": parts.step,
        "draws": parts.draws.position,
        "tiers": parts.tiers.state(),
        "policy": None if parts.policy is None else parts.policy.state(),
        "under_way": [
            [swap.step, swap.slots[swap.positions >= 0].tolist(), swap.positions[swap.positions >= 0].tolist()]
            for swap in parts.carousel.under_way
        ],
        "count": residents.count,
    }  # fmt: skip
    return {META: json.dumps(meta).encode()}


def settings_of(meta: dict[str, Any], path: Path, schema: Any) -> Settings:
    """Return the settings that a checkpoint tells.

    Raises
    ------
    FormatError
        When it is of another schema than what is expected.
    """
    with described(f"{path}: the schema"):
        there = Schema.decode(meta["schema"])
    if schema is not None:
        expected = schema if isinstance(schema, Schema) else Schema(schema)
        if expected != there:
            raise FormatError(f"{path}: holds samples of {there}, expected {expected}")
    return Settings(there, meta["codecs"], meta["seed"], meta["delay"], meta["same_class"])


def restore(parts: Parts, meta: dict[str, Any]) -> None:
    """Bring a new buffer to the state of a checkpoint; what was under way is read again."""
    members, begins = parts.tiers.members, parts.admission.by_class and not meta["by_class"]
    if begins and meta["same_class"] is False:
        raise ValueError(f"admit={parts.admission.name!r}: is about classes, which this buffer does not keep")
    members.by_class = meta["by_class"]
    parts.storage.read_index(members, meta["size"], meta["same_class"] is False)
    if begins and (members.labels < 0).any():
        raise ValueError(f"admit={parts.admission.name!r}: is about classes, and the samples have no labels")
    if begins:
        members.keep_classes()
    slots = parts.storage.read_slots(meta)
    visible = slots["visible"].astype(np.int64)
    parts.tiers.residents.restore(slots["planned"], visible, slots["swapped"], slots["order"], meta["count"])
    parts.tiers.restore(meta["tiers"])
    parts.step, parts.draws.position = meta["step"], meta["draws"]
    # The state of another policy says nothing to this one.
    if parts.policy is not None and meta["swap"] is not None and meta["swap"][0] == parts.policy.name:
        parts.policy.restore(meta["policy"])
    # In the order of storage: neighbours share pages and reads.
    used = np.argsort(visible, kind="stable")[np.count_nonzero(visible < 0) :]
    together = max(1, _READ_BYTES // (parts.settings.schema.sample_bytes + 64))
    damaged: list[int] = []
    for start in range(0, len(used), together):
        some = used[start : start + together]
        damaged += _show_readable(parts, some, visible[some])
    with described(f"{parts.storage.store.path}: the batches drawn ahead"):
        damaged += parts.ahead.restore(parts.storage.read_ahead(meta["ahead"]), parts.storage)
    damaged = [*dict.fromkeys(damaged)]
    if damaged:
        parts.errors += len(damaged)
        warnings.warn(
            f"{parts.storage.store.path}: the samples of ids {damaged} are damaged and have left memory; "
            f"forget({{'id': {damaged}}}) removes them",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip
    for step, slots, positions in meta["under_way"]:
        parts.carousel.issue(step, np.array(slots, np.int64), np.array(positions, np.int64))


def show(parts: Parts, slots: Ints, positions: Ints) -> None:
    """Read samples into slots."""
    columns = parts.settings.schema.empty(len(slots))
    parts.storage.read(positions, columns)
    members = parts.tiers.members
    parts.memory.write(slots, columns, members.labels[positions].astype(np.int64), members.ids[positions])


def _show_readable(parts: Parts, slots: Ints, positions: Ints) -> list[int]:
    """Read what can be read into its slots, empty the others, and return the ids that they held."""
    try:
        show(parts, slots, positions)
    except CorruptionError:
        pass
    else:
        return []
    half = len(slots) // 2
    if half:
        found = _show_readable(parts, slots[:half], positions[:half])
        return found + _show_readable(parts, slots[half:], positions[half:])
    residents, slot, position = parts.tiers.residents, int(slots[0]), int(positions[0])
    residents.hide(slot)
    if residents.planned[slot] == position:
        parts.tiers.vacate(slot)
    return [int(parts.tiers.members.ids[position])]


def _policy_spec(policy: SwapPolicy | None) -> Any:
    if policy is None:
        return None
    ratio = policy.ratio
    if isinstance(ratio, FixedRatio):
        return [policy.name, ratio.share()]
    if isinstance(ratio, SteeredRatio):
        return [policy.name, [ratio.largest, ratio.tolerance]]
    return [policy.name, None]


def policy_of(spec: Any, given: SwapPolicy | None, path: Path) -> SwapPolicy | None:
    """Return the policy that a checkpoint tells, or the one given in its place.

    Raises
    ------
    FormatError
        When it was one of the caller's own, and none is given.
    """
    if given is not None or spec is None:
        return given
    name, ratio = spec
    kind = swap_class(name)
    if kind is None or ratio is None:
        raise FormatError(f"{path}: the buffer was made with swap policy {name!r} of its owner; pass swap=")
    with described(f"{path}: the swap policy"):
        return kind(SteeredRatio(*ratio) if isinstance(ratio, list) else ratio)
