"""The engine of a layer whose rows lie on SSD: the core scans codes, and one submission reads the candidates' rows."""

from collections.abc import Iterator
from typing import Any, Never, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.allowed import Allowed, split_with
from memhier.ann.decoder.answers import Partition, TopK, best_of, joined, largest_of, split
from memhier.ann.decoder.coding.tail import ExactLogits, close_sums
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.engine.draws import DrawRequest, draw_in_rounds
from memhier.ann.decoder.engine.engine import ALL_DIRECTIONS, Coarse, Completion, Walk
from memhier.ann.decoder.engine.envelope import AS_IS, DRAWS_MOST, Envelope, Shape, ask_core
from memhier.ann.decoder.engine.stored_rows import StoredRows
from memhier.ann.decoder.layer import BIAS_ROUNDING, ROUNDING, Floats, Ints, check_finite, least_error, logit_error

__all__ = ["StoredEngine"]

_PASS_STATES = 256  # answered in one pass over all rows
_DRAW_ROWS = 2048  # candidates that take as many bytes as the logits and rows that the longest draw keeps


class StoredEngine:
    """Answers from rows on SSD; see :class:`memhier.ann.decoder.engine.Engine` for its methods.

    It cuts a batch in parts if the batch's candidates take more DRAM than the rows' scratch.
    """

    def __init__(self, codes: Codes, rows: StoredRows) -> None:
        self.rows: StoredRows
        self.codes: Codes
        self.codes, self.rows = codes, rows
        self._core = codes.core(None)
        self._per_logit = ROUNDING[rows.dtype] + BIAS_ROUNDING

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: nothing in it changes."""
        return self

    def __reduce__(self) -> Never:
        """Refuse: files cannot be pickled."""
        raise TypeError("an index whose rows lie on SSD cannot be pickled: open its directory where it is needed")

    @property
    def layer(self) -> None:
        return None

    @property
    def memory_bytes(self) -> int:
        return self.codes.memory_bytes + self._core.workspace_bytes + self.rows.memory_bytes

    def keep(self, candidates: int) -> int:
        """Keep the workspace of one call at a time, of so many candidates; return its bytes."""
        return self._core.keep(calls=1, candidates=candidates, draws=DRAWS_MOST)

    def preview(
        self, hidden: Floats, k: int, limit: int, coarse: Coarse = ALL_DIRECTIONS, allowed: Allowed | None = None
    ) -> TopK:
        return joined([self._previewed(*part, k, limit, coarse) for part in self._parts(hidden, allowed, limit)])

    def certify(self, hidden: Floats, k: int, limit: int, allowed: Allowed | None = None) -> TopK:
        """Rank the `limit` highest bounds exactly; proven is an answer that no other row can reach."""
        return joined([self._certified(*part, k, limit) for part in self._parts(hidden, allowed, limit)])

    def partition(
        self, hidden: Floats, k: int, limit: int, *, inverse: float = 1.0, interval: bool = True,
        allowed: Allowed | None = None,
    ) -> tuple[TopK, Partition]:  # fmt: skip
        found = [self._partitioned(*part, k, limit, inverse) for part in self._parts(hidden, allowed, limit)]
        return joined([top for top, _ in found]), joined([z for _, z in found])

    def envelope(self, hidden: Floats, limit: int, shape: Shape = AS_IS, out: Ints | None = None) -> Envelope:
        bad, found = ask_core(self._core, hidden, limit, shape, out)
        if bad >= 0:
            check_finite(hidden[: bad + 1])
        found.logits[:] = self._logits(hidden, found.rows)
        return found

    def draw(self, hidden: Floats, request: DrawRequest) -> tuple[Ints, npt.NDArray[np.bool_]]:
        check_finite(hidden)
        words, stays = np.empty(len(hidden), np.int64), np.empty(len(hidden), np.bool_)
        step = self.rows.states_at_once(2 * _DRAW_ROWS)
        for start in range(0, len(hidden), step):
            part = np.arange(start, min(len(hidden), start + step))
            words[part], stays[part] = draw_in_rounds(self._core, hidden[part], request.of(part), self._logits)
        return words, stays

    def walk(
        self, hidden: Floats, k: int, walk: Walk, allowed: Allowed | None = None, *, complete: Completion | None = None
    ) -> TopK:
        """Walk the graph over the codes and rank the rows that it found exactly."""
        wanted = max(walk.near.limit, walk.far.limit)
        found = joined([self._walked(*part, k, wanted, walk) for part in self._parts(hidden, allowed, wanted)])
        if complete is None or (found.indices[:, -1] >= 0).all():
            return found
        return complete(hidden, k, allowed, found)

    def listed(self, hidden: Floats, k: int, allowed: Allowed, *, prove: bool = False) -> TopK:
        """Read the allowed rows, each once for a part of the batch, and compute their logits."""
        check_finite(hidden)
        parts = self._parts(hidden, allowed, max(k, int(allowed.counts.max())))
        found = joined([self._listed(part, k, words) for part, words in parts if words is not None])
        return found if prove else TopK(found.values, found.indices)

    def full(self, hidden: Floats, k: int) -> TopK:
        """Compute the full product, in one pass over the rows for 256 states."""
        return joined([self._largest(part, k) for part in split(hidden, _PASS_STATES)])

    def all_logits(self, hidden: Floats) -> Floats:
        out = np.empty((len(hidden), len(self.codes.norms)), np.float32)
        for start, logits in self.logit_blocks(hidden):
            out[:, start : start + logits.shape[1]] = logits
        return out

    def logit_blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        check_finite(hidden)
        return self.rows.blocks(hidden)

    def logits_of(self, hidden: Floats, rows: Ints) -> Floats:
        return self.rows.logits(hidden, rows)

    def stats(self) -> dict[str, Any]:
        return self.rows.stats()

    def close(self) -> None:
        self.rows.close()

    def _logits(self, hidden: Floats, rows: Ints) -> Floats:
        logits = np.empty(rows.shape, np.float32)
        step = self.rows.states_at_once(2 * rows.shape[1])
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            logits[part] = self.rows.logits(hidden[part], rows[part])
        return logits

    def _previewed(self, hidden: Floats, allowed: Allowed | None, k: int, limit: int, coarse: Coarse) -> TopK:
        rows, _, _ = self._candidates(hidden, allowed, limit, coarse)
        return best_of(self.rows.logits(hidden, rows), rows, k)

    def _certified(self, hidden: Floats, allowed: Allowed | None, k: int, limit: int) -> TopK:
        rows, _, left = self._candidates(hidden, allowed, limit, bounds=True)
        return self._proven(hidden, rows, left, k)

    def _listed(self, hidden: Floats, k: int, allowed: Allowed) -> TopK:
        candidates = np.full((len(hidden), max(k, int(allowed.counts.max()))), -1)
        for row, count, own in zip(allowed.mask(), allowed.counts, candidates, strict=False):
            own[:count] = np.flatnonzero(row)
        if allowed.shared:
            candidates[1:] = candidates[0]
        return self._proven(hidden, candidates, np.full(len(hidden), -np.inf, np.float32), k)

    def _proven(self, hidden: Floats, rows: Ints, left: Floats, k: int) -> TopK:
        """Rank candidates exactly; proven are the k largest if no row left out has a key above `left`."""
        logits = self.rows.logits(hidden, rows)
        order = np.lexsort((rows, -logits), axis=1)
        rows, logits = np.take_along_axis(rows, order, 1), np.take_along_axis(logits, order, 1)
        error = logit_error(hidden, rows, logits, self.codes.norms, self._per_logit)
        error += least_error(self.rows.dtype, hidden.shape[1])
        least = logits[:, k - 1] - error[:, k - 1]
        # Fewer than k rows are all there are.
        proven = (rows[:, k - 1] < 0) | ((left < least) & (logits[:, k:] + error[:, k:] < least[:, None]).all(1))
        return TopK(logits[:, :k].copy(), rows[:, :k].copy(), proven)

    def _partitioned(
        self, hidden: Floats, allowed: Allowed | None, k: int, limit: int, inverse: float
    ) -> tuple[TopK, Partition]:
        sums = np.empty((len(hidden), 4))
        rows, keys, _ = self._candidates(hidden, allowed, limit, sums=sums, inverse=inverse)
        logits = self.rows.logits(hidden, rows)
        error = logit_error(hidden, rows, logits, self.codes.norms)
        exact = ExactLogits(rows, keys[:, :, 1], logits, error)
        counts = np.array([len(self.codes.norms)]) if allowed is None else allowed.counts
        return best_of(logits, rows, k), close_sums(self.codes, hidden, exact, sums, inverse, counts)

    def _walked(self, hidden: Floats, allowed: Allowed | None, k: int, wanted: int, walk: Walk) -> TopK:
        near, radius, far, far_radius = walk
        values, indices = np.empty((len(hidden), wanted), np.float32), np.empty((len(hidden), wanted), np.int64)
        bad = self._core.walk(
            hidden=hidden, near=near, radius=radius, far=far, far_radius=far_radius, values=values, indices=indices,
            allowed=None if allowed is None else allowed.bits,
        )  # fmt: skip
        if bad >= 0:
            check_finite(hidden[: bad + 1])
        return best_of(self.rows.logits(hidden, indices), indices, k)

    def _largest(self, hidden: Floats, k: int) -> TopK:
        """Select the largest of one block of rows after the other, or of all rows at once if they are many of these."""
        if 4 * k > len(self.codes.norms):
            return largest_of(self.all_logits(hidden), k)
        best = TopK(np.empty((len(hidden), 0), np.float32), np.empty((len(hidden), 0), np.int64))
        for start, logits in self.logit_blocks(hidden):
            block = largest_of(logits, min(k, logits.shape[1]))
            values, indices = np.hstack([best.values, block.values]), np.hstack([best.indices, block.indices + start])
            best = best_of(values, indices, k)
        return best

    def _candidates(
        self, hidden: Floats, allowed: Allowed | None, limit: int, coarse: Coarse = ALL_DIRECTIONS, *,
        bounds: bool = False, sums: npt.NDArray[np.float64] | None = None, inverse: float = 1.0,
    ) -> tuple[Ints, Floats, Floats]:  # fmt: skip
        """Return the rows of the `limit` largest keys, their keys and estimates, and the largest key left out.

        Parameters
        ----------
        bounds
            Whether keys are upper bounds; estimates otherwise.
        sums, inverse
            float64 ``[n, 4]`` to fill, as in :func:`close_sums`, of logits times `inverse`.
        """
        count = len(hidden)
        rows, keys = np.empty((count, limit), np.int64), np.empty((count, limit, 2), np.float32)
        left = np.empty(count, np.float32)
        bad = self._core.candidates(
            hidden=hidden, coarse=coarse, rows=rows, keys=keys, left=left, bounds=bounds, sums=sums, inverse=inverse,
            variance=self.codes.variance, allowed=None if allowed is None else allowed.bits,
        )  # fmt: skip
        if bad >= 0:
            check_finite(hidden[: bad + 1])
        return rows, keys, left

    def _parts(self, hidden: Floats, allowed: Allowed | None, candidates: int) -> list[tuple[Floats, Allowed | None]]:
        return split_with(hidden, allowed, self.rows.states_at_once(candidates))
