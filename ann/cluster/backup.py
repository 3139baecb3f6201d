"""The backup of an index over shards: one of each shard, and a catalog, written last, that names a generation of each.

A catalog has the next number; that of the greatest number counts, once it is there. A push that is cut short, on any
machine, leaves the backup before it as it was.
"""

import errno
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.group import Call
from memhier.ann.cluster.nodes import actor_on, named_losses
from memhier.ann.cluster.open_shards import OpenShards
from memhier.ann.cluster.ray_extra import ray
from memhier.ann.cluster.shard_copy import ShardCopy
from memhier.errors import CorruptionError, FormatError, LockedError, ShardLostError
from memhier.fields import decode_json, integer, mapping, record, sequence, text
from memhier.remote.far_side import backups, object_of, prune_backups
from memhier.remote.manifest import digest, object_path
from memhier.remote.place import Place
from memhier.store.transfer import Transfer

__all__ = ["ClusterBackup", "push_shards", "restore_replicas"]

_CATALOGS = "catalogs"
_CELLS = ("owners", "centroids")
_OBJECT = record({"name": text(r"[0-9a-f]{64}"), "size": integer()})
_SHARD = record({"folder": integer(), "generation": integer(1, 2**62)})
_CHECK = record({"about": mapping(lambda _: None), "shards": sequence(_SHARD), "owners": _OBJECT, "centroids": _OBJECT})


@dataclass(frozen=True, slots=True)
class ClusterBackup:
    """A backup of all shards at one commit.

    Attributes
    ----------
    url, number
        Where it is, and which of those there, from 1.
    about
        The map of shard 0.
    shards
        Of each the number of its far folder, and the generation there.
    """

    url: str
    number: int
    about: ClusterMap
    shards: list[tuple[int, int]]

    @classmethod
    def read(cls, url: str, number: int | None = None) -> "ClusterBackup":
        """Return a backup at a URL, the newest by default.

        Raises
        ------
        FileNotFoundError
            When it is not there.
        CorruptionError
            When it is damaged.
        """
        place = Place(url)
        numbers = _numbers(place)
        if not numbers or (number is not None and number not in numbers):
            sought = "backup of an index over shards" if number is None else f"backup {number}"
            raise FileNotFoundError(errno.ENOENT, f"no {sought} here", place.url)
        chosen = numbers[-1] if number is None else number
        where = place.address(_path(chosen))
        try:
            body = _body(_read(place, chosen), where)
        except FileNotFoundError:
            if number is not None or _numbers(place) == numbers:
                raise
            return cls.read(url)  # pruned meanwhile: there is a newer one
        found = decode_json(body, where, _CHECK)
        cells = [np.frombuffer(object_of(place, found[name]["name"], found[name]["size"]), np.uint8) for name in _CELLS]
        about = ClusterMap.decode(json.dumps(found["about"]).encode(), cells[0], cells[1], where)
        return cls(place.url, chosen, about, [(each["folder"], each["generation"]) for each in found["shards"]])

    def refuse_other_commit(self, about: ClusterMap, latest: int = 0) -> None:
        """Raise ShardLostError unless this is the backup of a commit, and no shard has the `latest` one beyond it."""
        if (about.layout, about.commit) != (self.about.layout, self.about.commit) or latest > self.about.epoch:
            raise ShardLostError(
                f"{self.url}: the backup has commit {self.about.epoch}, the other shards commit "
                f"{max(latest, about.epoch)}; "
                f"ShardedIndex.pull restores all shards at commit {self.about.epoch} in another folder"
            )

    def folder(self, shard: int) -> str:
        """Return the URL of the backup of a shard."""
        return f"{_stem(self.url, self.about, shard)}-{self.shards[shard][0]}"


def push_shards(shards: OpenShards, url: str, keep: int | None) -> Transfer:
    """Back the last commit up; see :meth:`ShardedIndex.push`."""
    about, place = shards.about, Place(url)
    before = ClusterBackup.read(url) if _numbers(place) else None
    if before is not None:
        _refuse_newer(before, about)
    same = before is not None and before.about.layout == about.layout
    calls = []
    for shard in range(about.shards):
        number = before.shards[shard][0] if same and before is not None else 0
        calls.append(Call(shard, "push", (_stem(place.url, about, shard), number)))
    found: list[tuple[int, int, Transfer]] = shards.answers(calls, patient=True)
    if behind := [shard for shard, (_, mark, _) in enumerate(found) if mark != about.epoch]:
        raise ShardLostError(f"shards {behind} are not at commit {about.epoch}: heal() the index, and push again")
    transfers = [transfer for _, _, transfer in found]
    generations = [(folder, transfer.generation) for folder, _, transfer in found]
    if before is None or (before.about.commit, before.shards) != (about.commit, generations):
        _publish(place, about, generations)
    if keep is not None:
        _prune(place, keep)
    sums = [sum(getattr(each, name) for each in transfers) for name in (
        "objects", "nbytes", "moved_objects", "moved_bytes",
    )]  # fmt: skip
    return Transfer(about.epoch, *sums)


def restore_replicas(backup: ClusterBackup, path: str, wanted: list[tuple[int, int, str]]) -> Transfer:
    """Make replicas of shards from a backup, each given as shard, replica and node; shard 0 comes last."""
    place, copies, moved = backup.about.place(path), [], list[Transfer]()
    try:
        with named_losses(path):
            for shard, replica, node in wanted:
                copies.append(actor_on(node, ShardCopy, place, shard, replica))
            asked = [
                copy.pull.remote(backup.folder(shard), backup.shards[shard][1])
                for copy, (shard, _, _) in zip(copies, wanted, strict=True)
            ]
            moved = ray.get(asked)
            for copy, (shard, replica, _) in sorted(zip(copies, wanted, strict=True), key=lambda each: -each[1][0]):
                ray.get(copy.finish.remote(backup.about.of(shard, replica)))
    finally:
        for copy in copies:
            ray.kill(copy)
    return Transfer(
        backup.about.epoch, sum(each.objects for each in moved), sum(each.nbytes for each in moved),
        sum(each.moved_objects for each in moved), sum(each.moved_bytes for each in moved),
    )  # fmt: skip


def _refuse_newer(before: ClusterBackup, about: ClusterMap) -> None:
    there = before.about
    if there.name != about.name:
        raise FormatError(f"{before.url}: holds another index; push to a folder of its own")
    if there.epoch > about.epoch or (there.epoch == about.epoch and there.commit != about.commit):
        raise FileExistsError(
            errno.EEXIST,
            f"commit {there.epoch} there is not older than commit {about.epoch} here, and not the same; push to "
            f"another URL, or pull that one",
            before.url,
        )


def _publish(place: Place, about: ClusterMap, generations: list[tuple[int, int]]) -> None:
    """Write the catalog of a backup under the next number."""
    described: dict[str, Any] = {}
    for name in _CELLS:
        contents = np.ascontiguousarray(getattr(about.cells, name)).tobytes()
        described[name] = {"name": digest(contents), "size": len(contents)}
        place.put(object_path(digest(contents)), contents)
        object_of(place, digest(contents), len(contents))
    described["about"] = json.loads(about.encode())
    described["shards"] = [{"folder": folder, "generation": number} for folder, number in generations]
    body = json.dumps(described, sort_keys=True).encode()
    catalog = digest(body).encode() + b"\n" + body
    number = max(_numbers(place), default=0) + 1
    with suppress(FileExistsError):
        place.put(_path(number), catalog, new=True)
    if _read(place, number) != catalog:
        raise LockedError(f"{place.url}: another process pushed there meanwhile; push again")


def _prune(place: Place, keep: int) -> None:
    """Remove all but the newest backups, and the generations of shards that no other one names."""
    every = [ClusterBackup.read(place.url, number) for number in _numbers(place)]
    kept, doomed = every[-keep:], every[:-keep]
    place.remove([_path(each.number) for each in doomed])
    needed: dict[str, int] = {}
    for each in kept:
        for shard, (_, generation) in enumerate(each.shards):
            folder = each.folder(shard)
            needed[folder] = min(generation, needed.get(folder, generation))
    for folder in {each.folder(shard) for each in doomed for shard in range(each.about.shards)}:
        if folder in needed:
            prune_backups(folder, max(1, sum(each.generation >= needed[folder] for each in backups(folder))))
            continue
        left = Place(folder)
        for inside in ("manifests", "objects"):
            left.remove([f"{inside}/{name}" for name in left.sizes(inside)])


def _stem(url: str, about: ClusterMap, shard: int) -> str:
    return f"{url}/{about.layout}-{shard:04}"


def _numbers(place: Place) -> list[int]:
    names = (name.removesuffix(".json") for name in place.names(_CATALOGS))
    return sorted(int(name) for name in names if name.isdigit())


def _read(place: Place, number: int) -> bytes:
    def check(contents: bytes) -> None:
        _body(contents, place.address(_path(number)))

    return place.get(_path(number), check)


def _body(contents: bytes, where: str) -> bytes:
    """Return the JSON of a catalog; CorruptionError where it does not match the digest before it."""
    name, _, body = contents.partition(b"\n")
    if name != digest(body).encode():
        raise CorruptionError(f"{where}: does not match its checksum")
    return body


def _path(number: int) -> str:
    return f"{_CATALOGS}/{number:08d}.json"
