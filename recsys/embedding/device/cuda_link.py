"""CudaLink: copies from page-locked memory to a CUDA device and back, each direction on a stream of its own."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["CudaLink"]


class CudaLink:
    """The link of a CUDA device.

    torch keeps page-locked memory that is let go and gives it out again, but not before the copies from it and to it
    have ended. So a copy may be under way while the next values are made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a page-locked vector."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def send(self, values: Tensor) -> Tensor:
        """Return values of :meth:`empty` on the device; only the next work of the current stream waits for them."""
        now = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._out):
            there = values.to(self.device, non_blocking=True)
        now.wait_stream(self._out)
        there.record_stream(now)  # its memory goes back once this stream has used it
        return there

    def fetch(self, values: Tensor, into: Tensor) -> Callable[[], None]:
        """Begin to copy values, as the current stream leaves them; the host does not wait."""
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            into.copy_(values, non_blocking=True)
            wait: Callable[[], None] = self._back.record_event().synchronize
        values.record_stream(self._back)  # its memory goes back once the copy has ended
        return wait
