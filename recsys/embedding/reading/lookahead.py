"""lookahead: a loader read ahead of the training, so that tables know which rows to fetch, keep and evict.

The idea is Bagpipe's (arXiv 2202.12429): the next batches are known, so no policy has to guess. Bagpipe keeps a row
while its next use lies within a fixed number of batches; here Belady's rule at a fixed capacity bounds DRAM.
"""

import base64
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from memhier.arguments import check_int
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.reading.ahead import Epoch, Limits, ReadAhead
from memhier.recsys.embedding.reading.epoch_start import RandomStates, start_epoch
from memhier.recsys.embedding.reading.read_modules import ReadModules
from memhier.recsys.embedding.reading.shared_loader import SharedLoader
from memhier.recsys.embedding.sharding.sharded import ShardedEmbeddingBagCollection
from memhier.shield import uninterrupted

__all__ = ["Lookahead", "lookahead"]

_WINDOW_MAX = 2**20


def lookahead(
    loader: Iterable[Any] | SharedLoader,
    model: nn.Module,
    ids: Callable[[Any], Any],
    *,
    window: int | Literal["auto"] | None = "auto",
    prefetch: int = 2,
) -> "Lookahead":
    """Read a loader ahead of the training, and its rows with it.

    Training on these batches gives the same bits as on the loader itself, and waits less. Batches come in the loader's
    order, from a thread that reads them ahead. A loader that draws random numbers from torch's global generator in this
    process while it fetches therefore draws them earlier. While every row of the tables has a slot in DRAM, and none
    had to be read for a while, batches pass as they are, and only a slow loader is read ahead.

    Parameters
    ----------
    loader
        Any iterable of batches; a DataLoader with workers and any sampler; or a :class:`SharedLoader`.
    model
        The module of tables, or a model with one or several such modules.
    ids
        Returns the argument, or a tuple of the arguments, that the training step for a batch gives to the module of
        tables; or a list of these, if it looks up several times. A look-up may also take part of the ids of one. For a
        model with several such modules: a dict with these, by the names of the modules in ``model.named_modules()``.
        :func:`trace_ids` makes such a function from one step. It is not called while every row has a slot and none has
        to be read.
    window
        Batches known beyond those being fetched. ``"auto"`` grows the window until every row in DRAM is known to be
        needed again, or until the waiting batches fill the sixteenth of the tables' DRAM that is set aside for them. A
        number, or None for all batches to the loader's end, holds at any size, even beyond the budget. 0 knows and
        fetches nothing ahead. Ranks read equally far: the largest of their first batches then sets ``"auto"``.
    prefetch
        Batches whose rows are fetched ahead, as far as DRAM has room.

    Returns
    -------
    Lookahead
        An iterable of the loader's batches.

    Raises
    ------
    ValueError, TypeError
        For an unfit argument, or a model without a module of tables; one over ranks has to be the only one.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, lookahead
    >>> batches = [torch.tensor([[1, 2]]), torch.tensor([[2, 3]])]
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     for batch in lookahead(batches, bag, ids=lambda batch: batch):
    ...         bag(batch).sum().backward()
    ...     bag.stats()["first_touches"]
    3
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, TableModule)}
    if not modules:
        raise ValueError("model: expected a module of tables, or a model with one, found none")
    if len(modules) > 1 and any(isinstance(module, ShardedEmbeddingBagCollection) for module in modules.values()):
        raise ValueError(f"model: expected one module of tables over ranks alone, found {sorted(modules)}")
    if window not in (None, "auto"):
        check_int("window", window, 0, _WINDOW_MAX, "batches")
    check_int("prefetch", prefetch, 1, 512, "batches")
    return Lookahead(loader, ReadModules(modules, ids), window, prefetch)


class Lookahead:
    """Yields a loader's batches, epoch by epoch; see :func:`lookahead`.

    A new epoch ends the one before. :class:`memhier.Lookahead` is another class: it plans loads and evictions for
    batches of keys, without a loader.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, lookahead
    >>> batches = [torch.tensor([[row]]) for row in range(4)]
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     ahead = lookahead(batches, bag, ids=lambda batch: batch)
    ...     first = next(iter(ahead))
    ...     state = ahead.state_dict()  # bag.checkpoint(state) keeps it, and bag.extra returns it
    ...     ahead.load_state_dict(state)
    ...     [batch.item() for batch in ahead]
    [1, 2, 3]
    """

    def __init__(
        self,
        loader: Iterable[Any] | SharedLoader,
        modules: ReadModules,
        window: int | Literal["auto"] | None,
        prefetch: int,
    ) -> None:
        modules.check_open()
        self._loader = loader
        self._modules = modules
        self._window = window
        self._prefetch = prefetch
        self._epoch: ReadAhead | None = None
        self._random: RandomStates | None = None
        self._skip = 0

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._modules.begin_epoch(_nothing)  # of another loop, which ranks have to leave before they read
        self._modules.map_ahead(torch.is_grad_enabled())
        skipped, self._skip = self._skip, 0
        resumed, self._random = self._random if skipped else None, None
        start = self._loader.start if isinstance(self._loader, SharedLoader) else partial(start_epoch, self._loader)
        batches, self._random = start(skipped, resumed)
        begin = partial(ReadAhead, batches, self._modules, self._limits(), skipped)
        self._epoch = uninterrupted(begin, ReadAhead.close)
        return Epoch.of(self._epoch)

    @property
    def position(self) -> int:
        """The number of batches of this epoch handed out."""
        return self._skip if self._epoch is None else self._epoch.position

    def stats(self) -> dict[str, float]:
        """Return plain numbers of this epoch.

        ``batches`` handed out; ``window``, the mean number of batches known ahead when a batch was fetched; ``wait_s``,
        seconds that the training waited here, for the loader or for rows; ``loader_s``, seconds that the thread waited
        for the loader; ``bytes`` of batches and keys that wait here.
        """
        return {} if self._epoch is None else self._epoch.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the loader as JSON values, for :meth:`TableModule.checkpoint`."""
        state: dict[str, Any] = {"position": self.position}
        if self._random is not None:
            texts = [
                None if part is None else base64.b64encode(part.numpy().tobytes()).decode() for part in self._random
            ]
            state |= {"random": texts[0], "generator": texts[1]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next epoch at the position `state`, with the same order of batches.

        The batches before that position are read and dropped. Of the states of several ranks, as
        `ShardedEmbeddingBagCollection.extra` has them for another number of ranks, that of the first counts: all ranks
        begin with its random numbers, and so in one order.
        """
        state = state["shards"][0] if "shards" in state else state
        self.close()
        self._epoch = None
        self._skip = check_int("state['position']", state["position"], 0, 2**62)
        if "random" in state:
            parts = [None if state[name] is None else _bytes(state[name]) for name in ("random", "generator")]
            assert parts[0] is not None
            self._random = (parts[0], parts[1])

    def close(self) -> None:
        """End the epoch that is under way, and drop the batches read ahead."""
        if self._epoch is not None:
            self._epoch.close()

    def _limits(self) -> Limits:
        if self._window == "auto":
            return Limits(_WINDOW_MAX, self._modules.window_bytes, self._prefetch, grows=True)
        return Limits(_WINDOW_MAX if self._window is None else self._window, None, self._prefetch, grows=False)


def _nothing() -> None:
    """End no epoch."""


def _bytes(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())
