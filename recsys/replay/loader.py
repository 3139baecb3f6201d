"""Batches of memory for `torch.utils.data`: a dataset and a batch sampler, and memory beside a stream.

Drawing a batch takes microseconds, so the process that trains does it; workers of a `DataLoader` only transform it. A
batch is drawn and copied a fixed number of steps ahead: 0, 1 or n workers see the same batches. A checkpoint keeps the
batches drawn for steps that have not ended, and a resumed run sees them, too: a sampler first hands out the batches
that an earlier one has drawn and no step has used.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.utils.data

from memhier.arguments import check_int
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.buffer import CarouselBuffer
from memhier.shield import shielded

__all__ = ["ReplayBatchSampler", "ReplayDataset", "beside"]


class ReplayBatchSampler(torch.utils.data.Sampler[Any]):
    """Draws a batch of memory for every step.

    Parameters
    ----------
    buffer
        Its `feedback` ends every step.
    n
        Samples in a batch. Batches that an earlier sampler has drawn and no step has used come first, as they are.
    steps
        How many batches.
    ahead
        Steps that a batch is drawn before it is used: at least the workers times their ``prefetch_factor``.

    Raises
    ------
    ValueError
        If a batch is asked for more than `ahead` steps early, or if another sampler of the buffer has begun since.

    Examples
    --------
    ``DataLoader(ReplayDataset(augment), batch_sampler=ReplayBatchSampler(buffer, 32, steps=1000, ahead=4),
    num_workers=2, collate_fn=as_it_is)``
    """

    def __init__(self, buffer: CarouselBuffer, n: int, steps: int, ahead: int = 0) -> None:
        self._buffer = buffer
        self._n = check_int("n", n, 1, 2**31 - 1, "samples")
        self._steps = check_int("steps", steps, 0, 2**62)
        self._ahead = check_int("ahead", ahead, 0, 10_000, "steps")

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        turn = self._buffer.ahead.begin()
        for index in range(self._steps):
            yield self._take(turn, index)

    @shielded
    def _take(self, turn: int, index: int) -> Batch:
        ahead = self._buffer.ahead
        if turn != ahead.turn:
            raise ValueError("another sampler of this buffer has begun; draw all samples of a step as one batch")
        if ahead.asked > self._ahead:
            raise ValueError(
                f"ahead={self._ahead}: batch {index} is asked for before {ahead.asked} steps have ended; make it "
                "at least the loader's num_workers times its prefetch_factor, and end every step with feedback()"
            )
        # The number of steps that have ended decides when a batch is drawn, not how far a loader reads ahead.
        while len(ahead) <= self._ahead and len(ahead) - ahead.asked < self._steps - index:
            ahead.put(self._buffer.sample(self._n))
        return ahead.take()


class ReplayDataset(torch.utils.data.Dataset[Any]):
    """Transforms batches of a `ReplayBatchSampler` in the workers of a loader.

    Parameters
    ----------
    transform
        From a `Batch` to anything; the batch itself by default. The loader's ``collate_fn`` has to leave that alone, as
        ``lambda batch: batch`` does.
    """

    def __init__(self, transform: Callable[[Batch], Any] | None = None) -> None:
        self._transform = transform

    def __getitems__(self, batch: Batch) -> Any:
        """Return a whole batch."""
        return batch if self._transform is None else self._transform(batch)

    def __getitem__(self, index: Any) -> Any:
        """Refuse single samples: the sampler draws whole batches."""
        raise TypeError("a ReplayDataset is read in batches: give the DataLoader batch_sampler=ReplayBatchSampler(...)")


def beside(stream: Iterable[Any], buffer: CarouselBuffer, n: int) -> Iterator[tuple[Any, Batch]]:
    """Yield every batch of a stream with one of memory, drawn when the step begins."""
    for batch in stream:
        yield batch, buffer.sample(n)
