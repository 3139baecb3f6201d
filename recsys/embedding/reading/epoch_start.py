"""The start of an epoch of a loader, at any batch of it, in the order that the epoch had."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

__all__ = ["RandomStates", "start_epoch"]

RandomStates = tuple[torch.Tensor, torch.Tensor | None]
"""The states of torch's global generator and of the loader's own at the start of an epoch."""


def start_epoch(loader: Iterable[Any], skipped: int, random: RandomStates | None) -> tuple[Iterator[Any], RandomStates]:
    """Begin an epoch after `skipped` batches of it, which are read and dropped.

    With `random` the loader draws as in the epoch that began with these states. Return the batches, and the states that
    this epoch began with.
    """
    generator, kept = _generator(loader), torch.get_rng_state()
    if random is not None:
        torch.set_rng_state(random[0])
        if generator is not None and random[1] is not None:
            generator.set_state(random[1])
    begun = (torch.get_rng_state(), None if generator is None else generator.get_state())
    try:
        batches = iter(loader)
        # A sampler may draw its seed with the first batch: here, before the training draws anything.
        first = [*islice(batches, skipped, skipped + 1)]
    finally:
        if random is not None:
            torch.set_rng_state(kept)
    return _chain(first, batches), begun


def _chain(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from first
    yield from rest


def _generator(loader: Any) -> torch.Generator | None:
    batches = getattr(loader, "batch_sampler", None)
    for holder in (getattr(loader, "sampler", None), getattr(batches, "sampler", None), batches, loader):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None
