"""ShardedBuffer: a replay buffer over ranks, each with a shard on its own SSD."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from memhier.arguments import check_int
from memhier.closing import Closing
from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.fields import decode_json, integer, record
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.buffer import CarouselBuffer, Where
from memhier.recsys.replay.ranks.messages import Messages, said
from memhier.recsys.replay.ranks.parts import Part, joined_parts, part_of
from memhier.recsys.replay.storage.storage import KIND
from memhier.recsys.replay.streams import Purpose, Uniforms, mixed
from memhier.shield import shielded
from memhier.store.agreement import agree, last_commits
from memhier.store.store import Store

__all__ = ["ShardedBuffer"]

T = TypeVar("T")

_VALUE = "ranks"  # of a shard's checkpoint
_UNSAFE = (ClosedError, CorruptionError, FormatError)  # of a shard that may have changed
_STORED = f"user/{_VALUE}"
_CHECK = record({name: integer(0) for name in ("rank", "ranks", "seed", "checkpoint", "arrivals")})


@dataclass(slots=True)
class _Place:
    """Where a shard stands among the others.

    Attributes
    ----------
    checkpoint
        The number of the last checkpoint.
    arrivals
        Samples that all ranks have added.
    """

    rank: int
    ranks: int
    seed: int
    checkpoint: int = 0
    arrivals: int = 0

    def encode(self) -> bytes:
        """Return the value of a checkpoint that `decode` reads."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def decode(cls, value: bytes, where: object) -> Self:
        """Return the place that `encode` wrote."""
        found = decode_json(value, f"{where}: the value {_VALUE!r}", _CHECK)
        return cls(*(found[name] for name in cls.__slots__))


class ShardedBuffer(Closing):
    """A buffer divided among ranks, each of which has a :class:`CarouselBuffer` in a folder of its own.

    Each sample that a rank adds goes to a shard drawn at random, whichever rank adds it. So every shard, its memory and
    the batches drawn from it are uniform samples of everything that all ranks have added, even where ranks see
    different streams. A step exchanges nothing: a rank draws from its own shard.

    All ranks call `add`, `checkpoint`, `forget`, `resize` and `close` in the same order. A rank without samples adds an
    empty batch.

    Parameters
    ----------
    path
        A folder; each rank keeps its shard in ``shard-<rank>`` of it.
    group
        The ranks; by default all. Samples travel by gloo.
    seed
        0 to 2**63 - 1, the same on all ranks.
    options
        As :class:`CarouselBuffer` takes them, for each shard and the same on all ranks: of 4 ranks with ``memory=1000``
        each has 1,000 slots.

    Attributes
    ----------
    shard
        This rank's buffer, for loaders and adapters. Add to it through the whole only.

    Raises
    ------
    FileExistsError
        When there is a shard; `open` opens it.
    ValueError
        When ranks ask for different sizes.
    RuntimeError
        When another rank raises.

    Examples
    --------
    One rank here; ``torchrun`` starts more.

    >>> import tempfile
    >>> import numpy as np
    >>> import torch
    >>> from memhier.recsys import ShardedBuffer
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> with ShardedBuffer(tempfile.mkdtemp(), memory=8, schema={"x": "int64"}) as buffer:
    ...     buffer.add({"x": np.arange(100)})
    ...     batch = buffer.sample(4)
    ...     buffer.feedback(batch)
    ...     buffer.checkpoint(), len(batch)
    (2, 4)
    >>> torch.distributed.destroy_process_group()
    """

    shard: CarouselBuffer

    def __init__(self, path: str | os.PathLike[str], *, group: Any = None, seed: int = 0, **options: Any) -> None:
        messages = Messages(group)
        folder = Path(path) / f"shard-{messages.rank}"

        def make() -> CarouselBuffer:
            check_int("seed", seed, 0, 2**63 - 1)
            folder.parent.mkdir(parents=True, exist_ok=True)
            key = int(mixed(np.zeros(1, np.int64), seed)[0])  # adjacent seeds have keys far apart
            own = int(mixed(np.array([messages.rank]), key)[0] >> np.uint64(1))
            return CarouselBuffer(folder, seed=own, way_back=True, **options)

        made = _Made(folder)
        with made:
            shard = messages.together(lambda: made.keep(make()))
            self._set_up(messages, shard, _Place(messages.rank, messages.ranks, seed))
            self.checkpoint()

    def _set_up(self, messages: Messages, shard: CarouselBuffer, place: _Place) -> None:
        self._messages = messages
        self.shard = shard
        self._place = place
        self._owners = Uniforms(place.seed, Purpose.DEAL)
        self._failure: BaseException | None = None
        schema, limit = shard.schema, shard.stats()["storage_limit"]
        same = schema.text(), shard.capacity, limit, place.seed, place.arrivals
        told = messages.all(json.dumps(same))
        if set(told) != {told[0]}:
            raise ValueError(
                "expected the same schema, memory, storage and seed on all ranks, got "
                + "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(told))
            )

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, group: Any = None, **options: Any) -> Self:
        """Open the shards as of the newest checkpoint that all ranks have, whenever they ended.

        Parameters
        ----------
        path, group
            As for the buffer.
        options
            As :meth:`CarouselBuffer.open` takes them.

        Raises
        ------
        FormatError
            When the shards belong to another number of ranks, or to different trainings.
        RuntimeError
            When another rank raises.
        """
        messages = Messages(group)
        folder = Path(path) / f"shard-{messages.rank}"
        there = messages.every(partial(_ranks_there, folder))
        if others := sorted({number for number in there if number} - {messages.ranks}):
            raise FormatError(f"{path}: has the shards of {others[0]} ranks, and {messages.ranks} ranks opened it; "
                              f"start {others[0]}")  # fmt: skip
        commits = messages.every(partial(last_commits, folder, KIND, _STORED, _checkpoint_of))
        messages.every(partial(agree, folder, KIND, commits[messages.rank], commits))
        self = cls.__new__(cls)
        opened = _Made()
        with opened:
            shard = messages.together(lambda: opened.keep(CarouselBuffer.open(folder, **options)))
            place = messages.together(partial(_place_of, shard, folder, messages))
            self._set_up(messages, shard, place)
        return self

    def close(self) -> None:
        """Close this rank's shard; samples added since the last checkpoint are lost."""
        self.shard.close()

    def __len__(self) -> int:
        """Samples in memory of this rank's shard."""
        return len(self.shard)

    @property
    def arrivals(self) -> int:
        """Samples that all ranks have added."""
        return self._place.arrivals

    @shielded
    def add(self, batch: Mapping[str, Any], labels: Any = None, ids: Any = None) -> None:
        """Deal the samples of all ranks to the shards.

        Parameters
        ----------
        batch, labels, ids
            As :meth:`CarouselBuffer.add` takes them. By default ids count the samples of all ranks.

        Raises
        ------
        TypeError, ValueError
            For an unfit argument of this rank. Nothing has changed on any.
        RuntimeError
            When another rank refuses its samples. If a shard could not take its part, no rank takes more changes; open
            the buffer again.
        """
        self._check_usable()
        messages, place = self._messages, self._place
        part = Part(0, {}, None, None)

        def check() -> tuple[int, bool]:
            nonlocal part
            part = part_of(self.shard.schema, batch, labels, ids)
            return part.count, part.labels is None

        counts = messages.every(check)
        if len({bare for count, bare in counts if count}) > 1:
            raise ValueError("labels: some ranks gave some and others did not; expected all or none")
        first = place.arrivals + sum(count for count, _ in counts[: messages.rank])
        if part.ids is None:
            part.ids = np.arange(first, first + part.count)
        owners = (self._owners.at(first, part.count) * messages.ranks).astype(np.int64)
        mine = messages.exchange([part.chosen(np.flatnonzero(owners == rank)) for rank in range(messages.ranks)])
        whole = joined_parts(self.shard.schema, mine)
        place.arrivals += sum(count for count, _ in counts)
        with self._breaking():
            messages.together(lambda: self.shard.add(whole.batch, whole.labels, whole.ids))

    def sample(self, n: int, out: Batch | Mapping[str, Any] | None = None) -> Batch:
        """Draw from this rank's memory; see :meth:`CarouselBuffer.sample`."""
        return self.shard.sample(n, out)

    def empty(self, n: int) -> Batch:
        """Return a batch of n samples for `sample` to fill."""
        return self.shard.empty(n)

    def feedback(self, batch: Batch | Any, scores: Any = None, update: Mapping[str, Any] | None = None) -> None:
        """End a step of this rank; see :meth:`CarouselBuffer.feedback`."""
        self.shard.feedback(batch, scores, update)

    def refresh(self, batch: Batch | Any, update: Mapping[str, Any]) -> None:
        """Give samples of this rank new values of mutable fields; see :meth:`CarouselBuffer.refresh`."""
        self.shard.refresh(batch, update)

    @shielded
    def checkpoint(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make every shard durable; return the number of the checkpoint when all are. Making the buffer was the first.

        Ranks that end at any moment, even amid a checkpoint, go on from the newest that all of them have.

        Parameters
        ----------
        values
            By name; each rank keeps its own. The name "ranks" is taken.

        Raises
        ------
        OSError
            When a write fails. No rank takes more changes then; open the buffer to go on from the last checkpoint.
        RuntimeError
            When it failed on other ranks.
        """
        self._check_usable()
        place = replace(self._place, checkpoint=self._place.checkpoint + 1)

        def commit() -> None:
            given = {} if values is None else values
            if not isinstance(given, Mapping):
                raise TypeError(f"values={values!r}: expected bytes by name")
            if _VALUE in given:
                raise ValueError(f"values: the name {_VALUE!r} is taken; expected another")
            self.shard.checkpoint({**given, _VALUE: place.encode()})

        self._change(commit)
        self._place = place
        return place.checkpoint

    def value(self, name: str) -> bytes | None:
        """Return a value of this rank's last checkpoint, None if there is none."""
        return self.shard.value(name)

    @shielded
    def forget(self, where: Where) -> dict[str, int]:
        """Remove samples from every shard, and their bytes from SSD; see :meth:`CarouselBuffer.forget`.

        It is a checkpoint. If a rank ends meanwhile, open the buffer and call it again: some shards may have forgotten.

        Returns
        -------
        dict
            The counts of :meth:`CarouselBuffer.forget`, over all ranks.
        """
        self.checkpoint()
        told = self._change(lambda: self.shard.forget(where))
        return {name: sum(one[name] for one in told) for name in told[0]}

    @shielded
    def resize(self, *, memory: int | str | None = None, storage: int | str | None = None) -> None:
        """Change the size of the tiers of every shard, by the same arguments; see :meth:`CarouselBuffer.resize`."""
        self._check_usable()
        self._change(lambda: self.shard.resize(memory=memory, storage=storage))

    def stats(self) -> dict[str, Any]:
        """Return the numbers of :meth:`CarouselBuffer.stats` for this rank's shard, and ``arrivals_of_all``."""
        return self.shard.stats() | {"arrivals_of_all": self._place.arrivals}

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise ClosedError(
                f"a change failed on some rank ({self._failure}); open the buffer again to go on from the last "
                "checkpoint"
            ) from self._failure

    def _change(self, work: Callable[[], T]) -> list[T]:
        """Change every shard; return the results of all. Where each refuses its arguments, none has changed."""
        refusal: Exception | None = None

        def change() -> tuple[bool, T | str]:
            nonlocal refusal
            try:
                return True, work()
            except _UNSAFE:
                raise
            except (TypeError, ValueError) as error:
                refusal = error
                return False, f"{type(error).__name__}: {error}"

        with self._breaking():
            told = self._messages.every(change)
            refused = {rank: str(text) for rank, (done, text) in enumerate(told) if not done}
            if 0 < len(refused) < len(told):
                raise refusal or RuntimeError(said(refused))
        if refusal is not None:
            raise refusal
        return [cast(T, result) for _, result in told]

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Refuse later changes after an error, which may have left the shards at odds."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def __repr__(self) -> str:
        place = self._place
        return f"ShardedBuffer(rank {place.rank} of {place.ranks}, {self.shard!r})"


class _Made:
    """Closes a shard, and removes a new one's folder, unless all ranks could make theirs."""

    def __init__(self, new: Path | None = None) -> None:
        self._new = new
        self._shard: CarouselBuffer | None = None

    def keep(self, shard: CarouselBuffer) -> CarouselBuffer:
        """Take charge of a shard."""
        self._shard = shard
        return shard

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._shard is not None:
            self._shard.close()
            if self._new is not None:
                shutil.rmtree(self._new)


def _ranks_there(folder: Path) -> int:
    """Return the number of ranks that a shard was made for; 0 if there is no shard."""
    if not folder.exists():
        return 0
    with Store.open(folder, KIND) as store:
        value = store.get(_STORED)
        return 0 if value is None else _Place.decode(value, folder).ranks


def _checkpoint_of(store: Store, value: bytes | None) -> int:
    return 0 if value is None else _Place.decode(value, store.path).checkpoint


def _place_of(shard: CarouselBuffer, folder: Path, messages: Messages) -> _Place:
    """Return the place of an opened shard.

    Raises
    ------
    FormatError
        When it is no shard, or that of another rank.
    """
    value = shard.value(_VALUE)
    if value is None:
        raise FormatError(f"{folder}: holds a buffer that is no shard; open it as a CarouselBuffer")
    place = _Place.decode(value, folder)
    if place.rank != messages.rank:
        raise FormatError(f"{folder}: is the shard of rank {place.rank}, opened by rank {messages.rank}")
    return place
