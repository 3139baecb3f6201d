"""The methods that both suites call, on a :class:`memhier.ann.ZoomIndex`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex

__all__ = ["SuiteAdapter"]

_METRICS = {"euclidean": "l2", "angular": "cosine", "ip": "ip"}


class SuiteAdapter:
    """An index with the methods of a suite's ``BaseANN`` that do not depend on the source of its vectors.

    Parameters
    ----------
    metric
        ``"euclidean"``, ``"angular"`` or ``"ip"``, as the suites call them.
    parameters
        Arguments of :meth:`memhier.ann.ZoomIndex.build`, such as ``{"dram": "128MiB"}``.

    Raises
    ------
    ValueError
        For another metric.
    """

    def __init__(self, metric: str, parameters: dict[str, Any] | None = None) -> None:
        if metric not in _METRICS:
            raise ValueError(f"metric={metric!r}: expected one of {', '.join(_METRICS)}")
        self._parameters = {"metric": _METRICS[metric]} | (parameters or {})
        self._index: ZoomIndex | None = None
        self._effort: dict[str, Any] = {}
        self._asked = self._pages = 0
        self.name = f"memhier-zoom({self._parameters})"

    def set_query_arguments(self, *arguments: Any) -> None:
        """Search with a recall, with lists and candidates, or with arguments of `search` by name in a dict."""
        if len(arguments) == 1 and isinstance(arguments[0], dict):
            self._effort = dict(arguments[0])
        elif len(arguments) == 1:
            self._effort = {"recall": arguments[0]}
        elif len(arguments) == 2:
            self._effort = dict(zip(("nprobe", "candidates"), arguments, strict=True))
        else:
            raise ValueError(f"arguments={arguments}: expected a recall, or nprobe and candidates, or a dict")
        self._asked = self._pages = 0
        self.name = f"memhier-zoom({self._parameters}, {self._effort})"

    def search(self, queries: npt.ArrayLike, k: int) -> npt.NDArray[np.int64]:
        """Return ids ``[q, k]``, or ``[k]`` of one query."""
        effort = self._effort
        if "candidates" in effort:
            effort = effort | {"candidates": max(k, effort["candidates"])}
        found = self.built().search(queries, k, **effort)
        self.count_reads(found.stats)
        return found.ids

    def count_reads(self, stats: dict[str, Any]) -> None:
        """Add queries and pages of one call to those of this effort."""
        self._asked += int(stats["queries"])
        self._pages += int(stats["pages"])

    def built(self) -> ZoomIndex:
        """Return the index, which `fit` has to have made."""
        if self._index is None:
            raise RuntimeError("there is no index yet: call fit first")
        return self._index

    def get_memory_usage(self) -> float:
        """Return the DRAM that the index holds, in KiB; 0 before there is one."""
        return 0.0 if self._index is None else self._index.memory_bytes / 1024

    def get_additional(self) -> dict[str, float]:
        """Return the figure that the suites plot beside recall: pages of 4 KiB read from SSD for each query."""
        return {"mean_ssd_ios": self._pages / self._asked} if self._asked else {}

    def done(self) -> None:
        """Close the index."""
        if self._index is not None:
            self._index.close()
            self._index = None

    def __str__(self) -> str:
        return self.name
