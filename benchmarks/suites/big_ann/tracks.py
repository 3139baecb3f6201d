"""ZoomIndex in the tracks of NeurIPS 2023 of big-ann-benchmarks: filters by tags, queries of their own, and streams.

Run the suite with ``--neurips23track filter``, ``ood`` or ``streaming`` as it describes; ``algos.yaml`` beside this
file has the entries.
"""

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.suites.adapter import SuiteAdapter
from memhier.benchmarks.suites.big_ann.module import MemhierZoom

__all__ = ["MemhierFilter", "MemhierOod", "MemhierStreaming"]


class MemhierOod(MemhierZoom):
    """The track of queries that are unlike the vectors. It learns from no query."""

    def track(self) -> str:
        """Return the track's name."""
        return "ood"


class MemhierFilter(MemhierZoom):
    """The track of filters: each query asks for vectors that have all of its tags."""

    def track(self) -> str:
        """Return the track's name."""
        return "filter"

    def _fields(self, source: Any) -> dict[str, Any]:
        return {"attributes": {"tags": [tags.tolist() for tags in _rows(source.get_dataset_metadata())]}}

    def filtered_query(self, X: npt.NDArray[Any], filter: Any, k: int) -> None:
        """Search for the `k` nearest of each of `X` ``[q, d]`` among the vectors with all tags of a row of `filter`.

        Parameters
        ----------
        filter
            A sparse matrix of compressed rows, ``[q, tags]``.
        """
        index, rows = self.built(), _rows(filter)
        filters = [f"tags contains all ({', '.join(map(str, tags.tolist()))})" if len(tags) else None for tags in rows]
        searches = int(index.stats()["searches"])

        def nearest(some: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            found = index.search(X[some], k, where=[filters[number] for number in some], **self._effort)
            self.count_reads(found.stats)
            return found.ids

        with ThreadPoolExecutor(searches) as pool:
            parts = pool.map(nearest, np.array_split(np.arange(len(X)), searches))
            self.res = np.concatenate([*parts])


def _rows(matrix: Any) -> list[npt.NDArray[Any]]:
    """Return the columns that each row of a sparse matrix names."""
    return np.split(matrix.indices, matrix.indptr[1:-1]) if len(matrix.indptr) > 1 else []


class MemhierStreaming(SuiteAdapter):
    """The track of streams: vectors come, go and are replaced by the steps of a runbook, each in a commit."""

    def __init__(self, metric: str, parameters: dict[str, Any] | None = None) -> None:
        super().__init__(metric, parameters)
        self._folder: Path | None = None
        self.res: Any = None

    def track(self) -> str:
        """Return the track's name."""
        return "streaming"

    def setup(self, dtype: Any, max_pts: int, ndims: int) -> None:
        """Begin an index without vectors, for up to `max_pts` of `ndims` dimensions, in a temporary folder."""
        self.done()
        self._folder = Path(tempfile.mkdtemp(prefix="memhier-"))
        nothing = np.empty((0, ndims), dtype)
        ZoomIndex.build(self._folder / "index", nothing, grow_to=max_pts, **self._parameters).close()
        self._index = ZoomIndex.open(self._folder / "index", writable=True)

    def insert(self, X: npt.NDArray[Any], ids: npt.NDArray[np.uint32]) -> None:
        """Add vectors ``[n, d]``."""
        self.built().add(X, ids=ids.astype(np.int64))
        self.built().commit()

    def delete(self, ids: npt.NDArray[np.uint32]) -> None:
        """Remove vectors."""
        self.built().remove(ids.astype(np.int64))
        self.built().commit()

    def replace(self, X: npt.NDArray[Any], ids: npt.NDArray[np.uint32]) -> None:
        """Put vectors ``[n, d]`` in the places of others."""
        self.built().update(ids.astype(np.int64), vectors=X)
        self.built().commit()

    def query(self, X: npt.NDArray[Any], k: int) -> None:
        """Search for the `k` nearest of all of `X` ``[q, d]``."""
        self.res = self.search(X, k)

    def get_results(self) -> npt.NDArray[np.int64]:
        """Return ids ``[q, k]`` of the last call of `query`."""
        ids: npt.NDArray[np.int64] = self.res
        return ids

    def done(self) -> None:
        """Close and remove the index."""
        super().done()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
