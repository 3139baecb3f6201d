"""The engine of a layer in DRAM: one call of the core for each batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.decoder.allowed import Allowed
from memhier.ann.decoder.answers import Partition, TopK, joined, largest_of, split
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.engine.draws import DrawRequest, draw_by_core
from memhier.ann.decoder.engine.engine import ALL_DIRECTIONS, Coarse, Completion, Walk
from memhier.ann.decoder.engine.envelope import AS_IS, DRAWS_MOST, Envelope, Shape, ask_core
from memhier.ann.decoder.layer import (
    BIAS_ROUNDING,
    DTYPES,
    LOGITS_MOST,
    ROUNDING,
    Floats,
    Ints,
    OutputLayer,
    check_finite,
    norm_rounding,
)

__all__ = ["DramEngine"]

_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)  # a cold call finds these sooner than their types
_CALLS_KEPT = 16  # calls at a time that find their workspaces made


class DramEngine:
    """Answers from a layer in DRAM; see :class:`memhier.ann.decoder.engine.Engine` for its methods."""

    def __init__(self, codes: Codes, layer: OutputLayer) -> None:
        self.layer: OutputLayer
        self.codes: Codes
        self.codes, self.layer = codes, layer
        halves = layer.dtype == "float16" and backend.core is not None
        weight = layer.weight.view(np.uint16) if halves else layer.weight
        self._core = codes.core((weight, DTYPES.index(layer.dtype), layer.bias, codes.norms))
        self._per_norm, self._variance = norm_rounding(layer.shape[1]), codes.variance
        self._per_logit = ROUNDING[layer.dtype] + BIAS_ROUNDING

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: nothing in it changes."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[Codes, OutputLayer]]:
        """Pickle codes and layer; the core is made again from them."""
        return type(self), (self.codes, replace(self.layer, owned=True))

    @property
    def memory_bytes(self) -> int:
        layer = self.layer
        own = layer.weight.nbytes + layer.bias.nbytes if layer.owned else 0
        return self.codes.memory_bytes + self._core.workspace_bytes + own

    def keep(self, candidates: int) -> int:
        """Keep the workspaces of 16 calls at a time, of so many candidates each; return the bytes of all."""
        return self._core.keep(calls=_CALLS_KEPT, candidates=candidates, draws=DRAWS_MOST)

    def preview(
        self, hidden: Floats, k: int, limit: int, coarse: Coarse = ALL_DIRECTIONS, allowed: Allowed | None = None
    ) -> TopK:
        values, indices = _room(len(hidden), k)
        bad = self._core.preview(
            hidden=hidden, limit=limit, coarse=coarse, values=values, indices=indices, allowed=_bits(allowed)
        )
        _check(bad, hidden)
        return TopK(values, indices)

    def candidates(self, hidden: Floats, limit: int, coarse: Coarse = ALL_DIRECTIONS) -> Ints:
        """Return the rows of the `limit` largest estimates, int64 ``[n, limit]``, the largest first."""
        rows, keys = np.empty((len(hidden), limit), np.int64), np.empty((len(hidden), limit, 2), np.float32)
        left = np.empty(len(hidden), np.float32)
        _check(self._core.candidates(hidden=hidden, coarse=coarse, rows=rows, keys=keys, left=left), hidden)
        return rows

    def certify(self, hidden: Floats, k: int, limit: int, allowed: Allowed | None = None) -> TopK:
        """Rank exactly, in descending order of upper bounds, until no row left can be among the k largest."""
        values, indices = _room(len(hidden), k)
        proven = np.empty(len(hidden), np.uint8)
        bad = self._core.preview(
            hidden=hidden, limit=limit, coarse=ALL_DIRECTIONS, values=values, indices=indices,
            rounding=(self._per_norm, self._per_logit), proven=proven, allowed=_bits(allowed),
        )  # fmt: skip
        _check(bad, hidden)
        return TopK(values, indices, proven.view(np.bool_))

    def prove(self, hidden: Floats, k: int, logits: Floats) -> TopK:
        """Return the k largest of all logits, proven where no rounding can bring another word among them."""
        values, indices = _room(len(hidden), k)
        proven = np.empty(len(hidden), np.uint8)
        bad = self._core.prove(
            hidden=hidden, logits=logits, rounding=(self._per_norm, self._per_logit), values=values, indices=indices,
            proven=proven,
        )  # fmt: skip
        _check(bad, hidden)
        return TopK(values, indices, proven.view(np.bool_))

    def partition(
        self, hidden: Floats, k: int, limit: int, *, inverse: float = 1.0, interval: bool = True,
        allowed: Allowed | None = None,
    ) -> tuple[TopK, Partition]:  # fmt: skip
        found = np.empty((len(hidden), 3))
        values, indices = _room(len(hidden), k)
        bad = self._core.preview(
            hidden=hidden, limit=limit, coarse=ALL_DIRECTIONS, values=values, indices=indices,
            rounding=(self._per_norm, BIAS_ROUNDING), partition=found, interval=interval, inverse=inverse,
            variance=self._variance, allowed=_bits(allowed),
        )  # fmt: skip
        _check(bad, hidden)
        return TopK(values, indices), Partition(found[:, 0], found[:, 1], found[:, 2])

    def envelope(self, hidden: Floats, limit: int, shape: Shape = AS_IS, out: Ints | None = None) -> Envelope:
        bad, found = ask_core(self._core, hidden, limit, shape, out)
        _check(bad, hidden)
        return found

    def draw(self, hidden: Floats, request: DrawRequest) -> tuple[Ints, npt.NDArray[np.bool_]]:
        bad, words, stays = draw_by_core(self._core, hidden, request)
        _check(bad, hidden)
        return words, stays

    def walk(
        self, hidden: Floats, k: int, walk: Walk, allowed: Allowed | None = None, *,
        complete: Completion | None = None, away: Floats | None = None, looked: Ints | None = None,
    ) -> TopK:  # fmt: skip
        """Walk the graph from the seeds of the nearest groups.

        Parameters
        ----------
        away, looked
            Arrays to fill: the squared distance of each state, float32 ``[n]``, and the rows that its walk estimated,
            int64 ``[n]``.
        """
        values, indices = _room(len(hidden), k)
        near, radius, far, far_radius = walk
        bad = self._core.walk(
            hidden=hidden, near=near, radius=radius, far=far, far_radius=far_radius, values=values, indices=indices,
            distances=away, tally=looked, allowed=None if allowed is None else allowed.bits,
        )  # fmt: skip
        if bad == -1:
            return TopK(values, indices)
        _check(bad, hidden)
        found = TopK(values, indices)
        return found if complete is None else complete(hidden, k, allowed, found)

    def listed(self, hidden: Floats, k: int, allowed: Allowed, *, prove: bool = False) -> TopK:
        values, indices = _room(len(hidden), k)
        proven = np.empty(len(hidden), np.uint8) if prove else None
        bad = self._core.listed(
            hidden=hidden, allowed=allowed.bits, values=values, indices=indices,
            rounding=(self._per_norm, self._per_logit), proven=proven,
        )  # fmt: skip
        _check(bad, hidden)
        return TopK(values, indices, None if proven is None else proven.view(np.bool_))

    def full(self, hidden: Floats, k: int) -> TopK:
        """Compute the full product of so many states at a time that their logits stay few."""
        return joined([largest_of(self.all_logits(part), k) for part in self._parts(hidden)])

    def full_proven(self, hidden: Floats, k: int) -> TopK:
        """Do the same, and prove as many answers as :meth:`prove` can."""
        return joined([self.prove(part, k, self.all_logits(part)) for part in self._parts(hidden)])

    def _parts(self, hidden: Floats) -> list[Floats]:
        return split(hidden, max(1, LOGITS_MOST // self.layer.shape[0]))

    def all_logits(self, hidden: Floats) -> Floats:
        check_finite(hidden)
        return self.layer.logits(hidden)

    def logit_blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        check_finite(hidden)
        for start, rows in self.layer.blocks():
            yield start, hidden @ rows.T + self.layer.bias[start : start + len(rows)]

    def logits_of(self, hidden: Floats, rows: Ints) -> Floats:
        return self.layer.logits_of(hidden, rows)

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def _check(bad: int, hidden: Floats) -> None:
    if bad >= 0:
        check_finite(hidden[: bad + 1])


def _bits(allowed: Allowed | None) -> npt.NDArray[np.uint64] | None:
    return None if allowed is None else allowed.bits


def _room(count: int, k: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    return np.empty((count, k), _FLOAT32), np.empty((count, k), _INT64)
