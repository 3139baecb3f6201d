"""A way back from a store's last commit to the one before: several stores use it to stay at the same commit.

A commit that keeps a way back drops no segment: the next such commit does. It notes its changes in the catalog, so that
going back is a commit like any other.
"""

import json
from typing import TYPE_CHECKING

from memhier.errors import CorruptionError
from memhier.fields import decode_json, record, sequence, text

if TYPE_CHECKING:
    from memhier.store.store import Store
    from memhier.store.transaction import Transaction

__all__ = ["before_last", "go_back", "keep_way_back"]

_NOTE = "before"
_NAMES = sequence(text(r"[\s\S]{1,400}"))
_CHECK = record({"values": _NAMES, "dropped": _NAMES, "added": _NAMES})
_OLD = _NOTE + "/"


def keep_way_back(tx: "Transaction", store: "Store", further: bool = False) -> None:
    """Note the changes of a transaction, as its last step; drop the segments that only the way back before it needed.

    With `further` the way leads on to the commit that the last one kept.
    """
    note, old = _note(store), {key: store.get(key) for key in tx.changed}
    if further:
        old |= {key: store.get(_OLD + key) for key in note["values"]}
    values = {key: value for key, value in old.items() if value is not None}
    _forget(tx, store, [_NOTE, *(_OLD + key for key in values)])
    for key, value in values.items():
        tx.put(_OLD + key, value)
    dropped, added = tx.swap_dropped(note["dropped"]), tx.written
    if further:
        # Segments that only the commits between have are dropped; the commit at the end of the way needs the others.
        between = set(dropped) & set(note["added"])
        tx.swap_dropped([*between])
        dropped = [*note["dropped"], *(name for name in dropped if name not in between)]
        added = [*(name for name in note["added"] if name not in between), *added]
    note = {"values": [*old], "dropped": dropped, "added": added}
    tx.put(_NOTE, json.dumps(note).encode())


def before_last(store: "Store", key: str) -> bytes | None:
    """Return a value of the commit before the last, None for none; of the last commit if no way leads back."""
    return store.get(_OLD + key) if key in _note(store)["values"] else store.get(key)


def go_back(store: "Store") -> None:
    """Bring the store back to the commit before the last.

    Raises
    ------
    ValueError
        When the last commit kept no way back.
    CorruptionError
        When the note does not fit the store.
    OSError
        When a write fails.
    """
    note = _note(store)
    if not note["values"]:
        raise ValueError(f"{store.path}: the last commit kept no way back")
    missing = [name for name in note["added"] if name not in store.segments()]
    if missing or len(set(note["added"])) != len(note["added"]):
        raise CorruptionError(f"{store.path}: value {_NOTE!r} names segments that are not there: {missing}")
    with store.begin() as tx:
        for key in note["values"]:
            value = store.get(_OLD + key)
            if value is not None:
                tx.put(key, value)
            elif store.get(key) is not None:
                tx.delete(key)
        for name in note["added"]:
            tx.drop(name)
        _forget(tx, store, [])
        tx.commit()


def _forget(tx: "Transaction", store: "Store", but: list[str]) -> None:
    noted = [key for key in store.keys() if key == _NOTE or key.startswith(_OLD)]  # noqa: SIM118
    for key in noted:
        if key not in but:
            tx.delete(key)


def _note(store: "Store") -> dict[str, list[str]]:
    found = store.get(_NOTE)
    if found is None:
        return {"values": [], "dropped": [], "added": []}
    note: dict[str, list[str]] = decode_json(found, f"{store.path}: value {_NOTE!r}", _CHECK)
    return note
