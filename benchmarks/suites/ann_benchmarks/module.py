"""ZoomIndex as an algorithm of ann-benchmarks (github.com/erikbern/ann-benchmarks).

Copy this folder to ``ann_benchmarks/algorithms/memhier`` and run ``python run.py --algorithm memhier --local`` where
memhier is installed; ``config.yml`` beside this file names parameters and recalls. The index lies in ``TMPDIR``, which
has to be on the SSD to be measured.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.suites.adapter import SuiteAdapter

__all__ = ["MemhierZoom"]


class MemhierZoom(SuiteAdapter):
    """The methods of the suite's ``BaseANN``: one query at a time, or all in a batch."""

    def __init__(self, metric: str, parameters: dict[str, Any] | None = None) -> None:
        super().__init__(metric, parameters)
        self._folder: Path | None = None
        self._batch: list[npt.NDArray[np.int64]] = []

    def fit(self, X: npt.NDArray[Any]) -> None:
        """Build an index of `X` ``[n, d]`` in a temporary folder, with row numbers as ids."""
        self.done()
        self._folder = Path(tempfile.mkdtemp(prefix="memhier-"))
        self._index = ZoomIndex.build(self._folder / "index", X, **self._parameters)

    def query(self, q: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
        """Return the ids of at most `n` neighbours of one vector."""
        ids = self.search(q, min(n, len(self.built())))
        # The suite refuses an id that comes twice, and -1 stands for none.
        return ids[ids >= 0]

    def batch_query(self, X: npt.NDArray[Any], n: int) -> None:
        """Search for all of `X` ``[q, d]`` in one call."""
        found = self.search(X, min(n, len(self.built())))
        self._batch = [ids[ids >= 0] for ids in found]

    def get_batch_results(self) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each query of the last batch."""
        return self._batch

    def done(self) -> None:
        """Close and remove the index."""
        super().done()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
