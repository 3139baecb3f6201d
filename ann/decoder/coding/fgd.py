"""FGD as published (arXiv 1806.04189): a small-world graph over transformed embeddings, and a softmax over K.

It is the reference for the decoder, and serves layers without known contexts.
"""

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.answers import best_of
from memhier.ann.decoder.coding.transform import transform_contexts, transform_rows
from memhier.ann.decoder.layer import Floats, as_floats, check_hidden, check_layer
from memhier.ann.threads import one_thread
from memhier.arguments import check_int

__all__ = ["FGD", "FGDAnswer"]


@dataclass(frozen=True, slots=True)
class FGDAnswer:
    """The words found, and a softmax over them.

    Attributes
    ----------
    values, indices
        float32 and int64 ``[n, k]``: exact logits, largest first.
    probabilities
        float64 ``[n, k]``: softmax over the k.
    bound
        float64 ``[n]``: the largest error of a probability, as a share of it, provided that the words found are the k
        largest: all other words then weigh at most ``(V - k) exp(smallest logit found)``.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.decoder import FGD
    >>> weight = np.eye(8, dtype="float32")
    >>> answer = FGD(weight).topk(5 * weight[3], k=2)
    >>> answer.values.tolist(), answer.probabilities.round(3).tolist(), answer.bound.round(3).tolist()
    ([[5.0, 0.0]], [[0.993, 0.007]], [0.039])
    """

    values: Floats
    indices: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    bound: npt.NDArray[np.float64]


class FGD:
    """A small-world graph (HNSW, of faiss) over the transformed embeddings of an output layer.

    Parameters
    ----------
    weight, bias, dtype
        As for :meth:`LogitIndex.build`.
    m, ef_construction
        Links of a row on each level, and the list length of the search for them.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.decoder import FGD
    >>> weight = np.eye(8, dtype="float32")
    >>> found = FGD(weight).topk(weight[3], k=2, ef_search=8)
    >>> int(found.indices[0, 0])
    3
    """

    def __init__(
        self,
        weight: npt.NDArray[Any],
        bias: npt.ArrayLike | None = None,
        *,
        dtype: str | None = None,
        m: int = 16,
        ef_construction: int = 200,
    ) -> None:
        self._layer = check_layer(weight, bias, dtype)
        m = check_int("m", m, 2, 512, "links")
        ef_construction = check_int("ef_construction", ef_construction, 1, 2**20)
        rows = transform_rows(as_floats(self._layer.weight, self._layer.dtype), self._layer.bias)
        self._index = faiss.IndexHNSWFlat(rows.shape[1], m)
        self._index.hnsw.efConstruction = ef_construction
        with one_thread():  # several would link rows in a random order
            self._index.add(rows)

    def topk(self, hidden: npt.ArrayLike, k: int, *, ef_search: int = 100) -> FGDAnswer:
        """Walk the graph for each hidden state and return exact logits of the k words found.

        Parameters
        ----------
        hidden
            ``[n, D]``, or ``[D]`` for one.
        k
            How many words to return, 1 to V.
        ef_search
            List length of the walk.
        """
        states = check_hidden("hidden", hidden, self._layer.shape[1])
        if not np.isfinite(states).all():
            raise ValueError("hidden holds NaN or infinity: expected finite numbers")
        words = self._layer.shape[0]
        k = check_int("k", k, 1, words, "words")
        parameters = faiss.SearchParametersHNSW(efSearch=max(k, check_int("ef_search", ef_search, 1, 2**20)))
        with one_thread():
            _, rows = self._index.search(transform_contexts(states), k, params=parameters)
        logits = self._layer.logits_of(states, rows)
        best = best_of(np.where(rows >= 0, logits, -np.inf).astype(np.float32), rows.astype(np.int64), k)
        away = np.exp(best.values.astype(np.float64) - best.values[:, :1])
        found = away.sum(1)
        left_out = (words - k) * away[:, -1]
        return FGDAnswer(best.values, best.indices, away / found[:, None], left_out / (found + left_out))

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides the layer, in bytes: transformed rows and links."""
        links = 4 * self._index.hnsw.neighbors.size() + 12 * self._index.ntotal
        return int(self._index.ntotal * self._index.d * 4 + links)
