"""The first half of a commit over several indexes: written in each, published in none until all have it.

The catalog keeps the description to come in the value ``prepared``, with a mark that the group of indexes gives it. The
value ``mark`` is that of the last commit published so.
"""

import json
from collections.abc import Callable

import numpy as np

from memhier.ann.zoom.storage.catalog import Description
from memhier.errors import LockedError
from memhier.fields import decode_json, integer, mapping, record
from memhier.store.store import Store, Transaction

__all__ = [
    "PREPARED",
    "Decision",
    "check_decision",
    "drop_prepared",
    "note_prepared",
    "publish_prepared",
    "published_mark",
    "settle_prepared",
]

Decision = Callable[[int], bool]
"""Says whether the commit of a mark was made."""

PREPARED = "prepared"
"""The value of the catalog that holds the commit to come; it belongs to this index, and to none of its copies."""

_MARK = "mark"


def published_mark(store: Store) -> int:
    """Return the mark of the last commit that was prepared and published, 0 if there was none."""
    raw = store.get(_MARK)
    return 0 if raw is None else int(decode_json(raw, f"{store.path}: the value 'mark'", integer()))


def note_prepared(tx: Transaction, mark: int, about: Description) -> None:
    """Keep the description of a commit to come."""
    tx.put(PREPARED, json.dumps({"mark": mark, "index": about.to_json()}).encode())


def publish_prepared(tx: Transaction, mark: int, about: Description) -> None:
    """Make a prepared description that of the index."""
    tx.put("index", json.dumps(about.to_json()).encode())
    tx.put(_MARK, json.dumps(mark).encode())
    drop_prepared(tx)


def drop_prepared(tx: Transaction) -> None:
    """Forget the commit that is prepared."""
    tx.delete(PREPARED)


def check_decision(decide: Decision | None) -> None:
    """Raise TypeError for a decision that is no function."""
    if decide is not None and not callable(decide):
        raise TypeError(f"settle={decide!r}: expected a function that says for a mark whether its commit was made")


def settle_prepared(store: Store, decide: Decision | None) -> None:
    """Publish the prepared commit of a store that is open for writing, or drop it.

    Parameters
    ----------
    decide
        Says for its mark whether the commit was made.

    Raises
    ------
    LockedError
        When a commit is prepared and `decide` is None.
    TypeError
        When it returns no bool.
    """
    raw = store.get(PREPARED)
    if raw is None:
        return
    where = f"{store.path}: the value 'prepared'"
    note = decode_json(raw, where, record({"mark": integer(), "index": mapping(lambda _: None)}))
    if decide is None:
        raise LockedError(
            f"{store.path}: commit {note['mark']} of a group of indexes is prepared here; open the group, or give "
            f"settle= to say whether that commit was made"
        )
    about = Description.decode(json.dumps(note["index"]).encode(), store.path)
    if not isinstance(made := decide(note["mark"]), bool | np.bool_):
        raise TypeError(
            f"settle({note['mark']}) returned {made!r}: expected whether the commit was made, True or False"
        )
    with store.begin() as tx:
        if made:
            publish_prepared(tx, note["mark"], about)
        else:
            drop_prepared(tx)
        tx.commit()
