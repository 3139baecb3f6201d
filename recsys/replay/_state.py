"""What a checkpoint keeps besides the samples, and how a buffer comes back from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import FormatError
from memhier.recsys.replay._parts import Parts, Settings
from memhier.recsys.replay._storage import META
from memhier.recsys.replay.ratio import FixedRatio, SteeredRatio
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.swap import SwapPolicy, swap_class

__all__ = ["USER", "commit", "policy_of", "restore", "settings_of", "show"]

VERSION = 1
SLOTS = "replay/slots"
USER = "user/"
_READ = 1024

Ints = NDArray[np.int64]


def commit(parts: Parts, values: Mapping[str, bytes]) -> int:
    """Make everything durable as it is, and values with it."""
    residents = parts.tiers.residents
    stale = np.flatnonzero(residents.refreshed)
    parts.write_back(residents.visible[stale], stale)
    residents.refreshed[stale] = False
    return parts.storage.commit(parts.tiers.members, {**state_values(parts), **values})


def state_values(parts: Parts) -> dict[str, bytes]:
    """Return the state of a buffer as values of the store's catalog."""
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
    arrays = np.stack([residents.planned, residents.visible, residents.swapped, residents.order])
    return {META: json.dumps(meta).encode(), SLOTS: arrays.astype("<i8").tobytes()}


def settings_of(meta: dict[str, Any], path: Path, schema: Any) -> Settings:
    """Return the settings that a checkpoint tells.

    Raises
    ------
    FormatError
        When it is of another version, or of another schema than what is expected.
    """
    if meta["version"] != VERSION:
        raise FormatError(f"{path}: holds a replay buffer of version {meta['version']}, expected {VERSION}")
    there = Schema.decode(meta["schema"])
    if schema is not None:
        expected = schema if isinstance(schema, Schema) else Schema(schema)
        if expected != there:
            raise FormatError(f"{path}: holds samples of {there}, expected {expected}")
    return Settings(there, meta["codecs"], meta["seed"], meta["delay"], meta["same_class"])


def restore(parts: Parts, meta: dict[str, Any]) -> None:
    """Bring a new buffer to the state of a checkpoint; what was under way is read again."""
    parts.tiers.members.by_class = meta["by_class"]
    parts.storage.read_index(parts.tiers.members, meta["size"])
    value = parts.storage.store.get(SLOTS)
    arrays = np.frombuffer(value or b"", "<i8").reshape(4, -1)
    if arrays.shape[1] != meta["slots"]:
        raise FormatError(f"the store describes {arrays.shape[1]} slots, expected {meta['slots']}")
    planned, visible, swapped, order = arrays
    parts.tiers.residents.restore(planned, visible, swapped, order, meta["count"])
    parts.tiers.restore(meta["tiers"])
    parts.step, parts.draws.position = meta["step"], meta["draws"]
    if parts.policy is not None:
        parts.policy.restore(meta["policy"])
    used = np.flatnonzero(visible >= 0)
    for start in range(0, len(used), _READ):
        show(parts, used[start : start + _READ], visible[used[start : start + _READ]])
    for step, slots, positions in meta["under_way"]:
        parts.carousel.issue(step, np.array(slots, np.int64), np.array(positions, np.int64))


def show(parts: Parts, slots: Ints, positions: Ints) -> None:
    """Read samples into slots."""
    columns = parts.settings.schema.empty(len(slots))
    parts.storage.read(positions, columns)
    members = parts.tiers.members
    parts.memory.write(slots, columns, members.labels[positions].astype(np.int64), members.ids[positions])


def _policy_spec(policy: SwapPolicy | None) -> Any:
    if policy is None:
        return None
    ratio = policy.ratio
    if isinstance(ratio, FixedRatio):
        return [policy.name, ratio.share()]
    if isinstance(ratio, SteeredRatio):
        return [policy.name, [ratio.largest, ratio.tolerance]]
    return [policy.name, None]


def policy_of(spec: Any, given: SwapPolicy | None) -> SwapPolicy | None:
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
        raise FormatError(f"the buffer was made with swap policy {name!r} of its owner; pass swap=")
    return kind(SteeredRatio(*ratio) if isinstance(ratio, list) else ratio)
