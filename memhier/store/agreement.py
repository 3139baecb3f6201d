"""Agreement of several stores on a commit: after a crash all go back to the newest one that all have.

A store takes a commit only once all have the one before, and keeps the way back to that one. So all can go back to it,
whenever processes end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from memhier.errors import FormatError
from memhier.store.store import Store
from memhier.store.way_back import before_last, go_back

__all__ = ["agree", "last_commits", "newest_common"]


def last_commits(path: Path, kind: str, key: str, number: Callable[[Store, bytes | None], int]) -> tuple[int, int]:
    """Return the number of a store's last commit, and of the one that it can go back to; 0 for none.

    Parameters
    ----------
    path, kind
        Of the store; it need not exist.
    key
        The value of the catalog that has the number.
    number
        Reads it out of the value, None if there is no value.
    """
    if not path.exists():
        return 0, 0
    try:
        store = Store.open(path, kind, writable=True)
    except FormatError:
        # Perhaps it was never finished; opening it for use will tell.
        return 0, 0
    with store:
        return number(store, store.get(key)), number(store, before_last(store, key))


def newest_common(commits: Sequence[tuple[int, int]]) -> int:
    """Return the number of the newest commit that all stores have or can go back to; -1 if there is none."""
    return max(set[int].intersection(*map(set, commits)), default=-1)


def agree(path: Path, kind: str, own: tuple[int, int], commits: Sequence[tuple[int, int]]) -> None:
    """Take a store back to the newest commit that all stores have.

    Parameters
    ----------
    path, kind
        Of this store.
    own, commits
        The results of `last_commits` for this store, and for every store.

    Raises
    ------
    FormatError
        When no commit is common to all.
    """
    common = newest_common(commits)
    if common < 0:
        raise FormatError(
            f"{path.parent}: the shards are at checkpoints {[last for last, _ in commits]} and can go back to "
            f"{[before for _, before in commits]}: expected shards of one training"
        )
    if own[0] != common:
        with Store.open(path, kind, writable=True) as store:
            go_back(store)
