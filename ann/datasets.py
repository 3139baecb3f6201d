"""An index on SSD for a Hugging Face data set, in the place of ``add_faiss_index`` (extra ``datasets``).

Examples
--------
>>> import numpy as np, tempfile
>>> from datasets import Dataset
>>> from memhier.ann.datasets import add_zoom_index
>>> vectors = np.random.default_rng(0).normal(size=(500, 8)).astype("float32")
>>> dataset = Dataset.from_dict({"text": [f"row {row}" for row in range(500)], "embedding": vectors})
>>> index = add_zoom_index(dataset, "embedding", path=tempfile.mkdtemp() + "/index")
>>> scores, examples = dataset.get_nearest_examples("embedding", vectors[7], k=2)
>>> examples["text"][0]
'row 7'
"""

import os
from typing import Any, Self

from memhier.ann.zoom import ZoomIndex
from memhier.lazy import extra_for

with extra_for(__name__):
    from datasets import Dataset
    from datasets.search import BaseIndex, BatchedSearchResults, SearchResults

__all__ = ["ZoomDatasetIndex", "add_zoom_index", "load_zoom_index"]


class ZoomDatasetIndex(BaseIndex):
    """An index of a data set, by the numbers of its rows.

    The ``search`` and ``get_nearest_examples`` of a data set, and their forms for batches, hand their options on to
    :meth:`memhier.ann.ZoomIndex.search`: ``recall=``, ``where=`` and so on. Scores are distances: the smallest is best.

    Parameters
    ----------
    index
        Built from the column, with the numbers of the rows as ids.

    Attributes
    ----------
    index
        The same.
    """

    def __init__(self, index: ZoomIndex) -> None:
        self.index = index

    def search(self, query: Any, k: int = 10, **options: Any) -> SearchResults:
        """Return scores and row numbers of the rows nearest to one query, ``[d]`` or ``[1, d]``."""
        found = self.search_batch(query.reshape(1, -1) if getattr(query, "ndim", 1) == 2 else [query], k, **options)
        return SearchResults(found.total_scores[0], found.total_indices[0])

    def search_batch(self, queries: Any, k: int = 10, **options: Any) -> BatchedSearchResults:
        """Return scores and row numbers of the rows nearest to each query, ``[q, k]``; -1 where there are fewer."""
        found = self.index.search(queries, k, **options)
        return BatchedSearchResults(found.distances, found.ids)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Copy the index into the new directory `file`."""
        self.index.save_to(file)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Self:
        """Open the index in the directory `file`."""
        return cls(ZoomIndex.open(file))

    # Formats of a data set copy it with its indexes: copies open the same directory.
    def __reduce__(self) -> tuple[Any, ...]:
        return ZoomDatasetIndex.load, (self.index.path,)


def add_zoom_index(
    dataset: Dataset, column: str, *, path: str | os.PathLike[str], index_name: str | None = None, **options: Any
) -> ZoomDatasetIndex:
    """Build an index of a column of vectors and attach it to the data set.

    Parameters
    ----------
    dataset
        A data set of rows that can be counted.
    column
        A column of lists of numbers, all of the same length. It is read by blocks.
    path
        A directory that does not exist yet. The index stays there: :func:`load_zoom_index` attaches it again.
    index_name
        The name that searches give; by default that of the column.
    **options
        Of :meth:`memhier.ann.ZoomIndex.build`: ``metric``, ``dram``, ``attributes`` and so on, but for ``ids``.

    Returns
    -------
    ZoomDatasetIndex
        The index; ``dataset.get_index(index_name)`` returns it, too.

    Raises
    ------
    ValueError, TypeError
        When the data set has no such column, or the column or an option is not as it should be.
    FileExistsError
        When `path` holds anything already.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"dataset={type(dataset).__name__}: expected a Dataset; ZoomIndex.build(path, dataset[column]) indexes the "
            f"column of an iterable one, and a DatasetDict holds a Dataset for each split"
        )
    if column not in dataset.column_names:
        raise ValueError(f"column={column!r}: expected one of {', '.join(dataset.column_names)}")
    if "ids" in options:
        raise TypeError("ids=: the numbers of the rows are the ids")
    ZoomIndex.build(path, dataset[column], **options).close()
    return load_zoom_index(dataset, column if index_name is None else index_name, path)


def load_zoom_index(dataset: Dataset, index_name: str, path: str | os.PathLike[str]) -> ZoomDatasetIndex:
    """Open the index at `path` and attach it to the data set under a name.

    Raises
    ------
    ValueError
        When the index has another number of vectors than the data set has rows.
    FileNotFoundError, FormatError
        When there is no index at `path`.
    """
    made = ZoomDatasetIndex.load(path)
    if len(made.index) != len(dataset):
        made.index.close()
        raise ValueError(
            f"path={os.fspath(path)!r}: an index of {len(made.index)} vectors, expected one for each of "
            f"{len(dataset)} rows"
        )
    # The library offers no call to attach an index of another class.
    vars(dataset)["_indexes"][index_name] = made
    return made
