"""ZoomIndex as an algorithm of VIBE (github.com/vector-index-bench/vibe), the benchmark of embeddings.

Copy this folder to ``vibe/algorithms/memhier`` and run the suite's ``run.py --algorithm memhier`` in an image that
has memhier; ``config.yml`` beside this file names parameters and recalls. Its sets have the form of ann-benchmarks'.
"""

from typing import Any

import numpy.typing as npt

from memhier.benchmarks.suites.ann_benchmarks.module import MemhierZoom

__all__ = ["MemhierVibe"]

_METRICS = {"cosine": "angular", "normalized": "angular", "ip": "ip", "euclidean": "euclidean"}


class MemhierVibe(MemhierZoom):
    """The methods of the suite's ``BaseANN``, and that of sets whose queries are unlike the vectors.

    Raises
    ------
    ValueError
        For another metric.
    """

    def __init__(self, metric: str, parameters: dict[str, Any] | None = None) -> None:
        if metric not in _METRICS:
            raise ValueError(f"metric={metric!r}: expected one of {', '.join(_METRICS)}")
        super().__init__(_METRICS[metric], parameters)

    def fit_ood(self, X_train: npt.NDArray[Any], X_learn: npt.NDArray[Any], X_learn_neighbors: object) -> None:
        """Build an index of `X_train` ``[n, d]``, and calibrate it for queries like `X_learn` ``[q, d]``."""
        self.fit(X_train)
        self.built().tune(X_learn[:1000])
