"""The rows of a layer on SSD."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.engine.engine import CERTIFY_LIMIT
from memhier.ann.decoder.layer import Floats, Ints, as_floats
from memhier.io.reader import Reader
from memhier.rows.rows import Rows
from memhier.store.store import Store

__all__ = ["StoredRows"]

_BLOCK_BYTES = 32 << 20
_SCRATCH_MOST = 128 << 20  # bytes; more would not make a pass over rows faster
_ROWS_LEAST = 64  # read at a time
_CANDIDATE_COST, _LOGIT_COST = 128, 64  # bytes of all arrays of them, for each


class StoredRows:
    """The layer's rows on SSD.

    Parameters
    ----------
    store
        Open; closed with this.
    dtype
        Dtype of the rows' elements.
    bias
        float32 ``[V]``, in DRAM.

    Notes
    -----
    Rows in use, and arrays of candidates, take a scratch of DRAM; :meth:`limit_scratch` bounds it.
    """

    def __init__(self, store: Store, dtype: str, bias: Floats) -> None:
        self.bias: Floats
        self.dtype: str
        self.dtype, self.bias, self._store = dtype, bias, store
        self._reader = Reader()
        self._rows = Rows(store, "weight", self._reader)
        self._carrier = np.dtype("<f4" if dtype == "float32" else "<f2" if dtype == "float16" else "<u2")
        self._scratch = _SCRATCH_MOST

    def logits(self, hidden: Floats, candidates: Ints) -> Floats:
        """Return the logits of ``candidates [n, c]``, minus infinity for -1.

        It reads each row once: all rows in one submission, or in several if they take more than the scratch.
        """
        present = candidates >= 0
        wanted, places = np.unique(candidates[present], return_inverse=True)
        logits, ends = np.full(candidates.shape, -np.inf, np.float32), present.sum(1).cumsum()
        step = max(1, self._scratch // 2 // self._row_cost)
        for start in range(0, len(wanted), step):
            some = wanted[start : start + step]
            rows, bias = self._floats(self._rows.read(some)), self.bias[some]
            # State by state: the rows of all states side by side would take many times the rows read.
            for state, found, here, places_of in zip(
                hidden, logits, present, np.split(places - start, ends[:-1]), strict=True
            ):
                inside = (places_of >= 0) & (places_of < len(some))
                which = places_of[inside]
                found[np.flatnonzero(here)[inside]] = rows[which] @ state + bias[which]
        return logits

    def limit_scratch(self, most: int) -> None:
        """Keep the scratch within so many bytes, at least :attr:`scratch_least`."""
        self._scratch = min(_SCRATCH_MOST, most)

    def states_at_once(self, candidates: int) -> int:
        """Return the number of states whose arrays of so many candidates fit the scratch."""
        return max(1, self._scratch // 2 // (_CANDIDATE_COST * candidates))

    def blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield the logits of all rows, ``[n, b]``, in blocks, each with the number of its first row: one pass."""
        words, each = len(self._rows), max(self._row_cost, _LOGIT_COST * len(hidden))
        step = max(1, self._scratch // 2 // each)
        for start in range(0, words, step):
            stop = min(words, start + step)
            yield start, hidden @ self._floats(self._rows.read_range(start, stop)).T + self.bias[start:stop]

    def load(self) -> npt.NDArray[Any]:
        """Return all rows as an array in DRAM, ``[V, D]``."""
        rows = np.empty((len(self._rows), self._rows.row_bytes), np.uint8)
        step = max(1, _BLOCK_BYTES // self._rows.row_bytes)
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            self._rows.read_range(start, start + len(block), block)
        return rows.view(self._carrier)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and elements of each."""
        return len(self._rows), int(self._rows.row_bytes) // self._carrier.itemsize

    @property
    def rows_bytes(self) -> int:
        """DRAM that all rows would take, in bytes."""
        return int(self._rows.row_bytes) * len(self._rows)

    @property
    def planned_bytes(self) -> int:
        """DRAM held after calls from one thread at a time, without the scratch, in bytes."""
        return self.bias.nbytes + self._store.memory_bytes + self._reader.planned_bytes

    @property
    def scratch_least(self) -> int:
        """The least scratch, in bytes: for some rows, or the candidates of one proof."""
        return 2 * max(_ROWS_LEAST * self._row_cost, _CANDIDATE_COST * CERTIFY_LIMIT)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the reader since open."""
        return self._reader.stats()

    def close(self) -> None:
        """Release the files."""
        self._reader.close()
        self._store.close()

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: biases, checksums of pages, the reader's buffers."""
        return self.bias.nbytes + self._store.memory_bytes + self._reader.memory_bytes

    @property
    def _row_cost(self) -> int:
        """DRAM of a row in use, in bytes: the row as read, as floats, and a copy of the floats."""
        dimension = int(self._rows.row_bytes) // self._carrier.itemsize
        return dimension * (8 if self.dtype == "float32" else 10)

    def _floats(self, rows: npt.NDArray[np.uint8]) -> Floats:
        return as_floats(rows.view(self._carrier), self.dtype)
