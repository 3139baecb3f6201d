"""reshard: the tables of a sharded collection, divided among another number of ranks."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memhier.arguments import check_int
from memhier.recsys.embedding.collection import FeatureParser
from memhier.recsys.embedding.optimizers import SGD, SparseOptimizer
from memhier.recsys.embedding.records import EXTRA, as_json
from memhier.recsys.embedding.sharding.agreement import agree, last_checkpoints
from memhier.recsys.embedding.sharding.shard import Shard
from memhier.recsys.embedding.tables import TableOptions

__all__ = ["reshard"]


def reshard(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    tables: Sequence[Any],
    ranks: int,
    *,
    optimizer: SparseOptimizer | None = None,
    dram: int | str,
    **options: Any,
) -> int:
    """Copy a checkpoint of :class:`ShardedEmbeddingBagCollection` for another number of ranks.

    Trained rows are copied with their optimizer's state; untrained ones exist on no rank. No process group is needed.
    The call reads every shard once for each new one, and leaves the first folder as it is. One exception: if the ranks
    ended amid a checkpoint, the shards that have it go back to the one before, as they do when opened for training. If
    ranks gave their checkpoints different `extra`, every new shard has ``{"shards": [...]}`` of all, by old rank.

    Parameters
    ----------
    path
        The folder of all shards of the checkpoint.
    to
        A new folder, which appears once it is complete.
    tables, optimizer
        As the checkpoint was made with.
    ranks
        The new number of ranks.
    dram
        Bytes for a shard; two are open at a time.
    options
        ``seed``, ``codec``, ``touched`` and ``step_rows`` as the checkpoint was made with.

    Returns
    -------
    int
        The number of rows copied.

    Raises
    ------
    FileNotFoundError
        When `path` has no shards.
    FileExistsError
        When `to` exists.
    FormatError
        When the checkpoint belongs to other tables, or its shards to different trainings.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagConfig, ShardedEmbeddingBagCollection, reshard
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> folder, configs = tempfile.mkdtemp(), [EmbeddingBagConfig(name="item", num_embeddings=100, embedding_dim=4)]
    >>> with ShardedEmbeddingBagCollection(configs, dram="32MiB", path=folder + "/on-one") as tables:
    ...     tables(torch.tensor([[1], [7]]))["item"].sum().backward()
    ...     _ = tables.checkpoint()
    >>> torch.distributed.destroy_process_group()
    >>> reshard(folder + "/on-one", folder + "/on-two", configs, ranks=2, dram="32MiB")
    2
    """
    source, target = Path(path), Path(to)
    check_int("ranks", ranks, 1, 2**20)
    before = len([*source.glob("shard-*")])
    if not before:
        raise FileNotFoundError(f"path={os.fspath(path)!r}: expected a folder with shard-0 and so on in it")
    if target.exists():
        raise FileExistsError(f"to={os.fspath(to)!r}: is there already")
    specs, rule = FeatureParser(tables).specs, SGD() if optimizer is None else optimizer
    shards = [source / f"shard-{number}" for number in range(before)]
    checkpoints = [last_checkpoints(place) for place in shards]
    for place in shards:
        agree(place, checkpoints)
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    copied = 0
    for rank in range(ranks):
        made = TableOptions(optimizer=rule, dram=dram, path=unfinished / f"shard-{rank}", **options)
        new = Shard(specs, rank, ranks, made)
        extras = []
        try:
            for number, place in enumerate(shards):
                old = Shard(specs, number, before, replace(made, path=place, resume=True))
                try:
                    copied += _copy(old, new)
                    extras.append(old.extra())
                finally:
                    old.close()
            new.checkpoint({EXTRA: as_json(_joined(extras))})
        finally:
            new.close()
    os.rename(unfinished, target)
    return copied


def _joined(extras: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters and values of all shards; values that differ as a list under ``shards``."""
    values = [extra.get("extra", {}) for extra in extras]
    return extras[0] | {"extra": values[0] if all(value == values[0] for value in values) else {"shards": values}}


def _copy(old: Shard, new: Shard) -> int:
    """Copy the rows of an old shard that a new one owns; return their number."""
    new.record.steps[:] = old.record.steps
    copied, step = 0, min(old.call_rows, new.call_rows, new.capacity)
    for block in old.stored():
        everywhere = old.everywhere(block)
        mine = new.has(everywhere)
        here, there = block[mine], new.numbers(everywhere[mine])
        for start in range(0, len(here), step):
            part = slice(start, start + step)
            new.replace(there[part], old.read_numbers(here[part]))
        copied += len(here)
    return copied
