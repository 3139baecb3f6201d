"""Nearest neighbours for scikit-learn, from an index on SSD (extra ``sklearn``).

Examples
--------
>>> import numpy as np
>>> from sklearn.neighbors import KNeighborsClassifier
>>> from sklearn.pipeline import make_pipeline
>>> from memhier.ann.sklearn import ZoomTransformer
>>> random = np.random.default_rng(0)
>>> X, y = random.normal(size=(200, 8)), random.integers(0, 2, 200)
>>> model = make_pipeline(ZoomTransformer(n_neighbors=5), KNeighborsClassifier(5, metric="precomputed"))
>>> model.fit(X, y).predict(X[:3]).shape
(3,)
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom import ZoomIndex
from memhier.ann.zoom.preview.space import Metric
from memhier.arguments import check_int, check_number
from memhier.lazy import extra_for

with extra_for(__name__):
    from scipy.sparse import csr_matrix
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["ZoomNeighbors", "ZoomTransformer"]

_METRICS: dict[str, Metric] = {"euclidean": "l2", "sqeuclidean": "l2", "cosine": "cosine"}
_BLOCK = 4096  # queries at a time


class ZoomNeighbors(BaseEstimator):
    """Nearest neighbours of samples that outgrow DRAM, with the methods of ``sklearn.neighbors.NearestNeighbors``.

    Samples are stored as float32, or as float16 if they come so, and distances are float64 rounded from float32.

    Parameters
    ----------
    n_neighbors, radius
        Defaults of :meth:`kneighbors` and :meth:`radius_neighbors`.
    metric
        ``"euclidean"``, ``"sqeuclidean"`` or ``"cosine"``.
    recall
        The mean share of the true neighbours to find; see :meth:`memhier.ann.ZoomIndex.search`.
    dram
        The DRAM that the index may hold, as bytes or text.
    path
        A directory for the index, which stays; another fit of the same estimator replaces it. With None the index lies
        in a temporary directory (``TMPDIR`` names a place for it) that goes with the estimator. A pickle then holds the
        whole index, otherwise the path.
    seed
        Of the build: equal samples and seed give an equal index.

    Attributes
    ----------
    index_
        The :class:`memhier.ann.ZoomIndex`; ids are the numbers of the samples.
    n_samples_fit_, n_features_in_
        Shape of the samples.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.sklearn import ZoomNeighbors
    >>> X = np.random.default_rng(0).normal(size=(200, 8))
    >>> distances, indices = ZoomNeighbors(n_neighbors=3).fit(X).kneighbors(X[:2])
    >>> indices[:, 0]
    array([0, 1])
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        radius: float = 1.0,
        *,
        metric: str = "euclidean",
        recall: float = 0.99,
        dram: int | str = "64MiB",
        path: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.radius = radius
        self.metric = metric
        self.recall = recall
        self.dram = dram
        self.path = path
        self.seed = seed

    def fit(self, X: Any, y: Any = None) -> Self:
        """Index samples ``[n, d]``; `y` is ignored.

        Raises
        ------
        ValueError, TypeError
            When samples or parameters are not as they should be.
        FileExistsError
            When `path` holds an index of another estimator.
        """
        if self.metric not in _METRICS:
            raise ValueError(f"metric={self.metric!r}: expected one of {', '.join(_METRICS)}")
        X = validate_data(self, X, dtype=[np.float32, np.float64, np.float16])
        if self.path is not None and Path(self.path).absolute() == getattr(self, "_directory", None):
            self.index_.close()
            shutil.rmtree(self._directory)
        directory = Path(tempfile.mkdtemp(prefix="memhier-")) if self.path is None else Path(self.path).absolute()
        place = directory / "index" if self.path is None else directory
        try:
            options: dict[str, Any] = {"metric": _METRICS[self.metric], "dram": self.dram, "seed": self.seed}
            ZoomIndex.build(place, X, **options).close()
        except BaseException:
            if self.path is None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self._open(directory, temporary=self.path is None)
        self.n_samples_fit_: int = len(X)
        return self

    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """Return the nearest samples of each query, nearest first.

        Parameters
        ----------
        X
            Queries ``[q, d]``; with None the samples themselves, of which none is its own neighbour.
        n_neighbors
            How many; by default the estimator's.
        return_distance
            Whether to return distances, too.

        Returns
        -------
        tuple of numpy.ndarray, or numpy.ndarray
            Distances, float64 ``[q, n_neighbors]``, and numbers of samples, int64 of the same shape; or these alone.
        """
        check_is_fitted(self)
        own = X is None
        k = check_int("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors, 1)
        if k > self.n_samples_fit_ - own:
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, n_samples_fit = "
                f"{self.n_samples_fit_}, n_samples = {self.n_samples_fit_ if own else len(X)}"
            )
        parts = []
        for first, queries in self._queries(X):
            found = self.index_.search(queries, k + own, recall=self.recall)
            ids, distances = found.ids, found.distances
            if own:
                others = ids != np.arange(first, first + len(ids))[:, None]
                others[others.all(axis=1), -1] = False  # among as many copies of it
                ids, distances = ids[others].reshape(-1, k), distances[others].reshape(-1, k)
            parts.append((self._scaled(distances), ids))
        distances = np.concatenate([part[0] for part in parts])
        ids = np.concatenate([part[1] for part in parts])
        return (distances, ids) if return_distance else ids

    def radius_neighbors(
        self, X: Any = None, radius: float | None = None, return_distance: bool = True, sort_results: bool = False
    ) -> Any:
        """Return all samples within a radius of each query.

        Parameters
        ----------
        X, return_distance
            As in :meth:`kneighbors`.
        radius
            The largest distance; by default the estimator's.
        sort_results
            Taken for the sake of other estimators: results are sorted in any case, the nearest first.

        Returns
        -------
        tuple of numpy.ndarray, or numpy.ndarray
            Distances and numbers of samples, arrays of ``[q]`` arrays; or the numbers alone.
        """
        distances, ids, offsets = self._within(X, radius)
        cuts = offsets[1:-1]
        return (_ragged(distances, cuts), _ragged(ids, cuts)) if return_distance else _ragged(ids, cuts)

    def kneighbors_graph(self, X: Any = None, n_neighbors: int | None = None, mode: str = "connectivity") -> csr_matrix:
        """Return the graph of :meth:`kneighbors`, CSR ``[q, n_samples_fit_]``, each row nearest first.

        Parameters
        ----------
        X, n_neighbors
            As in :meth:`kneighbors`.
        mode
            ``"connectivity"`` gives ones, ``"distance"`` distances.
        """
        _check_mode(mode)
        distances, ids = self.kneighbors(X, n_neighbors)
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
        return self._graph(distances.reshape(-1), ids.reshape(-1), offsets, mode)

    def radius_neighbors_graph(
        self, X: Any = None, radius: float | None = None, mode: str = "connectivity", sort_results: bool = False
    ) -> csr_matrix:
        """Return the graph of :meth:`radius_neighbors`, CSR ``[q, n_samples_fit_]``, each row nearest first.

        Parameters
        ----------
        X, radius, sort_results
            As in :meth:`radius_neighbors`.
        mode
            As in :meth:`kneighbors_graph`.
        """
        _check_mode(mode)
        return self._graph(*self._within(X, radius), mode)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if state.pop("index_", None) is not None and state.pop("_temporary"):
            state["_files"] = {
                str(file.relative_to(self._directory)): file.read_bytes()
                for file in sorted(self._directory.rglob("*"))
                if file.is_file()
            }
            del state["_directory"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("_files", None)
        super().__setstate__(state)
        if files is not None:
            directory = Path(tempfile.mkdtemp(prefix="memhier-"))
            for name, content in files.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content)
            self._open(directory, temporary=True)
        elif "_directory" in state:
            self._open(self._directory, temporary=False)

    def _open(self, directory: Path, *, temporary: bool) -> None:
        self.index_: ZoomIndex = ZoomIndex.open(directory / "index" if temporary else directory)
        self._directory, self._temporary = directory, temporary
        if temporary:
            weakref.finalize(self.index_, _remove, directory, os.getpid())

    def _queries(self, X: Any) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield blocks of queries, with the number of the first; with None the samples, read from SSD."""
        if X is None:
            for first in range(0, self.n_samples_fit_, _BLOCK):
                yield first, self.index_.reconstruct(np.arange(first, min(first + _BLOCK, self.n_samples_fit_)))
            return
        queries = validate_data(self, X, dtype=[np.float32, np.float64, np.float16], reset=False)
        for first in range(0, len(queries), _BLOCK):
            yield first, queries[first : first + _BLOCK]

    def _within(self, X: Any, radius: float | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return distances, numbers, and the offsets of each query in them."""
        check_is_fitted(self)
        reach = check_number("radius", self.radius if radius is None else radius, 0)
        distances, ids, counts = [], [], []
        for first, queries in self._queries(X):
            found = self.index_.range_search(
                queries, reach**2 if self.metric == "euclidean" else reach, recall=self.recall
            )
            rows = np.repeat(np.arange(len(queries)), np.diff(found.offsets))
            kept = np.ones(len(rows), np.bool_) if X is not None else found.ids != rows + first
            distances.append(self._scaled(found.distances[kept]))
            ids.append(found.ids[kept])
            counts.append(np.bincount(rows[kept], minlength=len(queries)))
        return np.concatenate(distances), np.concatenate(ids), np.concatenate([[0], np.cumsum(np.concatenate(counts))])

    def _scaled(self, distances: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        made = np.maximum(distances, 0, dtype=np.float64)
        return np.sqrt(made) if self.metric == "euclidean" else made

    def _graph(
        self, distances: npt.NDArray[Any], ids: npt.NDArray[Any], offsets: npt.NDArray[Any], mode: str
    ) -> csr_matrix:
        values = np.ones(len(ids)) if mode == "connectivity" else distances
        return csr_matrix((values, ids, offsets), shape=(len(offsets) - 1, self.n_samples_fit_))


class ZoomTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ZoomNeighbors):
    """A graph of nearest neighbours for other estimators, as ``sklearn.neighbors.KNeighborsTransformer`` makes it.

    It stands before an estimator that takes a precomputed sparse graph: neighbours, TSNE, Isomap, DBSCAN.

    Parameters
    ----------
    mode
        ``"distance"``: distances of ``n_neighbors + 1`` samples, the nearest first, which for a sample of the fit is
        itself at 0. ``"connectivity"``: ones for `n_neighbors`, itself among them.
    n_neighbors, metric, recall, dram, path, seed
        As in :class:`ZoomNeighbors`.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.sklearn import ZoomTransformer
    >>> X = np.random.default_rng(0).normal(size=(200, 8))
    >>> ZoomTransformer(n_neighbors=5).fit_transform(X).nnz
    1200
    """

    def __init__(
        self,
        *,
        mode: str = "distance",
        n_neighbors: int = 5,
        metric: str = "euclidean",
        recall: float = 0.99,
        dram: int | str = "64MiB",
        path: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(n_neighbors, metric=metric, recall=recall, dram=dram, path=path, seed=seed)
        self.mode = mode

    def fit(self, X: Any, y: Any = None) -> Self:
        """Index samples ``[n, d]``; `y` is ignored. Errors as in :meth:`ZoomNeighbors.fit`."""
        _check_mode(self.mode)
        super().fit(X)
        self._n_features_out = self.n_samples_fit_
        return self

    def transform(self, X: Any) -> csr_matrix:
        """Return the graph of queries ``[q, d]``, CSR ``[q, n_samples_fit_]``."""
        check_is_fitted(self)
        return self.kneighbors_graph(X, self.n_neighbors + (self.mode == "distance"), self.mode)

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> csr_matrix:
        """Index samples and return their graph, with each sample as its own neighbour."""
        return self.fit(X).transform(X)


def _check_mode(mode: str) -> None:
    if mode not in ("connectivity", "distance"):
        raise ValueError(f"mode={mode!r}: expected connectivity or distance")


def _ragged(values: npt.NDArray[Any], cuts: npt.NDArray[Any]) -> npt.NDArray[np.object_]:
    pieces = np.split(values, cuts)
    made = np.empty(len(pieces), np.object_)
    made[:] = pieces
    return made


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process lets go of its copy only
        shutil.rmtree(directory, ignore_errors=True)
