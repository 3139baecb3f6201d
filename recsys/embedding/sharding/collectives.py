"""Exchanges between ranks by `torch.distributed`, on the device of the group's backend, counted in bytes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["Arriving", "Collectives", "device_of"]


def device_of(backend: str) -> torch.device:
    """Return the device that a backend takes: this process's GPU for nccl, the CPU for others."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


class Arriving:
    """Values on their way."""

    def __init__(self, values: Tensor, sent: Tensor, work: Any) -> None:
        self._values = values
        self._sent = sent  # kept until it was sent
        self._work = work

    def wait(self) -> Tensor:
        """Return the values, on the CPU, once they are there."""
        if self._work is not None:
            self._work.wait()
        return self._values.cpu()


class Collectives:
    """Exchanges of one group of ranks, which all make them in the same order. Tensors lie on the CPU on both sides.

    Attributes
    ----------
    rank, ranks
        The number of this rank in the group, and of all ranks.
    sent_bytes
        Bytes sent to other ranks so far.
    """

    def __init__(self, group: Any, device: torch.device | None = None) -> None:
        self._group = group
        self._device = device_of(dist.get_backend(group)) if device is None else device
        self.ranks: int
        self.rank: int
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes: int = 0

    def like(self) -> "Collectives":
        """Return another group of the same ranks, for another thread or for exchanges under way at the same time."""
        if self._group is None:
            return Collectives(dist.new_group(), self._device)
        ranks, backend = dist.get_process_group_ranks(self._group), dist.get_backend(self._group)
        return Collectives(dist.new_group(ranks, backend=backend, use_local_synchronization=True), self._device)

    def of_each(self, numbers: Tensor) -> Tensor:
        """Give row r of int64 [ranks, n] to rank r; return the row that each rank has for this one, [ranks, n]."""
        width = [numbers.shape[1]] * self.ranks
        return self.exchange(numbers.reshape(-1), width, width).view(numbers.shape)

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Give each rank its part of a vector, rank after rank; return the parts that all have for this one."""
        return self.start(values, sent, received, beside=False).wait()

    def start(self, values: Tensor, sent: Sequence[int], received: Sequence[int], *, beside: bool = True) -> Arriving:
        """Begin an exchange; with `beside` the caller does not wait for it."""
        there = values.contiguous().to(self._device)
        found = torch.empty(sum(received), dtype=values.dtype, device=self._device)
        self.sent_bytes += (sum(sent) - sent[self.rank]) * values.element_size()
        work = dist.all_to_all_single(found, there, [*received], [*sent], group=self._group, async_op=beside)
        return Arriving(found, there, work if beside else None)

    def all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank."""
        found = [torch.empty(len(numbers), dtype=torch.int64, device=self._device) for _ in range(self.ranks)]
        dist.all_gather(found, torch.tensor(numbers, dtype=torch.int64, device=self._device), group=self._group)
        return [one.tolist() for one in found]

    def texts(self, text: bytes) -> list[bytes]:
        """Return the text of every rank."""
        lengths = [length for (length,) in self.all([len(text)])]
        padded = [*text.ljust(max(lengths))]
        return [bytes(each[:length]) for each, length in zip(self.all(padded), lengths, strict=True)]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over ranks."""
        there = values.to(self._device, copy=True)
        dist.all_reduce(there, group=self._group)
        return there.cpu()
