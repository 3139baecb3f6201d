"""ShardCopy: takes a replica piece by piece, or from a backup, and puts it in its place. It runs in an actor."""

import os
import shutil
from pathlib import Path

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.nodes import shard_folder
from memhier.ann.zoom import ZoomIndex
from memhier.store.transfer import Transfer

__all__ = ["ShardCopy"]


class ShardCopy:
    """Receives the files of an index.

    Parameters
    ----------
    path, shard, replica
        See :func:`shard_folder`. The folder may hold a replica that lacks commits.
    """

    def __init__(self, path: str, shard: int, replica: int) -> None:
        self._folder = shard_folder(path, shard, replica)
        self._new = self._folder.with_name(self._folder.name + ".new")

    def begin(self) -> None:
        """Remove the rest of a copy that was cut short."""
        shutil.rmtree(self._new, ignore_errors=True)

    def pull(self, url: str, generation: int) -> Transfer:
        """Take a generation of a backup; a pull that was cut short goes on."""
        self._new.mkdir(parents=True, exist_ok=True)
        try:
            return ZoomIndex.pull(url, self._new / "index", generation=generation)
        except FileExistsError:  # the rest of something else
            self.begin()
            self._new.mkdir(parents=True)
            return ZoomIndex.pull(url, self._new / "index", generation=generation)

    def write(self, name: str, piece: bytes) -> None:
        """Append a piece to a file."""
        place = self._new / "index" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("ab") as file:
            file.write(piece)

    def finish(self, about: ClusterMap) -> None:
        """Put the copy in the place of the replica."""
        shutil.rmtree(self._new / "map", ignore_errors=True)
        about.create(self._new)
        for each in [*self._new.rglob("*"), self._new]:
            _sync(each)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._new.rename(self._folder)
        _sync(self._folder.parent)


def _sync(place: Path) -> None:
    """Make a file or a folder durable."""
    number = os.open(place, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
