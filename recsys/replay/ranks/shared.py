"""SharedBuffer: one replay buffer that the trainers of a machine use together."""

import socket
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_int, check_range
from memhier.closing import Closing
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.buffer import CarouselBuffer, Where
from memhier.recsys.replay.policies import as_floats
from memhier.recsys.replay.ranks.messages import Messages, said
from memhier.recsys.replay.ranks.parts import joined_arrays, joined_parts, part_of
from memhier.recsys.replay.reader import MemoryReader
from memhier.recsys.replay.schema import check_update

__all__ = ["SharedBuffer"]

Ints = NDArray[np.int64]


class SharedBuffer(Closing):
    """One buffer for all trainers of a machine: they add to it, draw from it and end its steps together.

    One rank has the buffer. The others send it their samples, and read memory in place. Batches of all ranks are those
    that one trainer would draw with the same calls for all: samples are distinct over the ranks, and every bit is the
    same for any number of ranks. Memory is a uniform sample of everything that all ranks have added, as
    :class:`CarouselBuffer` says.

    All ranks make the same calls in the same order. A rank without samples adds an empty batch. A call that some rank
    refuses raises on all, and changes nothing.

    Parameters
    ----------
    buffer
        On one rank the buffer, which stays its own to close; None on all others.
    group
        The ranks that share it, all on one machine; by default all. Objects travel by gloo.

    Raises
    ------
    ValueError
        Unless exactly one rank gives a buffer, and all are on one machine.

    Examples
    --------
    One rank here; ``torchrun`` starts more.

    >>> import tempfile
    >>> import numpy as np
    >>> import torch
    >>> from memhier.recsys import CarouselBuffer, SharedBuffer
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> first = torch.distributed.get_rank() == 0
    >>> path = tempfile.mkdtemp() + "/replay"
    >>> own = CarouselBuffer(path, memory=8, schema={"x": "int64"}) if first else None
    >>> with SharedBuffer(own) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     batch = buffer.sample(4)
    ...     buffer.feedback(batch)
    ...     len(batch), len(buffer)
    (4, 8)
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, buffer: CarouselBuffer | None, group: Any = None) -> None:
        self._messages = Messages(group)
        there = self._messages.all((buffer is not None, socket.gethostname()))
        if len({host for _, host in there}) > 1:
            raise ValueError(f"group: its ranks are on the machines {[host for _, host in there]}; expected one, as "
                             "memory is read in place; ShardedBuffer serves several")  # fmt: skip
        owners = [rank for rank, (owns, _) in enumerate(there) if owns]
        if len(owners) != 1:
            raise ValueError(f"buffer: ranks {owners} gave one; expected a buffer on one rank and None on all others")
        self._buffer = buffer
        self._owner = owners[0]
        self._reader: MemoryReader = self._ask(None, lambda own, _: own.reader())
        self._schema = self._reader.schema

    def close(self) -> None:
        """Close the buffer, on the rank that has it; samples added since the last checkpoint are lost."""
        if self._buffer is not None:
            self._buffer.close()

    def _ask(self, request: Any, work: Callable[[CarouselBuffer, list[Any]], Any]) -> Any:
        """Send a request to the owner; return the result of its work with the requests of all ranks."""
        return self._ask_each(lambda: request, lambda own, requests: [work(own, requests)] * len(requests))

    def _ask_each(self, request: Callable[[], Any], work: Callable[[CarouselBuffer, list[Any]], list[Any]]) -> Any:
        """Send a checked request to the owner; return this rank's part of the result of its work.

        An error of the check raises on its rank, as does one of the work on the owner; others name the rank.
        """
        messages, own, asked, failure = self._messages, None, None, None
        try:
            own = request()
        except Exception as error:
            failure = error
        asked = messages.to_owner((_told(failure), own), self._owner)
        answers: list[Any] = []
        if self._buffer is not None:
            refused = {rank: told for rank, (told, _) in enumerate(asked) if told}
            answers = [(refused, None)] * messages.ranks
            if not refused:
                try:
                    answers = [({}, one) for one in work(self._buffer, [one for _, one in asked])]
                except Exception as error:
                    failure = error
                    answers = [({self._owner: _told(error)}, None)] * messages.ranks
        refused, answer = messages.from_owner(answers, self._owner)
        if failure is not None:
            raise failure
        if refused:
            raise RuntimeError(f"{said(refused)}; the call has changed nothing on other ranks")
        return answer

    def __len__(self) -> int:
        """Samples in memory."""
        return int(self._ask(None, lambda own, _: len(own)))

    def add(self, batch: Mapping[str, Any], labels: Any = None, ids: Any = None) -> Ints:
        """Add the samples of all ranks, in the order of ranks; see :meth:`CarouselBuffer.add`.

        Returns
        -------
        numpy.ndarray
            int64 [n]: the slot of memory of each sample of this rank now, -1 for none.

        Raises
        ------
        TypeError, ValueError
            For an unfit argument of this rank, or one that does not fit those of the others.
        RuntimeError
            When another rank raises.
        """

        def work(own: CarouselBuffer, parts: list[Any]) -> list[Any]:
            whole = joined_parts(self._schema, parts)
            slots = own.add(whole.batch, whole.labels, whole.ids)
            return np.split(slots, np.cumsum([part.count for part in parts])[:-1])

        found: Ints = self._ask_each(lambda: part_of(self._schema, batch, labels, ids), work)
        return found

    def sample(self, n: int, out: Batch | Mapping[str, Any] | None = None) -> Batch:
        """Draw samples that are distinct over all ranks; see :meth:`CarouselBuffer.sample`.

        If memory holds fewer than all ranks ask for, each gets its share.
        """

        def work(own: CarouselBuffer, counts: list[Any]) -> list[Any]:
            return np.split(own.draw(sum(counts)), np.cumsum(_shares(counts, len(own)))[:-1])

        slots: Ints = self._ask_each(lambda: check_int("n", n, 0, 2**31 - 1, "samples"), work)
        return self._reader.read(slots, out)

    def empty(self, n: int) -> Batch:
        """Return a batch of n samples for `sample` to fill."""
        return Batch.empty(self._schema, n)

    def feedback(self, batch: Batch | Any, scores: Any = None, update: Mapping[str, Any] | None = None) -> None:
        """End a step of all ranks, with the batch, the scores and the new values of each.

        See :meth:`CarouselBuffer.feedback`.
        """
        self._use(batch, scores, update, lambda own, used, scores, values: own.feedback(used, scores, values))

    def refresh(self, batch: Batch | Any, update: Mapping[str, Any]) -> None:
        """Give samples of all ranks new values of mutable fields; see :meth:`CarouselBuffer.refresh`."""
        self._use(batch, None, update, lambda own, used, _, values: own.refresh(used, values or {}))

    def _use(self, batch: Any, scores: Any, update: Any, work: Callable[..., None]) -> None:
        def request() -> tuple[Any, ...]:
            slots, ids = self._used(batch)
            values = None if update is None else check_update(self._schema, update, len(slots))
            return slots, ids, None if scores is None else as_floats(scores), values

        def joined(own: CarouselBuffer, asked: list[Any]) -> list[Any]:
            slots, ids, marks, values = zip(*asked, strict=True)
            used = Batch({}, np.full(sum(map(len, slots)), -1), np.concatenate(ids), np.concatenate(slots))
            some = [number for number, mine in enumerate(slots) if len(mine)] or [0]
            names = {name for one in values for name in one or ()}
            new = {
                name: joined_arrays(f"update[{name!r}]", [(values[one] or {}).get(name) for one in some])
                for name in sorted(names)
            }
            work(own, used, joined_arrays("scores", [marks[one] for one in some]), new or None)
            return [None] * len(asked)

        self._ask_each(request, joined)

    def _used(self, batch: Any) -> tuple[Ints, Ints]:
        if isinstance(batch, Batch):
            return batch.slots, batch.ids
        slots = as_ints("batch", batch).reshape(-1)
        check_range("batch", slots, len(self._reader), "a slot of memory")
        return slots, self._reader.ids()[slots]

    def checkpoint(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make everything durable, with the values of the rank that has the buffer.

        See :meth:`CarouselBuffer.checkpoint`.
        """
        return int(self._ask(None, lambda own, _: own.checkpoint(values)))

    def value(self, name: str) -> bytes | None:
        """Return a value of the last checkpoint, None if there is none."""
        found: bytes | None = self._ask(None, lambda own, _: own.value(name))
        return found

    def forget(self, where: Where) -> dict[str, int]:
        """Remove samples, as the rank that has the buffer selects them; see :meth:`CarouselBuffer.forget`."""
        found: dict[str, int] = self._ask(None, lambda own, _: own.forget(where))
        return found

    def resize(self, *, memory: int | str | None = None, storage: int | str | None = None) -> None:
        """Change the size of the tiers; see :meth:`CarouselBuffer.resize`."""

        def work(own: CarouselBuffer, _: list[Any]) -> Any:
            own.resize(memory=memory, storage=storage)
            return own.reader()

        self._reader = self._ask(None, work)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers; see :meth:`CarouselBuffer.stats`."""
        found: dict[str, Any] = self._ask(None, lambda own, _: own.stats())
        return found

    def __repr__(self) -> str:
        return f"SharedBuffer({self._messages.ranks} ranks, buffer on rank {self._owner})"


def _told(failure: Exception | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}"


def _shares(counts: list[int], there: int) -> list[int]:
    """Divide the samples of memory as ranks ask for them; ranks that ask for as many differ by one at most."""
    asked = sum(counts)
    if asked <= there:
        return counts
    ends = np.cumsum([0, *counts]) * there // asked
    found: list[int] = np.diff(ends).tolist()
    return found
