"""Agreement on a checkpoint: after a crash all shards go back to the newest one that all have.

A shard takes a checkpoint only once all have the one before, or have tried it, and keeps the way back to the last that
all have. So all can go back to that one, whenever ranks end.
"""

from collections.abc import Sequence
from pathlib import Path

from memhier.errors import FormatError
from memhier.recsys.embedding.records import KEY, checkpoint_of
from memhier.store.store import Store
from memhier.store.way_back import before_last, go_back
from memhier.table.tiered import KIND

__all__ = ["agree", "last_checkpoints", "newest_common"]


def last_checkpoints(path: Path) -> tuple[int, int]:
    """Return the numbers of a shard's checkpoint and of the one that it can go back to; 0 for none."""
    if not path.exists():
        return 0, 0
    try:
        store = Store.open(path, KIND, writable=True)
    except FormatError:
        # Perhaps it was never finished; opening it as a table will tell.
        return 0, 0
    with store:
        return checkpoint_of(store, store.get(KEY)), checkpoint_of(store, before_last(store, KEY))


def newest_common(checkpoints: Sequence[tuple[int, int]]) -> int:
    """Return the number of the newest checkpoint that all shards have or can go back to; -1 if there is none."""
    return max(set[int].intersection(*map(set, checkpoints)), default=-1)


def agree(path: Path, checkpoints: Sequence[tuple[int, int]]) -> None:
    """Take a shard back to the newest checkpoint that all shards have.

    Parameters
    ----------
    path
        The folder of the shard.
    checkpoints
        The result of `last_checkpoints` for every shard.

    Raises
    ------
    FormatError
        When no checkpoint is common to all.
    """
    common = newest_common(checkpoints)
    if common < 0:
        raise FormatError(
            f"{path.parent}: the shards are at checkpoints {[last for last, _ in checkpoints]} and can go back to "
            f"{[before for _, before in checkpoints]}: expected shards of one training"
        )
    if last_checkpoints(path)[0] != common:
        with Store.open(path, KIND, writable=True) as store:
            go_back(store)
