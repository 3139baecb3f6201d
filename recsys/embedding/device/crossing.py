"""Crossing: the output of a look-up goes to the device of the model, and its gradient comes back, in one copy each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memhier.recsys.embedding.device.link import Arrival, DeviceLink

__all__ = ["Crossing", "refuse_graph"]


class Crossing:
    """One look-up between the CPU, where rows are summed and trained, and a device.

    A backward pass does not wait for gradients that come over: `arrival` is waited for before they are read.

    Attributes
    ----------
    arrival
        Of the gradient; None before the backward pass.
    """

    def __init__(self, link: DeviceLink) -> None:
        self.link = link
        self.arrival: Arrival | None = None
        self._made: Tensor | None = None

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return float32 on the CPU for an output, which then goes over without another copy."""
        self._made = self.link.empty(torch.Size(shape).numel()).view(shape)
        return self._made

    def over(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values on the device; autograd comes back with their gradients."""
        found: tuple[Tensor, ...] = _Over.apply(self, *values)  # type: ignore[no-untyped-call]
        return found

    def sent(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return values of one type on the device, by one copy; without autograd."""
        return _parts(self.link.send(self._packed(values)), [value.shape for value in values])

    def _packed(self, values: Sequence[Tensor]) -> Tensor:
        """Return values one after the other, where the device can copy them from."""
        made, self._made = self._made, None
        if made is not None and len(values) == 1 and made.data_ptr() == values[0].data_ptr():
            return made.view(-1)
        whole = self.link.empty(sum(value.numel() for value in values), values[0].dtype)
        for part, value in zip(_parts(whole, [value.shape for value in values]), values, strict=True):
            part.copy_(value)
        return whole


class _Over(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.crossing = crossing
        return tuple(crossing.sent(values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        there = [gradient for gradient in gradients if gradient is not None]
        for gradient in there:
            refuse_graph(gradient)
        if not there:
            return None, *gradients
        # Always a new tensor: others may have the gradient as well, and change it amid the copy.
        flat = torch.cat([gradient.reshape(-1) for gradient in there])
        whole = ctx.crossing.link.empty(len(flat))
        arrival = ctx.crossing.arrival = Arrival(ctx.crossing.link.fetch(flat, whole))
        if torch.is_anomaly_enabled():
            arrival.wait()  # it looks for NaN in the gradients
        parts = iter(_parts(whole, [gradient.shape for gradient in there]))
        return None, *(None if gradient is None else next(parts) for gradient in gradients)


def _parts(whole: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return tensors of given shapes in the memory of `whole`; autograd takes none of them for a view of it."""
    found, begin = [], 0
    for shape in shapes:
        strides = torch.empty(shape, device="meta").stride()
        found.append(whole.new_empty(0).set_(whole.untyped_storage(), whole.storage_offset() + begin, shape, strides))
        begin += shape.numel()
    return found


def refuse_graph(gradient: Tensor) -> None:
    """Raise RuntimeError for a gradient of a backward pass that makes a graph."""
    if gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) through a look-up: there are no gradients of gradients of rows; take "
            "torch.autograd.grad(..., create_graph=True) with respect to the output of the tables"
        )
