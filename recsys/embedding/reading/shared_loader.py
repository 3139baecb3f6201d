"""SharedLoader: one rank reads a loader for all trainers, and plans the rows of their steps.

The roles are Bagpipe's (arXiv 2202.12429): its Oracle Cacher reads, looks ahead and plans, so trainers neither read the
data nor exchange ids. The plan names the rows that each trainer will be asked for; the trainer prefetches these, and
evicts by Belady's rule.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from memhier.arguments import check_int
from memhier.closing import Closing
from memhier.recsys.embedding.collection import FeatureParser
from memhier.recsys.embedding.reading.epoch_start import RandomStates, start_epoch
from memhier.recsys.embedding.sharding.exchange import StepPlan, plan_step

__all__ = ["SharedLoader", "split_samples"]

_END = object()


def split_samples(batch: Any, ranks: int) -> list[Any]:
    """Divide the samples of a batch among ranks, in their order; the first parts may have a sample more.

    Parameters
    ----------
    batch
        A tensor, or a tuple, list, dict or dataclass of batches. Samples lie along the first axis of each tensor.
    ranks
        The number of parts. Some have no sample if there are fewer.

    Returns
    -------
    list
        Batches of the same form, copies.

    Raises
    ------
    ValueError
        When tensors have unlike numbers of samples.
    TypeError
        For a batch of another form.

    Examples
    --------
    >>> import torch
    >>> from memhier.recsys import split_samples
    >>> [part["id"].tolist() for part in split_samples({"id": torch.arange(5)}, 2)]
    [[0, 1, 2], [3, 4]]
    """
    sizes: set[int] = set()
    parts = [_part(batch, ranks, rank, sizes) for rank in range(ranks)]
    if len(sizes) > 1:
        raise ValueError(
            f"batch: tensors of {sorted(sizes)} samples, expected as many of each; pass a `split` of its own"
        )
    return parts


def _part(batch: Any, ranks: int, rank: int, sizes: set[int]) -> Any:
    if isinstance(batch, torch.Tensor) and batch.dim():
        sizes.add(len(batch))
        return batch.tensor_split(ranks)[rank].clone()
    if isinstance(batch, Mapping):
        return {name: _part(each, ranks, rank, sizes) for name, each in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(
            batch, **{each.name: _part(getattr(batch, each.name), ranks, rank, sizes) for each in fields(batch)}
        )
    if isinstance(batch, list | tuple):
        found = [_part(each, ranks, rank, sizes) for each in batch]
        return type(batch)(*found) if hasattr(batch, "_fields") else type(batch)(found)
    raise TypeError(
        f"batch: holds {type(batch).__name__}, expected tensors in tuples, lists, dicts and dataclasses; pass a `split`"
    )


@dataclass(frozen=True, slots=True)
class _Failure:
    words: str


class SharedLoader(Closing):
    """A loader that one rank of `torch.distributed` reads for all others, the trainers.

    The reader calls :meth:`serve`; trainers look ahead in this object, and get their parts of the batches with the plan
    of the rows: no id is exchanged among them. Bits are those of trainers that read for themselves and take their part
    by :func:`split_samples`. All ranks make it, once the default process group is there.

    Parameters
    ----------
    reader
        The rank that reads.

    Attributes
    ----------
    is_reader
        Whether this rank reads.
    trainers
        The group of the other ranks, for tables and DDP.

    Raises
    ------
    ValueError
        When there is no such rank, or no other one.

    Examples
    --------
    See docs/how-to/several-machines.md for the whole program. One rank alone has nobody to read for:

    >>> import torch
    >>> from memhier.recsys import SharedLoader
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> SharedLoader(reader=0)
    Traceback (most recent call last):
    ValueError: reader=0: is the only rank, expected one or more to train
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, reader: int) -> None:
        ranks = dist.get_world_size()
        check_int("reader", reader, 0, ranks - 1, "a rank")
        if ranks == 1:
            raise ValueError(f"reader={reader}: is the only rank, expected one or more to train")
        self._reader = reader
        self._others = [rank for rank in range(ranks) if rank != reader]
        self.trainers: Any = dist.new_group(self._others)
        self._group = dist.new_group(backend="gloo")
        self.is_reader: bool = dist.get_rank() == reader
        self._is_first = dist.get_rank() == self._others[0]
        self._planned: StepPlan | None = None
        self._is_open = True

    # On the reader.

    def serve(
        self,
        loader: Iterable[Any],
        tables: Sequence[Any],
        ids: Callable[[Any], Any],
        *,
        split: Callable[[Any, int], Sequence[Any]] = split_samples,
    ) -> dict[str, float]:
        """Read for the trainers until they close; the next batch is read and planned while they take one.

        Parameters
        ----------
        loader
            Any iterable of batches for all trainers together; it is iterated once an epoch.
        tables
            As in :class:`ShardedEmbeddingBagCollection`.
        ids
            As in :func:`lookahead`, of a part of a batch.
        split
            Returns the parts of a batch, of which there are so many, for trainers in the order of ranks.

        Returns
        -------
        dict
            ``batches`` sent; seconds to read (``loader_s``), to divide and plan (``plan_s``) and to send (``send_s``).

        Raises
        ------
        RuntimeError
            When this rank trains, or trainers end without :meth:`close`. A failure of the loader, `ids` or `split` is
            raised on all trainers, in place of the batch.
        """
        if not self.is_reader:
            raise RuntimeError(f"serve(): rank {dist.get_rank()} trains; rank {self._reader} reads")
        batches = _Batches(loader, FeatureParser(tables), ids, split, len(self._others))
        spent = {"batches": 0.0, "loader_s": 0.0, "plan_s": 0.0, "send_s": 0.0}
        try:
            with ThreadPoolExecutor(1, "memhier-reader") as beside:
                coming: Future[list[Any]] | None = None
                while (command := self._receive(self._others[0])) is not None:
                    if isinstance(command, tuple):
                        if coming is not None:
                            coming.exception()  # of an epoch that was left
                        found = beside.submit(batches.begin, *command).result()
                    else:
                        assert coming is not None
                        found = coming.result()
                        spent["batches"] += isinstance(found[0], tuple)
                    coming = beside.submit(batches.next)
                    started = time.perf_counter()
                    for rank, message in zip(self._others, found, strict=True):
                        dist.send_object_list([message], dst=rank, group=self._group)
                    spent["send_s"] += time.perf_counter() - started
        except RuntimeError as error:
            raise RuntimeError(f"the trainers ended before they closed their SharedLoader: {error}") from error
        finally:
            self._is_open = False
        return spent | {"loader_s": batches.loader_s, "plan_s": batches.plan_s}

    def _receive(self, rank: int) -> Any:
        # Between two ranks alone, so that each trainer notices by itself if the reader ends.
        found: list[Any] = [None]
        dist.recv_object_list(found, src=rank, group=self._group)
        return found[0]

    # On trainers.

    def start(self, skipped: int, random: RandomStates | None) -> tuple[Iterator[Any], RandomStates]:
        """Begin an epoch on the reader; see :func:`start_epoch`. All trainers call it, through `lookahead`."""
        if self.is_reader:
            raise RuntimeError(f"rank {self._reader} reads for others: call serve()")
        found: RandomStates = self._ask((skipped, random))
        return self._parts(), found

    def plan(self, batch: Any) -> StepPlan:
        """Return the plan of the batch that was read last; it is `ids` of `lookahead`."""
        if self._planned is None:
            raise RuntimeError("plan: is for lookahead(shared, tables, ids=shared.plan)")
        return self._planned

    def close(self) -> None:
        """End the reader's `serve`, from the trainers; all of them have to have left their loops."""
        if self._is_open and self._is_first:
            with suppress(RuntimeError):  # the reader has ended already
                dist.send_object_list([None], dst=self._reader, group=self._group)
        self._is_open = False

    def _parts(self) -> Iterator[Any]:
        while (found := self._ask("next")) is not None:
            part, self._planned = found
            yield part

    def _ask(self, command: Any) -> Any:
        try:
            if self._is_first:
                dist.send_object_list([command], dst=self._reader, group=self._group)
            found = self._receive(self._reader)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._reader}, which reads the loader, has ended: start all ranks again with resume=True; with "
                f"the state of lookahead it goes on at the same batch ({error})"
            ) from error
        if isinstance(found, _Failure):
            raise RuntimeError(f"rank {self._reader}, which reads the loader: {found.words}")
        return found


class _Batches:
    """The messages for trainers, in the order of ranks: None at the end of an epoch."""

    def __init__(
        self,
        loader: Iterable[Any],
        parser: FeatureParser,
        ids: Callable[[Any], Any],
        split: Callable[[Any, int], Sequence[Any]],
        ranks: int,
    ) -> None:
        self._loader = loader
        self._parser = parser
        self._ids = ids
        self._split = split
        self._ranks = ranks
        self._bases = np.cumsum([0, *(spec.rows for spec in parser.specs)])
        self._epoch: Iterator[Any] = iter(())
        self._before: list[StepPlan] | None = None
        self.loader_s: float = 0.0
        self.plan_s: float = 0.0

    def begin(self, skipped: int, random: RandomStates | None) -> list[Any]:
        """Begin an epoch; the message is the states that it began with."""
        try:
            self._epoch, states = start_epoch(self._loader, skipped, random)
        except Exception as error:
            return self._failed(error)
        self._before = None
        return [states] * self._ranks

    def next(self) -> list[Any]:
        """Read and plan the next batch."""
        started = time.perf_counter()
        try:
            batch = next(self._epoch, _END)
            if batch is _END:
                return [None] * self._ranks
            read = time.perf_counter()
            parts = self._split(batch, self._ranks)
            if len(parts) != self._ranks:
                raise ValueError(f"split: returned {len(parts)} parts, expected {self._ranks}")
            self._before = plan_step([self._ids_of(part) for part in parts], self._bases, self._before)
        except Exception as error:
            return self._failed(error)
        self.loader_s += read - started
        self.plan_s += time.perf_counter() - read
        return [*zip(parts, self._before, strict=True)]

    def _ids_of(self, part: Any) -> Any:
        found = self._ids(part)
        ids = self._parser.ids_of(*(found if isinstance(found, tuple) else (found,)))
        for table, some in enumerate(ids):
            self._parser.check_ids(table, some)
        return ids

    def _failed(self, error: Exception) -> list[Any]:
        self._epoch = iter(())
        return [_Failure(f"{type(error).__name__}: {error}")] * self._ranks
