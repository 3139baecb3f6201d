"""A link to a device that is none: it makes mistakes visible that a real device would show now and then."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

__all__ = ["FakeLink", "on_fake_device"]


class FakeLink:
    """Copies between two parts of DRAM.

    What comes back is NaN until it was waited for. A source that changes after it was sent is an error, and so is one
    from memory that the device could not copy from.

    Attributes
    ----------
    sent, fetched
        Bytes of each copy.
    under_way
        Copies back that nobody waited for.
    """

    def __init__(self, result: str = "cpu") -> None:
        self.device = torch.device("cpu")
        self.sent: list[int] = []
        self.fetched: list[int] = []
        self.under_way = 0
        self._result = result
        self._made: set[int] = set()
        self._sources: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        found = torch.full((count,), torch.nan if dtype.is_floating_point else -(2**62), dtype=dtype)
        self._made.add(found.untyped_storage().data_ptr())
        self._kept.append(found)  # no other memory gets its address
        return found

    def send(self, values: Tensor) -> Tensor:
        self._check(values)
        self.sent.append(values.nbytes)
        self._sources.append((values, values.clone()))
        return values.to(self._result, copy=True)

    def fetch(self, values: Tensor, into: Tensor) -> Callable[[], None]:
        self._check(into)
        assert values.shape == into.shape
        assert values.is_contiguous()
        self.fetched.append(into.nbytes)
        self.under_way += 1
        there = torch.zeros_like(into) if values.is_meta else values.detach().clone()

        def wait() -> None:
            self.under_way -= 1
            assert values.is_meta or same_bytes(values, there), "a source changed amid its copy"
            into.copy_(there)

        return wait

    def check_sources(self) -> None:
        """Check that no source changed amid its copy."""
        for values, then in self._sources:
            assert same_bytes(values, then)

    def _check(self, values: Tensor) -> None:
        assert values.untyped_storage().data_ptr() in self._made
        assert values.is_contiguous()
        assert values.dim() == 1
        self.check_sources()


def same_bytes(values: Tensor, others: Tensor) -> bool:
    return torch.equal(values.view(torch.uint8), others.view(torch.uint8))


def on_fake_device(module: nn.Module, **options: Any) -> FakeLink:
    """Move a module, or a model with one, to a device that is none; return the link."""
    link = FakeLink(**options)
    with (
        mock.patch("memhier.recsys.embedding.module.link_of", return_value=link),
        mock.patch("memhier.recsys.embedding.module.check_device"),
    ):
        module.to("meta")
    return link
