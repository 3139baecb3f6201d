"""A forecast of the DRAM that a training needs, from its loader's ids, before it starts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memhier.planning.simulation import Simulation, simulate
from memhier.recsys.embedding.collection import FeatureParser
from memhier.recsys.embedding.optimizers import SGD, SparseOptimizer
from memhier.recsys.embedding.tables import Ints, distinct_rows
from memhier.recsys.embedding.vocabularies import Vocabularies

__all__ = ["forecast", "save_trace"]

# DRAM of a row beside its floats: the maps of tier and policy, and flags.
_BESIDE_BYTES = 150


def forecast(
    loader: Iterable[Any],
    ids: Callable[[Any], Any],
    tables: Sequence[Any],
    *,
    dram: int | str,
    optimizer: SparseOptimizer | None = None,
    **options: Any,
) -> Simulation:
    """Run a loader's ids through a cache of rows, without training.

    Parameters
    ----------
    loader, ids
        As in :func:`memhier.recsys.lookahead`.
    tables, optimizer
        As in :class:`memhier.recsys.EmbeddingBagCollection`.
    dram
        Bytes for rows, with the maps and flags of each.
    options
        As in :func:`memhier.planning.simulation.simulate`: ``policy``, ``lookahead``, ``device``, ``compute_s``,
        ``ahead``.

    Returns
    -------
    Simulation
        As :func:`memhier.simulate` returns it.

    Examples
    --------
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagConfig, forecast
    >>> tables = [EmbeddingBagConfig(name="a", num_embeddings=1000, embedding_dim=32)]
    >>> batches = [torch.arange(start, start + 50)[:, None] for start in (0, 50, 0)]
    >>> forecast(batches, lambda batch: batch, tables, dram="64KiB").reads
    100
    """
    rule = SGD() if optimizer is None else optimizer
    parser = FeatureParser(tables)
    width = max(spec.dim + rule.state_width(spec.dim) for spec in parser.specs)
    return simulate(_keys(loader, ids, parser), dram=dram, row_bytes=4 * width + _BESIDE_BYTES, dirty=True, **options)


def save_trace(loader: Iterable[Any], ids: Callable[[Any], Any], tables: Sequence[Any], path: str | Path) -> int:
    """Write the keys that a loader's batches need as a .npy file for ``memhier simulate``; return their number.

    The file holds int64 [n]: the distinct keys of each batch. Keys number the rows of all tables, one table after the
    other.

    Parameters
    ----------
    loader, ids, tables
        As in :func:`forecast`.
    path
        The file to write, whose name ends in ``.npy``.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagConfig, save_trace
    >>> tables = [EmbeddingBagConfig(name=name, num_embeddings=1000, embedding_dim=32) for name in ("a", "b")]
    >>> path = tempfile.mkdtemp() + "/trace.npy"
    >>> save_trace([torch.tensor([[1, 1], [2, 1]])], lambda batch: batch, tables, path)
    3
    >>> np.load(path).tolist()
    [1, 2, 1001]
    """
    keys = [*_keys(loader, ids, FeatureParser(tables))]
    trace = np.concatenate(keys) if keys else np.empty(0, np.int64)
    np.save(path, trace)
    return len(trace)


def _keys(loader: Iterable[Any], ids: Callable[[Any], Any], parser: FeatureParser) -> Iterator[Ints]:
    bases = np.cumsum([0, *(spec.rows for spec in parser.specs)])
    vocabularies = Vocabularies(parser.specs)
    for batch in loader:
        found = ids(batch)
        bags = parser.bags_of(*(found if isinstance(found, tuple) else (found,)))
        some = [bag.indices.numpy() for bag in bags]
        mapped = vocabularies.map([some])
        vocabularies.begin(mapped)
        some = mapped.rows
        for table, wanted in enumerate(some):
            parser.check_ids(table, wanted)
        yield distinct_rows(some, bases, in_order=False).keys
