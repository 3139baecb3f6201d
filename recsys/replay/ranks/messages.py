"""Python objects that ranks send each other, by `torch.distributed`."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist

__all__ = ["Messages", "said"]

T = TypeVar("T")

_HEAD = 4096  # bytes of a message that are sent first; most messages have no more
_NUMBER = 8


class Messages:
    """Exchanges of the ranks of a group, which all make them in the same order.

    Attributes
    ----------
    rank, ranks
        The number of this rank in the group, and of all ranks.
    """

    def __init__(self, group: Any) -> None:
        if dist.get_backend(group) != "gloo":  # samples lie on the CPU
            group = dist.new_group(None if group is None else dist.get_process_group_ranks(group), backend="gloo")
        self._group = group
        self.rank: int
        self.ranks: int
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def all(self, value: T) -> list[T]:
        """Return the value of every rank."""
        data, heads = _packed(value), [_head() for _ in range(self.ranks)]
        dist.all_gather(heads, _head(data), group=self._group)
        found: list[Any] = []
        for rank, head in enumerate(heads):
            whole = data if rank == self.rank else _rest_of(head)
            if len(whole) > _HEAD:
                dist.broadcast(whole, group=self._group, group_src=rank)
            found.append(_unpacked(whole))
        return found

    def to_owner(self, value: T, owner: int) -> list[T]:
        """Give a value to one rank; return those of all there, and nothing elsewhere."""
        data = _packed(value)
        if self.rank != owner:
            dist.gather(_head(data), group=self._group, group_dst=owner)
            if len(data) > _HEAD:
                dist.send(data, group=self._group, group_dst=owner)
            return []
        heads = [_head() for _ in range(self.ranks)]
        dist.gather(_head(data), heads, group=self._group, group_dst=owner)
        found: list[Any] = []
        for rank, head in enumerate(heads):
            whole = data if rank == owner else _rest_of(head)
            if rank != owner and len(whole) > _HEAD:
                dist.recv(whole, group=self._group, group_src=rank)
            found.append(_unpacked(whole))
        return found

    def from_owner(self, values: list[T], owner: int) -> T:
        """Return the value that one rank has for this one; `values` counts there only."""
        head = _head()
        if self.rank != owner:
            dist.scatter(head, group=self._group, group_src=owner)
            whole = _rest_of(head)
            if len(whole) > _HEAD:
                dist.recv(whole, group=self._group, group_src=owner)
            answer: T = _unpacked(whole)
            return answer
        data = [_packed(value) for value in values]
        dist.scatter(head, [_head(one) for one in data], group=self._group, group_src=owner)
        for rank, one in enumerate(data):
            if rank != owner and len(one) > _HEAD:
                dist.send(one, group=self._group, group_dst=rank)
        return values[owner]

    def exchange(self, values: list[T]) -> list[T]:
        """Give value r to rank r; return the values that all ranks have for this one."""
        sent = [_packed(value) for value in values]
        sizes = torch.tensor([len(one) for one in sent])
        received = torch.empty_like(sizes)
        dist.all_to_all_single(received, sizes, group=self._group)
        found = torch.empty(int(received.sum()), dtype=torch.uint8)
        dist.all_to_all_single(found, torch.cat(sent), received.tolist(), sizes.tolist(), group=self._group)
        return [_unpacked(part) for part in torch.split_with_sizes(found, received.tolist())]

    def every(self, work: Callable[[], T]) -> list[T]:
        """Do work on every rank; return the results of all, or raise on all when it fails on some.

        Raises
        ------
        RuntimeError
            When it failed on other ranks only.
        """
        failure: Exception | None = None
        mine: tuple[str, Any]
        try:
            mine = "", work()
        except Exception as error:
            failure, mine = error, (f"{type(error).__name__}: {error}", None)
        told: list[tuple[str, Any]] = self.all(mine)
        if failure is not None:
            raise failure
        if failed := {rank: one for rank, (one, _) in enumerate(told) if one}:
            raise RuntimeError(said(failed))
        return [result for _, result in told]

    def together(self, work: Callable[[], T]) -> T:
        """Do work on every rank; return this rank's result, which no other rank sees. Raises as `every` does."""
        kept: list[T] = []
        self.every(lambda: kept.append(work()))
        return kept[0]


def _packed(value: Any) -> torch.Tensor:
    """Return a value as bytes, behind their number."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    packed = np.empty(_NUMBER + len(data), np.uint8)
    packed[:_NUMBER] = np.frombuffer(len(packed).to_bytes(_NUMBER, "little"), np.uint8)
    packed[_NUMBER:] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(packed)


def _unpacked(data: torch.Tensor) -> Any:
    """Return the value of `_packed`."""
    packed: Any = data.numpy()
    return pickle.loads(packed[_NUMBER:])


def _head(data: torch.Tensor | None = None) -> torch.Tensor:
    """Return the part of a message that is sent first, which is all of a short one; or room for it."""
    head = torch.zeros(_HEAD, dtype=torch.uint8)
    if data is not None:
        head[: len(data)] = data[:_HEAD]
    return head


def _rest_of(head: torch.Tensor) -> torch.Tensor:
    """Return a short message, or room for a long one."""
    size = int.from_bytes(head[:_NUMBER].numpy().tobytes(), "little")
    return head[:size] if size <= _HEAD else torch.empty(size, dtype=torch.uint8)


def said(failed: dict[int, str]) -> str:
    """Return the failures of other ranks as a message."""
    return "; ".join(f"rank {rank}: {one}" for rank, one in failed.items())
