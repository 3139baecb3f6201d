"""Rows that move to their owners when other ranks open the tables, block by block through the group."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch

from memhier.fields import decode_json, mapping
from memhier.recsys.embedding.groups.tiers import all_rows_in
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.records import EXTRA, as_json
from memhier.recsys.embedding.sharding.collectives import Collectives
from memhier.recsys.embedding.sharding.divisions import Division, Found, find
from memhier.recsys.embedding.sharding.exchange import refused_together, tell_counts
from memhier.recsys.embedding.sharding.shard import Shard
from memhier.recsys.embedding.tables import Floats, Ints, TableOptions
from memhier.store.store import Store
from memhier.table.tiered import KIND

__all__ = ["settled"]

_FAILED = "could not move their rows, and say why themselves; the checkpoint is as it was"
_Block = tuple[Ints, Floats]


def settled(path: Path, specs: Sequence[TableSpec], options: TableOptions, ranks: Collectives) -> Path:
    """Return the folder of this rank's shard, once the rows that it owns are there.

    Rows move if the checkpoint in `path` is of another number of ranks, or shards lie on other ranks' disks. Meanwhile
    a rank holds two shards, each within the budget; the old ones are deleted once all have arrived.

    Parameters
    ----------
    path
        The folder of all shards, on one disk for all ranks or on one for each.
    specs
        The whole tables.
    options
        The options of each shard.
    """
    found = find(path, ranks)
    if found.division is not None and found.in_place:
        return found.division.folder(path, ranks.rank)
    if found.division is None or found.checkpoint == 0:
        for number in found.mine:
            rmtree(Division(0, found.division.ranks if found.division else 0).folder(path, number))
        ranks.all([0])
        return Division(0, ranks.ranks).folder(path, ranks.rank)
    if not options.resume:
        raise FileExistsError(
            f"{path}: holds checkpoint {found.checkpoint} of {found.division.ranks} ranks; pass resume=True to go on "
            "from it, or another path"
        )
    folder = Division(found.checkpoint + 1, ranks.ranks).folder(path, ranks.rank)
    _move(path, found, found.division, replace(options, path=folder, policy="lru"), specs, ranks)
    return folder


def _move(
    path: Path, found: Found, division: Division, options: TableOptions, specs: Sequence[TableSpec], ranks: Collectives
) -> None:
    told: list[dict[str, Any]] = []
    with refused_together(ranks):
        new = Shard(specs, ranks.rank, ranks.ranks, replace(options, resume=False))
    with closing(new):
        step = max(1, min(new.call_rows, new.capacity) // ranks.ranks)
        _exchange(_blocks(path, found, division, options, specs, step, told), new, ranks)
        texts = ranks.texts(as_json({str(each.pop("number")): each for each in told}))
        of_all = {int(number): each for text in texts for number, each in decode_json(text, "a shard", _ANY).items()}
        with refused_together(ranks):
            new.record.steps[:] = of_all[0]["steps"]
            new.record.checkpoint = found.checkpoint
            new.checkpoint({EXTRA: as_json(_joined([of_all[number]["extra"] for number in sorted(of_all)]))})
        tell_counts(ranks, np.zeros(ranks.ranks, np.int64), _FAILED)
    for number in found.mine:
        rmtree(division.folder(path, number))


def _anything(value: Any) -> None:
    """Accept any value: other ranks have checked it."""


_ANY = mapping(_anything)


def _blocks(
    path: Path, found: Found, division: Division, options: TableOptions, specs: Sequence[TableSpec], step: int,
    told: list[dict[str, Any]],
) -> Iterator[_Block]:  # fmt: skip
    """Yield the rows of this rank's old shards with their keys; note number, updates and values of each shard."""
    for number in found.mine:
        place = division.folder(path, number)
        with Store.open(place, KIND) as store:
            touched = max(1, all_rows_in(store))
        there = replace(options, path=place, resume=True, touched=touched, step_rows=None)
        with closing(Shard(specs, number, division.ranks, there)) as old:
            told.append({"number": number, "steps": list(old.record.steps), "extra": old.extra()})
            for block in old.stored():
                for start in range(0, len(block), min(step, old.call_rows)):
                    part = block[start : start + min(step, old.call_rows)]
                    yield old.everywhere(part), old.read_numbers(part)


def _exchange(blocks: Iterator[_Block], new: Shard, ranks: Collectives) -> None:
    """Give all rows to their owners, and take those of this rank."""
    width = max(new.widths)
    nothing = np.empty(0, np.int64), np.empty((0, width), np.float32)
    while True:
        with refused_together(ranks):
            keys, rows = next(blocks, nothing)
        owners = keys % ranks.ranks
        order, sent = np.argsort(owners, kind="stable"), np.bincount(owners, minlength=ranks.ranks)
        received = tell_counts(ranks, sent, _FAILED)
        if not any(count for (count,) in ranks.all([len(keys)])):
            return
        came = ranks.exchange(torch.from_numpy(keys[order]), sent.tolist(), received).numpy()
        floats = [width * count for count in received]
        values = ranks.exchange(torch.from_numpy(rows[order]).view(-1), (width * sent).tolist(), floats)
        with refused_together(ranks):
            new.replace(new.numbers(came), values.view(-1, width).numpy())


def _joined(extras: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters and values of all shards; values that differ as a list under ``shards``."""
    values = [extra.get("extra", {}) for extra in extras]
    return extras[0] | {"extra": values[0] if all(value == values[0] for value in values) else {"shards": values}}
