"""Checks of a stored buffer: its description in the catalog, and the index of its positions and slots."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.fields import boolean, decode_json, integer, mapping, optional, real, record, row, sequence, text
from memhier.log.record_log import committed_keys
from memhier.recsys.replay.storage.index import INDEX_ROW_BYTES
from memhier.store.store import Store

__all__ = ["META", "VERSION", "check_positions", "check_slots", "decode_meta"]

META = "replay/meta"
VERSION = 3
_READABLE = (2, VERSION)  # 2 had no times of arrival


def _anything(value: Any) -> None:
    """Accept a value that its user checks: a dtype, or the state of a policy."""


def _ratio(value: Any) -> None:
    """Check a share, or the arguments of a steered one; null for a ratio of the caller's own."""
    (row(real(0, 1), real(0, 1)) if isinstance(value, list) else optional(real(0, 1)))(value)


_COUNT = integer(0, 2**60)
_CHECK = record({
    "version": integer(),
    "schema": sequence(
        row(text(), _anything, sequence(optional(integer(1, 2**40))), integer(0, 2**30), boolean), 1
    ),
    "codecs": mapping(text()),
    "seed": integer(0, 2**63 - 1),
    "delay": integer(0, 2**31),
    "same_class": optional(boolean),
    "by_class": boolean,
    "admit": text(),
    "swap": optional(row(text(), _ratio)),
    "slots": integer(1, 2**31 - 1),
    "size": integer(0, 2**40),
    "ahead": sequence(integer(8, 2**40)),
    "step": _COUNT,
    "draws": _COUNT,
    "tiers": record({
        "limit": optional(integer(1, 2**60)), "arrivals": _COUNT, "seen": _COUNT, "oldest": _COUNT,
        "seen_of": sequence(row(integer(-1, 2**31 - 1), _COUNT)),
    }),
    "policy": _anything,
    "under_way": sequence(row(_COUNT, sequence(_COUNT), sequence(_COUNT))),
    "count": _COUNT,
}, {
    "admission": record({"by": text(), "beside": optional(text())}, {"quotas": _anything}),
    "rated": integer(1, 2**60), "way_back": boolean, "dram": integer(1, 2**60), "field_codecs": mapping(text()),
    "means": mapping(integer(1, 2**30)),
})  # fmt: skip
_DECK = (integer(-1, 2**31 - 1), optional(integer(0, 2**62)), integer(0, 2**64 - 1), sequence(_COUNT))
_DECKS = {2: sequence(row(*_DECK)), VERSION: sequence(row(*_DECK, sequence(row(_COUNT, _COUNT))))}


def decode_meta(store: Store, raw: bytes) -> dict[str, Any]:
    """Return the description of a buffer in the catalog, checked against the logs.

    Raises
    ------
    FormatError, CorruptionError
        If it is of another version, or no description of a buffer.
    """
    where = f"{store.path}: the value {META!r}"
    version = decode_json(raw, where, record({"version": integer()}))["version"]
    if version not in _READABLE:
        raise FormatError(f"{store.path}: holds a replay buffer of version {version}, expected 2 or {VERSION}")
    meta: dict[str, Any] = decode_json(raw, where, _CHECK)
    if _has_decks(meta):
        decode_json(raw, where, record({"policy": _DECKS[version]}))
    size, slots = meta["size"], meta["slots"]
    if committed_keys(store, "samples") != size:
        raise CorruptionError(f"{where}: tells of {size} samples, but the log holds {committed_keys(store, 'samples')}")
    if sum(meta["ahead"]) > committed_keys(store, "index") * INDEX_ROW_BYTES:
        raise CorruptionError(f"{where}: the index does not hold batches of {meta['ahead']} bytes")
    used = [number for _, some, _ in meta["under_way"] for number in some]
    brought = [number for _, some, positions in meta["under_way"] for number in positions]
    if (
        max(used, default=-1) >= slots
        or max(brought, default=-1) >= size
        or meta["count"] > slots
        or any(len(set(some)) != len(positions) or len(some) != len(positions)
               for _, some, positions in meta["under_way"])
    ):  # fmt: skip
        raise CorruptionError(f"{where}: names slots or positions beyond the {slots} and {size} there are")
    return meta


def _has_decks(meta: dict[str, Any]) -> bool:
    return isinstance(meta["swap"], list) and meta["swap"][0] == "deck"


def check_positions(
    entries: NDArray[np.void], by_class: bool, some_labels: bool, beside: str | None, path: object
) -> None:
    """Refuse an index of positions with impossible labels, groups, keys or ranks.

    `some_labels` allows samples with labels beside samples without.
    """
    labels, ranks = entries["label"].astype(np.int64), entries["rank"].astype(np.int64)
    groups = labels if by_class else np.zeros(len(labels), np.int64)
    if beside == "group":
        groups, by_class = entries["beside"].astype(np.int64), False
    if beside is not None and (entries["beside"] < 0).any():  # the sign of a key as well
        raise CorruptionError(f"{path}: the index names impossible groups or keys")
    if beside == "key" and np.isnan(entries["beside"].view(np.float32)).any():
        raise CorruptionError(f"{path}: the index names impossible keys")
    order = np.lexsort((ranks, groups))
    # In each group the ranks are 0 and up.
    ascending = groups[order]
    first = np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]]) if len(order) else np.empty(0, np.int64)
    expected = np.arange(len(order)) - np.repeat(first, np.diff(np.r_[first, len(order)]))
    unlabelled = np.count_nonzero(labels < 0)
    mixed = unlabelled > 0 and (by_class or (not some_labels and unlabelled < len(labels)))
    if mixed or not np.array_equal(ranks[order], expected) or ((labels < -1) | (labels >= 2**31)).any():
        raise CorruptionError(f"{path}: the index names impossible labels or ranks")


def check_slots(entries: NDArray[np.void], size: int, count: int, path: object) -> None:
    """Refuse an index of slots with impossible positions or slots."""
    slots = len(entries)
    planned, visible = entries["planned"], entries["visible"]
    used = planned[planned >= 0]
    order = entries["order"]
    if (
        any(((numbers < -1) | (numbers >= size)).any() for numbers in (planned, visible))
        or (entries["swapped"] < -1).any()
        or len(np.unique(used)) != len(used)
        or not np.array_equal(np.sort(order), np.arange(slots))
        or not np.array_equal(np.sort(order[:count]), np.flatnonzero(visible >= 0))
    ):
        raise CorruptionError(f"{path}: the index of slots names impossible positions or slots")
