"""Divisions of tables among ranks, as folders: the one to open, and the rank that reads each of its shards.

Rows move when another number of ranks opens the tables, or ranks start beside other disks. A move makes a new division,
which counts once all its shards have their first checkpoint; then the old one is deleted. So the newest division that
is whole is the one to open, wherever ranks ended.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from memhier.recsys.embedding.records import KEY, checkpoint_of
from memhier.recsys.embedding.sharding.collectives import Collectives
from memhier.store.agreement import agree, last_commits, newest_common
from memhier.table.tiered import KIND

__all__ = ["Division", "Found", "find"]

_NAME = re.compile(r"shard-(\d+)-of-(\d+)-since-(\d+)")
_Checkpoints = dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """Tables divided among ranks.

    Attributes
    ----------
    since
        The number of its first checkpoint if rows moved to it, 0 otherwise.
    ranks
        The number of its shards.
    """

    since: int
    ranks: int

    def folder(self, path: Path, number: int) -> Path:
        """Return the folder of a shard."""
        return path / f"shard-{number}-of-{self.ranks}-since-{self.since}"


@dataclass(frozen=True, slots=True)
class Found:
    """The division to open, None if there is none.

    Attributes
    ----------
    checkpoint
        The newest checkpoint that all its shards have.
    mine
        The shards that this rank reads.
    in_place
        Whether each rank has its own shard.
    """

    division: Division | None
    checkpoint: int
    mine: list[int]
    in_place: bool


def find(path: Path, ranks: Collectives) -> Found:
    """Find the division to open, bring its shards to one checkpoint, and delete what is left of others.

    Ranks may see the same disk or different ones. Each shard is opened by one of the ranks that see it.

    Raises
    ------
    FormatError
        When the shards belong to different trainings.
    FileNotFoundError
        When a shard of the newest division is on no rank's disk.
    """
    here = sorted(
        tuple(map(int, named.groups())) for each in path.glob("shard-*") if (named := _NAME.fullmatch(each.name))
    )
    seen = [json.loads(text) for text in ranks.texts(json.dumps(here).encode())]
    readers = {}
    for number, of, since in sorted({tuple(shard) for some in seen for shard in some}):
        holders = [rank for rank, some in enumerate(seen) if [number, of, since] in some]
        readers[Division(since, of), number] = number if number in holders else holders[number % len(holders)]
    mine = [shard for shard, rank in readers.items() if rank == ranks.rank]
    told = [
        (each.since, each.ranks, number, *last_commits(each.folder(path, number), KIND, KEY, checkpoint_of))
        for each, number in mine
    ]
    divisions: dict[Division, _Checkpoints] = {}
    for text in ranks.texts(json.dumps(told).encode()):
        for since, of, number, last, before in json.loads(text):
            divisions.setdefault(Division(since, of), {})[number] = last, before
    chosen, checkpoint = _newest(divisions)
    for division, shards in divisions.items():
        if chosen is None or division > chosen:
            _check_unfinished(path, division, shards, chosen is None)
    for division, number in mine:
        if division == chosen:
            shards = divisions[division]
            agree(division.folder(path, number), KIND, shards[number], [*shards.values()])
        else:
            shutil.rmtree(division.folder(path, number))
    ranks.all([0])  # nothing is made before all is deleted
    own = [number for division, number in mine if division == chosen]
    in_place = chosen is not None and chosen.ranks == ranks.ranks
    in_place &= all(readers[chosen, rank] == rank for rank in range(ranks.ranks)) if chosen and in_place else False
    return Found(chosen, checkpoint, own, in_place)


def _newest(divisions: dict[Division, _Checkpoints]) -> tuple[Division | None, int]:
    """Return the newest division that is whole, and the checkpoint that all its shards have; -1 for none."""
    for division in sorted(divisions, reverse=True):
        shards = divisions[division]
        common = newest_common([*shards.values()])
        if len(shards) == division.ranks and (common >= division.since or common < 0):
            return division, common
    return None, 0


def _check_unfinished(path: Path, division: Division, shards: _Checkpoints, is_all: bool) -> None:
    """Raise FileNotFoundError for a division that misses shards, unless its rows still have to come from another."""
    newest = max(last for last, _ in shards.values())
    if newest > (0 if is_all else division.since):
        missing = [division.folder(path, number).name for number in range(division.ranks) if number not in shards]
        raise FileNotFoundError(
            f"{path}: shards of checkpoint {newest} are here, but no rank sees {missing}: start the ranks where their "
            "disk is, or pull their backup into this folder on any rank"
        )
