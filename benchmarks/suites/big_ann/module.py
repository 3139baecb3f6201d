"""ZoomIndex as an algorithm of big-ann-benchmarks (github.com/harsha-simhadri/big-ann-benchmarks), track T2: on SSD.

With memhier installed, put the entries of ``algos.yaml`` beside this file into the suite's own and run
``python run.py --algorithm memhier-zoom --dataset bigann-10M --nodocker``. The index lies below ``data/indices/T2``.
"""

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.suites.adapter import SuiteAdapter
from memhier.errors import MemhierError

__all__ = ["MemhierZoom"]

_BLOCK_ROWS = 65_536


class MemhierZoom(SuiteAdapter):
    """The methods of the suite's ``BaseANN``: all queries in one call, of nearest neighbours or within a radius."""

    res: Any

    def track(self) -> str:
        """Return the track of indexes on SSD."""
        return "T2"

    def fit(self, dataset: str) -> None:
        """Build an index of the suite's data set of this name, read in blocks, and leave it open."""
        source = _data_set(dataset)
        place = self._place(dataset)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.done()
        blocks = source.get_dataset_iterator(bs=_BLOCK_ROWS)
        self._index = ZoomIndex.build(place, blocks, **self._parameters, **self._fields(source))

    def _fields(self, source: Any) -> dict[str, Any]:
        """Return arguments of a build that come from the data set beside its vectors."""
        return {}

    def load_index(self, dataset: str) -> bool:
        """Open the index that `fit` made with the same parameters; return whether there is one."""
        self.done()
        try:
            self._index = ZoomIndex.open(self._place(dataset))
        except (FileNotFoundError, MemhierError):
            # A build that was killed counts as none: the next one takes it over.
            return False
        return True

    def index_files_to_store(self, dataset: str) -> tuple[str, str, list[str]]:
        """Return the index's folder, no prefix, and its files, for the upload."""
        place = self._place(dataset)
        files = [str(file.relative_to(place)) for file in sorted(place.rglob("*")) if file.is_file()]
        return str(place), "", files

    def query(self, X: npt.NDArray[Any], k: int) -> None:
        """Search for the `k` nearest of all of `X` ``[q, d]``."""
        self.res = self.search(X, k)

    def range_query(self, X: npt.NDArray[Any], radius: float) -> None:
        """Search for all vectors within `radius`, a squared distance as in the suite's data set of this kind."""
        found = self.built().range_search(X, radius, recall=self._effort.get("recall"))
        self.count_reads(found.stats)
        self.res = found.offsets, found.distances, found.ids

    def get_results(self) -> npt.NDArray[np.int64]:
        """Return ids ``[q, k]`` of the last call of `query`."""
        ids: npt.NDArray[np.int64] = self.res
        return ids

    def get_range_results(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return where each query's results begin, their distances and their ids."""
        found: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]] = self.res
        return found

    def _place(self, dataset: str) -> Path:
        """Return where an index of this data set with these parameters lies."""
        made_by = hashlib.sha256(json.dumps(self._parameters, sort_keys=True).encode()).hexdigest()[:10]
        return Path(
            "data", "indices", self.track(), "memhier-zoom", _data_set(dataset).short_name(), made_by
        ).absolute()


def _data_set(name: str) -> Any:
    """Return the suite's own description of a data set; only the suite has its module."""
    return import_module("benchmark.datasets").DATASETS[name]()
