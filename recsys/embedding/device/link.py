"""DeviceLink: the copies that a module of tables makes to a device and back; and the device that a user asks for."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from memhier.recsys.embedding.device.cuda_link import CudaLink

__all__ = ["Arrival", "DeviceLink", "check_device", "link_of"]


class DeviceLink(Protocol):
    """Copies to a device and back, beside its other work."""

    @property
    def device(self) -> torch.device:
        """The device."""

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a vector on the CPU, from where the device copies and to where."""

    def send(self, values: Tensor) -> Tensor:
        """Return values of :meth:`empty` on the device, for the work that follows; they may not change any more."""

    def fetch(self, values: Tensor, into: Tensor) -> Callable[[], None]:
        """Begin to copy values of the device, as the work so far leaves them, into those of :meth:`empty`.

        They are there once the function that is returned was called.
        """


class Arrival:
    """Values on their way from a device.

    They are undefined until :meth:`wait` was called.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    @property
    def is_coming(self) -> bool:
        """Whether nobody has waited for them."""
        return self._wait is not None

    def wait(self) -> None:
        """Wait until they are there."""
        if self._wait is not None:
            self._wait()
            self._wait = None


def check_device(device: torch.device, name: str) -> None:
    """Raise ValueError for a device that tables serve no model on; `name` is the module or argument."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name}: its rows stay in DRAM and on SSD, and outputs go to the CPU or to CUDA; {device} was asked for: "
            f"move the dense part alone, and the output of the tables, such as tables(ids).to({str(device)!r})"
        )


def link_of(device: torch.device) -> DeviceLink | None:
    """Return a link to a device that :func:`check_device` takes; None for the CPU."""
    return None if device.type == "cpu" else CudaLink(device)
